"""SIGSTOP of agents that are written to, write, or hold a lock, for longer than the deadline, and their return.

On one machine a stopped target does not block writes to it, unless it holds a lock; between machines it does not
answer. Errors name the awaited agent. After its return the state is that of a slow agent.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

import shoal
from support.agent_main import Outcome
from support.fault_points import Point
from support.leftovers import wait_until
from support.limits import scaled
from support.window_points import (
    ACCUMULATE,
    NAME,
    PUT,
    accumulates,
    get_and_stop,
    hold_mutex,
    open_window,
    read,
    stop,
    take_mutex,
    update_and_stop,
    whole_write,
    write,
    write_after_a_loss,
    write_twice,
)
from support.world import Pending, World

SIZE, STOPPED, OTHER = 3, 2, 0
LARGE = 1_000_000
SHORT = 0.3
"""A deadline, in seconds."""
SECONDS = 1.0
NETWORK = {"SHOAL_TRANSPORT": "network"}
SHARED_MEMORY = pytest.mark.transport("shared_memory")
OVER_NETWORK = pytest.mark.transport("network")
OVER = pytest.mark.parametrize(
    "environment",
    [
        pytest.param({}, id="shared_memory", marks=SHARED_MEMORY),
        pytest.param(NETWORK, id="network", marks=OVER_NETWORK),
    ],
)
HOW = pytest.mark.parametrize("how", [PUT, ACCUMULATE])


def is_stopped(world: World) -> bool:
    return Path(f"/proc/{world.members[STOPPED].pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextmanager
def stopped(world: World) -> Iterator[None]:
    """An idle agent is stopped during the operation."""
    world.kill(STOPPED, signal.SIGSTOP)
    assert wait_until(lambda: is_stopped(world))
    yield
    world.kill(STOPPED, signal.SIGCONT)


@contextmanager
def stopping(world: World, function: Callable[..., object], *args: object) -> Iterator[Pending]:
    """An agent calls something that stops it in the middle, and is continued after the block."""
    pending = world.run_on(STOPPED, function, *args)
    assert wait_until(lambda: is_stopped(world))
    yield pending
    world.kill(STOPPED, signal.SIGCONT)


def assert_it_names_the_stopped(one: Outcome) -> None:
    assert (one.error, one.ranks) == ("DeadlineExceeded", (STOPPED,)), f"{one.error}: {one.trace}"
    assert f"{STOPPED}" in one.message and NAME in one.message
    assert one.seconds < scaled(SHORT + SECONDS)


def assert_all_is_as_before(world: World) -> None:
    all_ranks = list(range(SIZE))
    for result in world.results(write_after_a_loss, all_ranks):
        assert all(slot.smallest == slot.largest == 11.0 for slot in result)
    world.results(shoal.barrier)


# The target


@HOW
@SHARED_MEMORY
def test_a_stopped_target_is_written_to_on_its_own_machine(how: str) -> None:
    with World(SIZE) as world:
        world.results(open_window)
        with stopped(world):
            for multiple in (2.0, 3.0):
                [outcome] = world.run(write, how, multiple, STOPPED, SHORT, on=[OTHER])
                assert not outcome.error, outcome.trace
        assert world.results(read, OTHER, on=[STOPPED]) == [whole_write(3.0 if how == PUT else 5.0)]
        assert_all_is_as_before(world)


class Tried(NamedTuple):
    """Writes of 1 to an agent that may be stopped: how many succeeded, and how many ended in a deadline."""

    done: int
    unknown: int


def accumulate_with_deadlines(to: int, count: int, seconds: float) -> Tried:
    done = 0
    for _ in range(count):
        try:
            write(ACCUMULATE, 1.0, to, seconds)
            done += 1
        except shoal.DeadlineExceeded as late:
            assert tuple(late.ranks) == (to,), late
    return Tried(done, count - done)


@pytest.mark.parametrize("numel", [16, 100_000])
@OVER_NETWORK
def test_a_message_to_a_stopped_target_on_another_machine_takes_effect_at_most_once(numel: int) -> None:
    with World(SIZE, environment=NETWORK) as world:
        world.results(open_window, numel)
        before = Tried(*world.results(accumulate_with_deadlines, STOPPED, 3, 10.0, on=[OTHER])[0])
        with stopped(world):
            while_stopped = Tried(*world.results(accumulate_with_deadlines, STOPPED, 2, SHORT, on=[OTHER])[0])
        after = Tried(*world.results(accumulate_with_deadlines, STOPPED, 3, 10.0, on=[OTHER])[0])
        assert (before, while_stopped, after) == (Tried(3, 0), Tried(0, 2), Tried(3, 0))
        # Messages of one agent are taken in their order, so what became of those in the middle is decided by now.
        [slot] = world.results(read, OTHER, on=[STOPPED])
        assert slot == whole_write(slot.largest)
        assert 6 <= slot.largest <= 8
        assert world.results(accumulates, OTHER, on=[STOPPED]) == [slot.largest]
        assert_all_is_as_before(world)


@HOW
@OVER_NETWORK
def test_a_stopped_target_on_another_machine_is_named_and_the_others_continue(how: str) -> None:
    with World(SIZE, environment=NETWORK) as world:
        world.results(open_window)
        with stopped(world):
            late = world.run_on(OTHER, write, how, 2.0, STOPPED, SHORT)
            world.results(write, how, 3.0, OTHER, on=[1])
            assert_it_names_the_stopped(late.outcome())
            assert world.results(read, 1, on=[OTHER]) == [whole_write(3.0)]
        assert_all_is_as_before(world)


@SHARED_MEMORY
def test_a_target_stopped_while_it_reads_its_slots_is_named() -> None:
    with World(SIZE) as world:
        world.results(open_window)
        world.results(write, PUT, 2.0, STOPPED, on=[OTHER])
        with stopping(world, update_and_stop, OTHER) as pending:
            assert_it_names_the_stopped(world.run(write, ACCUMULATE, 3.0, STOPPED, SHORT, on=[OTHER])[0])
        assert pending.outcome().value == whole_write(2.0)
        world.results(write, ACCUMULATE, 3.0, STOPPED, on=[OTHER])
        assert world.results(read, OTHER, on=[STOPPED]) == [whole_write(5.0)]
        assert_all_is_as_before(world)


# The sender, and the owner of a lock


@pytest.mark.parametrize("place", ["half copied", "flipped"])
@HOW
@SHARED_MEMORY
def test_a_sender_stopped_in_a_write_is_named_to_the_reader_and_completes_it_later(how: str, place: str) -> None:
    with World(SIZE) as world:
        world.results(open_window)
        with stopping(world, write_twice, how, OTHER, place, stop) as pending:
            assert_it_names_the_stopped(world.run(read, STOPPED, SHORT, on=[OTHER])[0])
            # The slots of others do not depend on it.
            world.results(write, PUT, 4.0, OTHER, on=[1])
            assert world.results(read, 1, on=[OTHER]) == [whole_write(4.0)]
        assert not pending.outcome().error
        assert world.results(read, STOPPED, on=[OTHER]) == [whole_write(5.0 if how == PUT else 8.0)]
        assert_all_is_as_before(world)


@HOW
@OVER_NETWORK
def test_a_sender_stopped_in_a_transfer_leaves_the_previous_value_until_it_resumes(how: str) -> None:
    with World(SIZE, environment=NETWORK) as world:
        world.results(open_window, LARGE)
        with stopping(world, write_twice, how, OTHER, Point("Chunk out", 2), stop) as pending:
            assert world.results(read, STOPPED, on=[OTHER]) == [whole_write(3.0)]
        assert not pending.outcome().error
        assert world.results(read, STOPPED, on=[OTHER]) == [whole_write(5.0 if how == PUT else 8.0)]
        assert_all_is_as_before(world)


@SHARED_MEMORY
def test_an_agent_stopped_in_a_get_is_named_to_the_owner_of_the_tensor() -> None:
    with World(SIZE) as world:
        world.results(open_window)
        with stopping(world, get_and_stop, OTHER) as pending:
            assert_it_names_the_stopped(world.run(read, 1, SHORT, on=[OTHER])[0])
        assert not pending.outcome().error
        assert_all_is_as_before(world)


@pytest.mark.parametrize("of", [OTHER, STOPPED], ids=["of another", "its own"])
@OVER
def test_a_mutex_whose_holder_is_stopped_raises_at_the_deadline_and_is_released_later(
    environment: dict[str, str], of: int
) -> None:
    with World(SIZE, environment=environment) as world:
        world.results(open_window)
        with stopping(world, hold_mutex, of, stop) as pending:
            for one in world.run(take_mutex, of, SHORT, on=[0, 1]):
                assert one.error == "DeadlineExceeded", one.trace
                # Over the network an agent knows only whom it asked, and that is the owner.
                assert one.ranks == ((of,) if environment and one.rank != of else (STOPPED,)), one.message
                assert one.seconds < scaled(SHORT + SECONDS)
        assert not pending.outcome().error
        assert all(world.results(take_mutex, of))
        assert_all_is_as_before(world)


@OVER
def test_a_mutex_is_not_granted_to_a_request_that_timed_out(
    environment: dict[str, str],
) -> None:
    """The owner is stopped during the request, so the request and its cancellation arrive together."""
    with World(SIZE, environment=environment) as world:
        world.results(open_window)
        with stopped(world):
            for one in world.run(take_mutex, STOPPED, SHORT, on=[0, 1]):
                assert one.error == ("DeadlineExceeded" if environment else ""), one.trace
        assert all(world.results(take_mutex, STOPPED))
        assert_all_is_as_before(world)


@OVER
def test_an_agent_killed_while_stopped_with_a_lock_releases_it(environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment) as world:
        world.results(open_window)
        function = partial(hold_mutex, OTHER)
        with stopping(world, function, stop) as pending:
            waiting = [world.run_on(rank, take_mutex, OTHER) for rank in (0, 1)]
            at = world.kill(STOPPED)
        assert pending.outcome().message == "exit code -9"
        for one in [each.outcome() for each in waiting]:
            assert not one.error, one.trace
            assert one.value - at < SECONDS


@OVER_NETWORK
def test_a_stopped_target_does_not_block_writes_to_others() -> None:
    healthy = 1
    with World(SIZE, environment=NETWORK) as world:
        world.results(open_window, 100_000)
        with stopped(world):
            result = world.results(accumulate_with_deadlines, STOPPED, 4, SHORT, on=[OTHER])
            assert result == [Tried(0, 4)]
            [outcome] = world.run(write, PUT, 2.0, healthy, SHORT, on=[OTHER])
            assert not outcome.error, outcome.trace
        assert world.results(read, OTHER, on=[healthy]) == [whole_write(2.0)]
        world.results(shoal.barrier)
