"""K-GT and LED: their published algorithms in numpy, their invariants and limits, and their end points."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shoal.algorithms import (
    KGT,
    LED,
    Algorithm,
    ExactDiffusion,
    GradientDescent,
    LocalSteps,
    ParallelGradientDescent,
    check,
)
from shoal.sim import StackedFleet
from shoal.topology import Circulant, OnePeerExponential, Schedule
from support.algorithm_cases import ring_of_halves
from support.closed_forms import gradients, matrix
from support.least_squares import DIMENSION, SIZE, optimum

Vectors = NDArray[np.float64]
LR, K, ROUNDS = 0.03, 4, 6
GRADIENT = gradients(SIZE)
START = torch.randn(SIZE, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def slope(x: Vectors) -> Vectors:
    return GRADIENT(torch.from_numpy(x)).numpy()


def kgt(topology: Schedule, outer_lr: float) -> Vectors:
    """Algorithm 1, round by round, with the sums over neighbours as products with W."""
    x = START.numpy()
    g = slope(x)
    c = -g + g.mean(0)
    for t in range(ROUNDS):
        W = matrix(topology, t).numpy()
        y = x
        for _ in range(K):
            y = y - LR * (slope(y) + c)
        z = (x - y) / (K * LR)
        c = c - z + W @ z
        x = W @ (x - outer_lr * K * LR * z)
    return x


def led(topology: Schedule, beta: float) -> Vectors:
    """Algorithm 1: local updates phi, their combination, and the dual update."""
    W = matrix(topology).numpy()
    x, y = START.numpy(), np.zeros((SIZE, DIMENSION))
    for _ in range(ROUNDS):
        phi = x
        for _ in range(K):
            phi = phi - LR * slope(phi) - beta * y
        x = W @ phi
        y = y + phi - x
    return x


HALVES, CHANGING = ring_of_halves(SIZE), OnePeerExponential(SIZE)


@pytest.mark.parametrize(
    ("algorithm", "topology", "paper"),
    [
        (KGT(LR, K), HALVES, lambda: kgt(HALVES, 1.0)),
        (KGT(LR, K, outer_lr=0.6), CHANGING, lambda: kgt(CHANGING, 0.6)),
        (LED(LR, K), HALVES, lambda: led(HALVES, 1 / K)),
        (LED(LR, K, beta=0.1), HALVES, lambda: led(HALVES, 0.1)),
    ],
    ids=["K-GT", "K-GT with an outer step", "LED", "LED with beta"],
)
def test_it_is_the_papers_algorithm(algorithm: Algorithm, topology: Schedule, paper: Callable[[], Vectors]) -> None:
    results = StackedFleet(topology).run(algorithm, START, GRADIENT, K * ROUNDS).x.numpy()
    assert np.abs(results - paper()).max() < 1e-12


def test_the_corrections_of_kgt_sum_to_zero_after_every_step() -> None:
    fleet = StackedFleet(CHANGING)
    run = fleet.run(KGT(LR, K), START, GRADIENT, 0)
    for _ in range(3 * K + 1):
        run = fleet.run(KGT(LR, K), START, GRADIENT, 1, resume=run)
        c, _begun = run.state
        assert c.sum(0).abs().max() < 1e-12 < 0.1 < c.abs().max()


def test_with_rounds_of_one_step_they_are_gradient_descent_on_all_data_and_exact_diffusion() -> None:
    all_ranks = Circulant(SIZE, dict.fromkeys(range(SIZE), 1 / SIZE), "everybody")
    fleet, start = StackedFleet(all_ranks), START[0]
    results = fleet.run(KGT(LR, 1), start, GRADIENT, 20).x
    assert (results - fleet.run(ParallelGradientDescent(LR), start, GRADIENT, 20).x).abs().max() < 1e-12
    halves = StackedFleet(HALVES)
    results = halves.run(LED(LR, 1), START, GRADIENT, 20).x
    assert (results - halves.run(ExactDiffusion(LR), START, GRADIENT, 20).x).abs().max() < 1e-12


@pytest.mark.parametrize("algorithm", [KGT(LR, K), LED(LR, K)], ids=str)
def test_they_converge_to_the_optimum_and_local_steps_alone_do_not(algorithm: Algorithm) -> None:
    fleet = StackedFleet(Circulant(SIZE, {0: 0.4, 1: 0.2, -1: 0.2, 4: 0.1, -4: 0.1}))
    apart = fleet.run(LocalSteps(GradientDescent(LR), K), START, GRADIENT, 2400).x - optimum()
    assert (fleet.run(algorithm, START, GRADIENT, 2400).x - optimum()).abs().max() < 1e-9 < 0.05 < apart.abs().max()


def test_led_tolerates_eigenvalues_nearer_to_minus_one_with_a_smaller_beta() -> None:
    """A linearized round has the eigenvalue -1 along an eigenvector w of W if ``K beta = 2 (1 + w) / (1 - w)``."""
    little = Circulant(SIZE, {0: 0.2, 1: 0.4, -1: 0.4})  # w = -0.6: the limit is 0.5
    check("it", LED(LR, K, beta=0.45 / K).needs, little)
    for beta in (0.55 / K, None):
        with pytest.raises(ValueError, match="grow"):
            check("it", LED(LR, K, beta=beta).needs, little)


def test_a_round_without_steps_is_refused() -> None:
    for make in (KGT, LED):
        with pytest.raises(ValueError, match="every=0 must be 1 or more"):
            make(LR, 0)
