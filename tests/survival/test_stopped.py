"""``SHOAL_DROP_AFTER``: who is stopped is dropped, and whoever computes, or waits for who is stopped, is not."""

from __future__ import annotations

import signal
import time

import pytest
import torch

import shoal
from shoal import topology_util
from shoal.runtime.agent import current
from support.fault_points import over_both, over_one
from support.survivors import CONTINUE
from support.world import World

SIZE, STOPPED = 4, 1
DROP = {"SHOAL_DROP_AFTER": "1.5"}
SOON = 1.5 + 2.0
"""Seconds within which those that are left have gone on: the time itself, and what a loaded machine takes."""


def rounds(ends: float) -> tuple[float, tuple[int, ...]]:
    """Average around a one-way ring, and over all, until the clock says so; the longest round, and who is there."""
    shoal.set_topology(topology_util.RingGraph(SIZE, connect_style=1), is_weighted=True)
    longest = 0.0
    while True:
        started = time.monotonic()
        shoal.neighbor_allreduce(torch.ones(1000))
        over = shoal.allreduce(torch.tensor([float(time.monotonic() > ends)]), average=False)
        longest = max(longest, time.monotonic() - started)
        if float(over):
            return longest, shoal.alive()


def busy_for(seconds: float) -> float:
    """A long evaluation on one agent; how long the others waited."""
    shoal.barrier()
    started = time.monotonic()
    if shoal.rank() == STOPPED:
        time.sleep(seconds)
    shoal.allreduce(torch.ones(10))
    return time.monotonic() - started


@over_one("shared_memory")
def test_the_others_continue_without_a_stopped_agent_and_it_is_notified(environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment | CONTINUE | DROP) as world:
        ends = time.monotonic() + 6.0
        pending = [world.run_on(rank, rounds, ends) for rank in range(SIZE)]
        time.sleep(0.5)
        world.kill(STOPPED, signal.SIGSTOP)
        left = [rank for rank in range(SIZE) if rank != STOPPED]
        for rank in left:
            outcome = pending[rank].outcome()
            assert not outcome.error, outcome.trace
            longest, alive = outcome.value
            assert alive == tuple(left)
            assert 1.0 < longest < SOON
        world.kill(STOPPED, signal.SIGCONT)
        outcome = pending[STOPPED].outcome()
        assert outcome.error == "ShoalError"
        assert "counts it as lost (it has not answered for 1.5 s)" in outcome.message
        assert world.results(rounds, time.monotonic(), on=left)  # and they go on after it is back


def questions() -> int:
    """How often this agent has asked somebody whom it counts as lost."""
    reunion = current().engine.partition_resolver
    return reunion._turn - shoal.rank()


@pytest.mark.slow
@over_one("network")
def test_the_smaller_part_continues_although_the_kernel_accepts_its_probes(
    environment: dict[str, str],
) -> None:
    """Half of the agents are stopped, among them the lowest rank.

    They might be alive, and none replies. When they wake, they end.
    """
    stopped, left = (0, 1), (2, 3)
    with World(SIZE, environment=environment | CONTINUE | DROP) as world:
        ends = time.monotonic() + 5.5
        pending = [world.run_on(rank, rounds, ends) for rank in range(SIZE)]
        time.sleep(0.5)
        for rank in stopped:
            world.kill(rank, signal.SIGSTOP)
        for rank in left:
            outcome = pending[rank].outcome()
            assert not outcome.error, outcome.trace
            assert outcome.value[1] == left
        assert min(world.results(questions, on=left)) > 0
        more = time.monotonic() + 1.5
        going_on = [world.run_on(rank, rounds, more) for rank in left]
        for rank in stopped:
            world.kill(rank, signal.SIGCONT)
        for rank in stopped:
            outcome = pending[rank].outcome()
            assert outcome.error == "ShoalError" and "counts it as lost" in outcome.message, outcome.trace
        for one in going_on:
            assert not (outcome := one.outcome()).error, outcome.trace


@over_both
def test_with_on_failure_raise_all_name_the_stopped_agent(environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment | DROP) as world:
        pending = [world.run_on(rank, rounds, time.monotonic() + 60.0) for rank in range(SIZE)]
        time.sleep(0.5)
        world.kill(STOPPED, signal.SIGSTOP)
        for rank in range(SIZE):
            if rank != STOPPED:
                outcome = pending[rank].outcome()
                assert (outcome.error, outcome.ranks) == ("PeerLost", (STOPPED,)), outcome.message
        world.kill(STOPPED, signal.SIGCONT)
        assert pending[STOPPED].outcome().error in ("ShoalError", "PeerLost")


@over_one("network")
def test_a_long_computation_is_waited_for(environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment | CONTINUE | DROP) as world:
        waited = world.results(busy_for, 4.0)
        assert min(waited) > 3.5
        assert world.results(shoal.alive) == [tuple(range(SIZE))] * SIZE


@pytest.mark.slow
@over_one("shared_memory")
def test_one_agent_is_stopped_when_another_dies(environment: dict[str, str]) -> None:
    dies, left = 3, [0, 2]
    with World(SIZE, environment=environment | CONTINUE | DROP) as world:
        ends = time.monotonic() + 7.0
        pending = [world.run_on(rank, rounds, ends) for rank in range(SIZE)]
        time.sleep(0.5)
        world.kill(STOPPED, signal.SIGSTOP)
        world.kill(dies)
        for rank in left:
            outcome = pending[rank].outcome()
            assert not outcome.error, outcome.trace
            assert outcome.value[1] == tuple(left)
        world.kill(STOPPED, signal.SIGCONT)
        assert pending[STOPPED].outcome().error == "ShoalError"
        pending[dies].outcome()


@over_one("network")
def test_all_are_stopped_and_resume_without_a_failure(environment: dict[str, str]) -> None:
    """As on a laptop that was closed: the first agent to resume must not report the others failed."""
    with World(SIZE, environment=environment | CONTINUE | DROP) as world:
        pending = [world.run_on(rank, rounds, time.monotonic() + 5.0) for rank in range(SIZE)]
        time.sleep(0.5)
        world.kill(STOPPED, signal.SIGSTOP)
        time.sleep(1.1)  # the others have asked it, and it has not answered
        others = [rank for rank in range(SIZE) if rank != STOPPED]
        for rank in others:
            world.kill(rank, signal.SIGSTOP)
        time.sleep(2.5)
        for rank in (*others, STOPPED):
            world.kill(rank, signal.SIGCONT)
            time.sleep(0.1)
        for one in pending:
            outcome = one.outcome()
            assert not outcome.error, outcome.trace
            assert outcome.value[1] == tuple(range(SIZE))


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_an_invalid_time_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_DROP_AFTER", text)
    with pytest.raises(ValueError, match=r"SHOAL_DROP_AFTER=.*must be a positive number of seconds"):
        shoal.init()
