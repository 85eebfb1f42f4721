"""Small worlds: a ring of near neighbours, some of whose edges were moved to random agents far away."""

from __future__ import annotations

import networkx as nx

from ._random import check_seed
from ._validate import check_size
from .weights import with_metropolis_hastings_weights

_DRAWS = 100


def SmallWorldGraph(size: int, degree: int = 4, rewired: float = 0.3, seed: int = 0) -> nx.DiGraph:
    """A connected Watts-Strogatz graph (Nature 393, 1998) with Metropolis-Hastings weights.

    A draw that is not connected is made again, from the same seed. Up to ``degree + 1`` agents are all connected. The
    draws are networkx's own, so agents should have the same release of it.

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
    try:
        drawn = nx.connected_watts_strogatz_graph(size, degree, rewired, tries=_DRAWS, seed=check_seed(seed))
    except nx.NetworkXError as error:
        raise ValueError(
            f"none of {_DRAWS} small worlds of {size} agents was connected. Give them a larger degree than {degree}, "
            f"or move fewer edges than {rewired} of them."
        ) from error
    return with_metropolis_hastings_weights(drawn)
