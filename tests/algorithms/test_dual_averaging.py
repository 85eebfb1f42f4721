"""Dual averaging: its sums in closed form where gradients are constant, and the median, which is not smooth."""

from __future__ import annotations

from math import sqrt

import pytest
import torch

from shoal.algorithms import DualAveraging
from shoal.sim import StackedFleet
from shoal.topology import OnePeerExponential
from shoal.topology.families.static import ring
from support.closed_forms import matrix
from support.least_squares import DIMENSION, SIZE

LR = 0.3
START = torch.randn(SIZE, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
SLOPES = torch.randn(SIZE, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def test_constant_gradients_accumulate_over_the_powers_of_w() -> None:
    steps, W = 12, matrix(ring(SIZE))
    received = [torch.linalg.matrix_power(W, k) @ SLOPES for k in range(steps)]
    points = [-LR / sqrt(t) * sum(received[:t], torch.zeros_like(SLOPES)) for t in range(1, steps + 1)]
    results = StackedFleet(ring(SIZE)).run(DualAveraging(LR), START, lambda _: SLOPES, steps)
    assert (results.x - points[-1]).abs().max() < 1e-12
    assert (results.estimate - torch.stack(points).mean(0)).abs().max() < 1e-12


def test_before_the_first_step_the_estimate_is_the_start() -> None:
    assert torch.equal(StackedFleet(ring(SIZE)).run(DualAveraging(LR), START, lambda _: SLOPES, 0).estimate, START)


@pytest.mark.parametrize("topology", [ring(SIZE), OnePeerExponential(SIZE)], ids=lambda one: one.describe())
def test_it_approaches_the_median_of_all_agents_as_one_over_the_root_of_the_steps(topology: OnePeerExponential) -> None:
    values = START * 3 + 1
    best = (values - values.median(0).values).abs().mean()

    def excess(steps: int) -> float:
        results = StackedFleet(topology).run(DualAveraging(LR), values, lambda x: (x - values).sign(), steps).estimate
        assert results.shape == values.shape
        return float((values.unsqueeze(1) - results).abs().mean() - best)

    early, late = excess(200), excess(3200)
    assert 0 <= late < 0.1
    assert late < early / 2
