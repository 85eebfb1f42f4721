"""Control messages: what is sent arrives as it was, is confirmed once, and nonsense is the sender's error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.operations.control_messages import ControlMessages
from shoal.transport.wire import Kind, Message, Payload, ProtocolError


class Agent:
    """An agent that notes what it posts and confirms."""

    def __init__(self) -> None:
        self.posted: list[tuple[int, Message, torch.Tensor, bool]] = []
        self.confirmed: list[int] = []
        self.control = ControlMessages(
            lambda peer, message, tensor, background=False: self.posted.append((peer, message, tensor, background)),
            lambda source, message: self.confirmed.append(source),
        )

    def receive(self, message: Message, **options: Any) -> list[Any]:
        taken: list[Any] = []
        self.control.receive(3, message, "a test", lambda content: content["x"], taken.append, **options)
        return taken


def text(content: bytes) -> Message:
    data = torch.tensor(list(content), dtype=torch.uint8)
    payload = Payload(data, len(data))
    return Message(Kind.DATA, "~test", "~test", dtype=torch.uint8, payload=payload)


def test_each_peer_receives_the_content() -> None:
    sender, receiver = Agent(), Agent()
    sender.control.send([1, 2], "~test", {"x": [1, "a", None]}, background=True)
    assert [(peer, message.op, message.name, background) for peer, message, _, background in sender.posted] == [
        (1, "~test", "~test", True),
        (2, "~test", "~test", True),
    ]
    assert receiver.receive(text(bytes(sender.posted[0][2].numpy()))) == [[1, "a", None]]
    assert receiver.confirmed == [3]


def test_a_message_is_parsed_once_it_has_arrived_completely() -> None:
    agent, message = Agent(), text(b'{"x": 1}')
    payload = message.payload
    assert payload is not None
    payload.available = 3
    taken = agent.receive(message)
    assert not taken and not agent.confirmed and payload.on_more is not None
    payload.is_complete()
    payload.on_more()
    assert taken == [1] and agent.confirmed == [3]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"y": 1}', b'{"x": 1}' + b" " * 92])
def test_an_invalid_message_is_a_protocol_error_and_not_confirmed(content: bytes) -> None:
    agent = Agent()
    with pytest.raises(ProtocolError, match="a message about a test makes no sense"):
        agent.receive(text(content), limit=99)
    assert not agent.confirmed


def test_a_message_without_text_is_a_protocol_error() -> None:
    agent = Agent()
    with pytest.raises(ProtocolError, match="without text"):
        agent.receive(Message(Kind.DATA, "~test", "~test", dtype=torch.float32, payload=Payload(torch.ones(1), 4)))
    with pytest.raises(ProtocolError, match="without content"):
        agent.receive(Message(Kind.DATA, "~test", "~test", dtype=torch.uint8))


def test_an_error_of_the_receiver_is_not_reported_as_the_senders() -> None:
    agent = Agent()

    def fail(value: object) -> None:
        raise ValueError("a defect here")

    with pytest.raises(ValueError, match="a defect here"):
        agent.control.receive(3, text(b'{"x": 1}'), "a test", lambda content: content, fail)
    assert agent.confirmed == [3]
