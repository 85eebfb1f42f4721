"""Time series of bounded length: the longer the run, the larger the distance of the points.

``EdgeRates`` gives the bytes per second of an agent's edges, over a window that is long enough to be the same for all
viewers.
"""

from __future__ import annotations

from collections.abc import Mapping

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


WINDOW_SECONDS = 5.0
WINDOW_STEPS = 3
"""A rate is over the longer of the two: one step sends all of its bytes in a moment."""
MOST_SAMPLES = 64


def window(step_seconds: float | None) -> float:
    """The seconds over which the rates of an agent are, whose steps take so long."""
    return max(WINDOW_SECONDS, WINDOW_STEPS * (step_seconds or 0.0))


class EdgeRates:
    """Those of one agent: by destination, from how much it had sent at each of its status messages."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, Mapping[int, int]]] = []

    def add(self, now: float, sent: Mapping[int, int], step_seconds: float | None) -> None:
        """So much was sent to each destination until now."""
        samples = self._samples
        samples.append((now, sent))
        since = now - window(step_seconds)
        while len(samples) > 2 and samples[1][0] <= since:
            del samples[0]
        if len(samples) > MOST_SAMPLES:  # of a long window every second one will do
            del samples[1:-1:2]

    @property
    def by_destination(self) -> dict[int, float]:
        """Bytes per second."""
        if len(self._samples) < 2:
            return {}
        (begin, before), (end, sent) = self._samples[0], self._samples[-1]
        seconds = max(1e-3, end - begin)
        return {peer: max(0, nbytes - before.get(peer, 0)) / seconds for peer, nbytes in sent.items()}
