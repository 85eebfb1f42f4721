"""Topologies that change from round to round: their common interface, a round as arrays of edges, and the clock.

A :class:`Schedule` gives the mixing of agent `rank` in round `round`. It is a value without state, so any agent can
query any round and any other agent; random schedules draw from a seed and the number of the round. A static graph is a
constant schedule. The round is in a :class:`Clock`, which each agent has for itself and saves with its state.

:class:`Edges` are a whole round as arrays, in one fixed order. The functions make and symmetrise them, vectorised, so
that a round of 100,000 agents takes milliseconds; :class:`Neighbours` walks along them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from numbers import Real
from typing import NamedTuple, TypeAlias
from zlib import crc32

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._validate import as_digraph, as_int, check_rank, check_round, check_size
from .mixing import Mixing, as_matrix

Ranks = NDArray[np.int64]
Weights = NDArray[np.float64]


class Edges(NamedTuple):
    """A whole round, sparse: agent ``destination[k]`` multiplies the value of ``source[k]`` by ``weight[k]``.

    Self weights are among them, as edges from an agent to itself. int64, int64 and float64, each [edges], ascending by
    destination and then by source.
    """

    destination: Ranks
    source: Ranks
    weight: Weights


class RoundEdges:
    """The edges of one round, from which each agent reads off its own part."""

    def __init__(self, edges: Edges) -> None:
        for array in edges:
            array.flags.writeable = False
        self.edges = edges

    @cached_property
    def _by_source(self) -> tuple[Ranks, Ranks]:
        order = np.argsort(self.edges.source, kind="stable")
        return self.edges.source[order], self.edges.destination[order]

    def mixing(self, rank: int) -> Mixing:
        destination, source, weight = self.edges
        begin, end = np.searchsorted(destination, (rank, rank + 1))
        row = dict(zip(source[begin:end].tolist(), weight[begin:end].tolist(), strict=True))
        sources, destinations = self._by_source
        begin, end = np.searchsorted(sources, (rank, rank + 1))
        heard_by = destinations[begin:end].tolist()
        return Mixing(rank, row.pop(rank, 0.0), row, [peer for peer in heard_by if peer != rank])


def assemble(size: int, destination: ArrayLike, source: ArrayLike, weight: ArrayLike) -> Edges:
    """Edges in any order, put in order; those named twice add up, and agents without one to themselves get it.

    Args:
        size: number of agents.
        destination, source: ranks, [edges].
        weight: [edges], or one number for all.
    """
    destination, source = np.asarray(destination, dtype=np.int64), np.asarray(source, dtype=np.int64)
    weight = np.broadcast_to(np.asarray(weight, dtype=np.float64), destination.shape)
    everyone = np.arange(size, dtype=np.int64)
    keys = np.concatenate([destination * size + source, everyone * (size + 1)])
    unique, place = np.unique(keys, return_inverse=True)
    total = np.bincount(place, weights=np.concatenate([weight, np.zeros(size)]))
    return Edges(unique // size, unique % size, total.astype(np.float64))


def symmetric(size: int, first: ArrayLike, second: ArrayLike, weight: ArrayLike) -> Edges:
    """Exchanges between pairs, [pairs], each pair named once; every agent keeps what its exchanges leave it of one."""
    first, second = np.asarray(first, dtype=np.int64), np.asarray(second, dtype=np.int64)
    given = np.broadcast_to(np.asarray(weight, dtype=np.float64), first.shape)
    destination, source = np.concatenate([first, second]), np.concatenate([second, first])
    both = np.concatenate([given, given])
    everyone = np.arange(size, dtype=np.int64)
    kept = 1.0 - np.bincount(destination, weights=both, minlength=size)
    return assemble(
        size, np.concatenate([destination, everyone]), np.concatenate([source, everyone]), np.concatenate([both, kept])
    )


def distinct(keys: Ranks) -> Ranks:
    """The keys of edges, int64 ``[m]``, in ascending order, each once.

    ``np.unique`` hashes, which takes many times as long on keys that are as regular as those of a topology.
    """
    ordered = np.sort(keys)
    found: Ranks = ordered[np.r_[True, ordered[1:] != ordered[:-1]][: len(ordered)]]
    return found


def metropolis_hastings(size: int, first: ArrayLike, second: ArrayLike) -> Edges:
    """Links between pairs, [pairs], in any order and direction, also named twice, with Metropolis-Hastings weights."""
    low, high = np.minimum(first, second).astype(np.int64), np.maximum(first, second).astype(np.int64)
    keys = distinct(low[low != high] * size + high[low != high])
    ends = keys // size, keys % size
    degree = np.bincount(np.concatenate(ends), minlength=size)
    return symmetric(size, *ends, 1.0 / (1 + np.maximum(*(degree[end] for end in ends))))


def one_peer(sources: Ranks, share: float = 0.5) -> Edges:
    """Agent i takes `share` of ``sources[i]`` and keeps the rest; an agent whose source is itself keeps everything.

    Args:
        sources: a permutation of the ranks, int64 [n].
    """
    everyone = np.arange(len(sources), dtype=np.int64)
    source = np.stack([everyone, sources], axis=1)
    idle = sources == everyone
    weight = np.where(idle[:, None], (1.0, 0.0), (1.0 - share, share))
    order = np.argsort(source, axis=1, kind="stable")
    source, weight = np.take_along_axis(source, order, axis=1), np.take_along_axis(weight, order, axis=1)
    kept = np.stack([np.ones_like(idle), ~idle], axis=1)
    return Edges(np.repeat(everyone, 2)[kept.ravel()], source[kept], weight[kept])


def circulant(size: int, shares: dict[int, float]) -> Edges:
    """Agent i takes ``shares[hop]`` of the agent `hop` ranks behind it; hops are below `size`, and 0 is itself."""
    hops = np.array([0, *(hop for hop in shares if hop)], dtype=np.int64)
    weights = np.array([shares.get(int(hop), 0.0) for hop in hops])
    source = (np.arange(size, dtype=np.int64)[:, None] - hops) % size
    order = np.argsort(source, axis=1)
    destination = np.repeat(np.arange(size, dtype=np.int64), len(hops))
    return Edges(destination, np.take_along_axis(source, order, axis=1).ravel(), weights[order].ravel())


class Neighbours:
    """Edges by the agent that they start from, as plain lists, which a walk from agent to agent reads fastest.

    Args:
        size: number of agents.
        source, destination: ranks, int64 [edges].
    """

    def __init__(self, size: int, source: Ranks, destination: Ranks) -> None:
        order = np.argsort(source, kind="stable")
        self.size = size
        self._heads: list[int] = destination[order].tolist()
        self._starts: list[int] = np.searchsorted(source[order], np.arange(size + 1)).tolist()

    def hops_from(self, source: int) -> NDArray[np.int64]:
        """The fewest edges from `source` to each agent, int64 [n]; -1 for those out of reach."""
        hops = [-1] * self.size
        hops[source] = 0
        frontier, distance = [source], 0
        heads, starts = self._heads, self._starts
        while frontier:
            distance += 1
            ahead = []
            for rank in frontier:
                for head in heads[starts[rank] : starts[rank + 1]]:
                    if hops[head] < 0:
                        hops[head] = distance
                        ahead.append(head)
            frontier = ahead
        return np.array(hops, dtype=np.int64)


_RECENT_ROUNDS = 16


class Schedule(ABC):
    """A topology in time. Rounds count from 0 without end.

    A subclass defines :meth:`mixing` and `period`. One for many thousands of agents also overrides :meth:`edges`, which
    must say the same; or it is an :class:`EdgeSchedule`, which has the one from the other.

    Attributes:
        size: number of agents n.
        period: rounds after which it repeats; None when it never does, as a random one.
    """

    size: int
    period: int | None

    @abstractmethod
    def mixing(self, round: int, rank: int) -> Mixing:
        """The mixing of agent `rank` in a round: pull form, ``r_ij = W[i, j]`` and s = 1, both sides of each edge
        known.
        """

    def edges(self, round: int) -> Edges:
        """The round of all agents at once."""
        views = [self.mixing(round, rank) for rank in range(self.size)]
        rows = [sorted({view.rank: view.self_weight, **view.sources}.items()) for view in views]
        destination = np.repeat(np.arange(self.size), [len(row) for row in rows])
        flat = [pair for row in rows for pair in row]
        source = np.array([source for source, _ in flat], dtype=np.int64)
        return Edges(destination, source, np.array([weight for _, weight in flat], dtype=np.float64))

    def hop_shares(self, round: int) -> dict[int, float] | None:
        """The shares of a round in which all agents act alike: agent i takes ``shares[hop]`` of the agent `hop` ranks
        behind it.

        They avoid the arrays of edges, which may be millions. None if the schedule does not know, although the edges
        may be so; hops are 0 to n - 1, and 0 is the agent itself.
        """
        return None

    def among(self, left: Sequence[int]) -> Schedule | None:
        """The schedule's own plan for the surviving agents, if it is better than :class:`Without`.

        For schedules with a guarantee that ends when an agent is merely left out, such as the exact mean after a
        period.

        Args:
            left: ranks, ascending, at least one.

        Returns:
            A schedule of ``len(left)`` agents, agent k of which is ``left[k]``; None if it has none.
        """
        return None

    def in_period(self, round: int) -> int:
        """The index of a round in its period, 0 to period - 1: that of the first round that is the same.

        Without a period it is the round itself.
        """
        return round if self.period is None else round % self.period

    def matrix(self, round: int) -> NDArray[np.float64]:
        """The mixing matrix W of a round, float64 [n, n]."""
        edges = self.edges(round)
        dense = np.zeros((self.size, self.size))
        dense[edges.destination, edges.source] = edges.weight
        return dense

    def graph(self, round: int) -> nx.DiGraph:
        """A round as a graph: edge (j, i) carries ``W[i, j]``."""
        found = nx.DiGraph()
        found.add_nodes_from(range(self.size))
        edges = self.edges(round)
        found.add_weighted_edges_from(
            zip(edges.source.tolist(), edges.destination.tolist(), edges.weight.tolist(), strict=True)
        )
        return found

    @abstractmethod
    def describe(self) -> str:
        """One line that names it with all its parameters. Two schedules that say the same are the same."""

    def __repr__(self) -> str:
        return f"<{self.describe()}>"

    def _check(self, round: int, rank: int) -> tuple[int, int]:
        return check_round(round), check_rank(rank, self.size)


class EdgeSchedule(Schedule):
    """A schedule that is defined by whole rounds, from which every agent reads its own part.

    A subclass defines :meth:`_edges`; sends, receives and the arrays of all agents then cannot disagree. The last
    requested rounds are cached, because agents of one process request the same ones.
    """

    @abstractmethod
    def _edges(self, round: int) -> Edges:
        """The edges of a round, which is below the period if there is one."""

    def edges(self, round: int) -> Edges:
        """The round of all agents at once; the arrays are shared and read-only."""
        return self._round(round).edges

    def mixing(self, round: int, rank: int) -> Mixing:
        round, rank = self._check(round, rank)
        return self._round(round).mixing(rank)

    def _round(self, round: int) -> RoundEdges:
        return self._recent(self.in_period(check_round(round)))

    @cached_property
    def _recent(self) -> Callable[[int], RoundEdges]:
        return lru_cache(maxsize=_RECENT_ROUNDS)(lambda round: RoundEdges(self._edges(round)))

    def __getstate__(self) -> dict[str, object]:
        # Rounds that were kept are not worth sending, and the cache around them cannot be pickled.
        return {name: value for name, value in self.__dict__.items() if name != "_recent"}


class Static(EdgeSchedule):
    """The same graph in every round, with its weights, or with uniform ones.

    The edges are taken over when it is made: what is done to `graph` later changes nothing.

    Args:
        graph: nodes 0 to n - 1; edge (j, i) carries ``W[i, j]`` as `weight`, one if it has none. Or W itself, [n, n],
            whose entries other than zero are the edges.
        weighted: whether to use the weights of the graph. If not, every agent weighs itself and its sources equally.
        name: what it is called. Without one it is described by a checksum of its edges.

    Raises:
        TypeError, ValueError: no graph over the ranks 0 to n - 1, or weights that are not finite real numbers.
    """

    period = 1

    def __init__(self, graph: nx.Graph | ArrayLike, *, weighted: bool = True, name: str = "") -> None:
        if isinstance(graph, Schedule):
            raise TypeError(
                f"Static takes a graph or a matrix, not the schedule {type(graph).__name__}. Pass the schedule itself: "
                "whatever takes a topology takes a schedule, also one whose rounds are all alike. For the graph of one "
                "round pass schedule.graph(0)."
            )
        self.size, edges = _edges_of_graph(graph, weighted) if _is_graph(graph) else _edges_of_matrix(graph)
        self._edges_of_all = edges if weighted else _uniform(self.size, edges)
        self._name = name or f"static graph {crc32(b''.join(array.tobytes() for array in self._edges_of_all)):08x}"

    def _edges(self, round: int) -> Edges:
        return self._edges_of_all

    def describe(self) -> str:
        return f"{self._name} of {self.size} agents"


AnyTopology: TypeAlias = "nx.Graph | Schedule | ArrayLike"
"""A graph with its weights, a schedule, or a mixing matrix W, [n, n]: the arguments of the analysis."""


def as_schedule(topology: AnyTopology) -> Schedule:
    """A schedule as it is; a graph or a matrix as the schedule that never changes.

    Raises:
        TypeError, ValueError: as :class:`Static`.
    """
    return topology if isinstance(topology, Schedule) else Static(topology)


class CustomSchedule(EdgeSchedule):
    """A schedule of one's own: a subclass defines two methods, :meth:`weights` and :meth:`describe`.

    It works wherever a topology is taken: in a simulation, on real agents, in the analysis and in the pictures.

    Args:
        size: number of agents n.
        period: rounds after which it repeats; None if it never does, as with random weights.

    Raises:
        ValueError: no positive number of agents, or of rounds.
    """

    def __init__(self, size: int, period: int | None = None) -> None:
        self.size = check_size(size)
        self.period = None if period is None else check_size(period, "period")

    @abstractmethod
    def weights(self, round: int) -> AnyTopology:
        """The weights of all agents in a round.

        Args:
            round: From 0, below the period if there is one. The result must depend on it and on the arguments of the
                schedule alone, because each agent computes it for itself: draw from ``numpy.random.default_rng((seed,
                round))``.

        Returns:
            W, float [n, n], where ``W[i, j]`` is the factor of x_j on agent i; or a graph, whose edge (j, i) has it as
            ``weight``.
        """

    @abstractmethod
    def describe(self) -> str:
        """One line with the name of the schedule and all its arguments. Schedules with equal lines count as equal."""

    def _edges(self, round: int) -> Edges:
        found = as_schedule(self.weights(round))
        if found.size != self.size:
            raise ValueError(
                f"{type(self).__name__}.weights({round}) is for {found.size} agents, and the schedule has {self.size}"
            )
        # A copy, because a schedule makes its arrays read-only.
        return Edges(*(array.copy() for array in found.edges(0)))


class Clock:
    """One agent's way through a schedule: ``next(clock)`` is its :class:`Mixing` of the next round.

    Attributes:
        round: the round that comes next.
    """

    def __init__(self, schedule: nx.Graph | Schedule, rank: int, round: int = 0) -> None:
        self.schedule = as_schedule(schedule)
        self.rank = check_rank(rank, self.schedule.size)
        self.round = as_int(round, "round")

    def __iter__(self) -> Clock:
        return self

    def __next__(self) -> Mixing:
        mixing = self.schedule.mixing(self.round, self.rank)
        self.round += 1
        return mixing

    def state_dict(self) -> dict[str, int | str]:
        """The data for :meth:`load_state_dict`: the round, and the identity of its schedule."""
        return {"round": self.round, "schedule": self.schedule.describe()}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Go on where another clock of the same schedule was saved.

        Raises:
            ValueError: it was a clock of another schedule.
        """
        if state["schedule"] != self.schedule.describe():
            raise ValueError(
                f"the saved clock runs {state['schedule']!r} and this one {self.schedule.describe()!r}. "
                "Make the schedule with the same arguments, or set clock.round yourself."
            )
        self.round = as_int(state["round"], "round")


def _is_graph(given: object) -> bool:
    """Whether it is a graph, or cannot be a matrix, so that the error message is about graphs."""
    return isinstance(given, nx.Graph) or np.ndim(given) == 0  # type: ignore[arg-type]


def _edges_of_graph(graph: nx.Graph, weighted: bool) -> tuple[int, Edges]:
    digraph = as_digraph(graph)
    ends = np.array(digraph.edges, dtype=np.int64).reshape(-1, 2)
    weights = _weights_of(digraph) if weighted else np.ones(len(ends))
    return digraph.number_of_nodes(), assemble(digraph.number_of_nodes(), ends[:, 1], ends[:, 0], weights)


def _weights_of(graph: nx.DiGraph) -> NDArray[np.float64]:
    weights = [weight for *_, weight in graph.edges(data="weight", default=1.0)]
    found = np.asarray(weights)
    if found.dtype == object and all(isinstance(weight, Real) for weight in weights):  # such as fractions
        found = found.astype(np.float64)
    if len(weights) and found.dtype.kind not in "fiu":
        raise TypeError("the weights of a graph must be real numbers. Set them, or pass weighted=False.")
    if not np.isfinite(found).all():
        raise ValueError("the weights of a graph must be finite. Check how they were computed.")
    return found.astype(np.float64)


def _edges_of_matrix(given: ArrayLike) -> tuple[int, Edges]:
    matrix = as_matrix(given)
    destination, source = np.nonzero(matrix)
    return len(matrix), assemble(len(matrix), destination, source, matrix[destination, source])


def _uniform(size: int, edges: Edges) -> Edges:
    received = np.bincount(edges.destination, minlength=size)
    return edges._replace(weight=(1.0 / received)[edges.destination])
