"""BAGUA's decentralized algorithms: accuracy, time and bytes of a step over 100 Mbit/s, and its table of complexities.

    sudo python reproduce/bagua_decentralized.py    # without root: time and bytes by the network model

Decentralized SGD in full precision (peer selection "all" and "shift_one"), in low precision, between machines
(hierarchical), and with an exchange in every fourth step only, of Gan et al. 2021 (arXiv:2107.01499) and of BAGUA's
tutorial. Three parts:

1. Accuracy on scikit-learn's digits: eight simulated agents, several seeds, the same learning rates for all.
2. A step of real agents that are attached by ``with_bagua``: one job a seed, four machines that are network namespaces
   with NICs of 100 Mbit/s, one agent on each, and two on each for the hierarchical algorithms. Bytes are
   counted at the NIC of the first machine, with all headers.
3. The tutorial's table of the busiest node: messages and bytes, counted for 8 to 64 nodes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

import shoal
import shoal.compat.bagua as bagua
from shoal.algorithms import Algorithm, GradientDescent, LocalSteps, LowPrecision, OfMachines, ParallelGradientDescent
from shoal.bench.measurement import Figures, Reporter
from shoal.compat.bagua.algorithms.base import Algorithm as BaguaAlgorithm
from shoal.compat.bagua.algorithms.decentralized import (
    DecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    thirds,
)
from shoal.compat.bagua.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from shoal.compression import MinMaxUInt8
from shoal.netmodel import Link, Network, direct_allreduce, rounds_of, simulate
from shoal.sim import StackedFleet, StackedModel
from shoal.topology import AllReduce, ShiftOne, between_machines
from shoal.topology.schedule import Schedule

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from _common import Claim, Interval, Report, arguments, exceeds
from _machines import DEVICE, obstacle, run_on_machines
from _models import digits_net, nbytes_of
from papers.tables import BusiestRow, busiest_node_table
from ring_star import Shards, digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AGENTS, PER_MACHINE, MACHINES, INTERVAL = 8, 2, 4, 4
EPOCHS = 20
MBIT, LATENCY = 100, 100e-6
"""Of a NIC, Mbit/s; and the latency of a message in the network model, seconds."""
WIDTH, STEPS, WARMUPS = 512, 8, 4
"""Of the network in part 2; timed steps, a multiple of the interval, and steps before them."""

CENTRAL, ALL, SHIFT_ONE, LOW = "gradient all-reduce", "all", "shift_one", "low precision"
SELDOM = f"shift_one, every {INTERVAL}th step"
HIERARCHICAL, HIERARCHICAL_LOW = "shift_one, hierarchical", "low precision, hierarchical"
FLAT = "shift_one, two agents a machine"
SIMULATED: dict[str, Callable[[], tuple[Algorithm, Schedule]]] = {
    CENTRAL: lambda: (ParallelGradientDescent(1.0), AllReduce(AGENTS)),
    ALL: lambda: (_full(), AllReduce(AGENTS)),
    SHIFT_ONE: lambda: (_full(), ShiftOne(AGENTS)),
    SELDOM: lambda: (LocalSteps(_full(), INTERVAL), ShiftOne(AGENTS)),
    LOW: lambda: (LowPrecision(1.0), thirds(AGENTS)),
    HIERARCHICAL: lambda: (OfMachines(_full()), between_machines(ShiftOne(AGENTS // PER_MACHINE), PER_MACHINE)),
    HIERARCHICAL_LOW: lambda: (
        OfMachines(LowPrecision(1.0)),
        between_machines(thirds(AGENTS // PER_MACHINE), PER_MACHINE),
    ),
}
REAL: dict[str, Callable[[], BaguaAlgorithm]] = {
    CENTRAL: GradientAllReduceAlgorithm,
    ALL: lambda: DecentralizedAlgorithm(hierarchical=False),
    SHIFT_ONE: lambda: DecentralizedAlgorithm(False, "shift_one"),
    SELDOM: lambda: DecentralizedAlgorithm(False, "shift_one", INTERVAL),
    LOW: lambda: LowPrecisionDecentralizedAlgorithm(hierarchical=False),
    FLAT: lambda: DecentralizedAlgorithm(False, "shift_one"),
    HIERARCHICAL: lambda: DecentralizedAlgorithm(True, "shift_one"),
    HIERARCHICAL_LOW: lambda: LowPrecisionDecentralizedAlgorithm(hierarchical=True),
}
TWO_A_MACHINE = (FLAT, HIERARCHICAL, HIERARCHICAL_LOW)


def _full() -> Algorithm:
    return GradientDescent(1.0, atc=False)


# 1. Accuracy


def accuracy(way: str, seed: int, epochs: int) -> float:
    """Percent of the test images, the mean of the agents' own models."""
    task = digits(seed, epochs)
    shards = Shards(task, AGENTS, seed)
    stacked = StackedModel(shards.network, AGENTS)
    algorithm, topology = SIMULATED[way]()
    fleet = StackedFleet(topology, seed=seed, agents_per_machine=PER_MACHINE)
    x: Tensor = fleet.run(algorithm, stacked.start, shards.gradient, shards.steps, lr_lambda=shards.rate).x
    images, labels = task.test
    found = stacked.outputs(x, images.expand(AGENTS, *images.shape)).argmax(-1)
    return 100 * float((found == labels).double().mean())


# 2. Time and bytes of a step

Costs = dict[str, dict[str, list[float]]]
"""By way: ``seconds`` of a step and ``bytes`` that leave a machine in it, one for each seed."""


def sent() -> int:
    """Bytes that have left this machine's NIC.

    /proc/net is that of the process's network namespace, while /sys stays that of the namespace that mounted it.
    """
    [line] = [one for one in Path("/proc/net/dev").read_text().splitlines() if one.strip().startswith(f"{DEVICE}:")]
    return int(line.split(":")[1].split()[8])  # after eight counts of what was received


def agent(ways: Sequence[str]) -> None:
    """Take steps on random images, one way after the other, on each agent of a job."""
    reporter = Reporter()
    torch.set_num_threads(1)
    bagua.init_process_group()
    dist.init_process_group("gloo")  # for the measurement alone
    numbers = torch.Generator().manual_seed(shoal.rank())
    images, labels = torch.randn(4, 1, 8, 8, generator=numbers), torch.randint(10, (4,), generator=numbers)
    figures: list[Figures] = []
    for way in ways:
        model = digits_net(WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        bagua.with_bagua(model, [optimizer], REAL[way]())
        began, before = 0.0, 0
        for number in range(WARMUPS + STEPS):
            if number == WARMUPS:
                dist.barrier()
                began, before = time.monotonic(), sent()
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
        dist.barrier()
        figures.append(
            Figures(
                way,
                nbytes_of(model),
                shoal.size(),
                {"seconds": [(time.monotonic() - began) / STEPS], "bytes": [(sent() - before) / STEPS]},
            )
        )
        bagua.without_bagua(model)
        reporter.progress(way, len(figures), len(ways))
    reporter.send({"figures": [asdict(one) for one in figures]})
    dist.destroy_process_group()
    shoal.shutdown()


def measured(report: Report, seeds: int) -> Costs:
    found: Costs = {}
    for seed in range(seeds):
        for per_machine in (1, PER_MACHINE):
            ways = [way for way in REAL if (way in TWO_A_MACHINE) == (per_machine > 1)]
            script = [__file__, "--agent", *ways]
            figures = run_on_machines(MACHINES, MBIT * 1e6 / 8, per_machine, script, lambda *_: None)
            for one in figures:
                values = found.setdefault(one.kind, {"seconds": [], "bytes": []})
                for name in values:
                    values[name] += one.values[name]
            said = ", ".join(f"{one.kind} {1e3 * one.values['seconds'][0]:.0f} ms" for one in figures)
            report.say(f"job {seed + 1} of {seeds}, {per_machine} agents a machine: {said}")
    return found


def modelled(nbytes: float) -> Costs:
    """The same by the network model, without computation, headers, and agents that share a machine."""
    network = Network(MACHINES, Link(LATENCY, MBIT * 1e6 / 8))
    short = float(MinMaxUInt8().nbytes(round(nbytes / 4), torch.float32))
    mean, pairs, circle = (
        [direct_allreduce(MACHINES, nbytes)] * INTERVAL,
        list(rounds_of(ShiftOne(MACHINES), nbytes, INTERVAL)),
        list(rounds_of(thirds(MACHINES), short, INTERVAL)),
    )
    steps = {
        **dict.fromkeys((CENTRAL, ALL), mean),
        **dict.fromkeys((SHIFT_ONE, SELDOM, HIERARCHICAL), pairs),
        **dict.fromkeys((LOW, HIERARCHICAL_LOW), circle),
    }
    found: Costs = {}
    for way, rounds in steps.items():
        seldom = INTERVAL if way == SELDOM else 1
        leaves = sum(float(one.nbytes[one.source == 0].sum()) for step in rounds for one in step)
        seconds = simulate(network, rounds).seconds_per_step()
        found[way] = {"seconds": [seconds / seldom], "bytes": [leaves / len(rounds) / seldom]}
    return found


# Claims


def accuracy_claims(found: dict[str, list[float]]) -> list[Claim]:
    """Decentralized SGD converges as centralized SGD does (the tutorial; section 4 of the paper)."""
    claims = []
    for way, values in found.items():
        if way == CENTRAL:
            continue
        less = Interval.of(a - b for a, b in zip(found[CENTRAL], values, strict=True))
        claims.append(
            Claim(
                f"Accuracy, {way}: that of the all-reduce of gradients, within 1 point",
                f"{Interval.of(values):.2f}% against {Interval.of(found[CENTRAL]):.2f}%, less by {less:.2f}",
                less.between(most=1),
            )
        )
    return claims


def cost_claims(costs: Costs, nbytes: float) -> list[Claim]:
    """The tutorial's statements on bytes and time on a slow network."""

    def models(way: str, count: float) -> Claim:
        found = [value / nbytes for value in costs[way]["bytes"]]
        off = max(abs(value / count - 1) for value in found)
        return Claim(
            f"Bytes, {way}: a machine sends {count:g} times the model in a step, within 10%",
            f"{Interval.of(found):.3f} times",
            off <= 0.1,
        )

    def faster(way: str, other: str) -> Claim:
        paper = f"Time, {way}: faster than {other} at {MBIT} Mbit/s"
        return exceeds(paper, costs[other]["seconds"], costs[way]["seconds"], unit=" s")

    found = [models(SHIFT_ONE, 1), models(SELDOM, 1 / INTERVAL), models(LOW, 0.5)]
    found += [faster(SHIFT_ONE, CENTRAL), faster(LOW, SHIFT_ONE), faster(SELDOM, SHIFT_ONE)]
    if FLAT in costs:
        found += [models(HIERARCHICAL, 1), faster(HIERARCHICAL, FLAT), faster(HIERARCHICAL_LOW, HIERARCHICAL)]
    return found


def complexity_claims(tables: dict[int, Sequence[BusiestRow]]) -> list[Claim]:
    """The tutorial's table: how latency and bandwidth grow with the number of nodes."""
    sizes = sorted(tables)
    found = []
    for few, many in zip(tables[sizes[0]], tables[sizes[-1]], strict=True):
        if "BytePS" in few.pattern or "d peers" in few.pattern:
            continue  # rows that are not in the tutorial's table
        times = sizes[-1] / sizes[0]
        growth = {
            "latency": many.counted.steps / few.counted.steps,
            "bandwidth": many.counted.bytes / few.counted.bytes,
        }
        stated = {"latency": few.latency, "bandwidth": few.bandwidth}
        right = all(
            # O(n): as n, up to the lower order of 2 (n - 1); O(1): bounded by a constant.
            0.8 * times <= growth[what] <= 1.25 * times if stated[what] == "O(n)" else growth[what] <= 1.25
            for what in growth
        )
        found.append(
            Claim(
                f"Table of complexities: {few.pattern}, latency {few.latency}, bandwidth {few.bandwidth}",
                f"from {sizes[0]} to {sizes[-1]} nodes steps times {growth['latency']:.2f}, bytes times "
                f"{growth['bandwidth']:.2f}",
                right,
            )
        )
    return found


# Tables and figure


def show_costs(report: Report, costs: Costs, accuracies: dict[str, list[float]], model: Costs, nbytes: float) -> None:
    def cells(way: str) -> list[str]:
        seconds = Interval.of(1e3 * one for one in costs[way]["seconds"])
        sends = Interval.of(one / nbytes for one in costs[way]["bytes"])
        by_model = f"{1e3 * fmean(model[way]['seconds']):.0f}" if way in model else ""
        return [f"{seconds:.0f}", by_model, f"{sends:.3f}"]

    report.table(
        f"{AGENTS} simulated agents on digits; a step of real agents with {nbytes / 1e6:.2f} MB of parameters on "
        f"{MACHINES} machines, {MBIT} Mbit/s",
        ["algorithm", "% of test images", "ms a step", "ms by the network model", "models that a machine sends"],
        [[way, f"{Interval.of(accuracies[way]):.2f}" if way in accuracies else "", *cells(way)] for way in costs],
    )


def show_complexity(report: Report, tables: dict[int, Sequence[BusiestRow]], nbytes: float) -> None:
    rows = [
        [
            rows[0].pattern,
            f"{rows[0].latency}, {rows[0].bandwidth}",
            *(f"{row.counted.steps}, {row.counted.messages}, {row.counted.bytes / nbytes:.2f}" for row in rows),
        ]
        for rows in zip(*tables.values(), strict=True)
    ]
    title = "The busiest node in one averaging: steps that wait for each other, messages, models sent or received"
    report.table(title, ["pattern", "latency, bandwidth", *(f"{size} nodes" for size in tables)], rows)


def draw(figure: Figure, costs: Costs, accuracies: dict[str, list[float]], nbytes: float) -> None:
    left, right = figure.subplots(1, 2)
    names = list(accuracies)
    values = [Interval.of(accuracies[name]) for name in names]
    left.errorbar([one.mean for one in values], names, xerr=[one.reach for one in values], fmt="o", capsize=3)
    left.set(xlabel="% of test images", title="accuracy, digits")
    shown = [Interval.of(1e3 * value for value in costs[name]["seconds"]) for name in costs]
    right.barh(list(costs), [one.mean for one in shown], xerr=[one.reach for one in shown], capsize=3)
    right.set(xlabel="ms a step", title=f"{MACHINES} machines, {MBIT} Mbit/s, {nbytes / 1e6:.2f} MB")
    for axes in (left, right):
        axes.invert_yaxis()
        axes.grid(alpha=0.25, axis="x")
        axes.spines[["top", "right"]].set_visible(False)


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__, seeds=5)
    made.add_argument("--modelled", action="store_true", help="time and bytes by the network model, as without root")
    made.add_argument("--agent", nargs="+", metavar="WAY", help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.agent:
        agent(args.agent)
        return 0
    report = Report(__file__, "BAGUA: decentralized algorithms and their costs", args)
    torch.set_num_threads(1)
    epochs = 4 if args.quick else EPOCHS
    accuracies: dict[str, list[float]] = {}
    for way in SIMULATED:
        accuracies[way] = [accuracy(way, seed, epochs) for seed in range(args.seeds)]
        report.say(f"{way}: {Interval.of(accuracies[way]):.2f}% of test images")
    report.claim(accuracy_claims(accuracies))
    nbytes = float(nbytes_of(digits_net(WIDTH)))
    model = modelled(nbytes)
    why = "--modelled or --quick" if args.modelled or args.quick else obstacle()
    if why:
        report.note(f"Time and bytes of a step are the network model's: {why}.")
        costs = {way: {name: one * args.seeds for name, one in values.items()} for way, values in model.items()}
    else:
        costs = measured(report, args.seeds)
    show_costs(report, costs, accuracies, model, nbytes)
    report.note(
        "The interval is Shoal's `LocalSteps` in the simulation, which exchanges at the end of every fourth step; "
        "`with_bagua`, as BAGUA does, in steps 1, 5, 9. The times of one agent a machine and of two are from two jobs."
    )
    report.claim(cost_claims(costs, nbytes))
    tables = {size: busiest_node_table(size, 2, nbytes=nbytes) for size in (8, 16, 32, 64)}
    show_complexity(report, tables, nbytes)
    report.claim(complexity_claims(tables))
    report.figure(lambda figure: draw(figure, costs, accuracies, nbytes), (10, 3.6))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
