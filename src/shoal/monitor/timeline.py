"""What each agent did and when, as a picture: ``SHOAL_TIMELINE=dir`` makes every agent write a Chrome trace.

The file ``dir/shoal-rank<r>.json`` opens in Perfetto (https://ui.perfetto.dev) and in chrome://tracing. It has a row
for each operation name, with a bar from submission to end that holds the sums and the messages; a row for each thread
that waited; and a row for each tensor name that the user's own activities are filed under.

The engine's threads only queue what they saw; a thread of the timeline turns it into text and writes it, a few times a
second, so that a killed process leaves all but its last moments. The format is a JSON array with one event a line: a
reader of traces takes one that is cut off, and a clean shutdown closes it, so that any JSON parser takes it too.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from .._version import __version__
from ..engine.engine import Engine
from ..engine.events import Event
from ..engine.operation import INTERNAL
from ..world.agent import Agent, agent_context
from ..world.bootstrap import on_start, on_stop
from .own_files import open_own

log = logging.getLogger("shoal")

WRITE_SECONDS = 0.25
"""How often the queue is written; a killed process loses at most what happened since."""
QUEUE_LIMIT = 1 << 15
"""Queued events at which the thread that adds one writes them itself, so that the queue cannot outgrow memory."""
ROW_LIMIT = 1000
"""Rows of one kind; later names share one, since a script that invents a name a step would fill memory with rows."""

_timelines: dict[Engine, Timeline] = {}
_opened: dict[str, int] = {}
_lock = threading.Lock()
_complained = False


def timeline_start_activity(tensor_name: str, activity_name: str) -> bool:
    """Begin an activity of the user's own, on the row ``tensor_name``; activities on one row nest.

    Returns:
        True; False if the timeline is off (``SHOAL_TIMELINE`` not set, or before :func:`shoal.init`), and an error in
        the log the first time.
    """
    timeline = _mine()
    return timeline is not None and timeline.start_activity(tensor_name, activity_name)


def timeline_end_activity(tensor_name: str) -> bool:
    """End the activity that was begun last on the row ``tensor_name``.

    Returns:
        True; False if the timeline is off, or nothing was begun there (with an error in the log).
    """
    timeline = _mine()
    return timeline is not None and timeline.end_activity(tensor_name)


@contextmanager
def timeline_context(tensor_name: str, activity_name: str) -> Iterator[None]:
    """An activity for as long as the ``with`` block lasts, also if it raises."""
    started = timeline_start_activity(tensor_name, activity_name)
    try:
        yield
    finally:
        if started:
            timeline_end_activity(tensor_name)


def _mine() -> Timeline | None:
    global _complained
    agent = agent_context().agent
    timeline = _timelines.get(agent.engine) if agent is not None else None
    if timeline is None and not _complained:
        _complained = True
        log.error(
            "the timeline is off, so activities are not recorded: set SHOAL_TIMELINE to a directory, and call "
            "shoal.init() before the first activity. This is said once"
        )
    return timeline


class _Activity(NamedTuple):
    """Something the user began (``name`` given) or ended."""

    tensor: str
    name: str | None
    time: int


class Timeline:
    """The trace of one agent, from its creation to :meth:`close`. Its methods may be called from any thread."""

    def __init__(self, agent: Agent, path: Path) -> None:
        self.path = path
        self._writer = _TraceWriter(agent.rank, path)
        self._queue: deque[tuple[Event | _Activity, str]] = deque()
        self._writing = threading.Lock()
        self._activities: dict[str, int] = {}
        self._activities_lock = threading.Lock()
        self._closing = threading.Event()
        self._unsubscribe = agent.engine.events.subscribe(self._listen)
        self._thread = threading.Thread(target=self._run, name=f"shoal-timeline-{agent.rank}", daemon=True)
        self._thread.start()

    def start_activity(self, tensor_name: str, activity_name: str) -> bool:
        if not isinstance(tensor_name, str) or not isinstance(activity_name, str):
            raise TypeError(
                f"timeline_start_activity takes two strings, the row and what is shown on it, not {tensor_name!r} and "
                f"{activity_name!r}"
            )
        with self._activities_lock:
            self._activities[tensor_name] = self._activities.get(tensor_name, 0) + 1
            self._put(_Activity(tensor_name, activity_name, time.perf_counter_ns()), "")
        return True

    def end_activity(self, tensor_name: str) -> bool:
        with self._activities_lock:
            begun = self._activities.pop(tensor_name, 0)
            if not begun:
                log.error("timeline_end_activity(%r): no activity of that tensor name is running", tensor_name)
                return False
            if begun > 1:
                self._activities[tensor_name] = begun - 1
            self._put(_Activity(tensor_name, None, time.perf_counter_ns()), "")
        return True

    def close(self) -> None:
        """Write what is left and complete the file."""
        self._unsubscribe()
        self._closing.set()
        self._thread.join()
        self._write()
        self._writer.close()

    def _listen(self, event: Event) -> None:
        self._put(event, threading.current_thread().name if event.kind == "waited" else "")

    def _put(self, entry: Event | _Activity, thread: str) -> None:
        self._queue.append((entry, thread))
        if len(self._queue) >= QUEUE_LIMIT:
            self._write()

    def _run(self) -> None:
        while not self._closing.wait(WRITE_SECONDS):
            self._write()

    def _write(self) -> None:
        with self._writing:
            entries = [self._queue.popleft() for _ in range(len(self._queue))]
            try:
                self._writer.write(entries)
            except OSError as error:
                self._unsubscribe()
                log.error("the timeline %s ends here: %s", self.path, error)
                self._writer.fail()


class _TraceWriter:
    """Turns events into the lines of a trace file. One thread at a time uses it.

    Bars on one row must nest, so an operation that is submitted while another round of its name is in flight (unnamed
    calls may overlap) goes to a further row of that name.
    """

    def __init__(self, rank: int, path: Path) -> None:
        self._rank = rank
        self._file: int | None = open_own(path)
        self._rows: dict[tuple[str, str, int], int] = {}
        self._names: dict[str, set[str]] = {"waits": set(), "activities": set(), "exchange": set()}
        self._lanes: dict[tuple[str, int], int] = {}  # operations in flight
        self._taken: dict[str, set[int]] = {}
        self._lines: list[str] = []
        host = socket.gethostname()
        self._metadata("process_name", 0, name=f"agent {rank} on {host}")
        self._metadata("process_sort_index", 0, sort_index=rank)
        # Readers skip this one; it lets traces of machines whose clocks begin at different boots be laid side by side.
        clock = {"perf_counter_ns": time.perf_counter_ns(), "unix_time_ns": time.time_ns()}
        self._metadata("shoal", 0, version=__version__, rank=rank, host=host, **clock)
        self._flush("[\n")

    def write(self, entries: list[tuple[Event | _Activity, str]]) -> None:
        for entry, thread in entries:
            if isinstance(entry, _Activity):
                self._activity(entry)
            else:
                self._event(entry, thread)
        if self._lines:
            self._flush(",\n")

    def close(self) -> None:
        if self._file is None:
            return
        try:
            self._append("\n]\n")
        except OSError as error:
            log.error("the timeline of rank %d could not be completed: %s", self._rank, error)
        self.fail()

    def fail(self) -> None:
        """Close the file as it is."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _flush(self, before: str) -> None:
        text = before + ",\n".join(self._lines)
        self._lines = []
        self._append(text)

    def _append(self, text: str) -> None:
        rest = memoryview(text.encode())
        while rest and self._file is not None:
            rest = rest[os.write(self._file, rest) :]

    def _activity(self, activity: _Activity) -> None:
        row = self._row("activities", activity.tensor)
        if activity.name is None:
            self._line("E", row, activity.time)
        else:
            self._line("B", row, activity.time, activity.name)

    def _event(self, event: Event, thread: str) -> None:
        kind = event.kind
        if kind == "waited":
            row = self._row("waits", thread)
            self._line("X", row, event.start, _label(event), event.end, round=event.round)
        elif kind == "lost":
            row = self._row("exchange", "agents")
            name = f"agent {event.peer} {event.operation}"
            self._line("i", row, event.end, name, scope="p", rank=event.peer, cause=event.detail)
        elif kind == "submitted":
            self._line("B", self._begin(event), event.end, event.operation, round=event.round)
        elif kind in ("finished", "failed"):
            self._end(event)
        elif kind == "summed":
            if (event.name, event.round) in self._lanes:  # else it failed meanwhile, and the sum would stick out
                self._line("X", self._exchange(event), event.start, "sum", event.end, round=event.round)
        else:
            arguments = {"peer": event.peer, "bytes": event.nbytes, "round": event.round}
            name = f"{'to' if kind == 'sent' else 'from'} {event.peer}" if event.peer >= 0 else kind
            self._line("i", self._exchange(event), event.end, name, scope="t", **arguments)

    def _begin(self, event: Event) -> int:
        taken = self._taken.setdefault(self._row_name("exchange", _label(event)), set())
        lane = next(lane for lane in range(len(taken) + 1) if lane not in taken)
        taken.add(lane)
        self._lanes[event.name, event.round] = lane
        return self._exchange(event)

    def _end(self, event: Event) -> None:
        if (event.name, event.round) not in self._lanes:  # it was submitted before the timeline began
            return
        row = self._exchange(event)
        if event.kind == "failed":
            self._line("i", row, event.end, "failed", scope="t", error=event.detail, round=event.round)
        self._line("E", row, event.end)
        name = self._row_name("exchange", _label(event))
        self._taken[name].discard(self._lanes.pop((event.name, event.round)))

    def _exchange(self, event: Event) -> int:
        """The row of an operation; the first of its name for a message that came before its submission."""
        return self._row("exchange", _label(event), self._lanes.get((event.name, event.round), 0))

    def _row_name(self, kind: str, name: str) -> str:
        known = self._names[kind]
        if name in known:
            return name
        if len(known) >= ROW_LIMIT:
            return "other names"
        known.add(name)
        return name

    def _row(self, kind: str, name: str, lane: int = 0) -> int:
        name = self._row_name(kind, name)
        row = self._rows.get((kind, name, lane))
        if row is None:
            row = self._rows[kind, name, lane] = len(self._rows) + 1
            further = f" ({lane + 1})" if lane else ""
            self._metadata("thread_name", row, name=f"{kind}: {name}{further}")
            self._metadata("thread_sort_index", row, sort_index=list(self._names).index(kind) * 10**6 + row)
        return row

    def _metadata(self, what: str, row: int, **arguments: Any) -> None:
        line = {"name": what, "ph": "M", "pid": self._rank, "tid": row, "args": arguments}
        self._lines.append(json.dumps(line, separators=(",", ":")))

    def _line(
        self, phase: str, row: int, start: int, name: str = "", end: int | None = None, scope: str = "", **args: Any
    ) -> None:
        line = f'{{"ph":"{phase}","pid":{self._rank},"tid":{row},"ts":{_microseconds(start)}'
        if name:
            line += f',"name":{json.dumps(name)}'
        if end is not None:
            line += f',"dur":{_microseconds(end - start)}'
        if scope:
            line += f',"s":"{scope}"'
        if args:
            line += f',"args":{json.dumps(args, separators=(",", ":"))}'
        self._lines.append(line + "}")


def _label(event: Event) -> str:
    return event.name.removeprefix(INTERNAL).removeprefix("~")


def _microseconds(nanoseconds: int) -> str:
    """The trace format's unit, without the rounding of a float."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def _attach(agent: Agent) -> None:
    directory = os.environ.get("SHOAL_TIMELINE", "")
    if not directory:
        return
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        timeline = Timeline(agent, _path(Path(directory), agent))
    except OSError as error:
        log.error("SHOAL_TIMELINE=%s: rank %d goes without a timeline: %s", directory, agent.rank, error)
        return
    _timelines[agent.engine] = timeline


def _path(directory: Path, agent: Agent) -> Path:
    """A later ``init`` of one process, and a restart by the launcher, do not write over what came before."""
    stem = f"shoal-rank{agent.rank}"
    if agent.launch.attempt:
        stem += f"-restart{agent.launch.attempt}"
    if agent.launch.incarnation:
        stem += f"-again{agent.launch.incarnation}"
    key = str(directory.resolve() / stem)
    with _lock:
        _opened[key] = count = _opened.get(key, 0) + 1
    return directory / (f"{stem}-{count}.json" if count > 1 else f"{stem}.json")


def _detach(agent: Agent) -> None:
    timeline = _timelines.pop(agent.engine, None)
    if timeline is not None:
        timeline.close()


on_start.append(_attach)
on_stop.append(_detach)
