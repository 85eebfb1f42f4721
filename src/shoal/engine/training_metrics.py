"""The latest training metrics of a script, for ``shoal status``, the live page and traces. Nothing is computed for it:
:func:`shoal.metrics` and :func:`shoal.consensus_distance` record their results.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from ..operations.events import Events

MOST_NAMES = 32
"""Names that are kept; later ones are left out, since a script may invent one a step."""
_LONGEST = 80
"""Characters of a name."""


class MetricValue(NamedTuple):
    """One metric over all agents.

    Attributes:
        times: How often it has been measured.
        own: This agent's value.
        mean, worst: Over all agents.
        worst_rank: The rank of the worst value; -1 if all are equal.
    """

    times: int
    own: float
    mean: float
    worst: float
    worst_rank: int

    def as_json(self) -> dict[str, Any]:
        """The same with strings for values that JSON lacks: ``nan``, ``inf``."""
        return {name: one if math.isfinite(one) else str(one) for name, one in self._asdict().items()}


class TrainingMetrics:
    """The metrics of one agent. Recorded by its script's threads, read by any."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._of: dict[str, MetricValue] = {}

    def note(self, name: str, own: float, mean: float, worst: float, worst_rank: int = -1) -> None:
        """Record a measurement."""
        name = name[:_LONGEST]
        before = self._of.get(name)
        if before is None and len(self._of) >= MOST_NAMES:
            return
        self._of[name] = value = MetricValue(1 if before is None else before.times + 1, own, mean, worst, worst_rank)
        if self._events.active:
            said = {which: number for which, number in (("own", own), ("mean", mean)) if math.isfinite(number)}
            self._events.emit("measured", "metrics", name, value.times, detail=json.dumps(said))

    @property
    def values(self) -> dict[str, MetricValue]:
        """The last value of each metric, by name."""
        return dict(self._of)
