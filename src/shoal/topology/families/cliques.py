"""D-Cliques: fully connected groups whose joint data are distributed like all agents' data, and a few edges between the
groups.

If the agents' labels differ, an average over neighbours with the same labels is of no use. So agents are put into
cliques that have all labels in nearly the global proportions, and an average inside a clique is nearly as good as one
over all agents.

Bellet, Kermarrec, Lavoie 2021, "D-Cliques: Compensating for Data Heterogeneity with Topology in Decentralized Federated
Learning", arXiv:2104.07365.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._random import check_seed, permutation
from .._validate import check_size
from ..weights import with_metropolis_hastings_weights
from .graphs import powers_below

Cliques = list[list[int]]
"""The ranks of each clique, ascending."""


def DCliquesGraph(
    size: int, clique_size: int = 10, between: str = "small-world", cliques: Cliques | None = None
) -> nx.DiGraph:
    """Cliques and edges between them, with Metropolis-Hastings weights.

    An edge between two cliques ends at the agents of each that have the fewest such edges so far. The number of edges:
    ``ring`` has one between each clique and the next; ``full`` one between any two cliques; ``small-world`` connects a
    clique with those 2**i and 2**i + 1 ahead and behind on a ring of cliques, i = 0, 1, ..., O(log n) edges a clique.

    Args:
        size: number of agents, at least 1.
        clique_size: the most agents of one clique; cliques differ by one at most.
        between: ``ring``, ``small-world`` or ``full``.
        cliques: the ranks of each clique; by default consecutive ranks. :func:`label_cliques` finds good ones.

    Raises:
        ValueError: `cliques` does not name every rank exactly once, or `between` is none of the three.
    """
    size = check_size(size)
    groups = _consecutive(size, check_size(clique_size, "clique_size")) if cliques is None else cliques
    if sorted(rank for clique in groups for rank in clique) != list(range(size)):
        raise ValueError(f"cliques must name each of the ranks 0 to {size - 1} exactly once.")
    if between not in _BETWEEN:
        raise ValueError(f"between is {between!r}. Pass one of {', '.join(sorted(_BETWEEN))}.")
    graph = nx.Graph()
    graph.add_nodes_from(range(size))
    for clique in groups:
        graph.add_edges_from(combinations(clique, 2))
    edges_out = np.zeros(size, dtype=np.int64)
    for first, second in _BETWEEN[between](len(groups)):
        ends = [min(groups[clique], key=lambda rank: (edges_out[rank], rank)) for clique in (first, second)]
        edges_out[ends] += 1
        graph.add_edge(*ends)
    return with_metropolis_hastings_weights(graph)


def label_cliques(labels: ArrayLike, clique_size: int = 10, seed: int = 0, tries: int = 1000) -> Cliques:
    """Cliques whose labels are distributed nearly like all agents': greedy swaps, as in the paper's algorithm 2.

    From random cliques on, two of them are drawn, and of all exchanges of one agent for another between the two the
    best is made, if it lowers the sum of their skews (the paper makes any that does). The skew of a clique is the sum
    over labels of ``|p_C - p|``, where p_C is its distribution of labels and p that of all agents.

    Args:
        labels: how many examples of each label an agent has, [n, labels], not negative, and at least one for every
            agent.
        clique_size: the most agents of one clique; cliques differ by one at most.
        seed: 0 to 2**64 - 1, the same on every agent.
        tries: how many times two cliques are drawn.

    Returns:
        The ranks of each clique, ascending.
    """
    shares = _as_shares(labels)
    size = len(shares)
    seed = check_seed(seed)
    order = permutation(size, seed, 0)
    cliques = [order[clique] for clique in _consecutive(size, check_size(clique_size, "clique_size"))]
    everybody = shares.mean(axis=0)
    for attempt in range(1, tries + 1 if len(cliques) > 1 else 1):
        first, second = (cliques[index] for index in permutation(len(cliques), seed, attempt)[:2])
        _swap_best(first, second, shares, everybody)
    return [sorted(clique.tolist()) for clique in cliques]


def _swap_best(
    first: NDArray[np.int64], second: NDArray[np.int64], shares: NDArray[np.float64], everybody: NDArray[np.float64]
) -> None:
    change = shares[second][None, :, :] - shares[first][:, None, :]
    off_first = shares[first].mean(axis=0) - everybody
    off_second = shares[second].mean(axis=0) - everybody
    after = np.abs(off_first + change / len(first)).sum(-1) + np.abs(off_second - change / len(second)).sum(-1)
    here, there = np.unravel_index(int(after.argmin()), after.shape)
    # Rounding alone must not count as a gain, or equal agents would go to and fro.
    if after[here, there] < np.abs(off_first).sum() + np.abs(off_second).sum() - 1e-12:
        first[here], second[there] = second[there], first[here]


def _as_shares(labels: ArrayLike) -> NDArray[np.float64]:
    counts = np.asarray(labels, dtype=np.float64)
    if counts.ndim != 2 or counts.size == 0:
        raise ValueError(f"labels has shape {counts.shape}. Pass counts [agents, labels].")
    totals = counts.sum(axis=1, keepdims=True)
    if (counts < 0).any() or not np.isfinite(counts).all() or (totals == 0).any():
        raise ValueError("labels must be counts, none negative, and every agent must have an example.")
    shares: NDArray[np.float64] = counts / totals
    return shares


def _consecutive(size: int, clique_size: int) -> Cliques:
    return [part.tolist() for part in np.array_split(np.arange(size), -(-size // clique_size))]


def _ring(count: int) -> Iterator[tuple[int, int]]:
    return ((clique, (clique + 1) % count) for clique in range(count if count > 2 else count - 1))


def _small_world(count: int) -> Iterator[tuple[int, int]]:
    for clique in range(count):
        for hop in powers_below(count):
            for away in (-hop, -hop - 1, hop, hop + 1):
                if away % count:
                    yield clique, (clique + away) % count


def _full(count: int) -> Iterator[tuple[int, int]]:
    return combinations(range(count), 2)


_BETWEEN = {"ring": _ring, "small-world": _small_world, "full": _full}
