"""Rates over the longer of five seconds and three steps: a step sends all of its bytes in a moment."""

from __future__ import annotations

import pytest

from shoal.observability.watch.run_state import MOST_SAMPLES, EdgeRates


@pytest.mark.parametrize("step_seconds", [0.01, 2.0, 20.0])
def test_a_rate_is_independent_of_the_sampling_time(step_seconds: float) -> None:
    """A thousand bytes in each step, queried at any time."""
    rates, result = EdgeRates(), []
    for half_seconds in range(1, 400):
        now = half_seconds / 2
        rates.add(now, {1: 1000 * int(now / step_seconds)}, step_seconds)
        if now > 4 * max(5.0, step_seconds):
            result.append(rates.by_destination[1])
    true = 1000 / step_seconds
    assert all(0.6 * true <= one <= 1.4 * true for one in result), (min(result), max(result), true)


def test_an_agent_that_stops_sending_has_no_rate_after_the_window() -> None:
    rates = EdgeRates()
    for second in range(20):
        rates.add(float(second), {1: min(second, 10) * 100}, None)
    assert rates.by_destination == {1: 0.0}


def test_a_long_window_keeps_few_samples() -> None:
    rates = EdgeRates()
    for second in range(1000):
        rates.add(float(second), {1: second}, 10_000.0)
    assert len(rates._samples) <= MOST_SAMPLES and rates.by_destination == {1: 1.0}
