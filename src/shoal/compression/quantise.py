"""Compressors that send every number, with fewer bits. A free choice of scale is a power of two: then numbers that are
exact in binary stay exact, and a stacked fleet and a real agent, which may sum in different orders, still send the
same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import torch

from ..kernels import native
from ..topology._validate import check_count
from .bits import Packed, packed_bytes
from .compressor import BLOCK, HALF, Compressor, Draw, Piece, as_bytes, as_drawn, as_numbers, blocks, rows
from .random_numbers import Draws, DrawStream, HashStream, stream_of

_MOST_LEVELS = 1 << 52
Grid = tuple[torch.Tensor, torch.Tensor]
"""The factor of the numbers, and the whole number of the least code."""


@dataclass(frozen=True)
class QSGD(Compressor):
    """Whole multiples of a step, rounded up or down at random so that the mean is ``x``.

    After Alistarh et al. 2017, arXiv:1610.02132. The step is the least power of two that is no smaller than
    ``norm / levels``. There is no entropy coding: each number takes the same bits.

    The step is less than ``2 norm / levels``, and the variance of a number a below it is ``a (step - a)``, of any at
    most ``step^2 / 4`` and ``a step``. So omega is at most ``d / levels^2`` and ``2 sqrt(d) / levels`` with the
    euclidean norm. With the max norm the worst are one number as large as the norm and d - 1 small ones, for which it
    is ``1 / levels^2 + (sqrt(1 + 4 (d - 1) / levels^2) - 1) / 2``: below 1 while d is below about ``2 levels^2``. So
    with few levels a long vector needs chunks, whose length replaces d: four bits with ``QSGD(7, chunk=64)``. In
    float16 there are at most 65504 levels, and no step is below ``2^-24``, which is then an absolute error.

    Args:
        levels: The largest multiple; 127 makes 8 bits a number, 7 four, 1 two.
        norm: The norm that sets the step: ``"max"``, or the ``"euclidean"`` norm of the paper, whose step is coarser,
            so most numbers of a long vector become zero.
        chunk: Numbers with a step of their own; the whole vector if not given.
    """

    levels: int = 127
    norm: Literal["max", "euclidean"] = "max"
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None:
            check_count(self, "chunk")
        check_count(self, "levels")
        if self.levels > _MOST_LEVELS:
            raise ValueError(f"levels={self.levels}: pass at most 2^52, which float64 can tell apart")
        if self.norm not in ("max", "euclidean"):
            raise ValueError(f'norm={self.norm!r}: pass "max" or "euclidean"')

    @property
    def unbiased(self) -> bool:
        return True

    def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
        if not x.numel():
            return x.clone()
        x = x.detach()
        wide = _widened(x)
        step, low = self._spread(_widened(self._steps(x)), slice(0, x.shape[-1])), torch.empty_like(wide)
        exact = _over(wide, step, torch.empty_like(wide))
        return self._multiples(exact, mix.uniform(wide), low, self._most(x.dtype)).mul_(step).to(x.dtype)

    def _steps(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., chunks]``: powers of two; infinite or NaN if a number is, and then so is what arrives."""
        # In 16 bits the quotient could be rounded down to a power of two. The largest multiple would then be cut off.
        norm = self._norm(x)
        least = _widened(norm) / min(self.levels, torch.finfo(x.dtype).max)
        below = power_of_two_below(least)
        step = torch.where(below < least, 2 * below, below).to(x.dtype)
        # Of numbers so small that their step is rounded to 0 some would arrive as the step that replaces it.
        kind = torch.finfo(x.dtype)
        return torch.where(step == 0, torch.where(norm > 0, kind.smallest_normal * kind.eps, 1.0).to(x.dtype), step)

    def _spread(self, steps: torch.Tensor, where: slice) -> torch.Tensor:
        """The step of each of some numbers, or the common one."""
        if self.chunk is None or steps.shape[-1] == 1:
            return steps
        first, behind = where.start // self.chunk, -(-where.stop // self.chunk)
        each = steps[..., first:behind].repeat_interleave(self.chunk, dim=-1)
        return each[..., where.start - first * self.chunk :][..., : where.stop - where.start]

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        chunk = min(self.chunk or x.shape[-1], x.shape[-1])
        if self.norm == "max" and x.dim() == 1:
            maxima = x.new_empty(-(-len(x) // chunk))
            if native.maxima(maxima, x, chunk):
                return maxima
        if self.chunk is not None and self.chunk < x.shape[-1]:
            filled = torch.cat([x, x.new_zeros(()).expand(*x.shape[:-1], -x.shape[-1] % self.chunk)], dim=-1)
            chunks = filled.view(*x.shape[:-1], -1, self.chunk)
            order = 2 if self.norm == "euclidean" else math.inf
            of_each: torch.Tensor = torch.linalg.vector_norm(chunks, order, dim=-1)
            return of_each
        if self.norm == "euclidean":
            norm: torch.Tensor = torch.linalg.vector_norm(x, 2, dim=-1, keepdim=True)
            return norm
        # Block by block both together take a tenth of the time of torch's max norm.
        found = [
            torch.maximum(-x[..., where].amin(-1, keepdim=True), x[..., where].amax(-1, keepdim=True))
            for where in blocks(x.shape[-1])
        ]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1).amax(-1, keepdim=True)

    @staticmethod
    def _multiples(exact: torch.Tensor, drawn: torch.Tensor, low: torch.Tensor, most: float) -> torch.Tensor:
        """Multiples of the step, in the memory of ``low``, from ``exact``, which is ``x`` in units of the step and is
        overwritten.
        """
        torch.floor(exact, out=low)
        exact.sub_(low)
        up = torch.lt(drawn, exact, out=exact)  # 1 for those that are rounded up
        return low.add_(up).clamp_(-most, most)

    def _most(self, dtype: torch.dtype) -> float:
        """The largest multiple that is no larger than ``levels`` in a dtype, which may not have ``levels`` itself."""
        significand = 2 - math.frexp(torch.finfo(dtype).eps)[1]
        too_fine = max(0, self.levels.bit_length() - significand)
        return min(float(self.levels >> too_fine << too_fine), torch.finfo(dtype).max)

    @property
    def _bits(self) -> int:
        return (2 * self.levels).bit_length()

    def nbytes(self, d: int, dtype: torch.dtype) -> int:
        return packed_bytes(d, self._bits) + self._chunks(d) * dtype.itemsize

    def _chunks(self, d: int) -> int:
        return -(-d // (self.chunk or d)) if d else 0

    def _stream(self, draws: Draws, like: torch.Tensor) -> DrawStream | None:
        return stream_of(draws, as_drawn(like))

    def _encode(self, x: torch.Tensor, data: torch.Tensor, stream: DrawStream | None) -> None:
        assert stream is not None
        steps, most = self._steps(x), self._most(x.dtype)
        header = self._chunks(x.shape[-1]) * x.itemsize
        scratch = torch.empty(3, min(BLOCK, x.shape[-1]), dtype=as_drawn(x).dtype, device=x.device)
        for number, (row, message, own) in enumerate(zip(rows(x), rows(data), rows(steps), strict=True)):
            message[:header] = as_bytes(own)
            own = _widened(own)
            codes = Packed(message[header:], len(row), self._bits)
            finite = bool(own.isfinite().all())
            if finite and self._encode_native(row, own, codes, stream, number):
                continue
            for where in blocks(len(row)):
                drawn, exact, low = scratch[:, : where.stop - where.start]
                stream.fill(number, where.start, drawn)
                part = _widened(row[where])
                found = self._multiples(_over(part, self._spread(own, where), exact), drawn, low, most)
                # Where a step is not finite nothing else counts.
                codes.put(where.start, self._as_codes(found if finite else found.nan_to_num_(0.0)))

    def _encode_native(
        self, row: torch.Tensor, steps: torch.Tensor, codes: Packed, stream: DrawStream, number: int
    ) -> bool:
        """Put the codes of a row by the compiled kernels, in one pass; whether they took it."""
        if self._bits > 8 or not isinstance(stream, HashStream):
            return False
        key, chunk, most = stream.key(number), self.chunk or len(row), self._most(row.dtype)
        found = torch.empty(min(BLOCK, len(row)), dtype=torch.uint8, device="cpu")
        for where in blocks(len(row)):
            part, start = found[: where.stop - where.start], where.start
            wide = _widened(row[where])
            if not native.quantise(part, wide, key + start, steps, chunk, start, most, self._bits):
                return False
            codes.put(start, part)
        return True

    def _as_codes(self, multiples: torch.Tensor) -> torch.Tensor:
        """In two's complement."""
        if self._bits > 8:
            return multiples.to(torch.int64) & ((1 << self._bits) - 1)
        codes = multiples.to(torch.int8).view(torch.uint8)
        return codes if self._bits == 8 else codes.bitwise_and_((1 << self._bits) - 1)

    def _as_multiples(self, codes: torch.Tensor) -> torch.Tensor:
        """Signed whole numbers."""
        if self._bits == 8:
            return codes.view(torch.int8)
        signed, sign = codes if self._bits > 8 else codes.view(torch.int8), 1 << (self._bits - 1)
        return signed.bitwise_xor_(sign).sub_(sign)

    def _pieces(self, data: torch.Tensor, d: int, dtype: torch.dtype, draw: Draw) -> Iterator[Piece]:
        header = self._chunks(d) * dtype.itemsize
        steps = as_numbers(data[:header], dtype)
        wrong = ~((steps > 0) & (torch.frexp(steps).mantissa == 0.5) | (steps == math.inf) | steps.isnan())
        if wrong.any():
            raise ValueError(f"its step is {float(steps[wrong][0])}, no power of two")
        codes = Packed(data[header:], d, self._bits)
        codes.check()
        most = self._most(dtype)
        for where in blocks(d):
            least, greatest = torch.aminmax(self._as_multiples(codes.take(where.start, where.stop)))
            if least < -most or greatest > most:
                found = int(greatest if greatest > most else least)
                raise ValueError(f"it has {found} times its step, and {self!r} sends at most {most:.0f} times")
        return self._decoded(codes, steps, d)

    def _decoded(self, codes: Packed, steps: torch.Tensor, d: int) -> Iterator[Piece]:
        numbers = torch.empty(min(BLOCK, d), dtype=steps.dtype, device=steps.device)
        for where in blocks(d):
            multiples = self._as_multiples(codes.take(where.start, where.stop))
            found = numbers[: len(multiples)]
            if not native.multiples(found, multiples, steps, self.chunk or d, where.start):
                found.copy_(multiples).mul_(self._spread(steps, where))
            yield where, found

    def omega(self, d: int) -> float:
        if not d:
            return 0.0
        d, fineness = min(self.chunk or d, d), self.levels**2
        if self.norm == "euclidean":
            return min(d / fineness, 2 * math.sqrt(d / fineness))
        return 1 / fineness + (math.sqrt(1 + 4 * (d - 1) / fineness) - 1) / 2


@dataclass(frozen=True)
class Sign(Compressor):
    """One bit for each number, and the mean magnitude (Karimireddy et al. 2019, arXiv:1901.09847).

    Zero has the sign +. The magnitude is rounded to the nearest power of two, which costs at most a ninth of the
    contraction: ``delta = 8 / (9 d)``, and ``8 |x|_1^2 / (9 d |x|_2^2)`` for a given ``x``: more than half of its
    energy where the numbers are Gaussian.
    """

    def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
        if not x.numel():
            return x.clone()
        scale = self._scale(x)
        return torch.where(x < 0, -scale, scale)

    def _scale(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., 1]``: a power of two or zero; infinite or NaN if a number is, and then so is what arrives."""
        wide = torch.float32 if x.dtype in HALF else x.dtype
        x = x.detach()
        room = torch.empty(*x.shape[:-1], min(BLOCK, x.shape[-1]), dtype=x.dtype, device=x.device)
        sums = (
            torch.abs(x[..., where], out=room[..., : where.stop - where.start]).sum(-1, keepdim=True, dtype=wide)
            for where in blocks(x.shape[-1])
        )
        mean = (sum(sums, torch.zeros((), dtype=wide, device=x.device)) / x.shape[-1]).to(x.dtype)
        below = power_of_two_below(mean)
        return torch.where(mean > 1.5 * below, 2 * below, below)

    def nbytes(self, d: int, dtype: torch.dtype) -> int:
        return packed_bytes(d, 1) + dtype.itemsize if d else 0

    def _encode(self, x: torch.Tensor, data: torch.Tensor, stream: DrawStream | None) -> None:
        scratch = torch.empty(min(BLOCK, x.shape[-1]), dtype=x.dtype, device=x.device)
        for row, message, scale in zip(rows(x), rows(data), rows(self._scale(x)), strict=True):
            message[: x.itemsize] = as_bytes(scale)
            signs = Packed(message[x.itemsize :], len(row), 1)
            if native.signs(message[x.itemsize :], row):
                continue
            for where in blocks(len(row)):
                # Into numbers, 0 or 1: torch takes five times as long into bool.
                found = torch.lt(row[where], 0, out=scratch[: where.stop - where.start])
                signs.put(where.start, found.to(torch.uint8))

    def _pieces(self, data: torch.Tensor, d: int, dtype: torch.dtype, draw: Draw) -> Iterator[Piece]:
        scale = as_numbers(data[: dtype.itemsize], dtype)
        if (scale < 0) | ((scale != 0) & scale.isfinite() & (torch.frexp(scale).mantissa != 0.5)):
            raise ValueError(f"its scale is {float(scale)}, neither zero nor a power of two")
        signs = Packed(data[dtype.itemsize :], d, 1)
        signs.check()
        return self._decoded(signs, scale, d)

    def _decoded(self, signs: Packed, scale: torch.Tensor, d: int) -> Iterator[Piece]:
        numbers = torch.empty(min(BLOCK, d), dtype=scale.dtype, device=scale.device)
        for where in blocks(d):
            # 1 or -1 in a byte.
            ones = signs.take(where.start, where.stop).view(torch.int8).mul_(-2).add_(1)
            yield where, numbers[: len(ones)].copy_(ones).mul_(scale)

    def omega(self, d: int) -> float:
        return 1 - 8 / (9 * d) if d else 0.0


@dataclass(frozen=True)
class MinMaxUInt8(Compressor):
    """Eight bits between the least and the greatest number of a chunk, rounded to the nearest: BAGUA's scheme.

    ``scale = 255 / (max - min + eps)``, ``top = round(scale max)``; a number is sent as ``round(scale x) - top + 255``,
    and is restored within half a step. (Gan et al. 2021, arXiv:2107.01499, and the MinMaxUInt8 kernel of BAGUA.)
    Deterministic and biased. Zero is sent exactly, so the error of a number never exceeds the number. It is at most
    1/127 of the largest one if the numbers of a chunk differ by ``eps`` or more, and ``omega`` holds for such chunks.
    If they differ by less, small numbers may become zero, an error of at most ``eps`` each.

    With the default ``eps`` and ``dyadic``, float32 and float16 equal the kernel's results bit for bit: both compute in
    float32, here for all dtypes of 32 bits or fewer. There are two differences. If the kernel's number does not fit
    into a byte, because of rounding far from zero, here it is the nearest one that fits. If the vector has a NaN or an
    infinity, here its whole chunk is NaN, while the kernel may give finite numbers.

    Args:
        chunk: Numbers with a minimum and a maximum of their own; the whole vector if not given.
        eps: Keeps the scale finite if all numbers are equal.
        dyadic: The scale is the greatest power of two up to ``254 / max(max - min, eps)``, so numbers that are exact in
            binary stay exact. The range then has at most 254 steps, because both ends may be rounded away from each
            other. A step is at most about twice as wide.
    """

    chunk: int | None = None
    eps: float = 1e-7
    dyadic: bool = False

    def __post_init__(self) -> None:
        if self.chunk is not None:
            check_count(self, "chunk")
        if not (isinstance(self.eps, Real) and 0 < self.eps < math.inf):
            raise ValueError(f"eps={self.eps}: pass a small number above 0")

    def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
        if not x.numel():
            return x.clone()
        x, d = x.detach(), x.shape[-1]
        chunk = self.chunk or d
        # The last number fills up the last chunk, since it moves neither minimum nor maximum.
        filled = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], -d % chunk)], dim=-1)
        short = filled.view(*x.shape[:-1], -1, chunk)
        grid = self._grid(short.amin(-1, keepdim=True), short.amax(-1, keepdim=True))
        codes = self._codes(short, grid, torch.empty_like(short, dtype=grid[0].dtype))
        return self._restored(codes, grid).to(x.dtype).flatten(-2)[..., :d]

    def _grid(self, least: torch.Tensor, greatest: torch.Tensor) -> Grid:
        """The scale, and the multiple of its inverse that code 0 is: NaN if a number is not finite, or too large."""
        if least.dtype in HALF:
            least, greatest = least.float(), greatest.float()
        if self.dyadic:
            # 254, for where max and min are both halfway, they may round apart by one more.
            scale = power_of_two_below(_divided(254, (greatest - least).clamp(min=self.eps)))
        else:
            scale = _divided(255, greatest - least + self.eps)
        bottom = (greatest * scale).round() - 255
        return scale, torch.where(bottom.isfinite() & (scale > 0), bottom, math.nan)

    @staticmethod
    def _codes(x: torch.Tensor, grid: Grid, out: torch.Tensor) -> torch.Tensor:
        """Whole numbers from 0 to 255 in ``out``, or NaN."""
        scale, bottom = grid
        return torch.mul(x, scale, out=out).round_().sub_(bottom).clamp_(0, 255)

    @staticmethod
    def _restored(codes: torch.Tensor, grid: Grid) -> torch.Tensor:
        """The restored numbers, in the memory of the codes."""
        scale, bottom = grid
        return codes.add_(bottom).div_(scale)

    def _header(self, d: int) -> int:
        """How many numbers come before the codes."""
        return 2 * -(-d // (self.chunk or d)) if d else 0

    def nbytes(self, d: int, dtype: torch.dtype) -> int:
        return d + self._header(d) * dtype.itemsize

    def _encode(self, x: torch.Tensor, data: torch.Tensor, stream: DrawStream | None) -> None:
        d = x.shape[-1]
        header = self._header(d) * x.itemsize
        wide = torch.float32 if x.dtype in HALF else x.dtype
        codes = torch.empty(max(1, min(BLOCK, d)), dtype=wide, device=x.device)
        whole = torch.empty_like(codes, dtype=torch.int32)
        for row, message in zip(rows(x), rows(data), strict=True):
            ends = []
            for where, width in self._groups(d):
                group = row[where].view(-1, width)
                least, greatest = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
                ends.append(torch.cat([least, greatest], dim=-1))
                grid = self._grid(least, greatest)
                finite = bool(grid[1].isfinite().all())
                if finite and native.grid_codes(message[header:][where].view(-1, width), group, *grid):
                    continue
                for part in _columns(group.shape):
                    numbers = group[part]
                    found = self._codes(numbers, grid, codes[: numbers.numel()].view(numbers.shape))
                    if not finite:
                        found.nan_to_num_(0.0)
                    # Through int32, which is faster than float to byte.
                    target = message[header:][where].view(-1, width)[part]
                    target.copy_(whole[: numbers.numel()].view(numbers.shape).copy_(found))
            message[:header] = as_bytes(torch.cat(ends))

    def _groups(self, d: int) -> Iterator[tuple[slice, int]]:
        """Stretches of ``d`` numbers, and the length of the chunks in each."""
        chunk = self.chunk or d
        many = max(1, BLOCK // chunk) * chunk
        for where in blocks(d - d % chunk, many):
            yield where, chunk
        if d % chunk:
            yield slice(d - d % chunk, d), d % chunk

    def _pieces(self, data: torch.Tensor, d: int, dtype: torch.dtype, draw: Draw) -> Iterator[Piece]:
        header = self._header(d)
        ends = as_numbers(data[: header * dtype.itemsize], dtype).view(-1, 2)
        wrong = (ends[:, 0] > ends[:, 1]).nonzero()
        if len(wrong):
            chunk = int(wrong[0])
            least, greatest = ends[chunk].tolist()
            raise ValueError(f"of chunk {chunk} of {len(ends)}, the minimum is {least} and the maximum {greatest}")
        return self._decoded(data[header * dtype.itemsize :], ends, d)

    def _decoded(self, codes: torch.Tensor, ends: torch.Tensor, d: int) -> Iterator[Piece]:
        wide = torch.float32 if ends.dtype in HALF else ends.dtype
        scratch = torch.empty(max(1, min(BLOCK, d)), dtype=wide, device=codes.device)
        chunk = 0
        for where, width in self._groups(d):
            group = codes[where].view(-1, width)
            least, greatest = torch.split(ends[chunk : chunk + len(group)], 1, dim=-1)
            chunk += len(group)
            grid = self._grid(least, greatest)
            for part in _columns(group.shape):
                found = scratch[: group[part].numel()].view(group[part].shape)
                if not native.grid_numbers(found, group[part], *grid):
                    found = self._restored(found.copy_(group[part]), grid)
                start = where.start + part[1].start
                yield slice(start, start + found.numel()), found.view(-1).to(ends.dtype)

    def omega(self, d: int) -> float:
        # Worst are one number, and all others at 1/127 of it, which are lost.
        numbers, lost = min(self.chunk or d, d), 127.0**-2
        return numbers * lost / (1 + (numbers - 1) * lost)


def _columns(shape: torch.Size) -> Iterator[tuple[slice, slice]]:
    """Slices of a group of chunks: all chunks at once, and blocks of their numbers."""
    return ((slice(None), where) for where in blocks(shape[1]))


def _widened(x: torch.Tensor) -> torch.Tensor:
    """float32 of 16 bits. A number or a random number of 16 bits would be rounded before the two are compared, so the
    probability to round up would be wrong by 2^-9: negative numbers far below a step would never be sent.
    """
    return x.float() if x.dtype in HALF else x


def _over(x: torch.Tensor, step: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``x / step`` of powers of two: where they have an inverse, a product is the same, and faster."""
    inverse = step.reciprocal()
    return torch.mul(x, inverse, out=out) if bool(inverse.isfinite().all()) else torch.div(x, step, out=out)


def _divided(number: float, x: torch.Tensor) -> torch.Tensor:
    """Rounded once: torch multiplies a number with the reciprocal."""
    return torch.full_like(x, number) / x


def power_of_two_below(x: torch.Tensor) -> torch.Tensor:
    """The greatest power of two that is at most ``x``; zero, infinity and NaN stay as they are."""
    mantissa, _ = torch.frexp(x)
    return torch.where((x > 0) & x.isfinite(), x / (2 * mantissa), x)
