"""The end of an agent: the others get what they still wait for, hear a goodbye, and everything is given back."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..errors import NotInitialized
from ..interrupts import held

if TYPE_CHECKING:
    from .engine import Engine

HANG_UP_SECONDS = 1.0
"""How long an agent that leaves waits for the others to hang up."""
LAST_WORD_SECONDS = 2.0
"""How long one that leaves after a loss waits until its goodbye has been handed to the system."""


def close(engine: Engine, deadline: float, farewell: str, died: bool) -> None:
    """End an engine; for the one thread that does it, in a section (``interrupts.py``).

    What a signal's handler raises shortens it: then what is left to do is done, no more is waited for, and it is raised
    at the end. Whatever else fails, nothing is left open.
    """
    drain = _Drain(engine)
    with ExitStack() as last:
        for give_back in (engine.poller.close, engine.pool.clear, engine.arena.close, engine.router.close):
            last.callback(give_back)
        last.callback(engine.after)
        last.callback(engine.wheel.stop)
        if not _fail_what_is_in_flight(engine, deadline, died):
            last.pop_all()  # another thread is at it
            return
        drain(lambda: engine.outbox.settled and not engine.rounds.in_flight(), deadline)
        with engine.lock:
            causes = (service.cause for service in engine.services.values())
            missed = next((rank for rank in causes if rank is not None and rank != engine.rank), -1)
            engine.outbox.say_goodbye(farewell or "it called shoal.shutdown()", died, engine.ended, missed)
            engine.outbox.flush()  # all that is done for it where the exchange has failed
        # After a loss, too: it says whose. A neighbour that is busy, its socket full, would count us as the lost one.
        last_word = time.monotonic() + LAST_WORD_SECONDS if engine.ended is not None else deadline
        drain(lambda: engine.outbox.empty, min(deadline, last_word), lambda: engine.deaf)
        # Whoever heard it hangs up; then nothing unread is thrown away, which a socket would report as a failure.
        drain(lambda: not engine.router.heard, min(deadline, time.monotonic() + HANG_UP_SECONDS))
        with engine.lock:
            for operation in engine.rounds.in_flight():
                engine.fail(operation, _gone())
    if drain.interrupt is not None:
        raise drain.interrupt


def _gone() -> NotInitialized:
    return NotInitialized("this agent has shut down while the operation was in flight; wait for its handle first")


def _fail_what_is_in_flight(engine: Engine, deadline: float, died: bool) -> bool:
    """Begin the end: nothing is submitted any more, and what waits for others ends. False where that has been done."""
    if not died and engine.ended is None:
        engine.bundles.start()
    now = time.monotonic()
    for service in engine.services.values():  # the other half is for what the others still need
        service.close(now if died else now + (deadline - now) / 2)
    with engine.lock:
        if engine.closing:
            return False
        engine.outbox.forget_failed()
        for operation in engine.rounds.in_flight():
            if died or not engine.rounds.channel(operation).defers(operation):
                engine.fail(operation, _gone())
        engine.bundles.give_up(_gone())
        engine.closing = True
        # What others have sent for calls that this agent never made. They wait for an answer, perhaps to leave as well.
        for source, message in engine.rounds.give_up_early():
            engine.outbox.done_with(source, message)
        engine.bundles.give_up_early()
    return True


class _Drain:
    """Drives until the others have what they need, unless the exchange has failed or a signal asks for an end."""

    def __init__(self, engine: Engine) -> None:
        self.interrupt: BaseException | None = None
        self._engine = engine

    def __call__(self, drained: Callable[[], bool], limit: float, hopeless: Callable[[], bool] | None = None) -> None:
        engine = self._engine
        failed = hopeless or (lambda: engine.ended is not None)
        while engine.wheel.started and self.interrupt is None:
            engine.wheel.drive_until(lambda: drained() or failed(), limit)
            if not held.pending:
                return
            try:
                held.checkpoint()
            except BaseException as error:
                self.interrupt = error
