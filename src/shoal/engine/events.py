"""What the engine tells whoever listens: an operation was submitted, sent, received, summed, waited for.

Nothing is built and nothing is called while nobody listens. Listeners run in the thread in which the thing happened and
must be quick; what they raise is logged once and otherwise ignored, since it must not end an exchange.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..interrupts import held

log = logging.getLogger("shoal")


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. Times are ``time.perf_counter_ns()``; ``end`` equals ``start`` where it took no time."""

    kind: str
    """``submitted``, ``sent``, ``received``, ``summed``, ``waited``, ``finished``, ``failed`` or ``lost``; of what a
    process group moves also ``asked``, ``ordered`` and ``moved``."""
    operation: str
    name: str
    round: int
    start: int
    end: int
    peer: int = -1
    nbytes: int = 0
    detail: str = ""


Listener = Callable[[Event], None]


class Events:
    """The listeners of one agent."""

    def __init__(self) -> None:
        self.active = False
        """Whether anybody listens; ask before ``emit``."""
        self._listeners: tuple[Listener, ...] = ()
        self._complained = False

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every event from now on. Returns what ends that."""
        self._listeners = (*self._listeners, listener)
        self.active = True

        def unsubscribe() -> None:
            self._listeners = tuple(known for known in self._listeners if known is not listener)
            self.active = bool(self._listeners)

        return unsubscribe

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
    ) -> None:
        """Tell the listeners. ``start`` is given for what took time; it ends now. Call only if somebody listens."""
        now = time.perf_counter_ns()
        event = Event(kind, operation, name, round_, start or now, now, peer, nbytes, detail)
        with held:
            for listener in self._listeners:
                try:
                    listener(event)
                except Exception:
                    if not self._complained:
                        self._complained = True
                        log.exception("a listener of Shoal's events failed; its later failures are not shown")
