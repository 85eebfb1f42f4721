"""The base class of compressors, the simplest ones, those around another one, and the functions of all messages.

A compressor is a map from a vector to the vector that its receivers reconstruct. It works along the last dimension, so
that each row of a stacked fleet is compressed separately, exactly as by a real agent.

``compressor(x, draws)`` is ``decode(encode(x, draws))``, bit for bit. Both use the same functions to choose the code of
a number, and to restore a number from its code. They differ only in the bytes between these.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ..topology._validate import check_count
from .random_numbers import Draws, DrawStream

BLOCK = 1 << 17
"""Numbers that are encoded or decoded at a time: a multiple of 8, and few enough that they stay in the cache."""
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALF = (torch.float16, torch.bfloat16)


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"numbers in {dtype}: messages are made of {', '.join(str(one) for one in DTYPES)}")


def check_message(data: torch.Tensor, nbytes: int, description: str) -> None:
    """Raise ValueError if these are not the bytes of ``description``, which has ``nbytes``."""
    if data.dtype != torch.uint8:
        raise ValueError(f"a message in {data.dtype}, not in bytes (torch.uint8): it should be {description}")
    if not data.dim() or data.shape[-1] != nbytes:
        raise ValueError(f"a message of shape {list(data.shape)}, not of {nbytes} bytes: it should be {description}")


def rows(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The rows ``[d]`` of ``[..., d]``, as views."""
    return (x[index] for index in np.ndindex(*x.shape[:-1]))


def blocks(d: int, size: int = BLOCK) -> Iterator[slice]:
    return (slice(start, min(start + size, d)) for start in range(0, d, size))


def as_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """uint8, one after the other."""
    return numbers.contiguous().view(-1).view(torch.uint8)


def as_numbers(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[n]`` from bytes of any alignment."""
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def as_drawn(x: torch.Tensor) -> torch.Tensor:
    """A tensor with the shape and the device of ``x``, and the dtype in which random numbers are drawn for it."""
    return torch.empty((), dtype=torch.float32, device=x.device).expand(x.shape) if x.dtype in HALF else x


_NO_WIRE_FORMAT = "{!r} has no wire format: to travel as bytes a compressor defines _encode and _pieces"
Piece = tuple[slice | torch.Tensor, torch.Tensor]
"""Where numbers go, and the numbers: a stretch; or int64 places, the only ones of the row that are not zero."""


@dataclass(frozen=True)
class Draw:
    """The random numbers of one row of messages, for a compressor that has a ``_stream``."""

    stream: DrawStream | None
    row: int

    def __call__(self, start: int, out: torch.Tensor) -> torch.Tensor:
        """Fill ``out`` ``[n]`` with the numbers from place ``start`` on."""
        if self.stream is None:
            raise AssertionError("a compressor with random numbers must define _stream")
        return self.stream.fill(self.row, start, out)


class Compressor(ABC):
    """A lossy message. NaN and infinities that are sent stay visible: they never become finite numbers.

    One of your own has ``__call__`` and ``nbytes``, and ``omega`` if it is known; to be sent as bytes, also ``_encode``
    and ``_pieces``.

    Attributes:
        varies: A message may be shorter than :meth:`nbytes` states, depending on the numbers.
    """

    varies: ClassVar[bool] = False

    @property
    def unbiased(self) -> bool:
        """The mean of ``C(x)`` over what it draws is ``x``."""
        return False

    @abstractmethod
    def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
        """The receivers' tensor: shape and dtype of ``x``, which is ``[..., d]`` in floating point."""

    @abstractmethod
    def nbytes(self, d: int, dtype: torch.dtype) -> int:
        """Bytes of the message of one agent's ``d`` numbers, at most."""

    @property
    def encodes(self) -> bool:
        """The compressor has a wire format; else only its results can be sent, with all their numbers."""
        own = type(self)
        return own._encode is not Compressor._encode and own._pieces is not Compressor._pieces

    def omega(self, d: int) -> float:
        """The least known omega with ``E |C(x) - x|^2 <= omega |x|^2`` for every ``x`` of ``d`` numbers.

        0 loses nothing; from 1 on the error may be larger than ``x``. Infinite if no bound is known. A compressor that
        converts to a dtype, or that has an ``eps``, has a smallest number. Below it the bound is an absolute error,
        which the class documents, and omega is that of all larger numbers.
        """
        return math.inf

    def delta(self, d: int) -> float:
        """``1 - omega``: a compressor is a contraction if it is above 0, and at 0 is not known to be one."""
        return max(0.0, 1 - self.omega(d))

    def encode(self, x: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The message of each row of ``x`` ``[..., d]``: uint8 ``[..., nbytes(d, x.dtype)]``; of a compressor that
        ``varies`` that of a vector may be shorter.

        Numbers in it are as they lie in memory, little-endian.

        Raises:
            ValueError: ``x`` is in none of float64, float32, float16 and bfloat16.
            TypeError: The compressor has no wire format.
        """
        check_dtype(x.dtype)
        data = torch.empty(*x.shape[:-1], self.nbytes(x.shape[-1], x.dtype), dtype=torch.uint8, device=x.device)
        if x.numel():
            self._encode(x.detach().resolve_neg(), data, self._stream(draws, x))
        return data

    def decode(
        self, data: torch.Tensor, d: int, dtype: torch.dtype, draws: Draws, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The value of ``compressor(x, draws)``, bit for bit (but for the payload of a NaN), from
        ``data = encode(x, draws)``.

        The draws are the sender's: it draws as often as ``encode`` did. A NaN or an infinity in a message comes from
        one in ``x``, and is no error.

        Args:
            data: uint8 ``[..., nbytes(d, dtype)]``.
            d: Numbers of a message.
            dtype: The dtype of the sent numbers, and of the result ``[..., d]``.
            out: Takes the result.

        Raises:
            ValueError: The message is malformed; the error names the fault.
            TypeError: The compressor has no wire format.
        """
        self._check(data, d, dtype)
        if out is None:
            out = torch.empty(*data.shape[:-1], d, dtype=dtype, device=data.device)
        for row, pieces in zip(rows(out), self._rows_of_pieces(data, out, draws), strict=True):
            for where, numbers in pieces:
                if isinstance(where, torch.Tensor):
                    row.zero_()
                row[where] = numbers
        return out

    def add_decoded(
        self,
        total: torch.Tensor,
        data: torch.Tensor,
        weight: float,
        draws: Draws,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """``total.add_(decode(data, d, dtype, draws).to(total.dtype), alpha=weight)``, bit for bit, block by block.

        A sum of 16 bits is computed as ``total.float().add_(decoded.float(), alpha=weight)`` and rounded once: torch's
        own sum depends on the memory layout. If a message has only some of the numbers, the others of ``total`` are not
        touched: a -0.0 among them is kept, and they do not become NaN with an infinite weight.

        Args:
            total: ``[..., d]``, changed in place.
            dtype: The dtype of the sent numbers; the dtype of ``total`` if not given.

        Returns:
            ``total``.

        Raises:
            ValueError, TypeError: As for :meth:`decode`; ``total`` is unchanged then.
        """
        self._check(data, total.shape[-1], dtype or total.dtype)
        if total.shape[:-1] != data.shape[:-1] or total.device != data.device:
            raise ValueError(
                f"messages of shape {list(data.shape)} on {data.device} for sums of shape {list(total.shape)} on "
                f"{total.device}: pass one for each row, on the same device"
            )
        like = torch.empty((), dtype=dtype or total.dtype, device=total.device).expand(total.shape)
        for row, pieces in zip(rows(total.detach()), self._rows_of_pieces(data, like, draws), strict=True):
            for where, numbers in pieces:
                part = row[where]  # of places a copy
                if part.dtype in HALF:
                    row[where] = part.float().add_(numbers.float(), alpha=weight).to(part.dtype)
                else:
                    part.add_(numbers.to(part.dtype), alpha=weight)
                    if isinstance(where, torch.Tensor):
                        row[where] = part
        return total

    def _check(self, data: torch.Tensor, d: int, dtype: torch.dtype) -> None:
        check_dtype(dtype)
        if d < 0:
            raise ValueError(f"d={d}: pass how many numbers the message has, 0 or more")
        check_message(data, self.nbytes(d, dtype), f"{self!r} of {d} numbers in {dtype}")

    def _rows_of_pieces(self, data: torch.Tensor, like: torch.Tensor, draws: Draws) -> list[Iterator[Piece]]:
        """The pieces of each row of ``like``, after all rows have been checked."""
        if not like.numel():
            return [iter(()) for _ in rows(like)]
        stream = self._stream(draws, like)
        return [
            self._pieces(message.contiguous(), like.shape[-1], like.dtype, Draw(stream, number))
            for number, message in enumerate(rows(data))
        ]

    def _stream(self, draws: Draws, like: torch.Tensor) -> DrawStream | None:
        """The random numbers of the messages of ``like``: ``random_numbers.stream_of`` if it has any."""
        return None

    def _encode(self, x: torch.Tensor, data: torch.Tensor, stream: DrawStream | None) -> None:
        """Write the message of each row of ``x``, which has numbers, into that of ``data``."""
        raise TypeError(_NO_WIRE_FORMAT.format(self))

    def _pieces(self, data: torch.Tensor, d: int, dtype: torch.dtype, draw: Draw) -> Iterator[Piece]:
        """Check the message ``[nbytes]`` of a row, then give its numbers: in pieces in order, or in one with places.

        A piece may be overwritten when the next is requested, and the caller does not change it.
        """
        raise TypeError(_NO_WIRE_FORMAT.format(self))


class Converted(Compressor):
    """Every number in another dtype, or in its own."""

    def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
        return x.to(self._sent(x.dtype)).to(x.dtype)

    def _sent(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which numbers are sent."""
        return dtype

    def nbytes(self, d: int, dtype: torch.dtype) -> int:
        return d * self._sent(dtype).itemsize

    def _encode(self, x: torch.Tensor, data: torch.Tensor, stream: DrawStream | None) -> None:
        data.view(self._sent(x.dtype)).copy_(x)

    def _pieces(self, data: torch.Tensor, d: int, dtype: torch.dtype, draw: Draw) -> Iterator[Piece]:
        sent = as_numbers(data, self._sent(dtype))
        return ((where, sent[where].to(dtype)) for where in blocks(d))


@dataclass(frozen=True)
class Identity(Converted):
    """The tensor itself: what a compressing algorithm is without compression."""

    @property
    def unbiased(self) -> bool:
        return True

    def omega(self, d: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Cast(Converted):
    """Every number rounded to the nearest of a shorter dtype; half of float32's bytes.

    The significand of ``dtype`` has p bits, 8 of bfloat16 and 11 of float16. A number in ``[2^e, 2^(e+1))`` is off by
    ``2^(e-p)`` at most, and so by less than a share of ``2^-p`` of itself; also if it is rounded twice, as torch rounds
    float64 through float32. So ``omega`` is ``4^-p`` for the normal numbers of ``dtype``, from 6.1e-5 to 65504 in
    float16, and nearly all numbers of float32 in bfloat16. Larger numbers become infinite, so the overflow is visible.
    Smaller numbers are off by ``2^-25`` at most in float16 (``2^-134`` in bfloat16), and become zero of their sign up
    to that size; ``omega`` does not hold for them.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``.
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in HALF:
            raise ValueError(f"dtype={self.dtype!r}: pass torch.bfloat16 or torch.float16")

    def _sent(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype

    def omega(self, d: int) -> float:
        return (torch.finfo(self.dtype).eps / 2) ** 2


@dataclass(frozen=True)
class Around(Compressor):
    """The common part of compressors that change another one's messages or numbers: all else is the other's."""

    compressor: Compressor

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, Compressor):
            raise TypeError(f"{type(self).__name__}(compressor={self.compressor!r}): a compressor is wanted, as QSGD()")

    @property
    def encodes(self) -> bool:
        return self.compressor.encodes

    def nbytes(self, d: int, dtype: torch.dtype) -> int:
        return self.compressor.nbytes(d, dtype)

    def _stream(self, draws: Draws, like: torch.Tensor) -> DrawStream | None:
        return self.compressor._stream(draws, like)

    def _encode(self, x: torch.Tensor, data: torch.Tensor, stream: DrawStream | None) -> None:
        self.compressor._encode(x, data, stream)

    def _pieces(self, data: torch.Tensor, d: int, dtype: torch.dtype, draw: Draw) -> Iterator[Piece]:
        return self.compressor._pieces(data, d, dtype, draw)


@dataclass(frozen=True)
class Shrunk(Around):
    """An unbiased compressor divided by ``1 + omega``, which makes a contraction of any: ``delta = 1 / (1 + omega)``.

    The error is then in the mean ``(omega + omega^2) |x|^2 / (1 + omega)^2`` at most, which is ``omega / (1 + omega)``
    of ``|x|^2``. Messages are as short as before; a coarser compressor needs more of them to send everything.

    Args:
        compressor: Unbiased.

    Raises:
        ValueError: The compressor is biased; or, at a call, its omega is not known.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.compressor.unbiased:
            raise ValueError(f"Shrunk is for unbiased compressors, and {self.compressor!r} is biased: take it as it is")

    def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
        return self.compressor(x, mix) / self._divisor(x.shape[-1]) if x.numel() else x.clone()

    def _divisor(self, d: int) -> float:
        omega = self.compressor.omega(d)
        if omega == math.inf:
            raise ValueError(f"no omega is known of {self.compressor!r}: define omega(d), or take another compressor")
        return 1 + omega

    def omega(self, d: int) -> float:
        return 1 - 1 / (1 + self.compressor.omega(d))

    def _encode(self, x: torch.Tensor, data: torch.Tensor, stream: DrawStream | None) -> None:
        self._divisor(x.shape[-1])
        self.compressor._encode(x, data, stream)

    def _pieces(self, data: torch.Tensor, d: int, dtype: torch.dtype, draw: Draw) -> Iterator[Piece]:
        divisor = self._divisor(d)
        return ((where, numbers / divisor) for where, numbers in self.compressor._pieces(data, d, dtype, draw))


@dataclass(frozen=True)
class LowRank:
    """``compression=LowRank(rank)`` of an optimizer: PowerGossip (:class:`shoal.algorithms.PowerGossip`).

    Neighbours compress the difference of their models, which no :class:`Compressor` of one vector can.

    Of a parameter with m rows and n columns an agent sends each neighbour ``rank (m + n)`` numbers in a step. Vectors
    are sent whole, and so are matrices for which that is shorter.

    Args:
        rank: The number of vectors that neighbours compare a matrix with.
        iterations: Power iterations in a step; with 0.5 the messages are of m and of n vectors in turn.

    Raises:
        TypeError: The rank is no whole number.
        ValueError: The rank is below 1.
    """

    rank: int = 1
    iterations: float = 1

    def __post_init__(self) -> None:
        check_count(self, "rank")


@dataclass(frozen=True)
class Zstd(Around):
    """The same numbers in fewer bytes: another compressor's messages through zstd (RFC 8878).

    Of 8-bit messages about a sixth to a quarter is left out, of 4-bit ones a third, of bfloat16 a fifth; signs are as
    short as they can be. It takes about a millisecond for a megabyte, at each end. How long a message gets depends on
    the numbers; :meth:`nbytes` says the most, and :meth:`encode` gives such messages of a vector alone, while those of
    the rows of a matrix stay as the compressor makes them.

    Args:
        compressor: The compressor of the messages.
        level: The level of zstd, 1 or more; higher levels are slower, with little gain here.

    Raises:
        ModuleNotFoundError: zstandard is not installed: ``pip install 'shoal[zstd]'``.
        ValueError: There is no such level.
    """

    level: int = 1

    varies = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "level")
        most = _zstandard().MAX_COMPRESSION_LEVEL
        if self.level > most:
            raise ValueError(f"level={self.level}: pass 1 to {most}")

    def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
        return self.compressor(x, mix)

    @property
    def unbiased(self) -> bool:
        return self.compressor.unbiased

    def omega(self, d: int) -> float:
        return self.compressor.omega(d)

    def encode(self, x: torch.Tensor, draws: Draws) -> torch.Tensor:
        message = self.compressor.encode(x, draws)
        if message.dim() > 1 or not message.numel():
            return message
        packed = _zstandard().ZstdCompressor(level=self.level).compress(message.cpu().numpy().data)
        if len(packed) >= len(message):
            return message
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(message.device)

    def decode(
        self, data: torch.Tensor, d: int, dtype: torch.dtype, draws: Draws, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.compressor.decode(self._unpacked(data, d, dtype), d, dtype, draws, out=out)

    def add_decoded(
        self,
        total: torch.Tensor,
        data: torch.Tensor,
        weight: float,
        draws: Draws,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        data = self._unpacked(data, total.shape[-1], dtype or total.dtype)
        return self.compressor.add_decoded(total, data, weight, draws, dtype=dtype)

    def _unpacked(self, data: torch.Tensor, d: int, dtype: torch.dtype) -> torch.Tensor:
        """The compressor's message. A message is unpacked only if its header states exactly the expected number of
        bytes.
        """
        check_dtype(dtype)
        if d < 0 or data.dim() != 1 or data.dtype != torch.uint8 or len(data) >= self.nbytes(d, dtype):
            return data
        nbytes = self.nbytes(d, dtype)
        zstandard, packed = _zstandard(), data.contiguous().cpu().numpy().data
        description = f"{self!r} of {d} numbers in {dtype}"
        try:
            says = zstandard.get_frame_parameters(packed).content_size
            if says != nbytes:
                raise ValueError(f"a message that unpacks to {says} bytes, not to {nbytes}: it should be {description}")
            unpacked = zstandard.ZstdDecompressor().decompress(packed, max_output_size=nbytes)
        except zstandard.ZstdError as error:
            raise ValueError(
                f"a message of {len(data)} bytes that zstd cannot unpack ({error}): it should be {description}"
            ) from None
        found = torch.frombuffer(bytearray(unpacked), dtype=torch.uint8).to(data.device)
        check_message(found, nbytes, description)
        return found


def _zstandard() -> Any:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise ModuleNotFoundError("Zstd needs zstandard: pip install 'shoal[zstd]'", name="zstandard") from None
    return zstandard
