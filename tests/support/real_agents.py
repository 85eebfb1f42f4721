"""The functions of a real agent, which is a thread or a process."""

from __future__ import annotations

import torch

import shoal
from shoal.algorithms import CATALOG, own, run
from shoal.topology.families.static import Circulant
from support.algorithm_cases import case_of
from support.least_squares import DIMENSION, loss, problem


def run_one(name: str, steps: int) -> list[float]:
    """This agent's estimate after some steps of an algorithm of the catalog."""
    entry = CATALOG[name]
    A, b = problem(shoal.size())
    start = torch.zeros(DIMENSION, dtype=torch.float64)
    gradient = own(loss, A[shoal.rank()], b[shoal.rank()])
    return run(entry.example(), start, gradient, case_of(entry).topology(shoal.size()), steps, seed=3).estimate.tolist()


def binary_ring(size: int) -> Circulant:
    """A ring with weights that are exact in binary."""
    return Circulant(size, {0: 0.5, 1: 0.25, -1: 0.25})


def binary_problem(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Curvatures of 1 or 2, and where each agent's loss is least, in quarters: float64 ``[size, d]`` each."""
    generator = torch.Generator().manual_seed(5)
    a = torch.randint(1, 3, (size, DIMENSION), generator=generator)
    b = torch.randint(-16, 17, (size, DIMENSION), generator=generator)
    return a.double(), b.double() / 4


def run_binary(name: str, steps: int) -> list[float]:
    """This agent's estimate on :func:`binary_problem`."""
    rank, size = shoal.rank(), shoal.size()
    a, b = (one[rank] for one in binary_problem(size))
    start = torch.zeros(DIMENSION, dtype=torch.float64)
    algorithm = CATALOG[name].example()
    return run(algorithm, start, lambda x: a * (x - b), binary_ring(size), steps, seed=3).estimate.tolist()
