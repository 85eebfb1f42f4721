"""What tracing costs: the same steps, and the same small calls, with SHOAL_TIMELINE's file being written and without.

    shoal run --no-prefix -n 4 benchmarks/tracing.py
    shoal run --no-prefix -n 2 benchmarks/tracing.py --only small --seconds 200
    python benchmarks/tracing.py --each

Pairs of blocks without a trace and with one, as `_blocks.py` has them; that all of it is written counts as well. The
file and the thread that writes it are there all the time, as in a run that is traced. And with eight traces at once,
each with all that is done for one: an eighth of what these cost is what one does, with an eighth of the noise.

With --each it times the parts alone, in one thread with nothing else to do: to note an event and to write it, which is
what tracing cannot do without; and a span of torch.profiler's, while one records and while none does.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import shoal
from _blocks import paired, show
from _steps import mlp
from shoal.execution.events import Events, Fields, Recording, span
from shoal.observability.timeline import QUEUE_LIMIT, Timeline
from shoal.observability.trace_writer import TraceWriter
from shoal.runtime.agent import current

CALLS = 100
TIMES = 8


def small_calls() -> None:
    """A hundred nonblocking calls of 4 KB, all in flight before the first is waited for."""
    handles = [shoal.nonblocking.neighbor_allreduce(torch.ones(1024)) for _ in range(CALLS)]
    for handle in handles:
        handle.wait()


CASES: dict[str, Callable[[], Callable[[], None]]] = {
    "small": lambda: mlp(256, 3, 64),
    "middle": lambda: mlp(1024, 4, 64),
    "large": lambda: mlp(2048, 6, 32),
    "calls": lambda: small_calls,
}


class Traced:
    """A run that is traced at times; so many times over, each to a file of its own, with all that is done for one."""

    def __init__(self, path: Path, times: int = 1) -> None:
        self.path = path
        self._events = current().engine.events
        self._timelines = [
            Timeline(current(), path.with_name(f"{path.name}.{k}" if k else path.name)) for k in range(times)
        ]
        for timeline in self._timelines:
            timeline._stop()

    @contextmanager
    def beside(self, on: bool) -> Iterator[Callable[[], None]]:
        if not on:
            yield lambda: None
            return
        all_ = [self._events, *(Events() for _ in self._timelines[1:])]
        recordings = [Recording(one._queue, QUEUE_LIMIT, one.flush) for one in self._timelines]
        stops = [events.record(one) for events, one in zip(all_, recordings, strict=True)]
        if len(all_) > 1:
            emits = [events.emit for events in all_]

            def emit(*what: object, **more: object) -> None:
                for one in emits:
                    one(*what, **more)

            self._events.emit = emit  # type: ignore[method-assign]
        try:
            yield self._flush
        finally:
            self._events.__dict__.pop("emit", None)
            for stop in stops:
                stop()

    def _flush(self) -> None:
        for timeline in self._timelines:
            timeline.flush()

    def close(self) -> None:
        for timeline in self._timelines:
            timeline.close()


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
    parser.add_argument("--steps", type=int, default=50, help="of a block")
    parser.add_argument("--each", action="store_true", help="what is done for one event, and for one span")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.each:
        each()
        return
    shoal.init()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            once = Traced(Path(folder, f"{name}{shoal.rank()}.json"))
            over = Traced(Path(folder, f"{name}{shoal.rank()}-over.json"), TIMES)
            besides = {"traced": once.beside, f"{TIMES} times": over.beside}
            found = paired(CASES[name](), arguments.steps, arguments.seconds, besides)
            for one in (once, over):
                one.close()
            if shoal.rank() == 0:
                show(name, arguments.steps, found, {f"{TIMES} times": TIMES})
                traced = (len(found["traced"]) + 1) * arguments.steps
                print(f"{'':7} {once.path.stat().st_size / traced:.0f} bytes of a trace a step", flush=True)
    shoal.shutdown()


if __name__ == "__main__":
    main()
