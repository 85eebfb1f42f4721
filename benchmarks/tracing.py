"""What tracing costs: the same steps, and the same small calls, with SHOAL_TIMELINE's file being written and without.

    shoal run --no-prefix -n 4 benchmarks/tracing.py
    shoal run --no-prefix -n 4 benchmarks/tracing.py --only calls --seconds 20
    python benchmarks/tracing.py --each

Blocks of a quarter of a second take turns, without a trace and with one, so that both have the same machine; that all
of it is written counts as well. Of each pair of blocks the ratio is taken, of the time and of the processor time of
all agents and their threads together, which is steadier where the machine has fewer cores than agents. Printed are the
medians, and between which two values the median lies with a confidence of 95%.

With --each it times the parts alone, in one thread with nothing else to do: to note an event and to write it, which is
what tracing cannot do without; and a span of torch.profiler's, while one records and while none does.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import shoal
from _steps import mlp
from shoal.engine.events import Events, Fields, Recording
from shoal.engine.profiling import span
from shoal.monitor.timeline import Timeline
from shoal.monitor.trace_writer import TraceWriter
from shoal.world.agent import current

CALLS = 100
BLOCK_SECONDS = 0.25


@dataclass(frozen=True)
class Block:
    """Seconds for one repetition: of the clock, and of all agents' processors."""

    clock: float
    processor: float


def small_calls() -> None:
    """A hundred nonblocking calls of 4 KB, all in flight before the first is waited for."""
    handles = [shoal.neighbor_allreduce_nonblocking(torch.ones(1024)) for _ in range(CALLS)]
    for handle in handles:
        handle.wait()


CASES: dict[str, Callable[[], Callable[[], None]]] = {
    "small": lambda: mlp(256, 3, 64),
    "middle": lambda: mlp(1024, 4, 64),
    "large": lambda: mlp(2048, 6, 32),
    "calls": lambda: small_calls,
}


def block(work: Callable[[], None], repetitions: int, traced: Path | None) -> Block:
    """So many repetitions in step with the other agents."""
    timeline = None if traced is None else Timeline(current(), traced)
    shoal.barrier()
    clock, processor = time.perf_counter(), time.process_time()
    for _ in range(repetitions):
        work()
    if timeline is not None:
        timeline.flush()
    took = torch.tensor([time.perf_counter() - clock, time.process_time() - processor], dtype=torch.float64)
    if timeline is not None:
        timeline.close()
    took = shoal.allreduce(took)
    return Block(took[0].item() / repetitions, shoal.size() * took[1].item() / repetitions)


def median_between(ratios: list[float]) -> tuple[float, float, float]:
    """The median, and an interval that holds that of all such pairs with a confidence of 95% (of order statistics)."""
    ordered, n = sorted(ratios), len(ratios)
    low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)) - 1)
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


def show(name: str, pairs: list[tuple[Block, Block]], repetitions: int, size: int) -> None:
    """One line for each of the two times."""
    for what, of in (("time", lambda one: one.clock), ("processors", lambda one: one.processor)):
        off = statistics.median(of(one) for one, _ in pairs)
        middle, low, high = (100 * (one - 1) for one in median_between([of(on) / of(off) for off, on in pairs]))
        print(f"{name:7} {what:11}{1e3 * off:9.3f} ms{middle:+8.2f}%   ({low:+.2f}% to {high:+.2f}%)", flush=True)
    print(f"{'':7} {size / repetitions:.0f} bytes of a trace each; {len(pairs)} pairs of {repetitions}", flush=True)


def microseconds(work: Callable[[], object], repetitions: int = 20_000) -> float:
    """Of one repetition: the median of several rounds."""
    rounds = []
    for _ in range(9):
        began = time.perf_counter_ns()
        for _ in range(repetitions):
            work()
        rounds.append((time.perf_counter_ns() - began) / repetitions / 1e3)
    return statistics.median(rounds)


def enter_and_leave() -> None:
    with span("neighbor_allreduce", "layer1", "sum"):
        pass


def each() -> None:
    """What is done for one event, and for one span."""
    queue: deque[Fields] = deque(maxlen=1000)
    events = Events()
    events.record(Recording(queue, 1 << 30, lambda: None))
    what = "neighbor_allreduce", "layer1"

    def call() -> None:
        """All that is noted of a call with two neighbours."""
        events.emit("submitted", *what, 0)
        for kind in ("sent", "received"):
            for peer in (1, 2):
                events.emit(kind, *what, 0, 0, peer, 4096)
        events.emit("summed", *what, 0, time.perf_counter_ns())
        events.emit("finished", *what, 0)
        events.emit("waited", *what, 0, time.perf_counter_ns(), -1, 0, "MainThread")

    queue.clear()
    call()
    of_a_call = list(queue)
    with tempfile.TemporaryDirectory() as folder:
        writer = TraceWriter(0, Path(folder, "trace.json"))
        noted, written = microseconds(call), microseconds(lambda: writer.write(of_a_call), 2_000)
        writer.close()
    print(f"an event: {noted / len(of_a_call):.2f} us to note, {written / len(of_a_call):.2f} us to write")
    idle = microseconds(enter_and_leave)
    with profile(activities=[ProfilerActivity.CPU]):
        recorded = microseconds(enter_and_leave, 2_000)
    print(f"a span of torch.profiler: {idle:.2f} us while none records, {recorded:.2f} us while one does")


def main() -> None:
    parser = argparse.ArgumentParser(description="what tracing costs")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=40.0, help="for each case")
    parser.add_argument("--block", type=float, default=BLOCK_SECONDS, help="seconds of a block")
    parser.add_argument("--each", action="store_true", help="what is done for one event, and for one span")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.each:
        each()
        return
    shoal.init()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{shoal.rank()}.json")
        for name in arguments.only:
            work = CASES[name]()
            for _ in range(5):
                work()
            once = block(work, 10, None).clock
            repetitions = max(1, round(arguments.block / once))
            block(work, repetitions, path)
            pairs: list[tuple[Block, Block]] = []
            for number in range(max(6, round(arguments.seconds / (2 * repetitions * once)))):
                order = [None, path] if number % 2 else [path, None]
                found = {traced: block(work, repetitions, traced) for traced in order}
                pairs.append((found[None], found[path]))
            if shoal.rank() == 0:
                show(name, pairs, repetitions, path.stat().st_size)
    shoal.shutdown()


if __name__ == "__main__":
    main()
