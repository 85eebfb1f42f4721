"""The latest training metrics of a script, for ``shoal status``, the live page and traces.

Nothing is computed for them: :func:`shoal.metrics` and :func:`shoal.consensus_distance` record their results.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from ..operations.events import Events

MOST_NAMES = 32
"""The number of names that are kept. Later names are ignored, since a script may use a new name in each step."""
_LONGEST = 80
"""Characters of a name at most."""


class MetricValue(NamedTuple):
    """One metric over all agents.

    Attributes:
        times: The number of measurements.
        own: This agent's value.
        mean, worst: The mean and the worst value over all agents.
        worst_rank: The rank of the worst value; -1 if all are equal.
    """

    times: int
    own: float
    mean: float
    worst: float
    worst_rank: int

    def as_json(self) -> dict[str, Any]:
        """Convert to JSON data. Values that JSON lacks are strings: ``nan``, ``inf``."""
        return {name: one if math.isfinite(one) else str(one) for name, one in self._asdict().items()}


class TrainingMetrics:
    """The metrics of one agent. Threads of its script record them, and any thread reads them."""

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
            finite = {which: number for which, number in (("own", own), ("mean", mean)) if math.isfinite(number)}
            self._events.emit("measured", "metrics", name, value.times, detail=json.dumps(finite))

    @property
    def values(self) -> dict[str, MetricValue]:
        """The last value of each metric, by name."""
        return dict(self._of)
