"""Agents that die are started again, and enter the run of the others, which ends where it would have without a loss."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from shoal import topology_util
from shoal.algorithms import ExactDiffusion, GradientDescent, GradientTracking, ParallelGradientDescent
from shoal.topology import OnePeerExponential, Static
from support.coming_back import Seen, train
from support.fault_points import OVER, Point, over_both
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


@over_both
def test_all_are_killed_one_after_another_and_none_of_the_first_is_left(environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment | CONTINUE, restarts=True) as world:
        pending = {rank: world.run_on(rank, train, WAYS["tracking"], None, SIZE) for rank in range(SIZE)}
        for rank in range(SIZE):
            time.sleep(0.5)  # all train, and whoever was started again has entered
            world.kill(rank)
            assert pending[rank].outcome().error == "Died"
            world.start_again(rank)
            pending[rank] = world.run_on(rank, train, WAYS["tracking"], None, SIZE)
        seen = [pending[rank].outcome(60.0).value for rank in range(SIZE)]
    assert np.abs(np.array([one.x for one in seen]) - where_it_ends("tracking")).max() < 1e-8


def drawn(seed: int) -> tuple[str, str, dict[int, list[Point]]]:
    """How to train, over what, and who dies when; of whom come back, some die again while they enter, or after."""
    chance = random.Random(seed)
    victims = chance.sample(range(SIZE), chance.choice([1, 1, 2, 3]))
    deaths = {
        rank: [Point("received", chance.randint(5, 150))]
        + [Point(chance.choice(["received", "sent", "finished"]), chance.randint(1, 60))] * chance.choice([0, 1])
        for rank in victims
    }
    return chance.choice(list(WAYS)), chance.choice(list(OVER)), deaths


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(k, marks=pytest.mark.soak) for k in range(8, 200))])
def test_deaths_drawn_from_a_seed_while_others_enter(seed: int) -> None:
    way, transport, deaths = drawn(seed)
    with World(SIZE, environment=OVER[transport] | CONTINUE, restarts=True) as world:
        seen = run(world, way, deaths)
    assert np.abs(np.array([one.x for one in seen]) - where_it_ends(way)).max() < 1e-8, (way, transport, deaths)
