"""The same experiment in Shoal and in other simulators: lines of code, processor time, agreement of the results.

    pip install --no-deps decopt   # needs numpy, networkx and scipy
    python benchmarks/simulators.py
    python benchmarks/simulators.py --quick     # 8 and 64 agents, 20 steps

D-PSGD (adapt, then combine) with full gradients, on least squares and logistic regression, on a ring and an exponential
graph, from the same start in float64. A simulator that is not installed is left out, with a message. The exit status is
1 if two simulators end at different points.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import io
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from shoal import algorithms, topology
from shoal.sim import StackedFleet, per_agent

Floats = NDArray[np.float64]
DIMENSION, SAMPLES, LR, LIMIT = 20, 30, 0.1, 1e-10


@dataclass(frozen=True)
class Problem:
    """Every agent has its own samples.

    Attributes:
        A, b: Inputs [n, samples, d], and targets [n, samples]; 0 or 1 if it is logistic regression.
        graph: ``"ring"`` or ``"exponential"``.
        steps: How many.
        start: Of all agents, [n, d].
    """

    logistic: bool
    A: Floats
    b: Floats
    graph: str
    steps: int
    start: Floats


def problem(size: int, logistic: bool, graph: str, steps: int) -> Problem:
    chance = np.random.default_rng(size)
    A = chance.standard_normal((size, SAMPLES, DIMENSION))
    b = A @ chance.standard_normal(DIMENSION) + chance.standard_normal((size, SAMPLES))
    # As decopt draws its start, which it does not take as an argument.
    np.random.seed(0)
    start = np.random.normal(0, DIMENSION**-0.5, (DIMENSION, size)).T.copy()
    return Problem(logistic, A, (b > 0).astype(float) if logistic else b, graph, steps, start)


def graph_of(one: Problem) -> topology.Schedule:
    size = len(one.A)
    return topology.as_schedule(topology.RingGraph(size) if one.graph == "ring" else topology.ExponentialTwoGraph(size))


def with_shoal(one: Problem) -> Floats:
    def loss(x: torch.Tensor, A: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        z = A @ x
        return (torch.nn.functional.softplus(z) - b * z).mean() if one.logistic else (z - b).square().mean() / 2

    gradient = per_agent(loss, torch.from_numpy(one.A), torch.from_numpy(one.b))
    fleet = StackedFleet(graph_of(one))
    run = fleet.run(algorithms.GradientDescent(LR), torch.from_numpy(one.start), gradient, one.steps, every=1)
    return run.x.numpy()


def with_decopt(one: Problem) -> Floats:
    from dec_opt import dec_gd
    from dec_opt.linear_regression import LinearRegression
    from dec_opt.logistic_regression import LogisticRegression

    size, A, y = len(one.A), one.A.reshape(-1, DIMENSION), one.b.reshape(-1, 1)
    data = SimpleNamespace(A_train=A, y_train=y, A_test=A, y_test=y)
    options = {"topology": one.graph, "n_cores": size, "epochs": one.steps, "seed": 0, "stochastic": False}
    options |= {"algorithm": "exact_comm", "Q": 1, "consensus_lr": 1.0, "regularizer": 0}
    options |= {"initial_lr": LR, "lr_type": "constant"}
    options |= {"quantization_function": "full", "num_bits": 8, "dropout_p": 0, "fraction_coordinates": 1}
    parameters = SimpleNamespace(**options)
    model = (LogisticRegression if one.logistic else LinearRegression)(parameters)
    graph = dec_gd.GossipMatrix
    if one.graph != "ring":  # the only sparse graphs that it has are a ring and a torus
        graph = lambda topology, n_cores: SimpleNamespace(W=graph_of(one).matrix(0).T)  # noqa: E731
    with mock.patch.object(dec_gd, "GossipMatrix", graph), contextlib.redirect_stdout(io.StringIO()):
        dec_gd.DecGD(data, parameters, model)
    return np.asarray(model.x_estimate.T)


SIMULATORS: dict[str, tuple[str, Callable[[Problem], Floats]]] = {
    "shoal": ("shoal", with_shoal),
    "decopt": ("dec_opt", with_decopt),
}


def lines_of(function: Callable[[Problem], Floats]) -> int:
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") for line in inspect.getsource(function).split("\n")
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 and 64 agents, 20 steps")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    console = Console()
    found = {name: run for name, (module, run) in SIMULATORS.items() if importlib.util.find_spec(module)}
    for name in SIMULATORS.keys() - found.keys():
        console.print(f"{name} is not installed, and left out: pip install --no-deps {name}")
    for run in found.values():
        run(problem(8, False, "ring", 1))  # imports and first calls are not the experiment's
    table = Table("experiment", "agents", *(f"{name}, s" for name in found), "largest difference")
    agree = True
    for logistic in (False, True):
        for graph in ("ring", "exponential"):
            for size in (8, 64) if args.quick else (8, 64, 256, 1000):
                one = problem(size, logistic, graph, 20 if args.quick else 100)
                ends, seconds = [], []
                for run in found.values():
                    began = time.process_time()
                    ends.append(run(one))
                    seconds.append(f"{time.process_time() - began:.2f}")
                largest = max(float(np.abs(end - ends[0]).max()) for end in ends)
                agree = agree and largest < LIMIT
                what = f"{'logistic regression' if logistic else 'least squares'}, {graph}"
                table.add_row(what, str(size), *seconds, f"{largest:.1g}" if len(ends) > 1 else "")
    console.print(table)
    console.print("lines of code: " + ", ".join(f"{name} {lines_of(run)}" for name, run in found.items()))
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
