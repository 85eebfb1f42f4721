"""The repair of a topology after the loss of agents, within each round and over the rounds of a period.

The naive repair gives the weight of each edge to a lost agent back to the agent at its other end. On a directed graph
that biases the mean, and where the lost agent held the graph together (a star's centre) it falls apart. So sources
behind a lost agent become direct sources: with S the surviving agents and D the lost ones,

    W'  =  W_SS  +  W_SD (I - W_DD)^-1 W_DS,

the stochastic complement of W (Meyer, "Stochastic complementation, uncoupling Markov chains, and the theory of nearly
reducible systems", SIAM Review 31, 1989). Rows that sum to one still do, columns too, symmetric stays symmetric, agents
connected in a round stay connected, and a round of pairs stays one.

That keeps each round connected, but not a path that enters the agent in one round and leaves it in a later one. In
CECA's pairs all partners of an agent, one in each round, may be lost; it would then be alone for ever. So
:class:`Links` checks the survivors' union graph over the period, by a rule that is the same on all agents:

1. The parts are the strongly connected components of the survivors' union graph over the analysed rounds.
2. In each round, idle survivors of different parts exchange in pairs, with weights of 1/2. A round of one peer stays
   one, and row sums, column sums and symmetry are kept.
3. While parts are left, a round is appended in which all are idle but for such pairs.

A schedule that stays connected is not changed. Agents that were not connected before the loss are not joined. Families
that plan over several rounds define their own repair (:meth:`Schedule.among`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from math import lcm

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from ._validate import check_rank
from .schedule import (
    AnyTopology,
    Edges,
    EdgeSchedule,
    Neighbours,
    Ranks,
    Schedule,
    Weights,
    as_schedule,
    assemble,
    distinct,
)

LOOKED_AT = 64
"""Rounds of a schedule without a period, or with a longer one, that are looked at."""
_APART = 8
"""Rounds of such a schedule between appended rounds."""
_IDLE = 1e-12
"""How far the self weight of an idle agent is from one."""

RoundEdges = Callable[[int], Edges]
Pairs = tuple[tuple[int, int], ...]


class Links:
    """The rounds of the survivors, joined where they would fall apart.

    Args:
        whole: The schedule of all agents.
        period: The period of the survivors' rounds; None if they never repeat.
        left: The survivors' ranks, ascending.
        healed: The edges of a round of the survivors, in which lost agents have only an edge to themselves.

    Attributes:
        period: Rounds after which the joined schedule repeats; None if never.
    """

    def __init__(self, whole: Schedule, period: int | None, left: Sequence[int], healed: RoundEdges) -> None:
        self._size, self._healed, self._left = whole.size, healed, left
        self._parts: NDArray[np.int64] | None = None
        self._appended: list[Pairs] = []
        self._every = period or _APART
        self.period = period
        looked_at = min(period or LOOKED_AT, LOOKED_AT)
        parts = parts_of(whole.size, looked_at, healed, left)
        if _count(parts, left) == 1:
            return
        before = _parts(whole, left)
        if _count(parts, left) == _count(before, left):
            return
        # Parts that were apart before the loss stay apart: only agents with the same label before may exchange.
        self._parts, self._before = parts, before
        joined = parts.copy()
        for round in range(looked_at):
            for first, second in self._idle_pairs(round):
                joined[joined == joined[second]] = joined[first]
        if period is not None and period > LOOKED_AT:
            self._every = _APART
        while _count(joined, left) > _count(before, left):
            self._appended.append(_pairs(left, joined, before, parts))
            for first, second in self._appended[-1]:
                joined[joined == joined[second]] = joined[first]
        if period is not None:
            self.period = lcm(period, self._every) // self._every * (self._every + len(self._appended))

    def edges(self, round: int) -> Edges:
        """The edges of a round."""
        if self._parts is None:
            return self._healed(round)
        block, place = divmod(round, self._every + len(self._appended))
        if place >= self._every:
            return self._with_exchanges(Edges(*_nobody(self._size)), self._appended[place - self._every])
        round = block * self._every + place
        return self._with_exchanges(self._healed(round), self._idle_pairs(round))

    def _idle_pairs(self, round: int) -> Pairs:
        """The pairs of idle survivors of different parts in a round, which others begin in the next one."""
        assert self._parts is not None
        edges = self._healed(round)
        alone = np.bincount(edges.destination, minlength=self._size) == 1
        alone &= np.bincount(edges.source, minlength=self._size) == 1
        own = edges.destination == edges.source
        alone[edges.destination[own & (np.abs(edges.weight - 1.0) > _IDLE)]] = False
        idle = [rank for rank in self._left if alone[rank]]
        first = round % max(1, len(idle))
        return _pairs(idle[first:] + idle[:first], self._parts, self._before, self._parts)

    def _with_exchanges(self, edges: Edges, pairs: Pairs) -> Edges:
        if not pairs:
            return edges
        first, second = np.array(pairs, dtype=np.int64).T
        half = np.full(len(first), 0.5)
        return assemble(
            self._size,
            np.concatenate([edges.destination, first, second, first, second]),
            np.concatenate([edges.source, second, first, first, second]),
            np.concatenate([edges.weight, half, half, -half, -half]),
        )


def parts_of(size: int, rounds: int, edges: RoundEdges, left: Sequence[int]) -> NDArray[np.int64]:
    """The strongly connected components of the union graph of some rounds.

    Args:
        size: Number of agents n.
        rounds: How many rounds, from 0 on. Rounds after all of ``left`` are connected are not read.
        edges: The edges of a round.
        left: The agents to be labelled, at least one.

    Returns:
        A label of each agent, equal for agents of one component, int64 [n].
    """
    keys = np.empty(0, np.int64)
    survivors = np.array(left)
    for round in range(rounds):
        destination, source, weight = edges(round)
        keys = distinct(np.concatenate([keys, (source * size + destination)[weight != 0]]))
        # After 1, 2, 4, ... rounds: each check costs as much as all earlier rounds.
        if round & (round + 1) == 0 or round + 1 == rounds:
            ends = keys // size, keys % size
            if all(
                (Neighbours(size, *direction).hops_from(left[0])[survivors] >= 0).all()
                for direction in (ends, ends[::-1])
            ):
                return np.zeros(size, np.int64)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(size))
    graph.add_edges_from(zip((keys // size).tolist(), (keys % size).tolist(), strict=True))
    labels = np.empty(size, np.int64)
    for component in nx.strongly_connected_components(graph):
        labels[list(component)] = min(component)
    return labels


def separates(whole: Schedule, healed: Schedule, gone: Sequence[int]) -> bool:
    """Whether all agents of a schedule were connected, and its survivors are not.

    Args:
        whole: The schedule of all agents.
        healed: The schedule of the survivors.
        gone: The ranks of the lost agents.
    """
    left = [rank for rank in range(whole.size) if rank not in gone]
    # Appended rounds are between the rounds that Links has analysed.
    if len(left) < 2 or _count(_parts(healed, left, 2 * LOOKED_AT), left) == 1:
        return False
    everyone = range(whole.size)
    return _count(_parts(whole, everyone), everyone) == 1


def _parts(schedule: Schedule, left: Sequence[int], most: int = LOOKED_AT) -> NDArray[np.int64]:
    return parts_of(schedule.size, min(schedule.period or most, most), schedule.edges, left)


def _count(labels: NDArray[np.int64], left: Sequence[int]) -> int:
    return len(np.unique(labels[np.array(left)]))


def _nobody(size: int) -> tuple[Ranks, Ranks, NDArray[np.float64]]:
    everyone = np.arange(size, dtype=np.int64)
    return everyone, everyone, np.ones(size)


def _pairs(
    ranks: Iterable[int], joined: NDArray[np.int64], before: NDArray[np.int64], parts: NDArray[np.int64]
) -> Pairs:
    """Pairs of agents, each in one at most: first pairs that join parts, then pairs of different parts.

    Args:
        ranks: The agents that may exchange, in the order in which they choose.
        joined: The label of each agent's part, after some have been joined, int64 [n].
        before: The label of its part before the loss.
        parts: The label of its part after the loss.
    """
    free, found, joined = list(ranks), [], joined.copy()
    for labels in (joined, parts):
        # For each label before the loss all waiting agents have one label; an agent of another one takes the first.
        waiting: defaultdict[int, deque[int]] = defaultdict(deque)
        for rank in free:
            others = waiting[int(before[rank])]
            if not others or labels[others[0]] == labels[rank]:
                others.append(rank)
                continue
            other = others.popleft()
            found.append((min(rank, other), max(rank, other)))
            if labels is joined:
                joined[joined == joined[rank]] = joined[other]
        free = [rank for others in waiting.values() for rank in others]
    return tuple(found)


_ALONE = 1e-12
"""An agent whose self weight is so near one has no sources that others could reach through it."""


class Without(EdgeSchedule):
    """A topology without some of its agents: agents that were connected through them are connected directly.

    Ranks keep their values. A lost agent has a self weight of one and no edges. The result is the same on every agent,
    for any order of the losses.

    Survivors that were connected over the rounds of a period stay so. If leaving out the lost agents alone would
    separate them, idle agents of different parts exchange in pairs, with weights of 1/2. If that is not enough, rounds
    of such pairs are added to the period (:class:`Links`).

    The Base-(k+1) graphs, the hyper-hypercube and the one-peer hypercube become a Base-(k+1) graph of the surviving
    agents, which is exact for any number; in Ring-Star by delegates the next agent of a group replaces a lost delegate.

    >>> ring = [[0.5, 0.0, 0.5], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]  # agent 2 receives from 1, and 1 from 0
    >>> Without(ring, [1]).matrix(0)
    array([[0.5, 0. , 0.5],
           [0. , 1. , 0. ],
           [0.5, 0. , 0.5]])

    Args:
        topology: a graph, a schedule or a mixing matrix, of n agents.
        gone: ranks. Of a topology that is a ``Without`` itself, the two sets are joined.

    Attributes:
        whole: the topology of all agents.
        gone: the lost ranks, ascending.

    Raises:
        TypeError, ValueError: no topology, or an invalid rank of it.
    """

    whole: Schedule
    gone: tuple[int, ...]

    def __init__(self, topology: AnyTopology, gone: Iterable[int]) -> None:
        whole: Schedule = as_schedule(topology)
        lost = {check_rank(rank, whole.size) for rank in gone}
        if isinstance(whole, Without):
            lost |= set(whole.gone)
            whole = whole.whole
        self.whole = whole
        self.gone = tuple(sorted(lost))
        self.size = whole.size
        self._left = [rank for rank in range(whole.size) if rank not in lost]
        self._planned = whole.among(self._left) if self._left and lost else None
        healed = whole.period if self._planned is None else self._planned.period
        self._links = (
            Links(self.whole, healed, self._left, self._healed) if self._left and lost and healed != 1 else None
        )
        self.period = healed if self._links is None else self._links.period

    def _edges(self, round: int) -> Edges:
        return self._healed(round) if self._links is None else self._links.edges(round)

    def _healed(self, round: int) -> Edges:
        """A round by itself, whether or not the survivors are connected over the period."""
        if self._planned is None:
            return _eliminated(self.size, self.whole.edges(round), self.gone)
        edges, left, gone = self._planned.edges(round), np.array(self._left), np.array(self.gone)
        ends = np.concatenate([left[edges.destination], gone]), np.concatenate([left[edges.source], gone])
        return assemble(self.size, *ends, np.concatenate([edges.weight, np.ones(len(gone))]))

    def describe(self) -> str:
        return f"{self.whole.describe()}, without {', '.join(map(str, self.gone)) or 'nobody'}"


def _eliminated(size: int, edges: Edges, gone: tuple[int, ...]) -> Edges:
    """The edges of a round without lost agents, except for an edge of weight one from each to itself."""
    destination, source, weight = edges
    lost = np.zeros(size, dtype=bool)
    lost[list(gone)] = True
    beside = lost[destination] | lost[source]
    nobody = np.flatnonzero(lost)
    found: list[tuple[Ranks, Ranks, Weights]] = [
        (destination[~beside], source[~beside], weight[~beside]),
        (nobody, nobody, np.ones(len(nobody))),
    ]
    if beside.any():
        found.append(_through(destination[beside], source[beside], weight[beside], gone))
    return assemble(size, *(np.concatenate(part) for part in zip(*found, strict=True)))


def _through(destination: Ranks, source: Ranks, weight: Weights, gone: tuple[int, ...]) -> tuple[Ranks, Ranks, Weights]:
    """The edges that replace edges from and to lost agents, which are removed one by one."""
    agents = np.unique(np.concatenate([destination, source]))
    matrix = np.zeros((len(agents), len(agents)))
    matrix[np.searchsorted(agents, destination), np.searchsorted(agents, source)] = weight
    for rank in gone:
        at = np.searchsorted(agents, rank)
        if at == len(agents) or agents[at] != rank:
            continue
        incoming, outgoing = matrix[at].copy(), matrix[:, at].copy()
        others = 1.0 - incoming[at]
        incoming[at] = outgoing[at] = 0.0
        matrix[at] = matrix[:, at] = 0.0
        if abs(others) > _ALONE:
            to, of = np.flatnonzero(outgoing), np.flatnonzero(incoming)
            matrix[np.ix_(to, of)] += np.outer(outgoing[to], incoming[of]) / others
        else:  # no source replaces it; its share goes to its destinations' self weights
            matrix[np.diag_indices_from(matrix)] += outgoing
    to, of = np.nonzero(matrix)
    return agents[to], agents[of], matrix[to, of]
