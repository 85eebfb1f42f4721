"""``on_loss="continue"``: agents are killed at swept points, and the survivors compute the expected results."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import shoal
from shoal.runtime.agent import current
from shoal.transport.link import Link
from support.fault_points import Point, over_both, swept
from support.limits import scaled
from support.survivors import (
    CONTINUE,
    average_through,
    burst_through,
    check_all_equal,
    check_averages,
    sums_through,
    survivors,
)
from support.world import World

SIZE, VICTIM = 5, 2
SMALL, LARGE = 16, 100_000
ROUNDS = 20

SWEPT = [
    *(Point("submitted", k) for k in (1, 2, 7)),
    *(Point("sent", k) for k in (1, 2, 9, 24)),
    *(Point("received", k) for k in (2, 9, 31)),
    *(Point("summed", k) for k in (1, 2, 3, 8)),
    *(Point("finished", k) for k in (2, 5, 6)),
    *(Point("waited", k) for k in (3, 6)),
]
SECONDS = 1.0
"""In which the survivors continue."""


def a_few_rounds(count: int) -> float:
    for _ in range(count):
        mean = shoal.allreduce(torch.ones(3))
    return float(mean[0])


def rounds_until_it_has_departed(victim: int) -> float:
    """Average until somebody takes part no more; when that was known, as ``time.monotonic()``."""
    members = [victim]
    while victim in members:
        shoal.neighbor_allreduce(torch.ones(3))
        members = shoal.allgather(torch.tensor([shoal.rank()])).tolist()
    return time.monotonic()


@swept(SWEPT[::2], (SMALL, LARGE))
def test_survivors_continue_wherever_one_agent_is_killed(environment: dict[str, str], numel: int, point: Point) -> None:
    check_survivors(environment, numel, point)


@pytest.mark.soak
@swept(SWEPT[1::2], (SMALL, LARGE))
def test_survivors_continue_at_the_remaining_kill_points(environment: dict[str, str], numel: int, point: Point) -> None:
    check_survivors(environment, numel, point)


def check_survivors(environment: dict[str, str], numel: int, point: Point) -> None:
    with World(SIZE, environment=environment | CONTINUE) as world:
        outcomes = world.run(average_through, numel, ROUNDS, {VICTIM: point})
        logs = survivors(outcomes, {VICTIM})
        check_all_equal(logs, SIZE)
        check_averages({rank: log.values for rank, log in logs.items()}, SIZE, VICTIM)


@over_both
@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("count", [1, pytest.param(5, marks=pytest.mark.soak), 14])
def test_on_a_directed_graph_the_mean_of_the_survivors_is_unbiased(
    environment: dict[str, str], numel: int, count: int
) -> None:
    with World(SIZE, environment=environment | CONTINUE) as world:
        outcomes = world.run(average_through, numel, 40, {VICTIM: Point("sent", 10 + count)}, True)
        logs = survivors(outcomes, {VICTIM})
        values = {rank: log.values for rank, log in logs.items()}
        check_averages(values, SIZE, VICTIM, directed=True)
        means = [sum(value[k] for value in values.values()) / len(values) for k in range(len(values[0]))]
        assert max(means[20:]) - min(means[20:]) < 1e-12
        assert max(abs(value[-1] - means[-1]) for value in values.values()) < 1e-6


@over_both
@pytest.mark.parametrize("numel", [SMALL, pytest.param(5_000, marks=pytest.mark.soak), LARGE])
@pytest.mark.parametrize("count", [3, 40, 77])
def test_with_many_calls_in_flight_each_continues(environment: dict[str, str], numel: int, count: int) -> None:
    with World(SIZE, environment=environment | CONTINUE) as world:
        sent = 1 + count // 3 if numel == SMALL else count  # small ones travel together: two messages a round
        outcomes = world.run(burst_through, numel, ROUNDS, {VICTIM: Point("sent", sent)})
        seen = survivors(outcomes, {VICTIM})
        for k in range(8):
            check_averages({rank: [value[k] for value in values] for rank, values in seen.items()}, SIZE, VICTIM)


@over_both
@pytest.mark.parametrize("victim", [0, VICTIM])
@pytest.mark.parametrize(
    "point",
    [
        Point("sent", 1),
        Point("sent", 3),
        pytest.param(Point("sent", 17), marks=pytest.mark.soak),
        Point("received", 4),
        pytest.param(Point("received", 22), marks=pytest.mark.soak),
        Point("summed", 2),
        Point("finished", 3),
        pytest.param(Point("finished", 90), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_fused_bursts_give_all_survivors_the_same(environment: dict[str, str], victim: int, point: Point) -> None:
    """Also if the owner of all the sums is killed, before or after it has sent some of them."""
    with World(SIZE, environment=environment | CONTINUE) as world:
        seen = survivors(world.run(sums_through, 12, {victim: point}), {victim})
    first, *others = seen.values()
    assert all(other == first for other in others)
    of_all = 2.0**SIZE - 1
    assert {one for sums in first for one in sums} <= {of_all, of_all - 2.0**victim}
    assert first[-1] == [of_all - 2.0**victim] * 8


@over_both
@pytest.mark.parametrize("victims", [(1, 4), (0, 1), (0, 2, 3)])
@pytest.mark.parametrize("apart", [0, pytest.param(1, marks=pytest.mark.soak), 30])
def test_several_are_killed_at_once_or_one_after_another(
    environment: dict[str, str], victims: tuple[int, ...], apart: int
) -> None:
    with World(6, environment=environment | CONTINUE) as world:
        ends = {rank: Point("received", 40 + apart * number) for number, rank in enumerate(victims)}
        logs = survivors(world.run(average_through, SMALL, ROUNDS, ends), set(victims))
        check_all_equal(logs, 6)


@over_both
def test_the_last_survivor_continues_alone(environment: dict[str, str]) -> None:
    with World(3, environment=environment | CONTINUE) as world:
        ends = {0: Point("sent", 20), 2: Point("received", 26)}
        logs = survivors(world.run(average_through, SMALL, ROUNDS, ends), {0, 2})
        check_all_equal(logs, 3)
        assert abs(logs[1].values[-1] - logs[1].values[-2]) < 1e-12


@over_both
def test_survivors_continue_within_a_second(environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment | CONTINUE) as world:
        world.results(a_few_rounds, 20)
        pending = [world.run_on(rank, rounds_until_it_has_departed, VICTIM) for rank in range(SIZE)]
        time.sleep(0.3)
        died = world.kill(VICTIM)
        outcomes = [one.outcome() for one in pending]
        result = survivors(outcomes, {VICTIM})
        for rank, ended in result.items():
            assert ended - died < scaled(SECONDS), f"rank {rank} went on after {ended - died:.2f} s"
        assert world.results(a_few_rounds, 3, on=world.alive) == [4 / 4] * 4


def average_beside_a_refused_link(victim: int) -> tuple[float, float]:
    """Rank 0 cannot open its link to the victim, which dies, before any agent counts it as lost."""
    shoal.set_topology(shoal.topology.FullyConnectedGraph(shoal.size()))
    pid = int(shoal.broadcast(torch.tensor(os.getpid()), victim))
    if shoal.rank() == victim:
        time.sleep(60)  # rank 0 kills it
    if shoal.rank() == 0:
        router = current("test").engine.router
        opened = router.link

        def link(peer: int) -> Link:
            if peer == victim:
                raise ConnectionRefusedError("refused by the test")
            return opened(peer)

        with current("test").engine.lock:
            before = router.links.pop(victim)
            router.link = link  # type: ignore[method-assign]
            os.kill(pid, signal.SIGKILL)
    mean = shoal.neighbor_allreduce(torch.ones(3), name="mean", timeout=3600)
    if shoal.rank() == 0:
        before.close()
    return float(mean[0]), float(shoal.allreduce(torch.ones(3), average=False, timeout=3600)[0])


@over_both
def test_an_agent_that_cannot_connect_to_the_failed_one_sends_to_the_others(environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment | CONTINUE) as world:
        outcomes = world.run(average_beside_a_refused_link, VICTIM)
        left = [outcome for outcome in outcomes if outcome.rank != VICTIM]
        assert [one.value for one in left] == [(1.0, SIZE - 1.0)] * (SIZE - 1), [one.message for one in left]
