"""Rules in the place of the weighted average, for neighbours that are faulty or malicious (Byzantine).

They are the argument ``robust=`` of :func:`shoal.neighbor_allreduce` and of :class:`shoal.DecentralizedOptimizer`, and
that of :meth:`shoal.algorithms.Mix.robust`; ``docs/byzantine.md`` compares them.
"""

from ._lazy_import import public_names as _public_names
from .ops.robust import ClippedGossip as ClippedGossip
from .ops.robust import ClippedSum as ClippedSum
from .ops.robust import CoordinateMedian as CoordinateMedian
from .ops.robust import FiniteOnly as FiniteOnly
from .ops.robust import NearestNeighbours as NearestNeighbours
from .ops.robust import Robust as Robust
from .ops.robust import TrimmedMean as TrimmedMean

__all__ = _public_names(globals())
