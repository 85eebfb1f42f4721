"""Random numbers as a function of a seed and a round, so that agents draw the same ones without communication.

Only the raw output of numpy's Philox generator is used, which numpy guarantees for ever. Numbers derived from it
(``permutation``, ``integers``) may change from release to release, and agents with different releases would disagree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ._validate import as_int


def check_seed(seed: object) -> int:
    """A seed, 0 to 2**64 - 1."""
    checked = as_int(seed, "seed")
    if not 0 <= checked < 2**64:
        raise ValueError(f"seed is {checked}. Pass a whole number from 0 to 2**64 - 1, the same on every agent.")
    return checked


def raw(seed: int, round: int, count: int) -> NDArray[np.uint64]:
    """`count` uniform 64-bit numbers."""
    return np.random.Philox(key=np.array([seed, round], dtype=np.uint64)).random_raw(count)


def below(limit: int, seed: int, round: int, count: int) -> NDArray[np.int64]:
    """`count` whole numbers, uniform in 0 to limit - 1, but for a bias of at most limit / 2**64."""
    drawn: NDArray[np.int64] = (raw(seed, round, count) % np.uint64(limit)).astype(np.int64)
    return drawn


def uniform(seed: int, round: int, count: int) -> NDArray[np.float64]:
    """`count` floats, uniform in [0, 1)."""
    drawn: NDArray[np.float64] = (raw(seed, round, count) >> np.uint64(11)) * 2.0**-53
    return drawn


def permutation(size: int, seed: int, round: int) -> NDArray[np.int64]:
    """The ranks 0 to size - 1 in random order."""
    return np.argsort(raw(seed, round, size), kind="stable")
