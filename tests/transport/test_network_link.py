"""One connection over a network, both of its ends in this thread: the order of sends, and detected errors."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
import torch

from shoal.transport.authentication import MESSAGES, Accepting, Connecting, CorruptMessage
from shoal.transport.link import NullReceiver, Published
from shoal.transport.messages import Kind, Message
from shoal.transport.network_link import CHUNK_BYTES, NetworkIncoming, NetworkLink
from shoal.transport.poller import Poller
from shoal.transport.retransmit import ConnectionCut
from shoal.transport.shared_regions import Arena, ResultPool


class Recorder(NullReceiver):
    """Notes the names of the messages that came, and of each chunk the name of its tensor's message."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def on_message(self, source: int, message: Message) -> None:
        self.names.append(message.name)

    def on_closed(self, peer: int, cause: str, final: bool = False, certain: bool = False) -> None:
        raise AssertionError(cause)

    def on_arrived(self, source: int, message: Message) -> None:
        self.names.append(f"{message.name}: a chunk")
        assert message.payload is not None
        self.tensors[message.name] = message.payload.data


class Connection:
    """From rank 1 to rank 0, after the handshake."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            remote, _ = listener.accept()
        ours.setblocking(False)
        self.poller, self.receiver, self.arena = Poller(), Recorder(), Arena()
        self.incoming = NetworkIncoming(remote, Accepting(b"key", 0, 2), self.poller, self.receiver, ResultPool())
        self.link = NetworkLink(ours, 1, Connecting(b"key", 1, 0, purpose=MESSAGES), self.poller, self.receiver)
        while not self.link.open:
            self.poll()

    def poll(self) -> None:
        due = self.poller.poll(5.0)
        assert due, "the connection is silent"
        for callback, events in due:
            callback(events)

    def post(self, name: str, token: int, tensor: torch.Tensor | None = None) -> None:
        message = Message(Kind.ASK if tensor is None else Kind.DATA, "average", name, token=token)
        if tensor is None:
            self.link.post(message)
            return
        message.nbytes, message.dtype, message.shape = tensor.nbytes, tensor.dtype, tuple(tensor.shape)
        region = self.arena.allocate(tensor.nbytes)
        self.link.post(message, Published(tensor, region), 0, tensor.numel())

    def until(self, count: int) -> list[str]:
        """The arrived messages and chunks, once the given number of them have arrived."""
        self.link.flush()
        while len(self.receiver.names) < count:
            self.poll()
        return self.receiver.names

    def close(self) -> None:
        self.link.close()
        self.incoming.close()
        self.poller.close()
        self.arena.close()


@pytest.fixture
def connection() -> Iterator[Connection]:
    made = Connection()
    yield made
    made.close()


def chunks(count: int) -> torch.Tensor:
    return torch.arange(count * CHUNK_BYTES // 4, dtype=torch.int32)


def test_large_tensors_are_sent_in_alternating_chunks(connection: Connection) -> None:
    tensors = {"a": chunks(3), "b": chunks(2) + 1, "c": chunks(1) + 2}
    for token, (name, tensor) in enumerate(tensors.items(), 1):
        connection.post(name, token, tensor)
    order = [*"abc", *(f"{name}: a chunk" for name in "abcaba")]
    assert connection.until(len(order)) == order
    assert all(torch.equal(connection.receiver.tensors[name], tensor) for name, tensor in tensors.items())


def test_messages_overtake_queued_chunks(connection: Connection) -> None:
    connection.post("large", 1, chunks(64))  # more than the system takes at once
    connection.link.flush()
    connection.post("small", 2)
    arrived = connection.until(66)
    assert arrived.index("small") < 64


def test_a_chunk_that_was_changed_on_the_way_is_begun_again(connection: Connection) -> None:
    """The next connection brings the whole chunk, and the receiver must have room for it."""
    incoming, data = connection.incoming, chunks(2)
    incoming._guard = incoming._guard._replace(check=lambda piece: "another checksum")
    connection.post("a", 1, data)
    connection.link.flush()
    with pytest.raises((ConnectionCut, CorruptMessage), match="modified in transit"):
        for _ in range(1000):
            with contextlib.suppress(BlockingIOError):
                incoming.read()
            connection.link.flush()
    (one,) = incoming._arriving.values()
    assert (one.at, one.rest) == (0, 0)
    assert connection.receiver.names == ["a"]
