"""Compressors that send a few of the numbers, and zeros for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real

import numpy as np
import torch

from ..kernels import native
from .bits import positions_bytes, read_positions, write_positions
from .compressor import Compressor, Draw, Piece, as_bytes, as_drawn, as_numbers, rows
from .random_numbers import Draws, DrawStream, HashStream, stream_of


@dataclass(frozen=True)
class TopK(Compressor):
    """The numbers of largest magnitude; of equal ones, the first.

    A NaN counts as infinite, so it is sent. ``delta = k / d`` (Stich, Cordonnier, Jaggi 2018, arXiv:1809.07599, lemma
    A.1). The positions are sent as one bit for every number, or in about ``2 + log2(d / k)`` bits each, whichever is
    shorter (:mod:`shoal.compression.bits`).

    Args:
        share: The share of the numbers, in (0, 1]; at least one is sent.
    """

    share: float

    def __post_init__(self) -> None:
        _check(self.share)

    def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
        return torch.where(self._chosen(x), x, 0.0)

    def _chosen(self, x: torch.Tensor) -> torch.Tensor:
        return _largest(_magnitude(x), _count(self.share, x.shape[-1]))

    def nbytes(self, d: int, dtype: torch.dtype) -> int:
        count = _count(self.share, d)
        return count * dtype.itemsize + positions_bytes(count, d)

    def omega(self, d: int) -> float:
        return 1 - _count(self.share, d) / d if d else 0.0

    def _encode(self, x: torch.Tensor, data: torch.Tensor, stream: DrawStream | None) -> None:
        for row, message in zip(rows(x), rows(data), strict=True):
            places = _places_of_largest(row, _count(self.share, len(row)))
            end = len(places) * x.itemsize
            message[:end] = as_bytes(row[places])
            write_positions(len(row), places, message[end:])

    def _pieces(self, data: torch.Tensor, d: int, dtype: torch.dtype, draw: Draw) -> Iterator[Piece]:
        count = _count(self.share, d)
        end = count * dtype.itemsize
        places = read_positions(data[end:], count, d)
        return iter([(places, as_numbers(data[:end], dtype).clone())])


@dataclass(frozen=True)
class RandomK(Compressor):
    """Numbers at random places, chosen for each message.

    The receivers draw the same places from the seed, so only the numbers are sent. By default it is a contraction,
    ``delta = k / d`` (arXiv:1809.07599, lemma A.1), which CHOCO-SGD, DeepSqueeze and BEER need. Scaled by ``d / k`` it
    is unbiased, and its error, ``(d / k - 1) |x|^2`` in the mean, is larger than ``x`` if less than half is sent. Both
    sides draw for all ``d`` places in every case, in float32 or float64: numbers of 16 bits would often be equal, and
    of equal ones the first would always be sent.

    Args:
        share: The share of the numbers, in (0, 1]; at least one is sent.
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
        count = _count(self.share, x.shape[-1])
        return self._scaled(torch.where(_largest(mix.uniform(as_drawn(x)), count), x, 0.0), x.shape[-1])

    def _scaled(self, sent: torch.Tensor, d: int) -> torch.Tensor:
        return sent * (d / _count(self.share, d)) if self.scaled and d else sent

    def nbytes(self, d: int, dtype: torch.dtype) -> int:
        return _count(self.share, d) * dtype.itemsize

    def _stream(self, draws: Draws, like: torch.Tensor) -> DrawStream | None:
        return stream_of(draws, as_drawn(like))

    def _encode(self, x: torch.Tensor, data: torch.Tensor, stream: DrawStream | None) -> None:
        for number, (row, message) in enumerate(zip(rows(x), rows(data), strict=True)):
            places = self._places(as_drawn(row), Draw(stream, number))
            message.copy_(as_bytes(self._scaled(row[places], len(row))))

    def _pieces(self, data: torch.Tensor, d: int, dtype: torch.dtype, draw: Draw) -> Iterator[Piece]:
        like = as_drawn(torch.empty((), dtype=dtype, device=data.device).expand(d))
        return iter([(self._places(like, draw), as_numbers(data, dtype).clone())])

    def _places(self, like: torch.Tensor, draw: Draw) -> torch.Tensor:
        """int64, ascending: where the largest of the random numbers of a row are, which have the dtype of ``like``."""
        count = _count(self.share, len(like))
        if like.is_cpu and isinstance(draw.stream, HashStream):
            places = native.drawn_largest(draw.stream.key(draw.row), len(like), count, like.dtype)
            if places is not None:
                return places
        return _places_of_largest(draw(0, torch.empty_like(like, memory_format=torch.contiguous_format)), count)

    def omega(self, d: int) -> float:
        kept = _count(self.share, d) / d if d else 1.0
        return 1 / kept - 1 if self.scaled else 1 - kept


def _check(share: float) -> None:
    if not (isinstance(share, Real) and 0 < share <= 1):
        raise ValueError(f"share={share}: pass the share of the numbers to send, above 0 and at most 1")


def _count(share: float, d: int) -> int:
    return min(d, max(1, round(share * d)))


def _largest(size: torch.Tensor, count: int) -> torch.Tensor:
    """bool, where the ``count`` largest are, without NaN among them; of equals the first."""
    if count == size.shape[-1]:
        return torch.ones_like(size, dtype=torch.bool)
    least = _least_of_largest(size, count)
    chosen = size >= least
    if int(torch.count_nonzero(chosen)) * size.shape[-1] == count * size.numel():
        return chosen
    above, equal = size > least, size == least
    room = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def _least_of_largest(size: torch.Tensor, count: int) -> torch.Tensor:
    """``[..., 1]``: the ``count``-th largest."""
    if not size.is_cpu:
        return size.topk(count).values[..., -1:]
    # numpy's takes a fifth of the time, or less; it has no bfloat16.
    wide = size if size.dtype in (torch.float32, torch.float64) else size.float()
    at = size.shape[-1] - count
    return torch.from_numpy(np.partition(wide.detach().numpy(), at, axis=-1)[..., at : at + 1]).to(size.dtype)


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    """A NaN counts as infinite."""
    return x.abs().nan_to_num_(torch.inf, torch.inf)


def _places_of_largest(x: torch.Tensor, count: int) -> torch.Tensor:
    """int64 ``[count]``, where the numbers of largest magnitude are, ascending; of equals the first."""
    places = native.largest(x, count)
    if places is not None:
        return places
    chosen = _largest(_magnitude(x), count)
    return torch.from_numpy(np.flatnonzero(chosen.numpy())) if chosen.is_cpu else chosen.nonzero().view(-1)
