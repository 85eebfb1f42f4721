"""Detects topologies in which every agent has the same surroundings, and computes their exact eigenvalues.

Ranks are read as coordinates on a torus of some shape (n itself, rows and columns, bits, ...). If the weight between
two agents depends only on the difference of their coordinates, W is a convolution, and the Fourier transform of one of
its columns has all its eigenvalues: for rings and exponential graphs in one dimension (circulant matrices), for tori in
two, for hypercubes in log2 n. All rounds of a span then have the same eigenvectors, so that products of matrices are
products of numbers. All agents are equivalent: one source suffices for every distance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import isqrt, prod

import numpy as np
from numpy.typing import NDArray

from .._edges import Edges, Ranks
from .span import RoundMap, Span

_SAME = 1e-13
"""Weights that differ by less were computed in another order, and count as equal."""

_CANDIDATES = 8
"""Shapes that a few agents speak for and that are then tried on all."""


@dataclass(frozen=True)
class Invariance:
    """A torus on which every round of a span is the same from every agent.

    Attributes:
        shape: the length of each dimension; rank r has the coordinates ``numpy.unravel_index(r, shape)``.
        span: the rounds.
    """

    shape: tuple[int, ...]
    span: Span

    def eigenvalues(self, round: int) -> NDArray[np.complex128]:
        """The eigenvalues of one round, complex128 [n]; number k belongs to the k-th Fourier mode, number 0 to
        agreement.
        """
        edges = self.span[round].weighty
        column = np.zeros(prod(self.shape))
        first = edges.source == 0
        column[edges.destination[first]] = edges.weight[first]
        return np.fft.fftn(column.reshape(self.shape)).ravel()

    @cached_property
    def product(self) -> NDArray[np.complex128]:
        """Eigenvalues of ``W_{p-1} ... W_0`` over all rounds of the span, complex128 [n]."""
        product = np.ones(prod(self.shape), dtype=np.complex128)
        for round in range(len(self.span)):
            product *= self.eigenvalues(round)
        return product

    def transform(self, x: NDArray[np.float64]) -> NDArray[np.complex128]:
        """The Fourier modes of the values x [n] of all agents, complex128 [n], scaled to keep the norm."""
        return np.fft.fftn(x.reshape(self.shape), norm="ortho").ravel()


def find_invariance(span: Span) -> Invariance | None:
    """A shape in which the agents of all rounds are alike; None if there is none."""
    if not all(_is_regular(round) for round in span):
        return None
    rounds = [_SymmetricRows(round) for round in span]
    for shape in islice(_shapes(span.size, rounds), _CANDIDATES):
        if all(round.is_invariant(shape) for round in rounds):
            return Invariance(shape, span)
    return None


def _is_regular(round: RoundMap) -> bool:
    received = np.bincount(round.weighty.destination, minlength=round.size)
    return bool((received == received[0]).all())


class _SymmetricRows:
    """A round in which all agents have equally many sources, as arrays [n, sources]."""

    def __init__(self, round: RoundMap) -> None:
        edges: Edges = round.weighty
        self.size = round.size
        self.source = edges.source.reshape(round.size, -1)
        self.weight = edges.weight.reshape(round.size, -1)
        self._few = np.unique(np.r_[0, round.size - 1, np.linspace(0, round.size - 1, 5).astype(np.int64)])

    def seems_invariant(self, stride: int, outer: int) -> bool:
        """Whether a step of `stride` modulo `outer`, within blocks of `outer`, leaves the rows of a few agents as is.

        Such steps move one coordinate, that of a dimension of length ``outer / stride``, and leave the others.
        """
        for rank in self._few:
            stepped = _step(self.source[rank], stride, outer)
            order = np.argsort(stepped)
            there = _step(rank, stride, outer)
            if not np.array_equal(stepped[order], self.source[there]):
                return False
            if np.abs(self.weight[rank][order] - self.weight[there]).max(initial=0.0) > _SAME:
                return False
        return True

    def is_invariant(self, shape: tuple[int, ...]) -> bool:
        """Whether all rows are the same, as seen from their agent on a torus of this shape."""
        everyone = np.arange(self.size, dtype=np.int64)[:, None]
        seen = np.zeros_like(self.source)
        stride = 1
        for length in reversed(shape):
            seen += (self.source // stride - everyone // stride) % length * stride
            stride *= length
        order = np.argsort(seen, axis=1, kind="stable")
        seen = np.take_along_axis(seen, order, axis=1)
        weight = np.take_along_axis(self.weight, order, axis=1)
        return bool((seen == seen[0]).all() and (np.abs(weight - weight[0]) <= _SAME).all())


def _step(ranks: Ranks, stride: int, outer: int) -> Ranks:
    stepped: Ranks = ranks // outer * outer + (ranks % outer + stride) % outer
    return stepped


def _shapes(size: int, rounds: list[_SymmetricRows]) -> Iterator[tuple[int, ...]]:
    """Shapes that a few agents do not contradict, longest dimensions last and first to be tried."""
    divisors = _divisors(size)
    hopeless: set[int] = set()

    def beyond(stride: int) -> Iterator[tuple[int, ...]]:
        if stride == size:
            yield ()
            return
        if stride in hopeless:
            return
        found = False
        for outer in reversed(divisors):
            if outer > stride and outer % stride == 0 and all(r.seems_invariant(stride, outer) for r in rounds):
                for rest in beyond(outer):
                    found = True
                    yield (*rest, outer // stride)
        if not found:
            hopeless.add(stride)

    yield from beyond(1)


def _divisors(size: int) -> list[int]:
    small = [length for length in range(1, isqrt(size) + 1) if size % length == 0]
    return sorted({*small, *(size // length for length in small)})
