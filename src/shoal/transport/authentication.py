"""Authentication of connections between two agents: the handshake, and the seals of the packets that follow it.

The handshake checks that both have the same version, belong to the same job, and know the job's secret. The accepting
side sends a fresh nonce; the connecting side proves that it knows the secret without showing it, and then the accepting
side proves the same. A recording of one handshake opens no other connection. Both then share two keys that no other
agent and no other connection has, one for each direction. If a connection replaces a cut one, the accepting side also
sends the number of units that had arrived (``retransmit.py``). A probe is answered with a number, and ends
(``fault_tolerance/partition.py``).

A *reversed* connection carries messages from the accepting agent to the connecting one (``reverse_connections.py``).
Its keys have labels of their own, so that no message of a connection of one kind is valid on the other kind.

Network packets are sealed with these keys, not encrypted: a keyed hash covers a counter and the bytes of a packet. So
an attacker without the job's secret cannot change, omit, insert, repeat or reflect packets. The bytes of large tensors
follow their packets, which contain the checksums of their chunks (``network_link.py``). Inside TLS no checksum is
needed. Between processes of one machine there is no attacker on the path: a CRC detects damaged bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import zlib
from typing import NamedTuple, Protocol

from .. import clock
from ..errors import ProtocolError

VERSION = 17
"""Raised whenever the bytes of ``messages.py`` change their meaning; agents of two versions refuse each other when they
connect."""
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
SEAL_SIZE = 16
_COUNT = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_LONG = 1 << 9
"""Packets of more bytes are hashed with SHA-256 first, for which processors have instructions."""


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

        Raises :class:`ProtocolError` if it does not have the secret.
        """
        if len(answer) != ANSWER_SIZE:
            raise ProtocolError(f"an answer of {len(answer)} bytes")
        source, incarnation, destination, expected, purpose, nonce, proof = _ANSWER.unpack(answer)
        ends = _Ends(source, incarnation, destination, expected, purpose)
        # Before any field is used, as they are a stranger's until then. In constant time: an early exit would tell how
        # many bytes of a guess are right.
        if not hmac.compare_digest(proof, _proof(self._secret, b"connect", self.hello, nonce, ends)):
            raise ProtocolError("it does not have this job's secret")
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
            raise ProtocolError("it does not have this job's secret")
        return int(had)


class CorruptMessage(ProtocolError):
    """The received data differs from the sent data. A retransmission may be correct."""


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
            raise CorruptMessage("its message was modified in transit, or was not sent by it")
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
            raise ProtocolError("its message was modified in transit")
        return packet
