"""The clock of a stacked run: the time of its steps on a network, from the algorithm's actual messages.

Simulating every step of a long run would take longer than the run. So some periods are simulated for each communication
pattern of a step, and the others are assumed to repeat the later ones. If agents are alike that is exact. If some are
slower, agents drift apart and their traffic interferes differently in every period.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..netmodel.messages import Messages, Step, direct_allreduce, hierarchical, messages_of_round, tree_allreduce
from ..netmodel.network import Floats, Network
from ..netmodel.simulation import simulate
from ..topology.schedule import Schedule

_PERIODS = 4
"""That are played at first; more, if agents still drift apart at their end."""
_MOST_ROUNDS = 96
_AFFORDABLE = 200_000
"""Agents times exchanges that are played; about ten microseconds each."""
_MOST_DIRECT = 256
_EQUAL = 1e-9


class ExchangeTraffic(NamedTuple):
    """The traffic of one exchange of a step: its destinations, and the bytes.

    Attributes:
        to: the neighbours of the round, all agents, or the agents of the same machine.
        nbytes: of a message to a neighbour, the largest if they differ; or of the averaged tensor.
    """

    to: Literal["neighbours", "all", "machine"]
    nbytes: int


class _Taken(NamedTuple):
    """Seconds that steps add: the first ones, and those of a period after them."""

    first: list[float]
    later: list[float]

    @classmethod
    def of(cls, played: Floats) -> _Taken:
        """From what the rounds of some periods added, [periods, rounds]."""
        # The last ones meet no traffic of later ones.
        kept = played[: len(played) - max(1, len(played) // 4)]
        return cls(kept.ravel().tolist(), kept[len(kept) // 2 :].mean(axis=0).tolist())


class Pace:
    """The clock of a stacked run: the time of its steps on a network.

    An agent computes, and then makes its exchanges one after the other, each when it has received the messages that it
    needs from the one before. An average of all is :func:`~shoal.netmodel.direct_allreduce`, as Shoal's own is, up to
    256 agents, and :func:`~shoal.netmodel.tree_allreduce` above.

    Args:
        network: of as many agents as the schedule.
        schedule: the edges of each round.
        compute: seconds that an agent computes in a step, one number or [n].
        agents_per_machine: the number of agents that average within a machine.

    Raises:
        ValueError: another number of agents, or times that are negative or not finite.
    """

    def __init__(
        self, network: Network, schedule: Schedule, compute: ArrayLike = 0.0, agents_per_machine: int = 1
    ) -> None:
        if network.size != schedule.size:
            raise ValueError(f"the network has {network.size} agents and the fleet {schedule.size}; let them agree")
        self._network, self._schedule, self._per_machine = network, schedule, agents_per_machine
        seconds = np.asarray(compute, float)
        if seconds.shape not in ((), (network.size,)) or not (np.isfinite(seconds).all() and (seconds >= 0).all()):
            raise ValueError(f"compute={compute!r}: pass seconds, zero or more: one number, or one for each agent")
        self._compute = seconds
        self._taken: dict[tuple[ExchangeTraffic, ...], _Taken] = {}

    def seconds(self, round: int, exchanges: tuple[ExchangeTraffic, ...]) -> float:
        """The time of a step, to be added to the run's.

        Args:
            round: the number of the step.
            exchanges: its exchanges, in order.
        """
        if exchanges not in self._taken:
            self._taken[exchanges] = self._take(exchanges)
        first, later = self._taken[exchanges]
        return first[round] if round < len(first) else later[round % len(later)]

    def _take(self, exchanges: tuple[ExchangeTraffic, ...]) -> _Taken:
        known: dict[int, Step] = {0: self._step(0, exchanges)}
        affordable = _AFFORDABLE // (self._network.size * max(1, len(known[0])))
        most = min(_MOST_ROUNDS, max(_PERIODS, affordable))
        period = self._schedule.period or most
        if _PERIODS * period > most:
            return _Taken.of(_added(self._play(most, exchanges, known)).reshape(-1, 1))
        few = self._play(_PERIODS * period, exchanges, known)
        if _is_steady(few, period):
            return _Taken(_added(few).tolist(), _added(few)[-period:].tolist())
        return _Taken.of(_added(self._play(most // period * period, exchanges, known)).reshape(-1, period))

    def _play(self, rounds: int, exchanges: tuple[ExchangeTraffic, ...], known: dict[int, Step]) -> Floats:
        """When each agent had ended each of the first rounds, [rounds, agents]."""
        period = self._schedule.period or rounds
        for index in range(min(rounds, period)):
            if index not in known:
                known[index] = self._step(index, exchanges)
        steps = [known[number % period] for number in range(rounds)]
        return simulate(self._network, steps, self._compute).ended

    def _step(self, round_: int, exchanges: tuple[ExchangeTraffic, ...]) -> Step:
        step: list[Messages] = []
        for to, nbytes in exchanges:
            if to == "neighbours":
                step.append(messages_of_round(self._schedule, round_, nbytes))
            elif to == "all":
                average = direct_allreduce if self._network.size <= _MOST_DIRECT else tree_allreduce
                step.extend(average(self._network.size, nbytes))
            else:
                machines = self._network.size // self._per_machine
                step.extend(hierarchical(machines, self._per_machine, nbytes, []))
        return step


def _added(ended: Floats) -> Floats:
    """Seconds that each round adds, [rounds]."""
    return np.diff(ended.max(axis=1), prepend=0.0)


def _is_steady(ended: Floats, period: int) -> bool:
    """Whether every agent ended every round of the last periods as much later than in the one before as all others."""
    later = ended[period:] - ended[:-period]
    return bool(np.ptp(later[-2 * period :]) <= _EQUAL * later[-1].max())
