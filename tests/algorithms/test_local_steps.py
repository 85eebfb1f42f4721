"""Exchanging less often: the plain algorithm when it is every step, and the fixed points of whole cycles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shoal.algorithms import (
    Algorithm,
    ExactDiffusion,
    GossipPGA,
    Gradient,
    GradientDescent,
    GradientTracking,
    LocalSteps,
    Mix,
    PushPull,
    PushSum,
    RelaySum,
)
from shoal.algorithms.compressed import ChocoSGD, DeepSqueeze
from shoal.compression import TopK
from shoal.sim import StackedFleet, per_agent
from shoal.topology import AllReduce, ChainGraph, EveryH, ExponentialGraph, OnePeerExponential
from shoal.topology.families.static import ring
from support.closed_forms import gradients, matrix, rest_of_cycle
from support.least_squares import DIMENSION, SIZE, loss, optimum, problem

LR = 0.1
GRADIENT = gradients(SIZE)
START = torch.randn(SIZE, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
W = matrix(ring(SIZE))
UNIT, MEAN = torch.eye(SIZE, dtype=torch.float64), torch.full((SIZE, SIZE), 1 / SIZE, dtype=torch.float64)


def local_sgd(every: int) -> Algorithm:
    return LocalSteps(GossipPGA(GradientDescent(LR), every=1), every)


@pytest.mark.parametrize("algorithm", [GradientDescent(LR), GradientTracking(LR)])
def test_an_exchange_in_every_step_is_the_algorithm_itself(algorithm: Algorithm) -> None:
    fleet, gradient = StackedFleet(OnePeerExponential(SIZE), seed=5), per_agent(loss, *problem(), batch=5)
    plain = fleet.run(algorithm, START, gradient, 12)
    local = fleet.run(LocalSteps(algorithm, every=1), START, gradient, 12)
    assert torch.equal(local.x, plain.x)
    assert local.sent == plain.sent


def test_without_a_global_average_it_is_the_algorithm_itself() -> None:
    fleet = StackedFleet(OnePeerExponential(SIZE))
    plain = fleet.run(GradientDescent(LR), START, GRADIENT, 12)
    assert torch.equal(fleet.run(GossipPGA(GradientDescent(LR), every=13), START, GRADIENT, 12).x, plain.x)


@pytest.mark.parametrize("every", [1, 3])
def test_gossip_pga_is_gradient_descent_on_the_schedule_of_its_averages(every: int) -> None:
    pga = StackedFleet(ring(SIZE)).run(GossipPGA(GradientDescent(LR), every), START, GRADIENT, 20).x
    schedule = EveryH(ring(SIZE), AllReduce(SIZE), every)
    assert (StackedFleet(schedule).run(GradientDescent(LR), START, GRADIENT, 20).x - pga).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("algorithm", "cycle"),
    [
        (LocalSteps(GradientDescent(LR), 4), [UNIT, UNIT, UNIT, W]),
        (GossipPGA(GradientDescent(LR), 4), [W, W, W, MEAN]),
        (local_sgd(4), [UNIT, UNIT, UNIT, MEAN]),
    ],
    ids=["local steps", "Gossip-PGA", "Local SGD"],
)
def test_the_periodic_point_is_that_of_linear_algebra(algorithm: Algorithm, cycle: list[torch.Tensor]) -> None:
    results = StackedFleet(ring(SIZE)).run(algorithm, START, GRADIENT, 1200).x
    assert (results - rest_of_cycle(cycle, LR)).abs().max() < 1e-10


def test_the_order_of_final_errors_is_as_measured() -> None:
    def off(algorithm: Algorithm) -> float:
        return float((StackedFleet(ring(SIZE)).run(algorithm, START, GRADIENT, 1600).x.mean(0) - optimum()).norm())

    often, seldom = (off(GossipPGA(GradientDescent(LR), every)) for every in (4, 16))
    assert often < seldom < off(local_sgd(16))
    assert often < off(local_sgd(4)) < off(local_sgd(16))
    assert seldom < off(GradientDescent(LR))


def test_local_steps_keep_gradient_tracking_exact() -> None:
    results = StackedFleet(OnePeerExponential(SIZE)).run(LocalSteps(GradientTracking(0.05), 3), START, GRADIENT, 2500).x
    assert (results - optimum()).abs().max() < 1e-9


def test_exchanges_use_the_rounds_of_a_schedule_in_order() -> None:
    # Of two rounds, and with every second step silent: by the number of the step it would be the same round for ever.
    topology = OnePeerExponential(4)
    start = torch.eye(4, dtype=torch.float64)
    results = StackedFleet(topology).run(LocalSteps(GradientDescent(LR), 2), start, torch.zeros_like, 4).x
    assert torch.equal(results, torch.full((4, 4), 0.25, dtype=torch.float64))


@pytest.mark.parametrize(
    "algorithm",
    [LocalSteps(one, 5) for one in (GradientDescent(LR), PushSum(), PushPull(0.01))] + [local_sgd(5)],
)
def test_local_steps_send_nothing(algorithm: Algorithm) -> None:
    fleet = StackedFleet(ring(SIZE))
    assert fleet.run(algorithm, START, GRADIENT, 4).sent == 0
    assert fleet.run(algorithm, START, GRADIENT, 5).sent == fleet.run(algorithm, START, GRADIENT, 9).sent > 0


@pytest.mark.parametrize("wrapper", [LocalSteps, GossipPGA])
def test_push_sum_keeps_its_mean_under_both(wrapper: type[LocalSteps] | type[GossipPGA]) -> None:
    directed = ExponentialGraph(SIZE)
    directed.remove_edge(0, 4)
    results = StackedFleet(directed).run(wrapper(PushSum(), 3), START, torch.zeros_like, 200).estimate
    assert (results - START.mean(0)).abs().max() < 1e-9


def test_a_global_average_replaces_pulls_and_pushes() -> None:
    directed = ExponentialGraph(SIZE)
    directed.remove_edge(0, 4)
    fleet = StackedFleet(directed)
    results = fleet.run(GossipPGA(PushSum(), 1), START, torch.zeros_like, 1).estimate
    assert (results - START.mean(0)).abs().max() < 1e-12
    run = fleet.run(GossipPGA(PushPull(0.01), 1), START, GRADIENT, 3)
    assert all((one - one[0]).abs().max() < 1e-12 for one in (run.x, run.state[0]))


@dataclass(frozen=True)
class Walk(Algorithm):
    """A step at random, an exchange, and another."""

    source = "here"
    needs = ()

    def step(self, x: torch.Tensor, state: Any, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, Any]:
        first, stream = mix.uniform(x), mix.stream(x)
        second = torch.stack([stream.fill(row, 0, torch.empty_like(x[0])) for row in range(len(x))])
        return mix(x) * 0 + first + second - mix.round * mix.uniform(x), ()


@pytest.mark.parametrize("wrapper", [LocalSteps, GossipPGA])
def test_random_numbers_and_step_numbers_are_those_of_the_plain_algorithm(
    wrapper: type[LocalSteps] | type[GossipPGA],
) -> None:
    fleet = StackedFleet(ring(SIZE), seed=2)
    for steps in (5, 6, 7):
        plain = fleet.run(Walk(), START, GRADIENT, steps).x
        assert torch.equal(fleet.run(wrapper(Walk(), 3), START, GRADIENT, steps).x, plain)


@pytest.mark.parametrize("wrapper", [LocalSteps, GossipPGA])
def test_algorithms_that_cannot_skip_exchanges_are_refused(wrapper: type[LocalSteps] | type[GossipPGA]) -> None:
    with pytest.raises(ValueError, match=r"ExactDiffusion needs the same W in every step, and .* GradientTracking"):
        wrapper(ExactDiffusion(LR), 4)
    with pytest.raises(ValueError, match=r"ChocoSGD needs the same W in every step"):
        wrapper(ChocoSGD(LR, 0.3, TopK(0.5)), 4)
    with pytest.raises(ValueError, match=r"RelaySum sends each neighbour a message of its own"):
        wrapper(RelaySum(LR), 4)
    with pytest.raises(ValueError, match=r"every=0"):
        wrapper(GradientDescent(LR), 0)


def test_local_steps_are_not_wrapped_twice() -> None:
    with pytest.raises(ValueError, match=r"LocalSteps of LocalSteps"):
        LocalSteps(LocalSteps(GradientDescent(LR), 2), 2)


def test_self_contained_compressed_messages_may_be_skipped() -> None:
    fleet = StackedFleet(ring(SIZE))
    compressed = fleet.run(LocalSteps(DeepSqueeze(LR, 1.0, TopK(1.0)), 3), START, GRADIENT, 12)
    assert (compressed.x - fleet.run(LocalSteps(GradientDescent(LR), 3), START, GRADIENT, 12).x).abs().max() < 1e-12


@dataclass(frozen=True)
class OnEdges(Walk):
    """Speaks to each neighbour apart, and does not say that it needs links both ways."""

    def step(self, x: torch.Tensor, state: Any, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, Any]:
        return mix.gather(mix.edges(mix.spread(x))), ()


def test_messages_for_each_neighbour_are_not_skipped() -> None:
    StackedFleet(ChainGraph(SIZE)).run(OnEdges(), START, GRADIENT, 2)
    with pytest.raises(ValueError, match=r"needs one from each"):
        StackedFleet(ChainGraph(SIZE)).run(LocalSteps(OnEdges(), 2), START, GRADIENT, 2)
