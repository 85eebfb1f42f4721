"""One agent's view of one round: its self weight, its sources with weights, and its destinations with scales.

Every synchronous neighbour operation is described by one :class:`Mixing`, whether its weights come from a static graph
or from the arguments of a call. It is checked when it is made and cannot change afterwards, so that all other code may
rely on its ranks and weights, use it as the key of a cache, and read plain tuples.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from types import MappingProxyType

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike

from ._validate import as_digraph, as_int, as_weight, check_rank, check_size
from .weights import GetRecvWeights, as_matrix


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
