"""When an agent is believed to be gone: the detector by itself, with connections and a clock that the test has."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import ProtocolError
from shoal.execution.membership import Departure
from shoal.fault_tolerance import failure_detector
from shoal.fault_tolerance.failure_detector import GRACE, UNCONNECTED_GRACE, FailureDetector, Failures
from shoal.fault_tolerance.membership_states import MembershipTable
from shoal.transport.messages import CERTAIN, DIED, Kind, Message


@dataclass
class Connections:
    """The outgoing and the incoming connections of this agent."""

    known: set[int] = field(default_factory=set)
    received_from: set[int] = field(default_factory=set)
    cut_off: set[int] = field(default_factory=set)

    def has_connection(self, rank: int) -> bool:
        return rank in self.known or rank in self.received_from

    def receives_from(self, rank: int) -> bool:
        return rank in self.received_from

    def reaches(self, rank: int) -> bool:
        return rank in self.known

    def is_cut_off(self, rank: int) -> bool:
        return rank in self.cut_off


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(failure_detector, "clock", clock)
    return clock


def detector(connections: Connections) -> FailureDetector:
    router: Any = connections
    return FailureDetector(0, MembershipTable(4), router)


def died(rank: int, reported_by: int, certain: bool = False) -> Message:
    flags = DIED | (CERTAIN if certain else 0)
    return Message(Kind.NOTICE, round=reported_by, token=rank, flags=flags, text="its process ended")


def test_a_suspect_is_confirmed_after_its_last_messages_could_have_arrived(clock: Clock) -> None:
    result = detector(Connections(known={1}))
    assert result.suspect(1, "closed", final=False, certain=False) == clock.now + GRACE
    assert result.suspect(2, "refused", final=False, certain=False) == clock.now + UNCONNECTED_GRACE
    assert result.next == clock.now + GRACE
    assert not result.confirmed(clock.now)
    assert result.confirmed(clock.now + GRACE) == [Departure(1, "closed", True, 0)]
    result.forget(1)
    assert result.next == clock.now + UNCONNECTED_GRACE


def test_without_pending_messages_it_is_confirmed_at_once(clock: Clock) -> None:
    result = detector(Connections(known={1}))
    result.suspect(1, "closed", final=False, certain=False)
    assert result.suspect(1, "nonsense", final=True, certain=True) == clock.now
    assert result.confirmed(clock.now) == [Departure(1, "nonsense", True, 0, certain=True)]


def test_a_second_suspicion_does_not_delay_the_first(clock: Clock) -> None:
    result = detector(Connections(known={1}))
    due = result.suspect(1, "closed", final=False, certain=False)
    clock.now += 0.3
    assert result.suspect(1, "its process ended", final=False, certain=True) == due
    assert result.confirmed(due)[0].cause == "closed"


def test_an_agent_connected_to_the_dead_detects_it_itself(clock: Clock) -> None:
    """If its connections stay, the other two have lost each other, so a report alone is not yet a failure."""
    result = detector(Connections(received_from={2}))
    assert result.notice(1, died(2, reported_by=1)) == clock.now + GRACE
    certain = detector(Connections(received_from={2})).notice(1, died(2, reported_by=1, certain=True))
    assert certain == Departure(2, "its process ended", True, 1, certain=True)
    apart = detector(Connections()).notice(1, died(2, reported_by=1))
    assert apart == Departure(2, "its process ended", True, 1)


def test_a_departure_names_the_agent_that_observed_it_and_not_the_forwarder(clock: Clock) -> None:
    result = detector(Connections()).notice(1, died(2, reported_by=3))
    assert result == Departure(2, "its process ended", True, 3)
    left = Message(Kind.NOTICE, token=2, text="it called shoal.shutdown()")
    assert detector(Connections()).notice(2, left) == Departure(2, "it called shoal.shutdown()", False, 2)


def test_an_agent_that_leaves_during_another_failure_is_counted_after_it(clock: Clock) -> None:
    result = detector(Connections(known={1, 2}))
    due = result.suspect(1, "closed", final=False, certain=False)
    assert result.notice(2, Message(Kind.NOTICE, token=2, text="it called shoal.shutdown()")) == due
    assert [one.rank for one in result.confirmed(due)] == [1, 2]


def test_it_is_counted_after_it_also_when_its_connections_end(clock: Clock) -> None:
    """Seed 4706 of the simulated fleet: rank 2 ends because of rank 1, and its connections end before rank 1's."""
    failure_detector = detector(Connections(known={1, 2}))
    due = failure_detector.suspect(1, "closed", final=False, certain=False)
    failure_detector.notice(2, died(2, reported_by=2, certain=True))
    failure_detector.nothing_follows(2)
    assert not failure_detector.confirmed(clock.now) and failure_detector.next == due
    failure_detector.suspect(1, "closed", final=True, certain=True)
    assert [one.rank for one in failure_detector.confirmed(clock.now)] == [1, 2]
    failure_detector.forget(1)
    assert [one.rank for one in failure_detector.confirmed(clock.now)] == [2]


def test_a_repeated_report_of_a_loss_is_not_counted_after_the_shutdowns_that_it_has_caused(clock: Clock) -> None:
    """Seed 700956 of the simulated fleet: rank 3 is lost, ranks 1 and 2 end because of it, and all report rank 3."""
    failure_detector = detector(Connections(known={1, 2, 3}))
    due = failure_detector.notice(1, died(3, reported_by=1))
    for rank in (1, 2):
        assert failure_detector.notice(rank, died(rank, reported_by=rank, certain=True)) == due
    certain = failure_detector.notice(2, died(3, reported_by=2, certain=True))
    assert certain == Departure(3, "its process ended", True, 2, certain=True)
    failure_detector.nothing_follows(1)
    assert not failure_detector.confirmed(clock.now)
    failure_detector.forget(3)
    assert [one.rank for one in failure_detector.confirmed(due)] == [1, 2]


def test_the_loss_that_a_shutdown_message_names_is_counted_before_it(clock: Clock) -> None:
    """Also if the leaving agent was suspected first."""
    failure_detector = detector(Connections(known={1, 2}))
    failure_detector.suspect(2, "closed", final=False, certain=False)
    clock.now += 0.1
    due = failure_detector.report(Departure(1, "its process ended", True, 2))
    failure_detector.report(Departure(2, "it called shoal.shutdown()", False, 2))
    failure_detector.nothing_follows(2)
    assert not failure_detector.confirmed(clock.now) and failure_detector.next == due
    assert [one.rank for one in failure_detector.confirmed(due)] == [1, 2]


def test_an_exit_message_on_an_open_link_counts_only_from_its_sender(clock: Clock) -> None:
    left = Departure(2, "it called shoal.shutdown()", False, 1)
    assert detector(Connections(received_from={2})).report(left) == float("inf")
    result = detector(Connections())
    assert result.report(left) == clock.now + GRACE
    assert result.confirmed(clock.now + GRACE) == [left]


def test_an_exit_message_to_others_counts_only_if_the_own_link_agrees(clock: Clock) -> None:
    """Its last messages to this agent may be in flight, over a connection that does not exist yet."""
    left = Departure(2, "it called shoal.shutdown()", False, 1)
    own = Departure(2, "it called shoal.shutdown()", False, 2)
    result = detector(Connections(known={2}))
    assert result.report(left) == result.next == float("inf")
    assert not result.confirmed(clock.now + 1e6)
    assert result.report(own) == clock.now + GRACE
    assert result.confirmed(clock.now + GRACE) == [own]


@pytest.mark.parametrize("final", [False, True])
def test_a_link_may_end_without_the_exit_message_that_others_have_received(clock: Clock, final: bool) -> None:
    """If its messages to this agent end without an exit message, it has died after it sent those."""
    left = Departure(2, "it called shoal.shutdown()", False, 1)
    result = detector(Connections(known={2}))
    result.report(left)
    due = result.suspect(2, "closed", final=final, certain=False)
    assert due == clock.now + (0.0 if final else GRACE)
    assert result.suspect(2, "its process ended", final=False, certain=True) == due
    assert result.confirmed(due) == [Departure(2, "closed", True, 0) if final else left]


def test_an_exit_message_does_not_undo_the_failure_that_caused_it(clock: Clock) -> None:
    """Rank 1 has excluded rank 2, and leaves after that. Rank 2 sends its exit message. Rank 2 is the cause."""
    result = detector(Connections(known={1, 2}, received_from={2}))
    due = result.suspect(1, "sending to it failed", final=False, certain=False)
    assert result.notice(1, died(2, reported_by=1, certain=True)) == due
    assert result.notice(2, Message(Kind.NOTICE, token=2, text="it called shoal.shutdown()")) == due
    failed = Departure(2, "its process ended", True, 1, certain=True)
    assert failed in result.confirmed(due)
    result.forget(1)
    assert result.notice(2, Message(Kind.NOTICE, token=2, text="it called shoal.shutdown()")) == failed


OWN = Departure(2, "it called shoal.shutdown()", False, 2)
"""The identity that an agent reports on the link to it."""


@pytest.mark.parametrize("certain", [False, True])
def test_the_end_of_a_link_after_its_exit_message_is_no_failure(clock: Clock, certain: bool) -> None:
    """The agent counts as departed once its last messages to this agent have arrived too."""
    connections = Connections(known={2}, received_from={2})
    result = detector(connections)
    assert result.report(OWN) == float("inf")
    assert result.suspect(2, "sending to it failed", final=False, certain=certain) == float("inf")
    connections.received_from.clear()
    assert result.suspect(2, "closed", final=True, certain=certain) == clock.now
    assert result.confirmed(clock.now) == [OWN]


def test_an_exit_message_on_its_link_explains_the_end_of_its_process(clock: Clock) -> None:
    result = detector(Connections(known={2}))
    due = result.suspect(2, "its process ended", final=False, certain=True)
    assert result.report(OWN) == due
    assert result.confirmed(due) == [OWN]


def test_an_agent_that_sent_its_exit_message_does_not_delay_a_failure(clock: Clock) -> None:
    """Rank 2 left because rank 1 died. The link to it ended first, and rank 3 reports rank 1."""
    result = detector(Connections(known={1, 2}, received_from={2}))
    result.report(OWN)
    result.suspect(2, "sending to it failed", final=False, certain=False)
    failed = Departure(1, "its process ended", True, 3, certain=True)
    assert result.notice(3, died(1, reported_by=3, certain=True)) == failed


def test_an_agent_is_notified_of_its_own_failure(clock: Clock) -> None:
    output = detector(Connections(known={1})).notice(1, died(0, reported_by=1))
    assert output == Departure(0, "its process ended", True, 1)


def failures_of(agrees: bool, passed_on: list[Departure], changes: list[str], membership: MembershipTable) -> Failures:
    """Those of rank 0 of 4, with parts that only record."""
    nothing: Any = SimpleNamespace(in_flight=list, all=list, active=False)
    nothing.forget = nothing.shut_out = nothing.split_those_without = lambda _: None
    nothing.on_departure = lambda rank, because: None
    sender: Any = SimpleNamespace(pass_on=passed_on.append, unacknowledged_by=lambda _: [])
    lifecycle: Any = SimpleNamespace(departed_peers=SimpleNamespace(lose_needed_by=lambda _: None))
    agreement: Any = SimpleNamespace(
        active=agrees, report_losses=lambda: changes.append("change"), react_by=lambda _: None
    )
    parts: Any = SimpleNamespace(rank=0, size=4, router=nothing, progress=nothing, matcher=nothing, sender=sender)
    parts.events = nothing
    return Failures(parts, membership, lifecycle, nothing, nothing, agreement)


@pytest.mark.parametrize("agrees", [True, False])
def test_an_agent_whose_own_call_failed_is_certainly_failed_if_the_others_agree_on_failures(agrees: bool) -> None:
    passed_on: list[Departure] = []
    changes: list[str] = []
    membership = MembershipTable(4)
    assert failures_of(agrees, passed_on, changes, membership).leave_behind(2, "no data") is agrees
    assert passed_on == [Departure(2, "its own call failed: no data", True, 0, certain=True)] * agrees
    assert changes == ["change"] * agrees
    assert membership.view.alive == ((0, 1, 3) if agrees else (0, 1, 2, 3))


def test_a_notice_about_a_nonexistent_rank_is_a_protocol_error() -> None:
    failures = failures_of(True, [], [], MembershipTable(4))
    with pytest.raises(ProtocolError, match="a notice about rank 4 of 4"):
        failures.on_notice(1, died(4, reported_by=1, certain=True))
