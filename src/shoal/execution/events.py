"""Engine events, such as a submitted operation, a sent or received message, a sum, or a wait: for listeners, and as
spans in ``torch.profiler``.

Without a listener no event is built, and without a profiler no span: the only cost is the check of a flag. Listeners
run in the thread of the event and must be quick. Their exceptions must not end an exchange: the first one is logged,
the others are ignored.

Spans have the names of the timeline: submit, sum, wait. A profiler records the thread that started it. Sums in the
progress thread are recorded with
``experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler as profiler

from .. import clock
from .._signals import deferred
from .fused_operation import PREFIX, FusedRounds, decode_fused_name
from .operation import INTERNAL

try:
    from torch._C._profiler import _RecordFunctionFast as _Span  # a twentieth of the cost of the public one
except ImportError:
    _Span = torch.profiler.record_function  # type: ignore[assignment,misc]

log = logging.getLogger("shoal")

COORDINATION = "coordination"
NO_SPAN = nullcontext()
"""Instead of a :func:`span` while no profiler records."""
LONG_NS = 50_000
"""Nanoseconds of a call's work before its first message from which the work is an event (``prepared``)."""


class Event(NamedTuple):
    """One event. Times are ``clock.perf_counter_ns()``; ``end`` equals ``start`` if the event has no duration.

    Each fused call has its own ``submitted``, ``finished``, ``failed`` and ``waited`` events. Their messages and their
    sum are one event, whose :attr:`calls` names them.
    """

    kind: str
    """The kind of event:

    - ``submitted``, ``finished``, ``failed``: a call began or ended (``detail``: the error of a failed one);
    - ``prepared``: the call's work before its first message took long, such as the copy of a large tensor;
    - ``sent``, ``received``: a message of ``nbytes`` bytes, to or from ``peer``, in a ``stage`` of the operation;
      the ``detail`` of a sent one is :data:`COORDINATION` if the message carries no tensor of the caller;
    - ``arrived``: the last byte of a message that arrived in pieces, as between machines;
    - ``summed``: the operation computed on the received tensors, from ``start`` to ``end``;
    - ``waited``: a thread, whose name is the ``detail``, was blocked in the call;
    - ``asked``, ``ordered``, ``moved``: a process group was requested to move the tensors (``detail``: the
      participating ranks, if not all); all agents agreed on the order; the tensors were moved;
    - ``fused``, ``parted``: several calls were fused; the fused operation ended;
    - ``stepped``: the optimizer ``name`` ended its step number ``round``; the step before ended at ``start``;
    - ``measured``: the script measured the metric ``name`` for the ``round``-th time; the ``detail`` has this agent's
      value and the mean, in JSON;
    - ``lost``: an agent ``died`` or ``left`` (``operation``).
    """
    operation: str
    name: str
    round: int
    start: int
    end: int
    peer: int = -1
    nbytes: int = 0
    detail: str = ""
    stage: int = 0

    @property
    def calls(self) -> list[FusedRounds]:
        """The calls of the event: name, first round, and number of rounds. One entry unless calls are fused."""
        return (
            list(decode_fused_name(self.name))
            if self.name.startswith(PREFIX)
            else [FusedRounds(self.name, self.round, 1, ())]
        )


Listener = Callable[[Event], None]
Fields = tuple[str, str, str, int, int, int, int, int, str, int]
"""The fields of an event, in their order."""


class Recording(NamedTuple):
    """A queue of events, to be read later."""

    queue: deque[Fields]
    limit: int
    full: Callable[[], None]
    """Called by the thread that adds an event while the queue is at its limit or beyond."""


class Events:
    """The listeners of one agent."""

    def __init__(self) -> None:
        self.active = False
        """Whether there is a listener or a recording; check it before ``emit``."""
        self._listeners: tuple[Listener, ...] = ()
        self._recordings: tuple[Recording, ...] = ()
        self._complained = False

    @property
    def has_listeners(self) -> bool:
        """Whether there are listeners: a listener may begin operations."""
        return bool(self._listeners)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every later event. Returns a function that ends the subscription."""
        # A new tuple, because emit() in another thread may be iterating over the present one.
        self._listeners = (*self._listeners, listener)
        self.active = True

        def unsubscribe() -> None:
            self._listeners = tuple(known for known in self._listeners if known is not listener)
            self.active = bool(self._listeners or self._recordings)

        return unsubscribe

    def record(self, recording: Recording) -> Callable[[], None]:
        """Queue every later event, at less than half the cost of a listener. Returns a function that ends it."""
        self._recordings = (*self._recordings, recording)
        self.active = True

        def stop() -> None:
            self._recordings = tuple(known for known in self._recordings if known is not recording)
            self.active = bool(self._listeners or self._recordings)

        return stop

    def emit(
        self,
        kind: str,
        operation: str,
        name: str,
        round_: int,
        start: int = 0,
        peer: int = -1,
        nbytes: int = 0,
        detail: str = "",
        stage: int = 0,
        end: int = 0,
    ) -> None:
        """Notify the listeners. Call it only if :attr:`active`.

        ``start`` is given for an event with a duration. The event ends now if ``end`` is not given.
        """
        now = end or clock.perf_counter_ns()
        fields = kind, operation, name, round_, start or now, now, peer, nbytes, detail, stage
        for queue, limit, full in self._recordings:
            queue.append(fields)
            if len(queue) >= limit:
                full()
        if self._listeners:
            self._notify(Event(*fields))

    def _notify(self, event: Event) -> None:
        with deferred:
            for listener in self._listeners:
                try:
                    listener(event)
                except Exception:
                    if not self._complained:
                        self._complained = True
                        log.exception("a listener of Shoal's events failed; its later failures are not shown")


def span(op: str, name: str, activity: str) -> AbstractContextManager[Any]:
    """A span of the profiler's trace: ``shoal neighbor_allreduce layer1: sum``.

    Call it only if ``profiler._is_profiler_enabled``, or use :data:`NO_SPAN` instead.
    """
    if name.startswith(PREFIX):
        label = f" x {sum(run.length for run in decode_fused_name(name))}"
    else:
        label = name.removeprefix("~window").removeprefix(INTERNAL)
        label = "" if label.startswith("~") else f" {label.strip()}"
    found: AbstractContextManager[Any] = _Span(f"shoal {op}{label}: {activity}")
    return found


@contextmanager
def deferred_span(op: str, name: str, activity: str) -> Iterator[None]:
    """A :func:`span` in which signals wait (``_signals.py``)."""
    with deferred, span(op, name, activity):
        yield


class EdgeCounters:
    """Counts the messages and bytes of one agent by edge, at the source, only while a monitor observes them.

    Used under the engine's lock.

    Attributes:
        counts: Whether messages are counted.
    """

    def __init__(self) -> None:
        self.counts = False
        self._prefixes: tuple[str, ...] = ()
        self._sent: Counter[int] = Counter()
        self._last: tuple[str, int] | None = None
        self._edges: set[int] = set()

    def set_counting(self, prefixes: tuple[str, ...] = ()) -> None:
        """Start counting, or stop it without prefixes.

        The last destinations are those of operations whose names begin with one of ``prefixes``.
        """
        self.counts, self._prefixes = bool(prefixes), prefixes

    def sent(self, op: str, name: str, round_: int, destination: int, nbytes: int) -> None:
        """Count a tensor of ``nbytes`` bytes that an operation has sent."""
        self._sent[destination] += nbytes
        if op.startswith(self._prefixes):
            if self._last != (name, round_):
                self._last = name, round_
                self._edges.clear()
            self._edges.add(destination)

    @property
    def bytes_to(self) -> dict[int, int]:
        """Bytes of tensors sent, by destination."""
        return dict(self._sent)

    @property
    def edges(self) -> list[int]:
        """The destinations of the last exchange between neighbours."""
        return sorted(self._edges)
