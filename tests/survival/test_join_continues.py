"""``optimizer.join()``: agents have different numbers of batches. One of them is killed; the others finish."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.algorithms import GradientDescent, ParallelGradientDescent
from support.fault_points import Point, arm, over_both
from support.surviving_training import Point3, curvature, target
from support.survivors import CONTINUE
from support.world import World

BATCHES = [60, 120, 40, 90]
WAYS: dict[str, dict[str, Any]] = {
    "ATC": {"algorithm": GradientDescent(1.0)},
    "AWC": {"algorithm": GradientDescent(1.0, atc=False)},
    "gradients": {"algorithm": ParallelGradientDescent(1.0)},
}


def train(way: str, victim: int, point: Point) -> tuple[list[float], list[list[float]], int]:
    """The parameters in the end, after each step of this agent's, and how many rounds there were."""
    rank, model = shoal.rank(), Point3()
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model, **WAYS[way])
    h, c = curvature(rank), torch.tensor(target(rank))
    shoal.barrier()
    if rank == victim:
        arm(point)
    seen = []
    with optimizer.join():
        for _ in range(BATCHES[rank]):
            optimizer.zero_grad()
            (0.5 * h * (model.x - c).square().sum()).backward()
            optimizer.step()
            seen.append(model.x.tolist())
    return model.x.tolist(), seen, optimizer.rounds


@over_both
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("victim", "point"),
    [
        (1, Point("finished", 60)),  # the agent with the most batches
        (2, Point("finished", 150)),  # an agent with none left
        pytest.param(0, Point("received", 40), marks=pytest.mark.soak),
        pytest.param(3, Point("sent", 101), marks=pytest.mark.soak),
        pytest.param(3, Point("summed", 77), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_survivors_train_all_their_batches(way: str, victim: int, point: Point, environment: dict[str, str]) -> None:
    left = [rank for rank in range(4) if rank != victim]
    with World(4, environment=environment | CONTINUE) as world:
        outcomes = world.run(train, way, victim, point)
    assert outcomes[victim].error == "Died"
    assert not [outcomes[rank].message for rank in left if outcomes[rank].error]
    ends = {rank: outcomes[rank].value for rank in left}
    assert len({ends[rank][2] for rank in left}) == 1
    assert [len(ends[rank][1]) for rank in left] == [BATCHES[rank] for rank in left]
    if way == "gradients":  # copies of one model, bit for bit, after every step that they took together
        assert len({tuple(ends[rank][0]) for rank in left}) == 1
        for steps in zip(*(ends[rank][1] for rank in left), strict=False):
            assert len({tuple(x) for x in steps}) == 1
