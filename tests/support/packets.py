"""Packets as they travel, for tests that speak to an agent without being one."""

from __future__ import annotations

from shoal.transport.authentication import MacSeal
from shoal.transport.network_link import _ALL_BITS, _LENGTH


def over_tcp(seal: MacSeal, packet: bytes) -> bytes:
    """A packet as it travels over a network."""
    sealed = seal.close(packet)
    return _LENGTH.pack(len(sealed), len(sealed) ^ _ALL_BITS) + sealed
