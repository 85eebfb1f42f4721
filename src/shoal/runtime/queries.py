"""Queries of an agent about itself and the job, and functions that set its topologies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import networkx as nx
import torch

from ..execution.events import Events
from ..execution.membership import View
from ..fault_tolerance.agreement import MembershipChange
from ..topology import ExponentialTwoGraph
from ..topology._validate import as_int
from .agent import agent_context, bind, current

log = logging.getLogger("shoal")


def size() -> int:
    """The number of ranks, also of agents that may still join; :func:`alive` has the current members."""
    return current("size()").size


def rank() -> int:
    """This agent's rank, 0 to size() - 1."""
    return current("rank()").rank


def local_size() -> int:
    """The number of agents on this agent's machine."""
    return len(current("local_size()").local_ranks)


def local_rank() -> int:
    """This agent's position among the agents of its machine."""
    agent = current("local_rank()")
    return agent.local_ranks.index(agent.rank)


def machine_size() -> int:
    """The number of machines."""
    return current("machine_size()").machines.count


def machine_rank() -> int:
    """The number of this agent's machine."""
    return current("machine_rank()").machine_rank


def is_homogeneous() -> bool:
    """Whether all machines have equally many agents, with consecutive ranks."""
    return current("is_homogeneous()").machines.homogeneous


def is_initialized() -> bool:
    """Whether :func:`init` has been called, and :func:`shutdown` not since."""
    return agent_context().agent is not None


def alive() -> tuple[int, ...]:
    """The current members, ascending.

    With ``init(on_loss="continue")`` the survivors have agreed on them, and they are equal on all survivors in the same
    round. Otherwise they are the members as this agent knows them. Ranks and :func:`size` keep their values during a
    job.
    """
    return current("alive()").engine.agreed_members


def is_entering() -> bool:
    """Whether this agent, restarted (``--on-failure restart``) or joining (``--join``), is not admitted yet.

    It is isolated until its :meth:`shoal.Checkpoint.load`, which waits for admission. Until then collective operations
    return its own input, and operations with neighbours raise :class:`~shoal.ShoalError`.
    """
    return current("is_entering()").engine.is_joining


def on_membership_change(listener: Callable[[MembershipChange], None]) -> Callable[[MembershipChange], None]:
    """Call ``listener(change)`` whenever agents were lost or admitted, as all members agree; also as a decorator.

    Requires ``init(on_loss="continue")``. ``change.lost`` has the ranks lost since the last change, ``change.entered``
    the admitted ranks, ``change.alive`` the members. The listener runs in the thread that drives the exchange, before
    the next operation begins, and must be quick. Its exceptions are logged.

    Returns:
        ``listener``.

    Raises:
        NotInitialized: There is no agent.
        ValueError: A loss ends this job.
    """
    engine = current("on_membership_change()").engine
    if not engine.survives_losses:
        raise ValueError('on_membership_change(): a loss ends this run; shoal.init(on_loss="continue") lets it go on')
    engine.on_membership_change(bind(listener))
    return listener


def set_topology(topology: nx.DiGraph | None = None, is_weighted: bool = False) -> bool:
    """Set the static topology. All agents call it, with equal graphs; if they differ, the next operation fails.

    Args:
        topology: Nodes 0 to size() - 1; edge (j, i) lets j send to i, and its ``weight`` is W[i, j], the factor by
            which i multiplies x_j. The exponential graph if not given.
        is_weighted: Whether to use those weights. Otherwise each agent weights itself and its in-neighbours by 1 /
            (in-degree + 1). If that drops weights and is not doubly stochastic (star, grid), a warning is logged once.

    Returns:
        True; False (and an error in the log) before :func:`init`, and while there are windows.

    Raises:
        TypeError: The topology is no ``networkx.DiGraph``.
        ValueError: Its nodes are not 0 to size() - 1.
    """
    agent = agent_context().agent
    if agent is None:
        log.error("set_topology() before shoal.init() does nothing")
        return False
    held = agent.engine.holds_topology()
    if held:
        log.error(
            "set_topology() does nothing while there are windows, whose neighbours are fixed: %s", ", ".join(held)
        )
        return False
    agent.set_topology(ExponentialTwoGraph(agent.size) if topology is None else topology, is_weighted)
    return True


def set_machine_topology(topology: nx.DiGraph, is_weighted: bool = False) -> bool:
    """As :func:`set_topology`, for machines, and :func:`shoal.bluefog.hierarchical_neighbor_allreduce`."""
    agent = agent_context().agent
    if agent is None:
        log.error("set_machine_topology() before shoal.init() does nothing")
        return False
    agent.set_machine_topology(topology, is_weighted)
    return True


def load_topology() -> nx.DiGraph:
    """The static topology, as it was set."""
    return current("load_topology()").topology.graph


def load_machine_topology() -> nx.DiGraph | None:
    """The machine topology, as it was set; None if it was not."""
    static = current("load_machine_topology()").machine_topology
    return static.graph if static else None


def is_topo_weighted() -> bool:
    """Whether the weights of the static topology's edges are used."""
    return current("is_topo_weighted()").topology.weighted


def is_machine_topo_weighted() -> bool:
    """Whether the weights of the machine topology's edges are used."""
    static = current("is_machine_topo_weighted()").machine_topology
    return static.weighted if static else False


def in_neighbor_ranks() -> list[int]:
    """The ranks that send to this agent on the static topology, ascending."""
    return list(current("in_neighbor_ranks()").topology.mixing.source_ranks)


def out_neighbor_ranks() -> list[int]:
    """The ranks that this agent sends to on the static topology, ascending."""
    return list(current("out_neighbor_ranks()").topology.mixing.destination_ranks)


def in_neighbor_machine_ranks() -> list[int]:
    """The machines that send to this agent's machine on the machine topology; empty if none is set."""
    static = current("in_neighbor_machine_ranks()").machine_topology
    return list(static.mixing.source_ranks) if static else []


def out_neighbor_machine_ranks() -> list[int]:
    """The machines that this agent's machine sends to on the machine topology; empty if none is set."""
    static = current("out_neighbor_machine_ranks()").machine_topology
    return list(static.mixing.destination_ranks) if static else []


def membership() -> View:
    """The view of the membership at this epoch: the ranks that are alive, have shut down, or were lost."""
    return current("membership()").engine.view


def events() -> Events:
    """This agent's events. ``events().subscribe(listener)`` reports the engine's work to a listener."""
    return current("events()").engine.events


def bytes_sent() -> int:
    """Bytes of tensors that this agent has sent since :func:`init`, without headers."""
    return current("bytes_sent()").engine.bytes_sent


def empty(*shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An uninitialised tensor in memory that neighbours on this machine can read in place.

    Args:
        shape: The dimensions one by one, or one sequence of them, such as ``x.shape``.
        dtype: Any dtype.

    Raises:
        TypeError, ValueError: Dimensions are not integers, or are negative.

    Use the tensor as ``out=``, or for a window, which then needs no copy. The memory is reused once the tensor is
    deleted.
    """
    given: Iterable[object] = shape[0] if len(shape) == 1 and isinstance(shape[0], Iterable) else shape
    dimensions = tuple(as_int(size, "empty(): a dimension") for size in given)
    if min(dimensions, default=0) < 0:
        raise ValueError(f"empty(): shape {list(dimensions)} has a negative dimension")
    return current("empty()").engine.shared_memory(dimensions, dtype)
