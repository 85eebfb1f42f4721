"""SIGKILL of an agent at swept points of an operation: every survivor, neighbour or not, learns it within a second."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.fault_points import (
    Point,
    average_until_it_fails,
    fork_a_sleeper,
    kill_when,
    known_as_dead,
    start_a_data_loader,
    swept,
    until_killed_allreduces,
    until_killed_barriers,
    until_killed_pushes,
    wait_for_no_orphans,
)
from support.namespaces import network_namespaces
from support.training_loss import assert_all_name_the_killed
from support.world import World

SIZE, VICTIM = 5, 2
SMALL, LARGE, HUGE = 16, 100_000, 16_000_000
LONGER_THAN_THE_TEST = 3600.0
"""Seconds: a deadline that no error can have waited for."""
TIMEOUT = 120.0
"""Seconds after which an agent counts as hung: a machine that is busy takes its time for large sums."""
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


@swept(SWEPT, (SMALL, LARGE))
def test_all_survivors_are_notified_within_a_second_of_a_kill(
    environment: dict[str, str], numel: int, point: Point
) -> None:
    with World(SIZE, environment=environment) as world:
        assert_all_name_the_killed(world.run(average_until_it_fails, numel, VICTIM, point), VICTIM)


@pytest.mark.parametrize("environment", OVER)
@pytest.mark.parametrize("block", [1, 100])
def test_an_agent_killed_during_a_large_sum_is_named(environment: dict[str, str], block: int) -> None:
    """An agent that computes a sum is notified at its end, long before its deadline."""
    with World(3, environment=environment, timeout=LONGER_THAN_THE_TEST) as world:
        outcomes = world.run(average_until_it_fails, HUGE, VICTIM, Point("Block", block), patience=TIMEOUT)
        assert_all_name_the_killed(outcomes, VICTIM, LONGER_THAN_THE_TEST)


@pytest.mark.transport("shared_memory")
def test_memory_of_an_agent_killed_while_others_read_it_stays_readable() -> None:
    with World(3, timeout=LONGER_THAN_THE_TEST) as world:
        world.results(kill_when, Point("Block", 100), world.members[VICTIM].pid, on=[0])
        outcomes = world.run(average_until_it_fails, HUGE, patience=TIMEOUT)
        assert_all_name_the_killed(outcomes, VICTIM, LONGER_THAN_THE_TEST)


@pytest.mark.transport("network")
@pytest.mark.parametrize("kind", ["Chunk in", "Chunk out"])
@pytest.mark.parametrize("count", [1, 20, 150])
def test_an_agent_killed_during_a_transfer_is_named(kind: str, count: int) -> None:
    with World(SIZE, environment=NETWORK) as world:
        assert_all_name_the_killed(world.run(average_until_it_fails, HUGE // 8, VICTIM, Point(kind, count)), VICTIM)


@pytest.mark.transport("network")
@pytest.mark.transport("shared_memory")
@pytest.mark.transport("namespaces")
@pytest.mark.parametrize("point", [Point("sent", 3), Point("received", 2), Point("summed", 5)], ids=str)
def test_agents_on_another_machine_are_notified_within_a_second_of_a_kill(point: Point) -> None:
    with network_namespaces(3) as machines, World(6, namespaces=machines) as world:
        assert_all_name_the_killed(world.run(average_until_it_fails, LARGE, VICTIM, point), VICTIM)


@pytest.mark.transport("shared_memory")
def test_an_agent_killed_with_a_forked_child_alive_is_named() -> None:
    with World(SIZE) as world:
        child = world.results(fork_a_sleeper, on=[VICTIM])[0]
        try:
            assert_all_name_the_killed(world.run(average_until_it_fails, LARGE, VICTIM, Point("received", 3)), VICTIM)
            assert Path(f"/proc/{child}").exists(), "the child ended before its parent, so this showed nothing"
        finally:
            os.kill(child, signal.SIGKILL)
            wait_for_no_orphans()


@pytest.mark.transport("shared_memory")
@pytest.mark.transport("network")
@pytest.mark.transport("namespaces")
def test_an_agent_killed_with_a_forked_child_alive_is_named_on_other_machines() -> None:
    with network_namespaces(3) as machines, World(6, namespaces=machines) as world:
        child = world.results(fork_a_sleeper, on=[VICTIM])[0]
        try:
            assert_all_name_the_killed(world.run(average_until_it_fails, LARGE, VICTIM, Point("received", 3)), VICTIM)
        finally:
            os.kill(child, signal.SIGKILL)
            wait_for_no_orphans()


@pytest.mark.transport("shared_memory")
def test_an_agent_killed_with_a_data_loader_worker_alive_is_named() -> None:
    with World(SIZE) as world:
        world.results(start_a_data_loader, on=[VICTIM])
        assert_all_name_the_killed(world.run(average_until_it_fails, LARGE, VICTIM, Point("received", 3)), VICTIM)
        wait_for_no_orphans()


@pytest.mark.transport("shared_memory")
def test_two_agents_killed_at_once_are_both_named() -> None:
    with World(6) as world:
        pending = [world.run_on(rank, average_until_it_fails, LARGE) for rank in range(6)]
        world.kill(1)
        world.kill(4)
        outcomes = [one.outcome() for one in pending]
        assert all(
            outcome.error == "PeerLost" and outcome.ranks in ((1,), (4,))
            for outcome in outcomes
            if outcome.rank not in (1, 4)
        )
        for known in world.results(known_as_dead, 2, on=world.alive):
            assert known == [1, 4]


@pytest.mark.transport("shared_memory")
@pytest.mark.transport("network")
@pytest.mark.parametrize("environment", OVER)
def test_the_death_of_rank_0_ends_only_operations_that_need_it(environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment) as world:
        assert_all_name_the_killed(world.run(average_until_it_fails, SMALL, 0, Point("waited", 2)), victim=0)


@pytest.mark.parametrize("environment", OVER)
@pytest.mark.parametrize(
    "operation", [until_killed_barriers, until_killed_allreduces, until_killed_pushes], ids=lambda one: one.__name__
)
@pytest.mark.parametrize("count", [1, 4])
def test_a_death_ends_every_kind_of_operation(
    environment: dict[str, str], operation: Callable[[int, Point], None], count: int
) -> None:
    with World(SIZE, environment=environment) as world:
        assert_all_name_the_killed(world.run(operation, VICTIM, Point("received", count)), VICTIM)
