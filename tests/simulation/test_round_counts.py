"""Rounds that fail before they begin, restart after many losses, or begin during an admission count alike on all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

import shoal
from shoal.execution.membership import Plan
from shoal.ops.gathering import alltoall_nonblocking
from shoal.ops.state_transfer import admit_joining_agents
from shoal.runtime.agent import bind, current
from support.simulation import threads
from support.simulation.fleet import Agents, agents_of

LIMIT = 400.0


def completed(agents: Agents, program: Callable[[int], None]) -> None:
    agents.start(program)
    agents.run(LIMIT)
    assert not agents.failed


def outcome(call: Callable[[], Any]) -> Any:
    """The result of a call, or the name of its error."""
    try:
        return call()
    except shoal.ShoalError as error:
        return type(error).__name__


def test_a_call_that_a_loss_makes_impossible_counts_as_one_round_before_and_after_the_agreement() -> None:
    """Otherwise the next ``alltoall`` of one agent would match an earlier one of another, for good."""
    results: dict[int, list[Any]] = {rank: [] for rank in range(3)}
    with agents_of(3) as agents:
        scheduler = agents.world.scheduler

        def exchange() -> Any:
            tensor = torch.arange(3.0) + 10 * shoal.rank()
            return alltoall_nonblocking(tensor, [1, 1, 1]).wait()[0].tolist()

        def program(rank: int) -> None:
            engine = agents.engines[rank]
            if engine.is_joining:
                engine.rejoin.wait(100.0, 10.0)
            else:
                shoal.barrier()
                if rank == 2:
                    scheduler.sleep(LIMIT * 10)
                if rank == 0:
                    scheduler.at(scheduler.now + 1.0, agents.crash, 2, 2.0)
                    results[0].append(outcome(exchange))  # it has begun when rank 2 is lost
                else:
                    scheduler.sleep(2.0)
                    results[1].append(outcome(exchange))  # after the survivors have agreed
                scheduler.sleep(4.0)
                assert admit_joining_agents(current("test")) == (2,)
            results[rank] += [outcome(exchange) for _ in range(3)]
            shoal.barrier()

        completed(agents, program)
    for rank, found in results.items():
        assert found == ["PeerLost"] * (rank < 2) + [[rank, 10.0 + rank, 20.0 + rank]] * 3


@pytest.mark.parametrize("losses", [7, 255, 256, 1000])
def test_a_collective_restarts_after_any_number_of_losses(losses: int) -> None:
    results: dict[int, list[float]] = {}
    with agents_of(4) as agents:
        scheduler = agents.world.scheduler

        def program(rank: int) -> None:
            shoal.barrier()
            scheduler.sleep(0.5)
            agents.engines[rank].lifecycle.gate.install_plan(Plan((), losses))  # as after so many rejoins
            scheduler.sleep(0.5)
            if rank == 0:
                scheduler.at(scheduler.now + 1.0, agents.crash, 3)
            if rank == 3:
                scheduler.sleep(LIMIT * 10)
            results[rank] = [shoal.allreduce(torch.tensor(float(rank))).item() for _ in range(2)]

        completed(agents, program)
    assert results == {rank: [1.0, 1.0] for rank in range(3)}


@pytest.mark.parametrize("call", ["allreduce", "neighbor_allreduce"])
@pytest.mark.parametrize("seed", range(6))
def test_rounds_of_another_thread_during_an_admission_have_one_plan(seed: int, call: str) -> None:
    """A round that began between the agents' counts and the admission would be without the new agent on some only."""
    rounds, errors = 80, []
    with agents_of(3, seed=seed) as agents:
        scheduler = agents.world.scheduler

        def average(engine: Any) -> None:
            while engine.matcher.rounds_begun("background") < rounds:
                try:
                    getattr(shoal, call)(torch.ones(2), name="background")
                except shoal.ShoalError as error:
                    errors.append(error)
                    return
                scheduler.sleep(0.05)

        def program(rank: int) -> None:
            engine = agents.engines[rank]
            other = threads.Thread(target=bind(average), args=(engine,), name="background")
            if engine.is_joining:
                engine.rejoin.wait(100.0, 10.0)
                other.start()
            else:
                shoal.barrier()
                if rank == 2:
                    scheduler.sleep(LIMIT * 10)
                if rank == 0:
                    scheduler.at(scheduler.now + 1.0, agents.crash, 2, 0.5)
                scheduler.sleep(2.0)
                other.start()
                scheduler.sleep(1.0)
                assert admit_joining_agents(current("test")) == (2,)
            other.join()
            shoal.barrier()

        completed(agents, program)
    assert not errors


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("seed", range(10))
def test_a_round_that_several_agents_refuse_fails_one_call(seed: int, size: int) -> None:
    """Agent 0 expects no tensor, so its rounds end at once. It then learns of the others' refusals one by one."""
    with agents_of(size, seed=seed) as agents:

        def program(rank: int) -> None:
            def expect_one_error(call: Callable[[torch.Tensor], Any]) -> None:
                with pytest.raises(shoal.Mismatch, match=call.__name__):
                    call(torch.ones(3))
                    while True:
                        agents.world.scheduler.sleep(0.001)
                        shoal.neighbor_allreduce(torch.ones(1), 1.0, {}, {}, name="probe")  # it has no partners

            for call in (shoal.neighbor_allreduce, shoal.neighbor_allgather):
                graph = shoal.topology.FullyConnectedGraph(size)
                if rank == 0:
                    graph.remove_edges_from([(other, 0) for other in range(1, size)])
                shoal.set_topology(graph)
                expect_one_error(call)
                shoal.set_topology(shoal.topology.FullyConnectedGraph(size))
                for _ in range(20):
                    assert shoal.neighbor_allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
                    agents.world.scheduler.sleep(0.005)

        completed(agents, program)


@pytest.mark.parametrize("on_loss", ["raise", "continue"])
@pytest.mark.parametrize("name", [None, "group"])
@pytest.mark.parametrize("call", ["grouped_allreduce", "grouped_neighbor_allreduce"])
def test_a_group_with_more_dtypes_on_one_agent_fails_one_call(call: str, name: str | None, on_loss: str) -> None:
    """One round for each dtype would leave the agents' counts apart, and later means would be of different calls."""
    results: dict[int, list[Any]] = {}
    with agents_of(3, on_loss=on_loss) as agents:

        def program(rank: int) -> None:
            shoal.set_topology(shoal.topology.FullyConnectedGraph(3))

            def average(value: float, *dtypes: torch.dtype) -> Any:
                tensors = [torch.full((2,), value, dtype=dtype) for dtype in dtypes]
                means = outcome(lambda: getattr(shoal, call)(tensors, name=name))
                return means if isinstance(means, str) else [mean.tolist() for mean in means]

            both = torch.float32, torch.float64
            found = results[rank] = [average(rank, *both[: 2 if rank == 0 else 1])]
            agents.world.scheduler.sleep(0.5)
            found += [average(rank + 10.0 * step, *both) for step in range(3)]

        completed(agents, program)
    # A neighbour of none that differs may have its mean; here all are neighbours of agent 0.
    right = [[[1.0 + 10.0 * step] * 2] * 2 for step in range(3)]
    assert results == {rank: ["Mismatch", *right] for rank in range(3)}


def test_models_with_another_number_of_batches_fail_one_consensus() -> None:
    """Without an agreement on the tensors first, agents would begin different numbers of all-reduces."""
    results: dict[int, list[Any]] = {}
    with agents_of(2, on_loss="raise") as agents:

        def program(rank: int) -> None:
            def average(value: float, *sizes: int) -> list[float]:
                model = torch.nn.ParameterList([torch.full((size,), float(value)) for size in sizes])
                with shoal.consensus(model):
                    return [param[0].item() for param in model]

            large = 70_000  # it is a batch of its own
            found = results[rank] = [outcome(lambda: average(rank, *(2, large)[: 2 - rank]))]
            agents.world.scheduler.sleep(0.5)
            found += [average(rank + 10.0 * step, 2, large) for step in range(3)]

        completed(agents, program)
    assert results == {rank: ["Mismatch", [0.5, 0.5], [10.5, 10.5], [20.5, 20.5]] for rank in range(2)}


@pytest.mark.parametrize("seed", range(8))
def test_random_correct_calls_after_a_refused_one_have_their_results(seed: int) -> None:
    """Counts that are apart would give another call's numbers: each call has numbers of its own."""
    size, chance = 3, random.Random(seed)
    calls = ["grouped_allreduce", "grouped_neighbor_allreduce", "grouped_allgather", "neighbor_allgather", "allgather"]
    dtypes = torch.float32, torch.float64, torch.float16
    refused = calls[seed % len(calls)]
    plan = [
        (chance.choice([refused, *calls]), chance.choice([None, "x", "y"]), chance.sample(dtypes, chance.randint(1, 3)))
        for _ in range(101)
    ]
    with agents_of(size, seed=seed, on_loss="raise") as agents:

        def program(rank: int) -> None:
            shoal.set_topology(shoal.topology.FullyConnectedGraph(size))

            def run(number: int, call: str, name: str | None, of: Sequence[torch.dtype], width: int = 2) -> list[Any]:
                tensors = [torch.full((1, width), float(number + rank), dtype=dtype) for dtype in of]
                if call.startswith("grouped"):
                    return [found.flatten()[::2].tolist() for found in getattr(shoal, call)(tensors, name=name)]
                return [getattr(shoal, call)(tensors[0], name=name).flatten()[::2].tolist()]

            for number, (call, name, of) in enumerate(plan):
                if not number:
                    # On agent 0 a group has a dtype more, and another tensor a column more.
                    more = int(rank == 0)
                    width = 2 if refused.startswith("grouped") else 2 + more
                    assert outcome(partial(run, 0, refused, name, dtypes[: 1 + more], width)) == "Mismatch"
                    agents.world.scheduler.sleep(0.5)
                    continue
                found = run(number, call, name, of)
                every = [float(number + other) for other in range(size)]
                right = [number + 1.0] if "reduce" in call else every
                if call == "neighbor_allgather":
                    del right[rank]
                assert found == [right] * (len(of) if call.startswith("grouped") else 1), (number, call, name)

        completed(agents, program)


@pytest.mark.parametrize("seed", range(4))
def test_after_a_failed_step_of_two_exchanges_no_vector_is_taken_for_another(seed: int) -> None:
    """The neighbours of an agent that is late give up; the others go on to the second exchange of the step."""
    size, values, errors = 5, {}, dict.fromkeys(range(5), 0)
    with agents_of(size, seed=seed, on_loss="raise", timeout=5.0) as agents:
        scheduler = agents.world.scheduler

        def program(rank: int) -> None:
            model = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.constant_(model.weight, float(rank))
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            tracking, ring = shoal.algorithms.GradientTracking(0.1), shoal.topology.RingGraph(size)
            optimizer = shoal.DecentralizedOptimizer(sgd, model, tracking, topology=ring)
            steps = 0

            def loss() -> torch.Tensor:
                optimizer.zero_grad()
                found = (model.weight - rank).square().sum() / 2
                found.backward()
                return found

            while agents.engines[rank].matcher.rounds_begun("optimizer") < 160:
                scheduler.sleep({0: 5.5, 2: 1.0, 3: 1.0}.get(rank, 0.0) if steps == 2 else 0.0)
                steps += 1
                try:
                    optimizer.step(loss)
                except shoal.ShoalError:
                    errors[rank] += 1
            shoal.barrier()
            values[rank] = model.weight.item()

        completed(agents, program)
    assert all(0 < count <= 2 for count in errors.values()), errors
    assert all(abs(value - 2.0) < 1e-3 for value in values.values()), values
