"""Algorithms that continue after a loss, and the fleet of survivors that they must equal afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import torch

import shoal
from shoal.algorithms import CATALOG, Algorithm, Mix, own, run
from shoal.algorithms.runs.run import Run
from shoal.sim import StackedFleet, per_agent
from shoal.sim.stacked import StackedMix
from shoal.topology import as_schedule
from support.algorithm_cases import case_of
from support.fault_points import Point, arm
from support.least_squares import DIMENSION, loss, problem


@dataclass
class AgentOutcome:
    """The outcome of an agent: its final estimate, and the value and the step of its new start."""

    estimate: list[float]
    restarts: list[tuple[int, list[float]]] = field(default_factory=list)
    alive: tuple[int, ...] = ()


def run_through(
    name: str, steps: int, leaves: dict[int, int], victims: dict[int, Point] | None = None, pause: int = 0
) -> AgentOutcome:
    """Run an algorithm of the catalog; some agents leave after a given step, and victims end at given places.

    Args:
        pause: The step after which a run ends; another one resumes it once all know the departed ranks; 0 without a
            pause.
    """
    rank, size = shoal.rank(), shoal.size()
    entry = CATALOG[name]
    algorithm, outcome = entry.example(), AgentOutcome([])
    begin_anew = algorithm.restart

    def restart(x: torch.Tensor, state: Any, grad: Any, mix: Mix) -> tuple[torch.Tensor, Any]:
        outcome.restarts.append((mix.round, algorithm.estimate(x, state).tolist()))
        return begin_anew(x, state, grad, mix)

    object.__setattr__(algorithm, "restart", restart)  # the instance's own, of a frozen dataclass
    A, b = problem(size)
    start = torch.full((DIMENSION,), float(rank), dtype=torch.float64)
    shoal.barrier()
    if victims and rank in victims:
        arm(victims[rank])
    gradient, topology = own(loss, A[rank], b[rank]), case_of(entry).topology(size)
    result = run(algorithm, start, gradient, topology, pause or leaves.get(rank, steps), seed=3, every=0)
    if pause and rank not in leaves:
        while set(leaves) & set(shoal.allgather(torch.tensor([rank])).tolist()):
            pass
        result = run(algorithm, start, gradient, topology, steps - pause, seed=3, every=0, resume=result)
    outcome.estimate = result.estimate.tolist()
    if rank not in leaves:
        shoal.barrier()
        outcome.alive = shoal.alive()
    return outcome


def surviving_topology(name: str, size: int, left: list[int]) -> nx.DiGraph:
    """The algorithm's topology among the survivors, renumbered."""
    entry = CATALOG[name]
    departed = tuple(rank for rank in range(size) if rank not in left)
    healed = as_schedule(entry.example().healed(as_schedule(case_of(entry).topology(size)), departed)).graph(0)
    healed.remove_nodes_from(departed)
    return nx.convert_node_labels_to_integers(healed)


def fleet_of_survivors(
    name: str, size: int, left: list[int], outcomes: dict[int, AgentOutcome], steps: int
) -> torch.Tensor:
    """The estimates of a stacked fleet that begins with the survivors' estimates at that step: [left, d]."""
    algorithm: Algorithm = CATALOG[name].example()
    topology = surviving_topology(name, size, left)
    A, b = (one[left] for one in problem(size))
    gradient = per_agent(loss, A, b)
    [first] = {outcomes[rank].restarts[-1][0] for rank in left}
    x = torch.tensor([outcomes[rank].restarts[-1][1] for rank in left], dtype=torch.float64)
    mix = StackedMix(as_schedule(topology), seed=3)
    mix.begin(first)
    started = Run(x, x, algorithm.init(x, gradient, mix), first)
    return StackedFleet(topology, seed=3).run(algorithm, x, gradient, steps - first, resume=started).estimate


def optimum_of(size: int, left: list[int]) -> torch.Tensor:
    """The minimum of the sum of the survivors' losses, ``[d]``."""
    A, b = (one[left] for one in problem(size))
    result: torch.Tensor = torch.linalg.solve((A.mT @ A).sum(0), (A.mT @ b.unsqueeze(-1)).sum(0)).squeeze(-1)
    return result
