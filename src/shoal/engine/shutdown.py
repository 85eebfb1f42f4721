"""Shuts an agent's exchange down, once the other agents have received the messages that they still need from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from .. import clock
from .._signals import deferred
from ..errors import NotInitialized
from ..execution.backend_stages import CollectiveBackend
from ..execution.control_messages import Services
from ..execution.fusion import Fusion
from ..execution.lifecycle import Lifecycle
from ..execution.shared_parts import SharedParts
from ..fault_tolerance.recovery import ResultCache

log = logging.getLogger("shoal")
HANG_UP_SECONDS = 1.0
"""Seconds that an agent waits during shutdown until its peers have closed their connections."""
LAST_WORD_SECONDS = 2.0
"""Seconds that an agent waits, at a shutdown after a loss, until its shutdown message has been passed to the system."""


class Shutdown:
    """One call of :meth:`Engine.close`. Two threads may call it, and each has an interrupt of its own."""

    def __init__(
        self, parts: SharedParts, lifecycle: Lifecycle, fusion: Fusion, services: Services, results: ResultCache
    ) -> None:
        self._parts, self._lifecycle, self._fusion = parts, lifecycle, fusion
        self._services, self._results = services, results
        self._interrupt: BaseException | None = None  # an exception of a signal handler: the later steps do not wait

    def run(self, deadline: float, why: str, died: bool, free: Sequence[Callable[[], None]]) -> None:
        """Send the shutdown message, deliver the messages that other agents still wait for, and free all resources.

        Called by one thread. An exception of a signal handler shortens the shutdown: the remaining resources are freed
        without waiting, and it is raised at the end. All resources are freed, whichever step fails.

        Args:
            deadline: When to stop waiting for other agents, in seconds of ``clock.monotonic()``.
            why: The cause, for the other agents; empty for an ordinary shutdown.
            died: Whether this agent must not wait for others, because its script has failed.
            free: Free the resources; called in reverse order, without the lock.
        """
        progress, matcher, sender = self._parts.progress, self._parts.matcher, self._parts.sender
        gate, results = self._lifecycle.gate, self._results
        with deferred, ExitStack() as last:
            for release in (*free, progress.stop):
                last.callback(release)
            if not died and gate.ended is None:
                self._fusion.begin()
                # Another thread may just have taken an operation to begin it: its messages still have to be sent.
                self._drive_until(lambda: all(operation.has_entered for operation in matcher.in_flight()), deadline)
            backend = self._lifecycle.backend_stages.backend
            if backend is not None:
                if not died and gate.ended is None and not gate.closing:
                    self._leave_backend(backend, deadline)
                last.callback(backend.stop)
            if not self._fail_in_flight(deadline, died):
                last.pop_all()  # another thread closes the engine
                return
            self._drive_until(lambda: sender.drained and not matcher.in_flight(), deadline)
            with progress.lock:
                if results.results and not died:
                    results.confirm(leaving=True)
            self._drive_until(lambda: not results.results, min(deadline, clock.monotonic() + HANG_UP_SECONDS))
            with progress.lock:
                self._send_shutdown(why, died)
            # Also after a loss, which the message names. A busy neighbour with a full socket would count this agent as
            # lost.
            last_message = clock.monotonic() + LAST_WORD_SECONDS if gate.ended is not None else deadline
            self._disconnect(min(deadline, last_message), deadline)
            # close() lets operations that wait for their turn to send continue. Those left now would never end.
            with progress.lock:
                self._lifecycle.fail_all(_gone())
                refusal = self._lifecycle.late_refusal
            if refusal is not None and not died:  # no call followed that could raise it
                log.warning("rank %d shuts down with an error of an earlier call: %s", self._parts.rank, refusal)
        if self._interrupt is not None:
            raise self._interrupt

    def _drive_until(self, done: Callable[[], bool], limit: float, hopeless: Callable[[], bool] | None = None) -> None:
        """Drive until ``done()``, the exchange has failed (or ``hopeless()``), the time ``limit``, or a signal."""
        failed = hopeless or (lambda: self._lifecycle.gate.ended is not None)
        progress = self._parts.progress

        def over() -> bool:
            with progress.lock:  # another thread may drive, and change this state
                return done() or failed()

        while progress.started and self._interrupt is None:
            progress.drive_until(over, limit)
            if not deferred.pending:
                return
            try:
                deferred.checkpoint()
            except BaseException as error:
                self._interrupt = error

    def _leave_backend(self, backend: CollectiveBackend, deadline: float) -> None:
        """Notify the members of the backend that this agent leaves, so that they do not wait, and await their
        answers.
        """

        def nothing_to_move() -> bool:  # for stages that other agents may still reach
            stages = [operation.stage for operation in self._parts.matcher.in_flight()]
            return not any(stage is not None and stage.to_move and stage.exchange.sends for stage in stages)

        now = clock.monotonic()
        self._drive_until(nothing_to_move, now + (deadline - now) / 2)
        with self._parts.progress.lock:
            backend.leave()
        self._drive_until(lambda: backend.left, deadline)

    def _disconnect(self, last_message: float, deadline: float) -> None:
        """After the shutdown message, wait until all bytes are sent and connected peers have read it."""
        parts, router = self._parts, self._parts.router
        self._drive_until(lambda: parts.sender.empty, last_message, lambda: parts.membership.view.is_cut_off)
        with parts.progress.lock:
            router.send_shutdown(*router.inbox.last_message, to_all=True)
        # Peers that have read the message close their connections. A socket closed with unread bytes would report a
        # failure.
        self._drive_until(lambda: not router.has_incoming, min(deadline, clock.monotonic() + HANG_UP_SECONDS))

    def _fail_in_flight(self, deadline: float, died: bool) -> bool:
        """Refuse new operations, and end operations that wait for other agents. False if that has been done."""
        now = clock.monotonic()
        for service in self._services.all():  # the other half is for messages that other agents need
            service.close(now if died else now + (deadline - now) / 2)
        with self._parts.progress.lock:
            if self._lifecycle.gate.closing:
                return False
            # Before close(), which fails operations too: receivers may still need what those have sent.
            self._parts.sender.forget_failed()
            self._lifecycle.close(_gone(), died)
            self._fusion.give_up(_gone())
            self._fusion.give_up_early()
        return True

    def _send_shutdown(self, why: str, died: bool) -> None:
        sender, ended = self._parts.sender, self._lifecycle.gate.ended
        causes = (service.cause for service in self._services.all())
        missed = next((rank for rank in causes if rank is not None and rank != self._parts.rank), -1)
        sender.send_shutdown(why or "it called shoal.shutdown()", died, ended, missed)
        sender.flush()  # no later flush follows if the exchange has failed


def _gone() -> NotInitialized:
    return NotInitialized("this agent has shut down while the operation was in flight; wait for its handle first")
