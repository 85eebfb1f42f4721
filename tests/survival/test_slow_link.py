"""A slow link: with windows the agents off the link make as many steps as without it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shoal
from shoal import topology_util
from support.namespaces import Namespace, network_namespaces
from support.world import World

pytestmark = pytest.mark.transport("namespaces")
SIZE, SLOW = 5, 4
AWAY = [1, 2]
"""Those that exchange nothing with the agent on the slow link."""
KBIT = 2000
SECONDS, PAUSE = 2.0, 0.01
WAYS: dict[str, Any] = {
    "put": shoal.optim.DistributedWinPutOptimizer,
    "get": shoal.optim.DistributedPullGetOptimizer,
    "in step": shoal.DecentralizedOptimizer,
}


@pytest.fixture
def machines() -> Iterator[list[Namespace]]:
    with network_namespaces(SIZE) as made:
        yield made


def steps_in(way: str, seconds: float) -> int:
    """How many steps of a model of 64 KiB there are in some seconds."""
    shoal.set_topology(topology_util.RingGraph(SIZE))
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 128, bias=False)
    optimizer = WAYS[way](torch.optim.SGD(model.parameters(), lr=1e-3), model)
    x, count = torch.ones(1, 128), 0
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()  # windows are made in it, which all do together
    shoal.barrier()
    with optimizer.join():
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            count += 1
            time.sleep(PAUSE)  # so that what others do with the processor counts for little
    return count


def steps_off_the_link(world: World, machine: Namespace, way: str) -> tuple[list[int], list[int]]:
    """Without the slow link, and with it."""
    without = world.results(steps_in, way, SECONDS)
    machine.slow(KBIT)
    with_slow_link = world.results(steps_in, way, SECONDS)
    machine.slow(0)
    return without, with_slow_link


@pytest.mark.slow
@pytest.mark.parametrize("way", ["put", pytest.param("get", marks=pytest.mark.soak)])
def test_with_windows_a_slow_link_slows_only_its_agents(machines: list[Namespace], way: str) -> None:
    with World(SIZE, namespaces=machines) as world:
        without, with_slow_link = steps_off_the_link(world, machines[SLOW], way)
    for rank in AWAY:
        assert with_slow_link[rank] > without[rank] / 3, (
            f"{way}: {without} steps without the slow link, {with_slow_link} with it"
        )
    assert with_slow_link[SLOW] < without[SLOW] / 2, f"{way}: {without}, {with_slow_link}: the link was not slow"


@pytest.mark.soak
def test_synchronous_training_is_slowed_for_all(machines: list[Namespace]) -> None:
    """So the test above would detect a wait between agents."""
    with World(SIZE, namespaces=machines) as world:
        without, with_slow_link = steps_off_the_link(world, machines[SLOW], "in step")
    assert max(with_slow_link) < min(without) / 3, f"{without} steps without the slow link, {with_slow_link} with it"
