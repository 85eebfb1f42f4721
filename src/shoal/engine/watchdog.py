"""How long an operation waits, and what it does meanwhile: it asks, then reports, then gives up."""

from __future__ import annotations

import logging

from ..errors import DeadlineExceeded
from ..transport.wire import Kind, Message
from .matching import Rounds
from .operation import Operation
from .outbox import Outbox

log = logging.getLogger("shoal")

ASK_AFTER = 0.02
"""Seconds without a message after which its sender is asked whether it will come."""
STALL_AFTER = 30.0
"""Seconds after which a report says who is missing."""


def remind(operation: Operation, now: float, rank: int, outbox: Outbox) -> float:
    """Ask or report, if it is time to. Returns when to come back, as ``time.monotonic()``."""
    stage = operation.stage
    following = operation.deadline  # also while it computes: it may have to wait for more afterwards
    if stage is not None and stage.missing and not stage.asked:
        if now < stage.started + ASK_AFTER:
            return min(following, stage.started + ASK_AFTER)
        stage.asked = True
        for source in stage.missing:
            outbox.say(source, Message(Kind.ASK, operation.op, operation.name, operation.round, stage.number))
    if operation.stalled:
        return following
    if now < operation.started + STALL_AFTER:
        return min(following, operation.started + STALL_AFTER)
    operation.stalled = True
    log.warning(
        "%s on rank %d has waited %.0f s for ranks %s; it gives up after %.0f s",
        operation,
        rank,
        now - operation.started,
        operation.waiting_for,
        operation.timeout,
    )
    return following


def overdue(operation: Operation, rank: int, rounds: Rounds, outbox: Outbox) -> DeadlineExceeded:
    """The error of an operation that has waited long enough: who did not do what."""
    waiting, part = operation.waiting_for, operation.bundle or operation
    stage = part.stage
    if stage is not None and stage.missing:
        what = "they did not answer" if operation.one_sided else "they did not take part"
    elif part.waiting_more:
        what = "a part of what they sent has not arrived"
    elif operation.unconfirmed:
        what = "they did not confirm that they expected it"
    else:
        behind = min(rounds.channel(operation).unacknowledged, default=operation.round)
        waiting = outbox.debtors(operation.name)
        what = f"they have not read what was sent to them in round {behind}"
    return DeadlineExceeded(
        f"{operation} on rank {rank} waited {operation.timeout:g} s for ranks {waiting}: {what}. If they are only "
        f"slow, raise SHOAL_TIMEOUT or pass timeout=",
        waiting,
    )
