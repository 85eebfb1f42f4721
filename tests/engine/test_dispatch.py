"""The handling of each kind of message, with stub parts of the engine that only record their calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engine.dispatch import Dispatch
from shoal.errors import ProtocolError
from shoal.execution.matching import Matcher
from shoal.execution.stage import Exchange, Stage
from shoal.transport.messages import AGAIN, Kind, Message, Where


class Parts:
    """Rank 0 in an exchange with rank 1: ``calls`` are those of other parts, as (function, arguments)."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.matcher = Matcher()
        self.operation = self.matcher.begin("average", "x", 1.0, True)
        self.stage = self.operation.stage = Stage(0, Exchange((), (1,)), {1}, {})
        backend_stages = SimpleNamespace(check=lambda message: None)
        gate = SimpleNamespace(closing=False)
        lifecycle = self._records("take", "go_on", "accept", backend_stages=backend_stages, gate=gate)
        unused: Any = SimpleNamespace()
        shared: Any = SimpleNamespace(rank=0, matcher=self.matcher, sender=self._records("acknowledge"), router=unused)
        shared.events = self._records(active=False)
        services = self._records(of=lambda message: None)
        failures = self._records("on_closed", "on_cut", "on_shut_out", "on_left")
        self.dispatch = Dispatch(shared, lifecycle, unused, failures, services, {})

    def _records(self, *functions: str, **others: object) -> Any:
        def recording(name: str) -> Any:
            return lambda *given, **named: self.calls.append((name, *given, *named.values()))

        return SimpleNamespace(**{name: recording(name) for name in functions}, **others)

    def repeated(self) -> Message:
        """Rank 1's tensor for this stage, sent again after a loss."""
        return Message(Kind.DATA, "average", "x", 0, 0, flags=AGAIN)


def test_a_protocol_error_of_an_agent_is_a_certain_failure_at_once() -> None:
    parts = Parts()

    def refuse(source: int, message: Message) -> None:
        raise ProtocolError("too many messages")

    parts.matcher.keep = refuse  # type: ignore[method-assign]
    parts.dispatch.on_message(1, Message(Kind.DATA, "average", "of a later call"))
    assert parts.calls == [("on_closed", 1, "too many messages", True, True)]


def test_a_repeated_tensor_is_used_where_it_is_missing() -> None:
    parts, message = Parts(), Parts().repeated()
    parts.dispatch.on_message(1, message)
    assert parts.calls == [
        ("take", parts.operation, parts.stage, 1, message),
        ("go_on", parts.operation, parts.stage),
    ]


@pytest.mark.parametrize("stays_to_move", [True, False])
def test_a_repeated_tensor_replaces_an_announced_one_until_the_backend_has_moved_it(stays_to_move: bool) -> None:
    parts = Parts()
    announced, message = parts.repeated(), parts.repeated()
    announced.where = Where.CARRIED
    parts.stage.take(1, announced)
    parts.stage.to_move = stays_to_move
    parts.dispatch.on_message(1, message)
    if stays_to_move:
        assert parts.calls == [("accept", parts.operation, parts.stage, 1, message)]
    else:
        assert parts.calls == [("acknowledge", 1, message)]


def test_a_repeated_tensor_received_over_a_link_is_acknowledged() -> None:
    parts, message = Parts(), Parts().repeated()
    parts.stage.to_move = True
    parts.stage.take(1, Message(Kind.DATA, "average", "x", 0, 0))
    parts.dispatch.on_message(1, message)
    assert parts.calls == [("acknowledge", 1, message)]


def test_a_message_of_an_earlier_attempt_is_acknowledged_and_not_refused() -> None:
    parts = Parts()
    parts.matcher.begin_attempt(parts.operation, 256)
    message = Message(Kind.DATA, "average", "x", 0, 0)
    parts.dispatch.on_message(1, message)
    assert parts.calls == [("acknowledge", 1, message)]
