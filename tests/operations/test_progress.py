"""The choice of the driving thread, and the wake-ups of the progress thread. The clock is the test's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal.operations import progress as module
from shoal.operations.progress import AFTER_DRIVING, Progress

LONG, SHORT = 2 * AFTER_DRIVING, AFTER_DRIVING / 2


class Clock:
    """Replaces ``time``: it stands still until the test advances it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Polled:
    """Driven and polled object: a call takes as long as one poll."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.takes = 0.0
        self.was_polled = False
        self.waker = -1

    def poll(self, timeout: float) -> list[Any]:
        self._clock.now += self.takes
        self.was_polled = True
        return []

    def wake(self) -> None: ...

    def advance(self) -> None: ...

    def handle(self, due: list[Any]) -> None: ...

    def check(self, now: float) -> float:
        return float("inf")

    def after(self) -> None: ...

    def break_off(self, error: Exception) -> None:
        raise error


class Sleeping:
    """A progress thread that sleeps until somebody wakes it."""

    def __init__(self) -> None:
        self.woken = 0

    def notify(self) -> None:
        self.woken += 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float]], int]:
    """Takes how long calls are (positive) and the pauses between them (negative): how often they wake the thread."""
    clock, sleeping = Clock(), Sleeping()
    polled = Polled(clock)
    monkeypatch.setattr(module, "clock", clock)
    progress = Progress(polled, polled, "test")  # type: ignore[arg-type]
    monkeypatch.setattr(progress, "_progress_turn", sleeping)
    monkeypatch.setattr(progress, "_sleeps_until", float("inf"))

    def take(times: list[float]) -> int:
        for seconds in times:
            if seconds < 0:
                clock.now -= seconds
                continue
            polled.takes, polled.was_polled = seconds, False
            progress.drive_until(lambda: polled.was_polled)
        return sleeping.woken

    return take


def test_a_long_call_after_a_pause_wakes_the_progress_thread(calls: Callable[[list[float]], int]) -> None:
    """The caller computes between its calls, and may do so for long now."""
    assert calls([-LONG, LONG, -LONG, LONG]) == 2


def test_long_calls_one_after_another_wake_it_once(calls: Callable[[list[float]], int]) -> None:
    assert calls([LONG] * 10) == 1


def test_short_calls_never_wake_it(calls: Callable[[list[float]], int]) -> None:
    assert calls([SHORT, -LONG] * 10) == 0


@pytest.mark.parametrize("delayed", [False, True])
def test_messages_received_late_by_a_blocked_thread_count_before_a_deadline(
    monkeypatch: pytest.MonkeyPatch, delayed: bool
) -> None:
    """Another thread held the interpreter lock after the poll had returned one message. Two more have arrived since."""
    clock = Clock()
    seen: list[str] = []

    class LateMessages(Polled):
        rest = 3

        def poll(self, timeout: float) -> list[Any]:
            first = self.rest == 3
            clock.now += 10.0 if delayed and first else 0.001
            self.rest -= 1
            return [self.rest] if self.rest >= 0 else []

        def handle(self, due: list[Any]) -> None:
            seen.extend(f"message {one}" for one in due)

        def check(self, now: float) -> float:
            seen.append("deadline")
            return float("inf")

    late = LateMessages(clock)
    monkeypatch.setattr(module, "clock", clock)
    progress = Progress(late, late, "test")  # type: ignore[arg-type]
    progress.next_check = clock.now + (5.0 if delayed else 0.001)
    progress.drive_until(lambda: "deadline" in seen)
    messages = [f"message {value}" for value in (2, 1, 0)]
    assert seen == ([*messages, "deadline"] if delayed else [messages[0], "deadline"])
