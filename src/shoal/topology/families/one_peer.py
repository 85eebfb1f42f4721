"""Schedules in which an agent sends to one other in a round, so the cost is one message for any number of agents.

All but :class:`OnePeerGrid` give each of the two values the weight 1/2. A round is a permutation of the ranks, so
sends, receives and weights balance by themselves.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import lcm

import numpy as np

from .. import _random
from .._validate import check_round, check_size
from ..schedule import Edges, EdgeSchedule, Ranks, Schedule, assemble, one_peer
from .finite_time import BaseGraph
from .graphs import check_shape, closest_factors, odd


class OnePeer(EdgeSchedule):
    """In a round, agent i and its source have equal weight; an agent that is its own source stays out of the round.

    A subclass defines :meth:`_sources`.
    """

    @abstractmethod
    def _sources(self, round: int) -> Ranks:
        """The source of each agent in a round, which is below the period if there is one: a permutation, int64 [n]."""

    def _edges(self, round: int) -> Edges:
        return one_peer(self._sources(round))


class OnePeerExponential(OnePeer):
    """In round t every agent sends to the agent ``2**(t mod ceil(log2 n))`` ahead.

    Exact after one period if n is a power of two, and never otherwise (Ying et al. 2021, "Exponential Graph is Provably
    Efficient", arXiv:2110.13363, lemma 1 and remark 4). Directed and doubly stochastic.

    Args:
        size: number of agents, at least 1.
    """

    period: int

    def __init__(self, size: int) -> None:
        self.size = check_size(size)
        self.period = max(1, (self.size - 1).bit_length())

    def _sources(self, round: int) -> Ranks:
        sources: Ranks = (np.arange(self.size) - 2**round) % self.size
        return sources

    def hop_shares(self, round: int) -> dict[int, float]:
        hop = 2 ** (check_round(round) % self.period)
        return {0: 0.5, hop: 0.5} if hop < self.size else {0: 1.0}

    def describe(self) -> str:
        return f"one-peer exponential graph of {self.size} agents"


class OnePeerHypercube(OnePeer):
    """In round t agents i and ``i XOR 2**(t mod log2 n)`` average: exact after log2 n rounds, and symmetric.

    Every round consists of pairs, so if an agent is lost, its partner can continue alone without a bias for the rest.

    Args:
        size: number of agents, a power of two.

    Raises:
        ValueError: `size` is not a power of two.
    """

    def __init__(self, size: int) -> None:
        self.size = check_size(size)
        reason = not_a_power_of_two(self.size)
        if reason:
            raise ValueError(reason)
        self.period = max(1, (self.size - 1).bit_length())

    def _sources(self, round: int) -> Ranks:
        everyone = np.arange(self.size)
        return everyone ^ 2**round if self.size > 1 else everyone

    def among(self, left: Sequence[int]) -> Schedule:
        return BaseGraph(len(left))

    def describe(self) -> str:
        return f"one-peer hypercube of {self.size} agents"


class ShiftOne(OnePeer):
    """BAGUA's default peer selection: two halves of the agents, paired in each round with a shift that grows by one.

    In round t agent ``i < n/2`` averages with ``n/2 + (i + t) mod n/2``, so that after n/2 rounds each has met all
    agents of the other half and none of its own (Gan et al. 2021, "BAGUA", arXiv:2107.01499; there it is called
    "shift_one").

    Args:
        size: number of agents, even; a single agent is idle.

    Raises:
        ValueError: `size` is odd.
    """

    def __init__(self, size: int) -> None:
        self.size = check_size(size)
        reason = odd(self.size)
        if reason:
            raise ValueError(reason)
        self.period = max(1, self.size // 2)

    def _sources(self, round: int) -> Ranks:
        half = self.size // 2
        if half == 0:
            return np.arange(self.size)
        lower = np.arange(half)
        return np.concatenate([half + (lower + round) % half, (lower - round) % half])

    def describe(self) -> str:
        return f"shift-one of {self.size} agents"


class RandomMatchings(OnePeer):
    """In every round all agents are paired at random, by a draw of each agent from a shared seed.

    The expected squared distance from consensus shrinks by ``1 - n / (2 (n - 1))`` a round (n even), for any n:
    averaging removes half of a pair's difference. With an odd number one agent, drawn too, is idle.

    Args:
        size: number of agents, at least 1.
        seed: 0 to 2**64 - 1, the same on every agent.
    """

    period = None

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = check_size(size)
        self.seed = _random.check_seed(seed)

    def _sources(self, round: int) -> Ranks:
        order = _random.permutation(self.size, self.seed, round)
        pairs = order[: self.size // 2 * 2].reshape(-1, 2)
        sources = np.arange(self.size)
        sources[pairs] = pairs[:, ::-1]
        return sources

    def describe(self) -> str:
        return f"random matchings of {self.size} agents, seed {self.seed}"


class RingRandom(OnePeer):
    """In every round each even rank averages with the odd rank `h` ahead, or `h` behind: one draw for all.

    The hop h is drawn from 1 and ``2**i + 1`` for i = 1, 2, ... as far as it is below n, and so is the direction. Hops
    are odd, so an even rank, which is active, always meets an odd one, which is passive: waits cannot form a cycle
    (Lian et al. 2018, "Asynchronous Decentralized Parallel SGD", arXiv:1710.06952, which the Ring-Star paper, Jameel et
    al. 2019, compares with). The latter prints the hops as "2i + 1"; those would need O(n) rounds to reach all agents,
    and 2**0 + 1 would be even.

    Args:
        size: number of agents, even; a single agent is idle.
        seed: 0 to 2**64 - 1, the same on every agent.

    Attributes:
        hops: the hops of the draw, ascending.

    Raises:
        ValueError: `size` is odd.
    """

    period = None

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = check_size(size)
        reason = odd(self.size)
        if reason:
            raise ValueError(reason)
        self.seed = _random.check_seed(seed)
        self.hops = tuple(hop for hop in (1, *(2**i + 1 for i in range(1, self.size.bit_length()))) if hop < self.size)

    def _sources(self, round: int) -> Ranks:
        everyone = np.arange(self.size)
        if self.size == 1:
            return everyone
        draw = int(_random.below(2 * len(self.hops), self.seed, round, 1)[0])
        ahead = self.hops[draw // 2] * (1 if draw % 2 else -1)
        sources: Ranks = np.where(everyone % 2 == 0, everyone + ahead, everyone - ahead) % self.size
        return sources

    def describe(self) -> str:
        return f"RingRandom of {self.size} agents, seed {self.seed}"


class OnePeerGrid(EdgeSchedule):
    """In round t every agent sends to one neighbour on a grid: the ``t mod d``-th of its d, clockwise by rank.

    The schedule of listing 7 of the BlueFog paper (Ying et al. 2021, arXiv:2111.04287), and the sequence of
    :func:`~shoal.topology.GetDynamicOnePeerSendRecvRanks` on :func:`~shoal.topology.MeshGrid2DGraph`. Agents at the
    border have fewer neighbours, so an agent receives from several in some rounds, and from none in others. Each round
    is row-stochastic only; push-sum algorithms share equally between an agent and its destination, as the listing does.

    Args:
        size: number of agents, at least 1.
        shape: (rows, columns) with ``rows * columns == size``; by default as near to a square as can be.

    Raises:
        ValueError: the shape does not have ``size`` places.
    """

    period: int

    def __init__(self, size: int, shape: tuple[int, int] | None = None) -> None:
        self.size = check_size(size)
        self._shape = rows, columns = closest_factors(self.size) if shape is None else check_shape(shape, self.size)
        everyone = np.arange(self.size)
        column = everyone % columns
        self._hops = np.array([1, columns, -columns, -1]) % self.size  # right, down, up, left: clockwise
        self._linked = np.stack(
            [column < columns - 1, everyone < (rows - 1) * columns, everyone >= columns, column > 0], axis=1
        )
        self._degree = self._linked.sum(axis=1)
        self.period = lcm(*np.unique(np.maximum(self._degree, 1)).tolist())

    def _edges(self, round: int) -> Edges:
        everyone = np.arange(self.size)
        turn = round % np.maximum(self._degree, 1)
        chosen = self._linked & (self._linked.cumsum(axis=1) == turn[:, None] + 1)
        destination = (everyone + chosen @ self._hops) % self.size
        equal = 1.0 / (1.0 + np.bincount(destination[destination != everyone], minlength=self.size))
        sent = np.where(destination == everyone, 0.0, equal[destination])  # a single agent sends nothing
        ends = np.concatenate([destination, everyone]), np.concatenate([everyone, everyone])
        return assemble(self.size, *ends, np.concatenate([sent, equal]))

    def describe(self) -> str:
        rows, columns = self._shape
        return f"one-peer grid [{rows} x {columns}] of {self.size} agents"


def not_a_power_of_two(size: int) -> str:
    """Why there is no hypercube of this size; empty if there is."""
    if size & (size - 1) == 0:
        return ""
    return f"a hypercube needs a power of two, and {size} is none. base-2 is as cheap and exact for every number."
