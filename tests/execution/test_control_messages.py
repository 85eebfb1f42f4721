"""Control messages: a body arrives as it was sent, also in pieces, and nonsense is the sender's error.

A service takes a message whose name begins with the service's prefix.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from shoal.errors import ProtocolError
from shoal.execution.control_messages import PIECE_BYTES, Service, Services, read_json
from shoal.execution.membership import Membership
from shoal.execution.sender import Sender
from shoal.transport.messages import MAX_NAME, PACKET_BYTES, PREFIX, Kind, Message, decode, encode
from support.recording_sender import recording_sender

WORD = "~test"


class Receiver(Service):
    """Joins the pieces of messages, and notes their content."""

    def __init__(self) -> None:
        self.services = Services()
        self.services.add(WORD, self)
        self.delivered: list[tuple[int, Any]] = []

    def serve(self, source: int, message: Message) -> None:
        assert len(message.body) == message.nbytes
        self.delivered.append((source, read_json(message, "a test", lambda content: content["x"])))


class Agent:
    """Rank 0 of four, and the messages that it sends."""

    def __init__(self) -> None:
        self.posted: list[tuple[int, Message]] = []
        self.sender: Sender = recording_sender(0, Membership(4), lambda *sent: self.posted.append(sent))

    def pieces(self, content: object, name: str = WORD) -> list[Message]:
        """The messages of one control message."""
        self.sender.send_control([1], name, content)
        return [message for _, message in self.posted]


def text(content: bytes) -> Message:
    return Message(Kind.CONTROL, WORD, WORD, nbytes=len(content), body=content)


def test_each_peer_receives_the_content() -> None:
    agent, receiver = Agent(), Receiver()
    agent.sender.send_control((rank for rank in (1, 2, 7)), WORD, {"x": [1, "a", None]})
    assert [(peer, message.op, message.name) for peer, message in agent.posted] == [(1, WORD, WORD), (2, WORD, WORD)]
    receiver.services.serve(3, agent.posted[0][1])
    assert receiver.delivered == [(3, [1, "a", None])]


def test_the_callers_messages_count_as_its_traffic_and_others_do_not() -> None:
    agent = Agent()
    agent.sender.send_control([1, 2], WORD, "of the background", background=True)
    assert agent.sender.bytes_sent == 0 and agent.sender.drained
    agent.sender.send_control([1, 2], WORD, "a" * 2 * PIECE_BYTES)
    assert agent.sender.bytes_sent == 2 * (2 * PIECE_BYTES + 2) and len(agent.posted) == 2 + 2 * 3


def test_a_long_message_is_sent_in_packets_and_arrives_whole_also_between_those_of_others() -> None:
    long = {"x": "abc" * PIECE_BYTES}
    name = f"{WORD} {'n' * (MAX_NAME - 100)}"
    frames = [encode(message) for message in Agent().pieces(long, name)]
    assert len(frames) == 4 and max(map(len, frames)) <= PACKET_BYTES
    receiver = Receiver()
    for frame in frames:
        assert not receiver.delivered
        for source in (3, 4):
            receiver.services.serve(source, decode(memoryview(frame)[PREFIX:]))
    assert receiver.delivered == [(3, long["x"]), (4, long["x"])]


def test_an_agent_that_is_started_again_begins_its_message_again() -> None:
    pieces = Agent().pieces({"x": "a" * 2 * PIECE_BYTES})
    receiver = Receiver()
    for piece in (*pieces[:2], *pieces):
        receiver.services.serve(3, piece)
    assert len(pieces) == 3 and len(receiver.delivered) == 1
    receiver.services.serve(3, pieces[0])
    receiver.services.on_departure(3, None)
    with pytest.raises(ProtocolError, match="follows 0 bytes"):
        receiver.services.serve(3, pieces[1])


def test_a_piece_that_does_not_continue_the_body_is_a_protocol_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Agent().pieces({"x": "a" * 2 * PIECE_BYTES})
    for *before, wrong in ([1], [0, 2], [0, 1, 1]):
        receiver = Receiver()
        for at in before:
            receiver.services.serve(3, pieces[at])
        with pytest.raises(ProtocolError, match="of a body of"):
            receiver.services.serve(3, pieces[wrong])
    monkeypatch.setattr("shoal.execution.control_messages.MOST_BYTES", 2 * PIECE_BYTES)
    with pytest.raises(ProtocolError, match="of a body of"):
        Receiver().services.serve(3, pieces[0])


def test_a_body_may_be_a_tensor_without_elements() -> None:
    agent, empty = Agent(), Message(Kind.CONTROL, WORD, WORD, 7, digest=2, dtype=torch.float32, shape=(0,))
    agent.sender.send_bytes([1], empty, b"")
    [message] = [decode(memoryview(encode(one))[PREFIX:]) for _, one in agent.posted]
    assert (message.round, message.digest, message.dtype, message.shape, message.body) == (
        7, 2, torch.float32, (0,), b"",
    )  # fmt: skip


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"y": 1}', b'{"x": 1}' + b" " * 92, b"\xff"])
def test_nonsense_is_a_protocol_error(content: bytes) -> None:
    with pytest.raises(ProtocolError, match="an invalid message about a test"):
        read_json(text(content), "a test", lambda content: content["x"], limit=99)


def test_a_message_for_no_service_here_is_dropped() -> None:
    receiver = Receiver()
    receiver.services.serve(3, Message(Kind.CONTROL, WORD, "~other", nbytes=9, body=json.dumps({"x": 1}).encode()))
    assert not receiver.delivered


class AcceptingService(Service):
    def serve(self, source: int, message: Message) -> None: ...


@pytest.mark.parametrize(
    ("name", "accepted"), [("~a", True), ("~a b c", True), ("~ab", False), ("~b", False), ("a", False), ("x ~a", False)]
)
def test_a_service_receives_the_messages_with_its_prefix(name: str, accepted: bool) -> None:
    services, service = Services(), AcceptingService()
    message = Message(Kind.DATA, "average", name)
    assert services.of(message) is None
    services.add("~a", service)
    assert services.of(message) is (service if accepted else None)
    assert services.get("~a") is service and services.all() == [service]
