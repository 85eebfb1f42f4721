"""A network partition into two parts: by policy each part continues with its own view, or at most one does.

Where they reach each other again the smaller part yields, and its restarted agents rejoin the other.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
import torch

import shoal
from support.namespaces import Namespace, network_namespaces
from support.survivors import CONTINUE
from support.world import Pending, World

pytestmark = pytest.mark.transport("namespaces")
DROP_AFTER = 2.0
GO = CONTINUE | {"SHOAL_DROP_AFTER": str(DROP_AFTER)}
STOP = GO | {"SHOAL_ON_PARTITION": "stop"}


@pytest.fixture
def machines() -> Iterator[list[Namespace]]:
    with network_namespaces(2) as made:
        yield made


def average_for(seconds: float) -> tuple[float, tuple[int, ...]]:
    """Average for at least the given time; the mean over all members, and their ranks."""
    limit = time.monotonic() + seconds
    x = torch.tensor([float(shoal.rank())], dtype=torch.float64)
    over = 0.0
    while over < 1.0:
        x = shoal.neighbor_allreduce(x, name="x")
        over = shoal.allreduce(torch.tensor([float(time.monotonic() > limit)])).item()
        time.sleep(0.01)
    return shoal.allreduce(x).item(), shoal.alive()


def keep_saving(seconds: float, most: int) -> tuple[int, int, tuple[int, ...]]:
    """Save until the given number are members, and the given time is over.

    Returns the first and the last step, and the members.
    """
    model = torch.nn.Linear(1, 1)
    checkpoint = shoal.Checkpoint(model=model)
    began = step = checkpoint.load(None, missing_ok=True)
    limit = time.monotonic() + seconds
    over = 0.0
    while over < 1.0:
        step += 1
        done = len(shoal.alive()) >= most or time.monotonic() > limit
        over = shoal.allreduce(torch.tensor([float(done)])).item()
        time.sleep(0.01)
        checkpoint.save(None, step)  # the last of the loop: a joining agent begins the next turn with the others
    return began, step, shoal.alive()


def train_through_partition(size: int) -> tuple[int, list[float], list[tuple[int, ...]]]:
    """Train until the partition has come and healed; the first step, the number after each step, and its members.

    In a part with rank 0 the number grows by one in each step; in another part it falls. So it shows the part.
    """
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    checkpoint = shoal.Checkpoint(model=model)
    began = step = checkpoint.load(None, missing_ok=True)
    there: list[tuple[int, ...]]
    seen, there = [model.weight.item()], [()]
    apart, limit = step > 0, time.monotonic() + 40.0
    while len(there[-1]) < size or not apart:
        with torch.no_grad():
            model.weight.copy_(shoal.neighbor_allreduce(model.weight, name="x"))
            here = tuple(shoal.allgather(torch.tensor([shoal.rank()])).tolist())
            model.weight += 1.0 if here[0] == 0 else -1.0
        seen.append(model.weight.item())
        there.append(here)
        apart = apart or len(here) < size
        step += 1
        assert time.monotonic() < limit, there[-1]
        time.sleep(0.01)
        checkpoint.save(None, step)
    return began, seen, there


def heal_the_partition(world: World, running: list[Pending], larger: list[int], smaller: list[int]) -> None:
    """The cable is back: the smaller part yields, is restarted, and continues with the state of the larger part."""
    for rank in smaller:
        outcome = running[rank].outcome(6.0)
        assert outcome.error == "PeerLost" and "and this one gives way" in outcome.message, outcome.trace
        assert outcome.ranks == tuple(larger)
        assert f"has gone on without ranks {smaller}, as one of {len(larger)}" in outcome.message
    for rank in smaller:
        world.kill(rank)
        world.members[rank].outcome(5.0)
    for rank in smaller:
        world.start_again(rank)
        running[rank] = world.run_on(rank, train_through_partition, world.size)
    outcomes = [one.outcome(45.0) for one in running]
    assert not [outcome.trace for outcome in outcomes if outcome.error]
    all_ranks = tuple(range(world.size))
    began, seen, there = outcomes[larger[0]].value
    assert began == 0
    assert there[-1] == all_ranks and tuple(larger) in there
    for (before, after), here in zip(itertools.pairwise(seen), there[1:], strict=True):
        assert after - before == pytest.approx(1.0 if here[0] == 0 else -1.0), "of a step with others"
    for rank in all_ranks:
        began, own, here = outcomes[rank].value
        assert own == pytest.approx(seen[began:]) and here[1:] == there[began + 1 :]
        assert (began > 0) == (rank in smaller)


@pytest.mark.parametrize("size", [pytest.param(5, marks=pytest.mark.soak), 4], ids=["three and two", "two and two"])
def test_both_parts_continue_and_the_smaller_one_yields_when_the_partition_heals(
    machines: list[Namespace], size: int
) -> None:
    first = [rank for rank in range(size) if rank * 2 // size == 0]
    others = [rank for rank in range(size) if rank not in first]
    with World(size, environment=GO, namespaces=machines, restarts=True) as world:
        running = [world.run_on(rank, train_through_partition, size) for rank in range(size)]
        time.sleep(0.5)
        machines[1].plug(False)
        time.sleep(DROP_AFTER + 1.5)
        assert not any(one.ready() for one in running), "a part has ended before they could reach each other"
        machines[1].plug(True)
        heal_the_partition(world, running, first, others)


def test_an_agent_that_rejoined_in_the_smaller_part_yields_with_it(machines: list[Namespace]) -> None:
    """It was restarted during the partition. The larger part is the one without rank 0."""
    size, dies, smaller, larger = 5, 1, [0, 1], [2, 3, 4]
    with World(size, environment=GO, namespaces=[machines[rank > 1] for rank in range(size)], restarts=True) as world:
        running = [world.run_on(rank, train_through_partition, size) for rank in range(size)]
        time.sleep(0.5)
        machines[1].plug(False)
        world.kill(dies)
        running[dies].outcome()
        world.start_again(dies)
        running[dies] = world.run_on(dies, train_through_partition, size)
        time.sleep(DROP_AFTER + 1.5)
        assert not any(one.ready() for one in running), "a part has ended before they could reach each other"
        machines[1].plug(True)
        heal_the_partition(world, running, larger, smaller)


@pytest.mark.slow
@pytest.mark.parametrize("size", [5, pytest.param(4, marks=pytest.mark.soak)], ids=["three and two", "two and two"])
def test_the_smaller_part_stops_and_rejoins_when_the_partition_heals(machines: list[Namespace], size: int) -> None:
    first = [rank for rank in range(size) if rank * 2 // size == 0]
    others = [rank for rank in range(size) if rank not in first]
    with World(size, environment=STOP, namespaces=machines, restarts=True) as world:
        pending = [world.run_on(rank, average_for, 6.0) for rank in range(size)]
        time.sleep(0.5)
        machines[1].plug(False)
        outcomes = [one.outcome() for one in pending]
        assert [outcomes[rank].value[1] for rank in first] == [tuple(first)] * len(first)
        for rank in others:
            assert outcomes[rank].error == "PeerLost" and "as the smaller part" in outcomes[rank].message
            assert outcomes[rank].ranks == tuple(first)
        machines[1].plug(True)
        running = {rank: world.run_on(rank, keep_saving, 20.0, size) for rank in first}
        for rank in others:
            world.kill_and_start_again(rank)
            running[rank] = world.run_on(rank, keep_saving, 20.0, size)
        arrived = [running[rank].outcome().value for rank in range(size)]
    assert [one[2] for one in arrived] == [tuple(range(size))] * size and len({one[1] for one in arrived}) == 1
    assert all(arrived[rank][0] > 0 for rank in others)


def load_outside() -> float:
    """Load, as an agent that was started again; how long that took, with the error it ended in."""
    began = time.monotonic()
    try:
        shoal.Checkpoint(model=torch.nn.Linear(1, 1)).load(None, missing_ok=True)
    except shoal.PeerLost as error:
        raise shoal.PeerLost(f"after {time.monotonic() - began:.0f} s: {error}", error.ranks) from None
    raise AssertionError("it has entered")


@pytest.mark.slow
def test_a_rejoining_agent_without_any_connection_names_the_closed_ports(machines: list[Namespace]) -> None:
    """The rendezvous is open. The surviving agent has no connection to the new one, so it cannot open one either."""
    with World(2, environment=CONTINUE, namespaces=machines, restarts=True, timeout=60.0) as world:
        world.kill(1)
        machines[0].let_no_connection_in(but_port=29400)
        world.start_again(1)
        output = world.run_on(1, load_outside).outcome(60.0)
        assert output.error == "PeerLost" and output.ranks == (0,), output.trace
        assert f"rank 1 cannot connect to rank 0 at {machines[0].address}:" in output.message
        assert "(no answer: a firewall?)" in output.message and "can connect to none of them" in output.message


@pytest.mark.slow
def test_an_agent_rejoins_through_reachable_members(machines: list[Namespace]) -> None:
    """The first machine accepts no connection.

    Its agents get rank 3's request for reverse connections through rank 2.
    """
    with World(4, environment=GO, namespaces=machines, restarts=True) as world:
        running = [world.run_on(rank, keep_saving, 30.0, 5) for rank in range(4)]
        machines[0].let_no_connection_in(but_port=29400)
        world.kill(3)
        assert running[3].outcome().error == "Died"
        world.start_again(3)
        running[3] = world.run_on(3, keep_saving, 1.0, 4)
        outcomes = [one.outcome(60.0) for one in running]
    assert not [outcome.trace for outcome in outcomes if outcome.error]
    assert {outcome.value[2] for outcome in outcomes} == {(0, 1, 2, 3)} and outcomes[3].value[0] > 0
