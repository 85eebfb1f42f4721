"""Elastic averaging: gradient descent on a star whose hub has no objective, and where that comes to rest."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx
import pytest
import torch
from torch import Tensor

import shoal
from shoal.algorithms import EASGD, GossipPGA, GradientDescent, LocalSteps, check
from shoal.algorithms.runs.run import steps_of
from shoal.sim import StackedFleet, StackedMix
from shoal.topology.families.static import ring
from support.closed_forms import gradient_of_all, gradients, on_all
from support.least_squares import DIMENSION, SIZE, optimum
from support.real_agents import run_one

Fleets = Callable[..., shoal.Fleet]
LR, BETA = 0.05, 0.9
GRADIENT = gradients(SIZE)
START = torch.randn(SIZE, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def star(beta: float) -> Tensor:
    """W of the agents and, last, the centre: ``[n + 1, n + 1]``."""
    a = beta / SIZE
    W = (1 - a) * torch.eye(SIZE + 1, dtype=torch.float64)
    W[-1, :-1] = W[:-1, -1] = a
    W[-1, -1] = 1 - beta
    return W


@pytest.mark.parametrize("beta", [0.5, 0.9, 1.0])
def test_it_is_gradient_descent_on_a_star_whose_hub_has_no_objective(beta: float) -> None:
    graph = nx.from_numpy_array(star(beta).numpy(), create_using=nx.DiGraph)
    start = torch.cat([START, START.mean(0, keepdim=True)])

    def gradient(x: Tensor) -> Tensor:
        return torch.cat([GRADIENT(x[:-1]), torch.zeros_like(x[-1:])])

    expected = StackedFleet(graph).run(GradientDescent(LR, atc=False), start, gradient, 20).x
    results = StackedFleet(ring(SIZE)).run(EASGD(LR, 1, beta), START, GRADIENT, 20)
    assert (results.x - expected[:-1]).abs().max() < 1e-12
    assert (results.estimate - expected[-1]).abs().max() < 1e-12


def rest(every: int, beta: float) -> Tensor:
    """``[n + 1, d]``: what a cycle of steps alone and one on the star begins and ends with."""
    H, c = gradient_of_all(SIZE)
    blank = torch.zeros(DIMENSION, DIMENSION, dtype=H.dtype)
    H, c = torch.block_diag(H, blank), torch.cat([c, blank[0]])  # type: ignore[no-untyped-call]
    unit = torch.eye(len(H), dtype=H.dtype)
    factor, constant = unit, torch.zeros_like(c)
    for mixing in [unit] * (every - 1) + [on_all(star(beta))]:
        factor, constant = (mixing - LR * H) @ factor, (mixing - LR * H) @ constant + LR * c
    result: Tensor = torch.linalg.solve(unit - factor, constant)
    return result.view(SIZE + 1, DIMENSION)


@pytest.mark.parametrize(("every", "beta"), [(1, 0.9), (3, 0.9), (3, 1.5)])
def test_it_comes_back_to_where_linear_algebra_says(every: int, beta: float) -> None:
    results = StackedFleet(ring(SIZE)).run(EASGD(LR, every, beta), START, GRADIENT, 1500)
    expected = rest(every, beta)
    assert (results.x - expected[:-1]).abs().max() < 1e-10
    assert (results.estimate - expected[-1]).abs().max() < 1e-10
    # The centre rests in the mean of the agents, where their gradients cancel, if they all meet it in every step.
    if every == 1:
        assert (expected[:-1].mean(0) - expected[-1]).abs().max() < 1e-10
        assert GRADIENT(expected[:-1]).mean(0).abs().max() < 1e-10


def test_the_centre_is_nearer_to_the_optimum_the_smaller_the_step() -> None:
    def off(lr: float) -> float:
        results = StackedFleet(ring(SIZE)).run(EASGD(lr, 1), START, GRADIENT, 8000).estimate
        return float((results[0] - optimum()).norm())

    assert 5 < off(0.02) / off(0.002) < 12


@pytest.mark.parametrize(("share", "grows"), [(0.99, False), (1.01, True)])
def test_a_pull_is_refused_exactly_where_agents_and_centre_oscillate(share: float, grows: bool) -> None:
    algorithm = EASGD(LR, 1, beta=share * 2 * SIZE / (SIZE + 1))
    started = steps_of(algorithm, START, torch.zeros_like, StackedMix(ring(SIZE)), 0)
    away = steps_of(algorithm, START + 1, torch.zeros_like, StackedMix(ring(SIZE)), 0)
    away.state = started.state  # a centre beside the mean of the agents
    ended = steps_of(algorithm, START, torch.zeros_like, StackedMix(ring(SIZE)), 2000, resume=away)
    apart = float((ended.x - ended.state[0]).abs().max())
    if grows:
        assert apart > 1e6
        with pytest.raises(ValueError, match=r"beta, which is 1\.9.*, to be below 2 n / .*16 agents that is 1\.882"):
            check("EASGD", algorithm.needs, ring(SIZE))
    else:
        assert apart < 1e-6
        check("EASGD", algorithm.needs, ring(SIZE))


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_with_curvature_the_bound_is_that_of_the_docstring(share: float) -> None:
    beta, n = 1.5, 4
    curvature = share * (2 - 2 * beta / n / (2 - beta)) / LR
    start = torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ended = steps_of(EASGD(LR, 1, beta), start, lambda x: curvature * x, StackedMix(ring(n)), 2000).x
    assert (ended.abs().max() > 1e6) if share > 1 else (ended.abs().max() < 1e-6)


def test_agents_have_the_same_centre_bit_for_bit(fleet: Fleets) -> None:
    results = fleet(4).run(run_one, "EASGD", 30)
    assert all(one == results[0] for one in results)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="every=0 must be 1 or more"):
        EASGD(LR, 0)
    for beta in (0.0, 2.0):
        with pytest.raises(ValueError, match=r"pass 0 < beta < 2 n / \(n \+ 1\)"):
            EASGD(LR, 1, beta)
    for wrapper in (LocalSteps, GossipPGA):
        with pytest.raises(ValueError, match="EASGD sets how often agents exchange"):
            wrapper(EASGD(LR, 1), 2)
