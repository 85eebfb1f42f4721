"""Agents on different machines: TCP, with large tensors in chunks so that summing overlaps receiving.

Control messages and small tensors go first; the payloads of large ones follow chunk by chunk, in turn when there are
several, so that a large tensor never blocks another name. A chunk is received straight into its place in memory.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from .addresses import resolved
from .budgets import Budget
from .handshake import Accepting, Connecting
from .link import Published, Receiver
from .memory import ResultPool
from .poller import Poller
from .sealing import Check, Keyed, sums
from .sockets import Incoming, Outgoing
from .tls import RECORD_BYTES, Certificates, Encrypted
from .wire import PACKET_BYTES, Kind, Message, Payload, ProtocolError, Where, decode, encode, frames

CHUNK_BYTES = 1 << 20
READ_BYTES = PACKET_BYTES + (1 << 10)
"""Room for one packet, its length and its seal."""
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
_LENGTH = struct.Struct("<II")
"""Of a packet, and once more with all bits turned, so that a wrong one is noticed before more is waited for."""
_ALL_BITS = (1 << 32) - 1


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


class Guard(NamedTuple):
    """What keeps others out of the connections of an agent, beside their seals."""

    certificates: Certificates | None  # there is TLS
    check: Check  # of each chunk of a tensor


OPEN = Guard(None, sums)


@dataclass(slots=True)
class _Stream:
    token: int
    rest: memoryview
    keep: Published


class NetworkLink(Outgoing):
    """To a process on another machine."""

    transport = "network"
    seal_of = Keyed

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        greeting: Connecting,
        poller: Poller,
        receiver: Receiver,
        guard: Guard = OPEN,
    ) -> None:
        super().__init__(sock, peer, greeting, poller, receiver)
        self._guard = guard
        self._tls: Encrypted | None = None
        self._streams: deque[_Stream] = deque()
        self._sending: deque[memoryview] = deque()

    def _place(self, message: Message, published: Published, start: int, stop: int) -> None:
        message.where = Where.INLINE
        if published.region is None:
            if not message.tail:
                message.body = published.copy(start, stop)
        elif stop > start:
            message.where = Where.STREAM
            self._streams.append(_Stream(message.token, published.bytes(start, stop), published))

    def begin_again(self, sock: socket.socket, greeting: Connecting) -> None:
        self._tls = None
        super().begin_again(sock, greeting)

    def _is_private(self) -> bool:
        if self._guard.certificates is None:
            return True
        if self._tls is None:
            self._tls = self._guard.certificates.connect(self.sock, self.peer)
            self.sock = cast(socket.socket, self._tls)  # it has the calls that are made here
        return self._tls.shake_hands()

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
        self._pack()
        if self._packets:
            self._sending.extend(self._sealed(self._packets.popleft()[0]) for _ in range(len(self._packets)))
            return True
        if not self._streams:
            return False
        stream = self._streams.popleft()
        chunk, stream.rest = stream.rest[:CHUNK_BYTES], stream.rest[CHUNK_BYTES:]
        header = Message(Kind.CHUNK, token=stream.token, nbytes=len(chunk), text=self._guard.check(chunk))
        self._sending.append(self._sealed(encode(header)))
        self._sending.append(chunk)
        if stream.rest:
            self._streams.append(stream)
        return True

    def _sealed(self, packet: bytes) -> memoryview:
        sealed = self._seal.close(packet)
        return memoryview(_LENGTH.pack(len(sealed), len(sealed) ^ _ALL_BITS) + sealed)

    @property
    def idle(self) -> bool:
        return self.sock.fileno() < 0 or not (self._frames or self._packets or self._streams or self._sending)

    def close(self) -> None:
        super().close()
        self._streams.clear()
        self._sending.clear()


@dataclass(slots=True)
class _Arriving:
    """A tensor that comes in chunks. Only what has been checked counts as come."""

    payload: Payload
    memory: memoryview
    at: int = 0
    begin: int = 0  # of the chunk that is coming
    rest: int = 0  # bytes of it that are still to come
    expected: str = ""  # what it must come to


def _bytes_of(data: torch.Tensor) -> memoryview:
    if not data.numel():
        return memoryview(b"")
    return memoryview(data.view(torch.uint8).numpy())  # type: ignore[arg-type]


class NetworkIncoming(Incoming):
    """From a process on another machine."""

    seal_of = Keyed

    def __init__(
        self,
        sock: socket.socket,
        greeting: Accepting,
        poller: Poller,
        receiver: Receiver,
        pool: ResultPool,
        guard: Guard = OPEN,
    ) -> None:
        tune(sock)
        super().__init__(sock, greeting, poller, receiver)
        self._guard = guard
        self._tls: Encrypted | None = None
        self._pool = pool
        self._buffer = bytearray(READ_BYTES)
        self._view = memoryview(self._buffer)
        self._at = 0
        self._filled = 0
        self._frames: deque[memoryview] = deque()  # of the packet that was opened last, not yet taken
        self._arriving: dict[int, _Arriving] = {}
        self._announced = Budget("tensors that are announced and have not come")
        self._chunk: _Arriving | None = None  # the one whose chunk follows
        self._wakes_at = 1

    def _is_private(self) -> bool:
        if self._guard.certificates is None:
            return True
        if self._tls is None:
            self._tls = self._guard.certificates.accept(self.sock)
            self.sock = cast(socket.socket, self._tls)  # it has the calls that are made here
        return self._tls.shake_hands()

    def _check_identity(self, peer: int) -> None:
        if self._tls is not None and not self._tls.is_of(peer):
            raise ProtocolError(f"it says that it is rank {peer}, and has not shown that rank's certificate")

    def read(self) -> None:
        try:
            self._read()
        finally:
            self._say_when_to_wake()

    def _say_when_to_wake(self) -> None:
        """In the middle of a chunk, not for less of it than ``WAKE_BYTES``, or its end; else for any byte."""
        wakes_at = 1 if self._chunk is None else min(self._chunk.rest, WAKE_BYTES)
        if self._tls is not None:
            wakes_at = max(1, wakes_at - RECORD_BYTES)  # so much of it may have come already, and wait for the rest
        if wakes_at != self._wakes_at and self.sock.fileno() >= 0:
            self._wakes_at = wakes_at
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes_at)

    def _read(self) -> None:
        turn = 0
        self._parse()
        while turn < TURN_BYTES or (self._tls is not None and self._tls.pending):
            if self._chunk is not None:
                turn += self._read_chunk(self._chunk)
                continue
            nbytes = self.sock.recv_into(self._view[self._filled :])
            if not nbytes:
                raise ProtocolError("its end of the connection closed")
            turn += nbytes
            self._filled += nbytes
            self._parse()

    def _read_chunk(self, one: _Arriving) -> int:
        nbytes = self.sock.recv_into(one.memory[one.at : one.at + one.rest])
        if not nbytes:
            raise ProtocolError("its end of the connection closed in the middle of a tensor")
        self._advance(one, nbytes)
        return nbytes

    def _advance(self, one: _Arriving, nbytes: int) -> None:
        one.at += nbytes
        one.rest -= nbytes
        if one.rest:
            return
        self._chunk = None
        if self._guard.check(one.memory[one.begin : one.at]) != one.expected:
            raise ProtocolError("a part of a tensor was changed on the way")
        one.payload.available = one.at // one.payload.data.element_size()
        self._receiver.on_arrived(one.payload)

    def _parse(self) -> None:
        """Take the whole packets out of the buffer; the start of a chunk's bytes may lie behind its header.

        What is taken is gone from the buffer before it is acted on: that may be interrupted.
        """
        while self._chunk is None:
            if self._frames:
                self._take(decode(self._frames.popleft()))
                continue
            if self._filled - self._at < _LENGTH.size:
                break
            length, inverse = _LENGTH.unpack_from(self._view, self._at)
            if length ^ inverse != _ALL_BITS or not self._seal.size < length <= READ_BYTES - _LENGTH.size:
                raise ProtocolError(f"a packet of {length} bytes")
            start = self._at + _LENGTH.size
            if self._filled < start + length:
                break
            packet = bytes(self._seal.open(self._view[start : start + length]))
            self._at = start + length
            self._frames.extend(frames(memoryview(packet)))
        rest = self._filled - self._at
        if self._at:
            self._view[:rest] = bytes(self._view[self._at : self._filled])
        self._at, self._filled = 0, rest

    def _take(self, message: Message) -> None:
        if message.kind is Kind.CHUNK:
            self._start_chunk(message)
            return
        if message.kind in (Kind.SEGMENT, Kind.FORGET) or message.where is Where.SHARED:
            raise ProtocolError("shared memory across a network")
        if message.where is Where.STREAM:
            if not message.nbytes or message.token in self._arriving:
                raise ProtocolError("a tensor announced twice, or without bytes")
            if message.nbytes > MACHINE_BYTES:
                raise ProtocolError(f"a tensor of {message.nbytes:,} bytes, more than this machine has")
            self._announced.take(message.nbytes)
            data = self._pool.empty((message.nbytes // message.dtype.itemsize,), message.dtype)
            message.payload = Payload(data, 0)
            self._arriving[message.token] = _Arriving(message.payload, _bytes_of(data))
        self._receiver.on_message(self.peer, message)

    def _start_chunk(self, message: Message) -> None:
        one = self._arriving.get(message.token)
        if self._frames or one is None or not 0 < message.nbytes <= len(one.memory) - one.at:
            raise ProtocolError("a chunk of a tensor that was not announced, or in the middle of a packet")
        one.begin, one.rest, one.expected = one.at, message.nbytes, message.text
        if one.at + one.rest == len(one.memory):
            del self._arriving[message.token]
            self._announced.give_back(len(one.memory))
        self._chunk = one
        here = min(one.rest, self._filled - self._at)
        one.memory[one.at : one.at + here] = self._view[self._at : self._at + here]
        self._at += here
        if here:
            self._advance(one, here)
