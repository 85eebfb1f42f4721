"""Pure pushes and pulls that are in flight together, with the same lists, find out once who names whom."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from shoal.runtime.agent import current
from support.leftovers import wait_until
from support.reference import push_pull, same_bits
from support.samples import sample

Fleets = Callable[..., shoal.Fleet]
Handle = shoal.Handle[torch.Tensor]
Edges = list[dict[int, float]]
COUNT, SIZE = 50, 5
NAMED: Edges = [{1: 0.5, 4: 2.0}, {}, {3: 0.25, 0: 1.0, 1: -1.0}, {0: 3.0}, {2: 0.5}]
OTHERS: Edges = [{2: 0.5}, {0: 1.0}, {}, {4: 0.1, 2: 3.0}, {0: 1.0}]
FORMS = ("dst_weights", "src_weights")


def reference(form: str, named: Edges, index: int) -> list[torch.Tensor]:
    other: Edges = [{j: 1.0 for j in range(SIZE) if i in named[j]} for i in range(SIZE)]
    send, receive = (named, other) if form == "dst_weights" else (other, named)
    return push_pull([sample(rank, (3,), seed=index) for rank in range(SIZE)], [0.5] * SIZE, receive, send)


def call(form: str, index: int, named: Edges = NAMED, name: str | None = None) -> Handle:
    more: dict[str, Any] = {form: named[shoal.rank()]}
    return shoal.nonblocking.neighbor_allreduce(sample(shoal.rank(), (3,), seed=index), 0.5, name=name, **more)


def counted_messages() -> Counter[bool]:
    """Count the messages that this agent sends during the block, by whether they move tensors."""
    result: Counter[bool] = Counter()
    sender = current().engine.sender
    post = sender.post

    def counted(channel: Any, operation: Any, stage: Any) -> None:
        result[not stage.exchange.coordinates] += len(stage.exchange.sends)
        post(channel, operation, stage)

    sender.post = counted  # type: ignore[method-assign]
    return result


@pytest.mark.parametrize("form", FORMS)
def test_fifty_calls_with_the_same_lists_take_the_messages_of_one(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """ceil(log2 n) messages of discovery and one to each destination, instead of as many for each call."""
    monkeypatch.setattr("shoal.execution.fusion.SPLIT_AFTER", 60.0)  # however busy the machine is

    def run() -> tuple[list[torch.Tensor], Counter[bool], Counter[bool]]:
        shoal.barrier()
        before = counted_messages()
        call(form, 0).wait()
        shoal.barrier(name="between")
        alone = Counter(before)
        before.clear()
        with current().engine.lock:  # nobody drives meanwhile
            handles = [call(form, index) for index in range(COUNT)]
        return [handle.wait() for handle in handles], alone, before

    steps = math.ceil(math.log2(SIZE))
    pushes = form == "dst_weights"
    for rank, (result, alone, together) in enumerate(fleet(SIZE).run(run)):
        assert all(same_bits(one, reference(form, NAMED, index)[rank]) for index, one in enumerate(result))
        tensors = len(NAMED[rank]) if pushes else sum(rank in one for one in NAMED)
        assert (alone[False], alone[True]) == (2 * steps, tensors)  # the barrier's messages are as many
        assert (together[False], together[True]) == (steps, tensors)


@pytest.mark.parametrize("form", FORMS)
def test_agents_that_fuse_differently_have_the_bits_of_single_calls(fleet: Fleets, form: str) -> None:
    """Some agents name the same ranks in all calls and others do not, in other orders, in bursts of other lengths."""

    def named(index: int) -> Edges:
        return [OTHERS[rank] if rank % 2 and index % 3 == 0 else NAMED[rank] for rank in range(SIZE)]

    def run(seed: int) -> dict[int, torch.Tensor]:
        order, handles = list(range(24)), {}
        chance = random.Random(100 * seed + shoal.rank())
        chance.shuffle(order)
        for index in order:
            handles[index] = call(form, index, named(index), f"call {index}")
            if chance.random() < 0.15:
                current().engine.progress.drive_until(lambda: False, 0.0)  # begins what there is
        return {index: handle.wait(20) for index, handle in handles.items()}

    for seed in range(3):
        for rank, result in enumerate(fleet(SIZE).run(run, seed)):
            for index, one in result.items():
                assert same_bits(one, reference(form, named(index), index)[rank]), (seed, rank, index)


@pytest.mark.parametrize("one_by_one", [0, 3])
def test_an_agent_with_single_calls_works_with_agents_that_fuse(fleet: Fleets, one_by_one: int) -> None:
    def run() -> list[torch.Tensor]:
        if shoal.rank() == one_by_one:
            return [call("dst_weights", index).wait() for index in range(8)]
        with current().engine.lock:
            handles = [call("dst_weights", index) for index in range(8)]
        return [handle.wait() for handle in handles]

    for rank, result in enumerate(fleet(SIZE).run(run)):
        assert all(same_bits(one, reference("dst_weights", NAMED, index)[rank]) for index, one in enumerate(result))


def test_changed_lists_of_one_call_are_discovered_in_that_call(fleet: Fleets) -> None:
    """Rank 3 pushes elsewhere in the third of five calls. No agent misses a tensor, or waits for one."""

    def named(index: int) -> Edges:
        return [*NAMED[:3], {1: 1.0} if index == 2 else NAMED[3], NAMED[4]]

    def run() -> list[torch.Tensor]:
        shoal.barrier()
        with current().engine.lock:
            handles = [call("dst_weights", index, named(index)) for index in range(5)]
        return [handle.wait() for handle in handles]

    for rank, result in enumerate(fleet(SIZE).run(run)):
        for index, one in enumerate(result):
            assert same_bits(one, reference("dst_weights", named(index), index)[rank]), (rank, index)


def test_a_shape_that_differs_in_one_push_fails_only_that_push(fleet: Fleets) -> None:
    def run() -> dict[str, str]:
        handles: dict[str, Handle] = {}
        with current().engine.lock:
            for name in "abcd":
                x = torch.ones(2 + shoal.rank() if name == "b" else 2)
                other = 1 - shoal.rank()
                handles[name] = shoal.nonblocking.neighbor_allreduce(x, 1.0, dst_weights={other: 1.0}, name=name)
        result = {}
        for name, handle in handles.items():
            try:
                result[name] = f"{handle.wait(30)[0].item():g}"
            except shoal.Mismatch as error:
                result[name] = f"{sorted(error.ranks)} {'shape' in str(error)} {repr(name) in str(error)}"
        shoal.barrier()
        return result

    assert fleet(2).run(run) == [{"a": "2", "b": "[0, 1] True True", "c": "2", "d": "2"}] * 2


def test_a_push_that_an_agent_omits_is_named_at_its_deadline(fleet: Fleets) -> None:
    def run() -> dict[str, Any]:
        names = "abc" if shoal.rank() else "abcd"
        with current().engine.lock:
            handles = {
                name: shoal.nonblocking.neighbor_allreduce(
                    torch.ones(1), 1.0, dst_weights={(shoal.rank() + 1) % 3: 1.0}, name=name, timeout=0.8
                )
                for name in names
            }
        result: dict[str, Any] = {}
        for name, handle in handles.items():
            try:
                result[name] = handle.wait().item()
            except shoal.DeadlineExceeded as error:
                assert repr(name) in str(error)
                result[name] = error.ranks
        shoal.barrier()
        return result

    assert fleet(3).run(run) == [{"a": 2.0, "b": 2.0, "c": 2.0, "d": (2,)}, *[dict.fromkeys("abc", 2.0)] * 2]


def test_no_state_is_left(fleet: Fleets) -> None:
    def run() -> bool:
        engine = current().engine
        for round_ in range(5):
            handles = [call(FORMS[i % 2], i, OTHERS if i % 3 else NAMED, f"{i}") for i in range(20)]
            if round_ % 2:
                handles.reverse()
            for handle in handles:
                handle.wait()
        shoal.barrier()
        books = engine.fusion
        return wait_until(
            lambda: not (books._active or books._early or engine.lifecycle.unbegun) and engine.sender.drained
        )

    assert all(fleet(SIZE).run(run))
