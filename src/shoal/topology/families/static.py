"""Static schedules for any number of agents: rings, exponential graphs and other circulant ones, tori and hypercubes.

A circulant graph is one in which every agent has the same surroundings. These are the same graphs as
:func:`~shoal.topology.RingGraph` and its relatives make, without a networkx graph in between, so that 100,000 agents
take a fraction of a second. A circulant matrix has its eigenvalues by one Fourier transform of its hops.
"""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx
import numpy as np

from .._validate import as_int, as_weight, check_size
from ..schedule import Edges, EdgeSchedule, assemble, circulant
from .graphs import RING_HOPS, check_base, check_shape, check_style, closest_factors, powers_below
from .one_peer import not_a_power_of_two


class Circulant(EdgeSchedule):
    """Agent i takes the share ``shares[hop]`` of the agent `hop` ranks behind it, in every round.

    Args:
        size: number of agents, at least 1.
        shares: {hop: weight}; hops count modulo `size`, equal hops add up, and 0 is the agent itself. An iterable of
            hops gives equal weights to the different hops and to the agent itself.
        description: the line that :meth:`describe` gives; by default it lists the shares.

    Attributes:
        shares: as passed, with hops in 0 to size - 1, ascending.
    """

    period = 1

    def __init__(self, size: int, shares: dict[int, float] | Iterable[int], description: str = "") -> None:
        self.size = check_size(size)
        given = shares if isinstance(shares, dict) else _equal(self.size, shares)
        self.shares: dict[int, float] = dict.fromkeys(sorted({as_int(hop, "hop") % self.size for hop in given}), 0.0)
        for hop, weight in given.items():
            self.shares[as_int(hop, "hop") % self.size] += as_weight(weight, f"hop {hop}")
        self._description = description or f"circulant of {self.size} agents, shares {self.shares}"

    def _edges(self, round: int) -> Edges:
        return circulant(self.size, self.shares)

    def hop_shares(self, round: int) -> dict[int, float]:
        return {0: 0.0, **self.shares}

    def describe(self) -> str:
        return self._description


def ring(size: int, connect_style: int = 0) -> Circulant:
    """As :func:`~shoal.topology.RingGraph`: 0 for both directions, 1 to send to the left only, 2 to the right only."""
    style = check_style(connect_style)
    direction = ("", " to the left", " to the right")[style]
    return Circulant(size, RING_HOPS[style], f"ring{direction} of {size} agents")


def exponential(size: int, base: int = 2) -> Circulant:
    """As :func:`~shoal.topology.ExponentialGraph`: to those 1, base, base**2, ... ranks ahead."""
    return Circulant(
        size, powers_below(check_size(size), check_base(base)), f"exponential graph of {size} agents, base {base}"
    )


def symmetric_exponential(size: int, base: int = 4) -> Circulant:
    """As :func:`~shoal.topology.SymmetricExponentialGraph`: 1, base, ... ranks ahead and behind, up to half way."""
    hops = list(powers_below(check_size(size) // 2 + 1, check_base(base)))
    return Circulant(
        size, [*hops, *(-hop for hop in hops)], f"symmetric exponential graph of {size} agents, base {base}"
    )


def _equal(size: int, hops: Iterable[int]) -> dict[int, float]:
    distinct = {0, *(as_int(hop, "hop") % size for hop in hops)}
    return dict.fromkeys(sorted(distinct), 1.0 / len(distinct))


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
