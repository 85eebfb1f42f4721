"""Compressors that send a few of the numbers, and zeros for the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .compressor import Compressor, Draws


@dataclass(frozen=True)
class TopK(Compressor):
    """The numbers of largest magnitude; of equals, those that come first.

    A NaN counts as infinite, so it is sent. ``delta = k / d`` (Stich, Cordonnier, Jaggi 2018, arXiv:1809.07599, lemma
    A.1). The positions travel as four bytes each, or as one bit for every number, whichever is shorter.

    Args:
        share: Of the numbers, in (0, 1]; at least one is sent.
    """

    share: float

    def __post_init__(self) -> None:
        _check(self.share)

    def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
        size = x.abs()
        size = torch.where(size.isnan(), torch.inf, size)
        return torch.where(_largest(size, _count(self.share, x.shape[-1])), x, 0.0)

    def nbytes(self, d: int, dtype: torch.dtype) -> int:
        count = _count(self.share, d)
        return count * dtype.itemsize + min(4 * count, -(-d // 8))

    def omega(self, d: int) -> float:
        return 1 - _count(self.share, d) / d


@dataclass(frozen=True)
class RandomK(Compressor):
    """Numbers at random places, chosen anew for each message.

    The receivers draw the same places from the seed, so that only the numbers travel. As it stands it is a contraction,
    ``delta = k / d`` (arXiv:1809.07599, lemma A.1), which CHOCO-SGD, DeepSqueeze and BEER need. Scaled by ``d / k`` it
    is unbiased, and its error, ``(d / k - 1) |x|^2`` in the mean, is larger than ``x`` where less than half is sent.

    Args:
        share: Of the numbers, in (0, 1]; at least one is sent.
        scaled: Unbiased instead of a contraction.
    """

    share: float
    scaled: bool = False

    def __post_init__(self) -> None:
        _check(self.share)

    @property
    def unbiased(self) -> bool:
        return self.scaled or self.share == 1

    def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
        d = x.shape[-1]
        count = _count(self.share, d)
        sent = torch.where(_largest(mix.uniform(x), count), x, 0.0)
        return sent * (d / count) if self.scaled else sent

    def nbytes(self, d: int, dtype: torch.dtype) -> int:
        return _count(self.share, d) * dtype.itemsize

    def omega(self, d: int) -> float:
        kept = _count(self.share, d) / d
        return 1 / kept - 1 if self.scaled else 1 - kept


def _check(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"share={share}: pass the share of the numbers to send, above 0 and at most 1")


def _count(share: float, d: int) -> int:
    return max(1, round(share * d))


def _largest(size: torch.Tensor, count: int) -> torch.Tensor:
    """bool, where the ``count`` largest are, without NaN among them; of equals the first."""
    least = size.topk(count).values[..., -1:]
    above, equal = size > least, size == least
    room = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))
