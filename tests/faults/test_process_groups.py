"""SIGKILL, SIGSTOP and Ctrl-C where process groups carry tensors: swept points of coordination and of a movement. Every
survivor names the agent, soon, and leaves no resource behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

import shoal
from shoal.runtime.agent import current
from support import PROCESS_GROUP
from support.fault_points import (
    Point,
    arm,
    average_until_it_fails,
    one_of_each_kind,
    until_killed_allreduces,
    until_killed_pushes,
)
from support.leftovers import wait_until
from support.namespaces import network_namespaces
from support.training_loss import assert_all_name_the_killed
from support.world import World

pytestmark = pytest.mark.transport(PROCESS_GROUP)
SIZE = 4
SMALL, LARGE = 16, 300_000
BY_GROUPS = {"SHOAL_TRANSPORT": PROCESS_GROUP}

POINTS = [
    Point("Meeting", 1),
    *(Point("Telling", k) for k in (1, 2, 7, 30)),
    *(Point("asked", k) for k in (1, 5)),
    *(Point("ordered", k) for k in (1, 6)),
    *(Point("Moving", k) for k in (1, 7)),
    *(Point("moved", k) for k in (1, 5)),
]


def in_turn() -> list[object]:
    """Each point on the coordinator and on another, with small and large tensors in turn; the soak has all. Points that
    are not the one of their kind are slow tests."""
    cases, usual = [], one_of_each_kind(POINTS)
    for number, point in enumerate(POINTS):
        for place, victim in enumerate((0, 2)):
            for size, numel in enumerate((SMALL, LARGE)):
                marks = [pytest.mark.soak] if (number + place + size) % 2 or (number % 2 and victim) else []
                marks += [] if point in usual else [pytest.mark.slow]
                cases.append(pytest.param(point, victim, numel, id=f"{point}-{victim}-{numel}", marks=marks))
    return cases


@pytest.mark.parametrize(("point", "victim", "numel"), in_turn())
def test_all_survivors_name_the_killed_agent(point: Point, victim: int, numel: int) -> None:
    with World(SIZE, environment=BY_GROUPS) as world:
        assert_all_name_the_killed(world.run(average_until_it_fails, numel, victim, point), victim)


@pytest.mark.parametrize("loop", [until_killed_allreduces, until_killed_pushes])
@pytest.mark.parametrize("point", [Point("Deciding order", 1), Point("Telling", 5), Point("Moving", 3)], ids=str)
def test_a_kill_ends_other_operations_too(loop: Callable[..., None], point: Point) -> None:
    with World(SIZE, environment=BY_GROUPS) as world:
        assert_all_name_the_killed(world.run(loop, 0, point), 0)


def test_a_transfer_in_flight_ends() -> None:
    with World(SIZE, environment=BY_GROUPS) as world:
        pending = [world.run_on(rank, average_until_it_fails, 4_000_000) for rank in range(SIZE)]
        time.sleep(0.5)
        world.kill(1)
        assert_all_name_the_killed([one.outcome() for one in pending], 1, 3.0)


@pytest.mark.transport("namespaces")
def test_agents_on_another_machine_are_notified() -> None:
    with network_namespaces(2) as machines, World(4, environment=BY_GROUPS, namespaces=machines) as world:
        assert_all_name_the_killed(world.run(average_until_it_fails, LARGE, 2, Point("Moving", 3)), 2)


def test_after_a_failure_the_job_may_restart() -> None:
    with World(3, environment=BY_GROUPS) as world:
        assert_all_name_the_killed(world.run(average_until_it_fails, SMALL, 1, Point("moved", 3)), 1)
        world.results(end, on=world.alive)


def end() -> None:
    shoal.shutdown()


def average(count: int, numel: int = LARGE, timeout: float | None = None) -> float:
    for _ in range(count):
        result = shoal.neighbor_allreduce(torch.full((numel,), float(shoal.rank())), timeout=timeout)
    return result[0].item()


def stop_when(point: Point) -> None:
    arm(point, lambda: os.kill(os.getpid(), signal.SIGSTOP))


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", [Point("Telling", 12), Point("asked", 5), Point("Moving", 5)], ids=str)
def test_a_stopped_agent_is_named_at_the_deadline_and_reconnects(point: Point, victim: int) -> None:
    with World(3, environment=BY_GROUPS) as world:
        world.results(average, 4)
        world.results(stop_when, point, on=[victim])
        pending = {rank: world.run_on(rank, average, 20, LARGE, 1.0) for rank in range(3)}
        results = [pending[rank].outcome() for rank in range(3) if rank != victim]
        assert all(one.error == "DeadlineExceeded" for one in results), [(one.error, one.message) for one in results]
        assert all(victim in one.ranks or "moved" in one.message for one in results), [one.message for one in results]
        world.kill(victim, signal.SIGCONT)
        pending[victim].outcome()
        rounds = world.results(rounds_begun)
        world.results(catch_up, max(rounds))
        assert world.results(average, 3) == [1.0] * 3


def rounds_begun() -> int:
    return current().engine.matcher.rounds_begun("~neighbor_allreduce")


def catch_up(rounds: int) -> None:
    """Calls that all others have given up."""
    while rounds_begun() < rounds:
        try:
            average(1, timeout=1.0)
        except shoal.ShoalError:
            pass


@pytest.mark.parametrize("numel", [SMALL, LARGE])
def test_ctrl_c_ends_a_call_and_nothing_else(numel: int) -> None:
    with World(3, environment=BY_GROUPS) as world:
        world.results(average, 2, numel)
        waiting = [world.run_on(rank, average, 1, numel, 20.0) for rank in (0, 1)]
        assert not wait_until(waiting[0].ready, 0.3)
        world.kill(0, signal.SIGINT)
        assert waiting[0].outcome().error == "KeyboardInterrupt"
        # The call continues without its caller, which may wait for other handles.
        assert world.run_on(2, average, 1, numel, 20.0).outcome().value == 1.0
        assert waiting[1].outcome().value == 1.0
        assert world.results(average, 3, numel) == [1.0] * 3


def test_a_forked_child_blocks_no_agent_and_ends() -> None:
    with World(3, environment=BY_GROUPS) as world:
        world.results(average, 2)
        assert world.results(fork_and_end) == [0] * 3
        assert world.results(average, 2) == [1.0] * 3


def fork_and_end() -> int:
    pid = os.fork()
    if not pid:
        try:
            shoal.rank()
        except shoal.NotInitialized:
            os._exit(0)
        os._exit(1)
    return os.waitpid(pid, 0)[1]
