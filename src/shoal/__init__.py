"""Shoal: decentralized training on PyTorch. Agents average with a few neighbours instead of with all.

Graphs are in :mod:`shoal.topology`, other optimizers in :mod:`shoal.optim`, windows in :mod:`shoal.windows`, and all of
BlueFog's names in :mod:`shoal.bluefog`; ``docs/bluefog.md`` maps them.

The names are in ``_public.py``, which is imported with all of its dependencies at the first use of a name, because the
command line is a part of this package and needs no torch.
"""

# ruff: noqa: F405 - the names of __all__ come with the star
import typing as _typing

from ._lazy_import import names_of as _names_of
from ._version import __version__ as __version__

_MOVED = {
    "topology": """
        ExponentialGraph ExponentialTwoGraph FullyConnectedGraph GetDynamicOnePeerSendRecvRanks
        GetExp2DynamicSendRecvMachineRanks GetInnerOuterExpo2DynamicSendRecvRanks
        GetInnerOuterRingDynamicSendRecvRanks GetRecvWeights GetSendWeights IsRegularGraph IsTopologyEquivalent
        MeshGrid2DGraph Mixing RingGraph StarGraph SymmetricExponentialGraph
    """,
    "optim": """
        AccumAdamW DistributedADPSGDOptimizer DistributedAdaptThenCombineOptimizer
        DistributedAdaptWithCombineOptimizer DistributedAllreduceOptimizer DistributedGradientAllreduceOptimizer
        DistributedHierarchicalNeighborAllreduceOptimizer DistributedNeighborAllreduceOptimizer
        DistributedPullGetOptimizer DistributedPushSumOptimizer DistributedWinPutOptimizer OneBitAdam Warmup
    """,
    "bluefog": """
        InferDestinationFromSourceRanks InferSourceFromDestinationRanks get_current_created_window_names
        get_win_version neighbor_win_accumulate neighbor_win_accumulate_nonblocking neighbor_win_get
        neighbor_win_get_nonblocking neighbor_win_put neighbor_win_put_nonblocking
        turn_off_win_ops_with_associated_p turn_on_win_ops_with_associated_p win_accumulate
        win_accumulate_nonblocking win_associated_p win_create win_free win_get win_get_nonblocking win_mutex
        win_poll win_put win_put_nonblocking win_slots win_update win_update_then_collect win_wait
    """,
    "data": """
        dirichlet_shards
    """,
    "robust": """
        ClippedGossip FiniteOnly TrimmedMean
    """,
    "windows": """
        SlotState
    """,
}
"""Names that were here before, by the package where they are: they work, with a DeprecationWarning, until 0.2."""

if _typing.TYPE_CHECKING:
    from ._public import *  # noqa: F403 - as checkers and editors see them
else:
    __getattr__, __dir__ = _names_of(globals(), "_public", _MOVED)

__all__ = [
    "AgentSampler",
    "Checkpoint",
    "CommunicationType",
    "DeadlineExceeded",
    "DecentralizedOptimizer",
    "Event",
    "Fleet",
    "Handle",
    "Metric",
    "Metrics",
    "Mismatch",
    "NotFinite",
    "NotInitialized",
    "PeerLost",
    "ShoalError",
    "algorithms",
    "alive",
    "allgather",
    "allgather_nonblocking",
    "allreduce",
    "allreduce_",
    "allreduce_nonblocking",
    "allreduce_nonblocking_",
    "allreduce_parameters",
    "autograd",
    "barrier",
    "bind",
    "broadcast",
    "broadcast_",
    "broadcast_nonblocking",
    "broadcast_nonblocking_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "bytes_sent",
    "compression",
    "consensus",
    "consensus_distance",
    "data",
    "empty",
    "events",
    "grouped_allgather",
    "grouped_allgather_nonblocking",
    "grouped_allreduce",
    "grouped_allreduce_nonblocking",
    "grouped_broadcast",
    "grouped_broadcast_nonblocking",
    "grouped_neighbor_allreduce",
    "grouped_neighbor_allreduce_nonblocking",
    "hierarchical_neighbor_allreduce",
    "hierarchical_neighbor_allreduce_nonblocking",
    "in_neighbor_machine_ranks",
    "in_neighbor_ranks",
    "init",
    "is_entering",
    "is_homogeneous",
    "is_initialized",
    "is_machine_topo_weighted",
    "is_topo_weighted",
    "load_machine_topology",
    "load_topology",
    "local_rank",
    "local_size",
    "machine_rank",
    "machine_size",
    "membership",
    "metrics",
    "neighbor_allgather",
    "neighbor_allgather_nonblocking",
    "neighbor_allreduce",
    "neighbor_allreduce_nonblocking",
    "neighbor_alltoall",
    "on_membership_change",
    "optim",
    "out_neighbor_machine_ranks",
    "out_neighbor_ranks",
    "pair_gossip",
    "pair_gossip_nonblocking",
    "rank",
    "robust",
    "save",
    "set_machine_topology",
    "set_topology",
    "shutdown",
    "size",
    "timeline_context",
    "timeline_end_activity",
    "timeline_start_activity",
    "topology",
    "windows",
]
