"""What ``shoal run --watch`` costs: the same steps while agents tell their launcher what they do, and while not.

    shoal run --watch --no-prefix -n 2 benchmarks/watch.py --only small --seconds 200

Pairs of blocks of steps with summaries and without, as `_blocks.py` has them: as often as they are sent (twice a
second), and twenty times as often. What the first costs is less than a machine lets one see; each summary costs the
same, so it is a twentieth of what the second does. Besides, of the same run: which share of its agent's processor time
the thread took that sends them, and of a core the launcher, which runs beside the agents, with the page closed. Last
the parts, each alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import shoal
from _blocks import paired, show
from _steps import mlp
from shoal.config import WATCH
from shoal.execution.events import EdgeCounters
from shoal.observability import status_publisher
from shoal.observability.status_publisher import SECONDS, StatusPublisher
from shoal.runtime.agent import current

OFTEN = 20
CASES: dict[str, Callable[[], Callable[[], None]]] = {
    "small": lambda: mlp(256, 3, 64),
    "middle": lambda: mlp(1024, 4, 64),
}


def of_the_launcher() -> float:
    """Seconds of a processor that it has used."""
    return int(Path(f"/proc/{os.getppid()}/schedstat").read_text().split()[0]) / 1e9


class Watched(StatusPublisher):
    """An agent's summaries, at times: its thread wakes up always, and tells the launcher something while it is on."""

    def __init__(self, often: int = 1) -> None:
        self.on = False
        self.launcher = {on: [0.0, 0.0] for on in (False, True)}
        self.own = self.all = 0.0
        super().__init__(current(), os.environ[WATCH], SECONDS / often)
        self._count(False)

    def _push(self, leaves: bool = False) -> None:
        if self.on:
            began = time.thread_time()
            super()._push(leaves)
            self.own += time.thread_time() - began

    @contextmanager
    def beside(self, on: bool) -> Iterator[Callable[[], None]]:
        began, launcher, all_ = time.perf_counter(), of_the_launcher(), time.process_time()
        self._count(on)
        self.on = on
        try:
            yield lambda: None
        finally:
            self.on = False
            self._count(False)
            self.all += (time.process_time() - all_) if on else 0.0
            self.launcher[on][0] += of_the_launcher() - launcher
            self.launcher[on][1] += time.perf_counter() - began


def each() -> None:
    """What one summary takes of its agent."""
    one = StatusPublisher(current(), os.environ[WATCH], seconds=3600.0)
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
        traffic, messages = EdgeCounters(), 100_000
        began = time.thread_time_ns()
        for round_ in range(messages):
            traffic.sent("neighbor_allreduce", "x", round_, 1, 1000)
        print(f"to count a message: {(time.thread_time_ns() - began) / 1e3 / messages:.2f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="what it costs to be watched")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each case")
    parser.add_argument("--steps", type=int, default=50, help="of a block")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shoal.init()
    if not os.environ.get(WATCH):
        raise SystemExit("start it with shoal run --watch")
    status_publisher._detach(current())  # the blocks have their own
    for name in arguments.only:
        work = CASES[name]()
        often = {"watched": Watched(), f"{OFTEN} times": Watched(OFTEN)}
        found = paired(work, arguments.steps, arguments.seconds, {way: one.beside for way, one in often.items()})
        for one in often.values():
            one.close()
        if shoal.rank() == 0:
            show(name, arguments.steps, found, {f"{OFTEN} times": OFTEN})
            print(
                f"{name:7} the thread: {often['watched'].own / often['watched'].all:.3%} of its agent's processor time"
            )
            on, off = (used / passed for used, passed in (often["watched"].launcher[k] for k in (True, False)))
            print(f"{name:7} the launcher: {on:.2%} of a core, {off:.2%} without", flush=True)
    each()
    shoal.shutdown()


if __name__ == "__main__":
    main()
