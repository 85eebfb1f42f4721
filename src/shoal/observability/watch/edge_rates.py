"""Bytes per second of an agent's edges, over a window that is long enough to be the same for all who look."""

from __future__ import annotations

from collections.abc import Mapping

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
