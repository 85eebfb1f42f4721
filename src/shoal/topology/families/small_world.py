"""Small worlds: a ring of near neighbours, some of whose edges were moved to random agents far away.

Agents that draw such a graph separately must all draw the same one, with any release of networkx. So the draws are made
here, from the bits of Python's Mersenne Twister, which are the same in every release of Python.
"""

from __future__ import annotations

from random import Random

import networkx as nx

from .._random import check_seed
from .._validate import check_size
from ..weights import with_metropolis_hastings_weights

_DRAWS = 100


def SmallWorldGraph(size: int, degree: int = 4, rewired: float = 0.3, seed: int = 0) -> nx.DiGraph:
    """A connected Watts-Strogatz graph (Nature 393, 1998) with Metropolis-Hastings weights.

    A draw that is not connected is made again, from the same seed. Up to ``degree + 1`` agents are all connected.

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
