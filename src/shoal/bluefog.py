"""BlueFog's interface: the public names of ``bluefog.torch``, so that a script of its users runs on Shoal.

    import shoal.bluefog as bf  # was: import bluefog.torch as bf

Many are also names of Shoal, or aliases of them, and some are only here; ``docs/bluefog.md`` has the list. The
optimizers average on the static topology by default, while :class:`shoal.DecentralizedOptimizer` averages with one peer
at a time.
"""

import functools
import typing
import weakref
from collections import abc

import networkx as nx
import torch

from . import topology_util as topology_util
from ._lazy_import import public_names as _public_names
from .algorithms.gradient_descent import GradientDescent as _GradientDescent
from .algorithms.gradient_descent import ParallelGradientDescent as _ParallelGradientDescent
from .execution.operation import poll as poll
from .execution.operation import synchronize as synchronize
from .execution.operation import wait as wait
from .observability.timeline import timeline_context as timeline_context
from .observability.timeline import timeline_end_activity as timeline_end_activity
from .observability.timeline import timeline_start_activity as timeline_start_activity
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
from .ops.gathering import neighbor_allgather as neighbor_allgather
from .ops.gathering import neighbor_allgather_nonblocking as neighbor_allgather_nonblocking
from .ops.hierarchical import hierarchical_neighbor_allreduce as hierarchical_neighbor_allreduce
from .ops.hierarchical import hierarchical_neighbor_allreduce_nonblocking as hierarchical_neighbor_allreduce_nonblocking
from .ops.neighbor import neighbor_allreduce as _neighbor_allreduce
from .ops.neighbor import neighbor_allreduce_nonblocking as _neighbor_allreduce_nonblocking
from .ops.neighbor import pair_gossip as pair_gossip
from .ops.neighbor import pair_gossip_nonblocking as pair_gossip_nonblocking
from .ops.objects import InferDestinationFromSourceRanks as InferDestinationFromSourceRanks
from .ops.objects import InferSourceFromDestinationRanks as InferSourceFromDestinationRanks
from .ops.objects import allreduce_parameters as allreduce_parameters
from .ops.objects import broadcast_optimizer_state as broadcast_optimizer_state
from .ops.objects import broadcast_parameters as broadcast_parameters
from .optim import CommunicationType as CommunicationType
from .optim import DecentralizedOptimizer as _DecentralizedOptimizer
from .optim import DistributedPullGetOptimizer as DistributedPullGetOptimizer
from .optim import DistributedPushSumOptimizer as DistributedPushSumOptimizer
from .optim import DistributedWinPutOptimizer as DistributedWinPutOptimizer
from .runtime.agent import current as _current
from .runtime.bootstrap import init as _init
from .runtime.bootstrap import shutdown as shutdown
from .runtime.queries import in_neighbor_machine_ranks as in_neighbor_machine_ranks
from .runtime.queries import in_neighbor_ranks as in_neighbor_ranks
from .runtime.queries import is_homogeneous as is_homogeneous
from .runtime.queries import is_initialized as _is_initialized
from .runtime.queries import is_machine_topo_weighted as is_machine_topo_weighted
from .runtime.queries import is_topo_weighted as is_topo_weighted
from .runtime.queries import load_machine_topology as load_machine_topology
from .runtime.queries import load_topology as load_topology
from .runtime.queries import local_rank as local_rank
from .runtime.queries import local_size as local_size
from .runtime.queries import machine_rank as machine_rank
from .runtime.queries import machine_size as machine_size
from .runtime.queries import out_neighbor_machine_ranks as out_neighbor_machine_ranks
from .runtime.queries import out_neighbor_ranks as out_neighbor_ranks
from .runtime.queries import rank as rank
from .runtime.queries import set_machine_topology as set_machine_topology
from .runtime.queries import set_topology as set_topology
from .runtime.queries import size as size
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
from .topology import RingGraph as RingGraph
from .topology import StarGraph as StarGraph
from .topology import SymmetricExponentialGraph as SymmetricExponentialGraph
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
from .windows.by_name import win_slots as win_slots  # Shoal's, in the manner of BlueFog's names
from .windows.by_name import win_update as win_update
from .windows.by_name import win_update_then_collect as win_update_then_collect
from .windows.by_name import win_wait as win_wait

_P = typing.ParamSpec("_P")
_T = typing.TypeVar("_T")


def init(
    topology_fn: abc.Callable[[int], nx.DiGraph] | None = None, is_weighted: bool = False, **options: typing.Any
) -> None:
    """:func:`shoal.init`; called again without a topology, it sets the exponential graph, as BlueFog's does.

    Args:
        topology_fn, is_weighted, options: As of :func:`shoal.init`, which keeps the topology in such a call.
    """
    again = _is_initialized()
    _init(topology_fn, is_weighted, **options)
    if again and topology_fn is None:
        set_topology()


_RENAMED = {"neighbor_weights": "src_weights", "send_neighbors": "dst_weights"}
"""Arguments of BlueFog before 0.3."""


def _names_renamed_arguments(function: abc.Callable[_P, _T]) -> abc.Callable[_P, _T]:
    """The same function; for an argument of BlueFog before 0.3 its error gives the argument's present name."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not _RENAMED.keys().isdisjoint(kwargs):
            old = next(name for name in kwargs if name in _RENAMED)
            raise TypeError(
                f"{function.__name__}: {old}= was renamed in BlueFog 0.3; give {_RENAMED[old]}=, with the same value"
            )
        return function(*args, **kwargs)

    return call


neighbor_allreduce = _names_renamed_arguments(_neighbor_allreduce)
neighbor_allreduce_nonblocking = _names_renamed_arguments(_neighbor_allreduce_nonblocking)


_Models: typing.TypeAlias = torch.nn.Module | abc.Sequence[torch.nn.Module]
_ATC, _AWC, _PARALLEL = _GradientDescent(1.0), _GradientDescent(1.0, atc=False), _ParallelGradientDescent(1.0)


def _on_static_topology(
    algorithm: _GradientDescent,
    optimizer: torch.optim.Optimizer,
    model: _Models,
    communication_type: CommunicationType,
    num_steps_per_communication: int,
    options: dict[str, typing.Any],
) -> _DecentralizedOptimizer:
    """An optimizer with BlueFog's default: the static topology, which is the exponential graph if none is set."""
    return _DecentralizedOptimizer(
        optimizer,
        model,
        algorithm,
        communication_type=communication_type,
        num_steps_per_communication=num_steps_per_communication,
        **{"topology": "static", **options},
    )


def DistributedAdaptThenCombineOptimizer(
    optimizer: torch.optim.Optimizer,
    model: _Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
    **options: typing.Any,
) -> _DecentralizedOptimizer:
    """Adapt, then combine: ``x+ = W (x - lr g(x))``, equation 23 of the BlueFog paper.

    ``options`` are those of :class:`~shoal.DecentralizedOptimizer`, here as in the functions below. ``topology`` is the
    static topology, if not given: the exponential graph, if none is set.
    """
    return _on_static_topology(_ATC, optimizer, model, communication_type, num_steps_per_communication, options)


def DistributedAdaptWithCombineOptimizer(
    optimizer: torch.optim.Optimizer,
    model: _Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
    **options: typing.Any,
) -> _DecentralizedOptimizer:
    """Adapt with combine: ``x+ = W x - lr g(x)``, equation 22; the exchange runs during forward and backward.

    The local step starts from W x, so weight decay applies to W x.
    """
    return _on_static_topology(_AWC, optimizer, model, communication_type, num_steps_per_communication, options)


def DistributedGradientAllreduceOptimizer(
    optimizer: torch.optim.Optimizer, model: _Models, num_steps_per_communication: int = 1, **options: typing.Any
) -> _DecentralizedOptimizer:
    """The mean of all agents' gradients, and then the local step: what data-parallel training does.

    The models must begin alike (:func:`~shoal.broadcast_parameters`). Every step averages, of however many passes.
    """
    options |= {"num_steps_per_communication": num_steps_per_communication}
    return _DecentralizedOptimizer(optimizer, model, _PARALLEL, **options)


def DistributedNeighborAllreduceOptimizer(
    optimizer: torch.optim.Optimizer, model: _Models, num_steps_per_communication: int = 1, **options: typing.Any
) -> _DecentralizedOptimizer:
    """Adapt with combine over the neighbours, under BlueFog's older name."""
    kind = CommunicationType.neighbor_allreduce
    return DistributedAdaptWithCombineOptimizer(optimizer, model, kind, num_steps_per_communication, **options)


def DistributedAllreduceOptimizer(
    optimizer: torch.optim.Optimizer, model: _Models, num_steps_per_communication: int = 1, **options: typing.Any
) -> _DecentralizedOptimizer:
    """Adapt with combine over all agents, under BlueFog's older name."""
    kind = CommunicationType.allreduce
    return DistributedAdaptWithCombineOptimizer(optimizer, model, kind, num_steps_per_communication, **options)


def DistributedHierarchicalNeighborAllreduceOptimizer(
    optimizer: torch.optim.Optimizer, model: _Models, num_steps_per_communication: int = 1, **options: typing.Any
) -> _DecentralizedOptimizer:
    """Adapt with combine between machines, under BlueFog's older name."""
    kind = CommunicationType.hierarchical_neighbor_allreduce
    return DistributedAdaptWithCombineOptimizer(optimizer, model, kind, num_steps_per_communication, **options)


_skipping: weakref.WeakSet[object] = weakref.WeakSet()
"""The engines of the agents that have switched the negotiation off."""


def suspend() -> None:
    """Nothing happens: what is called afterwards works as before.

    BlueFog stops its background thread with it, which polls the whole time, also in a notebook in which no cell runs.
    Shoal's waits in the kernel until something comes.

    Raises:
        NotInitialized: Before :func:`init`.
    """
    _current("suspend()")


def resume() -> None:
    """Nothing happens; see :func:`suspend`.

    Raises:
        NotInitialized: Before :func:`init`.
    """
    _current("resume()")


def mpi_threads_supported() -> bool:
    """True: any thread of an agent may communicate. This is not about a script's own use of MPI."""
    return True


def unified_mpi_window_model_supported() -> bool:
    """True: what a neighbour has written to a window is what its owner reads. No communication."""
    return True


def nccl_built() -> bool:
    """False: tensors of a GPU are sent through the CPU's memory."""
    return False


def set_skip_negotiate_stage(value: bool) -> None:
    """Keep the value for :func:`get_skip_negotiate_stage`.

    In BlueFog it starts operations without negotiation by rank 0, unchecked. Shoal starts operations without
    negotiation, and still detects disagreements of agents.

    Raises:
        NotInitialized: Before :func:`init`.
    """
    engine = _current("set_skip_negotiate_stage()").engine
    if value:
        _skipping.add(engine)
    else:
        _skipping.discard(engine)


def get_skip_negotiate_stage() -> bool:
    """The value that this agent has set; initially False.

    Raises:
        NotInitialized: Before :func:`init`.
    """
    return _current("get_skip_negotiate_stage()").engine in _skipping


# win_slots is no name of BlueFog, so a star leaves it out.
if not typing.TYPE_CHECKING:  # which takes the names from the imports, and would take none from this list
    __all__ = sorted({*_public_names(globals()), "topology_util"} - {"win_slots"})
