"""Agents on different machines: TCP, with large tensors in chunks so that summing overlaps receiving.

Control messages and small tensors go first; the payloads of large ones follow chunk by chunk, in turn when there are
several, so that a large tensor never blocks another name. A chunk is received straight into its place in memory.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from dataclasses import dataclass

import torch

from .addresses import resolved
from .budgets import Budget
from .handshake import Accepting, Connecting
from .link import Published, Receiver
from .memory import ResultPool
from .poller import Poller
from .sockets import Incoming, Outgoing
from .wire import PREFIX, Kind, Message, Payload, ProtocolError, Where, decode, encode, frame_length

CHUNK_BYTES = 1 << 20
READ_BYTES = 1 << 16
TURN_BYTES = 1 << 20
"""How much is read from one connection before the others, and the sums, have their turn."""
WAKE_BYTES = 1 << 16
"""So much of a tensor comes before the reader is woken: at each packet it would take the core from who computes."""
DEAD_HOST_SECONDS = 20
MACHINE_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
SYN_COUNT = 3
"""How often a request to connect is repeated: it is given up after 15 s, or 19 on a kernel that begins more evenly."""
UNSENT_BYTES = 1 << 17
"""How much the system queues unsent: a small message waits behind no more than this of a large one."""


def listen(address: str) -> socket.socket:
    """Listen on one address, at a port that the system picks."""
    family, name = resolved(address, 0)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # for the one that is for agents (doors.py)
        sock.bind(name)
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def start_connecting(address: str, port: int) -> socket.socket:
    family, name = resolved(address, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    tune(sock)
    try:
        sock.connect(name)
    except BlockingIOError:
        pass
    except BaseException as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
            return sock  # no port of our own is free, as in a flood from here: the first reading says so
        sock.close()
        raise
    return sock


def tune(sock: socket.socket) -> None:
    """No delay for small messages; a host that vanished without a word is noticed after ``DEAD_HOST_SECONDS``.

    The side that only listens notices it, by probes that a living host answers whatever its processes do. There is no
    ``TCP_USER_TIMEOUT`` on the side that sends: it would also give up an agent that is stopped, or busy for so long,
    and that a deadline is there for.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_HOST_SECONDS // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_HOST_SECONDS // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, SYN_COUNT)


@dataclass(slots=True)
class _Stream:
    token: int
    rest: memoryview
    keep: Published


class NetworkLink(Outgoing):
    """To a process on another machine."""

    transport = "network"

    def __init__(
        self, sock: socket.socket, peer: int, greeting: Connecting, poller: Poller, receiver: Receiver
    ) -> None:
        super().__init__(sock, peer, greeting, poller, receiver)
        self._frames: list[bytes] = []
        self._streams: deque[_Stream] = deque()
        self._sending: deque[memoryview] = deque()

    def post(self, message: Message, published: Published | None = None, start: int = 0, stop: int = 0) -> None:
        if published is not None:
            if published.region is None:
                message.where = Where.INLINE
                if not message.tail:
                    message.body = published.copy(start, stop)
            elif stop > start:
                message.where = Where.STREAM
                self._streams.append(_Stream(message.token, published.bytes(start, stop), published))
            else:
                message.where = Where.INLINE
        self._frames.append(encode(message))

    def flush(self) -> None:
        if not self.open:
            return
        try:
            while self._fill():
                sent = self.sock.sendmsg(self._sending)
                while sent:
                    first = self._sending[0]
                    if sent < len(first):
                        self._sending[0] = first[sent:]
                        break
                    sent -= len(first)
                    self._sending.popleft()
        except BlockingIOError:
            self._want_write(True)
            return
        except OSError as error:
            self.fail(f"sending to it failed: {error}")
            return
        self._want_write(False)

    def _fill(self) -> bool:
        """Put the next bytes in line: messages first, then one chunk of the stream whose turn it is."""
        if self._sending:
            return True
        if self._frames:
            self._sending.append(memoryview(b"".join(self._frames)))
            self._frames.clear()
            return True
        if not self._streams:
            return False
        stream = self._streams.popleft()
        chunk, stream.rest = stream.rest[:CHUNK_BYTES], stream.rest[CHUNK_BYTES:]
        self._sending.append(memoryview(encode(Message(Kind.CHUNK, token=stream.token, nbytes=len(chunk)))))
        self._sending.append(chunk)
        if stream.rest:
            self._streams.append(stream)
        return True

    @property
    def idle(self) -> bool:
        return self.sock.fileno() < 0 or not (self._frames or self._streams or self._sending)

    def close(self) -> None:
        super().close()
        self._frames.clear()
        self._streams.clear()
        self._sending.clear()


def _bytes_of(data: torch.Tensor) -> memoryview:
    if not data.numel():
        return memoryview(b"")
    return memoryview(data.view(torch.uint8).numpy())  # type: ignore[arg-type]


class NetworkIncoming(Incoming):
    """From a process on another machine."""

    def __init__(
        self, sock: socket.socket, greeting: Accepting, poller: Poller, receiver: Receiver, pool: ResultPool
    ) -> None:
        tune(sock)
        super().__init__(sock, greeting, poller, receiver)
        self._pool = pool
        self._buffer = bytearray(READ_BYTES)
        self._view = memoryview(self._buffer)
        self._at = 0
        self._filled = 0
        self._payloads: dict[int, tuple[Payload, memoryview, int]] = {}
        self._announced = Budget("tensors that are announced and have not come")
        self._chunk: tuple[int, int] | None = None  # (token, bytes still to come)
        self._wakes_at = 1

    def read(self) -> None:
        try:
            self._read()
        finally:
            self._say_when_to_wake()

    def _say_when_to_wake(self) -> None:
        """In the middle of a chunk, not for less of it than ``WAKE_BYTES``, or its end; else for any byte."""
        wakes_at = 1 if self._chunk is None else min(self._chunk[1], WAKE_BYTES)
        if wakes_at != self._wakes_at and self.sock.fileno() >= 0:
            self._wakes_at = wakes_at
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes_at)

    def _read(self) -> None:
        turn = 0
        while turn < TURN_BYTES:
            if self._chunk is not None:
                turn += self._read_chunk(*self._chunk)
                continue
            nbytes = self.sock.recv_into(self._view[self._filled :])
            if not nbytes:
                raise ProtocolError("its end of the connection closed")
            turn += nbytes
            self._filled += nbytes
            self._parse()

    def _read_chunk(self, token: int, rest: int) -> int:
        payload, memory, at = self._payloads[token]
        nbytes = self.sock.recv_into(memory[at : at + rest])
        if not nbytes:
            raise ProtocolError("its end of the connection closed in the middle of a tensor")
        self._advance(token, payload, memory, at + nbytes, rest - nbytes)
        return nbytes

    def _advance(self, token: int, payload: Payload, memory: memoryview, at: int, rest: int) -> None:
        self._chunk = (token, rest) if rest else None
        payload.available = at // payload.data.element_size()
        if at == len(memory):
            del self._payloads[token]
            self._announced.give_back(len(memory))
        else:
            self._payloads[token] = (payload, memory, at)
        if not rest:
            self._receiver.on_arrived(payload)

    def _parse(self) -> None:
        """Take the whole messages out of the buffer; the start of a chunk's bytes may lie behind its header.

        What is taken is gone from the buffer before it is acted on: that may be interrupted.
        """
        while self._filled - self._at >= PREFIX and self._chunk is None:
            length = frame_length(self._view[self._at :])
            if length > READ_BYTES - PREFIX:
                raise ProtocolError(f"a message of {length} bytes")
            start = self._at + PREFIX
            if self._filled < start + length:
                break
            message = decode(self._view[start : start + length])
            self._at = start + length
            if message.kind is Kind.CHUNK:
                self._start_chunk(message)
            else:
                self._take(message)
        rest = self._filled - self._at
        if self._at:
            self._view[:rest] = bytes(self._view[self._at : self._filled])
        self._at, self._filled = 0, rest

    def _start_chunk(self, message: Message) -> None:
        stream = self._payloads.get(message.token)
        if stream is None or not 0 < message.nbytes <= len(stream[1]) - stream[2]:
            raise ProtocolError("a chunk of a tensor that was not announced")
        payload, memory, position = stream
        here = min(message.nbytes, self._filled - self._at)
        memory[position : position + here] = self._view[self._at : self._at + here]
        self._at += here
        self._advance(message.token, payload, memory, position + here, message.nbytes - here)

    def _take(self, message: Message) -> None:
        if message.kind in (Kind.SEGMENT, Kind.FORGET) or message.where is Where.SHARED:
            raise ProtocolError("shared memory across a network")
        if message.where is Where.STREAM:
            if not message.nbytes or message.token in self._payloads:
                raise ProtocolError("a tensor announced twice, or without bytes")
            if message.nbytes > MACHINE_BYTES:
                raise ProtocolError(f"a tensor of {message.nbytes:,} bytes, more than this machine has")
            self._announced.take(message.nbytes)
            data = self._pool.empty((message.nbytes // message.dtype.itemsize,), message.dtype)
            message.payload = Payload(data, 0)
            self._payloads[message.token] = (message.payload, _bytes_of(data), 0)
        self._receiver.on_message(self.peer, message)
