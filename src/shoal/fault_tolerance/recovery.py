"""Recovery of an operation in flight after the survivors have agreed on a loss.

Called by the driving thread: no generator runs, except those whose first step runs in another thread. These have no
stage yet.
"""

from __future__ import annotations

import torch

from ..operations.generators import drop_generator
from ..operations.lifecycle import Lifecycle
from ..operations.matching import LAST_STAGE
from ..operations.membership import Plan
from ..operations.operation import Operation


def complete_without(lifecycle: Lifecycle, operation: Operation, gone: tuple[int, ...]) -> None:
    """Complete a round between neighbours without the missing or incomplete messages of lost agents."""
    stage, recovery = operation.stage, operation.recovery
    if recovery is None:
        return
    # Also for a message that is sent later, and a stage that begins later: by then agents may have been admitted in
    # their place.
    recovery.lost |= frozenset(gone)
    if stage is None or operation.error is not None:
        return
    # A stage that was complete before has been queued before. A second entry would resume the operation at its next
    # stage, before that one is complete.
    was_complete = stage.complete
    stage.missing.difference_update(gone)
    # The link to a lost agent could not be opened, so the stage was not posted. Without this its other receivers would
    # wait for this agent until their deadline.
    if not stage.posted and not operation.channel.defers(operation):
        operation.channel.defer(operation, stage)
        lifecycle.send_deferred(operation.channel)
    # The rest of these messages will never arrive: the operation would wait for it without end.
    torn = [
        source
        for source, message in stage.arrived.items()
        if source in gone and message.payload is not None and not message.payload.complete
    ]
    for source in torn:
        del stage.arrived[source]
    if torn and operation.generator is not None:  # it may have begun to sum: restart without them
        recovery.again, operation.waiting_more = True, False
    if stage.complete and (torn or not was_complete):
        _make_ready_once(lifecycle, operation)


def conclude(lifecycle: Lifecycle, operation: Operation) -> None:
    """End a collective operation whose result all survivors have, without further confirmations."""
    recovery = operation.recovery
    assert recovery is not None and recovery.result is not None
    result = recovery.result
    lifecycle.leave_stage(operation)
    drop_generator(operation)
    lifecycle.forget_before(operation, LAST_STAGE)  # confirmations that other agents have the result
    # Receivers may still read this agent's memory: the last confirmation ends the operation.
    if operation.unconfirmed:
        operation.outcome = result
    else:
        lifecycle.settle(operation, result[0], None)


def await_result(lifecycle: Lifecycle, operation: Operation) -> None:
    """Let a collective operation wait for its result, which a survivor has and sends."""
    _stop(lifecycle, operation)
    lifecycle.forget_before(operation, LAST_STAGE)


def take_result(lifecycle: Lifecycle, operation: Operation, result: torch.Tensor) -> None:
    """End a collective operation with the result that another agent has sent."""
    recovery = operation.recovery
    if recovery is None or recovery.take is None:
        return
    await_result(lifecycle, operation)
    # For this agent's own cache: the sender may be lost before it has sent the result to all.
    recovery.copy = result
    try:
        taken = recovery.take(result)
    except Exception as error:
        lifecycle.fail(operation, error)
    else:
        lifecycle.settle(operation, taken, None)


def restart(lifecycle: Lifecycle, operation: Operation, plan: Plan) -> None:
    """Restart a collective operation among the survivors."""
    recovery = operation.recovery
    assert recovery is not None
    _stop(lifecycle, operation)
    # A result that stays would be reported as one of the new attempt, and agents would end with results of different
    # members. The plan comes before `first_stage`, which follows from it: messages of the old attempt must not match.
    recovery.plan, recovery.result, recovery.copy, recovery.again = plan, None, None, True
    lifecycle.forget_before(operation, recovery.first_stage)
    _make_ready_once(lifecycle, operation)


def _stop(lifecycle: Lifecycle, operation: Operation) -> None:
    """End the current attempt of an operation."""
    lifecycle.leave_stage(operation)
    drop_generator(operation)
    # Otherwise the next bytes of an old message would queue the operation.
    operation.waiting_more = False
    operation.unconfirmed, operation.outcome = {}, None  # of receivers in this attempt


def _make_ready_once(lifecycle: Lifecycle, operation: Operation) -> None:
    """Queue an operation, unless it is queued for the driving thread already, for an outdated reason."""
    if operation not in lifecycle.ready:
        lifecycle.make_ready(operation)
