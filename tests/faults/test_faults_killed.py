"""SIGKILL of an agent at swept points of an operation: every survivor, neighbour or not, learns it within a second."""

from __future__ import annotations

import os

import pytest
from fault_points import Point, average_until_it_fails, kill_when
from support.agent_main import Outcome
from support.namespaces import network_namespaces
from support.world import World

SIZE, VICTIM = 5, 2
SECONDS = 1.0
SMALL, LARGE, HUGE = 16, 100_000, 16_000_000
NETWORK = {"SHOAL_TRANSPORT": "network"}

SWEPT = [
    *(Point("submitted", k) for k in (1, 2, 7)),
    *(Point("sent", k) for k in (1, 2, 3, 8)),
    *(Point("received", k) for k in (1, 2, 9)),
    *(Point("summed", k) for k in (1, 4)),
    *(Point("finished", k) for k in (1, 5)),
    *(Point("waited", k) for k in (1, 6)),
]
OVER = [
    pytest.param({}, id="shared_memory", marks=pytest.mark.transport("shared_memory")),
    pytest.param(NETWORK, id="network", marks=pytest.mark.transport("network")),
]


def assert_all_learnt_it(outcomes: list[Outcome], victim: int = VICTIM, seconds: float = SECONDS) -> None:
    dead = outcomes[victim]
    assert (dead.error, dead.message) == ("Died", "exit code -9")
    for one in outcomes:
        if one.rank == victim:
            continue
        assert one.error == "PeerLost", f"rank {one.rank}: {one.error}: {one.message}\n{one.trace}"
        assert one.ranks == (victim,), one.message
        assert f"rank {victim}" in one.message
        assert one.ended - dead.ended < seconds, f"rank {one.rank} learnt it after {one.ended - dead.ended:.2f} s"


@pytest.mark.parametrize("environment", OVER)
@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("point", SWEPT, ids=str)
def test_all_survivors_learn_within_a_second_who_was_killed(
    environment: dict[str, str], numel: int, point: Point
) -> None:
    with World(SIZE, environment=environment) as world:
        assert_all_learnt_it(world.run(average_until_it_fails, numel, VICTIM, point))


@pytest.mark.parametrize("environment", OVER)
@pytest.mark.parametrize("block", [1, 100])
def test_an_agent_killed_in_the_middle_of_a_large_sum_is_named(environment: dict[str, str], block: int) -> None:
    with World(SIZE, environment=environment) as world:
        assert_all_learnt_it(world.run(average_until_it_fails, HUGE, VICTIM, Point("Block", block)))
