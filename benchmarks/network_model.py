"""Does the network model tell the truth? Fits it on real runs at one rate and checks it at others.

Machines are network namespaces on one Ethernet bridge, their NICs held to a rate in both directions by the kernel
(``tc tbf``). Agents on them average for real; the model (``shoal.netmodel``) is fitted at the first rate on plain
exchanges and then has to predict other topologies, shared NICs, stragglers, gradient lag and all-reduces, also at
other rates.

    sudo python benchmarks/network_model.py                          # about ten minutes; needs root, ip and tc
    sudo python benchmarks/network_model.py --fit 200mbit --check 100mbit 300mbit
    sudo python benchmarks/network_model.py --markdown --json out/network_model.json

The machine must be otherwise quiet: the load is printed. The exit status is 1 if a prediction misses by more than 15%.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import shoal
from _machines import run_on_machines
from shoal.bench.measurement import Figures, Load, LoadWatch, Reporter, compare, here
from shoal.netmodel import Link, Network, Step, direct_allreduce, hierarchical, ring_allreduce, rounds_of, simulate
from shoal.netmodel.network import parse_rate
from shoal.netmodel.probe import Observation, fit_link
from shoal.topology.families import graphs as g
from shoal.topology.families.one_peer import OnePeerExponential
from shoal.topology.schedule import Schedule, as_schedule

MACHINES = 4
KB, MB = 1000, 1_000_000
LIMIT = 0.15
REPETITIONS = 5


@dataclass(frozen=True)
class Case:
    """Something that agents do, and that the model predicts.

    Attributes:
        name: what it is.
        nbytes: of one agent's tensor.
        steps: what the model is told.
        act: what an agent does.
        compute: seconds that each agent computes (sleeps) before each step, by rank.
        lag: steps that the messages may be behind.
        degree: for the cases that the model is fitted on, messages of each agent, all through its own NIC.
    """

    name: str
    nbytes: int
    steps: list[Step]
    act: Callable[[torch.Tensor, torch.Tensor], object]
    compute: tuple[float, ...] = ()
    lag: int = 0
    degree: int = 0


def averaging(
    name: str,
    schedule: Schedule,
    nbytes: int,
    rounds: int,
    *,
    compute: tuple[float, ...] = (),
    lag: int = 0,
    degree: int = 0,
) -> Case:
    """Rounds of a schedule."""

    def act(x: torch.Tensor, out: torch.Tensor) -> None:
        before: shoal.Handle[torch.Tensor] | None = None
        for number in range(rounds):
            if compute:
                time.sleep(compute[shoal.rank()])
            mixing = schedule.mixing(number, shoal.rank())
            weights = mixing.self_weight, dict(mixing.sources), dict(mixing.destinations)
            if not lag:
                shoal.neighbor_allreduce(x, *weights, enable_topo_check=False, out=out)
                continue
            if before is not None:
                before.wait()
            before = shoal.nonblocking.neighbor_allreduce(x, *weights, enable_topo_check=False)
        if before is not None:
            before.wait()

    return Case(name, nbytes, list(rounds_of(schedule, nbytes, rounds)), act, compute, lag, degree)


def fitted_cases(size: int) -> list[Case]:
    """Plain exchanges: one, two and three messages on each NIC, small and large."""
    graphs = {1: g.RingGraph(size, connect_style=2), 2: g.RingGraph(size), 3: g.FullyConnectedGraph(size)}
    return [
        averaging(f"{degree} on each NIC", as_schedule(graph), nbytes, 1, degree=degree)
        for degree, graph in graphs.items()
        for nbytes in (4 * KB, 100 * KB, 1 * MB, 4 * MB)
    ]


def checked_cases(size: int, per_machine: int) -> list[Case]:
    """What the model has not seen."""
    steady, late = 0.05, 0.25
    straggling = tuple(late if rank == 1 else steady for rank in range(size))
    cases = []
    for nbytes in (MB // 2, 2 * MB):
        cases += [
            averaging("ring", as_schedule(g.RingGraph(size)), nbytes, 3),
            averaging("star", as_schedule(g.StarGraph(size)), nbytes, 3),
            averaging("exponential", as_schedule(g.ExponentialTwoGraph(size)), nbytes, 3),
            averaging("one-peer exponential, a period", OnePeerExponential(size), nbytes, (size - 1).bit_length()),
            Case("all-reduce (Shoal, direct)", nbytes, [direct_allreduce(size, nbytes)], _allreduce),
            Case("all-reduce (Gloo, ring)", nbytes, [ring_allreduce(size, nbytes)], _gloo_allreduce),
        ]
        if per_machine > 1:
            ring = g.RingGraph(size // per_machine)
            (between,) = rounds_of(ring, nbytes, 1)
            stages = hierarchical(size // per_machine, per_machine, nbytes, between)
            cases.append(Case("hierarchical, a ring of machines", nbytes, [stages], _hierarchical))
    cases += [
        averaging("ring, one straggler", as_schedule(g.RingGraph(size)), MB, 8, compute=straggling),
        averaging("one-peer, one straggler", OnePeerExponential(size), MB, 8, compute=straggling),
        averaging("ring, gradient lag of 1", as_schedule(g.RingGraph(size)), MB, 8, compute=(0.15,) * size, lag=1),
    ]
    return cases


def _allreduce(x: torch.Tensor, out: torch.Tensor) -> None:
    shoal.allreduce(x, out=out)


def _gloo_allreduce(x: torch.Tensor, out: torch.Tensor) -> None:
    dist.all_reduce(out)


def _hierarchical(x: torch.Tensor, out: torch.Tensor) -> None:
    count, machine = shoal.bluefog.machine_size(), shoal.bluefog.machine_rank()
    beside = sorted({(machine - 1) % count, (machine + 1) % count} - {machine})
    weights = 1 / 3, dict.fromkeys(beside, 1 / 3), beside
    shoal.bluefog.hierarchical_neighbor_allreduce(x, *weights, enable_topo_check=False, out=out)


def cases_of(part: str, size: int, per_machine: int) -> list[Case]:
    return fitted_cases(size) if part == "fit" else checked_cases(size, per_machine)


def agent(part: str) -> None:
    """What each agent of a job runs."""
    reporter = Reporter()
    torch.set_num_threads(1)
    # The wire is what is measured, and whoever else wants the processor should not be. Later threads inherit it.
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group("gloo")
    shoal.init()
    figures = []
    for number, case in enumerate(cases_of(part, shoal.size(), shoal.local_size())):
        x = torch.full((case.nbytes // 4,), float(shoal.rank()))
        out = torch.zeros_like(x)
        act = {case.name: lambda case=case, x=x, out=out: case.act(x, out)}
        seconds = compare(reporter, case.name, act, REPETITIONS)
        figures.append(Figures(str(number), case.nbytes, shoal.size(), seconds))
    reporter.send({"figures": [asdict(one) for one in figures]})
    shoal.shutdown()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Row:
    """One case at one rate: what the model said, and what was."""

    rate: float
    agents_per_machine: int
    case: str
    nbytes: int
    measured: list[float]
    predicted: float

    @property
    def seconds(self) -> float:
        return statistics.median(self.measured)

    @property
    def error(self) -> float:
        return self.predicted / self.seconds - 1


def measure(rate: float, part: str, per_machine: int) -> list[tuple[Case, list[float]]]:
    """Run the cases of a part for real, at a rate."""
    script = [str(Path(__file__).resolve()), "--agent", part]
    figures = run_on_machines(MACHINES, rate, per_machine, script, lambda doing, done, total: None)
    cases = cases_of(part, MACHINES * per_machine, per_machine)
    return [(case, one.values[case.name]) for case, one in zip(cases, figures, strict=True)]


def fit(rate: float) -> tuple[Link, list[Row]]:
    """The NIC, from plain exchanges at this rate, and how well they are described by it."""
    found = measure(rate, "fit", 1)
    nic = fit_link([Observation(c.degree, c.nbytes, statistics.median(seconds)) for c, seconds in found])
    return nic, [row(rate, 1, case, seconds, nic) for case, seconds in found]


def row(rate: float, per_machine: int, case: Case, seconds: list[float], nic: Link) -> Row:
    network = Network(MACHINES * per_machine, nic, per_machine)
    timeline = simulate(network, case.steps, case.compute or 0.0, lag=case.lag)
    return Row(rate, per_machine, case.name, case.nbytes, seconds, timeline.seconds)


def table(rows: Sequence[Row], title: str) -> Table:
    made = Table(title=title)
    for name in ("Mbit/s", "agents", "what", "MB"):
        made.add_column(name)
    for name in ("measured, ms", "predicted, ms", "error"):
        made.add_column(name, justify="right")
    for one in rows:
        made.add_row(*_cells(one), style="" if abs(one.error) <= LIMIT else "bold red")
    return made


def _cells(one: Row) -> list[str]:
    agents = f"{MACHINES} x {one.agents_per_machine}"
    times = f"{1e3 * one.seconds:.1f}", f"{1e3 * one.predicted:.1f}"
    return [f"{8e-6 * one.rate:.0f}", agents, one.case, f"{one.nbytes / MB:g}", *times, f"{one.error:+.1%}"]


def markdown(rows: Sequence[Row]) -> str:
    lines = ["| Mbit/s | agents | what | MB | measured, ms | predicted, ms | error |"]
    lines += ["| ---: | --- | --- | ---: | ---: | ---: | ---: |"]
    return "\n".join([*lines, *(f"| {' | '.join(_cells(one))} |" for one in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", default="100mbit", help="the rate of the runs that the model is fitted on (100mbit)")
    parser.add_argument("--check", nargs="+", default=["50mbit", "200mbit"], help="other rates (50mbit 200mbit)")
    parser.add_argument("--json", type=Path, help="also write every repetition")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--agent", choices=["fit", "check"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent:
        agent(args.agent)
        return 0
    rates = [parse_rate(text) for text in (args.fit, *args.check)]
    watch = LoadWatch()
    nic, seen = fit(rates[0])
    told = f"fitted at {args.fit}: {describe(nic, rates[0])}"
    print(told, file=sys.stderr)
    unseen = []
    for rate in rates:
        scaled = Link(nic.latency, nic.bandwidth * rate / rates[0], nic.overhead)
        for per_machine in (1, 2):
            print(f"checking at {8e-6 * rate:.0f} Mbit/s, {per_machine} agents a machine", file=sys.stderr)
            for case, seconds in measure(rate, "check", per_machine):
                unseen.append(row(rate, per_machine, case, seconds, scaled))
    load = watch.load()
    show(args.markdown, told, seen, unseen, load)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": asdict(here()), "load": asdict(load), "nic": asdict(nic)}
        args.json.write_text(json.dumps({**content, "rows": [asdict(one) for one in seen + unseen]}, indent=1) + "\n")
    return 1 if any(abs(one.error) > LIMIT for one in unseen) else 0


def describe(nic: Link, rate: float) -> str:
    return (
        f"{nic.bandwidth / rate:.1%} of the rate, {1e6 * nic.latency:.0f} us latency, "
        f"{1e6 * nic.overhead:.0f} us overhead a message"
    )


def show(as_markdown: bool, told: str, seen: Sequence[Row], unseen: Sequence[Row], load: Load) -> None:
    console = Console(width=None if sys.stdout.isatty() else 110)
    print(told)
    for title, rows in (("What it was fitted on", seen), ("What it had to predict", unseen)):
        if as_markdown:
            print(f"\n{title}\n\n{markdown(rows)}")
        else:
            console.print(table(rows, title))
    errors = np.abs([one.error for one in unseen])
    within = int((errors <= LIMIT).sum())
    print(
        f"\nwithin {LIMIT:.0%}: {within} of {len(unseen)}; median error {np.median(errors):.1%}, "
        f"worst {errors.max():.1%}"
    )
    print(f"{here()}\n{load}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, subprocess.SubprocessError) as error:
        sys.exit(f"network_model: {error}")
