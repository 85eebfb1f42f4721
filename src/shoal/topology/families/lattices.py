"""Static graphs with coordinates: the torus, which is a grid without a border, and the hypercube."""

from __future__ import annotations

import networkx as nx
import numpy as np

from .._edges import Edges, assemble
from .._validate import check_size
from ..schedule import EdgeSchedule
from .graphs import check_shape, closest_factors
from .one_peer import not_a_power_of_two


class Torus(EdgeSchedule):
    """Rows and columns that wrap around: every agent exchanges with the agents above, below, left and right of it.

    All weights are equal: 1/5 with four different neighbours. Along a side of two both neighbours are the same agent,
    and a side of one has none, so there are fewer; a torus of 1 x n is a ring.

    Args:
        size: number of agents, at least 1.
        shape: (rows, columns) with product `size`; by default the two factors that are closest to each other.

    Raises:
        ValueError: the shape does not fit.
    """

    period = 1

    def __init__(self, size: int, shape: tuple[int, int] | None = None) -> None:
        self.size = check_size(size)
        self.shape = closest_factors(self.size) if shape is None else check_shape(shape, self.size)

    def _edges(self, round: int) -> Edges:
        ranks = np.arange(self.size).reshape(self.shape)
        around = {(axis, step % self.shape[axis]) for axis in (0, 1) for step in (-1, 1)}
        neighbours = [ranks, *(np.roll(ranks, step, axis) for axis, step in sorted(around) if step)]
        destination = np.tile(np.arange(self.size), len(neighbours))
        return assemble(self.size, destination, np.stack(neighbours).ravel(), 1.0 / len(neighbours))

    def describe(self) -> str:
        return f"torus of {self.size} agents, {self.shape[0]} x {self.shape[1]}"


class Hypercube(EdgeSchedule):
    """Everybody exchanges with the log2 n agents whose rank differs in one bit; all weights ``1 / (log2(n) + 1)``.

    Its spectral gap is ``2 / (log2(n) + 1)``, that of the static exponential graph, with symmetric weights.

    Args:
        size: number of agents, a power of two.

    Raises:
        ValueError: `size` is not a power of two.
    """

    period = 1

    def __init__(self, size: int) -> None:
        self.size = check_size(size)
        reason = not_a_power_of_two(self.size)
        if reason:
            raise ValueError(reason)

    def _edges(self, round: int) -> Edges:
        flips = np.array([0, *(1 << bit for bit in range((self.size - 1).bit_length()))])
        source = np.sort(np.arange(self.size)[:, None] ^ flips, axis=1)
        destination = np.repeat(np.arange(self.size), len(flips))
        return Edges(destination, source.ravel(), np.full(source.size, 1.0 / len(flips)))

    def describe(self) -> str:
        return f"hypercube of {self.size} agents"


def TorusGraph(size: int, shape: tuple[int, int] | None = None) -> nx.DiGraph:
    """:class:`Torus` as a graph, edge (j, i) with weight ``W[i, j]``."""
    return Torus(size, shape).graph(0)


def HypercubeGraph(size: int) -> nx.DiGraph:
    """:class:`Hypercube` as a graph, edge (j, i) with weight ``W[i, j]``."""
    return Hypercube(size).graph(0)


def no_torus(size: int) -> str:
    """Why these agents make no torus by themselves; empty if they do."""
    rows, _ = closest_factors(size)
    if rows > 1 or size == 1:
        return ""
    return f"a torus needs rows and columns, and {size} is prime. ring is what would come of it."
