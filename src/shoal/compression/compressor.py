"""What a compressor is, and the one that leaves everything as it is.

A compressor is a map from a vector to the vector that its receivers reconstruct. It works along the last dimension, so
that each row of a stacked fleet is compressed for itself, exactly as the agent alone would compress it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch


class Draws(Protocol):
    """Where random numbers come from: :class:`shoal.algorithms.Mix`."""

    def uniform(self, like: torch.Tensor) -> torch.Tensor:
        """In [0, 1), shape and dtype of ``like``."""
        ...


class Compressor(ABC):
    """A lossy message. NaN and infinities that are sent stay visible: they never become finite numbers."""

    @property
    def unbiased(self) -> bool:
        """The mean of ``C(x)`` over what it draws is ``x``."""
        return False

    @abstractmethod
    def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
        """What the receivers have: shape and dtype of ``x``, which is ``[..., d]`` in floating point."""

    @abstractmethod
    def nbytes(self, d: int, dtype: torch.dtype) -> int:
        """Bytes of the message of one agent's ``d`` numbers."""

    def omega(self, d: int) -> float:
        """The least known omega with ``E |C(x) - x|^2 <= omega |x|^2`` for every ``x`` of ``d`` numbers.

        0 loses nothing; from 1 on the error may be larger than what was to be sent. Infinite if no bound is known.
        """
        return math.inf

    def delta(self, d: int) -> float:
        """``1 - omega``: a compressor is a contraction if it is above 0, and at 0 is not known to be one."""
        return max(0.0, 1 - self.omega(d))


@dataclass(frozen=True)
class Identity(Compressor):
    """The tensor itself: what a compressing algorithm is without compression."""

    @property
    def unbiased(self) -> bool:
        return True

    def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
        return x

    def nbytes(self, d: int, dtype: torch.dtype) -> int:
        return d * dtype.itemsize

    def omega(self, d: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Shrunk(Compressor):
    """An unbiased compressor divided by ``1 + omega``, which makes a contraction of any: ``delta = 1 / (1 + omega)``.

    The error is then in the mean ``(omega + omega^2) |x|^2 / (1 + omega)^2`` at most, which is ``omega / (1 + omega)``
    of ``|x|^2``. What is sent is as short as before; the coarser the compressor, the longer it takes to say all.

    Args:
        compressor: Unbiased.

    Raises:
        ValueError: It is biased; or, at a call, its omega is not known.
    """

    compressor: Compressor

    def __post_init__(self) -> None:
        if not self.compressor.unbiased:
            raise ValueError(f"Shrunk is for unbiased compressors, and {self.compressor!r} is biased: take it as it is")

    def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
        omega = self.compressor.omega(x.shape[-1])
        if omega == math.inf:
            raise ValueError(f"no omega is known of {self.compressor!r}: define omega(d), or take another compressor")
        return self.compressor(x, mix) / (1 + omega)

    def nbytes(self, d: int, dtype: torch.dtype) -> int:
        return self.compressor.nbytes(d, dtype)

    def omega(self, d: int) -> float:
        return 1 - 1 / (1 + self.compressor.omega(d))
