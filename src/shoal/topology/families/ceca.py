"""CECA: the exact average of any number of agents in ceil(log2 n) rounds of one message each, with a second buffer.

No product of ceil(log2 n) one-peer mixing matrices is the exact average unless n is a power of two. CECA reaches it
because an agent keeps two vectors, the mean over a window of agents with its own value in it, and the mean without it,
and sends one of the two. When the windows have k others in them, receiving from the neighbour k or k + 1 further on
makes them windows of 2k or 2k + 1 others. The rounds follow the binary digits of n - 1 from the top, so the windows end
with all n - 1.

Ding, Jin, Ying, Yuan, Yin 2023, "DSGD-CECA: Decentralized SGD with Communication-Optimal Exact Consensus Algorithm",
arXiv:2306.00256.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._edges import Edges, Ranks, one_peer
from .._validate import check_round, check_size
from ..schedule import EdgeSchedule
from .one_peer import odd


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
