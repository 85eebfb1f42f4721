"""Small averages between machines: the first agent of each machine carries them; those in flight travel together."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from shoal.runtime.agent import current
from support.leftovers import wait_until
from support.reference import reduced, same_bits, weighted
from support.samples import sample

Fleets = Callable[..., shoal.Fleet]
Handle = shoal.Handle[torch.Tensor]
MACHINES, EACH, COUNT = 3, 3, 50
SIZE = MACHINES * EACH
SEND = [{1: 0.5, 2: 2.0}, {2: 1.0}, {0: 3.0}]
RECEIVE = [{2: 0.25}, {0: 0.3}, {0: 0.7, 1: -1.0}]


def value(index: int, rank: int) -> torch.Tensor:
    return sample(rank, (3, 2), seed=index)


def expected(index: int) -> list[torch.Tensor]:
    means = [reduced("average", [value(index, EACH * m + k) for k in range(EACH)]) for m in range(MACHINES)]
    terms = [{j: (r * SEND[j][m], means[j]) for j, r in RECEIVE[m].items()} for m in range(MACHINES)]
    return [weighted(means[m], 0.1, terms[m]) for m in range(MACHINES) for _ in range(EACH)]


def call(index: int, name: str | None = None, **more: Any) -> Handle:
    own_machine = shoal.bluefog.machine_rank()
    return shoal.bluefog.hierarchical_neighbor_allreduce_nonblocking(
        value(index, shoal.rank()), 0.1, RECEIVE[own_machine], SEND[own_machine], name=name, **more
    )


def counted_messages() -> Counter[int]:
    """Count the messages that this agent sends during the block, by stage."""
    result: Counter[int] = Counter()
    sender = current().engine.sender
    post = sender.post

    def counted(channel: Any, operation: Any, stage: Any) -> None:
        result[stage.number - stage.exchange.stage_lead] += len(stage.exchange.sends)
        post(channel, operation, stage)

    sender.post = counted  # type: ignore[method-assign]
    return result


@pytest.mark.parametrize("count", [1, COUNT])
@pytest.mark.parametrize("check", [True, False])
def test_a_burst_is_one_message_from_each_agent_and_to_it_and_one_for_each_edge_between_machines(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch, count: int, check: bool
) -> None:
    monkeypatch.setattr("shoal.execution.fusion.SPLIT_AFTER", 60.0)  # however busy the machine is

    def run() -> tuple[list[torch.Tensor], Counter[int]]:
        shoal.barrier()
        sent = counted_messages()
        with current().engine.lock:  # nobody drives meanwhile
            handles = [call(index, enable_topo_check=check) for index in range(count)]
        return [handle.wait() for handle in handles], sent

    for rank, (result, sent) in enumerate(fleet(SIZE, agents_per_machine=EACH).run(run)):
        assert all(same_bits(one, expected(index)[rank]) for index, one in enumerate(result))
        first = rank % EACH == 0
        assert +sent == (Counter({1: len(SEND[rank // EACH]), 2: EACH - 1}) if first else Counter({0: 1}))


@pytest.mark.parametrize("one_by_one", [None, 0, 4])
def test_agents_that_fuse_differently_have_the_bits_of_single_calls(fleet: Fleets, one_by_one: int | None) -> None:
    """Each agent submits in another order, in bursts of other lengths. One waits for each call before the next."""

    def run() -> dict[int, torch.Tensor]:
        if shoal.rank() == one_by_one:
            return {index: call(index, f"call {index}").wait(20) for index in range(24)}
        chance, order, handles = random.Random(shoal.rank()), list(range(24)), {}
        chance.shuffle(order)
        for index in order:
            handles[index] = call(index, f"call {index}")
            if chance.random() < 0.15:
                current().engine.progress.drive_until(lambda: False, 0.0)  # begins what there is
        return {index: handle.wait(20) for index, handle in handles.items()}

    for rank, result in enumerate(fleet(SIZE, agents_per_machine=EACH).run(run)):
        assert all(same_bits(one, expected(index)[rank]) for index, one in result.items()), rank


def outcome(handle: Handle) -> Any:
    try:
        return handle.wait(30).sum().item()
    except shoal.ShoalError as error:
        return type(error).__name__


@pytest.mark.parametrize("other", [0, 1, 5])
def test_a_shape_that_differs_in_one_call_fails_only_that_call_on_all_participants(fleet: Fleets, other: int) -> None:
    """On the first agent of a machine, and on the others."""

    def run() -> dict[str, Any]:
        x = {name: torch.ones(5 if name == "b" and shoal.rank() == other else 2) for name in "abc"}
        shoal.bluefog.set_machine_topology(shoal.topology.FullyConnectedGraph(2))
        with current().engine.lock:
            handles = {
                name: shoal.bluefog.hierarchical_neighbor_allreduce_nonblocking(one, name=name)
                for name, one in x.items()
            }
        results = {name: outcome(handle) for name, handle in handles.items()}
        shoal.barrier()
        return results

    for rank, result in enumerate(fleet(6, agents_per_machine=3).run(run)):
        assert result == {"a": 2.0, "b": "Mismatch", "c": 2.0}, rank


def test_agents_of_a_machine_with_different_weights_raise_a_mismatch(fleet: Fleets) -> None:
    def run() -> str:
        other = 1 - shoal.bluefog.machine_rank()
        with pytest.raises(shoal.Mismatch) as caught:
            own = 0.25 if shoal.rank() == 1 else 0.5
            shoal.bluefog.hierarchical_neighbor_allreduce(torch.ones(2), own, {other: 0.5}, [other])
        shoal.barrier()
        return str(caught.value)

    results = fleet(4, agents_per_machine=2, timeout=5.0).run(run)
    assert "weights within the machine" in results[0]
    assert "weights within the machine" in results[1]


def test_a_call_that_an_agent_omits_is_named_at_its_deadline(fleet: Fleets) -> None:
    """The first agent of the other machine gets the name from its own agents, and reports it."""

    def run() -> dict[str, Any]:
        shoal.bluefog.set_machine_topology(shoal.topology.FullyConnectedGraph(2))
        names = "ab" if shoal.rank() == 3 else "abc"
        with current().engine.lock:
            handles = {
                name: shoal.bluefog.hierarchical_neighbor_allreduce_nonblocking(torch.ones(1), name=name, timeout=0.8)
                for name in names
            }
        result = {name: outcome(handle) for name, handle in handles.items()}
        shoal.barrier()
        return result

    results = fleet(4, agents_per_machine=2).run(run)
    well = {"a": 1.0, "b": 1.0}
    assert [{**one, "c": None} for one in results] == [{**well, "c": None}] * 4
    assert results[2]["c"] == "DeadlineExceeded"
    assert {one["c"] for one in results[:3]} <= {"DeadlineExceeded", "Mismatch"}


def test_no_state_is_left(fleet: Fleets) -> None:
    def run() -> bool:
        engine = current().engine
        for _ in range(5):
            for handle in [call(index) for index in range(20)]:
                handle.wait()
        shoal.barrier()
        books = engine.fusion
        return wait_until(
            lambda: not (books._active or books._early or engine.lifecycle.unbegun) and engine.sender.drained
        )

    assert all(fleet(SIZE, agents_per_machine=EACH).run(run))
