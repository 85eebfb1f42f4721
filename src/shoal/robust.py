"""Rules in the place of the weighted average, for neighbours that are faulty or malicious (Byzantine).

They are the argument ``robust=`` of :func:`shoal.neighbor_allreduce` and of :class:`shoal.DecentralizedOptimizer`, and
that of :meth:`shoal.algorithms.Mix.robust`; ``docs/byzantine.md`` compares them.
"""

from ._lazy_import import public_names as _public_names
from .ops.robust_rules import ClippedGossip as ClippedGossip
from .ops.robust_rules import ClippedSum as ClippedSum
from .ops.robust_rules import CoordinateMedian as CoordinateMedian
from .ops.robust_rules import FiniteOnly as FiniteOnly
from .ops.robust_rules import NearestNeighbours as NearestNeighbours
from .ops.robust_rules import Robust as Robust
from .ops.robust_rules import TrimmedMean as TrimmedMean

__all__ = _public_names(globals())
