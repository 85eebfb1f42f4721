"""A whole round as arrays: its edges in one fixed order, the ways in which schedules make them, and walks along them.

Everything but :class:`Neighbours` is vectorised, so that a round of 100,000 agents takes milliseconds.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .mixing import Mixing

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
