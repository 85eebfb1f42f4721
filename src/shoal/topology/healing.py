"""The repair of a topology after the loss of agents.

The naive repair gives the weight of each edge to a lost agent back to the agent at its other end. On a directed graph
that biases the mean, and where the lost agent held the graph together (a star's centre) it falls apart. So sources
behind a lost agent become direct sources: with S the surviving agents and D the lost ones,

    W'  =  W_SS  +  W_SD (I - W_DD)^-1 W_DS,

the stochastic complement of W (Meyer, "Stochastic complementation, uncoupling Markov chains, and the theory of nearly
reducible systems", SIAM Review 31, 1989). Rows that sum to one still do, columns too, symmetric stays symmetric, agents
connected in a round stay connected, and a round of pairs stays one.

Paths over several rounds need more: an agent that exchanges only with lost agents, one in each round, would be alone.
So the survivors' union graph over the period is checked as well, and :mod:`~shoal.topology.links` joins its parts by
exchanges of idle agents. Families that plan over several rounds define their own repair (:meth:`Schedule.among`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ._edges import Edges, Ranks, Weights, assemble
from ._validate import check_rank
from .links import Links
from .schedule import AnyTopology, EdgeSchedule, Schedule, as_schedule

_ALONE = 1e-12
"""An agent whose self weight is so near one has no sources that others could reach through it."""


class Without(EdgeSchedule):
    """A topology without some of its agents: agents that were connected through them are connected directly.

    Ranks keep their values. A lost agent has a self weight of one and no edges. The result is the same on every agent,
    for any order of the losses.

    Survivors that were connected over the rounds of a period stay so. If leaving out the lost agents alone would
    separate them, idle agents of different parts exchange in pairs, with weights of 1/2. If that is not enough, rounds
    of such pairs are added to the period (:mod:`~shoal.topology.links`).

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
        self._links = Links(self.whole, healed, self._left, self._healed) if lost and healed != 1 else None
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
