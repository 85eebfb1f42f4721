"""The caller's agent: its rank, its machine and its topology.

A process has one agent; in a :class:`~shoal.Fleet` each thread has one. ``current()`` finds it through a context
variable, so every public function works in both cases.
"""

from __future__ import annotations

import contextvars
import logging
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, ParamSpec, TypeVar

import networkx as nx
import numpy as np
import torch.distributed as dist

from ..config import Config
from ..engine.engine import Engine
from ..errors import NotInitialized
from ..rendezvous.launch import Launch
from ..rendezvous.store import Store
from ..topology import (
    ExponentialTwoGraph,
    Mixing,
    Schedule,
    Static,
    Without,
    classify,
    mixing_matrix,
    with_uniform_weights,
)
from ..topology._validate import as_weight

log = logging.getLogger("shoal")
P = ParamSpec("P")
T = TypeVar("T")


@lru_cache
def _equal_parts(machine_of: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    parts: dict[int, list[int]] = {}
    for rank in ranks:
        parts.setdefault(machine_of[rank], []).append(rank)
    sizes = {len(part) for part in parts.values()}
    return tuple(map(tuple, parts.values())) if len(parts) > 1 and len(sizes) == 1 and 1 not in sizes else ()


@dataclass(frozen=True)
class Machines:
    """The grouping of ranks into machines: ``of[rank]`` is the machine of a rank."""

    of: tuple[int, ...]

    @property
    def count(self) -> int:
        return max(self.of) + 1

    def ranks(self, machine: int) -> tuple[int, ...]:
        return tuple(rank for rank, where in enumerate(self.of) if where == machine)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.of.count(machine) for machine in range(self.count))

    def equal_parts(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The given ranks by machine, if several machines have equally many, at least two each; otherwise empty."""
        return _equal_parts(self.of, tuple(ranks)) if self.count > 1 else ()

    @property
    def homogeneous(self) -> bool:
        """Whether all machines have the same number of agents, with consecutive ranks."""
        size = self.sizes[0]
        return all(where == rank // size for rank, where in enumerate(self.of)) and len(set(self.sizes)) == 1


@dataclass(frozen=True)
class StaticTopology:
    """The static topology of all agents, and this agent's view of it."""

    graph: nx.DiGraph
    weighted: bool
    mixing: Mixing
    digest: int
    _without: dict[tuple[int, ...], StaticTopology] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(graph: nx.DiGraph, weighted: bool, rank: int) -> StaticTopology:
        edges = sorted(
            (u, v, as_weight(weight, f"edge ({u}, {v})") if weighted else 0.0)
            for u, v, weight in graph.edges(data="weight", default=1.0)
        )
        digest = zlib.crc32(np.array(edges, dtype=np.float64).tobytes())
        return StaticTopology(graph, weighted, Mixing.from_graph(graph, rank, weighted=weighted), digest)

    def component(self, present: Sequence[int]) -> tuple[int, ...]:
        """The ranks of this agent's connected component, ascending; ``()`` if they are all of ``present``."""
        component = self._component
        return () if len(component) >= len(present) else component

    @cached_property
    def _component(self) -> tuple[int, ...]:
        return tuple(sorted(nx.node_connected_component(self.graph.to_undirected(as_view=True), self.mixing.rank)))

    def without(self, gone: tuple[int, ...]) -> StaticTopology:
        """The topology without lost agents: see :class:`shoal.topology.Without`. Cached."""
        if not gone:
            return self
        if gone not in self._without:
            rest = Without(Static(self.graph, weighted=self.weighted), gone).graph(0)
            self._without[gone] = StaticTopology.of(rest, True, self.mixing.rank)
        return self._without[gone]


@dataclass
class Agent:
    """One agent of a running fleet.

    Attributes:
        grouping: The grouping of ranks into machines; None if it is not known for all ranks.
        topology_is_default: Whether the script has set no static topology.
        warned_of_process_group: Whether the script was warned of its process group.
        plans: The common values of the calls of a name, by operation, name and round (``ops/round_plan.py``).
    """

    engine: Engine
    grouping: Machines | None
    launch: Launch
    config: Config
    topology: StaticTopology = field(init=False)
    machine_topology: StaticTopology | None = None
    topology_is_default: bool = True
    warned_of_process_group: bool = False
    plans: dict[Any, Any] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.topology = StaticTopology.of(ExponentialTwoGraph(self.size), False, self.rank)
        self.engine.watch_membership(lambda view: self.drop_plans())

    def drop_plans(self) -> None:
        """Drop all plans, after the static topology or the membership has changed. Called from any thread.

        A thread that makes a plan at that time may have read the topology before the change. It keeps its plan in the
        dictionary that it took first, which no later call reads.
        """
        self.plans = {}

    @property
    def rank(self) -> int:
        return self.engine.rank

    @property
    def size(self) -> int:
        return self.engine.size

    @property
    def machines(self) -> Machines:
        """The grouping of ranks into machines.

        Raises:
            ValueError: Agents may still join, on unknown machines.
        """
        if self.grouping is None:
            raise ValueError(
                f"agents may join this run (it began with {self.launch.begins} of {self.size}), and on which machines "
                "is not known: to group ranks into machines set SHOAL_AGENTS_PER_MACHINE, the same for all agents"
            )
        return self.grouping

    @property
    def machine_rank(self) -> int:
        return self.machines.of[self.rank]

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on this agent's machine, ascending."""
        return self.machines.ranks(self.machine_rank)

    def set_topology(self, graph: nx.DiGraph, weighted: bool) -> None:
        check_graph(graph, self.size, "agents")
        self.topology = StaticTopology.of(graph, weighted, self.rank)
        self.topology_is_default = False
        self.drop_plans()
        if not weighted:
            warn_about_dropped_weights(graph, self.rank)

    def has_topology(self, graph: nx.DiGraph, weighted: bool) -> bool:
        """Whether this topology is set."""
        check_graph(graph, self.size, "agents")
        other = StaticTopology.of(graph, weighted, self.rank)
        return (other.weighted, other.digest) == (self.topology.weighted, self.topology.digest)

    def set_machine_topology(self, graph: nx.DiGraph, weighted: bool) -> None:
        check_graph(graph, self.machines.count, "machines")
        self.machine_topology = StaticTopology.of(graph, weighted, self.machine_rank)


def check_graph(graph: object, size: int, of_what: str) -> None:
    """Raise an error unless the topology is a directed graph with the nodes 0 to size - 1."""
    if isinstance(graph, Schedule):
        raise TypeError(
            f"the static topology is one networkx.DiGraph, and {graph!r} is a schedule, which has one for each round: "
            "pass it as topology= to an optimizer, or to shoal.algorithms.run; neighbor_allreduce takes the weights of "
            "a round, from schedule.mixing(round, shoal.rank())"
        )
    if not isinstance(graph, nx.DiGraph):
        raise TypeError(
            f"a topology must be a networkx.DiGraph, not {type(graph).__name__}; shoal.topology makes them, and "
            "an undirected graph becomes one with graph.to_directed()"
        )
    if set(graph.nodes) != set(range(size)):
        raise ValueError(
            f"the topology has {graph.number_of_nodes()} nodes and there are {size} {of_what}; its nodes must be "
            f"0 to {size - 1}"
        )


_warned = False


def warn_about_dropped_weights(graph: nx.DiGraph, rank: int) -> None:
    """Warn once if uniform weights replace a graph's own and bias the average."""
    global _warned
    carried = nx.get_edge_attributes(graph, "weight")
    if _warned or rank != 0 or not carried:
        return
    uniform = with_uniform_weights(graph)
    if classify(uniform).doubly or np.allclose(mixing_matrix(graph), mixing_matrix(uniform)):
        return
    _warned = True
    log.warning(
        "set_topology(is_weighted=False) replaces the weights that the graph carries by uniform ones, 1 / (in-degree "
        "+ 1), which are not doubly stochastic on this graph: averages will lean to some agents. Pass is_weighted=True "
        "to use the graph's own weights."
    )


@dataclass
class AgentContext:
    """The state of a process, or of a thread of a fleet, with or without an agent."""

    launch: Launch | None = None
    store: Store | None = None
    transport: str = ""
    agents_per_machine: int | None = None
    timeout: float | None = None
    process_group: Any = None
    """The script's process group that moves tensors."""
    agent: Agent | None = None
    engine: Engine | None = None
    """The engine of the agent, also while ``init`` creates the agent."""
    has_met: bool = False
    """Whether it has been an agent: a restarted agent rejoins once, and later calls of ``init`` use the barrier."""
    forked_from: tuple[int, int] | None = None
    """The rank and size of the parent process's agent, if this process is a forked child."""


_process_context = AgentContext()
_context: contextvars.ContextVar[AgentContext] = contextvars.ContextVar("shoal_agent")
fleet_runs: set[object] = set()
"""The runs of fleets in this process, while they last."""


def agent_context() -> AgentContext:
    """The caller's context: its thread's in a fleet, otherwise the process's."""
    return _context.get(_process_context)


def process_context() -> AgentContext:
    return _process_context


def enter_context(context: AgentContext) -> None:
    """Set the caller's context to an agent of a fleet."""
    _context.set(context)


def current(caller: str = "this") -> Agent:
    """The caller's agent. Raises :class:`~shoal.NotInitialized` if there is none."""
    mine = _context.get(_process_context)
    agent = mine.agent
    if agent is None and mine.forked_from is not None:
        raise NotInitialized(
            f"{caller} needs an agent, and this process is none: it was forked from that of rank "
            f"{mine.forked_from[0]}. Communicate in the process that called shoal.init()"
        )
    if agent is None and mine is _process_context and fleet_runs:
        raise NotInitialized(
            f"{caller} needs an agent, and this thread is none: a Fleet runs in this process, and a thread that one of "
            "its agents starts belongs to no agent. Start it with threading.Thread(target=shoal.Fleet.bind(function))"
        )
    if agent is None:
        raise NotInitialized(f"{caller} needs an agent: call shoal.init() first (after shoal.shutdown(), again)")
    return agent


def bind(function: Callable[P, T]) -> Callable[P, T]:
    """Bind a function to the caller's agent, for calls from any thread, such as a fleet agent's helper threads."""
    mine = agent_context()

    def bound(*args: P.args, **kwargs: P.kwargs) -> T:
        context = contextvars.copy_context()
        context.run(enter_context, mine)
        result: Any = context.run(function, *args, **kwargs)
        return result  # type: ignore[no-any-return]

    return bound


def warn_of_process_group(agent: Agent, stacklevel: int) -> None:
    """Warn once if a failure would end the survivors, because a script's process group needs all of its members.

    Groups that were given to Shoal (``process_group=``, ``mesh=``) or that Shoal has made are not the script's.
    """
    mine = agent.launch.beside or agent.engine.backend is not None
    if mine or agent.size == 1 or agent.warned_of_process_group or not agent.engine.survives_losses:
        return
    if dist.is_available() and dist.is_initialized():
        agent.warned_of_process_group = True
        warnings.warn(
            f"rank {agent.rank}: torch.distributed is initialized, and agents are to survive failures. If an agent "
            "fails, the process group's operations raise, hang or abort on the others, and a restarted agent cannot "
            "join it. Remove dist.init_process_group() and replace the calls that use it: dist.get_rank() by "
            "shoal.rank(), dist.all_reduce() by shoal.allreduce() or shoal.metrics(), dist.barrier() by "
            "shoal.barrier(), DistributedSampler by shoal.data.AgentSampler (docs/howto/ddp.md)",
            stacklevel=stacklevel,
        )
