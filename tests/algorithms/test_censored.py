"""Censored gradient descent: an agent whose model changed little sends nothing, and the counters show it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import shoal
from shoal.algorithms import CensoredGradientDescent, GradientDescent, LocalSteps, own, run
from shoal.sim import StackedFleet
from shoal.topology import OnePeerHypercube, StarGraph, mixing_matrix, with_metropolis_hastings_weights
from shoal.topology.families.static import ring
from support.least_squares import DIMENSION, SIZE, loss, problem
from support.quadratic import gradients

Fleets = Callable[..., shoal.Fleet]
IRREGULAR = with_metropolis_hastings_weights(StarGraph(SIZE).to_undirected())
ROW = DIMENSION * 8


def starts(size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def test_with_threshold_zero_it_is_gradient_descent() -> None:
    fleet, gradient = StackedFleet(IRREGULAR), gradients()
    results = fleet.run(CensoredGradientDescent(0.05, 0.0, 0.9), starts(), gradient, 60)
    expected = fleet.run(GradientDescent(0.05), starts(), gradient, 60)
    assert (results.x - expected.x).abs().max() < 1e-13
    assert results.sent == expected.sent


def test_a_step_is_the_equation_and_large_changes_are_sent() -> None:
    """x+ = W s + (x - s), where s is the value sent last; x is sent if it is at least tau decay^k from s."""
    algorithm = CensoredGradientDescent(0.05, 1.0, 0.9)
    fleet, gradient = StackedFleet(IRREGULAR), gradients()
    W = torch.from_numpy(mixing_matrix(IRREGULAR))
    listeners = (W != 0).sum(0) - 1
    now = fleet.run(algorithm, starts(), gradient, 0)
    silent = 0
    for k in range(25):
        then = fleet.run(algorithm, starts(), gradient, 1, resume=now)
        half = now.x - 0.05 * gradient(now.x)
        s, kept = then.state[0], now.state[0] if now.state else torch.zeros_like(half)
        moved = (half - kept).norm(dim=1)
        sends = moved >= 0.9**k
        assert (s - torch.where(sends.unsqueeze(1), half, kept)).abs().max() < 1e-13
        assert torch.equal(s[~sends], kept[~sends])
        assert (then.x - (W @ s + half - s)).abs().max() < 1e-13
        assert then.sent - now.sent == ROW * int(listeners[sends].sum())
        silent += int((~sends).sum())
        now = then
    assert 0 < silent < 25 * SIZE


def test_censoring_does_not_move_the_mean() -> None:
    algorithm = CensoredGradientDescent(0.05, 1.0, 1.0)
    fleet, gradient = StackedFleet(ring(SIZE)), gradients()
    before = fleet.run(algorithm, starts(), gradient, 9)
    after = fleet.run(algorithm, starts(), gradient, 1, resume=before)
    expected = (before.x - 0.05 * gradient(before.x)).mean(0)
    assert (after.x.mean(0) - expected).abs().max() < 1e-13


def test_it_converges_like_gradient_descent_with_fewer_bytes() -> None:
    fleet, gradient = StackedFleet(ring(SIZE)), gradients()
    results = fleet.run(CensoredGradientDescent(0.05, 3.0, 0.97), starts(), gradient, 1000)
    plain = fleet.run(GradientDescent(0.05), starts(), gradient, 1000)
    assert (results.x - plain.x).abs().max() < 1e-10
    assert results.sent < plain.sent / 2


def test_below_the_threshold_nothing_is_sent() -> None:
    gradient = gradients()
    results = StackedFleet(IRREGULAR).run(CensoredGradientDescent(0.05, 1e9, 1.0), starts(), gradient, 20)
    assert results.sent == 0


def test_non_finite_values_are_not_censored() -> None:
    x = starts()
    x[2] = math.nan
    results = StackedFleet(ring(SIZE)).run(CensoredGradientDescent(0.05, 1e9, 1.0), x, lambda x: x, 1)
    assert results.sent == 2 * ROW
    assert results.x[[1, 2, 3]].isnan().all()
    assert not results.x[4].isnan().any()


def test_real_agents_keep_the_same_state(fleet: Fleets) -> None:
    A, b = problem(4)
    graph = with_metropolis_hastings_weights(StarGraph(4).to_undirected())
    algorithm = CensoredGradientDescent(0.05, 1.0, 0.95)
    start = starts(4)

    def agent() -> tuple[int, int, list[float]]:
        rank = shoal.rank()
        before = shoal.observability.bytes_sent()
        result = run(algorithm, start[rank], own(loss, A[rank], b[rank]), graph, 40, every=0)
        return result.sent, shoal.observability.bytes_sent() - before, result.x.tolist()

    stacked = StackedFleet(graph).run(algorithm, start, gradients(4), 40)
    results = fleet(4).run(agent)
    assert sum(sent for sent, _, _ in results) == stacked.sent
    assert all(engine == books for books, engine, _ in results)
    assert (torch.tensor([x for _, _, x in results], dtype=torch.float64) - stacked.x).abs().max() < 1e-13
    assert 6 * ROW < stacked.sent < 40 * 6 * ROW


@pytest.mark.parametrize(("tau", "decay"), [(-1.0, 0.5), (1.0, 1.1), (1.0, -0.1), (float("nan"), 0.5)])
def test_invalid_thresholds_are_refused(tau: float, decay: float) -> None:
    with pytest.raises(ValueError, match="threshold from 0 up, and a decay in"):
        CensoredGradientDescent(0.1, tau, decay)


def test_a_changing_topology_is_refused() -> None:
    """A new neighbour has not received the value that an agent sent last."""
    with pytest.raises(ValueError, match="CensoredGradientDescent needs W to be static"):
        StackedFleet(OnePeerHypercube(4)).run(CensoredGradientDescent(0.1, 1.0, 0.9), torch.ones(4, 1), lambda x: x, 1)
    with pytest.raises(ValueError, match="needs the same W in every step"):
        LocalSteps(CensoredGradientDescent(0.1, 1.0, 0.9), every=2)
