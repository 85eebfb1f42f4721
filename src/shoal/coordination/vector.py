"""The vector that agents exchange in a round: a bit for each cached call, and flags.

Bits are combined by AND: the result is the calls requested by all. Flags are combined by OR: an agent has a new
request, an agent leaves, or two caches differ.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

_HEAD = struct.Struct("<8sBIII")
_ASKS = 1
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Vector:
    """The vector of an agent, or of several combined.

    Attributes:
        digest: The digest of the sender's cache.
        bits: The bits of :meth:`ResponseCache.vector`.
        asks: There are requests that are not cached.
        leaving: A bit for each rank that takes no part in later rounds.
        differs: 1 + a rank whose cache differs from that of the agent that noticed it; 0: none.
    """

    digest: bytes
    bits: int
    asks: bool = False
    leaving: int = 0
    differs: int = 0

    def and_of(self, other: Vector, rank: int) -> Vector:
        """Combined with the vector from ``rank``."""
        differs = self.differs or other.differs or (rank + 1 if other.digest != self.digest else 0)
        return Vector(
            self.digest, self.bits & other.bits, self.asks or other.asks, self.leaving | other.leaving, differs
        )

    def as_tensor(self) -> torch.Tensor:
        """The form that is sent: uint8."""
        bits, leaving = _bytes(self.bits), _bytes(self.leaving)
        head = _HEAD.pack(self.digest, _ASKS if self.asks else 0, self.differs, len(bits), len(leaving))
        return torch.frombuffer(bytearray(head + bits + leaving), dtype=torch.uint8)

    @staticmethod
    def of(data: torch.Tensor) -> Vector:
        """The vector, from the form that is sent.

        Raises:
            ValueError: The data is malformed.
        """
        raw = bytes(data.numpy())
        if not _HEAD.size <= len(raw) <= _MOST_BYTES:
            raise ValueError(f"{len(raw)} bytes")
        digest, flags, differs, n_bits, n_leaving = _HEAD.unpack_from(raw)
        if len(raw) != _HEAD.size + n_bits + n_leaving:
            raise ValueError(f"{len(raw)} bytes for vectors of {n_bits} and {n_leaving}")
        bits = int.from_bytes(raw[_HEAD.size : _HEAD.size + n_bits], "little")
        leaving = int.from_bytes(raw[_HEAD.size + n_bits :], "little")
        return Vector(digest, bits, bool(flags & _ASKS), leaving, differs)


def _bytes(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")
