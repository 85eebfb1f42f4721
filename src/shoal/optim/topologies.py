"""The topology of an optimizer: the given one, the default, or the machines' as one of all agents; and checks of its
weights against the algorithm's needs. An unsuitable schedule is refused; other weights cause a warning.

For ``communication_type=hierarchical_neighbor_allreduce`` algorithms of machines are made from algorithms of agents.

The knowledge of W depends on its source. Every agent knows the whole static topology. The weights that a
script sets are gathered once, before the first exchange, so W of that round is known. Of later rounds an agent knows
only the weights that it has set itself: its row where it pulls, its column where it pushes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import networkx as nx
import numpy as np
import torch

from ..algorithms.algorithm import Algorithm
from ..algorithms.needs import (
    COLUMN_STOCHASTIC,
    DOUBLY_STOCHASTIC,
    ROW_STOCHASTIC,
    Facts,
    Need,
    first_problem,
    without,
)
from ..algorithms.schedule_weights import TOLERANCE, AgentSchedule
from ..algorithms.stability.growth import DIES_OUT, NEVER_GROWS
from ..algorithms.wrappers import OfMachines
from ..ops.collective import allgather
from ..runtime.agent import Agent, StaticTopology, current
from ..topology.families.compose import Kronecker, between_machines
from ..topology.families.graphs import ChainGraph, RingGraph, SymmetricExponentialGraph
from ..topology.families.one_peer import OnePeerExponential
from ..topology.schedule import Schedule, Static, as_schedule
from .settings import CommunicationType, Settings

STATIC = "static"
"""As ``topology=``: the static topology, also where the script has set none."""


def given(topology: nx.Graph | Schedule | str | None) -> nx.Graph | Schedule | None:
    """The topology of an optimizer that is given one.

    Raises:
        ValueError: The topology is another string than "static".
    """
    if isinstance(topology, str) and topology != STATIC:
        raise ValueError(f'topology={topology!r}: give a graph, a schedule or "static", or leave it out')
    return None if isinstance(topology, str) else topology


def one_peer() -> AgentSchedule:
    """The default of adapt, then combine, and adapt with combine: one message a round, whatever the number of agents
    (Ying et al. 2021, arXiv:2110.13363)."""
    agent = current("DecentralizedOptimizer")
    return AgentSchedule(OnePeerExponential(agent.size), agent.rank)


def agent_schedule(topology: nx.Graph | Schedule, kind: CommunicationType) -> AgentSchedule:
    """The topology as this agent sees it, or, where machines average, as its machine does."""
    agent = current("DecentralizedOptimizer(topology=)")
    between = kind is CommunicationType.hierarchical_neighbor_allreduce
    schedule = AgentSchedule(topology, agent.machine_rank if between else agent.rank)
    wanted = agent.machines.count if between else agent.size
    if schedule.size != wanted:
        members = "machines" if between else "agents"
        of_machines = not between and agent.machines.homogeneous and schedule.size == agent.machines.count
        hint = "; for a topology of machines pass communication_type= to the constructor" if of_machines else ""
        raise ValueError(f"the topology is for {schedule.size}, and there are {wanted} {members}{hint}")
    return schedule


def topology_of(algorithm: Algorithm, dimension: int, unchecked: str | Iterable[str], *, static: bool) -> Schedule:
    """The default topology of an algorithm: the one that the script has set, else the first that the algorithm accepts
    of the one-peer exponential graph, the exponential, the symmetric exponential, and the chain.

    Args:
        algorithm: An algorithm of agents, or of machines, whose topology the script must have set.
        dimension: The number of parameters of an agent.
        unchecked: The names of conditions that the topology need not fulfil.
        static: Use the static topology, even if the script has set none.

    Raises:
        ValueError: No machine topology is set, or ``unchecked`` names an unknown condition.
    """
    agent = current("optimizer.step")
    exponential = static_topology(algorithm)
    if static or not agent.topology_is_default or isinstance(algorithm, OfMachines):
        return exponential
    needs = without(unchecked, type(algorithm).__name__, algorithm.needs)
    others = Static(SymmetricExponentialGraph(agent.size)), Static(ChainGraph(agent.size))
    for topology in (OnePeerExponential(agent.size), exponential, *others):
        if first_problem(needs, Facts(topology, dimension)) is None:
            return topology
    return exponential


def of_machines(algorithm: Algorithm) -> OfMachines:
    """The same algorithm between the present machines.

    Raises:
        ValueError: The machines have different numbers of agents, or the algorithm is not separable.
    """
    agent = current("DecentralizedOptimizer")
    if not agent.machines.homogeneous:
        raise ValueError(
            "communication_type=hierarchical_neighbor_allreduce needs machines with equally many agents and "
            f"consecutive ranks; the machines here have {list(agent.machines.sizes)} agents (rank by rank, machines "
            f"{list(agent.machines.of)})"
        )
    return OfMachines(algorithm)


def of_agents(machines: nx.Graph | Schedule) -> Kronecker:
    """A topology of machines as one of all agents."""
    return between_machines(as_schedule(machines), len(current("DecentralizedOptimizer").local_ranks))


def static_topology(algorithm: Algorithm) -> Schedule:
    """The static topology that an algorithm runs on: that of the agents, or of the machines as one of all agents.

    Raises:
        ValueError: There is none of the machines.
    """
    agent = current("optimizer.step")
    return of_agents(_of_machines(agent)) if isinstance(algorithm, OfMachines) else schedule_of(agent.topology)


def _of_machines(agent: Agent) -> Schedule:
    if agent.machine_topology is not None:
        return schedule_of(agent.machine_topology)
    if agent.machines.count == 1:
        return Static(RingGraph(1))
    raise ValueError(
        "no machine topology is set: call shoal.bluefog.set_machine_topology(graph), or give the optimizer one of "
        "machines as topology="
    )


_REPEATS = 8
"""Rounds after which equal weights count as constant. One-peer rounds take turns, and differ sooner."""
_OWN, _FROM, _TO, _UNKNOWN = range(4)
"""The kind of a line of an agent's weights: its own, a source's, a destination's; or it has no such weights."""


class WeightChecks:
    """Warns once if an optimizer averages with weights that are unsuitable for its algorithm.

    Args:
        who: The optimizer and its algorithm, as the warning names them.
        needs: The algorithm's needs, without those the user has waived.
    """

    def __init__(self, who: str, needs: Iterable[Need]) -> None:
        self._who, self._needs = who, tuple(needs)
        self._seen: StaticTopology | None = None
        self._has_warned = not self._needs
        self._first: Static | None = None  # W of the first round, of weights set by hand, while rank 0 repeats its own
        self._own: torch.Tensor | None = None
        self._rounds = 0

    def begin(self, settings: Settings, name: str) -> None:
        """Before the first exchange: gather the weights that the scripts of all agents have set, and check them."""
        own = _lines(settings)
        lines = allgather(own, name=f"{name}.weights")
        if self._wants_doubly and current("optim").rank == 0 and not bool((lines[:, 0] == _UNKNOWN).any()):
            by_hand = bool((lines[:, 4] == 1).any())
            W = _matrix(lines.numpy())
            if by_hand and W is not None:
                asked = [NEVER_GROWS] if self._dies_out else []
                self._warn_of_first((DOUBLY_STOCHASTIC, *asked), Static(W, name="weights by hand, of the first round"))
                if self._dies_out:
                    self._own = own
                    self._first = Static(W, name="weights by hand of the first round, which rank 0 has repeated")

    def look(self, settings: Settings) -> None:
        """Look at the weights of the round that is about to begin with these settings."""
        if self._has_warned:
            return
        agent, kind = current("optim"), settings.communication_type
        if kind is CommunicationType.neighbor_allreduce:
            static, sources, destinations = agent.topology, settings.src_weights, settings.dst_weights
        elif kind is CommunicationType.hierarchical_neighbor_allreduce:
            sources, destinations = settings.src_machine_weights, settings.dst_machine_weights
            static = agent.machine_topology  # type: ignore[assignment]
        else:
            return
        if self._first is not None:
            self._look_at_repeated(settings)
        if sources is not None or destinations is not None:
            self._look_at_own(settings.self_weight, sources, destinations)
        elif settings.self_weight is None and static is not None:
            self.look_at_static(static)

    def _look_at_repeated(self, settings: Settings) -> None:
        """Whether differences die out if all rounds are like the first; rank 0 looks, once its own weights repeat.

        One round need not bring agents together: the rounds of a changing topology do so in their product.
        """
        assert self._first is not None and self._own is not None
        self._rounds += 1
        if not torch.equal(_lines(settings), self._own):
            self._first = None
        elif self._rounds == _REPEATS:
            first, self._first = self._first, None
            self._warn_of_first(self._dies_out, first)

    def look_at_static(self, static: StaticTopology) -> None:
        """The weights are those of a static topology, which rank 0 looks at for all."""
        if self._has_warned or static is self._seen or current("optim").rank != 0:
            return
        self._seen = static
        self._warn_of_first(self._needs, schedule_of(static))

    def look_at_scales(self, setting: str, weights: object) -> None:
        """Warn of weights that scale data put into or got from windows, because the average weighs it again."""
        if self._has_warned or not self._wants_doubly or not isinstance(weights, Mapping):
            return
        scaled = [f"{weight:g} for rank {rank}" for rank, weight in weights.items() if abs(weight - 1) > TOLERANCE]
        if scaled:
            self._warn(
                f"{setting} scales what is then averaged with the weights of the static topology: "
                f"{', '.join(scaled)}, and its rows no longer sum to 1. Give destinations or sources, with weights of 1"
            )

    @property
    def _dies_out(self) -> tuple[Need, ...]:
        return tuple(need for need in self._needs if need.name == DIES_OUT)

    @property
    def _wants_doubly(self) -> bool:
        return any(need.name == DOUBLY_STOCHASTIC.name for need in self._needs)

    def _look_at_own(self, own: float | None, sources: object, destinations: object) -> None:
        """The sum of a row or column that this agent alone has set; in push-pull, where it scales nothing itself."""
        if own is None or not self._wants_doubly:
            return
        row = isinstance(sources, Mapping)
        given = sources if row else destinations
        scaled = isinstance(destinations, Mapping) and any(
            abs(weight - 1) > TOLERANCE for weight in destinations.values()
        )
        if row and scaled:
            return  # the others may scale as well, by weights that only they know
        weights = list(given.values()) if isinstance(given, Mapping) else [1.0] * len(list(given or ()))  # type: ignore[call-overload]
        total = float(own) + sum(float(weight) for weight in weights)
        if abs(total - 1) > TOLERANCE:
            need, names = (
                (ROW_STOCHASTIC, "self_weight and src_weights")
                if row
                else (COLUMN_STOCHASTIC, "self_weight and dst_weights")
            )
            which = "row" if row else "column"
            rank = current("optim").rank
            self._warn(f"{names} of rank {rank} make {which} {rank} of W, which sums to {total:.6g}. {need.remedy}")

    def _warn_of_first(self, needs: Iterable[Need], topology: Static) -> None:
        found = first_problem(needs, Facts(topology))
        if found is not None:
            need, problem = found
            self._warn(f"it needs {need.explain(problem, topology.describe())}", need)

    def _warn(self, problem: str, need: Need = DOUBLY_STOCHASTIC) -> None:
        self._has_warned = True
        then = "Agents then do not come to agree" if need.name == DIES_OUT else "Training then leans to some agents"
        warnings.warn(
            f"{self._who}: {problem} {then}. (unchecked={need.name!r}, or the name of another condition, says that "
            "this is meant.)",
            stacklevel=2,
        )


def schedule_of(static: StaticTopology) -> Static:
    """The static topology with the weights that ``neighbor_allreduce`` has on it."""
    how = "" if static.weighted else ", with uniform weights since it was set without is_weighted=True,"
    return Static(static.graph, weighted=static.weighted, name=f"the static topology{how}")


def _lines(settings: Settings) -> torch.Tensor:
    """This agent's weights in the round that begins, float64 [k, 5]: kind of line, agent, other, weight, set by
    hand.
    """
    agent = current("optim")
    here = agent.rank
    if settings.communication_type is not CommunicationType.neighbor_allreduce:
        return torch.tensor([[_UNKNOWN, here, here, 0.0, 0.0]], dtype=torch.float64, device="cpu")
    own, sources, destinations = settings.self_weight, settings.src_weights, settings.dst_weights
    by_hand = sources is not None or destinations is not None
    try:
        if not by_hand:
            own, sources = agent.topology.mixing.self_weight, agent.topology.mixing.sources
        lines = [(_OWN, here, here, float(own or 0.0), by_hand)]
        lines += [
            (_FROM, here, int(neighbour), float(weight), by_hand) for neighbour, weight in (sources or {}).items()
        ]
        if destinations is not None:
            given = destinations if isinstance(destinations, Mapping) else dict.fromkeys(destinations, 1.0)
            lines += [(_TO, here, int(neighbour), float(weight), by_hand) for neighbour, weight in given.items()]
        if not all(0 <= line[2] < agent.size for line in lines):
            raise ValueError
        return torch.tensor(lines, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, AttributeError):  # the exchange will raise the error
        return torch.tensor([[_UNKNOWN, here, here, 0.0, 0.0]], dtype=torch.float64, device="cpu")


def _matrix(lines: np.ndarray) -> np.ndarray | None:
    """W of a round, from the weights of all agents; None if they do not fit each other, as the exchange will say."""
    size = current("optim").size
    kinds, here, other = (lines[:, column].astype(np.int64) for column in range(3))
    weight = lines[:, 3]
    W, pulls, scales = np.zeros((size, size)), np.full((size, size), np.nan), np.full((size, size), np.nan)
    own, sources, destinations = (kinds == kind for kind in (_OWN, _FROM, _TO))
    W[here[own], here[own]] = weight[own]
    pulls[here[sources], other[sources]] = weight[sources]
    scales[other[destinations], here[destinations]] = weight[destinations]
    pulling, pushing = (np.isin(np.arange(size), here[which]) for which in (sources, destinations))
    # A source without named ranks scales nothing, and an agent without named sources takes all tensors sent to it.
    scales[:, ~pushing] = np.where(np.isnan(pulls[:, ~pushing]), np.nan, 1.0)
    pulls[~pulling] = np.where(np.isnan(scales[~pulling]), np.nan, 1.0)
    if (np.isnan(pulls) != np.isnan(scales)).any():
        return None
    found: np.ndarray = W + np.nan_to_num(pulls * scales)
    return found
