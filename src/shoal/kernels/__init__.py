"""Sums, reductions and copies on the tensors' device, with one read and one write per element.

Each has up to three implementations with bitwise equal results: a Triton program, a compiled kernel for CPUs
(``native``), and torch operations in the same order. :func:`way_of` returns the one that is used. See docs/kernels.md.
"""

from .choice import Way as Way
from .choice import way_of as way_of
from .choice import why_not_triton as why_not_triton
