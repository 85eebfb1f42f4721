"""Schedules that reach the exact average after finitely many rounds, for any number of agents: Base-(k+1) graphs, CECA.

The hyper-hypercube averages along one digit of the rank after the other, and needs a number of agents without large
prime factors. The simple Base-(k+1) graph cuts other numbers into parts that have hyper-hypercubes and lets the parts
exchange; the Base-(k+1) graph does so only for the factor that needs it. All of them are symmetric, and of any degree.

Takezawa, Sato, Bao, Niwa, Yamada 2023, "Beyond Exponential Graph: Communication-Efficient Topologies for Decentralized
Learning via Finite-time Convergence", arXiv:2305.11420: algorithms 1, 2 and 3.

CECA takes ceil(log2 n) rounds of one message each, with a second buffer. No product of ceil(log2 n) one-peer mixing
matrices is the exact average unless n is a power of two. CECA reaches it because an agent keeps two vectors, the mean
over a window of agents with its own value in it, and the mean without it, and sends one of the two. When the windows
have k others in them, receiving from the neighbour k or k + 1 further on makes them windows of 2k or 2k + 1 others. The
rounds follow the binary digits of n - 1 from the top, so the windows end with all n - 1.

Ding, Jin, Ying, Yuan, Yin 2023, "DSGD-CECA: Decentralized SGD with Communication-Optimal Exact Consensus Algorithm",
arXiv:2306.00256.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._validate import check_round, check_size
from ..schedule import Edges, EdgeSchedule, Ranks, Schedule, one_peer, symmetric
from .graphs import odd

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


@dataclass(frozen=True)
class CecaState:
    """The state of an agent between two rounds: arrays or tensors of one shape and floating dtype.

    Attributes:
        mean: over the window, the agent's own value among them; after the last round the exact mean of all.
        others: over the window without its own value. Any finite value before the first round, because its weight is
            zero.
    """

    mean: Any
    others: Any


@dataclass(frozen=True)
class CecaStep:
    """The step of every agent in one round.

    Attributes:
        window: k, the others in the window before the round.
        doubles_up: whether the window grows to ``2 k + 1`` others, by means with the neighbour's own value in them; if
            not, to ``2 k``, by means without.
    """

    window: int
    doubles_up: bool

    @property
    def kept_of_mean(self) -> float:
        """The share of ``mean`` that is kept; the rest is the received vector's."""
        return 0.5 if self.doubles_up else (self.window + 1) / (2 * self.window + 1)

    @property
    def kept_of_others(self) -> float:
        """The share of ``others`` that is kept; the rest is the received vector's."""
        return self.window / (2 * self.window + 1) if self.doubles_up else 0.5

    def message(self, held: CecaState) -> Any:
        """The vector to send."""
        return held.mean if self.doubles_up else held.others

    def update(self, held: CecaState, received: Any) -> CecaState:
        """The new state, from the vector `received`."""
        return CecaState(
            self.kept_of_mean * held.mean + (1 - self.kept_of_mean) * received,
            self.kept_of_others * held.others + (1 - self.kept_of_others) * received,
        )


class _Ceca(EdgeSchedule):
    """The part that does not depend on the edges.

    Attributes:
        steps: the steps of a period, one for each round.
    """

    _title: str

    def __init__(self, size: int) -> None:
        self.size = check_size(size)
        self.steps = _steps(self.size)
        self.period = max(1, len(self.steps))

    @abstractmethod
    def sources(self, round: int) -> Ranks:
        """The source of each agent in a round, int64 [n]; a single agent is its own source."""

    def start(self, value: Any) -> CecaState:
        """The state before the first round of a period, for one agent's value."""
        return CecaState(value, value)

    def average(self, values: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
        """A whole period for all agents at once, in memory: every row of [n, ...] becomes the mean of the rows."""
        held = self.start(values)
        for round, step in enumerate(self.steps):
            held = step.update(held, step.message(held)[self.sources(round)])
        result: NDArray[np.floating[Any]] = held.mean
        return result

    def buffered_matrix(self, round: int) -> NDArray[np.float64]:
        """A round as a matrix of ``[mean; others]``, float64 [2 n, 2 n].

        Their product over a period has 1/n in the left half of its upper half, and nothing in the right half of it.
        """
        if not self.steps:
            return np.eye(2)
        round = check_round(round) % len(self.steps)
        step = self.steps[round]
        received = np.eye(self.size)[self.sources(round)]
        sent = np.concatenate([received, 0 * received] if step.doubles_up else [0 * received, received], axis=1)
        own = np.eye(2 * self.size)
        kept = np.repeat([step.kept_of_mean, step.kept_of_others], self.size)[:, None]
        mixed: NDArray[np.float64] = kept * own + (1 - kept) * np.concatenate([sent, sent])
        return mixed

    @property
    @abstractmethod
    def needs_second_buffer(self) -> bool:
        """Whether the plain product of a period's W is another matrix than the mean of all.

        Where it is not, the schedule alone is exact after ``ceil(log2 n)`` rounds: also in training, which mixes
        parameters by W and has no second buffer.
        """

    def _edges(self, round: int) -> Edges:
        if not self.steps:
            return one_peer(np.arange(1))
        return one_peer(self.sources(round), 1 - self.steps[round].kept_of_mean)

    def describe(self) -> str:
        return f"{self._title} of {self.size} agents"


class Ceca(_Ceca):
    """CECA with two ports: in a round an agent sends to one agent and receives from another, for any number of agents.

    Used as an ordinary schedule, as in training, it gives the edges and the weights with which the means are updated:
    doubly stochastic, and exact after a period only if n is a power of two. For other n, agents agree gradually: six
    agents need 16 rounds to 1e-3, not 3. The exact mean needs the second buffer::

        held = ceca.start(x)
        for round, step in enumerate(ceca.steps):
            who = ceca.mixing(round, rank)
            received = shoal.neighbor_allreduce(
                step.message(held),
                self_weight=0.0,
                src_weights=dict.fromkeys(who.source_ranks, 1.0),
                dst_weights=dict.fromkeys(who.destination_ranks, 1.0),
            )
            held = step.update(held, received)
        mean = held.mean

    Args:
        size: number of agents, at least 1.
    """

    _title = "CECA-2P"

    @property
    def needs_second_buffer(self) -> bool:
        return _odd_part(self.size) != 1

    def sources(self, round: int) -> Ranks:
        if not self.steps:
            return np.arange(1)
        step = self.steps[round]
        return (np.arange(self.size) - step.window - step.doubles_up) % self.size


class CecaPairs(_Ceca):
    """CECA with one port: in a round agents exchange in pairs; for an even number. Used as :class:`Ceca` is.

    The windows of even ranks reach ahead and those of odd ranks behind, and pairs are ``2 k + 1`` apart.

    For 2, 4, 8, 16, ... and for 6, 12, 24, 48, ... agents the schedule alone, without the second buffer, is exact after
    its ceil(log2 n) rounds, so that training has it, too. For other numbers, such as 10, the second buffer is needed.

    Args:
        size: number of agents, even; one agent alone is left alone.

    Raises:
        ValueError: `size` is odd.
    """

    _title = "CECA-1P"

    @property
    def needs_second_buffer(self) -> bool:
        return _odd_part(self.size) not in (1, 3)

    def __init__(self, size: int) -> None:
        reason = odd(check_size(size))
        if reason:
            raise ValueError(f"{reason} Ceca, with two ports, is exact for any number.")
        super().__init__(size)

    def sources(self, round: int) -> Ranks:
        if not self.steps:
            return np.arange(1)
        everyone = np.arange(self.size)
        apart = 2 * self.steps[round].window + 1
        return np.where(everyone % 2 == 0, everyone + apart, everyone - apart) % self.size


def _steps(size: int) -> tuple[CecaStep, ...]:
    steps = []
    window = 0
    for digit in f"{size - 1:b}" if size > 1 else "":
        steps.append(CecaStep(window, digit == "1"))
        window = 2 * window + (digit == "1")
    return tuple(steps)


def _odd_part(size: int) -> int:
    """`size` without its factors of two."""
    return size // (size & -size)
