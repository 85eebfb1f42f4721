"""Spectral gaps and eigenvalues of topologies of any size, each with a bound of its error.

Three methods, of which the first applicable one is used: a Fourier transform if all agents have the same surroundings
(`symmetry`), a dense decomposition up to :data:`~shoal.topology.analysis.span.DENSE_LIMIT` agents, and otherwise an
iteration that only multiplies by sparse matrices (:func:`largest_eigenvalue`).

A Rayleigh quotient ``v^T A v`` is never above the largest eigenvalue, whatever the vector, and some eigenvalue lies
within the residual ``||A v - (v^T A v) v||`` of it. Both are computed from the current vector, not from the theory of
the iteration, so the bounds hold even if the iteration stops early.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, log2, sqrt

import numpy as np

from .._validate import check_round, check_size
from ..schedule import AnyTopology
from .span import DENSE_LIMIT, Span, Vector
from .symmetry import Invariance, find_invariance

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
        if self.error < self.value:
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
        ValueError: a round of more than :data:`~shoal.topology.analysis.span.EDGE_LIMIT` edges.
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
            f"{span.schedule.describe()} {reason}. Say over how many rounds to take the gap: "
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
