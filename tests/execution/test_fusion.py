"""Small operations that travel together give what they give apart, whatever the neighbours have fused."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from threading import Event
from typing import Any

import networkx as nx
import pytest
import torch

import shoal
from shoal.execution import fused_operation, fusion
from shoal.execution.fused_operation import MOST_BYTES, MOST_OPERATIONS, PREFIX
from shoal.execution.lifecycle import Lifecycle
from shoal.runtime.agent import current
from shoal.transport.messages import Kind, Message, Payload
from support.leftovers import wait_until
from support.reference import averaged_over, same_bits
from support.samples import sample, samples

Fleets = Callable[..., shoal.Fleet]
Handles = dict[str, "shoal.Handle[torch.Tensor]"]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


class MessageCounter:
    """Counts the messages with a tensor that an agent sends, by whether they are fused."""

    def __init__(self) -> None:
        self.fused = self.single = 0
        sender = current().engine.sender
        post = sender.post

        def counted(channel: Any, operation: Any, stage: Any) -> None:
            if operation.name.startswith(PREFIX):
                self.fused += 1
            else:
                self.single += 1
            post(channel, operation, stage)

        sender.post = counted  # type: ignore[method-assign]


def shape_of(index: int) -> tuple[int, ...]:
    return [(3,), (), (2, 3), (70,), (1, 1, 5)][index % 5]


def dtype_of(index: int) -> torch.dtype:
    return DTYPES[index // 7 % len(DTYPES)]


def value(index: int, rank: int) -> torch.Tensor:
    return sample(rank, shape_of(index), dtype_of(index), index)


def expected(index: int, size: int) -> list[torch.Tensor]:
    graph = shoal.topology.ExponentialTwoGraph(size)
    return averaged_over(graph, [value(index, rank) for rank in range(size)], is_weighted=False)


def test_a_burst_is_one_message_and_keeps_every_bit(fleet: Fleets) -> None:
    count = 50

    def run() -> tuple[list[torch.Tensor], int, int]:
        shoal.barrier()
        post = MessageCounter()
        with current().engine.lock:  # nobody drives meanwhile
            handles = [shoal.nonblocking.neighbor_allreduce(sample(shoal.rank(), (5,), seed=i)) for i in range(count)]
        results = [handle.wait() for handle in handles]
        return results, post.fused, post.single

    graph = shoal.topology.ExponentialTwoGraph(4)
    averages = [averaged_over(graph, samples(4, (5,), seed=i), is_weighted=False) for i in range(count)]
    for rank, (result, fused, single) in enumerate(fleet(4).run(run)):
        assert all(same_bits(one, averages[i][rank]) for i, one in enumerate(result))
        assert (fused, single) == (1, 0)


def test_agents_that_fuse_differently_get_the_results_of_single_calls(fleet: Fleets) -> None:
    """Each agent submits in another order, in bursts of another length, some of them blocking."""
    size, count = 3, 60

    def run(seed: int) -> list[tuple[int, torch.Tensor]]:
        rank = shoal.rank()
        chance = random.Random(100 * seed + rank)
        order = list(range(count))
        chance.shuffle(order)
        handles: dict[int, shoal.Handle[torch.Tensor]] = {}
        for index in order:
            out = torch.empty(shape_of(index), dtype=dtype_of(index)) if index % 2 else None
            handles[index] = shoal.nonblocking.neighbor_allreduce(value(index, rank), f"tensor {index}", out=out)
            if chance.random() < 0.1:
                time.sleep(0.002)  # the progress thread begins what there is
        return [(index, handle.wait(20)) for index, handle in handles.items()]

    averages = [expected(index, size) for index in range(count)]
    for seed in range(4):
        for rank, result in enumerate(fleet(size).run(run, seed)):
            assert len(result) == count
            for index, one in result:
                assert same_bits(one, averages[index][rank]), (seed, rank, index)


def test_a_neighbour_with_single_calls_works_with_one_that_fuses(fleet: Fleets) -> None:
    count = 20

    def run() -> list[float]:
        x = [torch.tensor([float(i + shoal.rank())]) for i in range(count)]
        if shoal.rank() == 0:
            return [shoal.neighbor_allreduce(one).item() for one in x]
        handles = [shoal.nonblocking.neighbor_allreduce(one) for one in x]
        return [handle.wait().item() for handle in handles]

    assert fleet(2).run(run) == [[i + 0.5 for i in range(count)]] * 2


def test_the_tensors_of_a_burst_may_change_before_it_starts(fleet: Fleets) -> None:
    def run() -> list[float]:
        x = torch.tensor([1.0])
        handles = []
        with current().engine.lock:
            for i in range(10):
                x.fill_(float(i + shoal.rank()))
                handles.append(shoal.nonblocking.neighbor_allreduce(x))
            x.fill_(-1.0)
        return [handle.wait().item() for handle in handles]

    assert fleet(2).run(run) == [[i + 0.5 for i in range(10)]] * 2


@pytest.mark.parametrize(("count", "numel"), [(3 * MOST_OPERATIONS, 1), (MOST_BYTES // 16000 + 9, 4000)])
def test_a_burst_larger_than_one_fused_operation_takes_several(fleet: Fleets, count: int, numel: int) -> None:
    def run() -> list[float]:
        with current().engine.lock:
            handles = [
                shoal.nonblocking.neighbor_allreduce(torch.full((numel,), float(i + shoal.rank())))
                for i in range(count)
            ]
        return [handle.wait()[-1].item() for handle in handles]

    assert fleet(2).run(run) == [[i + 0.5 for i in range(count)]] * 2


def test_names_too_long_for_one_fused_operation_take_several(fleet: Fleets) -> None:
    names = [f"{i:03d} é" + "x" * 990 for i in range(40)]

    def run() -> list[float]:
        with current().engine.lock:
            handles = [
                shoal.nonblocking.neighbor_allreduce(torch.tensor([float(i + shoal.rank())]), name)
                for i, name in enumerate(names)
            ]
        return [handle.wait().item() for handle in handles]

    assert fleet(2).run(run) == [[i + 0.5 for i in range(40)]] * 2


def test_one_shape_that_differs_fails_alone(fleet: Fleets) -> None:
    def run() -> list[str]:
        handles: Handles = {}
        with current().engine.lock:
            for name in "abcde":
                numel = 2 + shoal.rank() if name == "c" else 4
                handles[name] = shoal.nonblocking.neighbor_allreduce(torch.ones(numel), name)
        outcomes = []
        for name, handle in handles.items():
            try:
                outcomes.append(f"{name} {handle.wait(30).sum().item():g}")
            except shoal.Mismatch as error:
                assert "shape" in str(error)
                assert set(error.ranks) == {0, 1}
                outcomes.append(f"{name} refused")
        return outcomes

    assert fleet(2).run(run) == [["a 4", "b 4", "c refused", "d 4", "e 4"]] * 2


def test_early_messages_of_several_neighbours_that_mismatch_fail_only_their_call(fleet: Fleets) -> None:
    """Rank 0 fuses the calls that the others have sent one by one before, in one call with another shape."""

    def run() -> list[str]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        shoal.barrier()
        handles: Handles = {}
        if shoal.rank():
            for name in "abc":
                numel = 3 if name == "b" else 2
                with current().engine.lock:
                    handles[name] = shoal.nonblocking.neighbor_allreduce(torch.ones(numel), name)
                current().engine.progress.drive_until(lambda: False, 0.0)  # begins it, by itself
            shoal.barrier()
        else:
            shoal.barrier()
            with current().engine.lock:
                handles = {name: shoal.nonblocking.neighbor_allreduce(torch.ones(2), name) for name in "abc"}
        outcomes = []
        for name, handle in handles.items():
            try:
                outcomes.append(f"{name} {handle.wait(30).sum().item():g}")
            except shoal.Mismatch:
                outcomes.append(f"{name} refused")
        shoal.barrier()
        return outcomes

    assert fleet(3).run(run) == [["a 2", "b refused", "c 2"]] * 3


def test_an_operation_omitted_by_a_neighbour_is_named_at_its_deadline(fleet: Fleets) -> None:
    def run() -> list[str]:
        names = "abc" if shoal.rank() else "abcd"
        with current().engine.lock:
            handles = [shoal.nonblocking.neighbor_allreduce(torch.ones(2), name, timeout=0.6) for name in names]
        outcomes = []
        for name, handle in zip(names, handles, strict=True):
            try:
                outcomes.append(f"{name} {handle.wait().sum().item():g}")
            except shoal.DeadlineExceeded as error:
                assert repr(name) in str(error)
                outcomes.append(f"{name} waited for {error.ranks}")
        shoal.barrier()
        return outcomes

    results = fleet(2).run(run)
    assert results == [["a 2", "b 2", "c 2", "d waited for (1,)"], ["a 2", "b 2", "c 2"]]


def test_a_fused_operation_whose_neighbour_leaves_ends_with_its_name(fleet: Fleets) -> None:
    def run() -> list[str]:
        if shoal.rank() == 1:
            shoal.barrier()
            return []
        with current().engine.lock:
            handles = [shoal.nonblocking.neighbor_allreduce(torch.ones(2), name) for name in "ab"]
        shoal.barrier()
        outcomes = []
        for name, handle in zip("ab", handles, strict=True):
            with pytest.raises(shoal.PeerLost) as caught:
                handle.wait(30)
            assert caught.value.ranks == (1,)
            outcomes.append(repr(name) in str(caught.value))
        return outcomes

    def one() -> list[str]:
        result = run()
        shoal.shutdown()
        return result

    assert fleet(2).run(one) == [[True, True], []]


def test_submitted_calls_reach_the_neighbours_of_an_agent_that_leaves(fleet: Fleets) -> None:
    def run() -> list[float]:
        handles = [shoal.nonblocking.neighbor_allreduce(torch.tensor([float(i)])) for i in range(5)]
        if shoal.rank() == 0:
            shoal.shutdown()
            return []
        return [handle.wait().item() for handle in handles]

    assert fleet(2).run(run) == [[], [0.0, 1.0, 2.0, 3.0, 4.0]]


def test_a_call_that_another_thread_is_about_to_send_reaches_them_too(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume = Lifecycle.resume

    def slowly(self: Lifecycle, operation: Any, arrived: Any) -> None:
        if operation.stage is None and self._rank == 0:
            time.sleep(0.2)
        resume(self, operation, arrived)

    def run() -> list[float]:
        handles = [shoal.nonblocking.neighbor_allreduce(torch.tensor([float(i)])) for i in range(5)]
        if shoal.rank() == 0:
            assert wait_until(lambda: not current().engine.lifecycle.unbegun)  # the progress thread has them
            shoal.shutdown()
            return []
        return [handle.wait().item() for handle in handles]

    monkeypatch.setattr(Lifecycle, "resume", slowly)
    assert fleet(2).run(run) == [[], [0.0, 1.0, 2.0, 3.0, 4.0]]


def test_submitted_calls_reach_neighbours_that_call_later(fleet: Fleets) -> None:
    """The departed agent has sent its part, and does not need theirs. The next call needs it and fails."""

    def run() -> float | None:
        shoal.neighbor_allreduce(torch.ones(1))
        if shoal.rank() == 0:
            shoal.nonblocking.neighbor_allreduce(torch.tensor([4.0]))
            shoal.shutdown()
            return None
        assert wait_until(lambda: current().engine.membership.view.left == (0,))
        result = shoal.neighbor_allreduce(torch.tensor([2.0])).item()
        with pytest.raises(shoal.PeerLost, match="rank 0 has left") as caught:
            shoal.neighbor_allreduce(torch.ones(1))
        assert caught.value.ranks == (0,)
        return result

    assert fleet(2).run(run) == [None, 3.0]


def test_an_invalid_fused_operation_is_refused_and_affects_no_other(fleet: Fleets) -> None:
    nonsense = [
        "",
        "[",
        "[[]]",
        '[["a", 0, 1]]',
        '[["a", -1, 1, [1]]]',
        '[["a", 0, 100000000, [0]]]',
        '[["a", 0, 1, [7]]]',
        "{}",
        "3",
    ]
    nonsense += [json.dumps([[1, 0, 1, [1]]]), json.dumps([["a", 0, True, [1]]]), "[" * 5000]
    # Text times a number is text: gigabytes of it. And thousands of operations that are all empty add up to anything.
    nonsense += [json.dumps([["a", 0, "x" * 80, [1 << 33]]]), json.dumps([["a", 0, [0] * 9, [1 << 33]]])]
    nonsense += [json.dumps([["a", 0, 1, [1]], *[["", 256 * k, 256, [0]] for k in range(600)]])]

    def run() -> float:
        engine = current().engine
        with engine.lock:
            for text in nonsense:
                payload = Payload(torch.ones(1), 1)
                engine.dispatch.on_message(
                    1 - shoal.rank(),
                    Message(
                        Kind.DATA, "neighbor_allreduce", PREFIX + text, dtype=torch.float32, shape=(1,), payload=payload
                    ),
                )
            early = [one.message.name for several in engine.fusion._early.values() for one in several]
            assert not set(early) & {PREFIX + text for text in nonsense}  # the other's own may be here already
        handles = [shoal.nonblocking.neighbor_allreduce(torch.tensor([float(shoal.rank())])) for _ in range(3)]
        return sum(handle.wait().item() for handle in handles)

    assert fleet(2).run(run) == [1.5, 1.5]


@pytest.mark.parametrize("where", ["_can_fuse", "encode_fused_name", "emit", "fused_steps"])
def test_an_error_while_operations_are_fused_reaches_their_callers(
    fleet: Fleets, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in no queue at that time, so nothing else would end them before their deadline."""

    def run() -> list[bool]:
        engine = current().engine
        shoal.observability.events().subscribe(lambda event: None)
        with engine.lock:  # no other thread begins them
            handles = [
                shoal.nonblocking.neighbor_allreduce(torch.ones(2, dtype=dtype))
                for dtype in (torch.float32, torch.float64, torch.float32)
            ]
            owners = {"emit": type(engine.events), "fused_steps": type(handles[0].operation.fusible.family)}

            def fails(*_: Any, **__: Any) -> None:
                monkeypatch.undo()
                raise MemoryError("of the test")

            monkeypatch.setattr(owners.get(where, fused_operation), where, fails)
            with pytest.raises(MemoryError, match="of the test"):
                engine.fusion.begin()
            assert not engine.fusion._active
            failed = [handle.poll() for handle in handles]
        for handle, has_failed in zip(handles, failed, strict=True):
            if has_failed:
                with pytest.raises(MemoryError, match="of the test"):
                    handle.wait()
            else:  # it is in the queue
                assert handle.wait().tolist() == [1.0, 1.0]
        assert shoal.neighbor_allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
        return failed

    fails_before_the_third = [True, False, False]
    assert fleet(1, timeout=20.0).run(run) == [fails_before_the_third if where == "_can_fuse" else [True, False, True]]


@pytest.mark.parametrize("limit", ["MOST_UNREAD", "MOST_UNREAD_BYTES"])
def test_fusion_is_limited_for_a_receiver_that_is_far_behind(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 only sends: of pairs of 12 bytes each, three are fused until rank 1 receives some."""
    monkeypatch.setattr(fusion, limit, 3 if limit == "MOST_UNREAD" else 60)
    graph, sent = nx.DiGraph([(0, 1)]), Event()

    def pair() -> None:
        with current().engine.lock:  # nobody drives between the two
            handles = [shoal.nonblocking.neighbor_allreduce(torch.ones(3)) for _ in range(2)]
        for handle in handles:
            handle.wait()

    def run() -> tuple[int, int, int]:
        shoal.set_topology(graph)
        shoal.barrier()
        postman = MessageCounter()
        if shoal.rank() == 0:
            for _ in range(5):
                pair()
            sent.set()
        else:
            assert sent.wait(20)
            for _ in range(5):
                pair()
        behind = postman.fused, postman.single
        shoal.barrier()
        pair()
        return *behind, postman.fused

    assert shoal.Fleet(2, transport="threads", timeout=20.0).run(run)[0] == (3, 4, 4)


def test_fused_bundles_leave_no_state(fleet: Fleets) -> None:
    def run() -> bool:
        engine = current().engine
        for _ in range(20):
            for handle in [shoal.nonblocking.neighbor_allreduce(torch.ones(3)) for _ in range(30)]:
                handle.wait()
        shoal.barrier()
        books = engine.fusion
        unbegun = engine.lifecycle.unbegun
        empty = wait_until(lambda: not (books._active or books._early or unbegun) and engine.sender.drained)
        return empty and not any(one.unacknowledged for one in books._unread)

    assert all(fleet(3).run(run))


def test_a_neighbour_that_has_sent_its_part_may_leave_before_the_others_call(fleet: Fleets) -> None:
    """Split while it waits for rank 2, a fused operation keeps the part of rank 1, which left."""
    graph = nx.DiGraph([(1, 0), (2, 0), (0, 1)])
    graph.add_nodes_from(range(3))

    def run() -> list[float]:
        shoal.set_topology(graph)
        shoal.barrier()
        if shoal.rank() == 2:
            time.sleep(1.0)  # rank 1 has left by then
        x = torch.full((3,), float(shoal.rank()))
        if shoal.rank() == 1:  # one by one: what comes is put in its place and acknowledged, so that it can leave
            return [shoal.neighbor_allreduce(x + part, name=f"part {part}")[0].item() for part in range(5)]
        handles = [shoal.nonblocking.neighbor_allreduce(x + part, name=f"part {part}") for part in range(5)]
        return [shoal.bluefog.wait(handle)[0].item() for handle in handles]

    results = fleet(3).run(run)
    assert results[0] == pytest.approx([1.0 + part for part in range(5)])


@pytest.mark.transport("network")
def test_an_incompletely_received_fused_operation_is_no_protocol_error() -> None:
    """A late agent answers earlier queries when its calls have ended. Their messages are still in flight."""

    def run() -> float:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        shoal.barrier()
        if shoal.rank() == 0:
            time.sleep(0.3)
        x = torch.ones(2000)
        handles = [shoal.nonblocking.neighbor_allreduce(x) for _ in range(1000)]
        return sum(handle.wait()[0].item() for handle in handles)

    assert shoal.Fleet(2, transport="network", timeout=20.0).run(run) == [1000.0] * 2
