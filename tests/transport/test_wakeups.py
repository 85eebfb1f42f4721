"""A reader is woken for a good part of a tensor, not for each packet; and for any byte where nothing large is due."""

from __future__ import annotations

import select
import socket
from types import SimpleNamespace
from typing import Any

import torch

from shoal.transport.authentication import MacSeal
from shoal.transport.link import Receiver
from shoal.transport.messages import Kind, Message, Where, encode
from shoal.transport.network_link import WAKE_BYTES, NetworkIncoming, sums
from shoal.transport.shared_regions import ResultPool
from support.packets import over_tcp

PATIENCE_SECONDS = 5.0
KEY = b"of this connection"


class RecordingReceiver:
    """Notes what comes."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.arrived: list[int] = []

    def on_message(self, source: int, message: Message) -> None:
        self.messages.append(message)

    def on_arrived(self, source: int, message: Message) -> None:
        assert message.payload is not None
        self.arrived.append(message.payload.available)


def connection() -> tuple[socket.socket, NetworkIncoming, RecordingReceiver]:
    ear: Any = RecordingReceiver()
    nothing: Any = SimpleNamespace(hello=b"", add=lambda *_: None, remove=lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    receiver: Receiver = ear
    incoming = NetworkIncoming(near, nothing, nothing, receiver, ResultPool())
    incoming.peer = 1
    incoming._seal = MacSeal(KEY)
    return far, incoming, ear


def is_readable(incoming: NetworkIncoming, seconds: float) -> bool:
    poll = select.poll()
    poll.register(incoming.sock, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def test_wakeups_come_for_a_large_enough_part_and_for_the_last_bytes() -> None:
    far, incoming, ear = connection()
    elements = WAKE_BYTES  # 4 WAKE_BYTES of float32
    tensor = torch.arange(elements, dtype=torch.float32)
    data = tensor.numpy().tobytes()
    message = Message(
        Kind.DATA, name="x", token=7, dtype=torch.float32, shape=(elements,), where=Where.STREAM, nbytes=len(data)
    )
    chunk = Message(Kind.CHUNK, token=7, nbytes=len(data), text=sums(memoryview(data)))
    sent, seal = 100, MacSeal(KEY)
    far.sendall(over_tcp(seal, encode(message)) + over_tcp(seal, encode(chunk)) + data[:sent])
    assert is_readable(incoming, PATIENCE_SECONDS)
    incoming.on_event()
    assert [message.name for message in ear.messages] == ["x"]
    # A little more of the tensor is not worth it; as much as that is.
    far.sendall(data[sent : sent + WAKE_BYTES // 2])
    assert not is_readable(incoming, 0.1)
    far.sendall(data[sent + WAKE_BYTES // 2 : len(data) - 10])
    payload = ear.messages[0].payload
    assert payload is not None
    while is_readable(incoming, 0.1):
        incoming.on_event()
    assert not payload.available  # what has come is not checked yet
    # Only the last bytes come; after them a message may have any length.
    far.sendall(data[-10:])
    assert is_readable(incoming, PATIENCE_SECONDS)
    incoming.on_event()
    assert payload.available == elements and torch.equal(payload.data, tensor)
    far.sendall(over_tcp(seal, encode(Message(Kind.DONE, token=9))))
    assert is_readable(incoming, PATIENCE_SECONDS)
    incoming.on_event()
    assert ear.messages[1].token == 9
    far.close()
    incoming.close()


def test_the_end_of_the_connection_wakes_all_pending_waits() -> None:
    far, incoming, _ = connection()
    nbytes = 4 * WAKE_BYTES
    message = Message(Kind.DATA, name="x", token=7, shape=(nbytes,), where=Where.STREAM, nbytes=nbytes)
    chunk = Message(Kind.CHUNK, token=7, nbytes=nbytes)
    seal = MacSeal(KEY)
    far.sendall(over_tcp(seal, encode(message)) + over_tcp(seal, encode(chunk)) + bytes(10))
    assert is_readable(incoming, PATIENCE_SECONDS)
    incoming.on_event()
    far.sendall(bytes(10))
    assert not is_readable(incoming, 0.1)
    far.close()
    assert is_readable(incoming, PATIENCE_SECONDS)
    incoming.close()
