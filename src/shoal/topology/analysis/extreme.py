"""The largest eigenvalue of a symmetric map that can only be applied: a true bound on it, and a stated error.

A Rayleigh quotient ``v^T A v`` is never above the largest eigenvalue, whatever the vector, and some eigenvalue lies
within the residual ``||A v - (v^T A v) v||`` of it. Both are computed from the current vector, not from the theory of
the iteration, so the bounds hold even if the iteration stops early.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, sqrt

import numpy as np

from .span import Vector

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
            # An eigenvalue that is larger by less than this may not have been told apart, however small the residual.
            error = enough
            break
        downhill = _unit(residual - vector * (vector @ residual))
        span, images = [vector, downhill], [image, apply(downhill)]
        if step is not None:
            ahead, ahead_image = step
            inside = [float(one @ ahead) for one in span]
            rest = ahead - inside[0] * span[0] - inside[1] * span[1]
            length = float(np.linalg.norm(rest))
            if length > 1e-8:
                span.append(rest / length)
                images.append((ahead_image - inside[0] * images[0] - inside[1] * images[1]) / length)
        small = np.array([[one @ image_of for image_of in images] for one in span])
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
