"""Agents that die are started again, and enter the run of the others, which ends where it would have without a loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal import topology_util
from shoal.algorithms import ExactDiffusion, GradientDescent, GradientTracking, ParallelGradientDescent
from shoal.topology import OnePeerExponential, Static
from support.coming_back import Seen, train
from support.fault_points import Point, over_both
from support.surviving_training import optimum, resting_place
from support.survivors import CONTINUE
from support.world import World

SIZE = 4
RING = Static(topology_util.RingGraph(SIZE))
WAYS: dict[str, dict[str, Any]] = {
    "ATC": {"algorithm": GradientDescent(1.0)},
    "AWC": {"algorithm": GradientDescent(1.0, atc=False)},
    "one-peer": {"algorithm": GradientDescent(1.0), "topology": OnePeerExponential(SIZE)},
    "gradients": {"algorithm": ParallelGradientDescent(1.0)},
    "gradients during backward": {"algorithm": ParallelGradientDescent(1.0), "overlap": "backward"},
    "tracking": {"algorithm": GradientTracking(1.0)},
    "exact diffusion": {"algorithm": ExactDiffusion(1.0, lazy=True)},
}


def where_it_ends(way: str) -> np.ndarray:
    """The parameters of all agents, [agents, 3]."""
    if way in ("ATC", "AWC"):
        return resting_place(RING, SIZE, [], overlapping=way == "AWC")
    if way == "one-peer":
        return resting_place(OnePeerExponential(SIZE), SIZE, [], overlapping=False)
    return np.tile(optimum(list(range(SIZE))), (SIZE, 1))


def run(world: World, way: str, deaths: dict[int, list[Point]]) -> list[Seen]:
    """Train; each time an agent dies it is started again, to die at its next point, if it has one."""
    total = sum(map(len, deaths.values()))
    left = {rank: list(points) for rank, points in deaths.items()}

    def start(rank: int) -> Any:
        return world.run_on(rank, train, WAYS[way], left[rank].pop(0) if left.get(rank) else None, total)

    pending = {rank: start(rank) for rank in range(SIZE)}
    for rank in deaths:
        for _ in deaths[rank]:
            one = pending[rank].outcome(60.0)
            assert one.error == "Died", f"rank {rank}: {one.error}: {one.message}\n{one.trace}"
            world.start_again(rank)
            pending[rank] = start(rank)
    outcomes = [pending[rank].outcome(60.0) for rank in range(SIZE)]
    failed = [f"rank {one.rank}: {one.error}: {one.message}\n{one.trace}" for one in outcomes if one.error]
    assert not failed, "\n".join(failed)
    return [one.value for one in outcomes]


@over_both
@pytest.mark.parametrize("way", WAYS)
def test_who_comes_back_trains_on_as_if_nothing_had_been(way: str, environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment | CONTINUE, restarts=True) as world:
        seen = run(world, way, {1: [Point("received", 60)]})
    assert np.abs(np.array([one.x for one in seen]) - where_it_ends(way)).max() < 1e-8
    began, x = seen[1].began
    assert began > 0 and began % 10 == 0
    givers = [one for rank, one in enumerate(seen) if rank != 1 and one.at.get(began) == x]
    assert givers, "it begins with the parameters of one that was there, bit for bit"
    assert seen[0].changes == [((1,), ()), ((), (1,))] and seen[1].changes == [((), (0, 1, 2, 3))]
    assert len({one.steps for one in seen}) == 1
