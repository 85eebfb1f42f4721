"""EquiTopo: random shifts of the ranks, whose rate of consensus does not depend on the number of agents.

With a basis matrix ``A(u)`` every agent takes 1/n of itself and (n - 1)/n of the agent `u` behind it. The static graphs
are means of a few of them, the one-peer schedules draw a new one in each round.

Song, Li, Jin, Shi, Yan, Yin, Yuan 2022, "Communication-Efficient Topologies for Decentralized Learning with O(1)
Consensus Rate", arXiv:2210.07881.
"""

from __future__ import annotations

from math import ceil, gcd, log2

import numpy as np

from .. import _random
from .._validate import check_size
from ..schedule import Edges, EdgeSchedule, Ranks, one_peer
from .static import Circulant


class DEquiStatic(Circulant):
    """The mean of `degree` basis matrices with random shifts: directed, doubly stochastic, the same in every round.

    A draw whose graph is not connected is repeated, from the same seed, until it is: all of such few shifts may share a
    factor with n.

    Args:
        size: number of agents, at least 1.
        degree: M, how many shifts, drawn with repetition; by default ``ceil(log2 n)``.
        seed: 0 to 2**64 - 1, the same on every agent.

    Attributes:
        shifts: the drawn shifts, in the order of drawing.
    """

    _title = "D-EquiStatic"

    def __init__(self, size: int, degree: int | None = None, seed: int = 0) -> None:
        size = check_size(size)
        self.degree = max(1, ceil(log2(size))) if degree is None else check_size(degree, "degree")
        self.seed = _random.check_seed(seed)
        self.shifts = _connected_shifts(size, self.degree, self.seed)
        super().__init__(
            size, self._shares(size), f"{self._title} of {size} agents, degree {self.degree}, seed {self.seed}"
        )

    def _shares(self, size: int) -> dict[int, float]:
        shares = {0: 1.0 / size}
        for shift in self.shifts:
            shares[shift] = shares.get(shift, 0.0) + (size - 1) / size / len(self.shifts)
        return shares


class UEquiStatic(DEquiStatic):
    """:class:`DEquiStatic` and its transpose, averaged: symmetric, with up to twice as many neighbours."""

    _title = "U-EquiStatic"

    def _shares(self, size: int) -> dict[int, float]:
        shares: dict[int, float] = {}
        for shift, share in super()._shares(size).items():
            for step in (shift, -shift % size):
                shares[step] = shares.get(step, 0.0) + share / 2
        return shares


class _EquiDyn(EdgeSchedule):
    """One basis matrix a round, damped: ``(1 - eta) I + eta A(u)``."""

    period = None
    _title: str

    def __init__(self, size: int, eta: float = 0.5, seed: int = 0) -> None:
        self.size = check_size(size)
        self.eta = float(eta)
        if not 0 < self.eta <= 1:
            raise ValueError(f"eta is {eta}. Pass a number above 0 and up to 1; 0.5 is customary.")
        self.seed = _random.check_seed(seed)

    def _drawn(self, round: int) -> tuple[int, int]:
        """The shift of a round, and a rank."""
        draw = _random.raw(self.seed, round, 2).tolist()
        return 1 + draw[0] % (self.size - 1), draw[1] % self.size

    @property
    def _share(self) -> float:
        return self.eta * (self.size - 1) / self.size

    def describe(self) -> str:
        return f"{self._title} of {self.size} agents, eta {self.eta}, seed {self.seed}"


class ODEquiDyn(_EquiDyn):
    """One peer, directed: in a round every agent receives from the agent `u` behind it, u drawn for all from 1 to n -
    1.

    Args:
        size: number of agents, at least 1.
        eta: the damping, above 0 and up to 1.
        seed: 0 to 2**64 - 1, the same on every agent.
    """

    _title = "OD-EquiDyn"

    def _edges(self, round: int) -> Edges:
        everyone = np.arange(self.size)
        if self.size == 1:
            return one_peer(everyone)
        shift, _ = self._drawn(round)
        return one_peer((everyone - shift) % self.size, self._share)


class OUEquiDyn(_EquiDyn):
    """One peer, in pairs: from a random rank on, each that is still free takes the one `u` ahead if that is free too.

    An agent without a free partner stays out of the round. Symmetric.

    Args:
        size: number of agents, at least 1.
        eta: the damping, above 0 and up to 1.
        seed: 0 to 2**64 - 1, the same on every agent.
    """

    _title = "OU-EquiDyn"

    def _edges(self, round: int) -> Edges:
        if self.size == 1:
            return one_peer(np.arange(1))
        shift, first = self._drawn(round)
        return one_peer(_pairs_from(first, shift, self.size), self._share)


def _connected_shifts(size: int, degree: int, seed: int) -> tuple[int, ...]:
    """Shifts in 1 to size - 1, drawn again until steps of them lead everywhere."""
    if size == 1:
        return ()
    attempt = 0
    while True:
        shifts = (1 + _random.below(size - 1, seed, attempt, degree)).tolist()
        if gcd(size, *shifts) == 1:
            return tuple(shifts)
        attempt += 1


def _pairs_from(first: int, shift: int, size: int) -> Ranks:
    peers = list(range(size))
    for step in range(size):
        rank = (first + step) % size
        ahead = (rank + shift) % size
        if peers[rank] == rank and peers[ahead] == ahead:
            peers[rank], peers[ahead] = ahead, rank
    return np.array(peers, dtype=np.int64)
