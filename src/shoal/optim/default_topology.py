"""The default topology of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx

from ..algorithms.algorithm import Algorithm
from ..algorithms.machines import OfMachines
from ..algorithms.needs import Facts, first_problem, without
from ..algorithms.schedule_weights import AgentSchedule
from ..runtime.agent import current
from ..topology.families.graphs import ChainGraph, SymmetricExponentialGraph
from ..topology.families.one_peer import OnePeerExponential
from ..topology.schedule import Schedule, Static
from .machine_algorithms import static_topology

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
