"""What a real agent runs: a thread or a process."""

from __future__ import annotations

import torch

import shoal
from shoal.algorithms import CATALOG, own, run
from support.least_squares import DIMENSION, loss, problem


def run_one(name: str, steps: int) -> list[float]:
    """This agent's estimate after some steps of an algorithm of the catalog."""
    entry = CATALOG[name]
    A, b = problem(shoal.size())
    start = torch.zeros(DIMENSION, dtype=torch.float64)
    gradient = own(loss, A[shoal.rank()], b[shoal.rank()])
    return run(entry.example(), start, gradient, entry.topology(shoal.size()), steps, seed=3).estimate.tolist()
