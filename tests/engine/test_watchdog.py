"""Probes of awaited agents, at times that the test gives, the agents that are dropped, and errors at the deadline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engine import watchdog
from shoal.execution.matching import LAST_STAGE, Matcher
from shoal.execution.membership import Membership
from shoal.execution.operation import Operation
from shoal.execution.stage import Exchange, Stage
from shoal.transport.messages import Kind, Message


class AwaitedInAgreement:
    """A watchdog on rank 0 that awaits rank 1 since 0 s; it records its probes and dropped ranks."""

    def __init__(self) -> None:
        self.asked, self.dropped = list[int](), list[int]()
        nothing: Any = SimpleNamespace(in_flight=list)
        lifecycle: Any = SimpleNamespace(gate=SimpleNamespace(paused=True))
        sender: Any = SimpleNamespace(send_message=lambda rank, _: self.asked.append(rank))
        failures: Any = SimpleNamespace(give_up_on=lambda rank, _: self.dropped.append(rank))
        agreement: Any = SimpleNamespace(missing=[1])
        shared: Any = SimpleNamespace(rank=0, matcher=nothing, membership=Membership(2), sender=sender, router=nothing)
        self.watchdog = watchdog.Watchdog(shared, lifecycle, failures, agreement, nothing, nothing)
        self.watchdog.drop_after = 10.0


def test_an_agent_is_probed_after_half_of_the_time_and_dropped_after_the_other_half() -> None:
    on = AwaitedInAgreement()
    assert [on.watchdog.check(now) for now in (3.0, 5.0, 9.0)] == [5.0, 10.0, 10.0] and on.asked == [1]
    on.watchdog.on_answer(1, Message(Kind.NOTICE))
    assert [on.watchdog.check(now) for now in (9.0, 10.0)] == [10.0, 15.0] and on.asked == [1, 1]
    assert not on.dropped
    on.watchdog.check(15.0)
    assert on.dropped == [1]


def test_an_agent_that_was_stopped_probes_again_before_it_drops_others() -> None:
    on = AwaitedInAgreement()
    late = 10.0 + watchdog.LATE + 0.5
    assert [on.watchdog.check(now) for now in (5.0, late)] == [10.0, late + 5.0]
    assert on.asked == [1, 1] and not on.dropped


def at_its_deadline(
    change: Callable[[Operation, Stage], object], behind: Sequence[int] = (2,), agrees_with: Sequence[int] = ()
) -> list[Exception]:
    """The error of an operation that waits only for the parts that ``change`` adds, for the ranks ``behind``, which
    have read nothing, and for the reports of the ranks ``agrees_with`` about a loss."""
    matcher, errors = Matcher(), list[Exception]()
    operation = matcher.begin("average", "x", 1.0, True)
    stage = operation.stage = Stage(0, Exchange((), (1,)), set(), {})
    change(operation, stage)
    unused: Any = SimpleNamespace()
    gate = SimpleNamespace(paused=bool(agrees_with))
    lifecycle: Any = SimpleNamespace(fail=lambda _, error: errors.append(error), gate=gate)
    agreement: Any = SimpleNamespace(missing=list(agrees_with))
    sender: Any = SimpleNamespace(receivers_behind=lambda _: list(behind))
    stalls: Any = SimpleNamespace(last_answer=lambda *_: "")
    router = SimpleNamespace(reversing=SimpleNamespace(problems_with=lambda _: ""))
    shared: Any = SimpleNamespace(rank=0, matcher=matcher, membership=Membership(3), sender=sender, router=router)
    following = watchdog.Watchdog(shared, lifecycle, unused, agreement, unused, stalls).check(operation.deadline)
    assert following > operation.deadline  # without a pause, the driving thread would do nothing else
    return errors


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ({"missing": {1}}, "s for ranks [1]: they did not take part. If"),
        ({"missing": {1}, "one_sided": True}, "s for ranks [1]: they did not answer. If"),
        ({"to_move": True, "absent": {1}}, "s for ranks [1]: they did not come to it. If"),
        ({"to_move": True}, "s: all have come to it, and its tensors have not been moved. If"),
        ({"to_move": True, "unconfirmed": {1}}, "s for ranks [1]: they did not confirm that they expected it. If"),
        ({"unconfirmed": {1}}, "s for ranks [1]: they did not confirm that they expected it. If"),
        ({"waiting_more": True}, "s: the work on its device is not done. If"),
        ({}, "s for ranks [2]: they have not read what was sent to them in round 0. If"),
    ],
)
def test_an_error_at_the_deadline_states_what_it_waited_for(state: dict[str, Any], cause: str) -> None:
    def change(operation: Operation, stage: Stage) -> None:
        for name, value in state.items():
            setattr(operation if name in ("one_sided", "waiting_more") else stage, name, value)

    [error] = at_its_deadline(change)
    assert f"waited 1 {cause}" in str(error)


def test_an_error_at_the_deadline_describes_a_call_before_its_first_stage_and_after_its_last() -> None:
    def unconfirmed(operation: Operation, _: Stage) -> None:
        operation.unconfirmed = {5: 1}

    def no_stage(operation: Operation, _: Stage) -> None:
        operation.stage = None

    assert "for ranks [1]: they did not confirm that they expected it" in str(at_its_deadline(unconfirmed)[0])
    assert "for ranks [2]: they have not read what was sent to them in round 0" in str(at_its_deadline(no_stage)[0])


def test_the_deadline_ends_no_operation_whose_own_agent_has_still_to_begin_it() -> None:
    """Another thread of the script may hold the interpreter's lock for as long: the error would name no rank."""

    def not_begun(operation: Operation, _: Stage) -> None:
        operation.stage = None

    def awaiting_a_result(operation: Operation, _: Stage) -> None:
        operation.stage, operation.next_stage = None, LAST_STAGE

    def suspended_by_an_agreement(operation: Operation, _: Stage) -> None:
        operation.stage, operation.generator = None, (item for item in [Exchange((), (1,))])
        next(operation.generator)

    assert at_its_deadline(not_begun, behind=()) == []
    [error] = at_its_deadline(awaiting_a_result, behind=())
    assert "waited 1 s: after the loss of an agent, its result has not arrived from a survivor. If" in str(error)
    [error] = at_its_deadline(suspended_by_an_agreement, behind=(), agrees_with=[1])
    assert "waited 1 s for ranks [1]: they have not acknowledged the loss of an agent. If" in str(error)
