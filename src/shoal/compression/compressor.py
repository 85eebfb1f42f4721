"""What a compressor is, and the one that leaves everything as it is.

A compressor is a map from a vector to the vector that its receivers reconstruct. It works along the last dimension, so
that each row of a stacked fleet is compressed for itself, exactly as the agent alone would compress it.
"""

from __future__ import annotations

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

    def delta(self, d: int) -> float:
        """The largest known delta with ``E |C(x) - x|^2 <= (1 - delta) |x|^2`` for every ``x`` of ``d`` numbers.

        1 loses nothing. At 0 no bound is known that holds for every ``x``.
        """
        return 0.0


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

    def delta(self, d: int) -> float:
        return 1.0
