"""What is computed where tensors are: sums and reductions that read each number once and write it once.

Each is there twice, as a program in Triton and as operations of torch in the same order, and takes the first where it
can (:func:`way_of`; :func:`why_not_triton` says why not). See docs/kernels.md for what was seen to
give the same bits, and how.
"""

from .choice import Way as Way
from .choice import way_of as way_of
from .choice import why_not_triton as why_not_triton
