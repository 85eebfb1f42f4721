"""The messages between agents, and their encoding.

A :class:`Message` is passed as an object between threads and as bytes between processes. Nothing in it is
executable and nothing is unpickled: fixed fields, a name, a shape, and raw numbers. :func:`decode` trusts no peer: an
impossible length, code or offset is a :class:`ProtocolError`, which ends the connection and not the process.
"""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache

import torch

from ..errors import ProtocolError


class Kind(IntEnum):
    """The purpose of a message."""

    DATA = 1  # a tensor of a round; its payload is inline, in shared memory, or follows in chunks
    CHUNK = 2  # part of the payload of an earlier DATA (network only)
    DONE = 3  # the receiver has read the payload named by the token and needs it no more
    REFUSE = 4  # the receiver does not accept the DATA named by the token, with the reason
    ASK = 5  # a probe for a message of a round, or for what its op names: ~alive, ~doing, ~deadlock or ~connect
    DENY = 6  # answers ASK: the message will not come, or (HERE) its stage is reached; else the reply to the probe
    NOTICE = 7  # an agent died or left; passed on from neighbour to neighbour
    SEGMENT = 8  # a piece of shared memory, its descriptor attached
    FORGET = 9  # a piece of shared memory that will not be referred to again
    WAITS = 10  # an answer to ASK: "I have not come so far, for I wait for the ranks in the shape"
    CONTROL = 11  # a piece of a control message: its body from ``offset`` on, of ``nbytes`` bytes in all


class Where(IntEnum):
    """The location of the payload of a DATA message."""

    NOWHERE = 0
    INLINE = 1
    SHARED = 2
    STREAM = 3
    CARRIED = 4  # a backend sends it, when all have agreed


DTYPES: tuple[torch.dtype, ...] = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
"""Of numbers that can be added up."""
MOVABLE: tuple[torch.dtype, ...] = (
    *DTYPES,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
"""Of tensors that can be sent: torch has no sums of the last ones. The order is part of the protocol."""
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(MOVABLE)}
with warnings.catch_warnings():
    # torch warns of the first complex32 tensor of a process. As an error it would end the thread that reads messages.
    warnings.simplefilter("ignore")
    torch.empty(0, dtype=torch.complex32, device="cpu")

WANTS_REPLY = 1
"""Flag of a DATA message: answer DONE, even if no memory has to be released."""
LOCKABLE = 4
"""Flag of a SEGMENT: the receiver will lock bytes of the file, and keeps its descriptor."""
DIED = 2
"""Flag of a NOTICE: the agent died (else it shut down). Of a REFUSE: because the agent ``digest`` is lost."""
SILENT = 16
"""Flag of a NOTICE: the agent has not answered for too long, and may still be alive."""
HERE = 32
"""Flag of an ASK: only whether its receiver has reached the stage, which uses no link. Of a DENY: it has reached it.
"""
AGAIN = 64
"""Flag of a DATA message: it is sent over a link instead of a backend, perhaps for the second time.
"""
CONFIRM = 128
"""Flag of a DATA message: answer it when it is known to have been expected; each of several tensors in it by its name.
"""
COMMON = 256
"""Flag of a DATA message: it is sender discovery, and for several fused operations the same for each of them."""
ON_DEVICE = 512
"""Flag of a DATA message: its sender's tensor is not on the CPU. Of a SEGMENT: memory of a device, ``nbytes`` of it."""
CERTAIN = 8
"""Flag of a NOTICE: its process has ended, or it reports so itself; else a connection has, perhaps by the network."""


@dataclass(slots=True)
class Payload:
    """The numbers of one message at the receiver: ``data`` is flat; its first ``available`` elements have arrived."""

    data: torch.Tensor
    available: int
    on_more: Callable[[], None] | None = None  # called when more of it is here

    @property
    def complete(self) -> bool:
        return self.available == self.data.numel()

    def mark_complete(self) -> None:
        """Mark all of it as arrived."""
        self.available = self.data.numel()


@dataclass(slots=True)
class Parts:
    """For a message with several tensors: how many are not acknowledged yet."""

    left: int


@dataclass(slots=True)
class Message:
    """One message on one directed edge. Its ``kind`` determines which fields are used."""

    kind: Kind
    op: str = ""
    name: str = ""
    round: int = 0
    stage: int = 0
    token: int = 0
    flags: int = 0
    digest: int = 0
    scale: float = 1.0
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = ()
    payload: Payload | None = None
    text: str = ""
    # Where the bytes are, for links between processes.
    where: Where = Where.NOWHERE
    segment: int = 0
    offset: int = 0
    nbytes: int = 0
    p: float = 0.0
    """The associated weight of a tensor for a window."""
    body: bytes | memoryview = field(default=b"", repr=False)
    tail: bytes = field(default=b"", repr=False)
    """The encoded variable part, once it has been encoded: the same for all destinations of one tensor."""
    part_of: Parts | None = None
    """Local: the fused message that contained this one, which is answered with the last of its parts."""

    @property
    def nothing(self) -> bool:
        """The message announces that no tensor is sent in this round: a header whose scale is NaN."""
        return self.scale != self.scale


# kind, where, dtype, ndim, flags, stage, length of op, of name, of body; digest, segment, round, token, offset, nbytes,
# scale, p.
_HEADER = struct.Struct("<BBBBHIHHIIIQQQQdd")
_LENGTH = struct.Struct("<I")
_PREFIXED = struct.Struct("<I" + _HEADER.format[1:])
MAX_DIMENSIONS = 64
MAX_NAME = 1 << 14
MAX_BODY = 1 << 20
PREFIX = _LENGTH.size
PACKET_BYTES = 1 << 16
"""Messages queued together share packets of up to this size."""
_LONG = 256
"""Texts of so many bytes are not cached: they occur once, as the names of fused operations."""


def encode(message: Message) -> bytes:
    """The message as one frame: its length (4 bytes), the fixed fields, shape, operation, name and body."""
    shape, name = message.shape, message.name
    about, n_op, n_name = (_known_about if len(name) < _LONG else _about)(shape, message.op, name)
    # One tail is sent to all destinations of a tensor. So nothing that differs between them may be in it: token,
    # offset, scale and p are in the head.
    tail = message.tail
    if not tail:
        tail = message.tail = about + (message.text.encode() if message.text else message.body)
    head = _PREFIXED.pack(
        _HEADER.size + len(tail),
        message.kind,
        message.where,
        _DTYPE_CODE[message.dtype],
        len(shape),
        message.flags,
        message.stage,
        n_op,
        n_name,
        len(tail) - len(about),
        message.digest,
        message.segment,
        message.round,
        message.token,
        message.offset,
        message.nbytes,
        message.scale,
        message.p,
    )
    return head + tail


def _about(shape: tuple[int, ...], op: str, name: str) -> tuple[bytes, int, int]:
    """Shape, operation and name as bytes, and how many the last two take."""
    op_bytes, name_bytes = op.encode(), name.encode()
    return b"".join((_dimensions(len(shape)).pack(*shape), op_bytes, name_bytes)), len(op_bytes), len(name_bytes)


_known_about = lru_cache(1024)(_about)


def frame_length(buffer: memoryview) -> int:
    """Bytes of the frame that starts here, without its 4-byte length prefix."""
    length: int = _LENGTH.unpack_from(buffer)[0]
    # The peer has chosen this number. Without the limit it could make the receiver wait for a frame of 4 GiB.
    if not _HEADER.size <= length <= _HEADER.size + 8 * MAX_DIMENSIONS + 2 * MAX_NAME + MAX_BODY:
        raise ProtocolError(f"a frame of {length} bytes")
    return length


def decode(frame: memoryview) -> Message:
    """The message in one frame (without the length prefix). An inline body is copied, so the buffer may be reused."""
    if len(frame) < _HEADER.size:
        raise ProtocolError(f"a frame of {len(frame)} bytes")
    kind, where, code, ndim, flags, stage, n_op, n_name, n_body, *rest = _HEADER.unpack_from(frame)
    digest, segment, round_, token, offset, nbytes, scale, p = rest
    at = _HEADER.size
    # Slices beyond the end of a frame would be short without an error, and a name or shape would be cut.
    if ndim > MAX_DIMENSIONS or n_name > MAX_NAME or at + 8 * ndim + n_op + n_name + n_body != len(frame):
        raise ProtocolError("the parts of a frame do not add up to its length")
    known_kind, known_where = _KINDS.get(kind), _WHERE.get(where)
    if known_kind is None or known_where is None or code >= len(MOVABLE):
        raise ProtocolError(f"kind {kind}, place {where} or dtype {code} is unknown")
    body = at + 8 * ndim + n_op + n_name
    # A copy: the result is a key of the cache, and the buffer of the frame is used again for the next packet.
    about = bytes(frame[at:body])
    shape, op, name = _known_head(about, ndim, n_op) if len(about) < _LONG else _head(about, ndim, n_op)
    dtype, text, payload, content = MOVABLE[code], "", None, b""
    if known_kind is Kind.DATA:
        if known_where is Where.NOWHERE:
            raise ProtocolError("a tensor that is nowhere")
        # Shape and size both come from the peer. If they differed, the receiver would read beyond the tensor's memory,
        # or leave a part unwritten.
        if nbytes != _extent(shape, dtype) or (known_where is Where.INLINE and n_body != nbytes):
            raise ProtocolError(f"{nbytes} bytes for a {dtype} tensor of shape {shape}")
        if known_where is Where.INLINE:
            # A copy: the tensor lives on after the receiver has read the next packet into this buffer.
            payload = inline_payload(dtype, bytearray(frame[body:]))
    # Only DATA is checked for its tensor above, so no other kind may bring one.
    elif known_where is not Where.NOWHERE:
        raise ProtocolError(f"a message of kind {kind} with a tensor")
    elif known_kind is Kind.CONTROL:
        # For the reason given above: the whole body may be a tensor of this shape.
        if nbytes != _extent(shape, dtype) or offset + n_body > nbytes:
            raise ProtocolError(f"{n_body} bytes from {offset} on of {nbytes}, {dtype} of shape {shape}")
        content = bytes(frame[body:])
    elif n_body:
        text = _read(bytes(frame[body:]))
    return Message(
        known_kind, op, name, round_, stage, token, flags, digest, scale, dtype, shape, payload, text, known_where,
        segment, offset, nbytes, p, content,
    )  # fmt: skip


def _head(raw: bytes, ndim: int, n_op: int) -> tuple[tuple[int, ...], str, str]:
    """Shape, operation and name."""
    op = 8 * ndim
    return _dimensions(ndim).unpack_from(raw), _read(raw[op : op + n_op]), _read(raw[op + n_op :])


_known_head = lru_cache(1024)(_head)


def _read(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a text cannot be read: {error}") from None


@lru_cache(MAX_DIMENSIONS + 1)
def _dimensions(ndim: int) -> struct.Struct:
    return struct.Struct(f"<{ndim}q")


@lru_cache(1024)
def _extent(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor, or -1 for an impossible shape."""
    # The product of two negative dimensions is positive, and would pass as a size.
    return math.prod(shape) * dtype.itemsize if min(shape, default=0) >= 0 else -1


def inline_payload(dtype: torch.dtype, body: bytearray) -> Payload:
    """A payload over bytes inside the message."""
    # torch.frombuffer refuses an empty buffer, and an empty tensor is a valid message.
    if not body:
        return Payload(torch.empty(0, dtype=dtype, device="cpu"), 0)
    data = torch.frombuffer(body, dtype=dtype)
    return Payload(data, data.numel())


def frames(packet: memoryview) -> list[memoryview]:
    """Split a packet, which holds whole frames, into its frames."""
    found, at, end = [], 0, len(packet)
    while at < end:
        if end - at < PREFIX:
            raise ProtocolError("a packet that ends inside a frame")
        length = frame_length(packet[at:])
        at += PREFIX
        # Before the slice, which would be short without an error. Packets hold whole frames, so this one was not made
        # by an agent.
        if end - at < length:
            raise ProtocolError("a packet that ends inside a frame")
        found.append(packet[at : at + length])
        at += length
    return found


_KINDS = {int(kind): kind for kind in Kind}
_WHERE = {int(where): where for where in Where}


def message_cost(message: Message) -> int:
    """Bytes of a message's tensor or body that are kept here."""
    return message.nbytes if message.where is Where.INLINE or message.where is Where.STREAM else len(message.body)
