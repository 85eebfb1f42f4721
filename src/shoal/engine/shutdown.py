"""Delays the shutdown of an agent until the other agents have received the messages that they still need from it."""

from __future__ import annotations

from collections.abc import Callable

from .. import clock
from .._signals import deferred
from ..operations.backend_stages import CollectiveBackend
from ..operations.lifecycle import Lifecycle
from ..operations.matching import Matcher
from ..operations.progress import Progress
from ..operations.sender import Sender
from ..transport.router import Router

HANG_UP_SECONDS = 1.0
"""Seconds that an agent waits during shutdown until its peers have closed their connections."""
LAST_WORD_SECONDS = 2.0
"""Seconds that an agent waits, at a shutdown after a loss, until its shutdown message has been passed to the system."""


class ShutdownDrain:
    """Drives until other agents have the messages that they need, the exchange has failed, or a signal ends it.

    Attributes:
        interrupt: An exception of a signal handler during the wait.
    """

    def __init__(self, progress: Progress, lifecycle: Lifecycle) -> None:
        self.interrupt: BaseException | None = None
        self._progress = progress
        self._lifecycle = lifecycle

    def __call__(self, drained: Callable[[], bool], limit: float, hopeless: Callable[[], bool] | None = None) -> None:
        failed = hopeless or (lambda: self._lifecycle.gate.ended is not None)

        def over() -> bool:
            with self._progress.lock:  # another thread may drive, and change this state
                return drained() or failed()

        while self._progress.started and self.interrupt is None:
            self._progress.drive_until(over, limit)
            if not deferred.pending:
                return
            try:
                deferred.checkpoint()
            except BaseException as error:
                self.interrupt = error

    def disconnect(
        self, sender: Sender, router: Router, last_word: float, deadline: float, deaf: Callable[[], bool]
    ) -> None:
        """After the shutdown message, wait until all bytes are sent and connected peers have read it."""
        self(lambda: sender.empty, last_word, deaf)
        with self._progress.lock:
            router.say_goodbye(*router.inbox.last_word, to_all=True)
        # Peers that have read the message close their connections. A socket closed with unread bytes would report a
        # failure.
        self(lambda: not router.heard, min(deadline, clock.monotonic() + HANG_UP_SECONDS))

    def leave(self, backend: CollectiveBackend, matcher: Matcher, deadline: float) -> None:
        """Notify the members of the backend that this agent leaves, so that they do not wait, and await their
        answers.
        """

        def nothing_to_move() -> bool:  # for stages that other agents may still reach
            stages = [operation.stage for operation in matcher.in_flight()]
            return not any(stage is not None and stage.to_move and stage.exchange.sends for stage in stages)

        now = clock.monotonic()
        self(nothing_to_move, now + (deadline - now) / 2)
        with self._progress.lock:
            backend.leave()
        self(lambda: backend.left, deadline)
