"""Schedules made of schedules: one inside every machine and one between machines, several by turns, and every H rounds.

Agents are numbered machine by machine, as launchers number them: with L on a machine, agent ``m * L + l`` is number `l`
on machine `m`. So a schedule of machines and a schedule of the agents on a machine make a schedule of all agents, whose
mixing matrix is the Kronecker product of theirs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import gcd, lcm

import numpy as np

from .._validate import as_int, check_round, check_size
from ..mixing import Mixing
from ..schedule import Edges, EdgeSchedule, Schedule, as_schedule, one_peer


class AllReduce(EdgeSchedule):
    """Everybody ends every round with the mean of all, ``W = 1 1^T / n``, which an all-reduce computes.

    Args:
        size: number of agents, at least 1.
    """

    period = 1

    def __init__(self, size: int) -> None:
        self.size = check_size(size)

    def _edges(self, round: int) -> Edges:
        everyone = np.arange(self.size)
        share = np.full(self.size**2, 1.0 / self.size)
        return Edges(np.repeat(everyone, self.size), np.tile(everyone, self.size), share)

    def mixing(self, round: int, rank: int) -> Mixing:
        # Not by way of the edges, of which there are n squared.
        _, rank = self._check(round, rank)
        others = [peer for peer in range(self.size) if peer != rank]
        return Mixing(rank, 1.0 / self.size, dict.fromkeys(others, 1.0 / self.size), others)

    def describe(self) -> str:
        return f"all-reduce of {self.size} agents"


class Idle(EdgeSchedule):
    """No messages, ``W = I``: for agents inside a machine while only machines exchange, and the reverse.

    Args:
        size: number of agents, at least 1.
    """

    period = 1

    def __init__(self, size: int) -> None:
        self.size = check_size(size)

    def _edges(self, round: int) -> Edges:
        return one_peer(np.arange(self.size))

    def describe(self) -> str:
        return f"{self.size} idle agents"


class Kronecker(EdgeSchedule):
    """One schedule between machines and one inside each, in the same round: ``W = W_between (x) W_inside``.

    Agent l of machine m takes ``W_between[m, m'] W_inside[l, l']`` of agent l' of machine m'. With an
    :class:`AllReduce` inside, every agent takes means of machines, as `hierarchical_neighbor_allreduce` does.
    The product over rounds is the Kronecker product of the products, exact as soon as both are.

    Args:
        between: a schedule whose agents are the machines.
        inside: a schedule whose agents are those on one machine, the same on each.
    """

    def __init__(self, between: Schedule, inside: Schedule) -> None:
        self.between, self.inside = between, inside = as_schedule(between), as_schedule(inside)
        self.size = between.size * inside.size
        self.period = _common_period(between, inside)

    def _edges(self, round: int) -> Edges:
        outer, inner = self.between.edges(round), self.inside.edges(round)
        local = self.inside.size
        destination = (outer.destination[:, None] * local + inner.destination).ravel()
        source = (outer.source[:, None] * local + inner.source).ravel()
        order = np.argsort(destination * self.size + source)
        weight = np.outer(outer.weight, inner.weight).ravel()
        return Edges(destination[order], source[order], weight[order])

    def describe(self) -> str:
        return f"({self.between.describe()}) between machines, ({self.inside.describe()}) inside each"


def between_machines(schedule: Schedule, agents_per_machine: int) -> Kronecker:
    """The agents with the same number on each machine run a schedule of machines; there are no messages inside
    machines.
    """
    return Kronecker(schedule, Idle(check_size(agents_per_machine, "agents_per_machine")))


def inside_machines(schedule: Schedule, machines: int) -> Kronecker:
    """Every machine runs a schedule among its agents; there are no messages between machines."""
    return Kronecker(Idle(check_size(machines, "machines")), schedule)


class _ByTurns(Schedule):
    """The part of schedules whose rounds each belong to one of several others."""

    @abstractmethod
    def _at_round(self, round: int) -> tuple[Schedule, int]:
        """The schedule that a round belongs to, and which of its own rounds it is."""

    def mixing(self, round: int, rank: int) -> Mixing:
        whose, number = self._at_round(round)
        return whose.mixing(number, rank)

    def edges(self, round: int) -> Edges:
        whose, number = self._at_round(round)
        return whose.edges(number)


class Alternating(_ByTurns):
    """Several schedules by turns: round t belongs to number ``t mod k``, which sees its own rounds without gaps.

    Args:
        schedules: k of them, at least one, of the same number of agents.

    Raises:
        ValueError: none, or of different sizes.
    """

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self.schedules = tuple(map(as_schedule, schedules))
        if not self.schedules:
            raise ValueError("there is no schedule to take turns with. Pass at least one.")
        self.size = _common_size(*self.schedules)
        common = _common_period(*self.schedules)
        self.period = None if common is None else len(self.schedules) * common

    def _at_round(self, round: int) -> tuple[Schedule, int]:
        number, index = divmod(check_round(round), len(self.schedules))
        return self.schedules[index], number

    def describe(self) -> str:
        return f"by turns ({'), ('.join(schedule.describe() for schedule in self.schedules)})"


class EveryH(_ByTurns):
    """A schedule whose every H-th round, H - 1 being the first, belongs to another one; each sees its own without gaps.

    With an :class:`AllReduce` as the rare one it is the schedule of Gossip-PGA (Chen et al. 2021, arXiv:2105.09080),
    and exact after H rounds.

    Args:
        often: the schedule of the other rounds.
        rarely: the schedule of every H-th round, of the same number of agents.
        every: H, at least 1; with 1 there is but the rare one.

    Raises:
        ValueError: the two are of different sizes.
    """

    def __init__(self, often: Schedule, rarely: Schedule, every: int) -> None:
        self.often, self.rarely = often, rarely = as_schedule(often), as_schedule(rarely)
        self.every = as_int(every, "every")
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}. Pass the number of rounds H.")
        self.size = _common_size(often, rarely)
        self.period = self._blocks_times_h()

    def _blocks_times_h(self) -> int | None:
        between = self.every - 1
        if self.rarely.period is None or (between and self.often.period is None):
            return None
        blocks = 1 if not between or self.often.period is None else self.often.period // gcd(self.often.period, between)
        return self.every * lcm(blocks, self.rarely.period)

    def _at_round(self, round: int) -> tuple[Schedule, int]:
        block, place = divmod(check_round(round), self.every)
        if place == self.every - 1:
            return self.rarely, block
        return self.often, block * (self.every - 1) + place

    def describe(self) -> str:
        return f"({self.often.describe()}), and every {self.every} rounds ({self.rarely.describe()})"


def _common_size(*schedules: Schedule) -> int:
    sizes = sorted({schedule.size for schedule in schedules})
    if len(sizes) > 1:
        raise ValueError(
            f"schedules of {' and '.join(map(str, sizes))} agents do not go together. Make them for as many agents, or "
            "use Kronecker for one between machines and one inside."
        )
    return sizes[0]


def _common_period(*schedules: Schedule) -> int | None:
    periods = [schedule.period for schedule in schedules]
    known = [period for period in periods if period is not None]
    return lcm(*known) if len(known) == len(periods) else None
