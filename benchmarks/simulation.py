"""Fleets of thousands in one process: the time of a consensus round, memory, a million agents, a long training run.

A round reads the state and writes a new one, so it is compared with a plain copy of the state, taken in turn with it in
the same process. Every case runs in a process of its own, whose memory is then the case's.

    python benchmarks/simulation.py             # about two minutes on a quiet machine of two cores; 4 GB of memory
    python benchmarks/simulation.py --quick     # small fleets, to see that everything works
    python benchmarks/simulation.py --only round --markdown

The exit status is 1 if a goal is not met. Goals hold for the full sizes only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import networkx as nx
import torch
from rich.console import Console
from rich.table import Table

from shoal.algorithms import GradientDescent
from shoal.algorithms.schedule_weights import ScheduleWeights
from shoal.bench.measurement import LoadWatch, here
from shoal.sim import StackedFleet, StackedMix, mixing_products, per_agent
from shoal.topology.families.graphs import ExponentialTwoGraph, MeshGrid2DGraph
from shoal.topology.families.one_peer import OnePeerExponential, OnePeerHypercube
from shoal.topology.families.static import ring
from shoal.topology.mixing import with_metropolis_hastings_weights
from shoal.topology.schedule import Schedule, Static

DIMENSION = 100
ROUND_LIMIT, MEMORY_LIMIT, MINUTE = 2.5, 3.0, 60.0
MB = 1_000_000
_CORES = os.cpu_count() or 1
_ONE_THREAD = mixing_products._ONE_THREAD


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        what: was done.
        figure: for people.
        compared: what it is held against, or of what it consists.
        goal: what it must be; empty if it is only reported.
        met: whether it is; None where there is no goal.
    """

    what: str
    figure: str
    compared: str
    goal: str = ""
    met: bool | None = None


def irregular(size: int) -> Schedule:
    """A sparse random graph, six neighbours on average, Metropolis-Hastings weights."""
    return Static(with_metropolis_hastings_weights(nx.fast_gnp_random_graph(size, 6 / size, seed=1)), name="sparse")


def consensus(name: str, topology: Schedule, repetitions: int, goal: bool) -> list[Row]:
    """Rounds of averaging, each into memory that an earlier one has left, in turn with copies of the state."""
    StackedMix(ring(8))(torch.randn(8, DIMENSION))  # what comes with the first use of a library is not the state's
    mix = StackedMix(topology)
    size, before = mix.size, _resident("VmRSS")
    x = torch.randn(size, DIMENSION, generator=torch.Generator().manual_seed(0))
    mean, nbytes = x.double().mean(0), x.nbytes
    _forget_peak()
    # Two rounds give the memory; and whatever a round's weights need is made when it is first run.
    warming = max(2, topology.period or 0)
    for number in range(warming):
        mix.begin(number)
        x = mix(x)
    peak = _resident("VmHWM") - before
    drift = (x.double().mean(0) - mean).abs().max().item()
    if drift > 1e-5:
        raise AssertionError(f"{name}: the mean moved by {drift}")
    out = torch.empty_like(x).copy_(x)
    rounds, copies = [], []
    for number in range(warming, warming + repetitions):
        mix.begin(number)
        began = time.perf_counter()
        out.copy_(x)
        between = time.perf_counter()
        x = mix(x)
        copies.append(between - began)
        rounds.append(time.perf_counter() - between)
    took, copy = median(rounds), median(copies)
    what = f"{name}, {size:,} agents, d = {DIMENSION}"
    ratio, memory = took / copy, peak / nbytes
    compared = f"{ratio:.2f} times a copy of the state ({1e3 * copy:.2f} ms; at best {min(rounds) / min(copies):.2f})"
    held = f"{memory:.2f} times the state ({nbytes / MB:.0f} MB)"
    return [
        Row(f"a round: {what}", f"{1e3 * took:.2f} ms", compared, *_judge(goal, ratio, ROUND_LIMIT, "times")),
        Row(f"memory: {what}", f"{peak / MB:.0f} MB", held, *_judge(goal, memory, MEMORY_LIMIT, "times")),
    ]


def million(size: int, quick: bool) -> list[Row]:
    """Training steps of a million agents, from the check of what the algorithm needs to the result."""
    topology, dimension, steps = OnePeerExponential(size), 10 if quick else DIMENSION, 5
    target = torch.arange(size, dtype=torch.float32).unsqueeze(1) / size
    StackedMix(ring(8))(torch.randn(8, DIMENSION))
    before = _resident("VmRSS")
    _forget_peak()
    began = time.perf_counter()
    found = StackedFleet(topology).run(GradientDescent(0.1), torch.zeros(dimension), lambda x: x - target, steps)
    took = time.perf_counter() - began
    peak = _resident("VmHWM") - before
    # The mean of the agents moves as one agent would that knew the mean of all targets.
    expected = target.double().mean().item() * (1 - 0.9**steps)
    error = abs(found.x.double().mean().item() - expected)
    if error > 1e-5:
        raise AssertionError(f"the mean is off by {error}")
    figure = f"{took / steps:.2f} s a step"
    compared = f"{steps} steps in {took:.1f} s; {peak / MB:,.0f} MB, {peak / found.x.nbytes:.1f} times the state"
    return [Row(f"D-PSGD, one-peer exponential, {size:,} agents, d = {dimension}", figure, compared, "runs", True)]


def logistic(size: int, steps: int, goal: bool) -> list[Row]:
    """Logistic regression, every agent with its own 50 samples and its own truth."""
    samples, generator = 50, torch.Generator().manual_seed(0)
    A = torch.randn(size, samples, DIMENSION, generator=generator)
    truth = torch.randn(DIMENSION, generator=generator) + torch.randn(size, DIMENSION, generator=generator) / 2
    b = (A @ truth.unsqueeze(-1)).squeeze(-1).sign()

    def loss(x: torch.Tensor, A: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softplus(-b * (A @ x)).mean() + 1e-3 * x.square().sum()

    fleet = StackedFleet(Static(ExponentialTwoGraph(size)))
    began = time.perf_counter()
    found = fleet.run(GradientDescent(0.2), torch.zeros(DIMENSION), per_agent(loss, A, b), steps)
    took = time.perf_counter() - began
    mean = found.x.mean(0)
    total = loss(mean, A.view(-1, DIMENSION), b.view(-1)).item()
    right = ((A.view(-1, DIMENSION) @ mean).sign() == b.view(-1)).double().mean().item()
    if not right > 0.8:
        raise AssertionError(f"the mean of the agents is right for {right:.1%} of all samples only")
    what = f"logistic regression, {size:,} agents, {steps:,} steps, d = {DIMENSION}, {samples} samples each"
    compared = f"loss of the mean {total:.3f}, right for {right:.1%}; apart by {(found.x - mean).norm(dim=1).max():.3f}"
    return [Row(what, f"{took:.1f} s", compared, *_judge(goal, took, MINUTE, "s"))]


def beside_others(repetitions: int) -> list[Row]:
    """Small sparse products beside busy processes, with one thread and, as a comparison, with several."""
    found = []
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(max(1, _CORES - 1))]
    try:
        for size, dimension in ((16, 10), (64, 100), (256, 1000)):
            x = torch.randn(size, dimension, generator=torch.Generator().manual_seed(0))
            weights, out = ScheduleWeights(MeshGrid2DGraph(size))[0], torch.empty_like(x)
            took = []
            for limit in (mixing_products._ONE_THREAD, 0):
                mixing_products._ONE_THREAD = limit
                multiply = mixing_products.product(weights, "mix", x.dtype, x.device)
                multiply(out, x)
                times = []
                for _ in range(repetitions):
                    began = time.perf_counter()
                    multiply(out, x)
                    times.append(time.perf_counter() - began)
                took.append((median(times), sum(times) / len(times)))
            mixing_products._ONE_THREAD = _ONE_THREAD
            (middle, mean), (middle_of_several, mean_of_several) = took
            what = f"a grid's sparse product beside busy processes, {size} agents, d = {dimension}"
            compared = (
                f"mean {1e6 * mean:,.0f} us; with {torch.get_num_threads()} threads {1e6 * middle_of_several:,.0f} us, "
                f"mean {1e6 * mean_of_several:,.0f} us: {middle_of_several / middle:.1f} times"
            )
            found.append(Row(what, f"{1e6 * middle:,.0f} us", compared))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return found


def cases(quick: bool) -> dict[str, dict[str, Callable[[], list[Row]]]]:
    """What there is to run, by part and name."""
    size, many, repetitions = (2_000, 20_000, 8) if quick else (100_000, 1_000_000, 51)
    return {
        "round": {
            "ring": lambda: consensus("ring", ring(size), repetitions, not quick),
            "one-peer": lambda: consensus("one-peer exponential", OnePeerExponential(size), repetitions, not quick),
            "pairs": lambda: consensus("pairs", OnePeerHypercube(1 << (size - 1).bit_length()), repetitions, False),
            "sparse": lambda: consensus("irregular sparse graph", irregular(size), repetitions, False),
        },
        "million": {
            "steps": lambda: million(many, quick),
            "ring": lambda: consensus("ring", ring(many), max(8, repetitions // 4), False),
        },
        "load": {"sparse": lambda: beside_others(20 if quick else 200)},
        "train": {"logistic": lambda: logistic(50 if quick else 1000, 50 if quick else 1000, not quick)},
    }


def _judge(goal: bool, value: float, limit: float, unit: str) -> tuple[str, bool | None]:
    return (f"≤ {limit:g} {unit}", value <= limit) if goal else ("", None)


def _resident(which: str) -> int:
    """Bytes of this process in memory: now (VmRSS), or at most since :func:`_forget_peak` (VmHWM)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[which].split()[0]) * 1024


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def run_case(part: str, name: str, quick: bool) -> list[Row]:
    """A case in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--case", part, name, *(["--quick"] if quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=1800, check=True)
    return [Row(**row) for row in json.loads(done.stdout)]


def table(rows: Sequence[Row]) -> Table:
    made = Table(title="Simulated fleets", title_justify="left")
    for name in ("what", "figure", "compared with", "goal", ""):
        made.add_column(name, justify="right" if name == "figure" else "left", no_wrap=name in ("figure", "goal", ""))
    for row in rows:
        verdict = _verdict(row)
        made.add_row(*_cells(row), f"[{'green' if row.met else 'bold red'}]{verdict}[/]" if verdict else "")
    return made


def markdown(rows: Sequence[Row]) -> str:
    lines = ["| what | figure | compared with | goal | |", "| --- | ---: | --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {' | '.join([*_cells(row), _verdict(row)])} |" for row in rows)])


def _cells(row: Row) -> list[str]:
    return [row.what, row.figure, row.compared, row.goal]


def _verdict(row: Row) -> str:
    return "" if row.met is None else "met" if row.met else "not met"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["round", "million", "load", "train"], help="these parts only")
    parser.add_argument("--quick", action="store_true", help="small fleets, no goals")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    every = cases(args.quick)
    if args.case:
        part, name = args.case
        print(json.dumps([asdict(row) for row in every[part][name]()]))
        return 0
    watch, rows = LoadWatch(), []
    for part in args.only or every:
        for name in every[part]:
            print(f"{part}: {name}", file=sys.stderr)
            rows += run_case(part, name, args.quick)
    load = watch.load()
    if args.markdown:
        print(markdown(rows))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(table(rows))
    threads = os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads()))
    print(f"{here()}; {threads} threads\n{load}; the machine was {'quiet' if load.quiet else 'busy'}")
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
