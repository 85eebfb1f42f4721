"""What a step through an algorithm's equation costs, beside the ways that only plain SGD has.

    shoal run -n 2 benchmarks/equation.py             # through shared memory

The same step twice: as ``DistributedAdaptThenCombineOptimizer`` takes it, and as any algorithm's equation would be.
The model is a perceptron of ten layers; seconds of the slowest agent, the ways in turn, the median.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

import shoal
from shoal.algorithms import GradientDescent
from shoal.bench.measurement import Reporter, compare
from shoal.optim.malloc_trimming import keep_freed_memory


class AsEquation(GradientDescent):
    """Unknown to the optimizer, which so takes its equation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="+", default=[64, 256, 1024], help="of the layers")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=31)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    shoal.init()
    shoal.set_topology(shoal.topology.FullyConnectedGraph(shoal.size()))
    reporter = Reporter()
    for width in args.width:
        model = nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(width, width), nn.ReLU())))
        x = torch.randn(args.batch, width)
        for overlap in (None, "backward"):
            cases = {
                "its own way": step_of(model, x, GradientDescent(1.0), overlap),
                "its equation": step_of(model, x, AsEquation(1.0), overlap),
            }
            found = compare(reporter, f"width {width}", cases, args.repetitions)
            own, equation = (statistics.median(found[name]) for name in cases)
            if shoal.rank() == 0:
                where = "during backward" if overlap else "behind the pass"
                print(
                    f"width {width}, {where}: {1e3 * own:.2f} ms, through its equation {1e3 * equation:.2f} ms, "
                    f"{equation / own:.3f} times"
                )
    shoal.shutdown()
    dist.destroy_process_group()


def step_of(
    like: nn.Module, x: torch.Tensor, algorithm: GradientDescent, overlap: Literal["backward"] | None
) -> Callable[[], object]:
    model = deepcopy(like)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = shoal.DecentralizedOptimizer(sgd, model, algorithm, overlap=overlap)
    return partial(step, model, optimizer, x)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
