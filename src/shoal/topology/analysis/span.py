"""The rounds of a topology for an analysis, as sparse operators that are applied and never stored as matrices.

A periodic topology is known from one period, a random one only from a sample of its rounds. The code here, and the code
that uses it, never stores a round of more than :data:`EDGE_LIMIT` edges or a matrix of more than :data:`DENSE_LIMIT`
agents: 100,000 agents of a sparse graph are analysed in the memory of a laptop, and a dense graph of as many is
refused.

Other functions follow the spread of information along edges, without weights: which agents it reaches, and after how
many rounds. An agent keeps all information that it has received, and sends all of it in each message. An edge whose
weight is zero carries a message without effect, so it is no edge here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import astuple
from functools import cached_property, reduce
from itertools import count
from typing import TypeAlias

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from .._validate import EDGE_LIMIT, as_digraph
from ..families.compose import AllReduce, Kronecker
from ..mixing import TOLERANCE, Stochasticity
from ..schedule import AnyTopology, Edges, EdgeSchedule, Neighbours, Ranks, Schedule, as_schedule, assemble, distinct

Vector: TypeAlias = NDArray[np.float64]

HELD_LIMIT = 20_000_000
"""Edges of all rounds that are held at a time."""

DENSE_LIMIT = 512
"""Agents up to which matrices [n, n] are written out and decomposed."""

SAMPLED_ROUNDS = 64
"""Rounds looked at of a topology that never repeats."""

LONGEST_PERIOD = 4096
"""The most rounds that are analysed of a schedule that repeats."""


class RoundMap:
    """One round of all agents, with the edges that carry a weight, as the linear map ``x -> W x``."""

    def __init__(self, size: int, edges: Edges) -> None:
        self.size = size
        self.edges = edges

    @cached_property
    def weighty(self) -> Edges:
        """The edges whose weight is not zero."""
        nonzero = self.edges.weight != 0.0
        return self.edges if nonzero.all() else Edges(*(array[nonzero] for array in self.edges))

    def apply(self, x: Vector) -> Vector:
        """``W x``, float64 [n]."""
        destination, source, weight = self.weighty
        return _summed(destination, weight * x[source], self.size)

    def apply_transposed(self, x: Vector) -> Vector:
        """``W^T x``, float64 [n]."""
        destination, source, weight = self.weighty
        return _summed(source, weight * x[destination], self.size)

    def matrix(self) -> NDArray[np.float64]:
        """W, float64 [n, n], for at most :data:`DENSE_LIMIT` agents."""
        dense = np.zeros((self.size, self.size))
        dense[self.edges.destination, self.edges.source] = self.edges.weight
        return dense

    @cached_property
    def stochasticity(self) -> Stochasticity:
        """The properties that W preserves, to :data:`~shoal.topology.mixing.TOLERANCE`."""
        return self.classified(TOLERANCE)

    def classified(self, tolerance: float) -> Stochasticity:
        """The properties that W preserves, with an absolute tolerance for sums and entries."""
        destination, source, weight = self.weighty
        rows, columns = _summed(destination, weight, self.size), _summed(source, weight, self.size)
        return Stochasticity(
            row=bool((np.abs(rows - 1.0) <= tolerance).all()),
            column=bool((np.abs(columns - 1.0) <= tolerance).all()),
            symmetric=self._is_symmetric(tolerance),
            nonnegative=bool((weight >= -tolerance).all()),
        )

    def _is_symmetric(self, tolerance: float) -> bool:
        # An entry may be missing on one side and within the tolerance of zero on the other, so differences are summed.
        destination, source, weight = self.weighty
        both = assemble(
            self.size,
            np.concatenate([destination, source]),
            np.concatenate([source, destination]),
            np.concatenate([weight, -weight]),
        )
        return bool((np.abs(both.weight) <= tolerance).all())


class Span:
    """Consecutive rounds of a topology.

    Args:
        topology: a graph with its weights, a mixing matrix, or a schedule.
        rounds: how many; by default a period, or :data:`SAMPLED_ROUNDS` of a topology that has none. It may get fewer,
            namely as many as :data:`LONGEST_PERIOD` and :data:`HELD_LIMIT` allow.
        first: the first one.

    Attributes:
        schedule: the topology.
        size: number of agents n.
        first: the first round.
        rounds: the rounds.
        whole: these rounds are a period, and so all there is to know.

    Raises:
        ValueError: one round alone has more than :data:`EDGE_LIMIT` edges.
    """

    def __init__(self, topology: AnyTopology, rounds: int | None = None, first: int = 0) -> None:
        if isinstance(topology, nx.Graph):
            graph = as_digraph(topology)
            check_edges(graph.number_of_nodes(), graph.number_of_edges())
        elif not isinstance(topology, Schedule) and np.ndim(topology) == 2:
            check_edges(len(topology), int(np.count_nonzero(topology)))  # type: ignore[arg-type]
        self.schedule = as_schedule(topology)
        self.size = self.schedule.size
        self.first = first
        wanted = rounds or self.schedule.period or SAMPLED_ROUNDS
        self.rounds: list[RoundMap] = []
        held = 0
        for round in range(first, first + min(wanted, LONGEST_PERIOD)):
            if self.size**2 > EDGE_LIMIT:
                check_edges(self.size, _at_least(self.schedule, round))
            edges = self.schedule.edges(round)
            check_edges(self.size, len(edges.weight))
            held += len(edges.weight)
            if self.rounds and held > HELD_LIMIT:
                break
            self.rounds.append(RoundMap(self.size, edges))
        self.whole = first == 0 and len(self.rounds) == self.schedule.period

    def __len__(self) -> int:
        return len(self.rounds)

    def __getitem__(self, round: int) -> RoundMap:
        """The round that is `round` after the first, also one beyond the span."""
        if self.whole:
            return self.rounds[round % len(self.rounds)]
        if round < len(self.rounds):
            return self.rounds[round]
        return RoundMap(self.size, self.schedule.edges(self.first + round))

    def __iter__(self) -> Iterator[RoundMap]:
        return iter(self.rounds)

    def head(self, rounds: int) -> Span:
        """The span of its first `rounds` rounds, of all if there are fewer."""
        first = copy(self)
        first.__dict__.pop("stochasticity", None)
        first.rounds = self.rounds[:rounds]
        first.whole = self.whole and len(first.rounds) == len(self.rounds)
        return first

    @property
    def edges(self) -> int:
        """The edges of all its rounds together, which is what an application of them costs."""
        return sum(len(round.edges.weight) for round in self.rounds)

    @cached_property
    def stochasticity(self) -> Stochasticity:
        """The properties that all of the rounds preserve."""
        return _common(round.stochasticity for round in self.rounds)

    def apply(self, x: Vector) -> Vector:
        """``W_{p-1} ... W_1 W_0 x``."""
        return reduce(lambda value, round: round.apply(value), self.rounds, x)

    def apply_transposed(self, x: Vector) -> Vector:
        """``W_0^T W_1^T ... W_{p-1}^T x``."""
        return reduce(lambda value, round: round.apply_transposed(value), reversed(self.rounds), x)

    def matrix(self) -> NDArray[np.float64]:
        """``W_{p-1} ... W_0``, float64 [n, n], for at most :data:`DENSE_LIMIT` agents."""
        product = np.eye(self.size)
        for round in self.rounds:
            product = round.matrix() @ product
        return product


def classify(topology: AnyTopology, *, tolerance: float = TOLERANCE) -> Stochasticity:
    """The properties that a mixing matrix preserves: the matrix of a graph, a matrix W itself, or all matrices of a
    schedule.

    Args:
        topology: a graph with its weights, a matrix [n, n], or a schedule. All rounds of its period count; if it never
            repeats, the first :data:`SAMPLED_ROUNDS` count.
        tolerance: absolute, on each row and column sum and on each entry; see
            :data:`~shoal.topology.mixing.TOLERANCE`.

    Raises:
        TypeError, ValueError: no topology, weights that are not finite real numbers, or more than :data:`EDGE_LIMIT`
            edges in a round.
    """
    return _common(round.classified(tolerance) for round in Span(topology))


def check_edges(size: int, edges: int) -> None:
    """Raise if a round of so many edges is too dense to be held.

    Raises:
        ValueError: more than :data:`EDGE_LIMIT`, with the size.
    """
    if edges > EDGE_LIMIT:
        raise ValueError(
            f"{size} agents with {edges:,} edges in a round, {24 * edges / 1e9:.1f} GB, are too dense to analyse: the "
            f"limit is {EDGE_LIMIT:,} edges. Analyse fewer agents of it, or take a sparser topology."
        )


def _common(every: Iterable[Stochasticity]) -> Stochasticity:
    row, column, symmetric, nonnegative = (all(column) for column in zip(*map(astuple, every), strict=True))
    return Stochasticity(row, column, symmetric, nonnegative)


def _summed(places: Ranks, values: Vector, size: int) -> Vector:
    return np.bincount(places, weights=values, minlength=size).astype(np.float64, copy=False)


def _at_least(schedule: Schedule, round: int) -> int:
    """About how many edges a round has at least, found without building them, where that can be found."""
    if isinstance(schedule, AllReduce):
        return schedule.size**2
    if isinstance(schedule, Kronecker):
        return _at_least(schedule.between, round) * _at_least(schedule.inside, round)
    if type(schedule).mixing is EdgeSchedule.mixing:
        return schedule.size
    # The least of a few distinguishes a dense round from one with a few busy agents, such as a star.
    some = {0, schedule.size // 2, schedule.size - 1}
    return schedule.size * min(len(schedule.mixing(round, rank).source_ranks) + 1 for rank in some)


Bits: TypeAlias = NDArray[np.uint64]


def union(span: Span) -> tuple[Ranks, Ranks]:
    """Sources and destinations of all edges of all rounds, each once."""
    if len(span) == 1:
        return span[0].weighty.source, span[0].weighty.destination
    keys = distinct(np.concatenate([round.weighty.source * span.size + round.weighty.destination for round in span]))
    return keys // span.size, keys % span.size


def is_connected(span: Span) -> bool:
    """Whether, as the rounds repeat, every agent's information reaches every other."""
    source, destination = union(span)
    forth = Neighbours(span.size, source, destination)
    if (forth.hops_from(0) < 0).any():
        return False
    if span.stochasticity.doubly and span.stochasticity.nonnegative:
        # The flow into a set of agents then equals the flow out of it, so a path to it implies a path back.
        return True
    return bool((Neighbours(span.size, destination, source).hops_from(0) >= 0).all())


def spread(span: Span, first: int, sources: Ranks) -> Iterator[Bits]:
    """The agents that information from each source has reached before round `first`, before the next one, and so on
    without end.

    Yields:
        bits, uint64 [n, words], bit ``k % 64`` of word ``k // 64`` for ``sources[k]``; one array, changed in place.
    """
    numbers = np.arange(len(sources))
    received = np.zeros((span.size, (len(sources) + 63) // 64), dtype=np.dtype("<u8"))
    np.bitwise_or.at(received, (sources, numbers // 64), np.uint64(1) << (numbers % 64).astype(np.uint64))
    for round in count(first):
        yield received
        _pass_on(received, span[round])


def unpack(received: Bits, sources: int) -> NDArray[np.uint8]:
    """The bits of :func:`spread` as zeros and ones, uint8 [n, sources]."""
    return np.unpackbits(received.view(np.uint8), axis=1, count=sources, bitorder="little")


def _pass_on(received: Bits, round: RoundMap) -> None:
    destination, source, _ = round.weighty
    if not len(source):
        return
    starts = np.flatnonzero(np.r_[True, destination[1:] != destination[:-1]])
    received[destination[starts]] |= np.bitwise_or.reduceat(received[source], starts, axis=0)
