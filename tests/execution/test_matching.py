"""Which message belongs to which operation, and which stage may be sent: without an agent."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import ProtocolError
from shoal.execution import matching
from shoal.execution.matching import SMALL_WINDOW, WINDOW, Channel, Matcher, MatchResult, RoundFailure, disagreement
from shoal.execution.operation import Operation
from shoal.execution.stage import Exchange, Send, Stage
from shoal.transport.link import Published
from shoal.transport.messages import Kind, Message
from shoal.transport.shared_regions import Arena


def message(round_: int, stage: int = 0, name: str = "x", **fields: object) -> Message:
    return Message(Kind.DATA, "average", name, round_, stage, **fields)  # type: ignore[arg-type]


def enter(operation: Operation, number: int, sources: tuple[int, ...] = (1,), **exchange: object) -> Stage:
    operation.stage = Stage(number, Exchange((), sources, **exchange), set(sources), {})  # type: ignore[arg-type]
    return operation.stage


def test_a_message_is_current_early_late_or_never_expected() -> None:
    matcher = Matcher()
    assert matcher.match(message(0)) == (MatchResult.EARLY, None)
    operation = matcher.begin("average", "x", 1.0, True)
    assert matcher.match(message(0)) == (MatchResult.EARLY, operation)  # it has entered no stage
    enter(operation, 1)
    assert matcher.match(message(0, 0)) == (MatchResult.UNEXPECTED, operation)
    assert matcher.match(message(0, 1)) == (MatchResult.NOW, operation)
    assert matcher.match(message(0, 2)) == (MatchResult.EARLY, operation)
    assert matcher.match(message(1)) == (MatchResult.EARLY, None)
    operation.outcome = (torch.ones(1),)  # it waits only for others to confirm
    assert matcher.match(message(0, 2)) == (MatchResult.UNEXPECTED, operation)
    matcher.end(operation, None)
    assert matcher.match(message(0, 1)) == (MatchResult.UNEXPECTED, None)
    failed = matcher.begin("average", "x", 1.0, True)
    matcher.end(failed, ValueError("spoiled"))
    assert matcher.match(message(1)) == (MatchResult.LATE, None)
    assert matcher.failure_of(failed) == RoundFailure("ValueError: spoiled", own=True)


def test_one_name_accepts_two_kinds_of_operations_and_not_one_twice() -> None:
    matcher = Matcher()
    first = matcher.begin("average", "x", 1.0, True)
    other = matcher.begin("sum", "x", 1.0, True)
    assert (first.round, other.round) == (0, 1)
    with pytest.raises(ValueError, match="average 'x' round 2: another average named 'x' is still in flight"):
        matcher.begin("average", "x", 1.0, True)
    assert matcher.begin("average", "x", 1.0, False).round == 2
    assert matcher.begin("average", "y", 1.0, True).round == 0


def test_early_messages_are_kept_for_their_stage_and_returned_once() -> None:
    matcher = Matcher()
    matcher.keep(1, message(0, 0))
    matcher.keep(2, kept := message(0, 1))
    matcher.keep(1, other := message(1, 0))
    operation = matcher.begin("average", "x", 1.0, True)
    assert [source for source, _ in matcher.early_messages(operation, 0)] == [1]
    assert not list(matcher.early_messages(operation, 0))
    assert matcher.end(operation, None) == ([(2, kept)], [])
    assert matcher.give_up_early() == [(1, other)]
    assert not matcher.give_up_early()


def test_if_an_early_message_fails_a_round_the_others_are_returned_once() -> None:
    matcher = Matcher()
    for source in (1, 2, 3):
        matcher.keep(source, message(0, 0))
    operation = matcher.begin("average", "x", 1.0, True)
    arrived = matcher.early_messages(operation, 0)
    assert next(arrived)[0] == 1
    late, _ = matcher.end(operation, ValueError("it does not match"))
    assert sorted(source for source, _ in late) == [2, 3]
    assert not list(arrived)


def test_early_messages_of_an_agent_that_has_failed_are_not_returned() -> None:
    matcher = Matcher()
    for source in (1, 2, 3):
        matcher.keep(source, message(0, 0))
    operation = matcher.begin("average", "x", 1.0, True)
    arrived = matcher.early_messages(operation, 0)
    assert next(arrived)[0] == 1
    matcher.forget(2)
    assert [source for source, _ in arrived] == [3]


def test_queries_wait_for_their_stage() -> None:
    matcher = Matcher()
    for source, stage in ((1, 0), (2, 0), (2, 0), (3, 1)):
        matcher.keep_ask(source, Message(Kind.ASK, "average", "x", 0, stage))
    assert matcher.is_waited_for()
    operation = matcher.begin("average", "x", 1.0, True)
    assert not matcher.is_waited_for()
    assert sorted(matcher.early_probes(operation, enter(operation, 0))) == [(1, False), (2, False)]
    assert matcher.end(operation, None) == ([], [(1, 3, False)])


def test_one_peer_has_a_quota_of_early_messages() -> None:
    matcher = Matcher()
    with pytest.raises(ProtocolError):
        for round_ in range(1 << 20):
            matcher.keep(1, message(round_))
    matcher.keep(2, message(0))
    matcher.forget(1)
    matcher.keep(1, message(0))


def test_only_the_latest_failed_rounds_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "TOMBSTONES", 2)
    matcher = Matcher()
    for round_ in range(4):
        matcher.end(matcher.begin("average", "x", 1.0, True), ValueError(f"round {round_}"))
    late = [MatchResult.UNEXPECTED] * 2 + [MatchResult.LATE] * 2
    assert [matcher.match(message(round_))[0] for round_ in range(4)] == late
    reasons = ["", "", "ValueError: round 2", "ValueError: round 3"]
    assert [matcher.failure_of(message(round_)).reason for round_ in range(4)] == reasons


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, ""),
        ({"op": "sum"}, "rank 1 called sum and rank 0 called average"),
        ({"digest": 7}, "rank 1 and rank 0 have a different topology"),
        ({"dtype": torch.float64}, "rank 1 sent torch.float64 and rank 0 expected torch.float32"),
        ({"shape": (3,)}, r"rank 1 sent a tensor of shape [3] and rank 0 expected shape [2]"),
        ({"shape": (), "scale": float("nan")}, ""),  # "nothing this round"
    ],
)
def test_mismatches_are_described(fields: dict[str, object], reason: str) -> None:
    matcher = Matcher()
    operation = matcher.begin("average", "x", 1.0, True)
    stage = enter(operation, 0, dtype=torch.float32, shape=(2,))
    result = message(0, dtype=torch.float32, shape=(2,))
    for name, value in fields.items():
        setattr(result, name, value)
    assert disagreement(operation, stage, 1, result, 0) == reason
    assert "expects nothing from rank 2" in disagreement(operation, stage, 2, message(0, dtype=torch.float32), 0)


# What may be sent


def sending(channel: Channel, round_: int, published: Published, one_sided: bool = False) -> tuple[Operation, Stage]:
    operation = Operation("average", channel.name, round_, 1.0)
    operation.one_sided = one_sided
    send = Send(1, published, 0, published.data.numel(), tuple(published.data.shape))
    stage = operation.stage = Stage(0, Exchange([send], ()), set(), {})
    return operation, stage


@pytest.mark.parametrize(("large", "window"), [(True, WINDOW), (False, SMALL_WINDOW)])
def test_a_receiver_may_be_behind_by_a_limited_number_of_rounds(large: bool, window: int) -> None:
    arena = Arena()
    region = arena.allocate(1 << 16) if large else None
    published = Published(torch.ones(2), region)
    channel = Channel("x")
    for round_ in range(window):
        assert not channel.must_defer(*sending(channel, round_, published))
        channel.sent(round_, 1)
    late = sending(channel, window, published)
    assert channel.must_defer(*late)
    channel.defer(*late)
    behind = sending(channel, window + 1, Published(torch.ones(1)))
    assert channel.must_defer(*behind)  # others are before it
    channel.defer(*behind)
    assert not list(channel.sendable())
    channel.acknowledged(0, 1)
    assert next(channel.sendable()) == late
    arena.close()


def test_operations_that_have_ended_are_not_sent() -> None:
    channel = Channel("x")
    published = Published(torch.ones(2))
    ended, stays = sending(channel, 0, published), sending(channel, 1, published)
    channel.defer(*ended)
    channel.defer(*stays)
    ended[0].stage = None
    assert list(channel.sendable()) == [stays]
    assert not channel.deferred


def test_messages_of_an_aborted_attempt_are_recognized_also_after_the_round() -> None:
    matcher = Matcher()
    operation = matcher.begin("average", "x", 1.0, True)
    old, new = (Message(Kind.DATA, "average", "x", 0, stage) for stage in (1, 256))
    assert not matcher.of_earlier_attempt(old)
    matcher.begin_attempt(operation, 256)
    assert matcher.of_earlier_attempt(old) and not matcher.of_earlier_attempt(new)
    matcher.end(operation, None)
    assert matcher.of_earlier_attempt(old)
    assert not matcher.of_earlier_attempt(Message(Kind.DATA, "average", "x", 1, 1))
