"""Training with ``on_loss="continue"``: the survivors converge to the computed fixed point."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal import topology_util
from shoal.algorithms import ExactDiffusion, GradientDescent, GradientTracking, ParallelGradientDescent
from shoal.topology import BaseGraph, OnePeerExponential, OnePeerHypercube
from support.fault_points import Point, arm, each_over_one, over_both
from support.surviving_training import RATE, STEPS, curvature, optimum, resting_place, target, train_through
from support.survivors import CONTINUE
from support.world import World

SIZE, VICTIM = 4, 1
LEFT = [rank for rank in range(SIZE) if rank != VICTIM]
ATC, AWC = GradientDescent(1.0), GradientDescent(1.0, atc=False)
POINTS = [
    Point("sent", 30),
    pytest.param(Point("received", 41), marks=pytest.mark.soak),
    pytest.param(Point("summed", 22), marks=pytest.mark.soak),
]


def trained(environment: dict[str, str], point: Point, options: dict[str, Any]) -> dict[int, np.ndarray]:
    with World(SIZE, environment=environment | CONTINUE) as world:
        outcomes = world.run(train_through, {VICTIM: point}, options)
        failed = [
            f"rank {outcome.rank}: {outcome.error}: {outcome.message}\n{outcome.trace}"
            for outcome in outcomes
            if outcome.error
        ]
        assert len(failed) == 1, "\n".join(failed)
        assert outcomes[VICTIM].error == "Died"
        return {rank: np.array(outcomes[rank].value) for rank in LEFT}


@over_both
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("topology", [None, OnePeerExponential(SIZE), OnePeerHypercube(SIZE), BaseGraph(SIZE)], ids=str)
@pytest.mark.parametrize("algorithm", [ATC, AWC], ids=["adapt-then-combine", "adapt-with-combine"])
def test_decentralized_sgd_converges_among_the_survivors(
    environment: dict[str, str], point: Point, topology: Any, algorithm: Any
) -> None:
    result = trained(environment, point, {"algorithm": algorithm, "topology": topology})
    graph = topology_util.RingGraph(SIZE) if topology is None else topology
    expected = resting_place(graph, SIZE, [VICTIM], overlapping=algorithm is AWC)
    for rank, x in result.items():
        np.testing.assert_allclose(x, expected[rank], rtol=0, atol=1e-8)


@over_both
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("overlap", [None, "backward"])
def test_averaged_gradients_reach_the_survivors_optimum_and_models_stay_equal(
    environment: dict[str, str], point: Point, overlap: str | None
) -> None:
    result = trained(environment, point, {"algorithm": ParallelGradientDescent(1.0), "overlap": overlap})
    first, *others = result.values()
    for other in others:
        np.testing.assert_array_equal(other, first)
    np.testing.assert_allclose(first, optimum(LEFT), rtol=0, atol=1e-10)


@over_both
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(
    "algorithm", [GradientTracking(1.0), ExactDiffusion(1.0, lazy=True)], ids=lambda one: type(one).__name__
)
def test_exact_algorithms_reach_the_survivors_optimum(
    environment: dict[str, str], point: Point, algorithm: Any
) -> None:
    result = trained(environment, point, {"algorithm": algorithm})
    for x in result.values():
        np.testing.assert_allclose(x, optimum(LEFT), rtol=0, atol=1e-10)


class InParts(torch.nn.Module):
    """Three numbers that are three parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.nn.ParameterList(torch.zeros(1, dtype=torch.float64) for _ in range(3))

    def forward(self, goal: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.numbers)) - goal


def train_in_parts(victims: dict[int, Point]) -> list[float]:
    rank, model = shoal.rank(), InParts()
    h, c = curvature(rank), torch.tensor(target(rank))
    optimizer = shoal.DecentralizedOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE),
        model,
        ExactDiffusion(1.0, lazy=True),
        topology=topology_util.RingGraph(SIZE),
        overlap="backward",
        bucket_bytes=1,
    )
    shoal.barrier()
    if rank in victims:
        arm(victims[rank])
    for _ in range(STEPS):
        optimizer.zero_grad()
        (0.5 * h * model(c).square().sum()).backward()
        optimizer.step()
    return torch.cat(list(model.numbers)).tolist()


@pytest.mark.slow
@each_over_one(["30", "33"])
def test_separately_stepped_buckets_reach_the_survivors_optimum(environment: dict[str, str], way: str) -> None:
    """The failure may come between the steps of two buckets, which then restart with different membership."""
    with World(SIZE, environment=environment | CONTINUE) as world:
        outcomes = world.run(train_in_parts, {VICTIM: Point("sent", int(way))})
        assert [outcome.rank for outcome in outcomes if outcome.error] == [VICTIM], [
            outcome.trace for outcome in outcomes
        ]
        for rank in LEFT:
            np.testing.assert_allclose(outcomes[rank].value, optimum(LEFT), rtol=0, atol=1e-10)
