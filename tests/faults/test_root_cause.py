"""When one agent's death ends others, all errors name the first agent, not the agent that left because of it."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch

import shoal
from support.world import World

OVER = [
    pytest.param({}, id="shared_memory", marks=pytest.mark.transport("shared_memory")),
    pytest.param({"SHOAL_TRANSPORT": "network"}, id="network", marks=pytest.mark.transport("network")),
]
SIZE = 4


def average_until_it_fails(graph: str, busy: bool) -> None:
    """Ends with the exception of the round that fails; a busy agent keeps the interpreter lock between the rounds."""
    size = shoal.size()
    shoal.set_topology(
        shoal.topology.RingGraph(size, connect_style=1) if graph == "directed" else shoal.topology.RingGraph(size)
    )
    shoal.barrier()
    libc = ctypes.PyDLL(None)  # its calls keep the interpreter lock
    while True:
        shoal.neighbor_allreduce(torch.ones(4), name="average")
        if busy:
            libc.usleep(1_500_000)


def average_and_leave(graph: str) -> None:
    """Average as a script that catches the error and ends."""
    try:
        average_until_it_fails(graph, False)
    finally:
        shoal.shutdown()


@pytest.mark.parametrize("environment", OVER)
@pytest.mark.parametrize("graph", ["directed", "undirected"])
@pytest.mark.parametrize("busy", [1, 2, 3])
def test_an_agent_busy_during_a_death_and_departures_names_the_dead(
    environment: dict[str, str], graph: str, busy: int
) -> None:
    with World(SIZE, environment=environment) as world:
        pending = [world.run_on(0, average_until_it_fails, graph, False)]
        for rank in range(1, SIZE):
            if rank == busy:
                pending.append(world.run_on(rank, average_until_it_fails, graph, True))
            else:
                pending.append(world.run_on(rank, average_and_leave, graph))
        time.sleep(0.7)  # the busy one is in the middle of its long step
        world.kill(0)
        for one in [each.outcome() for each in pending][1:]:
            assert (one.error, one.ranks) == ("PeerLost", (0,)), f"rank {one.rank}: {one.error}: {one.trace}"


@pytest.mark.parametrize("environment", OVER)
def test_an_agent_that_crashes_because_of_anothers_failure_is_not_the_cause(environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment) as world:
        pending = [world.run_on(0, average_until_it_fails, "directed", False)]
        pending += [world.run_on(rank, average_until_it_fails, "directed", False, caught=False) for rank in (1, 3)]
        pending += [world.run_on(2, average_until_it_fails, "directed", True)]
        time.sleep(0.7)
        world.kill(0)
        last = pending[-1].outcome()
        assert (last.error, last.ranks) == ("PeerLost", (0,)), f"{last.error}: {last.trace}"
        for one in pending[:-1]:
            one.outcome()
