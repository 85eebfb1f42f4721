"""Spectral gaps and eigenvalues of topologies of any size, each with a bound of its error.

Three methods, of which the first applicable one is used: a Fourier transform if all agents have the same surroundings
(:func:`find_invariance`), a dense decomposition up to :data:`~shoal.topology.analysis.span.DENSE_LIMIT` agents, and
otherwise an iteration that only multiplies by sparse matrices (:func:`largest_eigenvalue`).

A Rayleigh quotient ``v^T A v`` is never above the largest eigenvalue, whatever the vector, and some eigenvalue lies
within the residual ``||A v - (v^T A v) v||`` of it. Both are computed from the current vector, not from the theory of
the iteration, so the bounds hold even if the iteration stops early.

To detect equal surroundings, ranks are read as coordinates on a torus of some shape (n itself, rows and columns, bits,
...). If the weight between two agents depends only on the difference of their coordinates, W is a convolution, and the
Fourier transform of one of its columns has all its eigenvalues: for rings and exponential graphs in one dimension
(circulant matrices), for tori in two, for hypercubes in log2 n. All rounds of a span then have the same eigenvectors,
so that products of matrices are products of numbers. All agents are equivalent: one source suffices for every distance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import inf, isqrt, log2, prod, sqrt

import numpy as np
from numpy.typing import NDArray

from .._validate import check_round, check_size
from ..schedule import AnyTopology, Edges, Ranks
from .span import DENSE_LIMIT, RoundMap, Span, Vector

_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Estimate:
    """A number with a bound of its error. ``float(estimate)`` is its value, ``str(estimate)`` fits a table.

    Attributes:
        value: the number. For a gap found by iteration, the true value is at most this.
        error: how far the true value may be from it: rounding, or the residual of an iteration. An error as large as
            `value` means only that the true value is below `value`.
        method: how it was found: ``"fourier"``, ``"dense"`` or ``"iterative"``.
    """

    value: float
    error: float
    method: str

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        if self.error <= max(5e-4 * abs(self.value), 1e-12):
            return "0" if abs(self.value) <= 1e-12 else f"{self.value:.3g}"
        if self.value < 0 or self.error < self.value:
            return f"{self.value:.3g} ± {self.error:.1g}"
        return f"below 1e{next(power for power in range(-12, 300) if 10.0**power >= self.value)}"


def spectral_gap(topology: AnyTopology, round: int = 0) -> Estimate:
    """``1 - ||W - J||_2`` of one round, with J the averaging matrix ``1 1^T / n``.

    A doubly stochastic W multiplies the distance from consensus by at most ``1 - gap``: one is exact averaging, zero no
    guarantee, as on a graph that is not connected. For weights whose rows or columns do not sum to one the gap may be
    negative and guarantees nothing; :func:`~shoal.topology.classify` distinguishes them.

    Args:
        topology: a graph with its weights, a mixing matrix, or a schedule.
        round: of a schedule, counted from 0.

    Raises:
        ValueError: a round of more than 5,000,000 edges.
    """
    return gap_of(Span(topology, 1, check_round(round)))


def gap_over_period(topology: AnyTopology, rounds: int | None = None) -> Estimate:
    """``1 - ||W_{p-1} ... W_1 W_0 - J||_2`` over the p rounds of a period: one if they average exactly.

    Args:
        topology: a graph with its weights, a mixing matrix, or a schedule.
        rounds: p; by default the period.

    Raises:
        ValueError: no `rounds`, and the topology never repeats or is too large to hold a period of it.
    """
    span = Span(topology, None if rounds is None else check_size(rounds, "rounds"))
    if rounds is None and not span.whole:
        period = span.schedule.period
        reason = "never repeats" if period is None else f"repeats after {period} rounds, which are too many to hold"
        raise ValueError(
            f"{span.schedule.describe()} {reason}. Pass the number of rounds of the gap: "
            "gap_over_period(topology, rounds=...)."
        )
    if rounds is not None and len(span) < rounds:
        raise ValueError(f"of {rounds} rounds of {span.size} agents only {len(span)} can be held. Pass fewer.")
    return gap_of(span)


def smallest_eigenvalue(topology: AnyTopology, round: int = 0) -> Estimate:
    """The smallest eigenvalue of W, -1 to 1, of one round whose weights are symmetric.

    D² and exact diffusion need it above -1/3, as (I + W) / 2 has it for every W (Tang et al. 2018, arXiv:1803.07068);
    at -1, as on a two-colourable graph where no agent keeps a share of its own, averaging never ends.

    Raises:
        ValueError: W is not symmetric, so that its eigenvalues need not be real; or too many edges.
    """
    return smallest_of(Span(topology, 1, check_round(round)))


def gap_of(span: Span, invariance: Invariance | None = None) -> Estimate:
    """The gap over the rounds of a span; `invariance` is looked for if not given."""
    found = invariance or find_invariance(span)
    if found is not None:
        norm = max(np.abs(found.product[1:]).max(initial=0.0), abs(found.product[0] - 1.0))
        return Estimate(float(1.0 - norm), fourier_error(span), "fourier")
    if span.size <= DENSE_LIMIT:
        norm = np.linalg.norm(span.matrix() - 1.0 / span.size, 2)
        return Estimate(float(1.0 - norm), 4 * _EPS * span.size * len(span), "dense")
    norm, error = _largest_factor(span)
    return Estimate(1.0 - norm, error, "iterative")


def smallest_of(span: Span, invariance: Invariance | None = None) -> Estimate:
    """The smallest eigenvalue of a span of one symmetric round."""
    if not span.stochasticity.symmetric:
        raise ValueError(
            f"{span.schedule.describe()} has weights that are not symmetric, and their eigenvalues are not all real. "
            "Ask for its spectral_gap, or for the smallest eigenvalue of a symmetric topology."
        )
    found = invariance or find_invariance(span)
    if found is not None:
        return Estimate(float(found.product.real.min()), fourier_error(span), "fourier")
    if span.size <= DENSE_LIMIT:
        return Estimate(float(np.linalg.eigvalsh(span.matrix())[0]), 4 * _EPS * span.size, "dense")
    value, error = largest_eigenvalue(lambda x: -span.apply(x), span.size, span.edges)
    return Estimate(-value, error, "iterative")


def fourier_error(span: Span) -> float:
    """A bound of the rounding errors of a span's eigenvalues from a Fourier transform."""
    return 8 * _EPS * len(span) * (1.0 + log2(span.size))


def _largest_factor(span: Span) -> tuple[float, float]:
    """A value at or below ``||P - J||_2`` for the product P of the rounds, and the error of it."""

    def deviation(x: Vector) -> Vector:
        result: Vector = span.apply(x) - x.mean()
        return result

    if len(span) == 1 and span.stochasticity.symmetric:
        upper = largest_eigenvalue(deviation, span.size, span.edges)
        lower = largest_eigenvalue(lambda x: -deviation(x), span.size, span.edges)
        return max(upper, lower)

    def squared(x: Vector) -> Vector:
        y = deviation(x)
        result: Vector = span.apply_transposed(y) - y.mean()
        return result

    return largest_eigenvalue(squared, span.size, 2 * span.edges, root=True)


WORK = 500_000_000
"""Edges that an iteration may visit: a few seconds."""

_MOST_STEPS = 20_000
_FEWEST_STEPS = 200
_REFRESH = 50
_ACCURACY = 2e-4
_FLOOR = 1e-13
_CONFIRMATIONS = 8
"""Further steps that must not move the value. Without them the iteration may end near another eigenvalue, where the
vector has almost nothing of the largest one: then the residual is mostly that rest, and the next steps make it grow."""


def largest_eigenvalue(
    apply: Callable[[Vector], Vector], size: int, edges: int, *, root: bool = False
) -> tuple[float, float]:
    """A value at or below the largest eigenvalue, and a bound of its error; or the ``root`` of that value, and the
    corresponding error of the root.

    If all eigenvalues are small, so is every residual: only with ``root`` the iteration continues until the largest is
    found.

    Locally optimal conjugate gradients (Knyazev 2001, "Toward the Optimal Preconditioned Eigensolver", one vector and
    no preconditioner): the best vector in the span of the current one, its residual, and the last step. It stops when
    three digits of the distance of the value from one have been known for some steps, or at :data:`WORK`.

    Args:
        apply: x -> A x for x float64 [size], A symmetric with eigenvalues in -1 to 1, or about.
        size: of the vectors.
        edges: the cost of one application.
    """
    vector = _unit(np.random.default_rng(0).standard_normal(size))
    step: tuple[Vector, Vector] | None = None
    image = apply(vector)
    value, error = 0.0, inf
    confirmed = 0
    for count in range(1, min(_MOST_STEPS, max(_FEWEST_STEPS, WORK // max(1, edges))) + 1):
        quotient = float(vector @ image)
        residual = image - quotient * vector
        value, error = quotient, float(np.linalg.norm(residual))
        if root:
            value = sqrt(max(quotient, 0.0))
            error = min(error / value if value else inf, sqrt(error))
        enough = _ACCURACY * abs(1.0 - value)
        confirmed = confirmed + 1 if error <= enough else 0
        if error <= _FLOOR:
            break
        if confirmed > _CONFIRMATIONS:
            # An eigenvalue that is larger by less than this may not be distinguished, however small the residual.
            error = enough
            break
        downhill = _unit(residual - vector * (vector @ residual))
        span, images = [vector, downhill], [image, apply(downhill)]
        if step is not None:
            ahead, ahead_image = step
            inside = [float(vector @ ahead) for vector in span]
            rest = ahead - inside[0] * span[0] - inside[1] * span[1]
            length = float(np.linalg.norm(rest))
            if length > 1e-8:
                span.append(rest / length)
                images.append((ahead_image - inside[0] * images[0] - inside[1] * images[1]) / length)
        small = np.array([[vector @ image_of for image_of in images] for vector in span])
        best = np.linalg.eigh((small + small.T) / 2)[1][:, -1]
        moved = _combine(best[1:], span[1:])
        length = float(np.linalg.norm(moved))
        step = (moved / length, _combine(best[1:], images[1:]) / length) if length else None
        vector = _combine(best, span)
        # The image follows by linearity; it is recomputed now and then, before rounding adds up.
        scale = float(np.linalg.norm(vector))
        vector = vector / scale
        image = apply(vector) if count % _REFRESH == 0 else _combine(best, images) / scale
    return value, error


def _unit(x: Vector) -> Vector:
    length = float(np.linalg.norm(x))
    return x / length if length else x


def _combine(shares: Vector, vectors: list[Vector]) -> Vector:
    total: Vector = shares[0] * vectors[0]
    for share, vector in zip(shares[1:], vectors[1:], strict=True):
        total = total + share * vector
    return total


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
