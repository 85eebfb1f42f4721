"""Shoal: decentralized training on PyTorch. Agents average with a few neighbours instead of with everybody.

``__all__`` is Shoal's own vocabulary. The attributes beside it are BlueFog's names for the same things, as in
:mod:`shoal.bluefog`; ``docs/bluefog.md`` says which stands for which.
"""

from . import algorithms as algorithms
from . import compression as compression
from . import data as data
from . import optim as optim
from . import topology as topology
from . import topology_util as topology_util
from . import windows as windows
from ._version import __version__ as __version__
from .data import AgentSampler as AgentSampler
from .data import dirichlet_shards as dirichlet_shards
from .engine.events import Event as Event
from .engine.operation import Handle as Handle
from .errors import DeadlineExceeded as DeadlineExceeded
from .errors import Mismatch as Mismatch
from .errors import NotFinite as NotFinite
from .errors import NotInitialized as NotInitialized
from .errors import PeerLost as PeerLost
from .errors import ShoalError as ShoalError
from .monitor.timeline import timeline_context as timeline_context
from .monitor.timeline import timeline_end_activity as timeline_end_activity
from .monitor.timeline import timeline_start_activity as timeline_start_activity
from .ops.alltoall import neighbor_alltoall as neighbor_alltoall
from .ops.collective import allgather as allgather
from .ops.collective import allgather_nonblocking as allgather_nonblocking
from .ops.collective import allreduce as allreduce
from .ops.collective import allreduce_ as allreduce_
from .ops.collective import allreduce_nonblocking as allreduce_nonblocking
from .ops.collective import allreduce_nonblocking_ as allreduce_nonblocking_
from .ops.collective import barrier as barrier
from .ops.collective import broadcast as broadcast
from .ops.collective import broadcast_ as broadcast_
from .ops.collective import broadcast_nonblocking as broadcast_nonblocking
from .ops.collective import broadcast_nonblocking_ as broadcast_nonblocking_
from .ops.grouped import grouped_allgather as grouped_allgather
from .ops.grouped import grouped_allgather_nonblocking as grouped_allgather_nonblocking
from .ops.grouped import grouped_allreduce as grouped_allreduce
from .ops.grouped import grouped_allreduce_nonblocking as grouped_allreduce_nonblocking
from .ops.grouped import grouped_broadcast as grouped_broadcast
from .ops.grouped import grouped_broadcast_nonblocking as grouped_broadcast_nonblocking
from .ops.grouped import grouped_neighbor_allreduce as grouped_neighbor_allreduce
from .ops.grouped import grouped_neighbor_allreduce_nonblocking as grouped_neighbor_allreduce_nonblocking
from .ops.handles import poll as poll
from .ops.handles import synchronize as synchronize
from .ops.handles import wait as wait
from .ops.hierarchical import hierarchical_neighbor_allreduce as hierarchical_neighbor_allreduce
from .ops.hierarchical import (
    hierarchical_neighbor_allreduce_nonblocking as hierarchical_neighbor_allreduce_nonblocking,
)
from .ops.neighbor import neighbor_allreduce as neighbor_allreduce
from .ops.neighbor import neighbor_allreduce_nonblocking as neighbor_allreduce_nonblocking
from .ops.neighbor import pair_gossip as pair_gossip
from .ops.neighbor import pair_gossip_nonblocking as pair_gossip_nonblocking
from .ops.neighbor_allgather import neighbor_allgather as neighbor_allgather
from .ops.neighbor_allgather import neighbor_allgather_nonblocking as neighbor_allgather_nonblocking
from .ops.objects import InferDestinationFromSourceRanks as InferDestinationFromSourceRanks
from .ops.objects import InferSourceFromDestinationRanks as InferSourceFromDestinationRanks
from .ops.objects import allreduce_parameters as allreduce_parameters
from .ops.objects import broadcast_object as broadcast_object
from .ops.objects import broadcast_optimizer_state as broadcast_optimizer_state
from .ops.objects import broadcast_parameters as broadcast_parameters
from .ops.robust import ClippedGossip as ClippedGossip
from .ops.robust import FiniteOnly as FiniteOnly
from .ops.robust import TrimmedMean as TrimmedMean
from .optim import AccumAdamW as AccumAdamW
from .optim import Checkpoint as Checkpoint
from .optim import CommunicationType as CommunicationType
from .optim import DecentralizedOptimizer as DecentralizedOptimizer
from .optim import DistributedAdaptThenCombineOptimizer as DistributedAdaptThenCombineOptimizer
from .optim import DistributedAdaptWithCombineOptimizer as DistributedAdaptWithCombineOptimizer
from .optim import DistributedADPSGDOptimizer as DistributedADPSGDOptimizer
from .optim import DistributedAllreduceOptimizer as DistributedAllreduceOptimizer
from .optim import DistributedGradientAllreduceOptimizer as DistributedGradientAllreduceOptimizer
from .optim import (
    DistributedHierarchicalNeighborAllreduceOptimizer as DistributedHierarchicalNeighborAllreduceOptimizer,
)
from .optim import DistributedNeighborAllreduceOptimizer as DistributedNeighborAllreduceOptimizer
from .optim import DistributedPullGetOptimizer as DistributedPullGetOptimizer
from .optim import DistributedPushSumOptimizer as DistributedPushSumOptimizer
from .optim import DistributedWinPutOptimizer as DistributedWinPutOptimizer
from .optim import Metric as Metric
from .optim import Metrics as Metrics
from .optim import OneBitAdam as OneBitAdam
from .optim import Warmup as Warmup
from .optim import consensus as consensus
from .optim import consensus_distance as consensus_distance
from .optim import metrics as metrics
from .topology import ExponentialGraph as ExponentialGraph
from .topology import ExponentialTwoGraph as ExponentialTwoGraph
from .topology import FullyConnectedGraph as FullyConnectedGraph
from .topology import GetDynamicOnePeerSendRecvRanks as GetDynamicOnePeerSendRecvRanks
from .topology import GetExp2DynamicSendRecvMachineRanks as GetExp2DynamicSendRecvMachineRanks
from .topology import GetInnerOuterExpo2DynamicSendRecvRanks as GetInnerOuterExpo2DynamicSendRecvRanks
from .topology import GetInnerOuterRingDynamicSendRecvRanks as GetInnerOuterRingDynamicSendRecvRanks
from .topology import GetRecvWeights as GetRecvWeights
from .topology import GetSendWeights as GetSendWeights
from .topology import IsRegularGraph as IsRegularGraph
from .topology import IsTopologyEquivalent as IsTopologyEquivalent
from .topology import MeshGrid2DGraph as MeshGrid2DGraph
from .topology import Mixing as Mixing
from .topology import RingGraph as RingGraph
from .topology import StarGraph as StarGraph
from .topology import SymmetricExponentialGraph as SymmetricExponentialGraph
from .windows import SlotState as SlotState
from .windows.by_name import get_current_created_window_names as get_current_created_window_names
from .windows.by_name import get_win_version as get_win_version
from .windows.by_name import neighbor_win_accumulate as neighbor_win_accumulate
from .windows.by_name import neighbor_win_accumulate_nonblocking as neighbor_win_accumulate_nonblocking
from .windows.by_name import neighbor_win_get as neighbor_win_get
from .windows.by_name import neighbor_win_get_nonblocking as neighbor_win_get_nonblocking
from .windows.by_name import neighbor_win_put as neighbor_win_put
from .windows.by_name import neighbor_win_put_nonblocking as neighbor_win_put_nonblocking
from .windows.by_name import turn_off_win_ops_with_associated_p as turn_off_win_ops_with_associated_p
from .windows.by_name import turn_on_win_ops_with_associated_p as turn_on_win_ops_with_associated_p
from .windows.by_name import win_accumulate as win_accumulate
from .windows.by_name import win_accumulate_nonblocking as win_accumulate_nonblocking
from .windows.by_name import win_associated_p as win_associated_p
from .windows.by_name import win_create as win_create
from .windows.by_name import win_free as win_free
from .windows.by_name import win_get as win_get
from .windows.by_name import win_get_nonblocking as win_get_nonblocking
from .windows.by_name import win_mutex as win_mutex
from .windows.by_name import win_poll as win_poll
from .windows.by_name import win_put as win_put
from .windows.by_name import win_put_nonblocking as win_put_nonblocking
from .windows.by_name import win_slots as win_slots
from .windows.by_name import win_update as win_update
from .windows.by_name import win_update_then_collect as win_update_then_collect
from .windows.by_name import win_wait as win_wait
from .world.agent import bind as bind
from .world.bootstrap import init as init
from .world.bootstrap import shutdown as shutdown
from .world.fleet import Fleet as Fleet
from .world.identity import alive as alive
from .world.identity import bytes_sent as bytes_sent
from .world.identity import empty as empty
from .world.identity import events as events
from .world.identity import in_neighbor_machine_ranks as in_neighbor_machine_ranks
from .world.identity import in_neighbor_ranks as in_neighbor_ranks
from .world.identity import is_entering as is_entering
from .world.identity import is_homogeneous as is_homogeneous
from .world.identity import is_initialized as is_initialized
from .world.identity import is_machine_topo_weighted as is_machine_topo_weighted
from .world.identity import is_topo_weighted as is_topo_weighted
from .world.identity import load_machine_topology as load_machine_topology
from .world.identity import load_topology as load_topology
from .world.identity import local_rank as local_rank
from .world.identity import local_size as local_size
from .world.identity import machine_rank as machine_rank
from .world.identity import machine_size as machine_size
from .world.identity import membership as membership
from .world.identity import on_membership_change as on_membership_change
from .world.identity import out_neighbor_machine_ranks as out_neighbor_machine_ranks
from .world.identity import out_neighbor_ranks as out_neighbor_ranks
from .world.identity import rank as rank
from .world.identity import set_machine_topology as set_machine_topology
from .world.identity import set_topology as set_topology
from .world.identity import size as size

__all__ = [
    "AccumAdamW",
    "AgentSampler",
    "Checkpoint",
    "ClippedGossip",
    "CommunicationType",
    "DeadlineExceeded",
    "DecentralizedOptimizer",
    "DistributedADPSGDOptimizer",
    "Event",
    "FiniteOnly",
    "Fleet",
    "Handle",
    "InferDestinationFromSourceRanks",
    "InferSourceFromDestinationRanks",
    "Metric",
    "Metrics",
    "Mismatch",
    "Mixing",
    "NotFinite",
    "NotInitialized",
    "OneBitAdam",
    "PeerLost",
    "ShoalError",
    "SlotState",
    "TrimmedMean",
    "Warmup",
    "algorithms",
    "alive",
    "allgather",
    "allgather_nonblocking",
    "allreduce",
    "allreduce_",
    "allreduce_nonblocking",
    "allreduce_nonblocking_",
    "allreduce_parameters",
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
    "dirichlet_shards",
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
