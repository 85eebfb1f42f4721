"""Events of the engine for listeners: an operation was submitted, sent, received, summed, waited for.

No event is built while there is no listener. Listeners run in the thread of the event and must be quick. Their
exceptions are logged once and otherwise ignored, since they must not end an exchange.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from .. import clock
from .._signals import deferred
from .fused_name import PREFIX, FusedRounds, decode_fused_name

log = logging.getLogger("shoal")

COORDINATION = "coordination"
LONG_NS = 50_000
"""Nanoseconds from which on it is told what a call does before its first message."""


class Event(NamedTuple):
    """One event. Times are ``clock.perf_counter_ns()``; ``end`` equals ``start`` if it took no time.

    Fused calls are each ``submitted``, ``finished`` or ``failed``, and waited for. Their messages and their sum are one
    event, whose :attr:`calls` names them.
    """

    kind: str
    """What happened:

    - ``submitted``, ``finished``, ``failed``: a call began, or ended (why it failed is the ``detail``);
    - ``prepared``: what it did before its first message took long, as copying a large tensor does;
    - ``sent``, ``received``: a message of so many ``nbytes``, to or from ``peer``, in a ``stage`` of the operation; the
      ``detail`` of one that is sent says where it is :data:`COORDINATION`, and no tensor;
    - ``arrived``: the last byte of one that came in pieces, as between machines;
    - ``summed``: what came was computed on, from ``start`` to ``end``;
    - ``waited``: a thread, whose name is the ``detail``, stood still for it;
    - ``asked``, ``ordered``, ``moved``: a process group was to move its tensors (among the ranks that the ``detail``
      names, if not all); all agreed on when; it has;
    - ``fused``, ``parted``: several calls began to travel as one, and do so no more;
    - ``stepped``: an optimizer of that ``name`` ended its step number ``round``, and at ``start`` the one before;
    - ``measured``: the script measured what the ``name`` says, the ``round``-th time; what it is here, and on the mean,
      the ``detail`` says in JSON;
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
        """Its calls: names, the first round of each, and how many rounds. One call, unless calls are fused."""
        return (
            list(decode_fused_name(self.name))
            if self.name.startswith(PREFIX)
            else [FusedRounds(self.name, self.round, 1, ())]
        )


Listener = Callable[[Event], None]
Fields = tuple[str, str, str, int, int, int, int, int, str, int]
"""Those of an event, in their order."""


class Recording(NamedTuple):
    """A queue of events, to be read later."""

    queue: deque[Fields]
    limit: int
    full: Callable[[], None]
    """Called by whoever adds the event with which the queue has reached its limit."""


class Events:
    """The listeners of one agent."""

    def __init__(self) -> None:
        self.active = False
        """Whether anybody listens; ask before ``emit``."""
        self._listeners: tuple[Listener, ...] = ()
        self._recordings: tuple[Recording, ...] = ()
        self._complained = False

    @property
    def has_listeners(self) -> bool:
        """There are listeners, which may begin operations."""
        return bool(self._listeners)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every event from now on. Returns a function that ends it."""
        self._listeners = (*self._listeners, listener)
        self.active = True

        def unsubscribe() -> None:
            self._listeners = tuple(known for known in self._listeners if known is not listener)
            self.active = bool(self._listeners or self._recordings)

        return unsubscribe

    def record(self, recording: Recording) -> Callable[[], None]:
        """Queue every event from now on, at less than half the cost of a listener. Returns a function that ends it."""
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
        """Notify the listeners. ``start`` is given for an event with a duration; it ends now if ``end`` is not given.
        Call it only if there are listeners.
        """
        now = end or clock.perf_counter_ns()
        fields = kind, operation, name, round_, start or now, now, peer, nbytes, detail, stage
        for queue, limit, full in self._recordings:
            queue.append(fields)
            if len(queue) >= limit:
                full()
        if self._listeners:
            self._tell(Event(*fields))

    def _tell(self, event: Event) -> None:
        with deferred:
            for listener in self._listeners:
                try:
                    listener(event)
                except Exception:
                    if not self._complained:
                        self._complained = True
                        log.exception("a listener of Shoal's events failed; its later failures are not shown")
