"""Compressors that send every number, with fewer bits.

Where a scale may be chosen it is a power of two: then numbers that are exact in binary stay exact, and a stacked fleet
and a real agent, which may have summed in another order, still send the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from .compressor import Compressor, Draws


@dataclass(frozen=True)
class QSGD(Compressor):
    """Whole multiples of a step, rounded up or down at random so that the mean is ``x``.

    After Alistarh et al. 2017, arXiv:1610.02132. The step is the least power of two that is no smaller than
    ``norm / levels``. There is no entropy coding: each number takes the same bits.

    The step is less than ``2 norm / levels``, and the variance of a number a below it is ``a (step - a)``, of any at
    most ``step^2 / 4`` and ``a step``. So omega is at most ``d / levels^2`` and ``2 sqrt(d) / levels`` with the
    euclidean norm. With the max norm the worst are one number as large as the norm and d - 1 small ones, for which it
    is ``1 / levels^2 + (sqrt(1 + 4 (d - 1) / levels^2) - 1) / 2``: below 1 while d is below about ``2 levels^2``.

    Args:
        levels: The largest multiple; 127 makes 8 bits a number, 7 four, 1 two.
        norm: What the step follows: the ``"max"`` norm, or the ``"euclidean"`` norm of the paper, whose step is
            coarser, and most numbers of a long vector become zero.
    """

    levels: int = 127
    norm: Literal["max", "euclidean"] = "max"

    def __post_init__(self) -> None:
        if self.levels < 1:
            raise ValueError(f"levels={self.levels}: pass 1 or more")
        if self.norm not in ("max", "euclidean"):
            raise ValueError(f'norm={self.norm!r}: pass "max" or "euclidean"')

    @property
    def unbiased(self) -> bool:
        return True

    def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, math.inf if self.norm == "max" else 2, dim=-1, keepdim=True)
        least = norm / self.levels
        below = _power_of_two_below(least)
        step = torch.where(below < least, 2 * below, below)
        step = torch.where(step == 0, 1.0, step)
        exact = x / step
        low = exact.floor()
        multiple = low + (mix.uniform(x) < exact - low)
        return multiple.clamp(-self.levels, self.levels) * step

    def nbytes(self, d: int, dtype: torch.dtype) -> int:
        return -(-d * (2 * self.levels).bit_length() // 8) + dtype.itemsize

    def omega(self, d: int) -> float:
        fineness = self.levels**2
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
        mean = x.abs().mean(-1, keepdim=True)
        below = _power_of_two_below(mean)
        scale = torch.where(mean > 1.5 * below, 2 * below, below)
        return torch.where(x < 0, -scale, scale)

    def nbytes(self, d: int, dtype: torch.dtype) -> int:
        return -(-d // 8) + dtype.itemsize

    def omega(self, d: int) -> float:
        return 1 - 8 / (9 * d)


@dataclass(frozen=True)
class MinMaxUInt8(Compressor):
    """Eight bits between the least and the greatest number of a chunk, rounded to the nearest: BAGUA's scheme.

    ``scale = 255 / (max - min + eps)``, ``top = round(scale max)``; a number travels as ``round(scale x) - top + 255``,
    and arrives within half a step. (Gan et al. 2021, arXiv:2107.01499, and the MinMaxUInt8 kernel of BAGUA.)
    Deterministic and biased. Zero is one of what it sends, so that the error of a number is never above the number, and
    at most 1/127 of the largest where the numbers of a chunk differ by ``eps`` or more. ``omega`` is what follows for
    those; where they differ by less, small numbers may become zero, an error of at most ``eps`` each.

    With the ``eps`` and the ``dyadic`` that it has if none is given, float32 and float16 are the kernel's bit for bit:
    it computes in float32, and so does this for all of 32 bits or fewer. It differs where the kernel's number does not
    fit into a byte, which rounding far from zero may do: here it is the nearest that does. And where the vector has a
    NaN or an infinity: here all of its chunk is NaN, where the kernel may make finite numbers of it.

    Args:
        chunk: Numbers with a minimum and a maximum of their own; the whole vector if not given.
        eps: Keeps the scale finite where all numbers are alike.
        dyadic: Round the scale down to a power of two, so that numbers that are exact in binary stay so. A step is at
            most twice as wide.
    """

    chunk: int | None = None
    eps: float = 1e-7
    dyadic: bool = False

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk={self.chunk}: pass 1 or more, or None for the whole vector")
        if self.eps <= 0:
            raise ValueError(f"eps={self.eps}: pass a small number above 0")

    def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
        d = x.shape[-1]
        chunk = self.chunk or d
        # The last number fills up the last chunk, since it moves neither minimum nor maximum.
        filled = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], -d % chunk)], dim=-1)
        return self._quantise(filled.view(*x.shape[:-1], -1, chunk)).flatten(-2)[..., :d]

    def _quantise(self, short: torch.Tensor) -> torch.Tensor:
        x = short.float() if torch.finfo(short.dtype).bits < 32 else short
        least, greatest = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        if self.dyadic:
            # 254, for where max and min are both halfway, they may round apart by one more.
            scale = _power_of_two_below(_divided(254, (greatest - least).clamp(min=self.eps)))
        else:
            scale = _divided(255, greatest - least + self.eps)
        bottom = (greatest * scale).round() - 255
        code = ((x * scale).round() - bottom).clamp(0, 255)
        return ((code + bottom) / scale).to(short.dtype)

    def nbytes(self, d: int, dtype: torch.dtype) -> int:
        return d + 2 * dtype.itemsize * -(-d // (self.chunk or d))

    def omega(self, d: int) -> float:
        # Worst are one number, and all others at 1/127 of it, which are lost.
        numbers, lost = min(self.chunk or d, d), 127.0**-2
        return numbers * lost / (1 + (numbers - 1) * lost)


def _divided(number: float, x: torch.Tensor) -> torch.Tensor:
    """Rounded once: torch multiplies a number with the reciprocal."""
    return torch.full_like(x, number) / x


def _power_of_two_below(x: torch.Tensor) -> torch.Tensor:
    """The greatest power of two that is at most ``x``; zero, infinity and NaN stay as they are."""
    mantissa, _ = torch.frexp(x)
    return torch.where((x > 0) & x.isfinite(), x / (2 * mantissa), x)
