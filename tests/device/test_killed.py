"""SIGKILL of an agent whose device memory others have mapped: they learn its rank, and continue with each other."""

from __future__ import annotations

import pytest

from support.device_agents import average_through_a_loss, average_until_it_fails
from support.fault_points import OVER, Point
from support.survivors import CONTINUE
from support.training_loss import assert_all_name_the_killed
from support.world import World

SIZE, VICTIM = 4, 2
POINTS = [
    Point("Queued", 1),
    Point("Queued", 6),
    Point("Bringing", 1),
    Point("Bringing", 7),
    Point("sent", 3),
    Point("received", 4),
    Point("finished", 2),
]


def each_point(other: int) -> pytest.MarkDecorator:
    """Each point over one transport; every other one is a slow test, and is none of the other function."""
    cases = []
    for number, point in enumerate(POINTS):
        name = ["shared_memory", "network"][number % 3 == 2]
        marks = [pytest.mark.transport(name), *[pytest.mark.slow] * ((number + other) % 2)]
        cases.append(pytest.param(point, OVER[name], id=f"{point}-{name}", marks=marks))
    return pytest.mark.parametrize(("point", "environment"), cases)


ON_DEVICES = {"SHOAL_DEVICE_MEMORY": "1"}


@each_point(0)
def test_all_survivors_are_notified_within_a_second_of_a_kill(point: Point, environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment | ON_DEVICES) as world:
        assert_all_name_the_killed(world.run(average_until_it_fails, VICTIM, point), VICTIM)


@each_point(1)
def test_survivors_continue_with_each_other(point: Point, environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment | ON_DEVICES | CONTINUE) as world:
        outcomes = world.run(average_through_a_loss, VICTIM, point, 5)
        left = tuple(rank for rank in range(SIZE) if rank != VICTIM)
        assert [outcomes[rank].value for rank in left] == [left] * len(left)
