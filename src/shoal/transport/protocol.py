"""The version of the protocol, and the error that ends a connection.

This module does not import torch, because a handshake, a status query and the making of certificates need none.
"""

from __future__ import annotations

VERSION = 13
"""Raised whenever the bytes of ``wire.py`` change their meaning; agents of two versions refuse each other when they
connect."""


class ProtocolError(Exception):
    """The received bytes are no valid message."""
