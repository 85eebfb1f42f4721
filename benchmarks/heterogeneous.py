"""Agents whose data differ: momentum, quasi-global momentum and gradient tracking, on rings and exponential graphs.

    python benchmarks/heterogeneous.py                 # 16 simulated agents, digits dealt out by a Dirichlet(0.1)
    python benchmarks/heterogeneous.py --real          # 4 agents that train with the optimizers, on a ring

Accuracy on images that nobody trains on, after equally many steps: of agent 0, the mean over the agents' own models,
the worst of them, and that of the model that is the mean of all; the mean over seeds. Each way has the learning rate
that is best for the mean over the agents, of those tried; it falls along a cosine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import cos, pi
from statistics import mean

import networkx as nx
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import shoal
from _adam_tasks import Task, digits
from shoal.algorithms import (
    Algorithm,
    DecentLaM,
    ExactDiffusion,
    GradientDescent,
    GradientTracking,
    Momentum,
    ParallelGradientDescent,
    QuasiGlobalMomentum,
)
from shoal.sim import StackedFleet
from shoal.topology import ExponentialTwoGraph, OnePeerExponential, RingGraph
from shoal.topology.schedule import Schedule

BETA = 0.9
WAYS: dict[str, Callable[[float], Algorithm]] = {
    "all-reduce, momentum": lambda lr: Momentum(ParallelGradientDescent(lr), BETA),
    "vanilla (D-PSGD)": GradientDescent,
    "DmSGD": lambda lr: Momentum(GradientDescent(lr), BETA),
    "QG-DmSGD": lambda lr: QuasiGlobalMomentum(lr, BETA),
    "DecentLaM": lambda lr: DecentLaM(lr, BETA),
    "gradient tracking": GradientTracking,
    "exact diffusion, momentum": lambda lr: Momentum(ExactDiffusion(lr, lazy=True), BETA),
}
RATES = (3.2, 1.6, 0.8, 0.4, 0.2, 0.1, 0.05)
TOPOLOGIES: dict[str, Callable[[int], nx.DiGraph | Schedule]] = {
    "ring": RingGraph,
    "static exponential": ExponentialTwoGraph,
    "one-peer exponential": OnePeerExponential,
}
Scores = tuple[float, float, float, float]


def scores(task: Task, x: Tensor) -> Scores:
    """Of agent 0, the mean over agents, the worst, and the mean model, in %."""
    inputs, targets = task.tests[0]
    each = [task._score_of(one, inputs, targets) for one in x]
    return each[0], mean(each), min(each), task._score_of(x.mean(0), inputs, targets)


def simulated(way: str, topology: str, rate: float, task: Task, steps: int) -> Scores:
    """A fleet as the rows of one tensor."""
    x = task.start()[0]
    fleet = StackedFleet(TOPOLOGIES[topology](task.agents))
    run = None
    for part in range(10):  # the rate falls, ten times
        algorithm = WAYS[way](rate * (1 + cos(pi * part / 10)) / 2)

        def gradient(at: Tensor) -> Tensor:
            return task.gradient(at.unsqueeze(0))[0]

        run = fleet.run(algorithm, x, gradient, steps // 10, resume=run)
    assert run is not None
    return scores(task, run.estimate)


def real(way: str, topology: str, rate: float, task: Task, steps: int) -> Scores:
    """Agents in threads, with PyTorch's SGD inside Shoal's optimizer."""
    inputs, targets = task.inputs[0], task.targets[0]
    models = [task._stacked.module(row) for row in task.start()[0]]

    def train() -> Tensor:
        rank, model = shoal.rank(), models[shoal.rank()]
        algorithm = WAYS[way](1.0)
        sgd = torch.optim.SGD(model.parameters(), lr=rate)
        graph = None if "all-reduce" in way else TOPOLOGIES[topology](shoal.size())
        optimizer = shoal.DecentralizedOptimizer(sgd, model, algorithm, topology=graph)
        chance = torch.Generator().manual_seed(1000 * task.seeds[0] + rank)
        shard = task.shards[0][rank]
        weight = len(shard) * task.agents / sum(map(len, task.shards[0]))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            some = shard[torch.randint(len(shard), (task.batch,), generator=chance)]

            def closure(some: Tensor = some) -> float:
                optimizer.zero_grad()
                loss = weight * task.criterion(model(inputs[some]), targets[some])
                loss.backward()  # type: ignore[no-untyped-call]
                return float(loss.detach())

            optimizer.step(closure)
            schedule.step()
        optimizer.close()
        return torch.cat([one.detach().flatten() for one in model.parameters()])

    return scores(task, torch.stack(shoal.Fleet(task.agents).run(train)))


def best(run: Callable[..., Scores], way: str, topology: str, tasks: list[Task], steps: int) -> tuple[float, Scores]:
    """The rate that is best for the mean over agents, and the scores with it, of the seeds' mean."""
    found: dict[float, Scores] = {}
    for rate in RATES:
        each = [run(way, topology, rate, task, steps) for task in tasks]
        found[rate] = tuple(mean(column) for column in zip(*each, strict=True))  # type: ignore[assignment]
    rate = max(found, key=lambda one: found[one][1])
    return rate, found[rate]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--real", action="store_true", help="4 agents in threads, and not 16 simulated ones")
    parser.add_argument("--alpha", type=float, default=0.1, help="of the Dirichlet distribution; small: data differ")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    args, console = parser.parse_args(), Console(highlight=False, width=120)
    size, run = (4, real) if args.real else (16, simulated)
    tasks = [digits(size, [seed], args.alpha) for seed in range(args.seeds)]
    cases: list[tuple[str, str]] = []
    for topology in ["ring"] if args.real else TOPOLOGIES:
        for way in WAYS:
            if topology != "ring" and ("exact" in way or way == "DecentLaM"):
                continue  # which need symmetric weights
            if "all-reduce" in way and topology != "ring":
                continue  # the same on all
            cases.append((topology, way))
    title = f"digits, {size} agents, Dirichlet {args.alpha:g}, {args.steps} steps, {args.seeds} seeds"
    table = Table("topology", "way", "rate", "agent 0", "mean", "worst", "of the mean model", title=title)
    for topology, way in track(cases, "training", console=Console(stderr=True)):
        rate, found = best(run, way, topology, tasks, args.steps)
        table.add_row(topology, way, f"{rate:g}", *(f"{one:.1f}%" for one in found))
    console.print(table)


if __name__ == "__main__":
    main()
