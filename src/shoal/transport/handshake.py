"""How two agents make sure of each other when one connects: same version, same job, both know the job's secret.

The accepting side speaks first, with a fresh nonce; the connecting side proves that it knows the secret without showing
it, and then the accepting side proves the same. A recording of one handshake opens no other connection. Both then have
two keys that nobody else has and no other connection: one for what is said in each direction. They seal what follows,
see ``sealing``; they do not hide it.
"""

from __future__ import annotations

import hmac
import os
import struct
from typing import NamedTuple

from .wire import VERSION, ProtocolError

MAGIC = b"SHOAL"
_HELLO = struct.Struct(f"<{len(MAGIC)}sH16s")
_ANSWER = struct.Struct("<III16s32s")
HELLO_SIZE, ANSWER_SIZE, WELCOME_SIZE = _HELLO.size, _ANSWER.size, 32
REFUSED = bytes(WELCOME_SIZE)
"""Instead of a welcome, to who could not prove who he is."""


class _Ends(NamedTuple):
    source: int
    incarnation: int  # how often that agent has been started again
    destination: int


def _proof(secret: bytes, what: bytes, hello: bytes, nonce: bytes, ends: _Ends) -> bytes:
    text = b"|".join((what, hello, nonce, struct.pack("<III", *ends)))
    return hmac.digest(secret, text, "sha256")


class Keys(NamedTuple):
    """Of one connection, each for what is said in one direction."""

    messages: bytes  # by the side that has connected
    goodbye: bytes  # by the side that listens

    @classmethod
    def of(cls, secret: bytes, hello: bytes, nonce: bytes, ends: _Ends) -> Keys:
        return cls(*(_proof(secret, what, hello, nonce, ends) for what in (b"messages", b"goodbye")))


class Accepting:
    """The side that listens. ``keys`` are there once :meth:`check` has passed, and which ``incarnation`` of the other
    agent it is."""

    keys: Keys
    incarnation: int

    def __init__(self, secret: bytes, rank: int, size: int) -> None:
        self._secret, self._rank, self._size = secret, rank, size
        self.hello = _HELLO.pack(MAGIC, VERSION, os.urandom(16))

    def check(self, answer: bytes) -> tuple[int, bytes]:
        """The rank that connects, and the welcome to send it.

        Raises :class:`ProtocolError` for who does not know the secret."""
        if len(answer) != ANSWER_SIZE:
            raise ProtocolError(f"an answer of {len(answer)} bytes")
        source, incarnation, destination, nonce, proof = _ANSWER.unpack(answer)
        ends = _Ends(source, incarnation, destination)
        if not hmac.compare_digest(proof, _proof(self._secret, b"connect", self.hello, nonce, ends)):
            raise ProtocolError("it does not know this job's secret")
        if destination != self._rank or not 0 <= source < self._size or source == self._rank:
            raise ProtocolError(f"rank {source} looks for rank {destination}; this is rank {self._rank}")
        self.keys = Keys.of(self._secret, self.hello, nonce, ends)
        self.incarnation = incarnation
        return source, _proof(self._secret, b"accept", self.hello, nonce, ends)


class Connecting:
    """The side that connects. ``keys`` are there once :meth:`answer` has been given."""

    keys: Keys

    def __init__(self, secret: bytes, source: int, destination: int, incarnation: int = 0) -> None:
        self._secret, self._ends = secret, _Ends(source, incarnation, destination)
        self._expected = b""

    def answer(self, hello: bytes) -> bytes:
        if len(hello) != HELLO_SIZE:
            raise ProtocolError(f"a greeting of {len(hello)} bytes")
        magic, version, _ = _HELLO.unpack(hello)
        if magic != MAGIC:
            raise ProtocolError("it is no Shoal agent")
        if version != VERSION:
            raise ProtocolError(f"it speaks protocol {version} and this agent {VERSION}: install one version of Shoal")
        nonce = os.urandom(16)
        self._expected = _proof(self._secret, b"accept", hello, nonce, self._ends)
        proof = _proof(self._secret, b"connect", hello, nonce, self._ends)
        self.keys = Keys.of(self._secret, hello, nonce, self._ends)
        return _ANSWER.pack(*self._ends, nonce, proof)

    def check(self, welcome: bytes) -> None:
        if welcome == REFUSED:
            raise ProtocolError(
                "it refuses this agent: the secret, the certificate or what was said at the rendezvous is not its own "
                "job's"
            )
        if not hmac.compare_digest(welcome, self._expected):
            raise ProtocolError("it does not know this job's secret")
