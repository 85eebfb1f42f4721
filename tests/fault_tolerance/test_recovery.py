"""The result cache: how long results are kept, how they are announced, and from which agents they are accepted."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from shoal.errors import ProtocolError
from shoal.execution.lifecycle import Lifecycle
from shoal.execution.matching import LAST_STAGE, Matcher
from shoal.execution.membership import Plan
from shoal.execution.operation import FailurePolicy, Operation, Recovery
from shoal.execution.shared_parts import SharedParts
from shoal.execution.stage import Exchange, Stage
from shoal.fault_tolerance import recovery
from shoal.fault_tolerance.membership_states import AgentEvent, MembershipTable
from shoal.fault_tolerance.recovery import HAD, RESULT, ResultCache, ResultTransfer, copy_for_cache, take_result
from shoal.transport.messages import Kind, Message
from shoal.transport.shared_regions import ResultPool
from support.recording_sender import recording_sender

RESULT_HERE = torch.arange(3.0)


class Agent:
    """Rank 0 of a job, and the messages that it sends."""

    def __init__(self, size: int = 3) -> None:
        self.matcher, self.membership = Matcher(), MembershipTable(size)
        self.sent_messages: list[tuple[int, Any]] = []
        unused: Any = None
        sender = recording_sender(0, self.membership, self._send)
        self.parts = SharedParts(0, size, unused, unused, self.membership, self.matcher, unused, sender)
        self.result_cache = ResultCache(self.parts)

    def _send(self, peer: int, message: Message) -> None:
        self.sent_messages.append((peer, message if message.op == RESULT else json.loads(message.body)))

    def begin(self, name: str = "x", plan: Plan | None = None) -> Operation:
        operation = self.matcher.begin("allreduce", name, 1.0, False)
        operation.recovery = Recovery(lambda _: iter(()), FailurePolicy.RETRY, plan or Plan())  # type: ignore[arg-type, return-value]
        return operation

    def end(self, operation: Operation, result: torch.Tensor | None = RESULT_HERE) -> None:
        self.result_cache.ended(operation, result)
        self.matcher.end(operation, None)

    def receive(self, source: int, content: object) -> None:
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.result_cache.serve(source, Message(Kind.CONTROL, HAD, HAD, nbytes=len(text), body=text))


def had(name: str, *rounds: tuple[int, int], leaving: bool = False) -> dict[str, Any]:
    return {"had": {name: [list(one) for one in rounds]}, "leaving": leaving}


def test_a_result_is_kept_until_all_participants_have_acknowledged_it() -> None:
    agent = Agent(4)
    agent.end(agent.begin(plan=Plan((3,))))  # one of the members takes no part
    agent.receive(1, had("x", (0, 1)))
    assert list(agent.result_cache.results) == [("x", 0)]
    agent.receive(2, had("x", (0, 1)))
    assert not agent.result_cache.results


def test_an_early_acknowledgement_is_counted() -> None:
    agent = Agent()
    first, second = agent.begin(), agent.begin()
    agent.receive(1, had("x", (0, 2)))
    agent.receive(2, had("x", (0, 1)))
    agent.end(first)
    assert not agent.result_cache.results
    agent.end(second)
    assert agent.result_cache.results["x", 1].without == {2}


def test_failed_agents_need_no_result() -> None:
    agent = Agent()
    agent.end(agent.begin())
    agent.receive(1, had("x", (0, 1)))
    agent.membership.apply(AgentEvent.LOSE, 2, "it died")
    agent.result_cache.on_departure(2, None)
    assert not agent.result_cache.results
    agent.end(agent.begin())
    assert agent.result_cache.results["x", 1].without == {1}


def test_many_results_are_acknowledged_at_once_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "TELL_AFTER", 4)
    agent = Agent()
    for name in ("x", "x", "y", "x", "x"):
        agent.end(agent.begin(name))
    assert agent.sent_messages == [(peer, {"had": {"x": [[0, 3]], "y": [[0, 1]]}, "leaving": False}) for peer in (1, 2)]
    agent.result_cache.confirm()
    assert agent.sent_messages[2:] == [(peer, had("x", (3, 1))) for peer in (1, 2)]
    agent.result_cache.confirm()
    assert len(agent.sent_messages) == 4


def test_large_results_are_acknowledged_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "TELL_AFTER_BYTES", 2 * RESULT_HERE.nbytes)
    agent = Agent()
    agent.end(agent.begin())
    assert not agent.sent_messages
    agent.end(agent.begin())
    assert agent.sent_messages == [(peer, had("x", (0, 2))) for peer in (1, 2)]
    agent.end(agent.begin())
    assert len(agent.sent_messages) == 2  # it counts anew


def test_a_departing_agent_gets_acknowledgements_at_once() -> None:
    agent = Agent()
    agent.end(agent.begin())
    agent.receive(1, {"had": {}, "leaving": True})
    assert agent.sent_messages == [(peer, had("x", (0, 1))) for peer in (1, 2)]
    agent.end(agent.begin())
    assert agent.sent_messages[2:] == [(peer, had("x", (1, 1))) for peer in (1, 2)]


def test_a_round_that_failed_locally_is_not_waited_for() -> None:
    agent = Agent()
    operation = agent.begin()
    agent.receive(1, had("x", (0, 1)))
    agent.end(operation, None)
    agent.receive(2, had("x", (0, 1)))
    assert not agent.result_cache.results and not agent.result_cache._ahead
    agent.result_cache.confirm()
    assert not agent.sent_messages


@pytest.mark.parametrize(
    "content",
    [
        b"nonsense",
        [],
        {"had": []},
        {"had": {}},
        *({"had": {"x": [run]}} for run in (0, [0, 2], [0, 0], [-1, 1], ["a", 1], [float("inf"), 1])),
        {"had": {"y": [[0, 1]]}},
    ],
)
def test_an_invalid_message_about_results_is_a_protocol_error(content: object) -> None:
    agent = Agent()
    agent.begin()
    with pytest.raises(ProtocolError, match="an invalid message about"):
        agent.receive(1, content)


def test_small_results_are_kept_as_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "MOST_BYTES", 16)
    x = torch.ones(4)
    kept = copy_for_cache(x, ResultPool())
    x += 1
    assert kept is not None and torch.equal(kept, torch.ones(4))
    assert copy_for_cache(torch.ones(5), ResultPool()) is None
    nothing = copy_for_cache(None, ResultPool())
    assert nothing is not None and nothing.numel() == 0
    conjugate = copy_for_cache(torch.tensor([1j]).conj(), ResultPool())
    assert conjugate is not None and not conjugate.is_conj() and conjugate.tolist() == [-1j]


def test_a_result_is_accepted_only_from_a_member() -> None:
    agent = Agent()
    operation, adopted = agent.begin(), []
    lifecycle: Any = type("Lifecycle", (), {"leave_stage": lambda *_: None})()
    lifecycle.begin_attempt = lambda *_: None
    lifecycle.settle = lambda operation, result, error: adopted.append(result)
    assert operation.recovery is not None
    operation.recovery.take = lambda result: result
    result_transfer = ResultTransfer(agent.parts, lifecycle, agent.result_cache)
    agent.membership.apply(AgentEvent.LOSE, 2, "it died")
    agent.result_cache.results["x", 0] = recovery.CachedResult(RESULT_HERE, {1})
    result_transfer.send(1, "x", 0)
    [(_, message)] = agent.sent_messages
    for source in (2, 1):
        result_transfer.serve(source, message)
        assert len(adopted) == (source == 1)
    assert torch.equal(adopted[0], RESULT_HERE)
    with pytest.raises(ProtocolError, match="not the body"):
        result_transfer.serve(1, replace(message, kind=Kind.DATA, body=b""))


class Steps:
    """A lifecycle that records the calls made to it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda operation, *rest: self.calls.append((name, *rest))


def in_the_midst(agent: Agent, take: Callable[[torch.Tensor], Any]) -> Operation:
    """An operation of all agents in a stage; and one of another attempt that waits for a confirmation."""
    operation = agent.begin()
    assert operation.recovery is not None
    operation.recovery.take, operation.generator = take, cast(Any, (one for one in ()))
    operation.stage, operation.waiting_more = Stage(0, Exchange([], [1]), {1}, {}), True
    operation.unconfirmed, operation.outcome = {7: 1}, (0,)
    return operation


def test_an_agent_that_receives_a_result_aborts_its_own_round_and_keeps_the_result_for_others() -> None:
    """Its sender may fail before it has forwarded the result to all."""
    lifecycle = Steps()
    operation = in_the_midst(Agent(), lambda result: f"taken: {result.tolist()}")
    assert operation.generator is not None
    generator = weakref.ref(operation.generator)
    take_result(cast(Lifecycle, lifecycle), operation, RESULT_HERE)
    assert generator() is None
    assert lifecycle.calls == [
        ("leave_stage",),
        ("begin_attempt", LAST_STAGE),
        ("settle", "taken: [0.0, 1.0, 2.0]", None),
    ]
    assert operation.recovery is not None and operation.recovery.copy is RESULT_HERE
    assert operation.generator is None and not operation.waiting_more
    assert not operation.unconfirmed and operation.outcome is None


def test_a_result_that_cannot_be_stored_fails_its_operation() -> None:
    wrong, lifecycle = ValueError("of another shape"), Steps()

    def take(result: torch.Tensor) -> None:
        raise wrong

    take_result(cast(Lifecycle, lifecycle), in_the_midst(Agent(), take), RESULT_HERE)
    assert lifecycle.calls[-1] == ("fail", wrong) and "settle" not in [name for name, *_ in lifecycle.calls]
