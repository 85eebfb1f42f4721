"""The shutdown of an agent waits until the others have received what they still need from it."""

from __future__ import annotations

from collections.abc import Callable

from .. import clock
from .._signals import deferred
from ..operations.collective_backend import CollectiveBackend
from ..operations.lifecycle import Lifecycle
from ..operations.matching import Matcher
from ..operations.progress import Progress
from ..operations.sender import Sender
from ..transport.router import Router

HANG_UP_SECONDS = 1.0
"""How long an agent that leaves waits for the others to hang up."""
LAST_WORD_SECONDS = 2.0
"""How long one that leaves after a loss waits until its goodbye has been handed to the system."""


class ShutdownDrain:
    """Drives until the others have what they need, unless the exchange has failed or a signal requests an end.

    Attributes:
        interrupt: An exception of a signal handler meanwhile.
    """

    def __init__(self, progress: Progress, lifecycle: Lifecycle) -> None:
        self.interrupt: BaseException | None = None
        self._progress = progress
        self._lifecycle = lifecycle

    def __call__(self, drained: Callable[[], bool], limit: float, hopeless: Callable[[], bool] | None = None) -> None:
        failed = hopeless or (lambda: self._lifecycle.gate.ended is not None)

        def over() -> bool:
            with self._progress.lock:  # another thread may drive, and so change what is looked at
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
        """After the shutdown message: wait until all bytes are handed over and connected peers have read it."""
        self(lambda: sender.empty, last_word, deaf)
        with self._progress.lock:
            router.say_goodbye(*router.inbox.last_word, to_all=True)
        # Whoever heard it hangs up; then nothing unread is thrown away, which a socket would report as a failure.
        self(lambda: not router.heard, min(deadline, clock.monotonic() + HANG_UP_SECONDS))

    def leave(self, backend: CollectiveBackend, matcher: Matcher, deadline: float) -> None:
        """Tell the members of the backend that this agent leaves, so that they do not wait for it, and receive their
        messages.
        """

        def nothing_to_move() -> bool:  # for which others may still come
            stages = [operation.stage for operation in matcher.in_flight()]
            return not any(stage is not None and stage.to_move and stage.exchange.sends for stage in stages)

        now = clock.monotonic()
        self(nothing_to_move, now + (deadline - now) / 2)
        with self._progress.lock:
            backend.leave()
        self(lambda: backend.left, deadline)
