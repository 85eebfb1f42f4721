"""Variance reduction: noise that vanishes, computed explicitly over a few steps, and to the optimum over many."""

from __future__ import annotations

import pytest
import torch

import shoal
from shoal.algorithms import (
    DecentralizedSVRG,
    DualAveraging,
    ExactDiffusion,
    Gradient,
    GradientDescent,
    GradientTracking,
    Mix,
    Momentum,
    own,
    run,
)
from shoal.sim import StackedFleet, per_agent
from shoal.topology import OnePeerExponential
from shoal.topology.families.static import ring
from support.closed_forms import gradients, matrix, rest_of_gradient_descent
from support.least_squares import DIMENSION, SIZE, loss, optimum, problem

LR = 0.05
START = torch.randn(SIZE, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ORIGIN = torch.zeros(DIMENSION, dtype=torch.float64)
BATCH = 5


def test_every_step_corrects_its_sample_by_the_point_of_the_period() -> None:
    W = matrix(ring(SIZE))
    drawn = [0]

    def slope(number: int, x: torch.Tensor) -> torch.Tensor:
        """Of a sample that is never twice the same."""
        return (1 + number) * x.sin() + number**2

    def full(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    def draw(mix: Mix) -> None:
        drawn[0] = mix.round

    gradient = Gradient(lambda x: slope(drawn[0], x), full, draw)
    results = StackedFleet(ring(SIZE)).run(DecentralizedSVRG(GradientDescent(LR), period=3), START, gradient, 8).x
    x = anchor = START
    for number in range(8):
        if number % 3 == 0:
            anchor = x
        x = W @ (x - LR * (slope(number, x) - slope(number, anchor) + full(anchor)))
    assert (results - x).abs().max() < 1e-12


def test_the_full_gradient_is_computed_once_a_period() -> None:
    complete = []

    def full(x: torch.Tensor) -> torch.Tensor:
        complete.append(x)
        return x - 1

    gradient = Gradient(lambda x: x - 1, full)
    StackedFleet(ring(SIZE)).run(DecentralizedSVRG(GradientDescent(LR), period=5), START, gradient, 24)
    assert len(complete) == 5


def test_on_full_gradients_it_is_the_algorithm_itself() -> None:
    fleet, gradient = StackedFleet(ring(SIZE)), gradients(SIZE)
    plain = fleet.run(ExactDiffusion(LR, lazy=True), START, gradient, 40).x
    reduced = fleet.run(DecentralizedSVRG(ExactDiffusion(LR, lazy=True), 7), START, gradient, 40).x
    assert (reduced - plain).abs().max() < 1e-12


def test_from_samples_it_finds_the_optimum_and_exact_diffusion_alone_does_not() -> None:
    fleet, gradient = StackedFleet(ring(SIZE), seed=4), per_agent(loss, *problem(), batch=BATCH)
    reduced = fleet.run(DecentralizedSVRG(ExactDiffusion(LR, lazy=True), period=20), ORIGIN, gradient, 1200).x
    alone = fleet.run(ExactDiffusion(LR, lazy=True), ORIGIN, gradient, 300).x
    assert (reduced - optimum()).abs().max() < 1e-8
    assert (alone - optimum()).abs().max() > 0.05


def test_over_diffusion_its_fixed_point_is_that_of_full_gradients() -> None:
    fleet, gradient = StackedFleet(ring(SIZE), seed=4), per_agent(loss, *problem(), batch=BATCH)
    results = fleet.run(DecentralizedSVRG(GradientDescent(LR), period=20), ORIGIN, gradient, 1200).x
    assert (results - rest_of_gradient_descent(matrix(ring(SIZE)), LR, atc=True)).abs().max() < 1e-8


def test_the_answer_is_that_of_the_algorithm() -> None:
    fleet, gradient = StackedFleet(ring(SIZE)), gradients(SIZE)
    plain = fleet.run(DualAveraging(LR), START, gradient, 8)
    reduced = fleet.run(DecentralizedSVRG(DualAveraging(LR), 3), START, gradient, 8)
    assert (plain.estimate - plain.x).abs().max() > 1e-3
    assert (reduced.estimate - plain.estimate).abs().max() < 1e-12


def on_samples() -> list[float]:
    A, b = problem(4)
    gradient = own(loss, A[shoal.rank()], b[shoal.rank()], batch=BATCH)
    algorithm = DecentralizedSVRG(Momentum(ExactDiffusion(0.02, lazy=True), 0.5), period=7)
    result: list[float] = run(algorithm, ORIGIN, gradient, ring(4), 100, seed=6).x.tolist()
    return result


@pytest.mark.transport("threads")
def test_real_agents_draw_the_samples_of_the_stacked_fleet() -> None:
    algorithm = DecentralizedSVRG(Momentum(ExactDiffusion(0.02, lazy=True), 0.5), period=7)
    stacked = StackedFleet(ring(4), seed=6).run(algorithm, ORIGIN, per_agent(loss, *problem(4), batch=BATCH), 100).x
    real = torch.tensor(shoal.Fleet(4, timeout=20.0).run(on_samples), dtype=torch.float64)
    assert (real - stacked).abs().max() < 1e-12


def test_the_requirements_are_those_of_the_algorithm() -> None:
    with pytest.raises(ValueError, match=r"DecentralizedSVRG needs W to be static"):
        fleet = StackedFleet(OnePeerExponential(SIZE))
        fleet.run(DecentralizedSVRG(ExactDiffusion(LR, lazy=True), 20), START, gradients(SIZE), 1)


def test_algorithms_that_it_cannot_wrap_are_refused() -> None:
    with pytest.raises(TypeError, match=r"GradientTracking does not"):
        DecentralizedSVRG(GradientTracking(LR), 20)
    with pytest.raises(TypeError, match=r"DecentralizedSVRG does not.*put Momentum inside"):
        Momentum(DecentralizedSVRG(GradientDescent(LR), 20), 0.9)
    with pytest.raises(ValueError, match=r"period=0"):
        DecentralizedSVRG(GradientDescent(LR), 0)
