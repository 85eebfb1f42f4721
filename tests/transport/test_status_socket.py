"""Answers of one process's agents to `shoal status`: as many as fit, refreshed now and then."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.transport import status_socket
from shoal.transport.status_socket import MOST_BYTES, PACKET_BYTES, StatusSocket


class Agent:
    """One that can be asked."""

    def __init__(self, rank: int, has_own_listener: bool = False, text: str = "") -> None:
        self.rank, self.has_private_listener, self.text = rank, has_own_listener, text
        self.times = 0

    def open_private_listener(self) -> None:
        self.has_private_listener = True

    def describe(self, within: float) -> dict[str, Any]:
        assert 0.0 <= within <= status_socket.BUSY_SECONDS
        self.times += 1
        return {"rank": self.rank, "text": self.text}


def answered(served: StatusSocket) -> dict[str, Any]:
    packets = served.answer()
    assert all(len(packet) == PACKET_BYTES for packet in packets[:-1]) and 0 < len(packets[-1]) <= PACKET_BYTES
    status: dict[str, Any] = json.loads(b"".join(packets))
    return status


def test_all_agents_are_listed_and_departed_ones_are_not() -> None:
    requested, agents = StatusSocket(), [Agent(rank) for rank in range(3)]
    for agent in agents:
        requested.join(agent)
    assert [one["rank"] for one in answered(requested)["agents"]] == [0, 1, 2]
    requested.leave(agents[1])
    requested.leave(agents[1])
    result = answered(requested)
    assert result["there"] == 2 and [one["rank"] for one in result["agents"]] == [0, 2]


def test_a_reply_is_cached_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    requested, agent = StatusSocket(), Agent(0)
    requested.join(agent)
    monkeypatch.setattr(status_socket, "KEEP_SECONDS", 1000.0)
    assert answered(requested) == answered(requested) and agent.times == 1
    monkeypatch.setattr(status_socket, "KEEP_SECONDS", -1.0)
    requested.join(Agent(1))
    assert answered(requested) == answered(requested) and agent.times == 3


def test_a_reply_of_limited_size_lists_the_first_agents() -> None:
    requested, size = StatusSocket(), 10_000
    for rank in range(20):
        requested.join(Agent(rank, text="x" * size))
    result = answered(requested)
    assert result["there"] == 20 and len(result["agents"]) == (MOST_BYTES - 100) // size
    assert len(b"".join(requested.answer())) <= MOST_BYTES


@pytest.mark.parametrize("leaves", [0, 1])
def test_one_agent_of_a_process_has_a_socket_for_all(leaves: int) -> None:
    requested, agents = StatusSocket(), [Agent(rank) for rank in range(3)]
    for agent in agents:
        requested.join(agent)
    assert [one.has_private_listener for one in agents] == [True, False, False]
    requested.leave(agents[leaves])
    left = [one for one in agents if one is not agents[leaves]]
    assert [one.has_private_listener for one in left] == [True, False]
