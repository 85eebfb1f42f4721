"""Probes of awaited agents, at times that the test gives, and the agents that are dropped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shoal.engine import watchdog
from shoal.operations.membership import Membership


class AwaitedInAgreement:
    """A watchdog on rank 0 that awaits rank 1 since 0 s, with what it asks and whom it drops."""

    def __init__(self) -> None:
        self.asked, self.dropped = list[int](), list[int]()
        nothing: Any = SimpleNamespace(in_flight=list)
        lifecycle: Any = SimpleNamespace(gate=SimpleNamespace(paused=True))
        sender: Any = SimpleNamespace(say=lambda rank, _: self.asked.append(rank))
        failures: Any = SimpleNamespace(give_up_on=lambda rank, _: self.dropped.append(rank))
        agreement: Any = SimpleNamespace(missing=[1])
        parts = (lifecycle, nothing, Membership(2), sender, failures, agreement, nothing, nothing)
        self.watchdog = watchdog.Watchdog(0, *parts)
        self.watchdog.drop_after = 10.0


def test_an_agent_is_probed_after_half_of_the_time_and_dropped_after_the_other_half() -> None:
    on = AwaitedInAgreement()
    assert [on.watchdog.check(now) for now in (3.0, 5.0, 9.0)] == [5.0, 10.0, 10.0] and on.asked == [1]
    on.watchdog.on_answer(1)
    assert [on.watchdog.check(now) for now in (9.0, 10.0)] == [10.0, 15.0] and on.asked == [1, 1]
    assert not on.dropped
    on.watchdog.check(15.0)
    assert on.dropped == [1]


def test_an_agent_that_was_stopped_itself_probes_again_before_it_drops_others() -> None:
    on = AwaitedInAgreement()
    late = 10.0 + watchdog.LATE + 0.5
    assert [on.watchdog.check(now) for now in (5.0, late)] == [10.0, late + 5.0]
    assert on.asked == [1, 1] and not on.dropped
