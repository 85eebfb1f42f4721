"""Windows between machines: shared memory inside each, the owner's service between them, and the same contract."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from support.histories import check_all, merged
from support.namespaces import network_namespaces
from support.window_agents import (
    READS,
    WRITES,
    Flow,
    Mass,
    Program,
    every_operation,
    first_mass,
    move_mass,
    record_history,
    starts,
    times_in_mutex,
)
from support.world import World

pytestmark = [
    pytest.mark.transport("shared_memory"),
    pytest.mark.transport("network"),
    pytest.mark.transport("namespaces"),
]


@pytest.fixture(scope="module", params=[1, 2], ids=["1 agent each", "2 agents each"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Two machines of one agent, or two, each."""
    with network_namespaces(2) as machines, World(2 * request.param, namespaces=machines) as made:
        yield made


@pytest.mark.parametrize("numel", [1, 300_000])
def test_every_operation_has_its_documented_result(world: World, numel: int) -> None:
    result = world.results(every_operation, numel)
    for me, slots in enumerate(result):
        others = [rank for rank in range(world.size) if rank != me]
        assert slots["put"] == [10.0 * (j + 1) * (me + 1) for j in others]
        assert slots["accumulate"] == [(j + 1) * (10.0 * (me + 1) + 1) for j in others]
        assert slots["collect"] == [0.0] * len(others)
        assert slots["get"] == [collected(j, world.size) / 2 for j in others]


def collected(rank: int, size: int) -> float:
    """An agent's value after it has collected all puts and accumulates of the others."""
    return rank + 1 + sum((j + 1) * (10.0 * (rank + 1) + 1) for j in range(size) if j != rank)


def test_a_mutex_excludes_agents_of_both_machines(world: World) -> None:
    times = sorted(itertools.chain(*world.results(times_in_mutex, 30)))
    assert len(times) == 30 * world.size
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(times))


@pytest.mark.parametrize("threads", [1, 2])
def test_mass_is_conserved_exactly(world: World, threads: int) -> None:
    flow = Flow(phases=3, operations=120, threads=threads)
    result: list[list[Mass]] = world.results(move_mass, flow)
    first = [sum(one) for one in zip(*(first_mass(rank, flow.numel) for rank in range(world.size)), strict=True)]
    for now in zip(*result, strict=True):
        assert [sum(one) for one in zip(*(mass.values for mass in now), strict=True)] == first
        assert sum(mass.p for mass in now) == world.size


@pytest.mark.parametrize("require_mutex", [False, True], ids=["", "mutex"])
@pytest.mark.parametrize(("numel", "operations"), [(1, 80), (100_000, 15)])
def test_slots_are_linearizable(world: World, numel: int, operations: int, require_mutex: bool) -> None:
    kinds = (*WRITES, "get", *READS)
    program = Program(numel, operations, 2, kinds, require_mutex, seed=numel, dtype=torch.int64)
    check_all(merged(world.results(record_history, program)), starts(world.size))
