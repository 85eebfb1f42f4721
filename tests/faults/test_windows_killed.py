"""SIGKILL of agents that write to windows, are written to, or hold a mutex; and other ends.

A slot then holds the old or the new value, never half; no lock stays; an agent that needs the killed one gets an error
with its rank; the other agents continue.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

import shoal
from support.agent_main import Outcome
from support.fault_points import Point, fork_a_sleeper, wait_for_no_orphans
from support.leftovers import wait_until
from support.limits import scaled
from support.namespaces import network_namespaces
from support.window_points import (
    ACCUMULATE,
    AFTER_THE_FLIP,
    NAME,
    PLACES,
    PUT,
    accumulates,
    arm_write,
    end_when_waiting,
    free_after,
    hold_mutex,
    kill,
    open_window,
    read,
    read_until,
    sleep_for_ever,
    take_mutex,
    whole_write,
    write,
    write_after_a_loss,
    write_for_ever,
    write_for_ever_without_waiting,
    write_twice,
)
from support.world import PATIENCE, World, template

SIZE, VICTIM, TARGET = 4, 2, 0
REST = [0, 1, 3]
LARGE = 600_000
SECONDS = 1.0
NETWORK = {"SHOAL_TRANSPORT": "network"}
SHARED_MEMORY = pytest.mark.transport("shared_memory")
OVER = pytest.mark.parametrize(
    "environment",
    [
        pytest.param({}, id="shared_memory", marks=SHARED_MEMORY),
        pytest.param(NETWORK, id="network", marks=pytest.mark.transport("network")),
    ],
)
HOW = pytest.mark.parametrize("how", [PUT, ACCUMULATE])


def assert_it_was_killed(outcome: Outcome) -> None:
    assert (outcome.error, outcome.message) == ("Died", "exit code -9"), outcome.trace


def see_its_end(world: World) -> None:
    """Of an agent that was killed while it had nothing to do."""
    assert_it_was_killed(world.members[VICTIM].outcome(PATIENCE))


def assert_it_names_the_killed(one: Outcome, at: float, victim: int = VICTIM) -> None:
    assert (one.error, one.ranks) == ("PeerLost", (victim,)), f"rank {one.rank}: {one.error}: {one.trace}"
    assert f"rank {victim}" in one.message
    assert one.ended - at < scaled(SECONDS), f"rank {one.rank} learnt it after {one.ended - at:.2f} s"


def assert_survivors_continue(world: World, rest: list[int] = REST) -> None:
    """Now, and also when everybody knows who died."""
    for _ in range(2):
        for result in world.results(write_after_a_loss, rest, on=rest):
            assert all(slot.smallest == slot.largest == 11.0 for slot in result)
        world.results(assert_all_name_the_killed, SIZE - len(rest), on=rest)


def assert_all_name_the_killed(count: int) -> None:
    assert wait_until(lambda: len(shoal.observability.membership().died) == count)


# The sender


@pytest.mark.parametrize("place", PLACES)
@HOW
@SHARED_MEMORY
def test_a_slot_holds_the_old_or_the_new_value_when_its_sender_is_killed(how: str, place: str) -> None:
    with World(SIZE) as world:
        world.results(open_window)
        dead = world.run_on(VICTIM, write_twice, how, TARGET, place).outcome()
        assert_it_was_killed(dead)
        [result] = world.run(read, VICTIM, on=[TARGET])
        new = 5.0 if how == PUT else 8.0
        assert result.value == whole_write(new if place in AFTER_THE_FLIP else 3.0), result.trace
        assert result.ended - dead.ended < scaled(SECONDS)
        if how == ACCUMULATE:
            assert world.results(accumulates, VICTIM, on=[TARGET]) == [2 if place in AFTER_THE_FLIP else 1]
        assert all(world.results(take_mutex, TARGET, on=REST))


@pytest.mark.parametrize(
    ("point", "new"),
    [
        *((Point("Chunk out", k), False) for k in (1, 3)),
        (Point("sent"), False),
        (Point("received"), True),
        (Point("finished"), True),
    ],
    ids=str,
)
@HOW
@pytest.mark.transport("network")
def test_an_owner_applies_complete_writes_of_a_killed_sender(how: str, point: Point, new: bool) -> None:
    with World(SIZE, environment=NETWORK) as world:
        world.results(open_window, LARGE)
        dead = world.run_on(VICTIM, write_twice, how, TARGET, point).outcome()
        assert_it_was_killed(dead)
        [result] = world.run(read, VICTIM, on=[TARGET])
        assert result.value == whole_write((5.0 if how == PUT else 8.0) if new else 3.0), result.trace
        assert all(world.results(take_mutex, TARGET, on=REST))


@pytest.mark.parametrize("seed", range(2))
@HOW
@OVER
def test_a_sender_killed_at_a_random_time_leaves_a_complete_value(
    environment: dict[str, str], how: str, seed: int
) -> None:
    kill_a_sender_at_a_random_time(environment, how, seed)


def kill_a_sender_at_a_random_time(environment: dict[str, str], how: str, seed: int) -> None:
    with World(3, environment=environment) as world:
        world.results(open_window, LARGE)
        pending = world.run_on(VICTIM, write_for_ever, how, TARGET)
        assert world.results(read_until, VICTIM, 3, on=[TARGET]) == [[]]
        time.sleep(random.Random(seed).uniform(0.0, 0.05))  # the random time
        world.kill(VICTIM)
        assert_it_was_killed(pending.outcome())
        [slot] = world.results(read, VICTIM, on=[TARGET])
        assert slot == whole_write(slot.largest)
        if how == ACCUMULATE:
            assert world.results(accumulates, VICTIM, on=[TARGET]) == [slot.largest]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(25))
@HOW
@OVER
def test_a_sender_killed_at_any_of_many_times_leaves_a_complete_value(
    environment: dict[str, str], how: str, seed: int
) -> None:
    kill_a_sender_at_a_random_time(environment, how, 1000 + seed)


# The target


@HOW
@OVER
def test_writing_to_a_killed_agent_raises_within_a_second(environment: dict[str, str], how: str) -> None:
    with World(SIZE, environment=environment) as world:
        world.results(open_window)
        writers = [world.run_on(rank, write_for_ever, how, VICTIM) for rank in (0, 1)]
        assert world.results(read_until, 0, 3, on=[VICTIM]) == [[]]
        at = world.kill(VICTIM)
        see_its_end(world)
        for writer in writers:
            assert_it_names_the_killed(writer.outcome(), at)
        assert_survivors_continue(world)


@HOW
@OVER
def test_writing_to_a_dead_agent_raises_within_a_second(environment: dict[str, str], how: str) -> None:
    with World(SIZE, environment=environment) as world:
        world.results(open_window)
        at = world.kill(VICTIM)
        see_its_end(world)
        for one in world.run(write_for_ever, how, VICTIM, on=REST):
            assert_it_names_the_killed(one, at)
        assert_survivors_continue(world)


@OVER
def test_writes_before_the_kill_of_their_target_have_succeeded(environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment) as world:
        world.results(open_window)
        world.results(write, PUT, 3.0, VICTIM, on=REST)
        at = world.kill(VICTIM)
        see_its_end(world)
        for one in world.run(write_for_ever_without_waiting, PUT, VICTIM, on=REST):
            assert_it_names_the_killed(one, at)


@pytest.mark.parametrize("place", ["locked", "half copied", "flipped"])
@HOW
@SHARED_MEMORY
def test_a_write_completes_when_its_target_is_killed_during_it(how: str, place: str) -> None:
    with World(SIZE) as world:
        world.results(open_window)
        act = partial(kill, world.members[VICTIM].pid)
        world.results(write_twice, how, VICTIM, place, act, on=[TARGET])
        at = time.monotonic()
        see_its_end(world)
        assert_it_names_the_killed(world.run(write_for_ever, how, VICTIM, on=[TARGET])[0], at)


@pytest.mark.parametrize("place", ["locked", "copied", "flipped"])
@HOW
@pytest.mark.transport("network")
def test_a_target_killed_while_it_serves_a_request_is_named(how: str, place: str) -> None:
    with World(SIZE, environment=NETWORK) as world:
        world.results(open_window)
        world.results(write, how, 3.0, VICTIM, on=[TARGET])
        world.results(arm_write, place, on=[VICTIM])
        [writer] = world.run(write, how, 5.0, VICTIM, on=[TARGET])
        dead = world.run_on(VICTIM, sleep_for_ever).outcome()
        assert_it_was_killed(dead)
        assert_it_names_the_killed(writer, dead.ended)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.transport("network")
def test_a_target_killed_during_a_transfer_is_named(count: int) -> None:
    with World(SIZE, environment=NETWORK) as world:
        world.results(open_window, LARGE)
        world.results(arm_chunk, count, on=[VICTIM])
        [writer] = world.run(write, PUT, 5.0, VICTIM, on=[TARGET])
        dead = world.run_on(VICTIM, sleep_for_ever).outcome()
        assert_it_was_killed(dead)
        assert_it_names_the_killed(writer, dead.ended)


def arm_chunk(count: int) -> None:
    from support.fault_points import arm

    arm(Point("Chunk in", count))


# The owner of a mutex


@pytest.mark.parametrize("of", [TARGET, 3], ids=["that the owner wants too", "that its owner does not want"])
@OVER
def test_waiters_get_a_mutex_within_a_second_of_its_holders_death(environment: dict[str, str], of: int) -> None:
    with World(SIZE, environment=environment) as world:
        world.results(open_window)
        hold_and_be_killed(world, of)
        assert_survivors_continue(world)


@pytest.mark.transport("network")
@pytest.mark.transport("shared_memory")
@pytest.mark.transport("namespaces")
@pytest.mark.parametrize("of", [TARGET, 3], ids=["of another machine", "of the same machine"])
def test_a_mutex_held_from_another_machine_is_released_within_a_second_of_its_holders_death(of: int) -> None:
    with network_namespaces(2) as machines, World(SIZE, namespaces=machines) as world:
        world.results(open_window)
        hold_and_be_killed(world, of)
        assert_survivors_continue(world)


@SHARED_MEMORY
def test_a_mutex_is_released_when_its_holder_is_killed_with_a_forked_child_alive(tmp_path: Path) -> None:
    forked = tmp_path / "forked"
    with World(SIZE) as world:
        world.results(open_window)
        try:
            hold_and_be_killed(world, TARGET, partial(fork_and_sleep, forked), forked.exists)
            assert template().orphans(), "the child ended before its parent, so this showed nothing"
        finally:
            for pid, _ in template().orphans():
                kill(pid)
            wait_for_no_orphans()


def fork_and_sleep(forked: Path) -> None:
    fork_a_sleeper()
    forked.touch()
    sleep_for_ever()


def hold_and_be_killed(
    world: World, of: int, then: Callable[[], object] = sleep_for_ever, is_ready: Callable[[], bool] = lambda: True
) -> None:
    """The victim takes a mutex, and goes on until it is ready; two agents wait for the mutex; the first of them kills
    the victim.
    """
    pending = world.run_on(VICTIM, hold_mutex, of, then)
    waiters = [0, 1]
    assert wait_until(lambda: all(one.error for one in world.run(take_mutex, of, 0.05, on=waiters)))
    assert wait_until(is_ready)
    world.results(end_when_waiting, world.members[VICTIM].pid, on=waiters[:1])
    waiting = [world.run_on(rank, take_mutex, of) for rank in waiters]
    dead = pending.outcome()
    assert_it_was_killed(dead)
    for one in [each.outcome() for each in waiting]:
        assert not one.error, one.trace
        assert one.value - dead.ended < scaled(SECONDS)


# Other ends


@pytest.mark.parametrize("function", [write_for_ever, write_for_ever_without_waiting], ids=lambda one: one.__name__)
@HOW
@OVER
def test_writing_to_a_window_that_its_owner_frees_is_a_mismatch_at_the_writer(
    environment: dict[str, str], how: str, function: Callable[..., object]
) -> None:
    with World(3, environment=environment) as world:
        world.results(open_window)
        writers = [world.run_on(rank, function, how, VICTIM) for rank in (0, 1)]
        world.results(free_after, 2, 0, on=[VICTIM])
        for one in [each.outcome() for each in writers]:
            assert one.error == "Mismatch" and VICTIM in one.ranks, one.trace
            assert "has freed this window" in one.message
        world.results(write_after_a_loss, [0, 1], on=[0, 1])
        world.results(shoal.bluefog.win_free, on=[0, 1])
        world.results(open_window)
        for rank in (0, 1):
            world.results(write, how, 2.0, VICTIM, on=[rank])
        assert world.results(read, 0, on=[VICTIM]) == [whole_write(2.0)]


@OVER
def test_waiters_for_a_mutex_of_a_freed_window_raise(environment: dict[str, str]) -> None:
    with World(3, environment=environment) as world:
        world.results(open_window)
        world.results(end_when_waiting, world.members[VICTIM].pid, signal.SIGINT, on=[TARGET])
        owner = world.run_on(VICTIM, hold_mutex, VICTIM, wait_and_free)
        assert wait_until(lambda: bool(world.run(take_mutex, VICTIM, 0.05, on=[1])[0].error))
        waiter = world.run_on(TARGET, take_mutex, VICTIM).outcome()
        freed = owner.outcome()
        assert not freed.error, freed.trace
        assert waiter.error == "Mismatch" and VICTIM in waiter.ranks, waiter.trace
        assert "has freed this window" in waiter.message
        assert waiter.ended - freed.value < scaled(SECONDS)


def wait_and_free() -> float:
    """Free the window when Ctrl-C comes. The time at which it was done."""
    with suppress(KeyboardInterrupt):
        sleep_for_ever()
    shoal.bluefog.win_free(NAME)
    return time.monotonic()


def test_agents_of_a_fleet_that_only_write_to_windows_end_when_one_fails(
    fleet: Callable[..., shoal.Fleet],
) -> None:
    def run() -> None:
        assert shoal.bluefog.win_create(torch.zeros(5), NAME)
        if shoal.rank() == 1:
            raise ValueError("out of luck")
        while True:
            shoal.bluefog.win_put(torch.ones(5), NAME)

    with pytest.raises(ValueError, match="out of luck"):
        fleet(3).run(run)


def shut_down() -> None:
    shoal.shutdown()


def end_with_an_exception() -> None:
    raise RuntimeError("out of luck")


@OVER
def test_a_shutdown_with_open_windows_ends_only_calls_that_need_the_agent(environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment) as world:
        world.results(open_window)
        writers = [world.run_on(rank, write_for_ever, PUT, VICTIM) for rank in (0, 1)]
        assert world.results(read_until, 0, 3, on=[VICTIM]) == [[]]
        left = world.run_on(VICTIM, shut_down).outcome()
        assert not left.error, left.trace
        for one in [each.outcome() for each in writers]:
            assert (one.error, one.ranks) == ("PeerLost", (VICTIM,)), one.trace
            assert one.ended - left.ended < scaled(SECONDS)
        for result in world.results(write_after_a_loss, REST, on=REST):
            assert all(slot.smallest == slot.largest == 11.0 for slot in result)


@OVER
def test_scripts_that_end_at_different_times_without_freeing_their_windows_exit_cleanly(
    environment: dict[str, str],
) -> None:
    with World(SIZE, environment=environment) as world:
        world.results(open_window)
        for rank in (1, 3, 0, 2):
            ended = world.run_on(rank, accumulate_to_the_next, caught=False).outcome()
            assert ended.message == "exit code 0", world.members[rank].log.read_text()


def accumulate_to_the_next() -> None:
    following = (shoal.rank() + 1) % shoal.size()
    if following in shoal.observability.membership().alive:
        write(ACCUMULATE, 1.0, following)


@OVER
def test_writers_get_the_exception_that_ended_their_target(environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment) as world:
        world.results(open_window)
        writer = world.run_on(TARGET, write_for_ever, PUT, VICTIM)
        assert world.results(read_until, TARGET, 3, on=[VICTIM]) == [[]]
        ended = world.run_on(VICTIM, end_with_an_exception, caught=False).outcome()
        assert ended.message == "exit code 1"
        one = writer.outcome()
        assert (one.error, one.ranks) == ("PeerLost", (VICTIM,)), one.trace
        assert_it_names_the_killed(world.run(write_for_ever, PUT, VICTIM, on=[TARGET])[0], ended.ended)
        assert_survivors_continue(world)


@OVER
def test_ctrl_c_ends_a_wait_for_a_mutex_and_the_agent_can_shut_down(environment: dict[str, str]) -> None:
    with World(3, environment=environment) as world:
        world.results(open_window)
        holder = world.run_on(1, hold_mutex, TARGET, pause)
        assert wait_until(lambda: all(one.error for one in world.run(take_mutex, TARGET, 0.05, on=[VICTIM])))
        world.results(end_when_waiting, world.members[VICTIM].pid, signal.SIGINT, on=[VICTIM])
        outcome = world.run_on(VICTIM, take_mutex, TARGET).outcome()
        assert outcome.error == "KeyboardInterrupt", outcome.trace
        world.kill(1, signal.SIGINT)
        assert holder.outcome().error == "KeyboardInterrupt"
        assert all(world.results(take_mutex, TARGET))


def pause() -> None:
    signal.pause()
