"""Static graphs in which every agent has the same surroundings: rings and exponential graphs, for any number of agents.

The same graphs as :func:`~shoal.topology.RingGraph` and its relatives make, without a networkx graph in between, so
that 100,000 agents take a fraction of a second. Such a matrix has its eigenvalues by one Fourier transform of its hops.
"""

from __future__ import annotations

from collections.abc import Iterable

from .._edges import Edges, circulant
from .._validate import as_int, as_weight, check_size
from ..schedule import EdgeSchedule
from .graphs import check_base, powers_below


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
    style = as_int(connect_style, "connect_style")
    if style not in (0, 1, 2):
        raise ValueError(f"connect_style is {style}. Pass 0 for both directions, 1 for left only, 2 for right only.")
    way = ("", " to the left", " to the right")[style]
    return Circulant(size, ((-1, 1), (-1,), (1,))[style], f"ring{way} of {size} agents")


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
