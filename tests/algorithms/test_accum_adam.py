"""AccumAdam: torch's Adam where it takes in one gradient at a time, and its equation where it takes in several."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.algorithms import AccumAdam, GradientDescent, Run
from shoal.sim import StackedFleet
from shoal.topology.families.static import ring
from support.closed_forms import gradients, matrix
from support.least_squares import DIMENSION, SIZE

LR = 0.02
GRADIENT = gradients(SIZE)
START = torch.randn(SIZE, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
W = matrix(ring(SIZE))
FLEET = StackedFleet(ring(SIZE))


@pytest.mark.parametrize("atc", [True, False])
def test_with_one_gradient_per_update_it_is_torchs_adam_between_averages(atc: bool) -> None:
    x = START.clone().requires_grad_()
    adam = torch.optim.Adam([x], lr=LR, betas=(0.8, 0.95), eps=1e-3)
    for _ in range(12):
        x.grad, before = GRADIENT(x.detach()), x.detach().clone()
        adam.step()
        with torch.no_grad():
            x.copy_(W @ x if atc else x + W @ before - before)
    algorithm = AccumAdam(LR, 1, beta1=0.8, beta2=0.95, eps=1e-3, atc=atc)
    assert (FLEET.run(algorithm, START, GRADIENT, 12).x - x.detach()).abs().max() < 1e-12


def test_with_several_gradients_per_update_it_is_its_equation() -> None:
    s, beta1, beta2, eps = 3, 0.8, 0.95, 1e-3
    x = START.numpy()
    m, v, b = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    for t in range(1, 12):
        g, k = GRADIENT(torch.from_numpy(x)).numpy(), math.ceil(t / s)
        first = (beta1 * m + (1 - beta1) * g) / (1 - beta1**k)
        second = (beta2 * v + (1 - beta2) * g**2) / (1 - beta2**k)
        x = W.numpy() @ (x - LR * first / (np.sqrt(second) + eps))
        b = b + g / s
        if t % s == 0:
            m, v, b = beta1 * m + (1 - beta1) * b, beta2 * v + (1 - beta2) * b**2, np.zeros_like(b)
    results = FLEET.run(AccumAdam(LR, s, beta1, beta2, eps), START, GRADIENT, 11)
    assert (results.x - torch.from_numpy(x)).abs().max() < 1e-12
    assert all(
        (one - torch.from_numpy(by_hand)).abs().max() < 1e-12
        for one, by_hand in zip(results.state, (m, v, b), strict=False)
    )


@pytest.mark.parametrize(
    "algorithm", [AccumAdam(0.2, 1, 0.9, 0.9, eps=1.0), AccumAdam(0.2, 4, 0.5, 0.8, eps=1.0)], ids=str
)
def test_the_fixed_point_is_that_of_gradient_descent_on_clipped_gradients(algorithm: AccumAdam) -> None:
    def bounded(x: Tensor) -> Tensor:
        g = GRADIENT(x)
        return g / (g.abs() + algorithm.eps)

    results = FLEET.run(algorithm, START, GRADIENT, 2500).x
    expected = FLEET.run(GradientDescent(0.2), START, bounded, 1500).x
    assert (FLEET.run(GradientDescent(0.2), expected, bounded, 1).x - expected).abs().max() < 1e-12
    assert (results - expected).abs().max() < 1e-9


@pytest.mark.parametrize("accumulate", [1, 4, 10])
def test_the_second_moment_is_that_of_a_mean_of_gradients(accumulate: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def noise(x: Tensor) -> Tensor:
        return torch.randn(x.shape, dtype=x.dtype, generator=generator)

    ended = FLEET.run(AccumAdam(LR, accumulate, beta2=0.9), torch.zeros(1000, dtype=torch.float64), noise, 400)
    assert float(ended.state[1].mean()) == pytest.approx((1 - 0.9 ** (400 // accumulate)) / accumulate, rel=0.05)


def test_a_reset_memory_counts_as_new_at_any_step_number() -> None:
    algorithm = AccumAdam(LR, 4)
    started = FLEET.run(algorithm, START, GRADIENT, 0)
    later = Run(started.x, started.estimate, started.state, 1002)
    results = FLEET.run(algorithm, START, GRADIENT, 9, resume=later).x
    assert torch.equal(results, FLEET.run(algorithm, START, GRADIENT, 9).x)


def test_counts_work_in_sixteen_bits() -> None:
    start = torch.zeros(SIZE, 2, dtype=torch.bfloat16)
    first = FLEET.run(AccumAdam(LR, 2), start, torch.ones_like, 1)
    assert first.x[0].tolist() == pytest.approx([-LR, -LR], rel=0.02)  # 0.999 to the k is 1 in sixteen bits
    ended = FLEET.run(AccumAdam(LR, 2), start, torch.ones_like, 600)
    assert ended.state[3].unique().tolist() == [600]
    assert ended.x.dtype == torch.bfloat16
    assert all(one.dtype == torch.bfloat16 for one in ended.state[:3])


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="AccumAdam: accumulate=0 must be 1 or more"):
        AccumAdam(LR, 0)
    with pytest.raises(ValueError, match="0 <= beta1 < 1"):
        AccumAdam(LR, 4, beta1=1.0)
    with pytest.raises(ValueError, match="0 <= beta2 < 1"):
        AccumAdam(LR, 4, beta2=-0.1)
    with pytest.raises(ValueError, match=r"eps=0\.0: pass a small number above 0"):
        AccumAdam(LR, 4, eps=0.0)
