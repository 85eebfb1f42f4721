"""The topology of an optimizer: the given one, the default, or the machines' as one of all agents.

For ``communication_type=hierarchical_neighbor_allreduce`` algorithms of machines are made from algorithms of agents.
"""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx

from ..algorithms.algorithm import Algorithm
from ..algorithms.machines import OfMachines
from ..algorithms.needs import Facts, first_problem, without
from ..algorithms.schedule_weights import AgentSchedule
from ..runtime.agent import Agent, current
from ..topology.families.compose import Kronecker, between_machines
from ..topology.families.graphs import ChainGraph, RingGraph, SymmetricExponentialGraph
from ..topology.families.one_peer import OnePeerExponential
from ..topology.schedule import Schedule, Static, as_schedule
from .settings import CommunicationType
from .weight_checks import schedule_of

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
        raise ValueError(f"the topology is for {schedule.size}, and there are {wanted} {members}")
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
        "no machine topology is set: call shoal.set_machine_topology(graph), or give the optimizer one of machines as "
        "topology="
    )
