"""The age of a contribution when it arrives: rounds from one agent to another, on average over all pairs.

On a static graph that is the number of hops, the average-age matrix H of the Ring-Star paper (Jameel et al. 2019, doi
10.1007/978-3-030-43823-4_28, section 2.2). In a schedule it depends on the round in which the contribution leaves, and
the age is the expected number of rounds until it first arrives, over the start. Looking back instead, from an agent in
a given round to the newest it has of another, gives the same average over a period: both count the pairs of rounds in
which a contribution is in transit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isinf, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..schedule import AnyTopology, Neighbours, Ranks
from .span import SAMPLED_ROUNDS, Span, is_connected, spread, unpack
from .spectrum import Invariance, find_invariance

WORK = 300_000_000
"""Edges times 64 sources that may be visited: a few seconds. Starts are sampled if a whole period would cost more."""

ALL_SOURCES = 1024
"""The number of agents up to which contributions of all of them are followed, instead of a sample's."""

_SAMPLED_SOURCES = 32
_SAMPLED_WALKS = 8
_SAMPLED_STARTS = 16


@dataclass(frozen=True)
class Age:
    """Rounds until a contribution arrives, over ordered pairs of different agents. ``str(age)`` is fit for a table.

    Attributes:
        mean: over all pairs, and over all starts of a period; infinite if a contribution never reaches another agent.
        error: standard error of `mean` where sources or starts were sampled, 0.0 if it is exact, and infinite if
            `mean` is but a lower bound, because counting was given up.
        worst: the largest over those looked at; the diameter of a static graph.
    """

    mean: float
    error: float
    worst: float

    def __str__(self) -> str:
        if isinf(self.mean):
            return "never"
        if isinf(self.error):
            return f"more than {self.mean:.3g}"
        return f"{self.mean:.3g}" if self.error <= 5e-3 * self.mean else f"{self.mean:.3g} ± {self.error:.1g}"


def average_age(topology: AnyTopology) -> Age:
    """The mean of :func:`age_matrix` off its diagonal, for any number of agents; 0 for a single agent.

    Exact where all agents are alike or at most :data:`ALL_SOURCES`, and the topology repeats; a sample otherwise.

    Raises:
        ValueError: a round of too many edges.
    """
    span = Span(topology)
    return age_of(span, find_invariance(span), is_connected(span))


def age_matrix(topology: AnyTopology) -> NDArray[np.float64]:
    """Rounds until what agent u contributes first reaches agent v, at [v, u], float64 [n, n], zero on the diagonal.

    Averaged over the round in which it leaves: over a period, or over the first 64 rounds of a topology that never
    repeats. Infinite where it never arrives.

    Raises:
        ValueError: more than :data:`ALL_SOURCES` agents, or a round of too many edges.
    """
    span = Span(topology)
    size = span.size
    if size > ALL_SOURCES:
        raise ValueError(
            f"the age matrix of {size} agents has {size} x {size} entries, and the limit is {ALL_SOURCES} agents. "
            "average_age gives its mean for any number."
        )
    total = np.zeros((size, size))
    for start in range(len(span)):
        for missing in (followed := _Followed(span, start, np.arange(size))):
            total += missing
        if followed.left:
            total[missing == 1] = inf
    return total / len(span)


def age_of(span: Span, invariance: Invariance | None, connected: bool) -> Age:
    """:func:`average_age` for a span of which more is known."""
    if span.size == 1:
        return Age(0.0, 0.0, 0.0)
    if span.whole and not connected:
        return Age(inf, 0.0, inf)
    sources = _some_sources(span.size, invariance, _SAMPLED_SOURCES)
    first = _summed(_Followed(span, 0, sources, WORK // 4))
    static = span.whole and len(span) == 1
    if static and not first.complete:
        sources = _some_sources(span.size, invariance, _SAMPLED_WALKS)
        first = _walked(span, sources)
    further = [] if static else _further_starts(span, first)
    every = [first, *(_summed(_Followed(span, start, sources, WORK // 4)) for start in further)]
    means = np.array([sample.ages / (span.size - 1) for sample in every])
    variance = 0.0
    if len(sources) < span.size and invariance is None:
        variance += float(means.mean(axis=0).var(ddof=1)) / len(sources)
    if not span.whole or len(every) < len(span):
        variance += float(means.mean(axis=1).var(ddof=1)) / len(every)
    error = sqrt(variance) if all(sample.complete for sample in every) else inf
    return Age(float(means.mean()), error, float(max(sample.worst for sample in every)))


class _Summed(NamedTuple):
    """Ages of contributions from each source, summed over agents, float64 [sources]."""

    ages: NDArray[np.float64]
    worst: float
    complete: bool
    cost: int


def _some_sources(size: int, invariance: Invariance | None, sample: int) -> Ranks:
    if invariance is not None:
        return np.zeros(1, dtype=np.int64)
    if size <= ALL_SOURCES:
        return np.arange(size)
    return np.sort(np.random.default_rng(0).choice(size, sample, replace=False))


def _further_starts(span: Span, first: _Summed) -> list[int]:
    """Rounds besides 0, evenly spaced: all of a period if that is affordable."""
    rounds = span.schedule.period or SAMPLED_ROUNDS
    most = rounds if span.schedule.period else _SAMPLED_STARTS
    affordable = max(2, min(WORK // max(1, first.cost), most))
    starts: list[int] = np.linspace(0, rounds, affordable, endpoint=False, dtype=int)[1:].tolist()
    return starts


class _Followed:
    """For each round from `start` on, the pairs without a contribution yet: uint8 [n, sources], ones; until there are
    none, or their number stays.

    Attributes:
        left: pairs without a contribution at the end.
        cost: edges and bits visited.
        gave_up: it ended because of the `limit` on the cost.
    """

    def __init__(self, span: Span, start: int, sources: Ranks, limit: float = inf) -> None:
        self._span, self._start, self._sources, self._limit = span, start, sources, limit
        self.left = self.cost = 0
        self.gave_up = False

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        span, sources = self._span, self._sources
        patience = len(span) if span.whole else SAMPLED_ROUNDS + 8 * span.size
        idle, before = 0, -1
        for round, received in enumerate(spread(span, self._start, sources)):
            missing = 1 - unpack(received, len(sources))
            self.left = int(missing.sum(dtype=np.int64))
            idle = idle + 1 if self.left == before else 0
            self.gave_up = self.left > 0 and self.cost > self._limit
            if self.left == 0 or idle >= patience or self.gave_up:
                return
            yield missing
            before = self.left
            self.cost += received.shape[1] * len(span[self._start + round].edges.weight) + missing.size // 8


def _summed(followed: _Followed) -> _Summed:
    rounds = [missing.sum(axis=0, dtype=np.float64) for missing in followed]
    ages = np.sum(rounds, axis=0)
    if followed.left and not followed.gave_up:
        ages = ages + inf
    return _Summed(ages, float(len(rounds)), not followed.gave_up, followed.cost)


def _walked(span: Span, sources: Ranks) -> _Summed:
    edges = span[0].weighty
    neighbours = Neighbours(span.size, edges.source, edges.destination)
    hops = np.stack([neighbours.hops_from(source) for source in sources.tolist()], axis=1)
    return _Summed(hops.sum(axis=0).astype(np.float64), float(hops.max()), True, 0)
