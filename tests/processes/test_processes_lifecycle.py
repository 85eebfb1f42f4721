"""Becoming an agent and ceasing to be one, again and again, and side by side with torch.distributed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shoal
from shoal.runtime.agent import current
from support.agent_main import left_over
from support.limits import scaled
from support.world import World

SIZE = 3
NETWORK = {"SHOAL_TRANSPORT": "network"}
OVER = [
    pytest.param({}, id="shared_memory", marks=pytest.mark.transport("shared_memory")),
    pytest.param(NETWORK, id="network", marks=pytest.mark.transport("network")),
]


def average() -> float:
    """The mean of all ranks, if the agents are in step."""
    shoal.set_topology(shoal.topology.FullyConnectedGraph(shoal.size()))
    values = {shoal.neighbor_allreduce(torch.full((n,), float(shoal.rank())))[-1].item() for n in (1, 100_000)}
    [value] = values
    return value


def agents_three_times() -> tuple[list[float], list[str]]:
    values, left = [], []
    for _ in range(3):
        shoal.init()
        values.append(average())
        shoal.shutdown()
        left += left_over()
    return values, left


@pytest.mark.parametrize("environment", OVER)
def test_init_works_again_after_shutdown_and_nothing_is_left_between(environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment, init=False) as world:
        assert world.results(agents_three_times) == [([1.0] * 3, [])] * SIZE


def init_twice() -> bool:
    shoal.init()
    first = current()
    shoal.init(lambda size: shoal.topology.RingGraph(size, connect_style=2))
    assert shoal.topology.IsTopologyEquivalent(shoal.load_topology(), shoal.topology.RingGraph(SIZE, connect_style=2))
    return current() is first


@pytest.mark.transport("shared_memory")
def test_a_second_init_keeps_the_agent_and_sets_the_topology() -> None:
    with World(SIZE, init=False) as world:
        assert world.results(init_twice) == [True] * SIZE
        assert world.results(average) == [1.0] * SIZE


def operation_without_an_agent() -> None:
    shoal.neighbor_allreduce(torch.ones(3))


@pytest.mark.transport("shared_memory")
def test_operations_before_init_and_after_shutdown_raise_with_the_remedy() -> None:
    with World(2, init=False) as world:
        for turn in ("before", "after"):
            for one in world.run(operation_without_an_agent):
                assert one.error == "NotInitialized", turn
                assert "shoal.init()" in one.message
            world.results(shoal.init)
            world.results(shoal.shutdown)


@pytest.mark.transport("shared_memory")
def test_shutdown_without_an_agent_does_nothing() -> None:
    with World(1, init=False) as world:
        world.results(shoal.shutdown)


def test_an_agent_absent_from_init_is_named_at_the_deadline() -> None:
    # Not less: to connect to the store takes a second where no name server answers, for the name of 127.0.0.1.
    with World(SIZE, init=False, timeout=4.0) as world:
        for one in world.run(shoal.init, on=[0, 1]):
            assert one.error == "DeadlineExceeded", one.trace
            assert one.ranks == (2,), one.message
            assert one.seconds < scaled(7.0)


def init_within(seconds: float) -> None:
    os.environ["SHOAL_TIMEOUT"] = str(seconds)
    shoal.init()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("third_starts", "expected_message", "ranks"),
    [
        (False, "ranks [2] never came; ranks [1] came, and gave up before. Check", (2,)),
        (True, "on rank 0: ranks [1] came, and gave up before. Check", (1,)),
    ],
)
def test_an_agent_that_gave_up_before_is_not_reported_absent(
    third_starts: bool, expected_message: str, ranks: tuple[int, ...]
) -> None:
    """The third agent starts after the other has given up, so the result depends on the record and not on timing."""
    with World(SIZE, init=False) as world:
        early = world.run_on(1, init_within, 4.0)
        leader = world.run_on(0, init_within, 12.0)
        assert early.outcome().ranks == (2,)
        late = world.run_on(2, init_within, 12.0) if third_starts else None
        outcome = leader.outcome()
        assert (outcome.error, outcome.ranks) == ("DeadlineExceeded", ranks), outcome
        assert expected_message in outcome.message
        if late is not None:  # rank 0 waits until it has read why
            late_outcome = late.outcome()
            assert (late_outcome.error, late_outcome.ranks) == ("DeadlineExceeded", (1,)), late_outcome


# torch.distributed


def _process_group(**options: Any) -> None:
    dist.init_process_group("gloo", **options)


def _sum_of_ranks() -> float:
    numbers = torch.full((1000,), float(dist.get_rank()))
    dist.all_reduce(numbers)
    return float(numbers[-1])


def use_beside_a_process_group() -> tuple[float, float]:
    _process_group()
    before = (dist.distributed_c10d._get_default_group(), dist.distributed_c10d._get_default_store())
    threads = torch.get_num_threads()
    shoal.init()
    value = average()
    # Both at the same time.
    handle = shoal.nonblocking.neighbor_allreduce(torch.full((300_000,), float(shoal.rank())), name="beside")
    total = _sum_of_ranks()
    assert handle.wait()[-1].item() == value
    shoal.shutdown()
    after = (dist.distributed_c10d._get_default_group(), dist.distributed_c10d._get_default_store())
    assert (after[0] is before[0], after[1] is before[1]) == (True, True)
    assert dist.get_backend() == "gloo" and torch.get_num_threads() == threads
    assert _sum_of_ranks() == total
    dist.destroy_process_group()
    return value, total


@pytest.mark.parametrize("environment", OVER)
def test_an_existing_process_group_is_not_changed(environment: dict[str, str]) -> None:
    world = World(SIZE, environment=environment, init=False)
    try:
        assert world.results(use_beside_a_process_group) == [(1.0, 3.0)] * SIZE
    finally:
        world.destroy()  # what Gloo leaves behind is not ours to judge


def make_a_process_group_later() -> list[float]:
    shoal.init()
    values = [average()]
    _process_group()
    values += [_sum_of_ranks(), average()]
    shoal.shutdown()
    values.append(_sum_of_ranks())
    shoal.init()  # now through the store of the process group
    values.append(average())
    dist.destroy_process_group()
    values.append(average())
    shoal.shutdown()
    return values


@pytest.mark.parametrize("environment", OVER)
def test_a_process_group_can_be_created_on_the_same_port_after_init(environment: dict[str, str]) -> None:
    world = World(SIZE, environment=environment, init=False)
    try:
        assert world.results(make_a_process_group_later) == [[1.0, 3.0, 1.0, 3.0, 1.0, 1.0]] * SIZE
    finally:
        world.destroy()


def learn_from_the_process_group(file: Path) -> tuple[int, int, float]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    _process_group(init_method=f"file://{file}", rank=rank, world_size=size)
    shoal.init()
    value = shoal.rank(), shoal.size(), average()
    shoal.shutdown()
    dist.destroy_process_group()
    return value


@pytest.mark.transport("shared_memory")
def test_without_any_variable_a_process_group_gives_rank_and_size(tmp_path: Path) -> None:
    world = World(SIZE, init=False)
    try:
        result = world.results(learn_from_the_process_group, tmp_path / "store")
        assert result == [(rank, SIZE, 1.0) for rank in range(SIZE)]
    finally:
        world.destroy()
