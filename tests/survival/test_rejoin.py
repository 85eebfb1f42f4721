"""Agents that die are started again, and enter the run of the others, which ends where it would have without a loss."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal import topology_util
from shoal.algorithms import ExactDiffusion, GradientDescent, GradientTracking, ParallelGradientDescent
from shoal.fault_tolerance.failure_detector import UNCONNECTED_GRACE
from shoal.ops.state_transfer import transfer_state
from shoal.runtime.agent import current
from shoal.topology import OnePeerExponential, Static
from support.fault_points import OVER, Point, each_over_one, over_both, over_one, seeds
from support.rejoin import KILLED, MOST_SECONDS, AgentResult, init_slowly, members_after, train
from support.surviving_training import optimum, resting_place
from support.survivors import CONTINUE
from support.world import World

SIZE = 4
RING = Static(topology_util.RingGraph(SIZE))
WAYS: dict[str, dict[str, Any]] = {
    "ATC": {"algorithm": GradientDescent(1.0)},
    "AWC": {"algorithm": GradientDescent(1.0, atc=False)},
    "one-peer": {"algorithm": GradientDescent(1.0), "topology": OnePeerExponential(SIZE)},
    "gradients": {"algorithm": ParallelGradientDescent(1.0)},
    "gradients during backward": {"algorithm": ParallelGradientDescent(1.0), "overlap": "backward"},
    "tracking": {"algorithm": GradientTracking(1.0)},
    "exact diffusion": {"algorithm": ExactDiffusion(1.0, lazy=True)},
    "exact diffusion during backward": {"algorithm": ExactDiffusion(1.0, lazy=True), "overlap": "backward"},
    "exact diffusion between machines": {
        "algorithm": ExactDiffusion(1.0, lazy=True),
        "topology": Static(topology_util.RingGraph(2)),
        "communication_type": shoal.optim.CommunicationType.hierarchical_neighbor_allreduce,
    },
}
RETURNS = CONTINUE | {"SHOAL_AGENTS_PER_MACHINE": "2"}


def where_it_ends(way: str) -> np.ndarray:
    """The parameters of all agents, [agents, 3]."""
    if way in ("ATC", "AWC"):
        return resting_place(RING, SIZE, [], overlapping=way == "AWC")
    if way == "one-peer":
        return resting_place(OnePeerExponential(SIZE), SIZE, [], overlapping=False)
    return np.tile(optimum(list(range(SIZE))), (SIZE, 1))


def run(world: World, way: str, deaths: dict[int, list[Point]]) -> list[AgentResult]:
    """Train; each time an agent dies it is started again, to die at its next point, if it has one."""
    total = sum(map(len, deaths.values()))
    left = {rank: list(points) for rank, points in deaths.items()}

    def start(rank: int) -> Any:
        return world.run_on(rank, train, WAYS[way], (KILLED, left[rank].pop(0)) if left.get(rank) else None, total)

    pending = {rank: start(rank) for rank in range(SIZE)}
    for rank in deaths:
        for _ in deaths[rank]:
            one = pending[rank].outcome(60.0)
            assert one.error == "Died", f"rank {rank}: {one.error}: {one.message}\n{one.trace}"
            world.start_again(rank)
            pending[rank] = start(rank)
    outcomes = [pending[rank].outcome(60.0) for rank in range(SIZE)]
    failed = [
        f"rank {outcome.rank}: {outcome.error}: {outcome.message}\n{outcome.trace}"
        for outcome in outcomes
        if outcome.error
    ]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]


@each_over_one(WAYS, slow=[way for way in WAYS if way not in ("ATC", "tracking")])
def test_a_rejoined_agent_trains_as_if_it_had_not_failed(way: str, environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment | RETURNS, restarts=True) as world:
        seen = run(world, way, {1: [Point("received", 60)]})
    assert np.abs(np.array([one.x for one in seen]) - where_it_ends(way)).max() < 1e-8
    began, x = seen[1].began
    assert began > 0 and began % 10 == 0
    givers = [one for rank, one in enumerate(seen) if rank != 1 and one.at.get(began) == x]
    assert givers, "it begins with the parameters of one that was there, bit for bit"
    assert seen[0].changes == [((1,), ()), ((), (1,))] and seen[1].changes == [((), (0, 1, 2, 3))]
    assert len({one.steps for one in seen}) == 1


@over_one("network")
def test_all_are_killed_one_after_another_and_no_first_process_is_left(environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment | CONTINUE, restarts=True) as world:
        pending = {rank: world.run_on(rank, train, WAYS["tracking"], None, SIZE) for rank in range(SIZE)}
        for rank in range(SIZE):
            time.sleep(0.5)  # all train, and restarted agents have entered
            world.kill(rank)
            assert pending[rank].outcome().error == "Died"
            world.start_again(rank)
            pending[rank] = world.run_on(rank, train, WAYS["tracking"], None, SIZE)
        seen = [pending[rank].outcome(60.0).value for rank in range(SIZE)]
    assert np.abs(np.array([one.x for one in seen]) - where_it_ends("tracking")).max() < 1e-8


def drawn(seed: int) -> tuple[str, str, dict[int, list[Point]]]:
    """How to train, over which transport, and which agents die when; some die again while they rejoin, or after."""
    chance = random.Random(seed)
    victims = chance.sample(range(SIZE), chance.choice([1, 1, 2, 3]))
    deaths = {
        rank: [Point("received", chance.randint(5, 150))]
        + [Point(chance.choice(["received", "sent", "finished"]), chance.randint(1, 60))] * chance.choice([0, 1])
        for rank in victims
    }
    return chance.choice(list(WAYS)), chance.choice(list(OVER)), deaths


@seeds(1, 4, 200)
def test_random_kills_while_others_rejoin(seed: int) -> None:
    way, transport, deaths = drawn(seed)
    with World(SIZE, environment=OVER[transport] | RETURNS, restarts=True) as world:
        seen = run(world, way, deaths)
    assert np.abs(np.array([one.x for one in seen]) - where_it_ends(way)).max() < 1e-8, (way, transport, deaths)


@over_one("shared_memory")
def test_an_agent_stopped_too_long_is_replaced_and_does_not_interfere(environment: dict[str, str]) -> None:
    dropping = CONTINUE | {"SHOAL_DROP_AFTER": "1"}
    with World(SIZE, environment=environment | dropping, restarts=True) as world:
        pending = {rank: world.run_on(rank, train, WAYS["tracking"], None, 1) for rank in range(SIZE)}
        time.sleep(0.5)
        stopped = pending[2]
        world.kill(2, signal.SIGSTOP)
        time.sleep(1.5)  # the others drop it
        old = world.members[2]
        world.start_again(2)
        pending[2] = world.run_on(2, train, WAYS["tracking"], None, 1)
        time.sleep(0.5)
        old.kill(signal.SIGCONT)
        woken = stopped.outcome()
        seen = [pending[rank].outcome(60.0) for rank in range(SIZE)]
        assert not [one.message for one in seen if one.error]
    assert woken.error in ("ShoalError", "PeerLost"), woken
    ends = np.array([one.value.x for one in seen])
    assert np.abs(ends - where_it_ends("tracking")).max() < 1e-8


def save_and_load(folder: Path, steps: int, dies_at: int, parts: str = "model") -> dict[str, Any]:
    """Save every tenth step into files; what was seen."""
    model = torch.nn.BatchNorm1d(2)
    sampler = shoal.data.AgentSampler(range(40))
    state: dict[str, Any] = {"model": model, "sampler": sampler, "mine": PartWithoutPlainState()}
    checkpoint = shoal.Checkpoint(**{name: state[name] for name in parts.split(",")})
    call_before_load = shoal.observability.is_entering()
    before = shoal.allreduce(torch.tensor([float(shoal.rank() + 1)]), average=False).item()
    step = began = checkpoint.load(folder, missing_ok=True)
    first = model.weight.tolist()
    limit = time.monotonic() + MOST_SECONDS
    dealt: list[list[int]] = []
    while step < steps or len(shoal.alive()) < shoal.size():
        if step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        dealt.append(list(sampler))
        with torch.no_grad():
            model.weight += 1
        step += 1
        checkpoint.save(folder, step)
        assert time.monotonic() < limit
    return {
        "alone": call_before_load,
        "before": before,
        "began": began,
        "first": first,
        "step": step,
        "dealt": dealt[-1],
    }


class PartWithoutPlainState:
    """A part whose state is not plain."""

    def state_dict(self) -> Any:
        return {"what": object()} if shoal.rank() != 1 else {}

    def load_state_dict(self, state: Any) -> None: ...


def test_an_agent_rejoins_during_a_save_and_samples_are_redistributed(tmp_path: Path) -> None:
    with World(SIZE, environment=CONTINUE, restarts=True) as world:
        parts = "model,sampler"
        pending = [
            world.run_on(rank, save_and_load, tmp_path, 60, 7 if rank == 3 else -1, parts) for rank in range(SIZE)
        ]
        assert pending[3].outcome().error == "Died"
        world.start_again(3)
        pending[3] = world.run_on(3, save_and_load, tmp_path, 60, -1, parts)
        outcomes = [one.outcome(60.0) for one in pending]
        assert not [outcome.message for outcome in outcomes if outcome.error]
    seen = [outcome.value for outcome in outcomes]
    assert seen[3]["alone"] and seen[3]["before"] == 4.0 and not seen[0]["alone"] and seen[0]["before"] == 10.0
    assert seen[3]["began"] >= 7 and seen[3]["first"] == [1.0 + seen[3]["began"]] * 2
    assert sorted(number for one in seen for number in one["dealt"]) == list(range(40))
    with World(SIZE) as world:  # and the last one is whole
        assert world.results(last_step, tmp_path) == [seen[0]["step"]] * SIZE


def last_step(folder: Path) -> int:
    return shoal.Checkpoint(model=torch.nn.BatchNorm1d(2)).load(folder)


@pytest.mark.parametrize(
    ("parts", "message"),
    [("model,sampler", "loads model, sampler; the others save model"), ("mine", "could not be transferred: TypeError")],
)
def test_state_that_cannot_be_transferred_is_named_and_the_others_continue(parts: str, message: str) -> None:
    with World(3, environment=CONTINUE, restarts=True) as world:
        remote = parts if parts == "mine" else "model"
        pending = [world.run_on(rank, keep_saving, 150, 3 if rank == 1 else -1, remote) for rank in range(3)]
        assert pending[1].outcome().error == "Died"
        world.start_again(1)
        failed = world.run_on(1, keep_saving, 150, -1, parts).outcome()
        assert failed.error in ("ValueError", "ShoalError") and message in failed.message, failed
        world.kill(1)
        world.members[1].outcome(5.0)
        assert [pending[rank].outcome().value for rank in (0, 2)] == [150, 150]


def keep_saving(steps: int, dies_at: int, parts: str) -> int:
    model = torch.nn.Linear(1, 1)
    state: dict[str, Any] = {
        "model": model,
        "sampler": shoal.data.AgentSampler(range(40)),
        "mine": PartWithoutPlainState(),
    }
    checkpoint = shoal.Checkpoint(**{name: state[name] for name in parts.split(",")})
    step = checkpoint.load(None, missing_ok=True)
    while step < steps:
        if step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        step += 1
        checkpoint.save(None, step)
    return step


@over_one("shared_memory")
def test_the_end_of_the_process_before_does_not_exclude_an_agent_that_rejoins(environment: dict[str, str]) -> None:
    """Ranks 2 and 1 are admitted together. The process of rank 1 that was killed is there when rank 2 starts again."""
    with World(4, environment=environment | CONTINUE, restarts=True) as world:
        killed = {rank: world.run_on(rank, members_after, 30.0) for rank in (2, 1)}
        for rank in killed:
            world.kill(rank)
        saving = {}
        for rank, one in killed.items():
            assert one.outcome().error == "Died"  # from here on no process has this one's number
            world.start_again(rank, init=False)
            world.results(init_slowly, on=[rank])
            saving[rank] = world.run_on(rank, keep_saving, 20, -1, "model")
        time.sleep(0.3)
        saving |= {rank: world.run_on(rank, keep_saving, 20, -1, "model") for rank in (0, 3)}
        assert [one.outcome().value for one in saving.values()] == [20] * 4
        assert world.results(members_after, UNCONNECTED_GRACE + 1.0) == [(0, 1, 2, 3)] * 4


def call_before_load() -> list[str]:
    """The errors of an agent that does not load first."""
    x, result = torch.ones(2), []
    model = torch.nn.Linear(2, 1)
    optimizer = shoal.bluefog.DistributedGradientAllreduceOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert torch.equal(shoal.broadcast(x, 0), x) and shoal.alive() == (shoal.rank(),)
    for call in (
        lambda: shoal.neighbor_allreduce(x),
        lambda: shoal.neighbor_allgather(x),
        lambda: shoal.neighbor_allreduce(x, self_weight=0.5, dst_weights={0: 0.5}),
        lambda: shoal.pair_gossip(x, 0),
        optimizer.step,
    ):
        try:
            call()
            result.append("nothing")
        except shoal.ShoalError as error:
            result.append(str(error))
    try:
        shoal.Checkpoint(model=model).load(None, timeout=0.5)
    except shoal.DeadlineExceeded as error:
        result.append(str(error))
    return result


def test_an_agent_that_was_not_admitted_raises_at_its_timeout() -> None:
    with World(3, environment=CONTINUE, restarts=True) as world:
        world.kill_and_start_again(1)
        [*output, last] = world.results(call_before_load, on=[1])[0]
        assert len(output) == 5 and all("has not been admitted" in one for one in output), output
        assert "ranks [0, 2] have not called Checkpoint.save" in last


def test_no_agent_is_left_to_admit_it() -> None:
    with World(2, environment=CONTINUE, restarts=True) as world:
        world.kill_and_start_again(1)
        waiting = world.run_on(1, keep_saving, 5, -1, "model")
        time.sleep(0.3)
        world.kill(0)
        world.members[0].outcome(5.0)
        output = waiting.outcome()
        assert output.error == "PeerLost" and "none can admit it" in output.message, output


def hand_over_on_a_ring() -> Any:
    """Ranks 1 and 2 need what 0 and 3 have; 3, which is near 2, dies of being asked."""
    agent = current()
    shoal.set_topology(shoal.topology.RingGraph(4))

    def state() -> list[int]:
        if agent.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return [agent.rank]

    return transfer_state(agent, None if agent.rank in (1, 2) else state)


def test_an_agent_that_just_received_the_state_forwards_it_if_its_donor_dies() -> None:
    with World(4, environment=CONTINUE) as world:
        outcomes = world.run(hand_over_on_a_ring)
        assert [outcome.error for outcome in outcomes] == ["", "", "", "Died"], [
            outcome.message for outcome in outcomes
        ]
        assert [outcome.value for outcome in outcomes[:3]] == [None, [0], [0]]


def puts_before_and_after() -> str:
    """A window of three agents; a killed agent rejoins without it.

    A call that needs the window raises an error; a new window works.
    """
    checkpoint = shoal.Checkpoint(model=torch.nn.Linear(1, 1))
    shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
    x, message = torch.full((2,), float(shoal.rank())), ""
    if not shoal.observability.is_entering():
        shoal.bluefog.win_create(x, "w")
        shoal.bluefog.win_put(x, "w")
        shoal.barrier()
        if shoal.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    step = checkpoint.load(None, missing_ok=True)
    while not step or len(shoal.alive()) < 3:
        step += 1
        checkpoint.save(None, step)
        time.sleep(0.01)
    if shoal.rank() != 1:
        shoal.bluefog.win_put(x, "w")  # to its surviving neighbours
        try:
            shoal.bluefog.win_put(x, "w", dst_weights=[1])
        except shoal.PeerLost as error:
            message = str(error)
    shoal.barrier()
    if shoal.rank() != 1:
        shoal.bluefog.win_free("w")
    assert shoal.bluefog.win_create(x, "w", zero_init=True)
    shoal.bluefog.win_put(x, "w")
    shoal.barrier()
    assert torch.equal(shoal.bluefog.win_update("w"), torch.full((2,), 1.0))
    shoal.barrier()
    shoal.bluefog.win_free("w")
    return message


@over_both
def test_an_old_window_names_the_agent_that_rejoined_without_it(environment: dict[str, str]) -> None:
    with World(3, environment=environment | CONTINUE, restarts=True) as world:
        pending = [world.run_on(rank, puts_before_and_after) for rank in range(3)]
        assert pending[1].outcome().error == "Died"
        world.start_again(1)
        pending[1] = world.run_on(1, puts_before_and_after)
        outcomes = [one.outcome() for one in pending]
    assert not [f"{outcome.message}\n{outcome.trace}" for outcome in outcomes if outcome.error]
    for rank in (0, 2):
        assert "needs rank 1, which was lost and has come back without it" in outcomes[rank].value, outcomes[rank].value


def in_two_parts(dies: bool) -> list[tuple[int, ...]]:
    """Two runs of one job, with shutdown and init between them."""
    results = []
    for part in range(2):
        if not shoal.is_initialized():
            shoal.init()
        checkpoint = shoal.Checkpoint(model=torch.nn.Linear(1, 1))
        step = checkpoint.load(None, missing_ok=True)
        if dies and not part:
            os.kill(os.getpid(), signal.SIGKILL)
        while step < 3 or len(shoal.alive()) < 3:
            time.sleep(0.01)
            step += 1
            checkpoint.save(None, step)
        results.append(tuple(shoal.allgather(torch.tensor([shoal.rank()])).tolist()))
        shoal.shutdown()
    shoal.init()
    return results


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rejoined_agent_handles_a_later_rejoin_like_the_others(victim: int) -> None:
    with World(3, environment=CONTINUE, restarts=True) as world:
        pending = [world.run_on(rank, in_two_parts, rank == victim) for rank in range(3)]
        assert pending[victim].outcome().error == "Died"
        world.start_again(victim)
        pending[victim] = world.run_on(victim, in_two_parts, False)
        outcomes = [one.outcome() for one in pending]
    assert not [f"{outcome.message}\n{outcome.trace}" for outcome in outcomes if outcome.error]
    assert [outcome.value for outcome in outcomes] == [[(0, 1, 2)] * 2] * 3
