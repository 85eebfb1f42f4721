"""The long counts of the faults: deaths at random times, and machines that fall silent. Run by ``make soak``."""

from __future__ import annotations

import random
import signal
import time

import pytest
import torch

import shoal
from shoal.runtime.agent import current
from shoal.transport.messages import Kind, Message
from shoal.transport.network_link import NetworkIncoming
from support.agent_main import Outcome
from support.fault_points import average_until_it_fails
from support.limits import scaled
from support.namespaces import Namespace, network_namespaces
from support.world import World

SIZE = 5
SECONDS = 1.0
NETWORK = {"SHOAL_TRANSPORT": "network"}
OVER = [
    pytest.param({}, id="shared_memory", marks=pytest.mark.transport("shared_memory")),
    pytest.param(NETWORK, id="network", marks=pytest.mark.transport("network")),
]
DEAD_HOST_SECONDS = 20.0
"""After which a machine that no longer answers is given up, by the transport's keepalive probes."""
SILENT_SECONDS = DEAD_HOST_SECONDS + 10.0

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("environment", OVER)
@pytest.mark.parametrize("numel", [16, 100_000, 1_000_000])
@pytest.mark.parametrize("seed", range(25))
def test_all_survivors_are_notified_within_a_second_of_a_kill_at_a_random_time(
    environment: dict[str, str], numel: int, seed: int
) -> None:
    chance = random.Random(f"{environment} {numel} {seed}")
    victim = chance.randrange(SIZE)
    with World(SIZE, environment=environment) as world:
        pending = [world.run_on(rank, average_until_it_fails, numel) for rank in range(SIZE)]
        time.sleep(chance.uniform(0.0, 0.3))  # the random time
        at = world.kill(victim)
        for one in [each.outcome() for each in pending]:
            if one.rank == victim:
                assert one.message == "exit code -9"
                continue
            assert (one.error, one.ranks) == ("PeerLost", (victim,)), f"rank {one.rank}: {one.error}: {one.trace}"
            assert one.ended - at < scaled(SECONDS)


# Machines that fall silent: no connection is closed, only nothing comes any more


def assert_each_side_names_the_other(outcomes: list[Outcome], at: float, first_of_second: int) -> None:
    for outcome in outcomes:
        assert outcome.error == "PeerLost", f"rank {outcome.rank}: {outcome.error}: {outcome.trace}"
        [failed] = outcome.ranks
        assert (failed < first_of_second) != (outcome.rank < first_of_second), f"rank {outcome.rank}: {outcome.message}"
        assert outcome.ended - at < scaled(SILENT_SECONDS), (
            f"rank {outcome.rank} learnt it after {outcome.ended - at:.1f} s"
        )


@pytest.mark.timeout(120)
@pytest.mark.transport("network")
@pytest.mark.transport("namespaces")
@pytest.mark.parametrize("numel", [16, 3_000_000])
@pytest.mark.parametrize("size", [2, 4])
def test_a_machine_whose_cable_is_pulled_is_reported_failed_by_the_other(size: int, numel: int) -> None:
    with network_namespaces(2) as machines, World(size, namespaces=machines, timeout=90.0) as world:
        pending = [world.run_on(rank, average_until_it_fails, numel) for rank in range(size)]
        time.sleep(1.0)  # in the middle of the work
        at = time.monotonic()
        machines[1].plug(False)
        outcomes = [one.outcome(SILENT_SECONDS + 10.0) for one in pending]
        assert_each_side_names_the_other(outcomes, at, size // 2)


@pytest.mark.timeout(120)
@pytest.mark.transport("network")
@pytest.mark.transport("namespaces")
@pytest.mark.parametrize("unconfirmed", [False, True])
def test_an_unreachable_machine_is_reported_failed_also_without_traffic(unconfirmed: bool) -> None:
    """The system sends no keepalive probes on a connection with unconfirmed bytes."""
    with network_namespaces(2) as machines, World(2, namespaces=machines, timeout=90.0) as world:
        world.results(exchange)
        at = time.monotonic()
        machines[1].plug(False)
        if unconfirmed:
            world.results(report_arrived, on=[0])
        outcome = world.run_on(0, failed_ranks_within_limit).outcome(SILENT_SECONDS + 10.0)
        assert outcome.value == [1], outcome.trace
        assert outcome.ended - at < scaled(SILENT_SECONDS)


@pytest.mark.timeout(120)
@pytest.mark.transport("network")
@pytest.mark.transport("namespaces")
def test_a_third_machine_names_the_unreachable_one() -> None:
    with network_namespaces(3) as machines, World(3, namespaces=machines, timeout=90.0) as world:
        pending = [world.run_on(rank, average_until_it_fails, 16) for rank in range(3)]
        time.sleep(1.0)
        at = time.monotonic()
        machines[2].plug(False)
        outcomes = [one.outcome(SILENT_SECONDS + 10.0) for one in pending]
        for outcome in outcomes[:2]:
            assert (outcome.error, outcome.ranks) == ("PeerLost", (2,)), outcome.trace
            assert outcome.ended - at < scaled(SILENT_SECONDS)
        assert outcomes[2].error == "PeerLost"


@pytest.mark.timeout(120)
@pytest.mark.transport("network")
@pytest.mark.transport("namespaces")
@pytest.mark.parametrize("seconds", [1.0, DEAD_HOST_SECONDS / 2])
def test_a_short_outage_causes_no_failure(seconds: float) -> None:
    with network_namespaces(2) as machines, World(4, namespaces=machines, timeout=90.0) as world:
        world.results(exchange)
        pending = [world.run_on(rank, exchange_for, seconds + 5.0) for rank in range(4)]
        time.sleep(1.0)
        interrupt(machines[1], seconds)
        rounds = {one.outcome(60.0).value for one in pending}
        assert len(rounds) == 1 and rounds.pop() > 0


# A process that does not answer, on a machine that does, is not gone


@pytest.mark.timeout(120)
@pytest.mark.transport("network")
@pytest.mark.parametrize("numel", [16, 8_000_000])
def test_an_agent_stopped_for_long_is_waited_for_until_the_deadline(numel: int) -> None:
    with World(3, environment=NETWORK, timeout=90.0) as world:
        world.results(average_for_a_while, numel, 2)
        pending = [world.run_on(rank, average_for_a_while, numel, 50) for rank in range(3)]
        time.sleep(0.2)  # in the middle of the work, with a tensor under way
        world.kill(2, signal.SIGSTOP)
        time.sleep(SILENT_SECONDS)
        world.kill(2, signal.SIGCONT)
        for one in pending:
            outcome = one.outcome(60.0)
            assert not outcome.error, f"rank {outcome.rank}: {outcome.trace}"


def average_for_a_while(numel: int, rounds: int) -> None:
    """Over a ring of three, each result checked."""
    shoal.set_topology(shoal.topology.RingGraph(3))
    own = torch.full((numel,), float(shoal.rank()))
    for _ in range(rounds):
        assert torch.allclose(shoal.neighbor_allreduce(own), torch.tensor(1.0))


def interrupt(machine: Namespace, seconds: float) -> None:
    machine.plug(False)
    time.sleep(seconds)
    machine.plug(True)


def exchange() -> None:
    size, rank = shoal.size(), shoal.rank()
    shoal.set_topology(shoal.topology.FullyConnectedGraph(size))
    out = shoal.neighbor_allreduce(torch.full((100_000,), float(rank)))
    assert torch.allclose(out, torch.tensor((size - 1) / 2))


def exchange_for(seconds: float) -> int:
    """Exchange until rank 0 says that the time is over; how often."""
    limit, rounds = time.monotonic() + seconds, 0
    while shoal.broadcast_object(time.monotonic() < limit):
        exchange()
        rounds += 1
    return rounds


def report_arrived() -> None:
    """Send something on every connection to or from the other agent."""
    engine = current().engine
    with engine.lock:
        for connection in engine.router.incoming[1]:
            assert isinstance(connection, NetworkIncoming)
            connection.send_arrived_count()
        engine.router.link(1).post(Message(Kind.ASK, "unconfirmed", "unconfirmed"))
        engine.router.link(1).flush()


def failed_ranks_within_limit() -> list[int]:
    limit = time.monotonic() + SILENT_SECONDS + 5.0
    while not shoal.observability.membership().died and time.monotonic() < limit:
        time.sleep(0.05)
    return sorted(shoal.observability.membership().died)
