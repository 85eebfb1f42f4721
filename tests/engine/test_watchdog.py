"""Probes of awaited agents, at times that the test gives, the agents that are dropped, and errors at the deadline."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engine import watchdog
from shoal.operations.matching import Matcher
from shoal.operations.membership import Membership
from shoal.operations.operation import Operation
from shoal.operations.stage import Exchange, Stage
from shoal.transport.wire import Kind, Message


class AwaitedInAgreement:
    """A watchdog on rank 0 that awaits rank 1 since 0 s; it records its probes and dropped ranks."""

    def __init__(self) -> None:
        self.asked, self.dropped = list[int](), list[int]()
        nothing: Any = SimpleNamespace(in_flight=list)
        lifecycle: Any = SimpleNamespace(gate=SimpleNamespace(paused=True))
        sender: Any = SimpleNamespace(send_message=lambda rank, _: self.asked.append(rank))
        failures: Any = SimpleNamespace(give_up_on=lambda rank, _: self.dropped.append(rank))
        agreement: Any = SimpleNamespace(missing=[1])
        shared: Any = SimpleNamespace(rank=0, matcher=nothing, membership=Membership(2), sender=sender)
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


def at_its_deadline(change: Callable[[Operation, Stage], object]) -> str:
    """The error of an operation that waits only for the parts that ``change`` adds; rank 2 has read nothing."""
    matcher, errors = Matcher(), list[Exception]()
    operation = matcher.begin("average", "x", 1.0, True)
    stage = operation.stage = Stage(0, Exchange((), (1,)), set(), {})
    change(operation, stage)
    unused: Any = SimpleNamespace()
    lifecycle: Any = SimpleNamespace(fail=lambda _, error: errors.append(error))
    sender: Any = SimpleNamespace(receivers_behind=lambda _: [2], problems_with=lambda _: "")
    stalls: Any = SimpleNamespace(last_answer=lambda *_: "")
    shared: Any = SimpleNamespace(rank=0, matcher=matcher, membership=Membership(3), sender=sender)
    watchdog.Watchdog(shared, lifecycle, unused, unused, unused, stalls).check(operation.deadline)
    [error] = errors
    return str(error)


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ({"missing": {1}}, "[1]: they did not take part. If"),
        ({"missing": {1}, "one_sided": True}, "[1]: they did not answer. If"),
        ({"to_move": True, "absent": {1}}, "[1]: they did not come to it. If"),
        ({"to_move": True}, "[]: all have come to it, and its tensors have not been moved. If"),
        ({"to_move": True, "unconfirmed": {1}}, "[1]: they did not confirm that they expected it. If"),
        ({"unconfirmed": {1}}, "[1]: they did not confirm that they expected it. If"),
        ({"waiting_more": True}, "[]: a part of what they sent has not arrived. If"),
        ({}, "[2]: they have not read what was sent to them in round 0. If"),
    ],
)
def test_an_error_at_the_deadline_states_what_it_waited_for(state: dict[str, Any], cause: str) -> None:
    def change(operation: Operation, stage: Stage) -> None:
        for name, value in state.items():
            setattr(operation if name in ("one_sided", "waiting_more") else stage, name, value)

    assert f"waited 1 s for ranks {cause}" in at_its_deadline(change)


def test_an_error_at_the_deadline_describes_a_call_before_its_first_stage_and_after_its_last() -> None:
    def unconfirmed(operation: Operation, _: Stage) -> None:
        operation.unconfirmed = {5: 1}

    def no_stage(operation: Operation, _: Stage) -> None:
        operation.stage = None

    assert "for ranks [1]: they did not confirm that they expected it" in at_its_deadline(unconfirmed)
    assert "for ranks [2]: they have not read what was sent to them in round 0" in at_its_deadline(no_stage)
