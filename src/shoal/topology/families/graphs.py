"""Communication graphs with their weights: BlueFog's graphs, trees, small worlds and D-Cliques; questions to a graph.

Each constructor returns a ``networkx.DiGraph`` over the ranks 0 to n - 1. An edge (j, i) points the way the data flows,
from source j to destination i, and its attribute ``weight`` is ``W[i, j]``, the factor of x_j on agent i. Every agent
has a self loop, its own share. All of them are doubly stochastic, so that agents agree on the plain average. Names in
capitals are BlueFog's, or like BlueFog's.

Spanning trees have the fewest edges that connect all agents, n - 1 of them. Averages over a tree are slow, but a tree
has exactly one path from one agent to another. RelaySGD (Vogels et al. 2021, arXiv:2110.04175) needs that to relay sums
without counting an agent twice.

D-Cliques are for agents whose labels differ: an average over neighbours with the same labels is of no use. So agents
are put into cliques that have all labels in nearly the global proportions, with a few edges between the cliques, and an
average inside a clique is nearly as good as one over all agents (Bellet, Kermarrec, Lavoie 2021, "D-Cliques:
Compensating for Data Heterogeneity with Topology in Decentralized Federated Learning", arXiv:2104.07365).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from math import isqrt
from random import Random

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._random import check_seed, permutation
from .._validate import as_digraph, as_int, check_rank, check_size
from ..mixing import with_metropolis_hastings_weights

_DRAWS = 100
"""How often a small world is drawn until one is connected."""


def ExponentialTwoGraph(size: int) -> nx.DiGraph:
    """Each agent sends to those 1, 2, 4, 8, ... ranks ahead, equal weights ``1 / (ceil(log2(n)) + 1)``.

    The default topology: degree O(log n) and a spectral gap of at least ``2 / (1 + ceil(log2(n)))``, with equality for
    even n (Ying et al. 2021, "Exponential Graph is Provably Efficient", arXiv:2110.13363, proposition 1).

    Args:
        size: number of agents, at least 1.
    """
    return ExponentialGraph(size, base=2)


def ExponentialGraph(size: int, base: int = 2) -> nx.DiGraph:
    """Each agent sends to those 1, base, base**2, ... ranks ahead (below `size`), with equal weights.

    Powers are exact integers. BlueFog tests for them with a floating-point logarithm and so misses some, such as
    243 = 3**5 and 1000 = 10**3: there, graphs of base 3 with more than 243 agents lack edges that this one has.

    Args:
        size: number of agents, at least 1.
        base: at least 2; a larger base gives fewer edges.
    """
    size = check_size(size)
    return _circulant(size, powers_below(size, check_base(base)))


def SymmetricExponentialGraph(size: int, base: int = 4) -> nx.DiGraph:
    """Each agent exchanges with those 1, base, base**2, ... ranks ahead and behind, up to half way round.

    All weights are equal, and the powers are exact, as in :func:`ExponentialGraph`.

    Args:
        size: number of agents, at least 1.
        base: at least 2; a larger base gives fewer edges.
    """
    size = check_size(size)
    hops = list(powers_below(size // 2 + 1, check_base(base)))
    return _circulant(size, [*hops, *(-hop for hop in hops)])


def RingGraph(size: int, connect_style: int = 0) -> nx.DiGraph:
    """Agents in a circle, with equal weights: 1/3 in both directions, 1/2 in one.

    Args:
        size: number of agents, at least 1.
        connect_style: 0 for both directions, 1 to send to the left only (i to i - 1), 2 to the right only (i to i + 1).
    """
    size = check_size(size)
    return _circulant(size, RING_HOPS[check_style(connect_style)])


def StarGraph(size: int, center_rank: int = 0) -> nx.DiGraph:
    """One agent in the middle that exchanges with all others, weight ``1 / n`` each way; leaves keep ``1 - 1 / n``.

    These are the Metropolis-Hastings weights of a star. Uniform weights on it would not be doubly stochastic.

    Args:
        size: number of agents, at least 1.
        center_rank: the agent in the middle, 0 to size - 1.
    """
    size = check_size(size)
    center = check_rank(center_rank, size, "center_rank")
    return _metropolis_hastings(size, ((center, leaf) for leaf in range(size) if leaf != center))


def MeshGrid2DGraph(size: int, shape: tuple[int, int] | None = None) -> nx.DiGraph:
    """A grid of rows and columns without wrap-around, ranks row by row, Metropolis-Hastings weights.

    Args:
        size: number of agents, at least 1.
        shape: (rows, columns) with ``rows * columns == size``. By default the two factors of `size` that are closest
            to each other, the smaller one first; for a prime number that is a chain.
    """
    size = check_size(size)
    rows, columns = closest_factors(size) if shape is None else check_shape(shape, size)
    right = ((rank, rank + 1) for rank in range(size) if (rank + 1) % columns)
    down = ((rank, rank + columns) for rank in range((rows - 1) * columns))
    return _metropolis_hastings(size, [*right, *down])


def FullyConnectedGraph(size: int) -> nx.DiGraph:
    """Each agent exchanges with every other, equal weights ``1 / n``: one round is the exact average.

    Args:
        size: number of agents, at least 1.
    """
    size = check_size(size)
    return _circulant(size, range(size))


def IsTopologyEquivalent(topo1: nx.DiGraph | None, topo2: nx.DiGraph | None) -> bool:
    """Whether two graphs have the same ranks, the same edges, and exactly the same weights (absent means one).

    Not isomorphism: ranks are not renamed. An edge of weight zero is an edge. None equals nothing, itself included.
    """
    if topo1 is None or topo2 is None:
        return False
    return _weighted_edges(topo1) == _weighted_edges(topo2)


def IsRegularGraph(topo: nx.DiGraph) -> bool:
    """Whether all agents have the same number of in-neighbours and of out-neighbours, themselves not counted.

    Uniform weights on a regular graph are doubly stochastic. BlueFog compares the sums of in- and out-degree, and so
    counts a one-way chain of two, where one agent only sends and the other only receives, as regular; this does not.
    """
    digraph = as_digraph(topo)
    degrees = {
        (digraph.in_degree(rank) - loop, digraph.out_degree(rank) - loop)
        for rank in digraph
        for loop in [int(digraph.has_edge(rank, rank))]
    }
    return len(degrees) == 1


def powers_below(limit: int, base: int = 2) -> Iterator[int]:
    """1, base, base**2, ... as long as they are below `limit`."""
    power = 1
    while power < limit:
        yield power
        power *= base


def _circulant(size: int, hops: Iterable[int]) -> nx.DiGraph:
    """Every agent sends to itself and `hops` ahead of it, modulo `size`, all with the same weight."""
    shifts = {0, *(hop % size for hop in hops)}
    weight = 1.0 / len(shifts)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(size))
    for source in range(size):
        destinations = sorted((source + shift) % size for shift in shifts)
        graph.add_weighted_edges_from((source, destination, weight) for destination in destinations)
    return graph


def _metropolis_hastings(size: int, edges: Iterable[tuple[int, int]]) -> nx.DiGraph:
    support = nx.Graph()
    support.add_nodes_from(range(size))
    support.add_edges_from(edges)
    return with_metropolis_hastings_weights(support)


def closest_factors(size: int) -> tuple[int, int]:
    """The rows and columns of a grid that is as near to a square as can be, rows first and not more than columns."""
    rows = next(factor for factor in range(isqrt(size), 0, -1) if size % factor == 0)
    return rows, size // rows


def odd(size: int) -> str:
    """Why these agents cannot all be paired; empty if they can, or if there is but one."""
    if size == 1 or size % 2 == 0:
        return ""
    return f"pairs need an even number of agents, and {size} is odd. random-matchings lets one sit out a round."


def check_shape(shape: tuple[int, int], size: int) -> tuple[int, int]:
    """The rows and columns in `shape`, if so many agents fill them."""
    if len(shape) != 2:
        raise ValueError(f"shape is {shape!r}. Pass two numbers, (rows, columns).")
    rows, columns = check_size(shape[0], "shape[0]"), check_size(shape[1], "shape[1]")
    if rows * columns != size:
        closest = closest_factors(size)
        raise ValueError(
            f"a grid of {rows} x {columns} has {rows * columns} places for {size} agents. "
            f"Pass a shape with product {size}, such as {closest}, or leave it out."
        )
    return rows, columns


RING_HOPS = ((-1, 1), (-1,), (1,))
"""The hops of a ring, by its ``connect_style``."""


def check_style(connect_style: int) -> int:
    """The ``connect_style`` of a ring: 0 for both directions, 1 for the left only, 2 for the right only."""
    style = as_int(connect_style, "connect_style")
    if style not in (0, 1, 2):
        raise ValueError(f"connect_style is {style}. Pass 0 for both directions, 1 for left only, 2 for right only.")
    return style


def check_base(base: int) -> int:
    """A base of powers, at least two."""
    checked = as_int(base, "base")
    if checked < 2:
        raise ValueError(f"base is {checked}. Pass a whole number of at least 2.")
    return checked


def _weighted_edges(graph: nx.DiGraph) -> tuple[int, dict[tuple[int, int], float]]:
    digraph = as_digraph(graph)
    edges = {(source, destination): weight for source, destination, weight in digraph.edges(data="weight", default=1.0)}
    return digraph.number_of_nodes(), edges


def ChainGraph(size: int) -> nx.DiGraph:
    """Agents in a line, each exchanging with the one before and the one after.

    Args:
        size: number of agents, at least 1.
    """
    return with_metropolis_hastings_weights(nx.path_graph(check_size(size)))


def TreeGraph(size: int, arity: int = 2) -> nx.DiGraph:
    """A tree filled level by level: agent 0 at the top, and the parent of agent i is ``(i - 1) // arity``.

    Args:
        size: number of agents, at least 1.
        arity: children of an agent, at least 1; with 1 it is a chain.
    """
    return with_metropolis_hastings_weights(nx.full_rary_tree(check_size(arity, "arity"), check_size(size)))


def SpanningTreeGraph(graph: nx.Graph, root: int = 0) -> nx.DiGraph:
    """A tree out of the edges of `graph`, with as few steps as possible from `root` to each agent.

    Neighbours are visited in the order of their ranks, so that all agents find the same tree.

    Args:
        graph: nodes 0 to n - 1, connected; the direction of its edges does not count.
        root: the agent at the top.

    Raises:
        ValueError: some agent cannot be reached.
    """
    undirected = as_digraph(graph).to_undirected()
    root = check_rank(root, undirected.number_of_nodes(), "root")
    tree = nx.Graph(nx.bfs_edges(undirected, root, sort_neighbors=sorted))
    tree.add_node(root)
    missing = sorted(set(undirected) - set(tree))
    if missing:
        raise ValueError(
            f"there is no tree over all {undirected.number_of_nodes()} agents: no way leads from {root} to "
            f"{missing[0]}. Connect the graph, or take the tree of one of its components."
        )
    return with_metropolis_hastings_weights(tree)


def SmallWorldGraph(size: int, degree: int = 4, rewired: float = 0.3, seed: int = 0) -> nx.DiGraph:
    """A connected Watts-Strogatz graph (Nature 393, 1998) with Metropolis-Hastings weights.

    A draw that is not connected is made again, from the same seed. Up to ``degree + 1`` agents are all connected.
    Agents that draw such a graph separately must all draw the same one, with any release of networkx. So the draws are
    made here, from the bits of Python's Mersenne Twister, which are the same in every release of Python.

    Args:
        size: number of agents, at least 1.
        degree: neighbours of an agent on the ring, both sides together, an even number of at least 2.
        rewired: the probability that an edge is moved, 0 to 1.
        seed: 0 to 2**64 - 1, the same on every agent.

    Raises:
        ValueError: an argument is out of range, or no draw was connected, as happens to many agents of degree 2.
    """
    size, degree = check_size(size), check_size(degree, "degree")
    if degree % 2:
        raise ValueError(f"degree is {degree}. Pass an even number: half of the neighbours are on each side.")
    if not 0 <= rewired <= 1:
        raise ValueError(f"rewired is {rewired}. Pass a probability, 0 to 1.")
    if size <= degree + 1:
        return with_metropolis_hastings_weights(nx.complete_graph(size))
    random = Random(check_seed(seed))
    for _ in range(_DRAWS):
        drawn = _draw(size, degree, rewired, random)
        if nx.is_connected(drawn):
            return with_metropolis_hastings_weights(drawn)
    raise ValueError(
        f"none of {_DRAWS} small worlds of {size} agents was connected. Give them a larger degree than {degree}, "
        f"or move fewer edges than {rewired} of them."
    )


def _draw(size: int, degree: int, rewired: float, random: Random) -> nx.Graph:
    """One draw, connected or not: edges to the nearest first, each moved at its far end, or kept."""
    ring = [(rank, (rank + hop) % size) for hop in range(1, degree // 2 + 1) for rank in range(size)]
    graph = nx.Graph(ring)
    for rank, peer in ring:
        if random.random() >= rewired:
            continue
        moved = _other_end(graph, rank, random)
        if moved is not None:
            graph.remove_edge(rank, peer)
            graph.add_edge(rank, moved)
    return graph


def _other_end(graph: nx.Graph, rank: int, random: Random) -> int | None:
    """An agent that `rank` has no edge to; None if it has edges to all."""
    size = len(graph)
    if graph.degree(rank) == size - 1:
        return None
    while (peer := _below(size, random)) == rank or graph.has_edge(rank, peer):
        pass
    return peer


def _below(limit: int, random: Random) -> int:
    """Uniform in 0 to limit - 1: bits are drawn until they make such a number."""
    while (drawn := random.getrandbits(limit.bit_length())) >= limit:
        pass
    return drawn


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
