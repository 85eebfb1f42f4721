"""The robust rules again, from their papers, in numpy and float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import shoal
from shoal.ops.robust_rules import Robust

Vector = NDArray[np.float64]


def of_paper(rule: Robust, own: Vector, others: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """The result of a rule for an agent's tensor ``[d]`` and its neighbours', some of which may not be finite.

    Args:
        weights: of the neighbours; the rest to 1 is the agent's own.
    """
    finite = [(one, weight) for one, weight in zip(others, weights, strict=True) if np.isfinite(one).all()]
    group = np.stack([own, *(one for one, _ in finite)])
    if isinstance(rule, shoal.robust.CoordinateMedian):
        return np.asarray(np.median(group, axis=0))
    if isinstance(rule, shoal.robust.TrimmedMean):
        cut = min(rule.count, (len(group) - 1) // 2)
        return np.asarray(np.sort(group, axis=0)[cut : len(group) - cut].mean(axis=0))
    lengths = np.linalg.norm(group - own, axis=1)
    if isinstance(rule, shoal.robust.NearestNeighbours):
        # The agent's own tensor is the nearest; a stable sort keeps the order of ranks between equals.
        return np.asarray(group[np.argsort(lengths, kind="stable")[: len(group) - rule.tolerated]].mean(axis=0))
    if isinstance(rule, shoal.robust.FiniteOnly):
        radius = np.inf
    else:
        assert isinstance(rule, shoal.robust.ClippedGossip | shoal.robust.ClippedSum)
        beyond = rule.tolerated if isinstance(rule, shoal.robust.ClippedGossip) else 2 * rule.tolerated
        farthest_first = np.sort(lengths[1:])[::-1]
        radius = farthest_first[beyond] if beyond < len(farthest_first) else 0.0
        if isinstance(rule, shoal.robust.ClippedGossip) and rule.radius is not None:
            radius = rule.radius
    total = own.copy()
    for (one, weight), length in zip(finite, lengths[1:], strict=True):
        total += weight * (one - own) * (min(1.0, radius / length) if length else 1.0)
    return total
