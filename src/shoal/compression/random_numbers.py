"""Random numbers for messages: a hash of a key and the index, so that any range of them can be computed separately."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from ..kernels import native

_STEP = -7046029254386353131
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685
_WINDOW = 1 << 15
"""Numbers whose hashes are computed at a time, few enough to stay in the cache; at most 2^30."""
_53_BITS, _64_BITS = (1 << 53) - 1, (1 << 64) - 1


class Draws(Protocol):
    """The source of random numbers: :class:`shoal.algorithms.Mix`."""

    def uniform(self, like: torch.Tensor) -> torch.Tensor:
        """In [0, 1), shape and dtype of ``like``."""
        ...


class DrawStream(Protocol):
    """The numbers of one call of :meth:`Draws.uniform`, one range of a row at a time."""

    def fill(self, row: int, start: int, out: torch.Tensor) -> torch.Tensor:
        """``out`` ``[n]`` becomes what a row has from place ``start`` on."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """Draws that need not draw all numbers of a message at once."""

    def stream(self, like: torch.Tensor) -> DrawStream:
        """Counts as a call of :meth:`Draws.uniform`, and has the same numbers; rows as in ``like.view(-1, d)``."""
        ...


def stream_of(draws: Draws, like: torch.Tensor) -> DrawStream:
    """The numbers of ``draws.uniform(like)``; only shape, dtype and device of ``like`` count."""
    return draws.stream(like) if isinstance(draws, Streaming) else _Drawn(draws.uniform(like))


class _Drawn:
    """Numbers that are there."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._rows = numbers.reshape(-1, numbers.shape[-1])

    def fill(self, row: int, start: int, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(self._rows[row, start : start + len(out)])


class HashStream:
    """Numbers that are a hash of the row's key and the place.

    Args:
        keys: int64 ``[n, 1]`` or ``[1]``, one for each row, or one for all.
        like: ``[..., d]``, whose rows these are.
    """

    def __init__(self, keys: torch.Tensor, like: torch.Tensor) -> None:
        self._keys, self._like = keys, like
        self._hash: _PlaceHash | None = None

    def whole(self) -> torch.Tensor:
        """Shape and dtype of ``like`` (if that has a row for each key)."""
        bits = (hashed(self._keys + torch.arange(self._like.shape[-1], device=self._like.device)) >> 11) & _53_BITS
        return _between_0_and_1(bits, torch.empty(bits.shape, dtype=self._like.dtype, device=bits.device))

    def key(self, row: int) -> int:
        """The key of the first number of a row; each next number has the next key."""
        return int(self._keys_of_rows()[row])

    def _keys_of_rows(self) -> torch.Tensor:
        return self._keys.expand(*self._like.shape[:-1], 1).reshape(-1)

    def fill(self, row: int, start: int, out: torch.Tensor) -> torch.Tensor:
        if not out.is_cpu:
            keys = self._keys_of_rows()[row] + start + torch.arange(len(out), device=out.device)
            return _between_0_and_1((hashed(keys) >> 11) & _53_BITS, out)
        key = self.key(row) + start
        if native.uniform(out, key):
            return out
        self._hash = self._hash or _PlaceHash()
        for at, bits in self._hash.stretches(key, len(out)):
            _between_0_and_1(bits, out[at : at + len(bits)])
        return out


def drawn(seed: int, round_: int, time: int, agents: torch.Tensor, like: torch.Tensor) -> HashStream:
    """The ``time``-th draw of agents in a round, counted from 1. It depends only on the arguments, so any agent can
    repeat it.

    Args:
        agents: int64, the ranks: ``[n, 1]`` or ``[1]``, on the device of ``like``.
        like: ``[..., d]``.
    """
    key = hashed(hashed(torch.tensor(seed, device="cpu")) + round_)
    key = hashed(key + time)
    return HashStream(hashed(key.to(like.device) + agents), like)


class Redrawn:
    """Repeats the draws of one agent in a round, for the receivers of its messages.

    Args:
        rank: The agent.
        times: How often it had drawn before.
    """

    def __init__(self, seed: int, round_: int, rank: int, times: int = 0) -> None:
        self._seed, self._round, self._rank, self._times = seed, round_, rank, times

    def uniform(self, like: torch.Tensor) -> torch.Tensor:
        return self.stream(like).whole()

    def stream(self, like: torch.Tensor) -> HashStream:
        self._times += 1
        return drawn(self._seed, self._round, self._times, torch.tensor([self._rank], device=like.device), like)


def hashed(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) on int64, which wraps as uint64 would."""
    z = z + _STEP
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _FIRST
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _SECOND
    return z ^ ((z >> 31) & ((1 << 33) - 1))


class _PlaceHash:
    """The upper 53 bits of ``hashed(key + place)`` for many places.

    In numpy, whose unsigned shifts need no masks. Places are taken in windows where the upper bits of ``key + place``
    are the same, and so is what they do to the lower ones at first.
    """

    def __init__(self) -> None:
        self._places = np.arange(_WINDOW, dtype=np.uint64)
        self._z, self._shifted = np.empty_like(self._places), np.empty_like(self._places)

    def stretches(self, key: int, n: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Ranges of the numbers: the begin of each, and int64 numbers, whose memory the next range overwrites."""
        at = 0
        while at < n:
            first = (key + at + _STEP) & _64_BITS
            offset = first % _WINDOW
            count = min(n - at, _WINDOW - offset)
            yield at, self._bits(first - offset, slice(offset, offset + count))
            at += count

    def _bits(self, upper: int, where: slice) -> torch.Tensor:
        z, shifted = self._z[where], self._shifted[where]
        np.bitwise_xor(self._places[where], np.uint64(upper ^ (upper >> 30)), out=z)
        z *= np.uint64(_FIRST & _64_BITS)
        z ^= np.right_shift(z, np.uint64(27), out=shifted)
        z *= np.uint64(_SECOND & _64_BITS)
        z ^= np.right_shift(z, np.uint64(31), out=shifted)
        z >>= np.uint64(11)
        return torch.from_numpy(z.view(np.int64))


def _between_0_and_1(bits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out`` becomes ``bits / 2^53``, rounded once for float32; rounding makes no one of them."""
    wide = out if out.dtype in (torch.float32, torch.float64) else torch.empty_like(out, dtype=torch.float32)
    wide.copy_(bits).mul_(2.0**-53).clamp_(max=1 - torch.finfo(out.dtype).eps / 2)
    return wide if wide is out else out.copy_(wide)
