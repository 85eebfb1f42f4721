"""The handshake between two agents on a new connection: same version, same job, both know the job's secret.

The accepting side sends a fresh nonce; the connecting side proves that it knows the secret without showing it, and then
the accepting side proves the same. A recording of one handshake opens no other connection. Both then share two keys
that no other agent and no other connection has, one for each direction. The keys authenticate later messages
(``message_auth.py``); they do not encrypt them. If a connection replaces a cut one, the accepting side also sends the
number of units that had arrived (``retransmit.py``).
A probe is answered with a number, and ends (``fault_tolerance/partition.py``).

A *reversed* connection carries messages from the accepting agent to the connecting one (``reverse_connections.py``).
Its keys have labels of their own, so that no message of a connection of one kind is valid on the other kind.
"""

from __future__ import annotations

import hmac
import struct
from typing import NamedTuple

from ... import clock
from ..protocol import VERSION, ProtocolError

MAGIC = b"SHOAL"
_HELLO = struct.Struct(f"<{len(MAGIC)}sH16s")
_ANSWER = struct.Struct("<IIIIB16s32s")
_WELCOME = struct.Struct("<Q32s")
HELLO_SIZE, ANSWER_SIZE, WELCOME_SIZE = _HELLO.size, _ANSWER.size, _WELCOME.size
REFUSED = bytes(WELCOME_SIZE)
"""Instead of a welcome, to an agent that failed to authenticate."""
SHUT_OUT = (1 << 64) - 1
"""Instead of a count in a welcome, to an agent that counts as lost, so that it does not regard the others as lost."""
REPLACED = (1 << 64) - 2
"""Instead of a count in a welcome: the expected process has ended, and a restarted agent has its port."""
MESSAGES, QUESTION, REVERSED = range(3)
"""The purposes of a connection: messages from the connecting agent, a probe, messages to it."""


class _Ends(NamedTuple):
    source: int
    incarnation: int  # how often that agent has been restarted
    destination: int
    expected: int  # the incarnation of the destination that the source means
    purpose: int


def _proof(secret: bytes, purpose: bytes, hello: bytes, nonce: bytes, ends: _Ends, had: int = 0) -> bytes:
    # All that either side acts on is in the proof: a field outside could be changed on the way. The label keeps a proof
    # from being sent back as the other side's.
    text = b"|".join((purpose, hello, nonce, struct.pack("<IIIIBQ", *ends, had)))
    return hmac.digest(secret, text, "sha256")


class Keys(NamedTuple):
    """The keys of one connection, one for each direction."""

    messages: bytes  # for the sender of messages: the connecting side, unless the connection is reversed
    goodbye: bytes  # by the other side

    @classmethod
    def of(cls, secret: bytes, hello: bytes, nonce: bytes, ends: _Ends) -> Keys:
        return cls(*(_proof(secret, purpose, hello, nonce, ends) for purpose in (b"messages", b"goodbye")))


class Accepting:
    """The side that listens. After :meth:`check` it has the ``keys``, the ``incarnation`` of the other agent, the
    incarnation that the other agent ``expected`` here, and the ``purpose`` of the connection.
    """

    keys: Keys
    incarnation: int
    expected: int
    purpose: int

    def __init__(self, secret: bytes, rank: int, size: int, incarnation: int = 0) -> None:
        self._secret, self._rank, self._size, self._own_incarnation = secret, rank, size, incarnation
        # A new nonce for each connection: an answer that was recorded on another one is not valid here.
        self.hello = _HELLO.pack(MAGIC, VERSION, clock.random_bytes(16))

    def check(self, answer: bytes) -> int:
        """The rank that connects.

        Raises :class:`ProtocolError` if it does not know the secret.
        """
        if len(answer) != ANSWER_SIZE:
            raise ProtocolError(f"an answer of {len(answer)} bytes")
        source, incarnation, destination, expected, purpose, nonce, proof = _ANSWER.unpack(answer)
        ends = _Ends(source, incarnation, destination, expected, purpose)
        # Before any field is used, as they are a stranger's until then. In constant time: an early exit would tell how
        # many bytes of a guess are right.
        if not hmac.compare_digest(proof, _proof(self._secret, b"connect", self.hello, nonce, ends)):
            raise ProtocolError("it does not know this job's secret")
        # An agent with the secret may still have an old address: its messages would be taken for another rank's.
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
        """The answer to an authenticated agent; ``had``: how many of its units had arrived over another connection, or
        the answer to a probe.
        """
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
        # Before the answer: another version's fields lie elsewhere, and its refusal could not be read.
        if version != VERSION:
            raise ProtocolError(f"it speaks protocol {version} and this agent {VERSION}: install one version of Shoal")
        # This side's own nonce: without it a recorded welcome would pass as proof of a process that does not know the
        # secret.
        self._hello, self._nonce = hello, (nonce := clock.random_bytes(16))
        proof = _proof(self._secret, b"connect", hello, nonce, self._ends)
        self.keys = Keys.of(self._secret, hello, nonce, self._ends)
        return _ANSWER.pack(*self._ends, nonce, proof)

    def check(self, welcome: bytes) -> int:
        """How many units of this agent had arrived over another connection, or the answer to a probe."""
        if welcome == REFUSED:
            raise ProtocolError(
                "it refuses this agent: the secret, the certificate or the data of the rendezvous is not its own job's"
            )
        had, proof = _WELCOME.unpack(welcome)
        expected = _proof(self._secret, b"accept", self._hello, self._nonce, self._ends, had)
        if not hmac.compare_digest(proof, expected):
            raise ProtocolError("it does not know this job's secret")
        return int(had)
