"""A call that fails before a backend has moved its tensors: only the agents that wait for them get the error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import PeerLost
from shoal.execution.backend_stages import BackendStages
from shoal.execution.matching import Matcher
from shoal.execution.membership import Membership
from shoal.execution.shared_parts import SharedParts
from shoal.execution.stage import BackendRequest, Exchange, Send, Stage
from shoal.transport.messages import Kind, Message


def notified(
    among: tuple[int, ...] | None,
    error: Exception | None = None,
    *,
    withdraws: bool = True,
    to_move: bool = True,
    ended: Exception | None = None,
) -> list[int]:
    """The ranks to which rank 0 of 5 denies a stage that it leaves with an error.

    It sends to rank 1, waits for rank 2, and has a message of rank 3.
    """
    denied: list[int] = []
    matcher = Matcher()
    gate: Any = SimpleNamespace(ended=ended)
    sender: Any = SimpleNamespace(deny=lambda rank, *_: denied.append(rank))
    unused: Any = SimpleNamespace()
    parts = SharedParts(0, 5, unused, unused, Membership(5), matcher, unused, sender)
    stages = BackendStages(parts, gate, unused)
    backend: Any = SimpleNamespace(withdraw=lambda *_: withdraws)
    stages.carry_with(backend)
    operation = matcher.begin("average", "x", 1.0, True)
    operation.error = error
    published: Any = None
    exchange = Exchange([Send(1, published, 0, 0, ())], [2, 3], carried=BackendRequest(among))
    stage = Stage(0, exchange, {2}, {3: Message(Kind.DATA, "average", "x")}, to_move=to_move)
    stages.leave(operation, stage)
    return denied


@pytest.mark.parametrize(("among", "ranks"), [((), [1, 2, 3, 4]), ((0, 2, 4), [2, 4]), (None, [1, 2, 3])])
def test_a_failed_call_is_reported_to_its_other_members(among: tuple[int, ...] | None, ranks: list[int]) -> None:
    assert notified(among, ValueError("spoiled")) == ranks


def test_successful_and_already_started_calls_are_not_reported() -> None:
    assert notified(()) == []
    assert notified((), ValueError("spoiled"), withdraws=False) == []
    assert notified((), ValueError("spoiled"), to_move=False) == []


def test_a_failure_and_a_shutdown_have_their_own_messages() -> None:
    assert notified((), PeerLost("rank 1 was lost", (1,))) == []
    assert notified((), ValueError("spoiled"), ended=PeerLost("rank 1 was lost", (1,))) == []
