"""Agents join a run on ranks that it did not begin with, and all end where they would have from the beginning."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal import topology_util
from shoal.algorithms import ExactDiffusion, GradientDescent, GradientTracking, ParallelGradientDescent
from shoal.coordination.ordering import CollectiveOrdering
from shoal.runtime.agent import current
from shoal.topology import Static, Without
from support import PROCESS_GROUP
from support.fault_points import Point, arm, over_both
from support.limits import scaled
from support.namespaces import network_namespaces
from support.rejoin import train
from support.surviving_training import RATE, Point3, optimum, resting_place, step_of, steps_of_training
from support.survivors import CONTINUE
from support.world import Pending, World

SIZE, BEGIN = 4, 2
WAYS: dict[str, dict[str, Any]] = {
    "ATC": {"algorithm": GradientDescent(1.0)},
    "gradients": {"algorithm": ParallelGradientDescent(1.0)},
    "tracking": {"algorithm": GradientTracking(1.0)},
    "exact diffusion": {"algorithm": ExactDiffusion(1.0, lazy=True)},
}
RING = Static(topology_util.RingGraph(SIZE))


def where_it_ends(way: str) -> np.ndarray:
    """The parameters of all agents, [agents, 3]."""
    if way == "ATC":
        return resting_place(RING, SIZE, [], overlapping=False)
    return np.tile(optimum(list(range(SIZE))), (SIZE, 1))


def beginners(environment: dict[str, str], size: int = SIZE) -> World:
    return World(size, environment=environment | CONTINUE, restarts=True, begin_with=BEGIN)


def ends(pending: list[Pending]) -> list[Any]:
    outcomes = [one.outcome(60.0) for one in pending]
    failed = [
        f"rank {outcome.rank}: {outcome.error}: {outcome.message}\n{outcome.trace}"
        for outcome in outcomes
        if outcome.error
    ]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]


@pytest.mark.transport(PROCESS_GROUP)
@pytest.mark.parametrize("way", ["ATC", pytest.param("exact diffusion", marks=[pytest.mark.soak])])
def test_agents_join_over_process_groups(way: str) -> None:
    test_two_join_one_after_another_and_all_reach_the_joint_optimum(way, {"SHOAL_TRANSPORT": PROCESS_GROUP})


@over_both
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.soak] if way in ("gradients", "tracking") else []) for way in WAYS]
)
def test_two_join_one_after_another_and_all_reach_the_joint_optimum(way: str, environment: dict[str, str]) -> None:
    draw = random.Random(way)
    with beginners(environment) as world:
        pending = [world.run_on(rank, train, WAYS[way], None, SIZE - BEGIN) for rank in range(BEGIN)]
        for _ in range(SIZE - BEGIN):
            time.sleep(draw.uniform(0.05, 0.3))
            pending.append(world.run_on(world.join(), train, WAYS[way], None, SIZE - BEGIN))
        seen = ends(pending)
    assert np.abs(np.array([one.x for one in seen]) - where_it_ends(way)).max() < 1e-8
    assert seen[0].changes == [((), (2,)), ((), (3,))] or seen[0].changes == [((), (2, 3))]
    began, x = seen[2].began
    assert began > 0 and x in [one.at.get(began) for one in seen[:2]], "it begins with the parameters of one of them"
    assert len({one.steps for one in seen}) == 1


@pytest.mark.transport(PROCESS_GROUP)
def test_a_joining_agent_takes_no_part_in_a_coordination_round_that_some_have_started() -> None:
    """One agent has started a round for its request. The other requests the same while both admit a third agent."""
    with beginners({"SHOAL_TRANSPORT": PROCESS_GROUP}) as world:
        pending = [world.run_on(rank, ask_across_an_entry) for rank in range(BEGIN)]
        pending.append(world.run_on(world.join(), ask_across_an_entry))
        result = ends(pending)
    assert [one[-1] for one in result] == [2.0] * 3, "the mean of all three"
    assert len(result[0]) > 1 and set(result[0][:-1]) == {1.5} and result[1] == result[0], "those before, of two"


def ask_across_an_entry() -> list[float]:
    """Call what is in flight while all let in who asks, until there are three; then once more. The results."""
    due, late = CollectiveOrdering.due.fget, [False]  # type: ignore[attr-defined]
    assert due is not None

    def is_late(order: CollectiveOrdering) -> bool:
        return late[0] and order._until is None and len(order._engine.membership.view.alive) < 3

    CollectiveOrdering.due = property(lambda order: not is_late(order) and due(order))  # type: ignore[method-assign]
    checkpoint = shoal.Checkpoint(model=Point3())
    step = checkpoint.load(None, missing_ok=True)
    x, result, limit = torch.full((100_000,), shoal.rank() + 1.0), list[float](), time.monotonic() + 40.0
    while len(shoal.alive()) < 3:
        late[0] = shoal.rank() == 1
        handle = shoal.nonblocking.allreduce(x, name="across")
        step += 1
        checkpoint.save(None, step)
        late[0] = False
        result.append(handle.wait()[0].item())
        time.sleep(0.01)
        assert time.monotonic() < limit
    return [*result, shoal.allreduce(x, name="all").mean().item()]


@over_both
def test_two_agents_join_at_once(environment: dict[str, str]) -> None:
    with beginners(environment) as world:
        ranks = [*range(BEGIN), *(world.join() for _ in range(SIZE - BEGIN))]
        pending = [world.run_on(rank, train, WAYS["tracking"], None, SIZE - BEGIN) for rank in ranks]
        seen = ends(pending)
    assert np.abs(np.array([one.x for one in seen]) - where_it_ends("tracking")).max() < 1e-8
    entered = [sorted(rank for _, ranks in one.changes for rank in ranks) for one in seen[:BEGIN]]
    assert entered == [[2, 3]] * BEGIN


@over_both
@pytest.mark.parametrize("point", [Point("received", 3), Point("sent", 2), Point("received", 12)])
def test_an_agent_killed_while_joining_does_not_affect_the_others(point: Point, environment: dict[str, str]) -> None:
    """The next agent that joins on another rank is admitted normally."""
    with beginners(environment) as world:
        pending = [world.run_on(rank, until_three_are_members) for rank in range(BEGIN)]
        dies = world.run_on(world.join(), die_entering, point)
        assert dies.outcome(60.0).error == "Died"
        pending.append(world.run_on(world.join(), until_three_are_members))
        assert ends(pending) == [(0, 1, 3)] * 3


def until_three_are_members() -> tuple[int, ...]:
    """Train until the last rank is a member, and then a few more steps, on the data of all members."""
    model = Point3()
    optimizer = shoal.DecentralizedOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE), model, **WAYS["tracking"], topology=RING
    )
    checkpoint = shoal.Checkpoint(model=model, optimizer=optimizer)
    step = checkpoint.load(None, missing_ok=True)
    take, limit, last = step_of(optimizer, model), time.monotonic() + 40.0, 0
    while not last or step < last:
        take()
        step += 1
        if not last and 3 in (present := shoal.alive()) and 2 not in present:
            last = step + 200
        if step % 10 == 0:
            checkpoint.save(None, step)
            time.sleep(0 if last else 0.01)
        assert time.monotonic() < limit
    assert np.abs(model.x.detach().numpy() - optimum(list(shoal.alive()))).max() < 1e-8
    return shoal.alive()


def die_entering(point: Point) -> None:
    arm(point)
    until_three_are_members()


@over_both
def test_a_job_without_joining_agents_equals_a_fixed_one(environment: dict[str, str]) -> None:
    with beginners(environment) as world:
        for way in ("ATC", "tracking"):
            result = np.array(world.results(last_of_training, WAYS[way]))
            present = list(range(BEGIN))
            if way == "ATC":
                expected = resting_place(RING, SIZE, [2, 3], overlapping=False)[present]
            else:
                expected = np.tile(optimum(present), (BEGIN, 1))
            assert np.abs(result - expected).max() < 1e-8


def last_of_training(options: dict[str, Any]) -> list[float]:
    *_, last = steps_of_training(lambda: None, options)
    return last


@over_both
def test_operations_include_exactly_the_members(environment: dict[str, str]) -> None:
    rounds = Without(RING, [2, 3]).matrix(0)
    with beginners(environment) as world:
        for rank, result in enumerate(world.results(operations)):
            assert result == {
                "size": SIZE,
                "alive": (0, 1),
                "mean": 0.5,
                "all": [0, 1],
                "neighbours": float(rounds[rank] @ np.arange(SIZE)),
                "root": "PeerLost",
                "machines": "ValueError",
                "dealt": 5,
                "gone": "rank 3 has not come yet",
            }


def operations() -> dict[str, Any]:
    shoal.set_topology(topology_util.RingGraph(shoal.size()), is_weighted=True)
    x = torch.tensor([float(shoal.rank())], dtype=torch.float64)
    shoal.barrier()
    return {
        "size": shoal.size(),
        "alive": shoal.alive(),
        "mean": shoal.allreduce(x).item(),
        "all": shoal.allgather(x).tolist(),
        "neighbours": shoal.neighbor_allreduce(x).item(),
        "root": error_of(lambda: shoal.broadcast(x, 3)),
        "machines": error_of(shoal.bluefog.machine_rank),
        "dealt": len(shoal.data.AgentSampler(range(10))),
        "gone": current().engine.membership.describe(3),
    }


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (shoal.ShoalError, ValueError) as error:
        return type(error).__name__
    return "none"


@over_both
def test_machines_average_between_them_also_with_joined_agents(environment: dict[str, str]) -> None:
    with beginners(environment | {"SHOAL_AGENTS_PER_MACHINE": "2"}) as world:
        pending = [world.run_on(rank, between_machines) for rank in range(BEGIN)]
        for _ in range(SIZE - BEGIN):
            pending.append(world.run_on(world.join(), between_machines))
        result = ends(pending)
    assert result == [(rank // 2, rank % 2, 1.5) for rank in range(SIZE)]


def between_machines() -> tuple[int, int, float]:
    shoal.bluefog.set_machine_topology(topology_util.FullyConnectedGraph(2))
    save_until_all_have_joined()
    x = torch.tensor([float(shoal.rank())])
    mean = shoal.bluefog.hierarchical_neighbor_allreduce(x)
    return shoal.bluefog.machine_rank(), shoal.local_rank(), mean.item()


def save_until_all_have_joined(sampler: shoal.data.AgentSampler | None = None) -> list[list[int]]:
    """Save until all are there; what was dealt before each."""
    model, dealt = torch.nn.Linear(1, 1), []
    checkpoint = shoal.Checkpoint(model=model, **({} if sampler is None else {"sampler": sampler}))
    step, limit = checkpoint.load(None, missing_ok=True), time.monotonic() + 40.0
    while len(shoal.allgather(torch.ones(1))) < shoal.size():
        dealt.append(list(sampler) if sampler is not None else [])
        step += 1
        time.sleep(0.01)
        checkpoint.save(None, step)
        assert time.monotonic() < limit
    return dealt


def dealt() -> list[int]:
    sampler = shoal.data.AgentSampler(range(40))
    save_until_all_have_joined(sampler)
    return list(sampler)


def test_the_data_are_distributed_among_joined_agents_too() -> None:
    with beginners({}) as world:
        pending = [world.run_on(rank, dealt) for rank in range(BEGIN)]
        pending += [world.run_on(world.join(), dealt) for _ in range(SIZE - BEGIN)]
        result = ends(pending)
    assert [len(one) for one in result] == [40 // BEGIN] * SIZE, "as many as before"
    assert sorted(number for one in result for number in one) == sorted(SIZE // BEGIN * list(range(40)))


def save_there(folder: Path) -> list[float]:
    model = Point3()
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model, **WAYS["tracking"])
    checkpoint = shoal.Checkpoint(model=model, optimizer=optimizer)
    take = step_of(optimizer, model)
    if checkpoint.load(folder, missing_ok=True):
        return model.x.tolist()
    for _ in range(7):
        take()
    checkpoint.save(folder, 7)
    return model.x.tolist()


def test_a_checkpoint_of_the_initial_agents_loads_into_the_same_number(tmp_path: Path) -> None:
    results = []
    for _ in range(2):
        with beginners({}) as world:
            results.append(world.results(save_there, tmp_path))
    assert results[0] == results[1]


def test_absent_spare_ranks_do_not_count_as_a_partition() -> None:
    """With SHOAL_ON_PARTITION=stop. Also if all initial agents have failed, and only a joined one is left."""
    with beginners({"SHOAL_ON_PARTITION": "stop"}, size=9) as world:
        pending = [world.run_on(rank, save_until, 3) for rank in range(BEGIN)]
        pending.append(world.run_on(world.join(), save_until, 3))
        ends(pending)
        waiting = world.run_on(2, save_until, 1)
        for rank in range(BEGIN):
            world.kill(rank)
            world.members[rank].outcome(5.0)
        assert waiting.outcome().value == (2,)


def save_until(present: int) -> tuple[int, ...]:
    checkpoint = shoal.Checkpoint(model=torch.nn.Linear(1, 1))
    step, limit = checkpoint.load(None, missing_ok=True), time.monotonic() + 20.0
    while len(shoal.allgather(torch.ones(1))) != present:
        step += 1
        checkpoint.save(None, step)
        time.sleep(0.01)
        assert time.monotonic() < limit
    return shoal.alive()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SHOAL_ON_LOSS": "raise"}, "which on_loss='raise' does not allow"),
        ({"SHOAL_SECRET": ""}, "they authenticate with SHOAL_SECRET"),
        ({"TORCHELASTIC_USE_AGENT_STORE": ""}, "a store that stays"),
        ({"SHOAL_BEGIN_WITH": "5"}, "SHOAL_BEGIN_WITH=5 must be 1 to 4"),
        ({"SHOAL_BEGIN_WITH": "0"}, "SHOAL_BEGIN_WITH=0 must be 1 to 4"),
        ({"SHOAL_BEGIN_WITH": "two"}, "SHOAL_BEGIN_WITH='two' is not a whole number"),
        ({"SHOAL_BEGIN_WITH": "1"}, "rank 1 is none of the 1 that the run begins with"),
    ],
)
def test_a_job_that_cannot_be_joined_is_refused(environment: dict[str, str], message: str) -> None:
    variables = CONTINUE | {"SHOAL_BEGIN_WITH": "2"} | environment
    with World(SIZE, environment=variables, restarts=True, begin_with=BEGIN, init=False) as world:
        output = world.run_on(1, shoal.init).outcome()
        assert output.error == "ValueError" and message in output.message, output


def test_without_members_joining_fails() -> None:
    with World(SIZE, environment=CONTINUE, restarts=True, begin_with=0, init=False, timeout=1.0) as world:
        world.join(init=False)
        began = time.monotonic()
        output = world.run_on(0, with_variables, {"RANK": "2", "SHOAL_BEGIN_WITH": "2"}).outcome()
        assert output.error == "DeadlineExceeded" and "did not connect in time" in output.message, output
        assert time.monotonic() - began < scaled(10.0)


def with_variables(variables: dict[str, str]) -> None:
    os.environ.update(variables)
    shoal.init()


def test_an_agent_that_has_left_cannot_rejoin_in_the_same_process() -> None:
    with beginners({}) as world:
        world.join()
        output = world.run_on(2, leave_and_begin).outcome()
        assert output.error == "ShoalError" and "a new process can join" in output.message, output


def leave_and_begin() -> None:
    shoal.shutdown()
    shoal.init()


def listens() -> tuple[str, int]:
    agent = current()
    endpoint = agent.engine.router.endpoints[agent.rank]
    return endpoint.host, endpoint.port


def test_a_single_machine_job_has_no_listener_for_joining_agents_and_the_error_says_so() -> None:
    with beginners({}) as world:
        assert world.results(listens) == [("", 0)] * BEGIN
        world.join(init=False)
        output = world.run_on(2, with_variables, {"SHOAL_TRANSPORT": "network"}).outcome()
        assert output.error == "ValueError" and "cannot reach ranks [0, 1]" in output.message, output
    with beginners({"SHOAL_TRANSPORT": "network"}) as world:
        assert {host for host, _ in world.results(listens)} == {"127.0.0.1"}


def test_a_joining_agent_with_other_settings_is_refused_with_a_message() -> None:
    with beginners({}) as world:
        world.join(init=False)
        output = world.run_on(2, with_variables, {"SHOAL_AGENTS_PER_MACHINE": "2"}).outcome()
        assert output.error == "Mismatch" and "SHOAL_AGENTS_PER_MACHINE is 2 here and None" in output.message, output


@pytest.mark.transport("namespaces")
def test_agents_of_another_machine_join() -> None:
    with (
        network_namespaces(2) as namespaces,
        World(
            SIZE, environment=CONTINUE, namespaces=namespaces, restarts=True, begin_with=BEGIN, timeout=30.0
        ) as world,
    ):
        pending = [world.run_on(rank, train, WAYS["tracking"], None, SIZE - BEGIN) for rank in range(BEGIN)]
        for _ in range(SIZE - BEGIN):
            pending.append(world.run_on(world.join(), train, WAYS["tracking"], None, SIZE - BEGIN))
        seen = ends(pending)
    assert np.abs(np.array([one.x for one in seen]) - where_it_ends("tracking")).max() < 1e-8
