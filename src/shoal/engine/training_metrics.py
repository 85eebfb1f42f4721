"""The latest training metrics of a script, for ``shoal status``, the live page and traces.

Nothing is computed for them: :func:`shoal.metrics` and :func:`shoal.consensus_distance` record their results.

``StepCounter`` counts training steps, for ``shoal status`` and as marks in a trace.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import clock
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
        return {name: value if math.isfinite(value) else str(value) for name, value in self._asdict().items()}


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


@dataclass(slots=True)
class _Counted:
    count: int
    ended: int  # end of the last step, in nanoseconds


class StepCounter:
    """The step counters of one agent. An optimizer belongs to one thread, which counts its steps."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._of: dict[str, _Counted] = {}

    def ended(self, name: str, began: int) -> None:
        """Count a step of an optimizer that was called at ``began`` (``clock.perf_counter_ns()``) and has ended.

        In a trace a step begins when the previous one ended, so it includes the forward and backward passes.
        """
        known = self._of.get(name)
        if known is None:
            known = self._of[name] = _Counted(0, began)
        before, known.ended = known.ended, clock.perf_counter_ns()
        known.count += 1
        if self._events.active:
            self._events.emit("stepped", "step", name, known.count, before, end=known.ended)

    @property
    def counts(self) -> dict[str, int]:
        """The number of steps, by optimizer."""
        # A copy first: the thread of an optimizer may add its name during the iteration.
        return {name: steps.count for name, steps in list(self._of.items())}

    @property
    def seconds_ago(self) -> float | None:
        """Seconds since the last step ended; None if there was none."""
        last = max((steps.ended for steps in list(self._of.values())), default=None)
        return None if last is None else (clock.perf_counter_ns() - last) / 1e9
