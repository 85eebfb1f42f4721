"""The kernels for CPUs, compiled when Shoal is installed: one pass over memory instead of torch's one for each term.

``library()`` loads them, once. They are called through ctypes, which releases the interpreter lock and needs no headers
of Python to compile: one build serves all versions of Python. :mod:`~shoal.kernels.native.build` compiles them.
"""

from __future__ import annotations

from .loading import library as library
from .loading import why_not_native as why_not_native
