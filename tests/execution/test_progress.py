"""The choice of the driving thread, and the wake-ups of the progress thread. The clock is the test's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from shoal.execution import progress as module
from shoal.execution.progress import AFTER_DRIVING, Progress

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


@pytest.mark.parametrize("delayed", ["before the poll", "after the poll", "not"])
def test_messages_that_have_arrived_count_before_a_deadline(monkeypatch: pytest.MonkeyPatch, delayed: str) -> None:
    """The poll returns one message, and two more arrive. Another thread holds the interpreter lock for long or not."""
    clock = Clock()
    seen: list[str] = []

    class LateMessages(Polled):
        rest = 3

        def advance(self) -> None:
            clock.now += 10.0 if delayed == "before the poll" else 0.0

        def poll(self, timeout: float) -> list[Any]:
            clock.now += 10.0 if delayed == "after the poll" and self.rest == 3 else 0.001
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
    progress.next_check = clock.now + (0.001 if delayed == "not" else 5.0)
    progress.drive_until(lambda: "deadline" in seen)
    assert seen == ["message 2", "message 1", "message 0", "deadline"]


def test_stop_waits_for_a_callback_with_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that shuts down may hold what the callback waits for."""
    monkeypatch.setattr(module, "STOP_SECONDS", 0.2)
    begins, may_end = threading.Event(), threading.Event()
    driven: list[str] = []

    class Driven(Polled):
        def advance(self) -> None:
            driven.append("advance")

        def poll(self, seconds: float) -> list[Any]:
            return []

        def after(self) -> None:
            begins.set()
            assert may_end.wait(20.0)

    polled = Driven(Clock())
    progress = Progress(polled, polled, "the progress thread")  # type: ignore[arg-type]
    progress.start()
    assert begins.wait(20.0)
    progress.stop()
    assert "the progress thread still runs a callback" in caplog.text
    count = len(driven)
    may_end.set()
    progress._thread.join(20.0)
    assert len(driven) == count  # it touches nothing that has been closed since
