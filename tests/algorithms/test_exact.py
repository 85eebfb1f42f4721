"""Exact diffusion, EXTRA and NIDS: their recursions, their conditions on W, and their limits."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from shoal.algorithms import EXTRA, NIDS, Algorithm, ExactDiffusion, check
from shoal.algorithms.needs import Facts
from shoal.algorithms.runs.run import steps_of
from shoal.algorithms.stability.growth import step_matrix
from shoal.sim import StackedFleet, StackedMix
from shoal.topology import Circulant, OnePeerExponential
from shoal.topology.families.static import exponential, ring
from support.closed_forms import gradients, matrix
from support.least_squares import DIMENSION, SIZE, optimum, problem

LR = 0.1
GRADIENT = gradients(SIZE)
START = torch.randn(SIZE, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def after(algorithm: Algorithm, steps: int, start: torch.Tensor = START) -> torch.Tensor:
    return steps_of(algorithm, start, GRADIENT, StackedMix(ring(SIZE)), steps).x


def unchecked(algorithm: Algorithm, topology: Circulant | OnePeerExponential, steps: int) -> float:
    """How far from the optimum the algorithm ends on a mixing that it may not be meant for."""
    x = steps_of(algorithm, START, GRADIENT, StackedMix(topology), steps).x
    return float((x - optimum()).abs().max())


def weighted_ring(own: float) -> Circulant:
    return Circulant(SIZE, {0: own, 1: (1 - own) / 2, -1: (1 - own) / 2})


@pytest.mark.parametrize("lazy", [False, True])
def test_exact_diffusion_is_its_recursion_over_two_steps(lazy: bool) -> None:
    W = matrix(ring(SIZE))
    W = (torch.eye(SIZE, dtype=W.dtype) + W) / 2 if lazy else W
    before, x = START, W @ (START - LR * GRADIENT(START))
    for _ in range(20):
        before, x = x, W @ (2 * x - before - LR * (GRADIENT(x) - GRADIENT(before)))
    assert (after(ExactDiffusion(LR, lazy), 21) - x).abs().max() < 1e-12


def test_extra_is_its_recursion_over_two_steps() -> None:
    W, unit = matrix(ring(SIZE)), torch.eye(SIZE, dtype=torch.float64)
    before, x = START, W @ START - LR * GRADIENT(START)
    for _ in range(20):
        before, x = x, (unit + W) @ x - (unit + W) / 2 @ before - LR * (GRADIENT(x) - GRADIENT(before))
    assert (after(EXTRA(LR), 21) - x).abs().max() < 1e-12


def test_nids_is_a_local_step_followed_by_lazy_exact_diffusion() -> None:
    alone = START - LR * GRADIENT(START)
    assert torch.equal(after(NIDS(LR), 21), after(ExactDiffusion(LR, lazy=True), 20, alone))


def test_nids_with_a_proximal_operator_finds_the_optimum_of_a_nonsmooth_sum() -> None:
    weight = 0.3
    x = after(NIDS(LR, torch.nn.Softshrink(LR * weight)), 1000)
    slope = GRADIENT(x[:1].expand_as(x)).mean(0)
    zero = x[0] == 0
    assert (x - x[0]).abs().max() < 1e-12
    assert 0 < zero.sum() < DIMENSION
    assert (slope[zero].abs() <= weight).all()
    assert (slope + weight * x[0].sign())[~zero].abs().max() < 1e-12


def test_the_step_size_of_nids_is_independent_of_the_network_and_that_of_extra_is_not() -> None:
    A, _ = problem()
    curvature = float(torch.linalg.eigvalsh(A.mT @ A).max())
    lambda_min = -1 / 3
    assert unchecked(NIDS(1.9 / curvature), ring(SIZE), 700) < 1e-9
    assert unchecked(EXTRA(0.9 * (1 + lambda_min) / curvature), ring(SIZE), 700) < 1e-9
    assert not unchecked(EXTRA(1.9 / curvature), ring(SIZE), 700) < 1e3


@pytest.mark.parametrize("own", [0.34, 0.36])
def test_exact_diffusion_converges_above_an_eigenvalue_of_minus_a_third(own: float) -> None:
    check("ExactDiffusion", ExactDiffusion(LR).needs, weighted_ring(own))
    assert unchecked(ExactDiffusion(LR), weighted_ring(own), 700) < 1e-9


def spread(algorithm: Algorithm, topology: Circulant, steps: int) -> float:
    """The largest difference between agents during a run whose gradients are only noise."""
    noise = torch.Generator().manual_seed(2)
    start = torch.zeros(SIZE, 4, dtype=torch.float64)
    run = steps_of(
        algorithm,
        start,
        lambda x: torch.randn(x.shape, generator=noise, dtype=x.dtype),
        StackedMix(topology),
        steps,
        measure=lambda x: {"spread": float((x - x.mean(0)).norm())},
        every=10,
    )
    return float(run.column("spread").max())


def test_at_an_eigenvalue_of_minus_a_third_noise_accumulates_and_slightly_above_it_does_not() -> None:
    ring_of_thirds, above = weighted_ring(1 / 3), weighted_ring(0.36)
    assert spread(ExactDiffusion(LR), ring_of_thirds, 8000) > 2 * spread(ExactDiffusion(LR), ring_of_thirds, 800)
    for algorithm, topology in ((ExactDiffusion(LR), above), (ExactDiffusion(LR, lazy=True), ring_of_thirds)):
        short, long = (spread(algorithm, topology, steps) for steps in (800, 8000))
        assert short <= long < 1.5 * short


@pytest.mark.parametrize("own", [1 / 3, 0.3335])
def test_at_an_eigenvalue_of_minus_a_third_exact_diffusion_warns_and_finds_the_optimum(own: float) -> None:
    """Listing 6 of the BlueFog paper on an even ring: full gradients, and a strongly convex sum."""
    fleet = StackedFleet(weighted_ring(own))
    with pytest.warns(UserWarning, match=r"the smallest is -0\.333.*noise of gradients adds up.*lazy=True"):
        results = fleet.run(ExactDiffusion(LR), START, GRADIENT, 700)
    assert (results.x - optimum()).abs().max() < 1e-9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fleet.run(ExactDiffusion(LR), START, GRADIENT, 1, unchecked="eigenvalues above -1/3")


@pytest.mark.parametrize("size", [4, 6, 16])
def test_at_minus_a_third_differences_shrink_only_by_the_curvature(size: int) -> None:
    """Along w = -1/3, with the curvature h, the factors of a step solve ``r^2 = w (2 - lr h) r - w (1 - lr h)``."""

    def largest_of_differences(curvature: torch.Tensor) -> float:
        result = torch.linalg.eigvals(step_matrix(ExactDiffusion(LR), Facts(ring(size)), curvature)).abs()
        largest, second, *_ = result.sort(descending=True).values.tolist()
        assert largest == pytest.approx(1), "the constant that x and psi share is kept"
        return float(second)

    ones, h = torch.ones(size, 1, dtype=torch.float64), 1.0
    w, a = -1 / 3, LR * h
    alternating = abs(w * (2 - a) / 2 - math.sqrt((w * (2 - a) / 2) ** 2 - w * (1 - a)))
    assert alternating == pytest.approx(1 - a / 2, abs=a**2 / 10)
    assert largest_of_differences(h * ones) == pytest.approx(alternating, abs=1e-9)
    assert largest_of_differences(0 * ones) == pytest.approx(1, abs=1e-9)
    assert largest_of_differences(h * ones * (torch.arange(size) == 0).view(-1, 1)) < 1, "one curved objective suffices"


def test_a_named_condition_is_not_checked() -> None:
    fleet, lazy = StackedFleet(OnePeerExponential(SIZE)), ExactDiffusion(LR, lazy=True)
    waived = ("static", "symmetric")
    results = fleet.run(lazy, START, GRADIENT, 700, unchecked=waived).x
    assert (results - optimum()).abs().max() < 1e-9
    with pytest.raises(ValueError, match=r"to be symmetric, and W is not .*unchecked='symmetric' leaves this"):
        fleet.run(lazy, START, GRADIENT, 1, unchecked="static")
    with pytest.raises(ValueError, match=r"unchecked='statc': ExactDiffusion has no such condition.*'static', 'doubly"):
        fleet.run(lazy, START, GRADIENT, 1, unchecked="statc")


@pytest.mark.parametrize("own", [0.30, 0.1])
def test_exact_diffusion_is_refused_below_an_eigenvalue_of_minus_a_third_where_it_diverges(own: float) -> None:
    with pytest.raises(ValueError, match=r"the smallest is -0\.[48].*differences grow.*lazy=True"):
        StackedFleet(weighted_ring(own)).run(ExactDiffusion(LR), START, GRADIENT, 1)
    assert not unchecked(ExactDiffusion(LR), weighted_ring(own), 300) < 1e3


@pytest.mark.parametrize("algorithm", [ExactDiffusion(LR, lazy=True), NIDS(LR)])
def test_averaging_with_the_identity_helps_below_an_eigenvalue_of_minus_a_third(algorithm: Algorithm) -> None:
    check("it", algorithm.needs, weighted_ring(0.1))
    assert unchecked(algorithm, weighted_ring(0.1), 700) < 1e-9


@pytest.mark.parametrize("algorithm", [ExactDiffusion(LR), ExactDiffusion(LR, lazy=True), EXTRA(LR), NIDS(LR)])
def test_a_changing_or_directed_mixing_is_refused_for_gradient_tracking(algorithm: Algorithm) -> None:
    with pytest.raises(ValueError, match=r"static, and the topology changes \(period 4\).*GradientTracking"):
        StackedFleet(OnePeerExponential(SIZE)).run(algorithm, START, GRADIENT, 1)
    with pytest.raises(ValueError, match=r"symmetric, and W is not symmetric.*GradientTracking"):
        StackedFleet(exponential(SIZE)).run(algorithm, START, GRADIENT, 1)


def test_exact_diffusion_would_diverge_on_a_changing_mixing() -> None:
    assert unchecked(ExactDiffusion(LR), OnePeerExponential(SIZE), 87) > 1e5
