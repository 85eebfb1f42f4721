"""What ``shoal run --watch`` costs: the same steps while agents tell their launcher what they do, and while not.

    shoal run --watch --no-prefix -n 4 benchmarks/watch.py
    shoal run --watch --no-prefix -n 2 benchmarks/watch.py --only small --seconds 20

Blocks of two seconds take turns, with summaries and without, so that both have the same machine; and in the same turns
pairs without either, which say what a ratio of equals comes to here (A/A). Of each pair the ratio is taken, of the time
and of the processor time of all agents together. Printed are the medians, and between which two values the median lies
with a confidence of 95%; and what the launcher, which runs beside them, took of a core, with the page closed.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import shoal
from _steps import mlp
from shoal.engine.traffic import Traffic
from shoal.monitor import summaries
from shoal.monitor.summaries import Summaries
from shoal.world.agent import current
from shoal.world.launch import WATCH

BLOCK_SECONDS = 2.0


@dataclass(frozen=True)
class Block:
    """Seconds of a step: of the clock, of all agents' processors, and of the launcher's in a second."""

    clock: float
    processor: float
    launcher: float


CASES: dict[str, Callable[[], Callable[[], None]]] = {
    "small": lambda: mlp(256, 3, 64),
    "middle": lambda: mlp(1024, 4, 64),
}


def of_the_launcher() -> float:
    """Seconds of a processor that it has used."""
    return int(Path(f"/proc/{os.getppid()}/schedstat").read_text().split()[0]) / 1e9


def block(work: Callable[[], None], repetitions: int, told: bool) -> Block:
    """So many repetitions in step with the other agents."""
    one = Summaries(current(), os.environ[WATCH]) if told else None
    shoal.barrier()
    clock, processor, launcher = time.perf_counter(), time.process_time(), of_the_launcher()
    for _ in range(repetitions):
        work()
    seconds = time.perf_counter() - clock
    took = torch.tensor([seconds, time.process_time() - processor], dtype=torch.float64)
    launcher = (of_the_launcher() - launcher) / seconds
    if one is not None:
        one.close()
    took = shoal.allreduce(took)
    return Block(took[0].item() / repetitions, shoal.size() * took[1].item() / repetitions, launcher)


def median_between(ratios: list[float]) -> tuple[float, float, float]:
    """The median, and an interval that holds that of all such pairs with a confidence of 95% (of order statistics)."""
    ordered, n = sorted(ratios), len(ratios)
    low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)) - 1)
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


def show(name: str, what: str, pairs: list[tuple[Block, Block]]) -> None:
    """One line for each of the two times."""
    for time_, of in (("time", lambda one: one.clock), ("processors", lambda one: one.processor)):
        off = statistics.median(of(one) for one, _ in pairs)
        middle, low, high = (100 * (one - 1) for one in median_between([of(on) / of(off_) for off_, on in pairs]))
        print(f"{name:7} {what:8} {time_:11}{1e3 * off:9.3f} ms{middle:+8.2f}%   ({low:+.2f}% to {high:+.2f}%)")


def each() -> None:
    """What one summary takes of its agent."""
    one = Summaries(current(), os.environ[WATCH], seconds=3600.0)
    rounds = []
    for _ in range(200):
        began = time.thread_time_ns()
        one._push()
        rounds.append((time.thread_time_ns() - began) / 1e3)
        time.sleep(0.001)
    one.close()
    if shoal.rank() == 0:
        took = statistics.median(rounds)
        print(f"a summary: {took:.0f} us of a core, twice a second: {2 * took / 1e4:.3f}% of it", flush=True)
        traffic, messages = Traffic(), 100_000
        began = time.thread_time_ns()
        for round_ in range(messages):
            traffic.sent("neighbor_allreduce", "x", round_, 1, 1000)
        print(f"to count a message: {(time.thread_time_ns() - began) / 1e3 / messages:.2f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="what it costs to be watched")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each case")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shoal.init()
    if not os.environ.get(WATCH):
        raise SystemExit("start it with shoal run --watch")
    summaries._detach(current())  # the blocks make their own
    for name in arguments.only:
        work = CASES[name]()
        for _ in range(5):
            work()
        once = block(work, 20, False).clock
        repetitions = max(1, round(BLOCK_SECONDS / once))
        watched: list[tuple[Block, Block]] = []
        equals: list[tuple[Block, Block]] = []
        for number in range(max(4, round(arguments.seconds / (4 * repetitions * once)))):
            for pairs, second in ((watched, True), (equals, False)):
                order = (False, True) if number % 2 else (True, False)
                found = {told: block(work, repetitions, told and second) for told in order}
                pairs.append((found[False], found[True]))
        if shoal.rank() == 0:
            show(name, "watched", watched)
            show(name, "A/A", equals)
            on, off = (statistics.median(pair[k].launcher for pair in watched) for k in (1, 0))
            print(f"{name:7} {len(watched)} pairs of {repetitions}; launcher {on:.2%} of a core, {off:.2%} without")
    each()
    shoal.shutdown()


if __name__ == "__main__":
    main()
