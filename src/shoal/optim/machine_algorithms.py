"""Algorithms of machines, made from algorithms of agents for ``communication_type=hierarchical_neighbor_allreduce``."""

from __future__ import annotations

import networkx as nx

from ..algorithms.algorithm import Algorithm
from ..algorithms.machines import OfMachines
from ..runtime.agent import Agent, current
from ..topology.families.compose import Kronecker, between_machines
from ..topology.families.graphs import RingGraph
from ..topology.schedule import Schedule, Static, as_schedule
from .weight_checks import schedule_of


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
