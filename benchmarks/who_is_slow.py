"""Does `shoal report` name who is slow, and does its advice help? Runs with a known straggler and a known slow link.

    python benchmarks/who_is_slow.py                       # the straggler; with root, ip and tc also the slow link
    python benchmarks/who_is_slow.py --picture docs/images/report.png --keep out/traces

1. Four agents of this machine train an MLP, and rank 2 has more than its share of the work: a larger batch.
2. Three machines (network namespaces), of whose links one is slow: from rank 1 to rank 2.
3. Three machines, one of which has a slow NIC.

Each run leaves traces; the report of them must name what is slow, first of all. Then the same run does what the report
says. Printed are the report's words, and the medians of a step before and after. The exit status is 1 if it named
something else, or the advice did not help.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import nn

import shoal
from _machines import DEVICE, PORT, machines, obstacle
from shoal.observability.run_report import RunReport, draw_breakdown

FAST, SLOW = 200e6 / 8, 20e6 / 8
"""Bytes a second of a NIC, and of the slow link."""
_RATE = ["tbf", "rate", f"{8 * SLOW:.0f}bit", "burst", "32kb", "limit", "16mb"]
SCRIPT = str(Path(__file__).resolve())


# An agent's part


def train(arguments: argparse.Namespace) -> None:
    """Some steps; rank 0 leaves the median of their seconds in a file."""
    torch.set_num_threads(1)
    shoal.init()
    torch.manual_seed(0)
    width = arguments.width
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    compression = shoal.compression.MinMaxUInt8() if arguments.compress else None
    if arguments.star:
        shoal.set_topology(shoal.topology.StarGraph(shoal.size()), is_weighted=True)
    elif shoal.size() == 3:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    one_peer = shoal.topology.OnePeerExponential(shoal.size()) if arguments.one_peer else None
    optimizer = shoal.DecentralizedOptimizer(inner, model, compression=compression, topology=one_peer)
    rows = arguments.batch * (arguments.more if shoal.rank() == arguments.straggler else 1.0)
    x, y = torch.randn(round(rows), width), torch.randint(0, 10, (round(rows),))
    seconds = []
    for _ in range(arguments.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    if shoal.rank() == 0:
        Path(os.environ["SHOAL_TIMELINE"], "step.json").write_text(json.dumps(median(seconds[1:])))
    shoal.shutdown()


# Runs


@dataclass(frozen=True)
class Outcome:
    """Of a run: the median of its steps, and what the report says."""

    seconds: float
    report: RunReport


def run(commands: Sequence[Sequence[str]], folder: Path, words: Sequence[str]) -> Outcome:
    """Start a job of one command on each machine, and read what it left."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"SHOAL_TIMELINE": str(folder), "OMP_NUM_THREADS": "1"}
    jobs = [subprocess.Popen([*command, SCRIPT, "--agent", *words], env=environment) for command in commands]
    try:
        ended = [job.wait(240) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    if any(ended):
        raise RuntimeError(f"the agents ended with {ended}")
    return Outcome(json.loads((folder / "step.json").read_text()), RunReport.of(folder))


def here(agents: int) -> list[list[str]]:
    return [[sys.executable, "-m", "shoal", "run", "--no-prefix", "-n", str(agents)]]


def on(entered: Sequence[Sequence[str]]) -> list[list[str]]:
    meet = ["--nnodes", str(len(entered)), "--rendezvous", f"10.78.0.1:{PORT}"]
    run_one = [sys.executable, "-m", "shoal", "run", "--no-prefix", "-n", "1", *meet]
    return [[*enter, *run_one, "--node-rank", str(node)] for node, enter in enumerate(entered)]


def slow_down(entered: Sequence[Sequence[str]], source: int, destination: int) -> None:
    """Let what one machine sends to another go over a cable of its own, of a tenth of the rate."""
    there = f"10.78.0.{destination + 1}/32"
    pid = entered[destination][1].split("/")[2]
    cable = ["eth1", "type", "veth", "peer", "name", "eth1", "netns", pid]
    subprocess.run([*entered[source], "ip", "link", "add", *cable], check=True)
    for number in (source, destination):
        subprocess.run([*entered[number], "ip", "link", "set", "eth1", "up"], check=True)
    route = ["route", "add", there, "dev", "eth1", "src", f"10.78.0.{source + 1}"]
    subprocess.run([*entered[source], "ip", *route], check=True)
    subprocess.run([*entered[source], "tc", "qdisc", "add", "dev", "eth1", "root", *_RATE], check=True)


@contextmanager
def three(slow: Callable[[Sequence[Sequence[str]]], None]) -> Iterator[list[list[str]]]:
    with machines(3, FAST) as entered:
        slow(entered)
        yield on(entered)


def slow_nic(entered: Sequence[Sequence[str]]) -> None:
    """Let all that the last machine sends have a tenth of the rate."""
    subprocess.run([*entered[2], "tc", "qdisc", "replace", "dev", DEVICE, "root", *_RATE], check=True)


# What must come of it


@dataclass(frozen=True)
class Judge:
    """What went on, printed and judged."""

    folder: Path
    failed: list[str]

    def case(
        self, name: str, commands: list[list[str]], words: list[str], says: str, after: dict[str, list[str]]
    ) -> RunReport:
        """A run that something slows down, what the report says of it, and the same with its advice followed."""
        before = run(commands, self.folder / name, words)
        first = before.report.findings[0]
        print(
            f"\n{name}: {1e3 * before.seconds:.1f} ms a step (median)\n  {first.what}.\n  -> {first.advice}.",
            flush=True,
        )
        if says not in first.what:
            self.failed.append(f"{name}: it does not say {says!r}")
        for advice, more in after.items():
            followed = run(commands, self.folder / f"{name}, {advice}".replace(" ", "-"), [*words, *more])
            ratio = followed.seconds / before.seconds
            print(f"  {advice}: {1e3 * followed.seconds:.1f} ms a step, {ratio:.2f} of it", flush=True)
            if ratio > 0.9:
                self.failed.append(f"{name}: {advice} does not help")
        return before.report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, help="also draw the report of the straggler's run")
    parser.add_argument("--keep", type=Path, help="leave the traces in this folder")
    for name, kind, default in (("steps", int, 60), ("width", int, 256), ("batch", int, 128), ("straggler", int, -1)):
        parser.add_argument(f"--{name}", type=kind, default=default, help=argparse.SUPPRESS)
    parser.add_argument("--more", type=float, default=1.0, help=argparse.SUPPRESS)
    parser.add_argument("--compress", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one-peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--star", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--agent", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.agent:
        train(arguments)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        judge = Judge(arguments.keep or Path(temporary), [])
        words = ["--width", "512", "--straggler", "2"]
        found = judge.case(
            "a straggler", here(4), [*words, "--more", "4"], "rank 2", {"a batch like the others'": ["--more", "1"]}
        )
        if arguments.picture:
            arguments.picture.parent.mkdir(parents=True, exist_ok=True)
            draw_breakdown(found, arguments.picture)
            print(f"drawn: {arguments.picture}")
        if obstacle():
            print(f"left out: the slow link and the slow NIC ({obstacle()})")
        else:
            link = "the link 1 -> 2"
            with three(lambda entered: slow_down(entered, 1, 2)) as commands:
                advice = {"compression=": ["--compress"], "a star around rank 0": ["--star"]}
                judge.case("a slow link", commands, ["--steps", "15", "--width", "512"], link, advice)
            with three(slow_nic) as commands:
                advice = {"compression=": ["--compress"], "one peer at a time": ["--one-peer"]}
                judge.case("a slow NIC", commands, ["--steps", "15", "--width", "512"], "all that rank 2", advice)
        for one in judge.failed:
            print(f"FAILED {one}")
    return 1 if judge.failed else 0


if __name__ == "__main__":
    sys.exit(main())
