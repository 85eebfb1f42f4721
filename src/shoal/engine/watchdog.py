"""How long an operation waits, and what it does meanwhile: it asks, then reports, then gives up."""

from __future__ import annotations

import logging

from ..errors import DeadlineExceeded
from ..transport.wire import Kind, Message
from .lifecycle import ASK_AFTER, Lifecycle
from .matching import Matcher
from .operation import Operation
from .outbox import Outbox

log = logging.getLogger("shoal")

STALL_AFTER = 30.0
"""Seconds after which a report says who is missing."""


class Watchdog:
    """Of all operations of one agent. Used under the engine's lock."""

    def __init__(self, rank: int, lifecycle: Lifecycle, matcher: Matcher, outbox: Outbox) -> None:
        self._rank = rank
        self._lifecycle = lifecycle
        self._matcher = matcher
        self._outbox = outbox

    def check(self, now: float) -> float:
        """Look at all operations. Returns when to come back, as ``time.monotonic()``."""
        following = float("inf")
        for operation in self._matcher.in_flight():
            if now >= operation.deadline and not operation.computing:
                self._lifecycle.fail(operation, self._overdue(operation))
            else:
                due = operation.deadline  # also while it computes: it may have to wait for more afterwards
                following = min(following, due, self._ask(operation, now), self._report(operation, now))
        return following

    def _ask(self, operation: Operation, now: float) -> float:
        """Ask those who have not sent whether they will."""
        stage = operation.stage
        if stage is None or not stage.missing or stage.asked:
            return operation.deadline
        if now < stage.started + ASK_AFTER:
            return stage.started + ASK_AFTER
        stage.asked = True
        for source in stage.missing:
            question = Message(Kind.ASK, operation.op, operation.name, operation.round, stage.number)
            self._outbox.say(source, question)
        return operation.deadline

    def _report(self, operation: Operation, now: float) -> float:
        """Say in the log who is missing."""
        if operation.stalled:
            return operation.deadline
        if now < operation.started + STALL_AFTER:
            return operation.started + STALL_AFTER
        operation.stalled = True
        log.warning(
            "%s on rank %d has waited %.0f s for ranks %s; it gives up after %.0f s",
            operation,
            self._rank,
            now - operation.started,
            operation.waiting_for,
            operation.timeout,
        )
        return operation.deadline

    def _overdue(self, operation: Operation) -> DeadlineExceeded:
        """The error of an operation that has waited long enough: who did not do what."""
        waiting, part = operation.waiting_for, operation.fused or operation
        stage = part.stage
        if stage is not None and stage.missing:
            what = "they did not answer" if operation.one_sided else "they did not take part"
        elif part.waiting_more:
            what = "a part of what they sent has not arrived"
        elif operation.unconfirmed:
            what = "they did not confirm that they expected it"
        else:
            behind = min(self._matcher.channel(operation).unacknowledged, default=operation.round)
            waiting = self._outbox.receivers_behind(operation.name)
            what = f"they have not read what was sent to them in round {behind}"
        return DeadlineExceeded(
            f"{operation} on rank {self._rank} waited {operation.timeout:g} s for ranks {waiting}: {what}. If they are "
            f"only slow, raise SHOAL_TIMEOUT or pass timeout=",
            waiting,
        )
