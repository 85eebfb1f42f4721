"""Time series of bounded length: the longer the run, the larger the distance of the points."""

from __future__ import annotations

from .status_message import Number

MOST_POINTS = 240
MOST_SERIES = 12
STEP_TIME, BYTES = "step time", "bytes per second"
UNITS = {STEP_TIME: "s", BYTES: "B/s"}
Point = tuple[float, Number, Number]
"""Seconds since the run began, the mean of all agents, and the worst of them."""


class Series:
    """One of them."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._last: Point | None = None
        self._every, self._skipped = 1, 0

    def add(self, point: Point) -> None:
        self._last = point
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self._points.append(point)
        if len(self._points) > MOST_POINTS:
            self._points = self._points[::2]
            self._every *= 2

    @property
    def points(self) -> list[Point]:
        """From the first to the last."""
        return [*self._points, self._last] if self._last is not None and self._skipped else list(self._points)


class History:
    """All of a run, by name."""

    def __init__(self) -> None:
        self._of: dict[str, Series] = {}
        self._times: dict[str, int] = {}

    def add(self, name: str, point: Point) -> None:
        if name in self._of or len(self._of) < MOST_SERIES:
            self._of.setdefault(name, Series()).add(point)

    def add_measured(self, name: str, times: int, point: Point) -> None:
        """Add a value that all agents know: the first report of it counts."""
        if times > self._times.get(name, 0):
            self._times[name] = times
            self.add(name, point)

    def begin_again(self) -> None:
        """The agents count from the beginning."""
        self._times.clear()

    def as_json(self) -> list[dict[str, object]]:
        return [{"name": name, "unit": UNITS.get(name, ""), "points": one.points} for name, one in self._of.items()]
