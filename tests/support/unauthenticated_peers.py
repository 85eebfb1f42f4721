"""Connections that no agent makes: from outside the job, or with its secret and protocol errors."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.runtime.agent import current
from shoal.transport import acceptor
from shoal.transport.authentication import HELLO_SIZE, SEAL_SIZE, WELCOME_SIZE, ChecksumSeal, Connecting, Keys, MacSeal
from shoal.transport.messages import _PREFIXED, Kind, Message, Where, encode
from shoal.transport.network_link import _LENGTH
from support.agent_main import holdings
from support.packets import over_tcp

SILENCE_SECONDS = 0.3


@dataclass(frozen=True)
class ListenerAddress:
    """Where one agent listens, and what one must know to be admitted."""

    rank: int
    unix: str
    host: str
    port: int
    secret: bytes

    def connect(self) -> socket.socket:
        if self.port:
            return socket.create_connection((self.host, self.port), timeout=5.0)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(5.0)
        sock.connect("\0" + self.unix)
        return sock

    def enter(self, source: int, secret: bytes = b"", destination: int = -1) -> tuple[socket.socket, Keys]:
        """Connect and shake hands as rank ``source``. Raises :class:`ConnectionError` when refused."""
        sock = self.connect()
        try:
            greeting = Connecting(secret or self.secret, source, self.rank if destination < 0 else destination)
            sock.sendall(greeting.answer(sock.recv(HELLO_SIZE)))
            welcome = sock.recv(WELCOME_SIZE)
            if not welcome:
                raise ConnectionRefusedError("the agent closed the connection")
            greeting.check(welcome)
        except BaseException:
            sock.close()
            raise
        return sock, greeting.keys


def listener_address() -> ListenerAddress:
    """This agent's."""
    engine = current().engine
    endpoint = engine.router.endpoints[engine.rank]
    return ListenerAddress(engine.rank, endpoint.unix, endpoint.host, endpoint.port, engine.router._secret)


def rejected() -> int:
    """Unauthenticated that this agent has turned away."""
    return current().engine.router.acceptor.rejected


def count_of_descriptors() -> int:
    return len(holdings().descriptors)


def be_impatient() -> None:
    """Give strangers less time than ten seconds to say who they are."""
    setattr(acceptor, "GREETING_SECONDS", SILENCE_SECONDS)  # noqa: B010 - a name that the module does not export


def is_closed(sock: socket.socket, seconds: float = 5.0) -> bool:
    """Whether the other side ends the connection within that time; what it says before is ignored."""
    while select.select([sock], [], [], seconds)[0]:
        try:
            if not sock.recv(1 << 16):
                return True
        except ConnectionResetError:
            return True
    return False


def leave_with(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(data)


def header(**fields: float) -> bytes:
    """One frame of a DATA message without a body, with any of its fixed fields replaced by what cannot be."""
    values: dict[str, float] = {
        "length": _PREFIXED.size - 4, "kind": Kind.DATA, "where": Where.INLINE, "dtype": 8, "ndim": 0, "flags": 0,
        "stage": 0, "n_op": 0, "n_name": 0, "n_body": 0, "digest": 0, "segment": 0, "round": 0, "token": 1,
        "offset": 0, "nbytes": 0, "scale": 1.0, "p": 0.0,
    }  # fmt: skip
    values.update(fields)
    order = [values[name] for name in (
        "length", "kind", "where", "dtype", "ndim", "flags", "stage", "n_op", "n_name")]  # fmt: skip
    rest = [
        values[name] for name in ("n_body", "digest", "segment", "round", "token", "offset", "nbytes", "scale", "p")
    ]
    return _PREFIXED.pack(*order, *rest)


def _numbers(where: Where, nbytes: int, shape: tuple[int, ...], **fields: int) -> bytes:
    """A DATA message about float32 numbers, whose payload is somewhere else or nowhere."""
    message = Message(Kind.DATA, "neighbor_allreduce", "x", dtype=torch.float32, shape=shape, nbytes=nbytes, token=7)
    message.where = where
    for name, value in fields.items():
        setattr(message, name, value)
    return encode(message)


HUGE = 1 << 62
ASK = encode(Message(Kind.ASK, "neighbor_allreduce", "x", round=1))
NONSENSE: dict[str, bytes] = {
    "garbage": bytes(range(256)),
    "a frame of zero bytes": b"\0" * 4,
    "a frame of four gigabytes": b"\xff" * 4,
    "a frame too long by one": struct.pack("<I", _PREFIXED.size - 4 + 512 + 8192 + (1 << 20) + 1),
    "an unknown kind": header(kind=99),
    "an unknown place": header(where=77),
    "an unknown dtype": header(dtype=200),
    "too many dimensions": header(ndim=255),
    "parts longer than the frame": header(n_name=4000),
    "a body longer than the frame": header(n_body=4_000_000_000),
    "a name that is no text": header(length=_PREFIXED.size - 4 + 2, n_name=2, nbytes=4) + b"\xff\xfe",
    "fewer bytes than the shape": _numbers(Where.INLINE, 4, (5,)),
    "a negative dimension": _numbers(Where.INLINE, 16, (-2, -2)),
    "a shape beyond all memory": _numbers(Where.INLINE, HUGE * 4 % (1 << 64), (HUGE, HUGE)),
    "numbers that are nowhere": _numbers(Where.NOWHERE, 20, (5,)),
}
NONSENSE_OVER_TCP: dict[str, bytes] = {
    "a stream beyond all memory": _numbers(Where.STREAM, HUGE, (HUGE // 4,)),
    "a stream of nothing": _numbers(Where.STREAM, 0, (0,)),
    "a stream announced twice": 2 * _numbers(Where.STREAM, 40_000, (10_000,)),
    "a chunk of no stream": encode(Message(Kind.CHUNK, token=3, nbytes=100)),
    "a chunk longer than its stream": _numbers(Where.STREAM, 40_000, (10_000,))
    + encode(Message(Kind.CHUNK, token=7, nbytes=40_001)),
    "a stream of no tensor": encode(Message(Kind.DONE, where=Where.STREAM, dtype=torch.float32, nbytes=3)),
    "shared memory": _numbers(Where.SHARED, 20, (5,), segment=1),
    "a memory file": encode(Message(Kind.SEGMENT, segment=1)),
    "a chunk in the middle of a packet": _numbers(Where.STREAM, 40_000, (10_000,))
    + 2 * encode(Message(Kind.CHUNK, token=7, nbytes=100)),
}
"""Each a packet."""
NOISE: dict[str, Callable[[MacSeal], bytes]] = {
    "a packet without a seal": lambda seal: over_tcp(seal, b"")[: _LENGTH.size] + b"\0" * SEAL_SIZE,
    "a packet with a wrong seal": lambda seal: over_tcp(seal, ASK)[:-1] + b"?",
    "a packet out of turn": lambda seal: (over_tcp(seal, ASK), over_tcp(seal, ASK))[1],
    "a packet too long": lambda _: _LENGTH.pack(1 << 20, 1 << 20 ^ (1 << 32) - 1),
    "a length that is not said twice": lambda _: _LENGTH.pack(100, 100),
    "half a packet": lambda seal: over_tcp(seal, ASK)[:30],
}
"""Maps each sealed packet to a damaged one, as after an error on the path."""


def _memfd(size: int, seals: int) -> int:
    import fcntl

    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, 1033, seals)  # F_ADD_SEALS
    return fd


F_SEAL_SHRINK = 2
SEALED: Callable[[], int] = lambda: _memfd(4096, F_SEAL_SHRINK)  # noqa: E731
SEGMENT = encode(Message(Kind.SEGMENT, segment=1))
Packets = list[tuple[bytes, list[Callable[[], int]]]]
"""Each a packet and what makes the descriptors that travel with it."""
NONSENSE_OVER_UNIX: dict[str, Packets] = {
    "half a frame": [(_numbers(Where.INLINE, 0, (0,))[:30], [])],
    "a frame and a half": [(_numbers(Where.INLINE, 0, (0,)) + b"\0\0", [])],
    "a packet larger than any": [(bytes(80_000), [])],
    "memory without its descriptor": [(SEGMENT, [])],
    "memory that can shrink": [(SEGMENT, [lambda: _memfd(4096, 0)])],
    "memory of no bytes": [(SEGMENT, [lambda: _memfd(0, F_SEAL_SHRINK)])],
    "memory that is a directory": [(SEGMENT, [lambda: os.open("/", os.O_RDONLY)])],
    "more descriptors than are read": [(SEGMENT, [SEALED] * 40)],
    "memory never shared": [(_numbers(Where.SHARED, 20, (5,), segment=9), [])],
    "memory beyond its end": [(SEGMENT, [SEALED]), (_numbers(Where.SHARED, 20, (5,), segment=1, offset=4080), [])],
    "memory at an absurd offset": [
        (SEGMENT, [SEALED]),
        (_numbers(Where.SHARED, 20, (5,), segment=1, offset=1 << 63), []),
    ],
    "numbers across their alignment": [
        (SEGMENT, [SEALED]),
        (_numbers(Where.SHARED, 20, (5,), segment=1, offset=2), []),
    ],
    "part of a number in memory": [
        (SEGMENT, [SEALED]),
        (encode(Message(Kind.DONE, where=Where.SHARED, segment=1, dtype=torch.float32, nbytes=3)), []),
    ],
    "a stream": [(_numbers(Where.STREAM, 40_000, (10_000,)), [])],
}


def send_packets(sock: socket.socket, packets: Packets, sealed: bool = True) -> None:
    for data, makers in packets:
        descriptors = [make() for make in makers]
        try:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendmsg([ChecksumSeal().close(data) if sealed else data], ancillary)
        finally:
            for fd in descriptors:
                os.close(fd)
