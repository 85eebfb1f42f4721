"""How an agent knows that what comes is what was sent: whole, unchanged, in order, and from who proved who he is.

What comes over a network is sealed with a key of that connection and that direction, which the handshake yields: a
count and the bytes of a packet go through a keyed hash, so nothing can be changed, left out, inserted, repeated or
turned around by who does not know the job's secret. The bytes of large tensors follow their packets, in which is what
their chunks must come to: a SHA-256 where the secret was given to the agents. Where rank 0 made it up, whoever is in
the middle can have read it in the store, so there sums find accidents, at a tenth of the price; and inside TLS there is
nothing left to find. Between processes of one machine nobody is in the middle: a CRC finds bytes that were spoiled.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import zlib
from collections.abc import Callable
from typing import Protocol

import numpy as np

from .protocol import ProtocolError

SEAL_SIZE = 16
_COUNT = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_COLUMNS = 512
_LONG = 1 << 9
"""Packets of more bytes go through SHA-256 first, which processors have instructions for."""


class CorruptMessage(ProtocolError):
    """What came is not what was sent. It may be, if it is sent once more."""


Check = Callable[[memoryview], str]
"""What the bytes of one chunk come to."""


def sums(chunk: memoryview) -> str:
    """A :data:`Check` against accidents, at the speed of memory: a CRC of the sums along the rows and along the columns
    of a table of 64-bit words. One flipped bit changes one of each, and what would change none has four corners."""
    words = np.frombuffer(chunk, np.uint64, len(chunk) // 8)
    table = words[: len(words) // _COLUMNS * _COLUMNS].reshape(-1, _COLUMNS)
    crc = zlib.crc32(table.sum(0))
    crc = zlib.crc32(table.sum(1), crc)
    return f"{zlib.crc32(chunk[table.nbytes :], crc):08x}"


def strong(chunk: memoryview) -> str:
    """A :data:`Check` against whoever means to change it."""
    return hashlib.sha256(chunk).hexdigest()


def unchecked(chunk: memoryview) -> str:
    """A :data:`Check` that finds nothing, inside what checks itself."""
    return ""


class Seal(Protocol):
    """Of the packets that go one way over one connection."""

    size: int
    """Bytes that it adds to a packet, in front."""

    def close(self, packet: bytes) -> bytes:
        """The packet behind its seal."""

    def open(self, sealed: memoryview) -> memoryview:
        """The packet, if it is what was closed. Raises :class:`ProtocolError`."""


class MacSeal:
    """A keyed hash over how many packets came before and the packet."""

    size = SEAL_SIZE

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=SEAL_SIZE)
        self._count = 0

    def _next(self, packet: bytes | memoryview) -> bytes:
        one = self._keyed.copy()
        one.update(_COUNT.pack(self._count))
        one.update(packet if len(packet) <= _LONG else hashlib.sha256(packet).digest() + _COUNT.pack(len(packet)))
        self._count += 1
        return one.digest()

    def close(self, packet: bytes) -> bytes:
        return self._next(packet) + packet

    def open(self, sealed: memoryview) -> memoryview:
        packet = sealed[SEAL_SIZE:]
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
        if len(sealed) < _CRC.size or _CRC.unpack_from(sealed)[0] != zlib.crc32(packet):
            raise ProtocolError("what it says was changed on the way")
        return packet
