"""What a decentralized optimizer does for each parameter of a model, beside the wrapped optimizer's own step.

    python benchmarks/bookkeeping.py                     # a world of one
    shoal run -n 2 benchmarks/bookkeeping.py             # two agents, through shared memory
    python benchmarks/bookkeeping.py --parameters 4000 --numel 1024

The same numbers as many small parameters and as one: what the many cost more, and the plain optimizer's step does not,
is bookkeeping. Counted is the processor time of the thread that trains, which neither waiting for a neighbour nor other
programs lengthen; the least of many steps, the models in turn. A forward pass that computes nothing comes before each
step, since some exchanges begin there; during the backward pass, the backward pass is counted as well.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.algorithms import ExactDiffusion

Make = Callable[[torch.optim.Optimizer, nn.Module], torch.optim.Optimizer]


class Many(nn.Module):
    """``count`` parameters of equal size, ``numel`` numbers in all."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(numel // count)) for _ in range(count))

    def forward(self) -> None:
        """Nothing but the hooks."""


def exact_diffusion(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    topology = shoal.topology.FullyConnectedGraph(shoal.size())
    return shoal.DecentralizedOptimizer(optimizer, model, ExactDiffusion(1.0, lazy=True), topology=topology)


def during_backward(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    return shoal.DecentralizedOptimizer(optimizer, model, overlap="backward")


WAYS: dict[str, Make] = {
    "adapt, then combine": shoal.DecentralizedOptimizer,
    "adapt with combine": partial(
        shoal.DecentralizedOptimizer, algorithm=shoal.algorithms.GradientDescent(1.0, atc=False)
    ),
    "averaged gradients": shoal.bluefog.DistributedGradientAllreduceOptimizer,
    "during the backward pass": during_backward,
    "windows, put": shoal.optim.DistributedWinPutOptimizer,
    "windows, push-sum": shoal.optim.DistributedPushSumOptimizer,
    "exact diffusion": exact_diffusion,
}


class Case:
    """A model with what trains it, and the least time of its steps."""

    def __init__(self, count: int, numel: int, make: Make | None, backward: bool) -> None:
        self.model = Many(count, numel)
        inner = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.optimizer: Any = inner if make is None else make(inner, self.model)
        self.least, self._backward = float("inf"), backward
        for param in self.model.parameters():
            param.grad = torch.ones_like(param)

    def step(self) -> None:
        loss: Tensor | None = None
        if self._backward:
            self.optimizer.zero_grad()
            self.model()
            loss = torch.cat(list(self.model.parts)).sum()
        shoal.barrier()
        began = time.thread_time()
        if loss is not None:
            loss.backward()
        else:
            self.model()
        self.optimizer.step()
        self.least = min(self.least, time.thread_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description="what is done for each parameter in a step")
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--numel", type=int, default=64, help="numbers in each")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shoal.init()
    shoal.set_topology(shoal.topology.FullyConnectedGraph(shoal.size()))
    count, total = arguments.parameters, arguments.parameters * arguments.numel
    rows = []
    for way, make in WAYS.items():
        backward = make is during_backward
        cases = [Case(k, total, one, backward) for one in (None, make) for k in (1, count)]
        for _ in range(arguments.steps):
            for case in cases:
                case.step()
        plain_one, plain_many, one, many = (case.least for case in cases)
        rows.append((way, plain_many, many, (many - one) - (plain_many - plain_one)))
        shoal.barrier()
        for case in cases[2:]:
            case.optimizer.close()
    if shoal.rank() == 0:
        agents = "1 agent" if shoal.size() == 1 else f"{shoal.size()} agents"
        print(f"{agents}, {count} parameters of {arguments.numel} numbers: milliseconds of a step")
        print(f"{'':26}{'plain SGD':>11}{'Shoal':>9}{'bookkeeping':>13}{'of plain':>10}")
        for way, plain, shoals, more in rows:
            print(f"{way:26}{1e3 * plain:11.2f}{1e3 * shoals:9.2f}{1e3 * more:13.3f}{more / plain:10.1%}")
    shoal.shutdown()


if __name__ == "__main__":
    main()
