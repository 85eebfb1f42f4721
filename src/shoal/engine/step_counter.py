"""Counts training steps, for ``shoal status`` and as marks in a trace."""

from __future__ import annotations

from dataclasses import dataclass

from .. import clock
from ..operations.events import Events


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
        return {name: one.count for name, one in list(self._of.items())}

    @property
    def seconds_ago(self) -> float | None:
        """Seconds since the last step ended; None if there was none."""
        last = max((one.ended for one in list(self._of.values())), default=None)
        return None if last is None else (clock.perf_counter_ns() - last) / 1e9
