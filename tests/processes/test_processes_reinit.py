"""An ``init`` that failed and is tried again: it meets the others, or all learn in words what happened."""

from __future__ import annotations

import os
import time

import pytest
import torch

import shoal
from support.limits import scaled
from support.world import World

SIZE = 3


def average() -> float:
    shoal.set_topology(shoal.topology.FullyConnectedGraph(shoal.size()))
    return shoal.neighbor_allreduce(torch.tensor([float(shoal.rank())])).item()


def init_and_average() -> float:
    shoal.init()
    return average()


def give_up_and_try_again() -> float:
    """The first attempt is over before the late ones come."""
    os.environ["SHOAL_TIMEOUT"] = "0.7"
    with pytest.raises(shoal.DeadlineExceeded):
        shoal.init()
    os.environ["SHOAL_TIMEOUT"] = "20"
    return init_and_average()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("early", "served"),
    [
        ([0], False),
        ([1], True),
        ([0, 1], True),
        ([1, 2], False),
        *(
            pytest.param(*one, marks=pytest.mark.soak)
            for one in (([0], True), ([1], False), ([0, 1], False), ([1, 2], True))
        ),
    ],
    ids=str,
)
def test_agents_that_gave_up_connect_to_late_ones_on_a_second_try(early: list[int], served: bool) -> None:
    late = [rank for rank in range(SIZE) if rank not in early]
    world = World(SIZE, init=False)
    try:
        if served:
            world.results(lend)
        pending = [world.run_on(rank, give_up_and_try_again) for rank in early]
        time.sleep(2.0)
        outcomes = world.run(init_and_average, on=late)
        assert [outcome.value for outcome in outcomes] == [1.0] * len(late), "".join(
            outcome.trace for outcome in outcomes
        )
        for one in [one.outcome() for one in pending]:
            assert one.value == 1.0, one.trace
        assert world.results(shut_down_and_begin_again) == [1.0] * SIZE
    finally:
        world.destroy()  # what Gloo leaves behind is not ours to judge


def lend() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")


def shut_down_and_begin_again() -> float:
    shoal.shutdown()
    return init_and_average()


def init_with_a_bad_interface() -> None:
    os.environ["SHOAL_INTERFACE"] = "nowhere0"
    try:
        shoal.init()
    finally:
        del os.environ["SHOAL_INTERFACE"]


@pytest.mark.parametrize("odd", [0, 2])
def test_all_get_one_agents_error_at_once_and_connect_on_a_second_try(odd: int) -> None:
    others = [rank for rank in range(SIZE) if rank != odd]
    with World(SIZE, init=False, environment={"SHOAL_TRANSPORT": "network"}) as world:
        pending = [world.run_on(rank, shoal.init) for rank in others]
        failed = world.run_on(odd, init_with_a_bad_interface).outcome()
        assert failed.error == "ValueError" and "nowhere0" in failed.message, failed.trace
        for one in [one.outcome() for one in pending]:
            assert one.error == "PeerLost", one.trace
            assert one.ranks == (odd,)
            assert "nowhere0" in one.message and f"rank {odd} failed" in one.message
            assert one.seconds < scaled(5.0)
        assert world.results(init_and_average) == [1.0] * SIZE


def test_an_agent_that_retries_alone_is_told_that_the_others_do_not() -> None:
    with World(2, init=False, environment={"SHOAL_TRANSPORT": "network"}, timeout=3.0) as world:
        pending = world.run_on(0, shoal.init)
        assert world.run_on(1, init_with_a_bad_interface).outcome().error == "ValueError"
        assert pending.outcome().error == "PeerLost"
        [again] = world.run(shoal.init, on=[1])
        assert again.error == "DeadlineExceeded", again.trace
        assert again.ranks == (0,)
        assert again.seconds < scaled(6.0)


def leave_and_begin_again_early() -> float:
    shoal.shutdown()
    time.sleep(0.3 * (SIZE - 1 - shoal_rank()))
    return init_and_average()


def shoal_rank() -> int:
    return int(os.environ["RANK"])


def test_agents_that_restart_before_rank_0_wait_for_it() -> None:
    with World(SIZE) as world:
        for _ in range(3):
            assert world.results(leave_and_begin_again_early) == [1.0] * SIZE
