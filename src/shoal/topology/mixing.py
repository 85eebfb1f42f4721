"""Mixing weights: the weight of each neighbour, for any graph; their guarantees; and one agent's view of one round.

Entry ``W[i, j]`` of a mixing matrix is the factor of x_j on agent i, so a round of averaging is ``x = W @ x``. The same
number is on the networkx edge ``(j, i)``, which points the way the data flows; networkx's own adjacency matrix
``A[source, destination]`` is therefore the transpose of W. Weights that are given are classified, and never corrected:
equation 8 of the BlueFog paper (Ying et al., arXiv:2111.04287) allows any real number on an edge, negative and above
one included.

Every synchronous neighbour operation is described by one :class:`Mixing`, whether its weights come from a static graph
or from the arguments of a call. It is checked when it is made and cannot change afterwards, so that all other code may
rely on its ranks and weights, use it as the key of a cache, and read plain tuples.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import fsum, isfinite
from types import MappingProxyType

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._validate import as_digraph, as_int, as_weight, check_rank, check_size

TOLERANCE = 1e-6
"""How far a sum may be from one, and an entry from its mirror image, for `classify` to count them as equal.

Weights that were rounded to float32 pass; weights that were rounded to three digits do not, because a state that is
scaled by 0.999 in every round is gone after a few thousand of them.
"""


@dataclass(frozen=True)
class Stochasticity:
    """The properties that a mixing matrix W preserves. `row` and `column` are about sums only; see also `nonnegative`.

    Attributes:
        row: every row sums to one, W 1 = 1, a pull matrix: agents that agree keep agreeing.
        column: every column sums to one, 1^T W = 1^T, a push matrix: the sum over the agents is kept.
        symmetric: W = W^T.
        nonnegative: no weight is negative. With it, `row` and `column` are what is called row- and column-stochastic.
    """

    row: bool
    column: bool
    symmetric: bool
    nonnegative: bool

    @property
    def doubly(self) -> bool:
        """Rows and columns sum to one, so that agreement is kept and it is agreement on the average."""
        return self.row and self.column


def as_matrix(weights: ArrayLike | nx.Graph) -> NDArray[np.float64]:
    """`weights` as a float64 mixing matrix [n, n]; a graph gives its own.

    Raises:
        TypeError: the entries are not real numbers.
        ValueError: not a square matrix, empty, or with an entry that is not finite.
    """
    if isinstance(weights, nx.Graph):
        return mixing_matrix(weights)
    given = np.asarray(weights)
    if given.dtype.kind not in "fiu":
        raise TypeError(f"a mixing matrix has real entries, got dtype {given.dtype}. Pass an array of float64.")
    if given.ndim != 2 or given.shape[0] != given.shape[1] or given.size == 0:
        raise ValueError(f"a mixing matrix is square, one row for each agent, got shape {given.shape}. Pass [n, n].")
    matrix = given.astype(np.float64)
    if not np.isfinite(matrix).all():
        i, j = np.argwhere(~np.isfinite(matrix))[0]
        raise ValueError(f"W[{i}, {j}] is {matrix[i, j]}. Weights must be finite: repair it before mixing with it.")
    return matrix


def mixing_matrix(graph: nx.Graph) -> NDArray[np.float64]:
    """The mixing matrix W of `graph`, float64 [n, n] with ``W[i, j]`` the weight of edge (j, i).

    Rows and columns are in rank order, whatever the order in which nodes were added. An edge without a `weight`
    counts one, as everywhere in networkx; no self loop means ``W[i, i] = 0``.

    Raises:
        TypeError: not a networkx graph, a multigraph, or a weight that is not a real number.
        ValueError: nodes other than 0 to n - 1, or a weight that is not finite.
    """
    digraph = as_digraph(graph)
    size = digraph.number_of_nodes()
    matrix = np.zeros((size, size))
    for source, destination, weight in digraph.edges(data="weight", default=1.0):
        matrix[destination, source] = as_weight(weight, f"edge ({source}, {destination})")
    return as_matrix(matrix)


def with_uniform_weights(graph: nx.Graph) -> nx.DiGraph:
    """`graph` with every agent averaging itself and its in-neighbours equally: ``1 / (in-degree + 1)``.

    Rows sum to one. Columns do too if every agent has as many out-neighbours as in-neighbours, all alike (a ring, an
    exponential graph); on a star or a grid they do not, and the agents then agree on a weighted average.
    """
    digraph = as_digraph(graph)
    size = digraph.number_of_nodes()
    weighted = _empty(size)
    for rank in range(size):
        sources = sorted({*digraph.predecessors(rank), rank})
        weighted.add_weighted_edges_from((source, rank, 1.0 / len(sources)) for source in sources)
    return weighted


def with_metropolis_hastings_weights(graph: nx.Graph) -> nx.DiGraph:
    """`graph` with the Metropolis-Hastings weights, symmetric and doubly stochastic on any undirected graph.

    ``W[i, j] = 1 / (1 + max(d_i, d_j))`` on an edge, with d the number of neighbours, and the rest of each row on the
    diagonal, at least ``1 / (1 + d_i)`` (Xiao, Boyd, Lall 2005, "A Scheme for Robust Distributed Sensor Fusion Based on
    Average Consensus"). An agent needs to know only its own degree and those of its neighbours.

    Raises:
        ValueError: an edge has no edge back. Such a graph has no symmetric weights.
    """
    digraph = as_digraph(graph)
    for source, destination in digraph.edges:
        if not digraph.has_edge(destination, source):
            raise ValueError(
                f"Metropolis-Hastings weights need an undirected graph, but edge ({source}, {destination}) has no edge "
                "back. Add the missing edges (graph.to_undirected()), or use with_uniform_weights(graph)."
            )
    size = digraph.number_of_nodes()
    neighbours = [sorted(set(digraph.successors(rank)) - {rank}) for rank in range(size)]
    weighted = _empty(size)
    for rank in range(size):
        shares = {peer: 1.0 / (1 + max(len(neighbours[rank]), len(neighbours[peer]))) for peer in neighbours[rank]}
        shares[rank] = 1.0 - fsum(shares.values())
        weighted.add_weighted_edges_from((rank, peer, shares[peer]) for peer in sorted(shares))
    return weighted


def metropolis_hastings_weights(neighbours: Mapping[int, int]) -> tuple[float, dict[int, float]]:
    """The Metropolis-Hastings weights of one agent, from local degrees: for links that change from round to round.

    Args:
        neighbours: ``{rank: degree}``, the number of neighbours that each neighbour has.

    Returns:
        ``(self_weight, src_weights)`` as :func:`shoal.neighbor_allreduce` takes them; ``dst_weights`` are the same
        ranks. If all agents do so, W is symmetric and doubly stochastic.
    """
    shares = {rank: 1.0 / (1 + max(len(neighbours), degree)) for rank, degree in neighbours.items()}
    return 1.0 - fsum(shares.values()), shares


def with_weights(support: nx.Graph | ArrayLike, weights: ArrayLike) -> nx.DiGraph:
    """The graph with the edges of `support` and the weights of the mixing matrix `weights`.

    An edge whose weight is zero remains an edge: its message is sent and counts nothing.

    Args:
        support: a graph, or a matrix [n, n] whose entry [i, j] is nonzero where i may receive from j (as in W).
            ``with_weights(W, W)`` is the graph of W itself.
        weights: W, real and finite, [n, n]; ``W[i, j]`` is what agent i multiplies x_j by.

    Raises:
        ValueError: shapes differ, or W is nonzero where `support` has no edge.
    """
    matrix = as_matrix(weights)
    allowed = _support_matrix(support)
    if allowed.shape != matrix.shape:
        raise ValueError(f"W has {len(matrix)} rows and the graph {len(allowed)} nodes. Pass one row for each agent.")
    outside = np.argwhere((matrix != 0) & ~allowed)
    if len(outside):
        i, j = outside[0]
        raise ValueError(
            f"W[{i}, {j}] = {matrix[i, j]}, but there is no edge ({j}, {i}), over which {i} would receive from {j}. "
            "Add the edge, or set the entry to zero. Is W transposed?"
        )
    weighted = _empty(len(matrix))
    weighted.add_weighted_edges_from((int(j), int(i), float(matrix[i, j])) for j, i in np.argwhere(allowed.T))
    return weighted


def GetRecvWeights(topo: nx.DiGraph, rank: int) -> tuple[float, dict[int, float]]:
    """Row `rank` of W as ``(self_weight, {source: weight})``, sources ascending; self_weight 0.0 without a self loop.

    Raises:
        ValueError: `rank` is not in the graph.
    """
    digraph = as_digraph(topo)
    rank = check_rank(rank, digraph.number_of_nodes())
    return _split(rank, {source: digraph.edges[source, rank] for source in digraph.predecessors(rank)})


def GetSendWeights(topo: nx.DiGraph, rank: int) -> tuple[float, dict[int, float]]:
    """Column `rank` of W as ``(self_weight, {destination: weight})``, destinations ascending.

    Raises:
        ValueError: `rank` is not in the graph.
    """
    digraph = as_digraph(topo)
    rank = check_rank(rank, digraph.number_of_nodes())
    return _split(rank, {destination: digraph.edges[rank, destination] for destination in digraph.successors(rank)})


def _empty(size: int) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(size))
    return graph


def _support_matrix(support: nx.Graph | ArrayLike) -> NDArray[np.bool_]:
    """Boolean [n, n], True at [i, j] where i may receive from j; always True on the diagonal."""
    if isinstance(support, nx.Graph):
        digraph = as_digraph(support)
        allowed = np.zeros((digraph.number_of_nodes(),) * 2, dtype=np.bool_)
        for source, destination in digraph.edges:
            allowed[destination, source] = True
    else:
        given = np.asarray(support)
        allowed = np.asarray(as_matrix(given.astype(np.float64) if given.dtype.kind == "b" else given) != 0)
    np.fill_diagonal(allowed, True)
    return allowed


def _split(rank: int, edges: dict[int, dict[str, float]]) -> tuple[float, dict[int, float]]:
    weights = {peer: as_weight(edges[peer].get("weight", 1.0), f"the edge with {peer}") for peer in sorted(edges)}
    return weights.pop(rank, 0.0), weights


@dataclass(frozen=True, init=False, repr=False)
class Mixing:
    """The part of agent i in one round of averaging, equation 10 of the BlueFog paper (arXiv:2111.04287)::

        x_i  <-  self_weight x_i  +  sum over sources j of  r_ij s_ij x_j

    The receiver i knows r_ij, and the sender j scales by s_ij before it sends: pure pull has s = 1, pure push r = 1.
    Weights are any finite real numbers, also negative or above one. Equal values are equal and hash alike.

    Args:
        rank: this agent, i.
        self_weight: w_ii.
        sources: {source j: r_ij}, or an iterable of ranks for r_ij = 1. Not `rank` itself.
        destinations: {destination k: s_ki}, or an iterable of ranks for s_ki = 1. Not `rank` itself.
        size: number of agents; if given, all ranks must be below it. Checked and not kept.

    Attributes:
        sources, destinations: read-only mappings in ascending order of rank.
        source_ranks, source_weights, destination_ranks, destination_weights: their keys and values as tuples.

    Raises:
        TypeError: a rank has no `__index__`, or a weight no `__float__` (a bool is neither).
        ValueError: a rank is negative, out of range, named twice or the agent's own, or a weight is not finite.
    """

    rank: int
    self_weight: float
    sources: Mapping[int, float] = field(compare=False)
    destinations: Mapping[int, float] = field(compare=False)
    source_ranks: tuple[int, ...] = field(init=False)
    source_weights: tuple[float, ...] = field(init=False)
    destination_ranks: tuple[int, ...] = field(init=False)
    destination_weights: tuple[float, ...] = field(init=False)

    def __init__(
        self,
        rank: int,
        self_weight: float,
        sources: Mapping[int, float] | Iterable[int] = (),
        destinations: Mapping[int, float] | Iterable[int] = (),
        *,
        size: int | None = None,
    ) -> None:
        rank = _as_rank(rank, size, "rank")
        receive = _as_weights(sources, rank, size, "source")
        send = _as_weights(destinations, rank, size, "destination")
        # One update of __dict__ instead of eight object.__setattr__: every dynamic call builds one.
        self.__dict__.update(
            rank=rank,
            self_weight=as_weight(self_weight, "self_weight"),
            sources=MappingProxyType(receive),
            destinations=MappingProxyType(send),
            source_ranks=tuple(receive),
            source_weights=tuple(receive.values()),
            destination_ranks=tuple(send),
            destination_weights=tuple(send.values()),
        )

    @classmethod
    def from_graph(cls, graph: nx.Graph, rank: int, *, weighted: bool = True) -> Mixing:
        """The view that agent `rank` has of `graph`, in pull form: the receiver applies the whole weight, s = 1.

        Args:
            graph: nodes 0 to n - 1; edge (j, i) carries ``W[i, j]`` as `weight`.
            rank: whose view.
            weighted: whether to use the weights of the graph. If not, the agent weighs itself and its sources
                equally, ``1 / (in-degree + 1)``.
        """
        digraph = as_digraph(graph)
        size = digraph.number_of_nodes()
        self_weight, sources = GetRecvWeights(digraph, rank)
        if not weighted:
            self_weight = 1.0 / (len(sources) + 1)
            sources = dict.fromkeys(sources, self_weight)
        destinations = (destination for destination in digraph.successors(rank) if destination != rank)
        return cls(rank, self_weight, sources, destinations, size=size)

    @classmethod
    def from_matrix(cls, weights: ArrayLike, rank: int) -> Mixing:
        """The view that agent `rank` has of the mixing matrix W [n, n], in pull form: r_ij = ``W[i, j]``, s = 1.

        Its sources are the nonzero entries of its row, its destinations those of its column.
        """
        matrix = as_matrix(weights)
        rank = check_rank(rank, len(matrix))
        row = {int(source): float(matrix[rank, source]) for source in np.flatnonzero(matrix[rank])}
        self_weight = row.pop(rank, 0.0)
        destinations = (int(destination) for destination in np.flatnonzero(matrix[:, rank]) if destination != rank)
        return cls(rank, self_weight, row, destinations, size=len(matrix))

    def without(self, gone: Iterable[int]) -> Mixing:
        """The same without some ranks: no messages go to them, and their weights as sources are added to the self
        weight.
        """
        lost = set(gone)
        if lost.isdisjoint(self.source_ranks) and lost.isdisjoint(self.destination_ranks):
            return self
        sources = {rank: weight for rank, weight in self.sources.items() if rank not in lost}
        destinations = {rank: weight for rank, weight in self.destinations.items() if rank not in lost}
        own = self.self_weight + sum(weight for rank, weight in self.sources.items() if rank in lost)
        return Mixing(self.rank, own, sources, destinations)

    def rotated_destinations(self, size: int) -> tuple[int, ...]:
        """The destinations in the order rank + 1, rank + 2, ... modulo `size`, so that not all agents begin with 0.

        Raises:
            ValueError: a destination, or this agent, is not below `size`.
        """
        size = check_size(size)
        highest = max((self.rank, *self.destination_ranks[-1:]))
        if highest >= size:
            raise ValueError(f"this mixing names rank {highest}, but size is {size}. Pass the number of agents.")
        ahead = bisect(self.destination_ranks, self.rank)
        return self.destination_ranks[ahead:] + self.destination_ranks[:ahead]

    def __repr__(self) -> str:
        return (
            f"Mixing(rank={self.rank}, self_weight={self.self_weight}, "
            f"sources={dict(self.sources)}, destinations={dict(self.destinations)})"
        )

    def __reduce__(self) -> tuple[type[Mixing], tuple[int, float, dict[int, float], dict[int, float]]]:
        # A mappingproxy can be neither pickled nor copied.
        return type(self), (self.rank, self.self_weight, dict(self.sources), dict(self.destinations))


def _as_weights(given: Mapping[int, float] | Iterable[int], rank: int, size: int | None, role: str) -> dict[int, float]:
    """The checked weights, ranks ascending."""
    pairs = given.items() if isinstance(given, Mapping) else ((peer, 1.0) for peer in given)
    weights: dict[int, float] = {}
    for peer, weight in pairs:
        peer = _as_rank(peer, size, role)
        if peer == rank:
            raise ValueError(f"{role} {peer} is the agent itself. Leave it out, and give its share as self_weight.")
        if peer in weights:
            raise ValueError(f"{role} {peer} of agent {rank} is named twice. Name each rank once.")
        weights[peer] = weight if type(weight) is float and isfinite(weight) else as_weight(weight, f"{role} {peer}")
    if len(weights) < 2:
        return weights
    return {peer: weights[peer] for peer in sorted(weights)}


def _as_rank(rank: object, size: int | None, name: str) -> int:
    checked = rank if type(rank) is int else as_int(rank, name)
    if size is not None:
        return check_rank(checked, size, name)
    if checked < 0:
        raise ValueError(f"{name} {checked} is negative. Ranks count from 0.")
    return checked
