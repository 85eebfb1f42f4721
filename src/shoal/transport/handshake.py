"""How two agents make sure of each other when one connects: same version, same job, both know the job's secret.

The accepting side speaks first, with a fresh nonce; the connecting side proves that it knows the secret without showing
it, and then the accepting side proves the same. A recording of one handshake opens no other connection. Both then have
two keys that nobody else has and no other connection: one for what is said in each direction. They seal what follows,
see ``sealing``; they do not hide it. Where a connection takes the place of one that was cut, the accepting side also
says how much has come before (``resuming``). One that only asks is answered with a number, and ends (``asking``).

A *reversed* connection carries messages from the accepting agent to the connecting one (``reversing``). Its keys have
labels of their own, so that no message of a connection of one kind passes on one of the other kind.
"""

from __future__ import annotations

import hmac
import struct
from typing import NamedTuple

from .. import clock
from .protocol import VERSION, ProtocolError

MAGIC = b"SHOAL"
_HELLO = struct.Struct(f"<{len(MAGIC)}sH16s")
_ANSWER = struct.Struct("<IIIIB16s32s")
_WELCOME = struct.Struct("<Q32s")
HELLO_SIZE, ANSWER_SIZE, WELCOME_SIZE = _HELLO.size, _ANSWER.size, _WELCOME.size
REFUSED = bytes(WELCOME_SIZE)
"""Instead of a welcome, to who could not prove who he is."""
SHUT_OUT = (1 << 64) - 1
"""Instead of a count in a welcome, to an agent that counts as lost: it must not think that it is the others who are."""
REPLACED = (1 << 64) - 2
"""Instead of a count in a welcome: the process that was looked for has ended, and a restarted agent has its port."""
MESSAGES, QUESTION, REVERSED = range(3)
"""The purposes of a connection: messages from the connecting agent, a question (``asking``), messages to it."""


class _Ends(NamedTuple):
    source: int
    incarnation: int  # how often that agent has been started again
    destination: int
    expected: int  # the incarnation of the destination that the source means
    purpose: int


def _proof(secret: bytes, what: bytes, hello: bytes, nonce: bytes, ends: _Ends, had: int = 0) -> bytes:
    text = b"|".join((what, hello, nonce, struct.pack("<IIIIBQ", *ends, had)))
    return hmac.digest(secret, text, "sha256")


class Keys(NamedTuple):
    """Of one connection, each for what is said in one direction."""

    messages: bytes  # by the side that sends messages: the one that has connected, unless the connection is reversed
    goodbye: bytes  # by the other side

    @classmethod
    def of(cls, secret: bytes, hello: bytes, nonce: bytes, ends: _Ends) -> Keys:
        return cls(*(_proof(secret, what, hello, nonce, ends) for what in (b"messages", b"goodbye")))


class Accepting:
    """The side that listens. Once :meth:`check` has passed: ``keys``, the ``incarnation`` of the other agent, the one
    that it ``expected`` here, and the ``purpose`` of the connection."""

    keys: Keys
    incarnation: int
    expected: int
    purpose: int

    def __init__(self, secret: bytes, rank: int, size: int, incarnation: int = 0) -> None:
        self._secret, self._rank, self._size, self._own_incarnation = secret, rank, size, incarnation
        self.hello = _HELLO.pack(MAGIC, VERSION, clock.random_bytes(16))

    def check(self, answer: bytes) -> int:
        """The rank that connects.

        Raises :class:`ProtocolError` for who does not know the secret."""
        if len(answer) != ANSWER_SIZE:
            raise ProtocolError(f"an answer of {len(answer)} bytes")
        source, incarnation, destination, expected, purpose, nonce, proof = _ANSWER.unpack(answer)
        ends = _Ends(source, incarnation, destination, expected, purpose)
        if not hmac.compare_digest(proof, _proof(self._secret, b"connect", self.hello, nonce, ends)):
            raise ProtocolError("it does not know this job's secret")
        if destination != self._rank or not 0 <= source < self._size or source == self._rank:
            raise ProtocolError(f"rank {source} looks for rank {destination}; this is rank {self._rank}")
        if purpose > REVERSED:
            raise ProtocolError(f"a connection of purpose {purpose}")
        self.keys = Keys.of(self._secret, self.hello, nonce, ends)
        self.incarnation, self.expected, self.purpose = incarnation, expected, purpose
        self._nonce, self._ends = nonce, ends
        return int(source)

    @property
    def is_for_another_process(self) -> bool:
        """The agent that connects means a process of this rank that has ended, or has not come."""
        return self.expected != self._own_incarnation

    def welcome(self, had: int = 0) -> bytes:
        """What to say to who has passed; ``had``: how many units of what it sends had come over another connection,
        or the answer to who only asks."""
        return _WELCOME.pack(had, _proof(self._secret, b"accept", self.hello, self._nonce, self._ends, had))


class Connecting:
    """The side that connects. ``keys`` are there once :meth:`answer` has been given."""

    keys: Keys

    def __init__(
        self,
        secret: bytes,
        source: int,
        destination: int,
        incarnation: int = 0,
        expected: int = 0,
        purpose: int = MESSAGES,
    ) -> None:
        self._secret, self._ends = secret, _Ends(source, incarnation, destination, expected, purpose)
        self.purpose = purpose

    def answer(self, hello: bytes) -> bytes:
        if len(hello) != HELLO_SIZE:
            raise ProtocolError(f"a greeting of {len(hello)} bytes")
        magic, version, _ = _HELLO.unpack(hello)
        if magic != MAGIC:
            raise ProtocolError("it is no Shoal agent")
        if version != VERSION:
            raise ProtocolError(f"it speaks protocol {version} and this agent {VERSION}: install one version of Shoal")
        self._hello, self._nonce = hello, (nonce := clock.random_bytes(16))
        proof = _proof(self._secret, b"connect", hello, nonce, self._ends)
        self.keys = Keys.of(self._secret, hello, nonce, self._ends)
        return _ANSWER.pack(*self._ends, nonce, proof)

    def check(self, welcome: bytes) -> int:
        """How many units of what was sent had come over another connection, or the answer."""
        if welcome == REFUSED:
            raise ProtocolError(
                "it refuses this agent: the secret, the certificate or what was said at the rendezvous is not its own "
                "job's"
            )
        had, proof = _WELCOME.unpack(welcome)
        expected = _proof(self._secret, b"accept", self._hello, self._nonce, self._ends, had)
        if not hmac.compare_digest(proof, expected):
            raise ProtocolError("it does not know this job's secret")
        return int(had)
