"""Links between machines: TCP, with large tensors in chunks so that summing overlaps receiving.

Control messages and small tensors go first. The payloads of large ones follow chunk by chunk, several in turn, so that
a large tensor never blocks another name. A chunk is received in place. After a cut the next connection continues after
the bytes that had arrived (``retransmit.py``).
"""

from __future__ import annotations

import errno
import hashlib
import socket
import struct
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import torch

from ..errors import ProtocolError
from .addresses import UNREACHABLE, expect_answers, tune
from .authentication import Accepting, Connecting, CorruptMessage, Keys, MacSeal
from .link import Published, Receiver
from .messages import PACKET_BYTES, Kind, Message, Payload, Where, decode, encode, frames
from .poller import Poller
from .quotas import MACHINE_BYTES, Quota
from .retransmit import ConnectionCut, ReceivedOffset, SendBuffer
from .shared_regions import ResultPool
from .sockets import ARRIVED, Established, Incoming, Outgoing
from .tls import RECORD_BYTES, Certificates, Encrypted

CHUNK_BYTES = 1 << 20
READ_BYTES = PACKET_BYTES + (1 << 10)
"""Room for one packet, its length and its seal."""
TURN_BYTES = 1 << 20
"""The bytes that are read from one connection before the others, and the sums, have their turn."""
WAKE_BYTES = 1 << 16
"""The bytes of a tensor that arrive before the reader is woken: waking at each packet would take a core from others."""
_LENGTH = struct.Struct("<II")
"""The length of a packet, and its complement, so that a wrong length is detected before the packet is awaited."""
_ALL_BITS = (1 << 32) - 1
_COLUMNS = 512
Check = Callable[[memoryview], str]
"""A checksum of one chunk."""


def sums(chunk: memoryview) -> str:
    """A :data:`Check` against accidents, at the speed of memory: a CRC of the sums along the rows and along the columns
    of a table of 64-bit words. One flipped bit changes one sum of each, and only errors at four corners of a rectangle
    can change none.
    """
    words = np.frombuffer(chunk, np.uint64, len(chunk) // 8)
    table = words[: len(words) // _COLUMNS * _COLUMNS].reshape(-1, _COLUMNS)
    crc = zlib.crc32(table.sum(0))
    crc = zlib.crc32(table.sum(1), crc)
    return f"{zlib.crc32(chunk[table.nbytes :], crc):08x}"


def strong(chunk: memoryview) -> str:
    """A :data:`Check` against deliberate changes, if the secret was given to the agents.

    A secret that rank 0 generated can have been read in the store: then :func:`sums`, at a tenth of the cost, do.
    """
    return hashlib.sha256(chunk).hexdigest()


def unchecked(chunk: memoryview) -> str:
    """A :data:`Check` that detects nothing, for transports with their own integrity check."""
    return ""


class Guard(NamedTuple):
    """Protects an agent's connections against strangers, in addition to message authentication."""

    certificates: Certificates | None  # there is TLS
    check: Check  # of each chunk of a tensor


OPEN = Guard(None, sums)


@dataclass(slots=True)
class _OutgoingTensor:
    token: int
    rest: memoryview
    start: int  # the offset in the published tensor
    keep: Published


class _Piece(NamedTuple):
    """A chunk of a tensor."""

    token: int
    data: memoryview
    start: int
    keep: Published


class NetworkLink(Outgoing):
    """A link to a process on another machine."""

    resumes = True
    seal_of = MacSeal

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
        self._streams: deque[_OutgoingTensor] = deque()
        self._sending: deque[memoryview] = deque()
        self._sent: SendBuffer[bytes | _Piece] = SendBuffer()

    def _place(self, message: Message, published: Published, start: int, stop: int) -> None:
        message.where = Where.INLINE
        if published.region is None:
            if not message.tail:
                message.body = published.copy(start, stop)
        elif stop > start:
            message.where = Where.STREAM
            at = start * published.data.element_size()
            self._streams.append(_OutgoingTensor(message.token, published.bytes(start, stop), at, published))

    def begin_again(self, sock: socket.socket, greeting: Connecting) -> None:
        self._tls = None
        # These bytes bear the seal of the connection before. Their units are in `_sent`, which sends them again.
        self._sending.clear()
        super().begin_again(sock, greeting)

    def take_over(self, sock: socket.socket, keys: Keys, tls: Encrypted | None = None) -> None:
        self._tls = tls
        self._sending.clear()
        super().take_over(sock, keys)

    def _is_passing(self, error: Exception) -> bool:
        code = error.errno if isinstance(error, OSError) else None
        refused = code == errno.ECONNREFUSED and self.may_be_refused(self.peer)
        return refused or code in UNREACHABLE or super()._is_passing(error)

    @property
    def is_connected(self) -> bool:
        """A connection exists or has existed, whether the peer is authenticated or not."""
        if self.has_been_open or self._tls is not None:
            return True
        try:
            self.sock.getpeername()
        except OSError:
            return False
        return True

    def _resend_after(self, had: int) -> None:
        self._sent.resend_after(had)

    def _on_arrived_count(self, count: int) -> None:
        self._sent.acknowledge(count)

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
                if not self._send_some():
                    self._want_write(True)
                    return
        except BlockingIOError:
            self._want_write(True)
            return
        except OSError as error:
            self._end(error, "sending to it failed: ")
            return
        self._want_write(False)

    def _send_some(self) -> bool:
        """Hand queued bytes to the system; False if the socket took only a part, so its buffer is full."""
        sent = self.sock.sendmsg(self._sending)
        while sent:
            first = self._sending[0]
            if sent < len(first):
                self._sending[0] = first[sent:]
                break
            sent -= len(first)
            self._sending.popleft()
        return self._tls is not None or not self._sending

    def _fill(self) -> bool:
        """Queue the next bytes: retransmissions, then messages, then a chunk of the stream whose turn it is."""
        if self._sending:
            return True
        again = self._sent.next_to_resend()
        if again is not None:
            # Before any new unit: both sides only count units, so a new one would be taken for the lost one.
            self._send(again)
            return True
        self._pack()
        if self._packets:
            for _ in range(len(self._packets)):
                self._send(self._packets.popleft()[0])
            return True
        if not self._streams:
            return False
        # One chunk, then the next stream: a large tensor must not delay the tensors behind it until its end.
        stream = self._streams.popleft()
        chunk, stream.rest = stream.rest[:CHUNK_BYTES], stream.rest[CHUNK_BYTES:]
        self._send(_Piece(stream.token, chunk, stream.start, stream.keep))
        stream.start += len(chunk)
        if stream.rest:
            self._streams.append(stream)
        return True

    def _send(self, unit: bytes | _Piece) -> None:
        """Queue a unit. Its memory must not change until the receiver has acknowledged it (``sender.py``), because it
        may have to be sent again.
        """
        self._sent.keep(unit)
        if isinstance(unit, bytes):
            self._sending.append(self._sealed(unit))
            return
        check = unit.keep.check_of(unit.start, unit.data, self._guard.check)
        header = Message(Kind.CHUNK, token=unit.token, nbytes=len(unit.data), text=check)
        # The header and its bytes follow each other without a packet between them; `_start_chunk` relies on it.
        self._sending.append(self._sealed(encode(header)))
        self._sending.append(unit.data)

    def _sealed(self, packet: bytes) -> memoryview:
        sealed = self._seal.close(packet)
        return memoryview(_LENGTH.pack(len(sealed), len(sealed) ^ _ALL_BITS) + sealed)

    @property
    def idle(self) -> bool:
        waits = self._frames or self._packets or self._streams or self._sending or not self._sent.idle
        return self.sock.fileno() < 0 or not waits

    def close(self) -> None:
        super().close()
        self._streams.clear()
        self._sending.clear()
        self._sent.clear()


@dataclass(slots=True)
class _Arriving:
    """A tensor that arrives in chunks. Only verified bytes count as arrived."""

    message: Message
    payload: Payload
    memory: memoryview
    at: int = 0
    begin: int = 0  # of the chunk that is coming
    rest: int = 0  # its bytes that have not arrived
    expected: str = ""  # the expected checksum


def _bytes_of(data: torch.Tensor) -> memoryview:
    if not data.numel():
        return memoryview(b"")
    return memoryview(data.view(torch.uint8).numpy())  # type: ignore[arg-type]


class NetworkIncoming(Incoming):
    """A connection from a process on another machine."""

    seal_of = MacSeal
    resumes = True

    def __init__(
        self,
        sock: socket.socket,
        greeting: Accepting | Established,
        poller: Poller,
        receiver: Receiver,
        pool: ResultPool,
        guard: Guard = OPEN,
    ) -> None:
        tune(sock)
        expect_answers(sock, True)
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
        self._announced = Quota("tensors that are announced and have not come")
        self._nbytes, self._alone = 0, True  # of that packet, and whether it is a single frame
        self._received_offset = ReceivedOffset()
        self._chunk: _Arriving | None = None  # the tensor whose chunk follows
        self._wakes_at = 1

    @classmethod
    def over(
        cls, link: NetworkLink, incarnation: int, poller: Poller, receiver: Receiver, pool: ResultPool
    ) -> NetworkIncoming:
        """Receive from a peer over a reverse connection, which this agent has opened as ``link``."""
        sock, link.sock = link.sock, detached(link.sock, poller)
        met = Established(link._greeting.keys, link.peer, incarnation)
        incoming = cls(sock, met, poller, receiver, pool, link._guard)
        incoming._tls, incoming.is_reversed = link._tls, True
        return incoming

    def give_to(self, link: NetworkLink, keys: Keys, welcome: bytes) -> None:
        """Hand the socket over to a link, which sends over this reverse connection."""
        sock, self.sock = self.sock, detached(self.sock, self._poller)
        expect_answers(sock, False)
        link.take_over(sock, keys, self._tls)
        sock.send(welcome)

    def send_arrived_count(self) -> None:
        """End the handshake of a reverse connection: how many units had arrived over the previous one."""
        self._send_control(ARRIVED, self._received_offset.report())

    @property
    def had(self) -> int:
        return self._received_offset.count

    def continue_from(self, before: NetworkIncoming) -> None:
        """Replace a connection that was cut, in whatever state it was."""
        before.close()
        self._receiver = before._receiver
        self._frames, self._received_offset = before._frames, before._received_offset
        self._arriving, self._announced = before._arriving, before._announced
        if before._chunk is not None:
            # A chunk is one unit, which did not count: it is sent again as a whole. Keeping its first bytes would place
            # the whole chunk behind them.
            before._chunk.at, before._chunk.rest = before._chunk.begin, 0

    def _is_private(self) -> bool:
        if self._guard.certificates is None:
            return True
        if self._tls is None:
            self._tls = self._guard.certificates.accept(self.sock)
            self.sock = cast(socket.socket, self._tls)  # it has the calls that are made here
        return self._tls.shake_hands()

    def _check_identity(self, peer: int) -> None:
        if self._tls is not None and not self._tls.is_of(peer):
            raise ProtocolError(f"it claims to be rank {peer}, without that rank's certificate")

    def read(self) -> None:
        try:
            self._read()
        except CorruptMessage as error:
            # As after a cut: the unit did not count, so the next connection brings it again. A device on the path that
            # changes each copy must not make this repeat forever.
            if self._received_offset.add_corrupt():
                raise
            raise ConnectionCut(str(error)) from None
        finally:
            self._set_receive_low_water()

    def _set_receive_low_water(self) -> None:
        """Within a chunk, wake for no less than ``WAKE_BYTES`` or its end; else for any byte."""
        wakes_at = 1 if self._chunk is None else min(self._chunk.rest, WAKE_BYTES)
        if self._tls is not None:
            wakes_at = max(
                1, wakes_at - RECORD_BYTES
            )  # so much of a record may have arrived already, and wait for its rest
        if wakes_at != self._wakes_at and self.sock.fileno() >= 0:
            self._wakes_at = wakes_at
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes_at)

    def _read(self) -> None:
        turn = 0
        self._parse()
        while turn < TURN_BYTES or (self._tls is not None and self._tls.pending):
            chunk = self._chunk
            room = self._view[self._filled :] if chunk is None else chunk.memory[chunk.at : chunk.at + chunk.rest]
            nbytes = self.sock.recv_into(room)
            if not nbytes:
                raise ConnectionCut(
                    "its end of the connection closed" + (" in the middle of a tensor" if chunk else "")
                )
            turn += nbytes
            if chunk is None:
                self._filled += nbytes
                self._parse()
            else:
                self._advance(chunk, nbytes)
            if nbytes < len(room) and self._tls is None:  # that was all; later data is a new event
                return

    def _advance(self, tensor: _Arriving, nbytes: int) -> None:
        tensor.at += nbytes
        tensor.rest -= nbytes
        if tensor.rest:
            return
        self._chunk = None
        # Before `available` moves: an operation may add the new bytes to its sum at once, and cannot subtract them.
        if self._guard.check(tensor.memory[tensor.begin : tensor.at]) != tensor.expected:
            tensor.at = tensor.begin  # the next connection brings the whole chunk again
            raise CorruptMessage("a part of a tensor was modified in transit")
        if tensor.at == len(tensor.memory):
            del self._arriving[tensor.message.token]
            self._announced.release(len(tensor.memory))
        tensor.payload.available = tensor.at // tensor.payload.data.element_size()
        self._receiver.on_arrived(self.peer, tensor.message)
        self._count_unit(tensor.at - tensor.begin)

    def _count_unit(self, nbytes: int) -> None:
        """Count a unit; now and then acknowledge to the sender, which keeps it until then."""
        if self._received_offset.one_more(nbytes):
            self._send_control(ARRIVED, self._received_offset.report())

    def _parse(self) -> None:
        """Take whole packets out of the buffer; the first bytes of a chunk may follow its header.

        A packet is removed from the buffer before it is handled, because handling may be interrupted.
        """
        while self._chunk is None:
            if self._frames:
                message = decode(self._frames.popleft())
                self._take(message)
                if not self._frames and message.kind is not Kind.CHUNK:  # which counts once its bytes are here
                    self._count_unit(self._nbytes)
                continue
            if self._filled - self._at < _LENGTH.size:
                break
            length, inverse = _LENGTH.unpack_from(self._view, self._at)
            # After a wrong length this side would wait for bytes that never come, and never reach the seal.
            if length ^ inverse != _ALL_BITS or not self._seal.size < length <= READ_BYTES - _LENGTH.size:
                raise CorruptMessage(f"a packet of {length} bytes")
            start = self._at + _LENGTH.size
            if self._filled < start + length:
                break
            packet = bytes(self._seal.open(self._view[start : start + length]))
            self._at, self._nbytes = start + length, length
            self._frames.extend(frames(memoryview(packet)))
            self._alone = len(self._frames) == 1
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
            # Before the memory is allocated: a peer may announce any number of tensors and send none of them.
            self._announced.acquire(message.nbytes)
            data = self._pool.empty((message.nbytes // message.dtype.itemsize,), message.dtype)
            message.payload = Payload(data, 0)
            self._arriving[message.token] = _Arriving(message, message.payload, _bytes_of(data))
        self._receiver.on_message(self.peer, message)

    def _start_chunk(self, message: Message) -> None:
        tensor = self._arriving.get(message.token)
        if not self._alone or tensor is None or not 0 < message.nbytes <= len(tensor.memory) - tensor.at:
            raise ProtocolError("a chunk of a tensor that was not announced, or not in a packet of its own")
        tensor.begin, tensor.rest, tensor.expected = tensor.at, message.nbytes, message.text
        self._chunk = tensor
        here = min(tensor.rest, self._filled - self._at)
        tensor.memory[tensor.at : tensor.at + here] = self._view[self._at : self._at + here]
        self._at += here
        if here:
            self._advance(tensor, here)


def continues(connection: Incoming, before: Incoming) -> bool:
    """Whether a connection replaces a cut one; this side may detect the cut late."""
    if not isinstance(connection, NetworkIncoming) or not isinstance(before, NetworkIncoming):
        return False
    connection.continue_from(before)
    return True


def detached(sock: socket.socket, poller: Poller) -> socket.socket:
    """A closed socket that replaces a socket whose connection another object takes over."""
    poller.remove(sock.fileno())
    closed = socket.socket()
    closed.close()
    return closed
