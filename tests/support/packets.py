"""Packets as they travel, for tests that speak to an agent without being one."""

from __future__ import annotations

from shoal.transport.network import _ALL_BITS, _LENGTH
from shoal.transport.sealing import Keyed


def over_tcp(seal: Keyed, packet: bytes) -> bytes:
    """A packet as it travels over a network."""
    sealed = seal.close(packet)
    return _LENGTH.pack(len(sealed), len(sealed) ^ _ALL_BITS) + sealed
