"""Training through windows when an agent is killed, or ends before the others: all stop, and name that agent.

Agents that learn of it from a survivor stop too: it closes its optimizer or leaves, and its windows are gone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
import torch

import shoal
from support import fault_points
from support.agent_main import Outcome, die
from support.fault_points import Point
from support.limits import scaled
from support.window_points import PLACES, arm_write, open_window
from support.world import World

SIZE, VICTIM = 5, 1
REST = [0, 2, 3, 4]
LARGE = 600_000
OVER = pytest.mark.parametrize(
    "transport",
    [
        pytest.param("shared_memory", marks=pytest.mark.transport("shared_memory")),
        pytest.param("network", marks=pytest.mark.transport("network")),
    ],
)
OPTIMIZERS = {
    "put": shoal.optim.DistributedWinPutOptimizer,
    "get": shoal.optim.DistributedPullGetOptimizer,
    "push": shoal.optim.DistributedPushSumOptimizer,
    "pairs": shoal.optim.DistributedADPSGDOptimizer,
}
KIND = pytest.mark.parametrize("kind", OPTIMIZERS)
Ended = tuple[str, tuple[int, ...], str]
"""The class of an error, its ranks, and its text."""


def train(kind: str, steps: int | None, then: str, at: Callable[[int], object] = lambda step: None) -> Ended:
    """Train on a ring for some steps, or until an error, which it returns, and ``then`` close, leave, or do nothing."""
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    model = torch.nn.Linear(100, 100)
    optimizer = OPTIMIZERS[kind](torch.optim.SGD(model.parameters(), lr=0.01), model)
    x = torch.ones(4, 100)
    result: Ended = ("", (), "")
    try:
        for step in range(steps) if steps is not None else itertools.count():
            at(step)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            time.sleep(0.001)
    except shoal.ShoalError as error:
        result = type(error).__name__, error.ranks, str(error)
    if then == "close":
        optimizer.close()
    elif then == "leave":
        shoal.shutdown()
    return result


def train_and_die(kind: str, place: str, step: int) -> None:
    """Die at a given place in a write: one of this process, or one executed for another machine's agent."""

    def at(now: int) -> None:
        if now == step:
            arm_write(place) if kind != "get" else arm_write("locked")
        elif now == step + 50:  # nobody has written anything
            die()

    train(kind, None, "", at)


def assert_all_name(rank: int, ended: list[Outcome], error: str = "PeerLost") -> None:
    for one in ended:
        assert not one.error, one.trace
        kind, ranks, output = one.value
        assert (kind, ranks) == (error, (rank,)), f"rank {one.rank}: {kind} {ranks}: {output}"
        assert f"rank {rank}" in output


@pytest.mark.parametrize(("then", "place"), [("close", PLACES[0]), ("leave", PLACES[2]), ("nothing", PLACES[4])])
@KIND
@OVER
def test_all_agents_that_end_name_the_killed_one(transport: str, kind: str, then: str, place: str) -> None:
    """An agent that needs neither it nor an agent that ended because of it continues."""
    with World(SIZE, environment={"SHOAL_TRANSPORT": transport}) as world:
        ending = [0, 2] if then == "nothing" else REST
        others = [rank for rank in REST if rank not in ending]
        training = {rank: world.run_on(rank, train, kind, 200 if rank in others else None, then) for rank in REST}
        dead = world.run_on(VICTIM, train_and_die, kind, place, 10).outcome()
        assert dead.error == "Died", dead.trace
        ended = [training[rank].outcome() for rank in ending]
        assert_all_name(VICTIM, ended)
        assert max(one.ended for one in ended) - dead.ended < scaled(5.0)
        for rank in others:
            assert training[rank].outcome().value == ("", (), "")


@pytest.mark.transport("network")
def test_an_owner_killed_during_its_reply_is_named_at_once() -> None:
    with World(3, environment={"SHOAL_TRANSPORT": "network"}) as world:
        world.results(open_window, LARGE)
        world.results(fault_points.arm, Point("Chunk out", 2), on=[VICTIM])
        reader = world.run_on(0, shoal.bluefog.win_get, "window", {VICTIM: 1.0})
        dead = world.run_on(VICTIM, time.sleep, 60).outcome()
        assert dead.error == "Died", dead.trace
        got = reader.outcome()
        assert (got.error, got.ranks) == ("PeerLost", (VICTIM,)), got.trace
        assert got.ended - dead.ended < scaled(2.0)


@KIND
@OVER
def test_an_agent_that_has_fewer_batches_and_leaves_is_named(transport: str, kind: str) -> None:
    with World(SIZE, environment={"SHOAL_TRANSPORT": transport}) as world:
        training = [world.run_on(rank, train, kind, None, "leave") for rank in REST]
        assert world.run_on(VICTIM, train, kind, 10, "leave").outcome().value == ("", (), "")
        ended = {one.rank: one for one in [each.outcome() for each in training]}
        assert all(value.value[0] == "PeerLost" for value in ended.values()), ended
        assert_all_name(VICTIM, [ended[rank] for rank in REST])


def test_agents_that_are_threads_name_the_one_that_had_fewer_batches(fleet: Callable[..., shoal.Fleet]) -> None:
    def run() -> Ended:
        return train("push", 10 if shoal.rank() == VICTIM else None, "leave")

    ended = fleet(SIZE).run(run)
    assert [kind for kind, _, _ in ended] == ["" if rank == VICTIM else "PeerLost" for rank in range(SIZE)]
    assert [ended[rank][1] for rank in REST] == [(VICTIM,)] * len(REST)


@OVER
def test_push_sum_does_not_wait_for_an_agent_that_has_ended_its_loop(transport: str) -> None:
    """It takes no further step and keeps the mass that it receives. The others soon have too little to send."""
    with World(3, environment={"SHOAL_TRANSPORT": transport}, timeout=3.0) as world:
        training = [world.run_on(rank, train, "push", None, "nothing") for rank in (0, 2)]
        world.results(train, "push", 10, "nothing", on=[VICTIM])
        ended = [one.outcome() for one in training]
        assert_all_name(VICTIM, ended, "DeadlineExceeded")
        assert "optimizer.join()" in ended[0].value[2]
