"""What is computed where tensors are: sums, steps and messages that read each number once and write it once.

Each kernel is there twice, as a program in Triton and as operations of torch in the same order, and takes the first
where it can (:func:`way_of`; :func:`why_not_triton` says why not). See docs/kernels.md for what has been seen to give
the same bits, and how.
"""

from .choice import Way as Way
from .choice import way_of as way_of
from .choice import why_not_triton as why_not_triton
from .reduce import reduce as reduce
from .steps import adamw_step as adamw_step
from .steps import sgd_step as sgd_step
from .weighted_sum import weighted_sum as weighted_sum
