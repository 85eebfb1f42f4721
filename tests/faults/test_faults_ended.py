"""Agents that end by themselves: with an exception, with an exit code, abruptly, or while they shut down."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import shoal
from shoal.engine.shutdown import HANG_UP_SECONDS
from shoal.execution.events import Event
from shoal.runtime import bootstrap
from shoal.runtime.agent import current
from shoal.transport.sockets import Outgoing
from support.agent_main import Outcome, die
from support.fault_points import Point, arm, average_until_it_fails, swept
from support.leftovers import wait_until
from support.limits import scaled
from support.world import World

SIZE, VICTIM = 6, 2
SECONDS = 1.0
OVER = [
    pytest.param({}, id="shared_memory", marks=pytest.mark.transport("shared_memory")),
    pytest.param({"SHOAL_TRANSPORT": "network"}, id="network", marks=pytest.mark.transport("network")),
]


class ScriptError(Exception):
    pass


def raise_an_exception() -> None:
    raise ScriptError("out of luck")


def exit_with_an_error() -> None:
    sys.exit(3)


def exit_abruptly() -> None:
    os._exit(4)


def take_part_then(end: Callable[[], None]) -> None:
    """Three rounds, then the end."""
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    for _ in range(3):
        shoal.neighbor_allreduce(torch.full((30_000,), float(shoal.rank())))
    end()


def end_and_rest(world: World, end: Callable[[], None]) -> list[Outcome]:
    """One agent ends as a script would, and the others continue to average."""
    pending = [
        world.run_on(rank, take_part_then, end, caught=False)
        if rank == VICTIM
        else world.run_on(rank, average_until_it_fails, 30_000)
        for rank in range(SIZE)
    ]
    return [one.outcome() for one in pending]


@pytest.mark.parametrize("environment", OVER)
@pytest.mark.parametrize(
    ("end", "code"),
    [(raise_an_exception, 1), (exit_with_an_error, 3), (exit_abruptly, 4)],
    ids=["raises", "sys.exit", "os._exit"],
)
def test_all_survivors_are_notified_within_a_second_of_an_agents_end(
    environment: dict[str, str], end: Callable[[], None], code: int
) -> None:
    with World(SIZE, environment=environment) as world:
        outcomes = end_and_rest(world, end)
        dead = outcomes[VICTIM]
        assert dead.message == f"exit code {code}"
        for outcome in outcomes:
            if outcome.rank == VICTIM:
                continue
            assert outcome.error == "PeerLost", (
                f"rank {outcome.rank}: {outcome.error}: {outcome.message}\n{outcome.trace}"
            )
            assert outcome.ranks == (VICTIM,), f"rank {outcome.rank}: {outcome.message}"
            assert outcome.ended - dead.ended < scaled(SECONDS)


@pytest.mark.transport("shared_memory")
def test_the_survivors_get_the_exception_that_ended_an_agent() -> None:
    with World(SIZE) as world:
        outcomes = end_and_rest(world, raise_an_exception)
        for outcome in outcomes:
            assert outcome.rank == VICTIM or "ScriptError: out of luck" in outcome.message, outcome.message
        log = world.members[VICTIM].log.read_text()
        assert "Traceback" in log and "ScriptError: out of luck" in log


@pytest.mark.transport("shared_memory")
@pytest.mark.parametrize(
    ("status", "expected_message"),
    [
        (3, "its script ended with SystemExit: 3"),
        ("no data", "its script ended with SystemExit: no data"),
        (0, "rank 2 has left (it called shoal.shutdown(), or its script ended)"),
    ],
)
def test_the_survivors_get_the_exit_status_that_ended_an_agent(status: object, expected_message: str) -> None:
    with World(SIZE) as world:
        outcomes = [one for one in end_and_rest(world, partial(sys.exit, status)) if one.rank != VICTIM]
        needed = [outcome for outcome in outcomes if expected_message in outcome.message]
        assert len(needed) >= (len(outcomes) if status else 1), [outcome.message for outcome in outcomes]
        assert all(outcome.error == "PeerLost" and outcome.ranks == (VICTIM,) for outcome in outcomes)


def end_in_time(world: World, end: Callable[[], None]) -> None:
    outcomes = [world.run_on(rank, end, caught=False) for rank in range(SIZE)]
    assert [outcome.outcome().message for outcome in outcomes] == ["exit code 0"] * SIZE


def average_and_end() -> None:
    for _ in range(5):
        shoal.neighbor_allreduce(torch.ones(30_000))


@pytest.mark.parametrize("environment", OVER)
def test_a_script_that_ends_without_shutdown_affects_no_other(environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment) as world:
        end_in_time(world, average_and_end)


# In the middle of the end


def die_in_shutdown(place: str) -> None:
    """Die in ``shutdown``: before any message of it, or between its goodbye and its end."""
    if place == "before":
        bootstrap.on_stop.append(lambda _: die())
    else:
        engine = current().engine
        engine.progress.stop = die  # type: ignore[method-assign]
    shoal.shutdown()


def shut_down_all(place: str) -> None:
    if shoal.rank() == VICTIM:
        die_in_shutdown(place)
    shoal.shutdown()


@pytest.mark.parametrize("environment", OVER)
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_kill_during_a_common_shutdown_delays_the_others_less_than_a_second(
    environment: dict[str, str], place: str
) -> None:
    with World(SIZE, environment=environment) as world:
        outcomes = world.run(shut_down_all, place)
        assert outcomes[VICTIM].message == "exit code -9"
        for outcome in outcomes:
            if outcome.rank != VICTIM:
                assert not outcome.error, outcome.trace
                assert outcome.ended - outcomes[VICTIM].ended < scaled(SECONDS)


@pytest.mark.parametrize("environment", OVER)
def test_an_agent_killed_in_its_shutdown_is_named_to_agents_that_continue(environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment) as world:
        others = [rank for rank in range(SIZE) if rank != VICTIM]
        dead = world.run_on(VICTIM, die_in_shutdown, "before").outcome()
        for one in world.run(average_until_it_fails, 30_000, on=others):
            assert (one.error, one.ranks) == ("PeerLost", (VICTIM,)), one.trace
            assert one.ended - dead.ended < scaled(SECONDS)


def shut_down_with_a_broken_link() -> None:
    """Before the agent can tell whether its peer is gone, or only that connection."""
    link = current().engine.router.links[1]
    assert isinstance(link, Outgoing)
    link.fail("cut by the test")
    shoal.shutdown()


@pytest.mark.parametrize("environment", OVER)
def test_shutdown_does_not_wait_for_a_broken_link(environment: dict[str, str]) -> None:
    with World(2, environment=environment) as world:
        world.results(average_and_rest)
        [outcome] = world.run(shut_down_with_a_broken_link, on=[0])
        assert not outcome.error, outcome.trace
        assert outcome.seconds < scaled(SECONDS + HANG_UP_SECONDS)


def average_alone_and_shut_down() -> None:
    """In a round that fails, since the neighbours do not come; they keep what was sent to them until they do."""
    with pytest.raises(shoal.DeadlineExceeded):
        shoal.neighbor_allreduce(torch.ones(30_000), timeout=0.2)
    shoal.shutdown()


@pytest.mark.parametrize("environment", OVER)
def test_shutdown_does_not_wait_for_replies_to_a_failed_round(environment: dict[str, str]) -> None:
    with World(3, environment=environment) as world:
        world.results(average_and_rest)
        [outcome] = world.run(average_alone_and_shut_down, on=[0])
        assert not outcome.error, outcome.trace
        assert outcome.seconds < scaled(0.2 + SECONDS)


def average_and_rest() -> None:
    shoal.neighbor_allreduce(torch.ones(30_000))


# An agent that forks


def check_descriptors_of_a_child() -> str:
    """In a forked child, open files, let the garbage collector run, and see whether the files are still there."""
    read_end, write_end = os.pipe()
    shoal.neighbor_allreduce(torch.ones(30_000))
    pid = os.fork()
    if not pid:
        import gc

        os.close(read_end)
        try:
            pipes = [os.pipe() for _ in range(64)]
            gc.collect()
            for source, sink in pipes:
                os.write(sink, b"x")
                assert os.read(source, 1) == b"x"
            answer = b"ok"
        except BaseException as error:
            answer = repr(error).encode()
        os.write(write_end, answer)
        os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    answer = os.read(read_end, 4096)
    os.close(read_end)
    shoal.neighbor_allreduce(torch.ones(30_000))
    return answer.decode()


@pytest.mark.parametrize("environment", OVER)
def test_a_forked_child_may_use_the_descriptors_that_shoal_closed_in_it(environment: dict[str, str]) -> None:
    with World(3, environment=environment) as world:
        assert world.results(check_descriptors_of_a_child) == ["ok"] * 3


def operation_in_a_forked_child() -> str:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            shoal.neighbor_allreduce(torch.ones(3))
        except BaseException as error:
            os.write(write_end, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    answer = os.read(read_end, 4096)
    os.close(read_end)
    return answer.decode()


@pytest.mark.transport("shared_memory")
def test_a_forked_child_is_no_agent_and_raises() -> None:
    with World(2) as world:
        for result in world.results(operation_in_a_forked_child):
            assert result.startswith("NotInitialized: ")
        assert world.is_sound()


# Signals


@pytest.mark.parametrize("environment", OVER)
@pytest.mark.parametrize("point", [Point("sent"), Point("received", 2), Point("summed")], ids=str)
def test_an_agent_stopped_past_the_deadline_is_named_and_takes_part_again_later(
    environment: dict[str, str], point: Point
) -> None:
    with World(4, environment=environment) as world:
        world.results(set_the_ring)
        others = [rank for rank in range(4) if rank != VICTIM]
        world.results(stop_at, point, on=[VICTIM])
        pending = [world.run_on(rank, average_with_a_stop) for rank in range(4)]
        outcomes = {rank: pending[rank].outcome() for rank in others}
        assert not outcomes[0].error, "the agent opposite does not need the stopped one"
        waited = [outcomes[rank] for rank in (1, 3) if outcomes[rank].error]
        # One that has sent all it has to send may be stopped without harm.
        assert waited or point.kind != "sent"
        for one in waited:
            assert (one.error, one.ranks) == ("DeadlineExceeded", (VICTIM,)), f"rank {one.rank}: {one.trace}"
        # The others need not have waited for it; a SIGCONT that overtakes the stop would be lost.
        assert wait_until(lambda: is_stopped(world.members[VICTIM].pid))
        world.kill(VICTIM, signal.SIGCONT)
        resumed = pending[VICTIM].outcome()
        assert resumed.error in ("", "DeadlineExceeded"), resumed.trace
        world.results(average_once_more)


@pytest.mark.transport("network")
def test_an_agent_stopped_during_a_transfer_is_named() -> None:
    with World(3, environment={"SHOAL_TRANSPORT": "network"}) as world:
        world.results(set_the_ring)
        world.results(stop_at, Point("Chunk out", 6), on=[VICTIM])
        pending = [world.run_on(rank, average_with_a_stop, 8_000_000) for rank in range(3)]
        for one in [pending[rank].outcome() for rank in (0, 1)]:
            assert (one.error, one.ranks) == ("DeadlineExceeded", (VICTIM,)), f"rank {one.rank}: {one.trace}"
            assert one.seconds < scaled(1.5 + SECONDS)
        world.kill(VICTIM, signal.SIGCONT)
        pending[VICTIM].outcome()
        world.results(average_once_more)


@pytest.mark.transport("network")
def test_the_deadline_counts_if_the_clock_was_last_read_when_all_headers_had_arrived() -> None:
    with World(2, environment={"SHOAL_TRANSPORT": "network"}) as world:
        world.results(check_deadlines_on_each_message, on=[0])
        world.results(stop_at, Point("Chunk out", 6), on=[1])
        pending = [world.run_on(rank, average_with_a_stop, 8_000_000) for rank in range(2)]
        one = pending[0].outcome()
        assert (one.error, one.ranks) == ("DeadlineExceeded", (1,)), one.trace
        assert one.seconds < scaled(1.5 + SECONDS)
        world.kill(1, signal.SIGCONT)
        pending[1].outcome()
        world.results(shoal.barrier)


@pytest.mark.transport("network")
def test_an_agent_that_was_stopped_during_a_transfer_is_named_to_later_callers() -> None:
    with World(2, environment={"SHOAL_TRANSPORT": "network"}) as world:
        world.results(stop_at, Point("Chunk out", 6), on=[1])
        pending = world.run_on(1, average_with_a_stop, 8_000_000)
        assert wait_until(lambda: is_stopped(world.members[1].pid))
        late = world.run_on(0, average_with_a_stop, 8_000_000).outcome()
        assert (late.error, late.ranks) == ("DeadlineExceeded", (1,)), late.trace
        assert late.seconds < scaled(1.5 + SECONDS)
        world.kill(1, signal.SIGCONT)
        pending.outcome()
        world.results(shoal.barrier)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def set_the_ring() -> None:
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    shoal.barrier()


def stop_at(point: Point) -> None:
    arm(point, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def check_deadlines_on_each_message() -> None:
    """As happens by itself when something else is due at that moment."""
    engine = current("test").engine

    def on_event(event: Event) -> None:
        if event.kind == "received":
            engine.progress.next_check = 0.0

    shoal.observability.events().subscribe(on_event)


def average_with_a_stop(numel: int = 30_000) -> None:
    shoal.neighbor_allreduce(torch.ones(numel), name="with a stop", timeout=1.5)


def average_once_more() -> None:
    for name in ("afterwards", None):
        out = shoal.neighbor_allreduce(torch.full((30_000,), float(shoal.rank())), name=name)
        rank, size = shoal.rank(), shoal.size()
        mean = sum((rank + step) % size for step in (-1, 0, 1)) / 3
        assert torch.allclose(out, torch.tensor(mean))


def interrupted_while_it_waits() -> str:
    try:
        shoal.neighbor_allreduce(torch.ones(30_000), name="nobody comes")
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    return "nothing"


@pytest.mark.parametrize("environment", OVER)
def test_ctrl_c_ends_a_wait_at_once_and_the_agent_can_shut_down(environment: dict[str, str]) -> None:
    with World(3, environment=environment) as world:
        pending = world.run_on(0, interrupted_while_it_waits)
        world.results(wait_until_asked, "nobody comes", on=[1])
        at = world.kill(0, signal.SIGINT)
        outcome = pending.outcome()
        assert outcome.value == "KeyboardInterrupt"
        assert outcome.ended - at < scaled(0.5)
        world.close(within=1.0)


def wait_until_asked(name: str) -> None:
    """Until a message of that operation has come from the agent that waits."""
    import threading

    arrived = threading.Event()
    shoal.observability.events().subscribe(lambda event: arrived.set() if event.name == name else None)
    rounds = current().engine.matcher
    while not any(key[0] == name for key in rounds.early) and not arrived.wait(0.005):
        pass


@swept(
    [
        Point("submitted", 2),
        *(Point("sent", k) for k in (1, 2, 5)),
        *(Point("received", k) for k in (1, 2, 6)),
        *(Point("summed", k) for k in (1, 4)),
        *(Point("finished", k) for k in (1, 4)),
        Point("waited", 3),
    ],
    (16, 30_000),
)
def test_ctrl_c_anywhere_in_an_operation_leaves_an_agent_that_can_shut_down(
    environment: dict[str, str], numel: int, point: Point
) -> None:
    with World(3, environment=environment) as world:
        pending = [world.run_on(rank, interrupt_at, numel, point, rank == 0) for rank in range(3)]
        interrupted = pending[0].outcome()
        assert interrupted.error == "KeyboardInterrupt", f"{interrupted.error}: {interrupted.trace}"
        ended = world.run(shoal.shutdown, on=[0])[0]
        assert not ended.error, ended.trace
        assert ended.seconds < scaled(SECONDS)
        for one in pending[1:]:
            outcome = one.outcome()
            # Mismatch where they asked, and heard that the round ended there, before it had left.
            assert outcome.error in ("PeerLost", "Mismatch"), f"{outcome.error}: {outcome.trace}"
            assert 0 in outcome.ranks


def interrupt_at(numel: int, point: Point, victim: bool) -> None:
    if victim:
        arm(point, lambda: os.kill(os.getpid(), signal.SIGINT))
    while True:
        shoal.neighbor_allreduce(torch.ones(numel))
