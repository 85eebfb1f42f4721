"""A connection between two machines is reset, as by a firewall: it is made again. Where it cannot be, the two have lost
each other, and nobody else is blamed."""

from __future__ import annotations

import subprocess
import time

import pytest
import torch

import shoal
from support.fault_points import average_until_it_fails
from support.limits import scaled
from support.namespaces import Namespace, network_namespaces
from support.world import World

PAIRS = ((1, 2), (2, 1))


def within(machine: Namespace, *command: str) -> None:
    subprocess.run(["ip", "netns", "exec", machine.name, *command], check=True, capture_output=True)


def average_until_notified(numel: int) -> tuple[int, int]:
    """Round after round, each checked, until rank 0 has been told to end by a file; how many, and how many are left."""
    rank, size = shoal.rank(), shoal.size()
    shoal.set_topology(shoal.topology.RingGraph(size))
    own = torch.full((numel,), float(rank))
    mean = sum({(rank + step) % size for step in (-1, 0, 1)}) / 3
    rounds, until = 0, time.monotonic() + 3.0
    while shoal.broadcast(torch.tensor([time.monotonic() < until]), 0).item():
        for _ in range(10):
            assert torch.allclose(shoal.neighbor_allreduce(own), torch.tensor(mean))
            rounds += 1
    return rounds, len(shoal.alive())


@pytest.mark.transport("network")
@pytest.mark.transport("namespaces")
@pytest.mark.parametrize("numel", [pytest.param(16, marks=pytest.mark.soak), 1 << 20])
def test_connections_reset_repeatedly_are_reestablished_without_a_failure(numel: int) -> None:
    with network_namespaces(4) as machines, World(4, namespaces=machines) as world:
        pending = [world.run_on(rank, average_until_notified, numel) for rank in range(4)]
        for _ in range(10):
            time.sleep(0.25)
            for source, target in PAIRS:
                within(machines[source], "ss", "-K", "dst", machines[target].address)
        outcomes = [one.outcome() for one in pending]
        assert not any(outcome.error for outcome in outcomes), [outcome.trace for outcome in outcomes]
        results = [outcome.value for outcome in outcomes]
        assert len(set(results)) == 1 and results[0][0] >= 10 and results[0][1] == 4


@pytest.mark.soak
@pytest.mark.transport("network")
@pytest.mark.transport("namespaces")
def test_if_reconnection_attempts_are_dropped_the_agent_is_reported_failed() -> None:
    with network_namespaces(3) as machines, World(3, namespaces=machines, timeout=60.0) as world:
        pending = [world.run_on(rank, average_until_it_fails, 16) for rank in range(3)]
        time.sleep(0.5)
        at = time.monotonic()
        machines[2].cut(machines[1], True)
        within(machines[2], "ss", "-K", "dst", machines[1].address)
        outcomes = [one.outcome(50.0) for one in pending]
        machines[2].cut(machines[1], False)
        expected = {0: "ranks 1 and 2 have lost each other", 1: "counts it as lost", 2: "rank 1 was lost"}
        for outcome in outcomes:
            assert expected[outcome.rank] in outcome.message, f"rank {outcome.rank}: {outcome.trace}"
        assert max(one.ended for one in outcomes) - at < scaled(25.0)
        world.destroy()


@pytest.mark.transport("network")
@pytest.mark.transport("namespaces")
def test_when_two_machines_are_partitioned_no_third_one_is_blamed() -> None:
    with network_namespaces(4) as machines, World(4, namespaces=machines) as world:
        pending = [world.run_on(rank, average_until_it_fails, 16) for rank in range(4)]
        time.sleep(0.5)  # in the middle of the work
        at = time.monotonic()
        for source, target in PAIRS:
            within(machines[source], "ip", "route", "add", "unreachable", machines[target].address)
        for source, target in PAIRS:
            within(machines[source], "ss", "-K", "dst", machines[target].address)
        outcomes = [one.outcome() for one in pending]
        for outcome in outcomes:
            assert outcome.error == "PeerLost", f"rank {outcome.rank}: {outcome.error}: {outcome.trace}"
            expected = {1: (2,), 2: (1,)}.get(outcome.rank, (1, 2))
            assert outcome.ranks == expected, f"rank {outcome.rank}: {outcome.message}"
            assert outcome.ended - at < scaled(3.0)
        world.destroy()
