"""Horovod's module name for the operations of its PyTorch front end: names of :mod:`shoal.compat.horovod`."""

import typing as _typing

from .. import horovod as _package
from . import *  # noqa: F403 - its names, which __all__ selects from

_IN_OTHER_MODULES = {
    *("Compression", "DistributedOptimizer", "ReduceOp", "SyncBatchNorm", "allgather_object", "broadcast_object"),
    *("broadcast_optimizer_state", "broadcast_parameters"),
}
if not _typing.TYPE_CHECKING:
    __all__ = sorted(set(_package.__all__) - _IN_OTHER_MODULES)
