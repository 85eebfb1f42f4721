"""``prox=``: the papers' recursions in numpy, and optima of sums with a nonsmooth term, or with constraints.

And minimax: an operator replaces the gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import shoal
from shoal.algorithms import EXTRA, Algorithm, ExactDiffusion, GradientDescent, GradientTracking, run
from shoal.sim import StackedFleet
from support.algorithm_cases import ring_of_halves
from support.closed_forms import gradients, matrix
from support.least_squares import DIMENSION, SIZE

Vectors = NDArray[np.float64]
LR, WEIGHT, STEPS = 0.1, 0.3, 15
GRADIENT, RING = gradients(SIZE), ring_of_halves(SIZE)
START = torch.randn(SIZE, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
W = matrix(RING).numpy()
LAZY = (np.eye(SIZE) + W) / 2
SHRINK = torch.nn.Softshrink(LR * WEIGHT)


def slope(x: Vectors) -> Vectors:
    return GRADIENT(torch.from_numpy(x)).numpy()


def shrunk(x: Vectors) -> Vectors:
    return np.sign(x) * np.maximum(np.abs(x) - LR * WEIGHT, 0)


def prox_dgd(atc: bool) -> Vectors:
    x = START.numpy()
    for _ in range(STEPS):
        x = shrunk(W @ (x - LR * slope(x)) if atc else W @ x - LR * slope(x))
    return x


def pg_extra() -> Vectors:
    """Algorithm 1, over two steps: ``z+ = W x + z - (I + W)/2 x_prev - lr (g - g_prev)``."""
    before = START.numpy()
    z = W @ before - LR * slope(before)
    x = shrunk(z)
    for _ in range(STEPS - 1):
        z = W @ x + z - LAZY @ before - LR * (slope(x) - slope(before))
        before, x = x, shrunk(z)
    return x


def prox_ed(mixing: Vectors) -> Vectors:
    """As the primal-dual recursion: ``z = x - lr g - y``, ``y+ = y + (I - A) z``, ``x+ = prox(A z)``."""
    x, y = START.numpy(), np.zeros((SIZE, DIMENSION))
    for _ in range(STEPS):
        z = x - LR * slope(x) - y
        y = y + z - mixing @ z
        x = shrunk(mixing @ z)
    return x


FORMS = [
    (GradientDescent(LR, prox=SHRINK), lambda: prox_dgd(atc=True)),
    (GradientDescent(LR, atc=False, prox=SHRINK), lambda: prox_dgd(atc=False)),
    (EXTRA(LR, prox=SHRINK), pg_extra),
    (ExactDiffusion(LR, lazy=True, prox=SHRINK), lambda: prox_ed(LAZY)),
    (ExactDiffusion(LR, prox=SHRINK), lambda: prox_ed(W)),
]


@pytest.mark.parametrize(("algorithm", "paper"), FORMS, ids=[str(one) for one, _ in FORMS])
def test_it_is_the_papers_recursion(algorithm: Algorithm, paper: Callable[[], Vectors]) -> None:
    results = StackedFleet(RING).run(algorithm, START, GRADIENT, STEPS).x.numpy()
    assert np.abs(results - paper()).max() < 1e-12
    assert not algorithm.separable


@pytest.mark.parametrize("make", [EXTRA, lambda lr, prox: ExactDiffusion(lr, lazy=True, prox=prox)])
def test_the_exact_ones_find_the_optimum_with_an_l1_norm(make: Callable[..., Algorithm]) -> None:
    """Its conditions: the mean gradient is -weight sign(x) where x is not 0, and at most the weight where it is."""
    x = StackedFleet(RING).run(make(LR, prox=SHRINK), START, GRADIENT, 1200).x
    mean = GRADIENT(x[:1].expand_as(x)).mean(0)
    zero = x[0] == 0
    assert (x - x[0]).abs().max() < 1e-10
    assert 0 < zero.sum() < DIMENSION
    assert (mean[zero].abs() <= WEIGHT).all()
    assert (mean + WEIGHT * x[0].sign())[~zero].abs().max() < 1e-9


def nonnegative(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0)


@pytest.mark.parametrize("make", [EXTRA, lambda lr, prox: ExactDiffusion(lr, lazy=True, prox=prox)])
def test_a_projection_gives_the_optimum_under_constraints(make: Callable[..., Algorithm]) -> None:
    """Complementary: where x is 0 the mean gradient is not negative, elsewhere it is 0."""
    x = StackedFleet(RING).run(make(LR, prox=nonnegative), START, GRADIENT, 1200).x
    mean = GRADIENT(x[:1].expand_as(x)).mean(0)
    zero = x[0] == 0
    assert (x - x[0]).abs().max() < 1e-10
    assert 0 < zero.sum() < DIMENSION
    assert (mean[zero] >= -1e-9).all() and mean[~zero].abs().max() < 1e-9


def test_projected_gradient_descent_ends_near_it_and_always_inside() -> None:
    optimum = StackedFleet(RING).run(EXTRA(LR, prox=nonnegative), START, GRADIENT, 1200).x[0]

    def distance(lr: float) -> float:
        x = StackedFleet(RING).run(GradientDescent(lr, prox=nonnegative), START, GRADIENT, 3000).x
        assert (x >= 0).all()
        return float((x - optimum).abs().max())

    assert distance(0.01) < distance(0.1) / 2 < 0.5


# Minimax

M = 4  # numbers to minimise over, and as many to maximise over


def saddle() -> tuple[torch.Tensor, torch.Tensor]:
    """Of f_i(u, v) = u A_i u / 2 + u B_i v - v C_i v / 2 + a_i u - b_i v the operator (d/du, -d/dv) = F_i z + c_i:
    ``[n, 2 M, 2 M]`` and ``[n, 2 M]``."""
    generator = torch.Generator().manual_seed(5)
    roots = torch.randn(2, SIZE, M, M, dtype=torch.float64, generator=generator) / 2
    A, C = roots @ roots.mT + 0.5 * torch.eye(M, dtype=torch.float64)
    B = torch.randn(SIZE, M, M, dtype=torch.float64, generator=generator)
    F = torch.cat([torch.cat([A, B], 2), torch.cat([-B.mT, C], 2)], 1)
    return F, torch.randn(SIZE, 2 * M, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("algorithm", [GradientTracking(0.05), ExactDiffusion(0.05, lazy=True)], ids=str)
def test_an_operator_as_the_gradient_finds_the_saddle_point_of_the_sum(algorithm: Algorithm) -> None:
    F, c = saddle()
    solution = torch.linalg.solve(F.mean(0), -c.mean(0))
    start = torch.zeros(2 * M, dtype=torch.float64)
    results = StackedFleet(RING).run(algorithm, start, lambda z: (F @ z.unsqueeze(-1)).squeeze(-1) + c, 3000).x
    assert (results - solution).abs().max() < 1e-9 < 0.1 < solution.abs().max()


@pytest.mark.transport("threads")
def test_real_agents_equal_the_recursion_with_a_prox() -> None:
    few = 4

    def agent() -> torch.Tensor:
        rank = shoal.rank()

        def own_gradient(x: torch.Tensor) -> torch.Tensor:
            return GRADIENT(x.expand(SIZE, DIMENSION))[rank]

        algorithm = ExactDiffusion(LR, lazy=True, prox=SHRINK)
        return run(algorithm, START[rank], own_gradient, ring_of_halves(few), STEPS).x

    def own_gradients(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([GRADIENT(one.expand(SIZE, DIMENSION))[rank] for rank, one in enumerate(x)])

    stacked = StackedFleet(ring_of_halves(few))
    expected = stacked.run(ExactDiffusion(LR, lazy=True, prox=SHRINK), START[:few], own_gradients, STEPS).x
    assert (torch.stack(shoal.Fleet(few).run(agent)) - expected).abs().max() < 1e-12
