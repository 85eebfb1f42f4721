"""Shoal: decentralized training on PyTorch. Agents average with a few neighbours instead of with all.

Operations that return a handle are in :mod:`shoal.nonblocking`, graphs in :mod:`shoal.topology`, other optimizers in
:mod:`shoal.optim`, windows in :mod:`shoal.windows`, events, counters and timelines in :mod:`shoal.observability`, and
BlueFog's names in :mod:`shoal.bluefog`; ``docs/bluefog.md`` maps them.

The names are in ``_public.py``, which is imported with all of its dependencies at the first use of a name, because the
command line is a part of this package and needs no torch.
"""

# ruff: noqa: F405 - the names of __all__ come with the star
import typing as _typing

from ._lazy_import import names_of as _names_of
from ._version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from ._public import *  # noqa: F403 - as checkers and editors see them
else:
    __getattr__, __dir__ = _names_of(globals(), "_public", ("compat.horovod", "compat.bagua", "sim"))

__all__ = [
    "Checkpoint",
    "DeadlineExceeded",
    "DecentralizedOptimizer",
    "Fleet",
    "Handle",
    "Mismatch",
    "NotFinite",
    "NotInitialized",
    "PeerLost",
    "ShoalError",
    "algorithms",
    "alive",
    "allgather",
    "allreduce",
    "autograd",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "compression",
    "consensus",
    "consensus_distance",
    "data",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_broadcast",
    "grouped_neighbor_allreduce",
    "in_neighbor_ranks",
    "init",
    "is_initialized",
    "load_topology",
    "local_rank",
    "local_size",
    "metrics",
    "neighbor_allgather",
    "neighbor_allreduce",
    "neighbor_alltoall",
    "nonblocking",
    "on_membership_change",
    "optim",
    "out_neighbor_ranks",
    "pair_gossip",
    "rank",
    "robust",
    "save",
    "set_topology",
    "shutdown",
    "size",
    "topology",
    "windows",
]
