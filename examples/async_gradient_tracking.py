"""Agents solve one least-squares problem together and exactly, each with its own rows and at its own pace.

    shoal run -n 4 examples/async_gradient_tracking.py

Asynchronous gradient tracking (ASY-SONATA: Tian, Sun, Scutari 2018, arXiv:1803.10359). Two windows. Into one an agent
puts its iterate x: what counts is the latest, and what was overwritten is not missed. Into the other it pushes shares
of its tracker z, which are added up: whatever the delays, the trackers and what lies in the windows sum to the sum of
the agents' gradients at their iterates. So agents come to rest only where they agree and that sum is zero, which is the
solution; nobody's pace shifts it.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import shoal
from _asynchrony import draw, gather, interval, until_all_have
from push_sum_async import irregular

ROWS, COLUMNS = 20, 5


@dataclass(frozen=True)
class Figures:
    """What came of it, the same on every agent; lists are by rank.

    Attributes:
        errors: the distance of each iterate from the solution, when the agent stopped.
        alone: the distance of what each would have found from its own rows only.
        steps: how many each has made.
        untracked: how far the trackers' sum is from the sum of the gradients, at the end.
    """

    errors: list[float]
    alone: list[float]
    steps: list[int]
    untracked: float


def problem(rank: int) -> tuple[Tensor, Tensor]:
    """A [ROWS, COLUMNS] and b [ROWS] of one agent: minimise the sum over agents of |A x - b|^2 / 2."""
    generator = torch.Generator().manual_seed(rank)
    A = torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=generator) / ROWS**0.5
    b = A.sum(dim=1) + 0.5 * torch.randn(ROWS, dtype=torch.float64, generator=generator) + 0.2 * rank
    return A, b


def solve(A: Tensor, b: Tensor) -> Tensor:
    solution: Tensor = torch.linalg.lstsq(A, b.unsqueeze(1)).solution
    return solution.squeeze(1)


def main(args: argparse.Namespace) -> Figures:
    """One agent's part; also `shoal.Fleet(4).run(main, parse([]))`."""
    torch.set_num_threads(1)
    shoal.init()
    shoal.set_topology(irregular(shoal.size()))
    A, b = problem(shoal.rank())
    everything = zip(*(problem(rank) for rank in range(shoal.size())), strict=True)
    solution = solve(*map(torch.cat, everything))  # to compare with

    x = torch.zeros(COLUMNS, dtype=torch.float64)
    gradient = A.T @ (A @ x - b)
    z = gradient.clone()
    shoal.bluefog.win_create(x, "x")
    shoal.bluefog.win_create(z, "z", zero_init=True)
    pull = 1 / (len(shoal.in_neighbor_ranks()) + 1)  # each row of the weights for x sums to 1
    push = 1 / (len(shoal.out_neighbor_ranks()) + 1)  # each column of those for z
    pulls = dict.fromkeys(shoal.in_neighbor_ranks(), pull)
    pushes = dict.fromkeys(shoal.out_neighbor_ranks(), push)

    curve = []
    began = time.perf_counter()
    for _ in until_all_have(args.steps, interval(args.interval)):
        x.sub_(z, alpha=args.lr / shoal.size())
        shoal.bluefog.win_put(x, "x")
        shoal.bluefog.win_update("x", pull, pulls)
        before, gradient = gradient, A.T @ (A @ x - b)
        z.add_(gradient - before)
        shoal.bluefog.win_accumulate(z, "z", self_weight=push, dst_weights=pushes)
        shoal.bluefog.win_update_then_collect("z")
        curve.append((time.perf_counter() - began, torch.dist(x, solution).item()))

    shoal.barrier()  # agents end at different times; now nothing is on its way
    shoal.bluefog.win_update_then_collect("z")
    untracked = torch.dist(shoal.allreduce(z, average=False), shoal.allreduce(gradient, average=False)).item()
    alone = shoal.allgather(torch.dist(solve(A, b), solution).view(1)).tolist()
    shoal.bluefog.win_free()
    curves = gather(curve)
    figures = Figures([one[-1][1] for one in curves], alone, [len(one) for one in curves], untracked)
    if shoal.rank() == 0:
        report(figures, curves, Path(args.picture))
    return figures


def report(figures: Figures, curves: list[list[tuple[float, float]]], picture: Path) -> None:
    for rank, (error, alone, steps) in enumerate(zip(figures.errors, figures.alone, figures.steps, strict=True)):
        print(f"agent {rank}: {steps:6d} steps, {error:.1e} from the solution; from its own rows alone {alone:.1e}")
    print(f"sum of trackers less sum of gradients: {figures.untracked:.1e}")
    labels = [f"agent {rank}: {steps} steps" for rank, steps in enumerate(figures.steps)]
    draw(picture, curves, labels, "asynchronous gradient tracking, least squares", "distance from the solution")
    print(f"Picture: {picture}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="that every agent makes at least")
    parser.add_argument("--interval", type=float, default=0.003, help="seconds from step to step of the fastest agent")
    parser.add_argument("--lr", type=float, default=0.8, help="step size, times the number of agents")
    parser.add_argument("--picture", default="out/async_gradient_tracking.png", help="where to write the picture")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse())
    shoal.shutdown()
