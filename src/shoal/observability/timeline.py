"""The timeline of each agent: ``SHOAL_TIMELINE=dir`` makes every agent write a Chrome trace.

The file ``dir/shoal-rank<r>.json`` opens in Perfetto (https://ui.perfetto.dev) and in chrome://tracing. It has a row
for each operation name, with a bar from submission to end that holds the sums and the messages; a row for each thread
that waited; and a row for each tensor name of the user's own activities.

The engine's threads only queue events. A thread of the timeline formats and writes them a few times a second, so a
killed process loses only its last moments. The format is a JSON array with one event a line. Trace viewers accept a
truncated array, and a clean shutdown closes it, so that any JSON parser accepts it too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._signals import deferred
from ..engine.engine import Engine
from ..execution.events import Recording
from ..runtime.agent import Agent, agent_context
from .trace_writer import Activity, TraceWriter

log = logging.getLogger("shoal")

WRITE_SECONDS = 0.25
"""How often the queue is written; a killed process loses at most the events since the last time."""
AT_ONCE = 100
"""Entries that are written before other threads have their turn: less than half a millisecond of work."""
QUEUE_LIMIT = 1 << 15
"""Queued events at which the thread that adds one writes them itself, so that the queue cannot outgrow memory."""

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
            "shoal.init() before the first activity. This is logged once"
        )
    return timeline


class Timeline:
    """The trace of one agent, from its creation to :meth:`close`. Its methods may be called from any thread."""

    def __init__(self, agent: Agent, path: Path) -> None:
        self.path = path
        router = agent.engine.router
        about = {"run": router.endpoints[0].inbox, "size": agent.size, "boot": router.place.boot}
        self._writer = TraceWriter(agent.rank, path, **about, incarnation=router.place.incarnation)
        self._queue: deque[Any] = deque()  # of Fields and Activities
        self._writing = threading.Lock()
        self._activities: dict[str, int] = {}
        self._activities_lock = threading.Lock()
        self._closing = threading.Event()
        self._stop = agent.engine.record_events(Recording(self._queue, QUEUE_LIMIT, self.flush))
        self._thread = threading.Thread(target=self._run, name=f"shoal-timeline-{agent.rank}", daemon=True)
        self._thread.start()

    def start_activity(self, tensor_name: str, activity_name: str) -> bool:
        if not isinstance(tensor_name, str) or not isinstance(activity_name, str):
            raise TypeError(
                f"timeline_start_activity takes two strings, the name of the row and a label, not {tensor_name!r} and "
                f"{activity_name!r}"
            )
        with self._activities_lock:
            self._activities[tensor_name] = self._activities.get(tensor_name, 0) + 1
            self._put(Activity(tensor_name, activity_name, time.perf_counter_ns()))
        return True

    def end_activity(self, tensor_name: str) -> bool:
        with self._activities_lock:
            begun = self._activities.pop(tensor_name, 0)
            if not begun:
                log.error("timeline_end_activity(%r): no activity of that tensor name is running", tensor_name)
                return False
            if begun > 1:
                self._activities[tensor_name] = begun - 1
            self._put(Activity(tensor_name, None, time.perf_counter_ns()))
        return True

    def close(self) -> None:
        """Write what is left and complete the file."""
        self._stop()
        self._closing.set()
        self._thread.join()
        self.flush()
        self._writer.close()

    def _put(self, entry: Activity) -> None:
        self._queue.append(entry)
        if len(self._queue) >= QUEUE_LIMIT:
            self.flush()

    def _run(self) -> None:
        while not self._closing.wait(WRITE_SECONDS):
            self.flush()

    def flush(self) -> None:
        """Write what there is."""
        queue = self._queue
        with deferred, self._writing:
            try:
                while queue:  # writing to the file releases the interpreter's lock
                    self._writer.write([queue.popleft() for _ in range(min(len(queue), AT_ONCE))])
            except Exception as error:  # which must not end an exchange
                self._stop()
                queue.clear()
                log.error("the timeline %s ends here: %s", self.path, error)
                self._writer.fail()


def attach(agent: Agent) -> None:
    """Begin the trace of a new agent, if one is wanted."""
    directory = agent.config.timeline
    if not directory:
        return
    folder = Path(directory) / agent.launch.beside
    try:
        folder.mkdir(parents=True, exist_ok=True)
        timeline = Timeline(agent, _path(folder, agent))
    except OSError as error:
        log.error("SHOAL_TIMELINE=%s: rank %d continues without a timeline: %s", directory, agent.rank, error)
        return
    _timelines[agent.engine] = timeline


def _path(directory: Path, agent: Agent) -> Path:
    """A path that no earlier ``init`` of this process, and no earlier start of this agent, has used."""
    stem = f"shoal-rank{agent.rank}"
    if agent.launch.attempt:
        stem += f"-restart{agent.launch.attempt}"
    if agent.launch.incarnation:
        stem += f"-again{agent.launch.incarnation}"
    key = str(directory.resolve() / stem)
    with _lock:
        _opened[key] = count = _opened.get(key, 0) + 1
    return directory / (f"{stem}-{count}.json" if count > 1 else f"{stem}.json")


def start(agent: Agent, path: Path) -> None:
    """Begin a trace of a running agent.

    Raises:
        ValueError: There is one already.
        OSError: The file cannot be written.
    """
    there = _timelines.get(agent.engine)
    if there is not None:
        raise ValueError(f"a timeline of rank {agent.rank} is being written already, to {there.path}")
    _timelines[agent.engine] = Timeline(agent, path)


def detach(agent: Agent) -> None:
    """End the trace of an agent, if there is one."""
    timeline = _timelines.pop(agent.engine, None)
    if timeline is not None:
        timeline.close()
