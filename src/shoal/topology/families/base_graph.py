"""Schedules that reach the exact average after finitely many rounds, for any number of agents and any degree.

The hyper-hypercube averages along one digit of the rank after the other, and needs a number of agents without large
prime factors. The simple Base-(k+1) graph cuts other numbers into parts that have hyper-hypercubes and lets the parts
exchange; the Base-(k+1) graph does so only for the factor that needs it. All of them are symmetric.

Takezawa, Sato, Bao, Niwa, Yamada 2023, "Beyond Exponential Graph: Communication-Efficient Topologies for Decentralized
Learning via Finite-time Convergence", arXiv:2305.11420: algorithms 1, 2 and 3.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from .._edges import Edges, Ranks, symmetric
from .._validate import check_size
from ..schedule import EdgeSchedule, Schedule

Exchanges = tuple[Ranks, Ranks, NDArray[np.float64]]
"""Pairs of agents and the weight of the exchange between the two, three arrays [pairs]."""

Plan = list[list[Exchanges]]
"""A list of rounds; no agent is in two exchanges of a round."""


class _Planned(EdgeSchedule):
    """Rounds that are planned when the schedule is made, and then repeat.

    Attributes:
        peers: k, the most agents that one exchanges with in a round.
    """

    def __init__(self, size: int, peers: int = 1) -> None:
        self.size = check_size(size)
        self.peers = check_size(peers, "peers")
        self._rounds = self._plan(np.arange(self.size)[None, :]) or [[]]
        self.period = len(self._rounds)

    @abstractmethod
    def _plan(self, everyone: Ranks) -> Plan:
        """The rounds of one period, of the one group of all agents."""

    def _edges(self, round: int) -> Edges:
        nobody = np.empty(0, dtype=np.int64)
        parts = [(nobody, nobody, np.empty(0)), *self._rounds[round]]
        first, second, weight = (np.concatenate(column) for column in zip(*parts, strict=True))
        return symmetric(self.size, first, second, weight)


class HyperHypercube(_Planned):
    """Exact in as many rounds as n has factors of at most k + 1: in each, groups of one factor average completely.

    With ``k = 1`` it is the one-peer hypercube.

    Args:
        size: number of agents, without a prime factor above ``peers + 1``.
        peers: k, at least 1: with how many others an agent exchanges in a round at most.

    Raises:
        ValueError: `size` has a larger prime factor.
    """

    def __init__(self, size: int, peers: int = 2) -> None:
        reason = no_hyper_hypercube(check_size(size), check_size(peers, "peers"))
        if reason:
            raise ValueError(reason)
        super().__init__(size, peers)

    def _plan(self, everyone: Ranks) -> Plan:
        return _hyper_hypercube(everyone, self.peers)

    def among(self, left: Sequence[int]) -> Schedule:
        return BaseGraph(len(left), self.peers)

    def describe(self) -> str:
        return f"hyper-hypercube of {self.size} agents, at most {self.peers} peers"


class SimpleBaseGraph(_Planned):
    """The simple Base-(k+1) graph (algorithm 2): exact for any n in at most ``2 log(n) / log(k + 1) + 2`` rounds.

    Args:
        size: number of agents, at least 1.
        peers: k, at least 1: with how many others an agent exchanges in a round at most.
    """

    def _plan(self, everyone: Ranks) -> Plan:
        return _simple_base(everyone, self.peers)

    def among(self, left: Sequence[int]) -> Schedule:
        return SimpleBaseGraph(len(left), self.peers)

    def describe(self) -> str:
        return f"simple Base-{self.peers + 1} graph of {self.size} agents"


class BaseGraph(_Planned):
    """The Base-(k+1) graph (algorithm 3): as :class:`SimpleBaseGraph` and never longer. ``k = 1`` exchanges in pairs.

    Args:
        size: number of agents, at least 1.
        peers: k, at least 1: with how many others an agent exchanges in a round at most.
    """

    def _plan(self, everyone: Ranks) -> Plan:
        return min((_simple_base(everyone, self.peers), _factored(everyone, self.peers)), key=len)

    def among(self, left: Sequence[int]) -> Schedule:
        return BaseGraph(len(left), self.peers)

    def describe(self) -> str:
        return f"Base-{self.peers + 1} graph of {self.size} agents"


def no_hyper_hypercube(size: int, peers: int = 2) -> str:
    """Why there is no hyper-hypercube of these agents; empty if there is."""
    rough = size // _smooth_part(size, peers + 1)
    if rough == 1:
        return ""
    return (
        f"a hyper-hypercube of at most {peers} peers needs a number without prime factors above {peers + 1}, and "
        f"{size} has the factor {rough}. base-{peers + 1} is exact for every number."
    )


def _hyper_hypercube(groups: Ranks, peers: int) -> Plan:
    """For groups of agents, int64 [groups, agents of each], all at the same time; so are the plans below."""
    count, size = groups.shape
    factors = _fewest_factors(size, peers + 1)
    places = groups.reshape(count, *factors)
    plan: Plan = []
    for axis, factor in enumerate(factors, start=1):
        averaging = np.moveaxis(places, axis, -1).reshape(-1, factor)
        first, second = np.triu_indices(factor, k=1)
        pairs = averaging[:, first].ravel(), averaging[:, second].ravel()
        plan.append([(*pairs, np.full(len(pairs[0]), 1.0 / factor))])
    return plan


def _simple_base(groups: Ranks, peers: int) -> Plan:
    count, size = groups.shape
    if _smooth_part(size, peers + 1) == size:
        return _hyper_hypercube(groups, peers)
    parts = _split_by_digits(groups, peers + 1)
    plan = _side_by_side(_hyper_hypercube(part.reshape(count, -1), peers) for part in parts)
    return plan + _side_by_side(_send_results(parts[first:], peers, wait=first) for first in range(len(parts) - 1))


def _send_results(parts: list[Ranks], peers: int, wait: int) -> Plan:
    """All later parts exchange with the first, which then averages in itself.

    Each later agent takes as much of the first part's mean as that part has of all these agents. It does so by one
    exchange with each of the rows that the first part consists of, so that each of the rows has the overall mean.
    """
    first = parts[0]
    count, rows, columns = first.shape
    later = np.concatenate([part.reshape(count, 1, -1) for part in parts[1:]], axis=2)
    waiting = later.shape[2]
    weight = columns / (rows * columns + waiting)
    ends = first[:, :, :waiting].ravel(), np.repeat(later, rows, axis=1).ravel()
    exchange = (*ends, np.full(len(ends[0]), weight))
    return [*([] for _ in range(wait)), [exchange], *_hyper_hypercube(first.reshape(-1, columns), peers)]


def _factored(groups: Ranks, peers: int) -> Plan:
    """n = p q, with p the factors that a hyper-hypercube can take: p simple Base graphs of q agents, and it on top."""
    count, size = groups.shape
    smooth = _smooth_part(size, peers + 1)
    parts = groups.reshape(count, smooth, -1)
    across = parts.swapaxes(1, 2).reshape(-1, smooth)
    return _simple_base(parts.reshape(-1, size // smooth), peers) + _hyper_hypercube(across, peers)


def _side_by_side(plans: Iterable[Plan]) -> Plan:
    """Plans of agents of their own, at the same time; or ones whose rounds do not collide."""
    return [[part for parts in rounds for part in parts] for rounds in zip_longest(*plans, fillvalue=[])]


def _split_by_digits(groups: Ranks, base: int) -> list[Ranks]:
    """A part for each nonzero digit of n, the highest first: digit a of ``base**p`` is a part [groups, a, base**p]."""
    count, size = groups.shape
    powers = [1]
    while powers[-1] * base <= size:
        powers.append(powers[-1] * base)
    parts = []
    begin = 0
    for power in reversed(powers):
        rows = (size - begin) // power
        if rows:
            parts.append(groups[:, begin : begin + rows * power].reshape(count, rows, power))
        begin += rows * power
    return parts


def _smooth_part(size: int, limit: int) -> int:
    """The largest divisor of `size` whose prime factors are at most `limit`."""
    rest = size
    for factor in range(2, min(limit, size) + 1):
        while rest % factor == 0:
            rest //= factor
    return size // rest


@lru_cache(maxsize=4096)
def _fewest_factors(size: int, limit: int) -> tuple[int, ...]:
    """`size`, which has no larger prime factor, as a product of as few numbers of at most `limit` as possible."""
    if size == 1:
        return ()
    firsts = [factor for factor in range(min(limit, size), 1, -1) if size % factor == 0]
    rests = [(factor, size // factor) for factor in firsts if _smooth_part(size // factor, limit) == size // factor]
    return min(((factor, *_fewest_factors(rest, limit)) for factor, rest in rests), key=len)
