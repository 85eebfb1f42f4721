"""What is known of the protocol without a message: its version, and the error that ends a connection.

Nothing here imports torch: a handshake needs none, and who only asks or makes certificates goes without.
"""

from __future__ import annotations

VERSION = 11
"""Raised whenever the bytes of ``wire.py`` change their meaning; agents of two versions refuse each other when they
connect."""


class ProtocolError(Exception):
    """The bytes that came are no message of ours."""
