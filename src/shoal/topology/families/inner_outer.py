"""BlueFog's inner-outer schedules: in each round one agent of every machine sends to another machine, the others
inside.

So a machine's network link carries one message at a time, and no agent waits for another's. These are the sequences of
:func:`~shoal.topology.GetInnerOuterRingDynamicSendRecvRanks` and its exponential relative, with equal weights, computed
for any round and for all agents at once.
"""

from __future__ import annotations

from abc import abstractmethod
from math import lcm

import numpy as np

from .._edges import Ranks
from .graphs import powers_below
from .one_peer import OnePeer
from .ring_star import group_size


class _InnerOuter(OnePeer):
    """The part that does not depend on the hops.

    Attributes:
        local: number of agents on each machine.
    """

    _title: str

    def __init__(self, size: int, agents_per_machine: int | None = None) -> None:
        self.local = group_size(size, agents_per_machine, lambda local: local != 2 or size == 2)
        self.size = size
        machines = size // self.local
        if self.local == 2 and machines > 1:
            raise ValueError(
                f"with 2 agents on each of {machines} machines, the one that stays while the other goes out has nobody "
                "to talk to, so the two never average. Put more agents on a machine, or one."
            )
        self._inside = self._hops(self.local if machines == 1 else self.local - 1)
        self._outside = self._hops(machines)
        who_leaves = 1 if machines == 1 else self.local
        self.period = lcm(who_leaves, len(self._inside) or 1, len(self._outside) or 1)

    @staticmethod
    @abstractmethod
    def _hops(count: int) -> list[int]:
        """The hops that a circle of `count` goes through, round after round."""

    def _sources(self, round: int) -> Ranks:
        everyone = np.arange(self.size)
        if self.size == 1:
            return everyone
        if self.local == self.size:
            return (everyone - self._inside[round % len(self._inside)]) % self.size
        local, outgoing = everyone % self.local, round % self.local
        behind = (everyone - self._outside[round % len(self._outside)] * self.local) % self.size
        if self.local == 1:
            return behind
        # Positions inside a machine count its agents without the outgoing one.
        staying = self.local - 1
        position = (local - (local > outgoing) - self._inside[round % len(self._inside)]) % staying
        beside = everyone - local + position + (position >= outgoing)
        return np.where(local == outgoing, behind, beside)

    def describe(self) -> str:
        return f"{self._title} of {self.size} agents, {self.local} a machine"


class InnerOuterRing(_InnerOuter):
    """Directed rings, inside every machine and between machines.

    In round t the agents with local rank ``t mod L`` receive from the machine before theirs, the other agents of a
    machine from the agent before them among themselves. With one machine it is a ring inside, with one agent a machine
    a ring of machines.

    Args:
        size: number of agents, at least 1.
        agents_per_machine: L, a divisor of `size`; by default the one closest to its square root, other than 2.

    Raises:
        ValueError: L does not divide `size`, or it is 2 and there are several machines.
    """

    _title = "inner-outer ring"

    @staticmethod
    def _hops(count: int) -> list[int]:
        return [1] if count > 1 else []


class InnerOuterExponential(_InnerOuter):
    """One-peer exponential graphs, inside every machine and between machines (BlueFog paper, figure 11).

    Args:
        size: number of agents, at least 1.
        agents_per_machine: L, as for :class:`InnerOuterRing`.

    Raises:
        ValueError: as :class:`InnerOuterRing`.
    """

    _title = "inner-outer exponential graph"

    @staticmethod
    def _hops(count: int) -> list[int]:
        return list(powers_below(count))
