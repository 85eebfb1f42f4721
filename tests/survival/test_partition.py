"""A job that falls apart into two: each part keeps a view of its own; by policy one stops, and enters again later."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

import shoal
from support.namespaces import Namespace, network_namespaces
from support.survivors import CONTINUE
from support.world import World

pytestmark = pytest.mark.transport("namespaces")
STOP = CONTINUE | {"SHOAL_DROP_AFTER": "2", "SHOAL_ON_PARTITION": "stop"}


@pytest.fixture
def machines() -> Iterator[list[Namespace]]:
    with network_namespaces(2) as made:
        yield made


def go_on(seconds: float) -> tuple[float, tuple[int, ...]]:
    """Average for so long, at least; the mean over all that are there, and who these are."""
    limit = time.monotonic() + seconds
    x = torch.tensor([float(shoal.rank())], dtype=torch.float64)
    over = 0.0
    while over < 1.0:
        x = shoal.neighbor_allreduce(x, name="x")
        over = shoal.allreduce(torch.tensor([float(time.monotonic() > limit)])).item()
        time.sleep(0.01)
    return shoal.allreduce(x).item(), shoal.alive()


def keep_saving(seconds: float, most: int) -> tuple[int, int, tuple[int, ...]]:
    """Save until so many are there, for so long; the steps with which it began and ended, and who was there."""
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
        checkpoint.save(None, step)  # the last of the loop: who enters begins the next turn with the others
    return began, step, shoal.alive()


def test_both_parts_go_on_each_with_a_view_of_its_own(machines: list[Namespace]) -> None:
    go = CONTINUE | {"SHOAL_DROP_AFTER": "2"}
    with World(4, environment=go, namespaces=machines) as world:
        pending = [world.run_on(rank, go_on, 6.0) for rank in range(4)]
        time.sleep(0.5)
        machines[1].plug(False)
        outcomes = [one.outcome() for one in pending]
        machines[1].plug(True)
    assert not [one.message for one in outcomes if one.error]
    assert [one.value[1] for one in outcomes] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert outcomes[0].value[0] == outcomes[1].value[0] and outcomes[2].value[0] == outcomes[3].value[0]


@pytest.mark.parametrize("size", [5, 4], ids=["three and two", "two and two"])
def test_the_smaller_part_stops_and_comes_back_when_the_cable_does(machines: list[Namespace], size: int) -> None:
    first = [rank for rank in range(size) if rank * 2 // size == 0]
    others = [rank for rank in range(size) if rank not in first]
    with World(size, environment=STOP, namespaces=machines, restarts=True) as world:
        pending = [world.run_on(rank, go_on, 6.0) for rank in range(size)]
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
            world.kill(rank)
            world.members[rank].outcome(5.0)
            world.start_again(rank)
            running[rank] = world.run_on(rank, keep_saving, 20.0, size)
        came = [running[rank].outcome().value for rank in range(size)]
    assert [one[2] for one in came] == [tuple(range(size))] * size and len({one[1] for one in came}) == 1
    assert all(came[rank][0] > 0 for rank in others)
