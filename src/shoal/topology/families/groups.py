"""Schedules of groups of equal size, such as the agents of a machine: Ring-Star and BlueFog's inner-outer schedules.

Ring-Star (Jameel et al., ECML-PKDD workshops 2019, doi 10.1007/978-3-030-43823-4_28, section 2.4): "a ring of
fully-connected meshes of workers" can be read in two ways, and both are here. The paper's delegates average their group
and exchange the mean with the two beside them, after which every agent of a group holds the mean of three groups. That
is :class:`RingStar`, whose W is the Kronecker product of a ring of G groups and the mean over L agents; as the paper
says, L = 1 gives a ring and L = V an all-reduce. :class:`RingStarDelegates` spends three rounds on the same, message by
message. The other reading joins the meshes by single edges: :func:`GatewayRingGraph`.

Inner-outer: in each round one agent of every machine sends to another machine, the others inside. So a machine's
network link carries one message at a time, and no agent waits for another's. These are the sequences of
:func:`~shoal.topology.GetInnerOuterRingDynamicSendRecvRanks` and its exponential relative, with equal weights, computed
for any round and for all agents at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import combinations
from math import lcm

import networkx as nx
import numpy as np

from .._validate import check_size
from ..mixing import with_metropolis_hastings_weights
from ..schedule import Edges, EdgeSchedule, Ranks, Schedule, assemble
from .compose import AllReduce, Kronecker
from .graphs import odd, powers_below
from .one_peer import OnePeer, RingRandom
from .static import ring


class RingStar(Kronecker):
    """Ring-Star [G x L]: each group takes the mean of itself and the groups beside it, every round.

    Args:
        size: number of agents V, at least 1.
        agents_per_machine: L, a divisor of V; by default the one closest to the square root of V, the smaller one of
            two. For a prime V that is 1, and it is a ring.

    Raises:
        ValueError: L does not divide V.
    """

    def __init__(self, size: int, agents_per_machine: int | None = None) -> None:
        local = group_size(size, agents_per_machine)
        super().__init__(ring(size // local), AllReduce(local))

    def describe(self) -> str:
        return f"Ring-Star [{self.between.size} x {self.inside.size}] of {self.size} agents"


class RingStarRandom(Kronecker):
    """Ring-Star over RingRandom: in each round the groups average in pairs, as :class:`RingRandom` pairs them.

    The paper's footnote 1: the average age is then O(log G) in place of O(G).

    Args:
        size: number of agents V, even; one agent alone is left alone.
        agents_per_machine: L, a divisor of V that makes an even number of groups (or one); by default the one closest
            to the square root of V.
        seed: 0 to 2**64 - 1, the same on every agent.

    Raises:
        ValueError: L does not divide V, or there is an odd number of groups.
    """

    def __init__(self, size: int, agents_per_machine: int | None = None, seed: int = 0) -> None:
        reason = odd(check_size(size))
        if reason and agents_per_machine is None:
            raise ValueError(f"Ring-Star over RingRandom pairs groups: {reason}")
        local = group_size(size, agents_per_machine, lambda local: size == 1 or size // local % 2 == 0)
        if odd(size // local):
            raise ValueError(
                f"{size // local} groups of {local} cannot be paired, as their number is odd. Choose another size of "
                "groups, or RingStar."
            )
        super().__init__(RingRandom(size // local, seed), AllReduce(local))
        self.seed = seed

    def describe(self) -> str:
        groups = f"[{self.between.size} x {self.inside.size}]"
        return f"Ring-Star {groups} over RingRandom of {self.size} agents, seed {self.seed}"


class _Delegates(EdgeSchedule):
    """Three rounds for one of groups of any sizes; see :class:`RingStarDelegates`.

    Args:
        sizes: how many agents each group has, in the order of ranks; those without any are left out.
    """

    period = 3

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = np.array([size for size in sizes if size], dtype=np.int64)
        self.size = int(self._sizes.sum())

    def _edges(self, round: int) -> Edges:
        everyone = np.arange(self.size)
        group_of = np.repeat(np.arange(len(self._sizes)), self._sizes)
        delegates = np.cumsum(self._sizes) - self._sizes
        delegate_of = delegates[group_of]
        members = everyone[everyone != delegate_of]
        if round == 0:
            destination, source = np.concatenate([delegate_of, members]), np.concatenate([everyone, members])
            weight = np.concatenate([1.0 / self._sizes[group_of], np.ones(len(members))])
        elif round == 1:
            groups = self._between_groups()
            destination = np.concatenate([delegates[groups.destination], members])
            source = np.concatenate([delegates[groups.source], members])
            weight = np.concatenate([groups.weight, np.ones(len(members))])
        else:
            destination, source, weight = everyone, delegate_of, np.ones(self.size)
        return assemble(self.size, destination, source, weight)

    def _between_groups(self) -> Edges:
        """The ring of groups; where one is smaller than another, with weights that leave the mean of all agents.

        Every agent of group g takes a share P[g, h] of the mean of group h, so L_g P[g, h] must be symmetric, where L
        are the sizes: ``P[g, h] = P_ring[g, h] min(1, L_h / L_g)``, and the rest is its own.
        """
        whole = ring(len(self._sizes)).edges(0)
        apart = whole.destination != whole.source
        to, of = whole.destination[apart], whole.source[apart]
        share = whole.weight[apart] * np.minimum(1.0, self._sizes[of] / self._sizes[to])
        each = np.arange(len(self._sizes))
        own = 1.0 - np.bincount(to, weights=share, minlength=len(each))
        ends = np.concatenate([to, each]), np.concatenate([of, each])
        return assemble(len(each), *ends, np.concatenate([share, own]))

    def among(self, left: Sequence[int]) -> Schedule:
        """The same groups with their remaining agents; the first of each is the delegate."""
        group_of = np.repeat(np.arange(len(self._sizes)), self._sizes)
        return _Delegates(np.bincount(group_of[list(left)], minlength=len(self._sizes)).tolist())

    def describe(self) -> str:
        return f"Ring-Star of groups of {', '.join(map(str, self._sizes))} by delegates"


class RingStarDelegates(_Delegates):
    """:class:`RingStar` message by message, three rounds for one: collect, exchange along the ring, hand out.

    The first agent of each group is its delegate and does what the paper's Table 1 counts: L - 1 messages in, two
    exchanges on the ring, and L - 1 messages out. The single rounds are row-stochastic only; the product of the three
    is the doubly stochastic W of :class:`RingStar`.

    Args:
        size: number of agents V, at least 1.
        agents_per_machine: L, as for :class:`RingStar`.

    Raises:
        ValueError: L does not divide V.
    """

    def __init__(self, size: int, agents_per_machine: int | None = None) -> None:
        self.local = group_size(size, agents_per_machine)
        super().__init__([self.local] * (size // self.local))

    def describe(self) -> str:
        return f"Ring-Star [{self.size // self.local} x {self.local}] by delegates of {self.size} agents"


def GatewayRingGraph(size: int, agents_per_machine: int | None = None) -> nx.DiGraph:
    """Fully connected groups, the first agents of which form a ring; Metropolis-Hastings weights.

    The sparse reading of Ring-Star: a message a round leaves a group for each group beside it, and one round does not
    carry a group's mean any further than its gateway.

    Args:
        size: number of agents V, at least 1.
        agents_per_machine: L, as for :class:`RingStar`.

    Raises:
        ValueError: L does not divide V.
    """
    local = group_size(size, agents_per_machine)
    graph = nx.Graph()
    graph.add_nodes_from(range(size))
    for first in range(0, size, local):
        graph.add_edges_from(combinations(range(first, first + local), 2))
        if size > local:
            graph.add_edge(first, (first + local) % size)
    return with_metropolis_hastings_weights(graph)


def group_size(size: int, agents_per_machine: int | None, allowed: Callable[[int], bool] = lambda local: True) -> int:
    """The number of agents in a group: the given one, or by default the allowed divisor closest to the square root.

    Raises:
        ValueError: it does not divide the number of agents, or no divisor is allowed.
    """
    size = check_size(size)
    if agents_per_machine is not None:
        local = check_size(agents_per_machine, "agents_per_machine")
        if size % local:
            raise ValueError(
                f"{size} agents do not fill groups of {local}. All groups have the same size: pass a divisor of {size}."
            )
        return local
    found = [local for local in range(1, size + 1) if size % local == 0 and allowed(local)]
    return min(found, key=lambda local: (max(local**2, size) / min(local**2, size), local))


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
                f"with 2 agents on each of {machines} machines, the one that stays while the other sends to another "
                "machine has no neighbour, so the two never average. Put more agents on a machine, or one."
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
