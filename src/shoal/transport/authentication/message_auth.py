"""Integrity and authentication of received data: complete, unchanged, in order, and from an authenticated sender.

Network packets are sealed with a key of the connection and the direction, which the handshake yields: a keyed hash
covers a counter and the bytes of a packet. So an attacker without the job's secret cannot change, omit, insert, repeat
or reflect packets. The bytes of large tensors follow their packets, which contain the checksums of their chunks:
SHA-256 if the secret was given to the agents. If rank 0 generated the secret, an attacker on the network can have read
it in the store, so fast checksums only detect accidents, at a tenth of the cost. Inside TLS no checksum is needed.
Between processes of one machine there is no attacker on the path: a CRC detects damaged bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import zlib
from collections.abc import Callable
from typing import Protocol

import numpy as np

from ..protocol import ProtocolError

SEAL_SIZE = 16
_COUNT = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_COLUMNS = 512
_LONG = 1 << 9
"""Packets of more bytes are hashed with SHA-256 first, for which processors have instructions."""


class CorruptMessage(ProtocolError):
    """The received data differs from the sent data. A retransmission may be correct."""


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
    """A :data:`Check` against deliberate changes."""
    return hashlib.sha256(chunk).hexdigest()


def unchecked(chunk: memoryview) -> str:
    """A :data:`Check` that detects nothing, for transports with their own integrity check."""
    return ""


class Seal(Protocol):
    """The seal of the packets in one direction of one connection."""

    size: int
    """Bytes that it adds to a packet, in front."""

    def close(self, packet: bytes) -> bytes:
        """The packet with its seal in front."""

    def open(self, sealed: memoryview) -> memoryview:
        """The packet, if its seal is valid. Raises :class:`ProtocolError`."""


class MacSeal:
    """A keyed hash over the number of earlier packets and the packet."""

    size = SEAL_SIZE

    def __init__(self, key: bytes) -> None:
        # Long packets have a name of their own: otherwise the hash of one, sent as a packet, would have its seal.
        self._keyed = hashlib.blake2b(key=key, digest_size=SEAL_SIZE)
        self._keyed_long = hashlib.blake2b(key=key, digest_size=SEAL_SIZE, person=b"long packet")
        self._count = 0

    def _next(self, packet: bytes | memoryview) -> bytes:
        is_long = len(packet) > _LONG
        digest = (self._keyed_long if is_long else self._keyed).copy()
        # The number of earlier packets: one that is repeated, left out or moved has a seal for another number.
        digest.update(_COUNT.pack(self._count))
        digest.update(hashlib.sha256(packet).digest() + _COUNT.pack(len(packet)) if is_long else packet)
        self._count += 1
        return digest.digest()

    def close(self, packet: bytes) -> bytes:
        return self._next(packet) + packet

    def open(self, sealed: memoryview) -> memoryview:
        packet = sealed[SEAL_SIZE:]
        # In constant time: an early exit would tell an attacker how many bytes of a guessed seal are right.
        if not hmac.compare_digest(self._next(packet), sealed[:SEAL_SIZE]):
            raise CorruptMessage("what it says was changed on the way, or is not its own")
        return packet


class ChecksumSeal:
    """A CRC over the packet."""

    size = _CRC.size

    def close(self, packet: bytes) -> bytes:
        return _CRC.pack(zlib.crc32(packet)) + packet

    def open(self, sealed: memoryview) -> memoryview:
        packet = sealed[_CRC.size :]
        # A packet shorter than its checksum would raise struct.error, which the reader does not take for a peer's
        # fault.
        if len(sealed) < _CRC.size or _CRC.unpack_from(sealed)[0] != zlib.crc32(packet):
            raise ProtocolError("what it says was changed on the way")
        return packet
