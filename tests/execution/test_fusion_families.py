"""Fusion of calls other than static averages: push-pull calls of one round, rounds of a schedule, all-reduces."""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

import shoal
from shoal.execution.fused_operation import PREFIX, take_fusible
from shoal.execution.membership import Plan
from shoal.execution.operation import FailurePolicy, FusionSpec, Operation, Recovery
from shoal.execution.stage import Steps
from shoal.runtime.agent import current
from support.leftovers import wait_until
from support.reference import push_pull, reduced, same_bits
from support.samples import sample, samples

Fleets = Callable[..., shoal.Fleet]
Handle = shoal.Handle[torch.Tensor]
Edges = list[dict[int, float]]
COUNT, SIZE = 50, 4
SEND: Edges = [{1: 0.5, 2: 2.0}, {2: 1.0}, {3: 0.25, 0: 1.0}, {0: 3.0}]
RECEIVE: Edges = [{2: 0.5, 3: 0.125}, {0: 0.3}, {0: 0.7, 1: -1.0}, {2: 0.6}]
HOWS = ("sum", "average", "min", "max", "product")


class MessageCounter:
    """Counts the messages that an agent sends, by operation, and whether they are fused."""

    def __init__(self) -> None:
        self.sent: Counter[tuple[str, bool]] = Counter()
        sender = current().engine.sender
        post = sender.post

        def counted(channel: Any, operation: Any, stage: Any) -> None:
            fused = operation.name.startswith(PREFIX)
            self.sent[operation.op.partition(" ")[0], fused] += len(stage.exchange.sends)
            post(channel, operation, stage)

        sender.post = counted  # type: ignore[method-assign]

    def of(self, op: str) -> tuple[int, int]:
        """Messages that are fused, and that are not."""
        return self.sent[op, True], self.sent[op, False]


def shape_of(index: int) -> tuple[int, ...]:
    return [(3,), (), (2, 3), (70,), (1, 1, 5)][index % 5]


def dtype_of(index: int) -> torch.dtype:
    return (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)[index // 7 % 5]


def how_of(index: int) -> str:
    return HOWS[index % (2 if dtype_of(index).is_complex else 5)]


def value(index: int, rank: int) -> torch.Tensor:
    return sample(rank, shape_of(index), dtype_of(index), index)


def pushed_and_pulled(index: int, name: str | None = None, check: bool = True, **more: Any) -> Handle:
    rank = shoal.rank()
    return shoal.nonblocking.neighbor_allreduce(
        value(index, rank), 0.1, RECEIVE[rank], SEND[rank], name=name, enable_topo_check=check, **more
    )


def all_reduced(index: int, name: str | None = None, **more: Any) -> Handle:
    return shoal.nonblocking.allreduce(value(index, shoal.rank()), name=name, op=how_of(index), **more)


def exchanged(index: int, **more: Any) -> Handle:
    """A call of either kind."""
    return (all_reduced if index % 2 else pushed_and_pulled)(index, f"tensor {index}", **more)


def expected(index: int) -> list[torch.Tensor]:
    inputs = [value(index, rank) for rank in range(SIZE)]
    if index % 2:
        return [reduced(how_of(index), inputs)] * SIZE
    return push_pull(inputs, [0.1] * SIZE, RECEIVE, SEND)


def outcomes(handles: dict[str, Handle], seconds: float = 10.0) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, handle in handles.items():
        try:
            result[name] = handle.wait(seconds).tolist()
        except shoal.ShoalError as error:
            assert repr(name) in str(error), str(error)
            result[name] = type(error).__name__, tuple(sorted(error.ranks))
    return result


@pytest.mark.parametrize("check", [True, False])
def test_fifty_push_pull_calls_are_one_message_to_each_destination(fleet: Fleets, check: bool) -> None:
    def run() -> tuple[list[torch.Tensor], tuple[int, int]]:
        rank = shoal.rank()
        shoal.barrier()
        post = MessageCounter()
        with current().engine.lock:  # nobody drives meanwhile
            handles = [
                shoal.nonblocking.neighbor_allreduce(
                    sample(rank, (5,), seed=i), 0.1, RECEIVE[rank], SEND[rank], enable_topo_check=check
                )
                for i in range(COUNT)
            ]
        return [handle.wait() for handle in handles], post.of("neighbor_allreduce")

    averages = [push_pull(samples(SIZE, (5,), seed=i), [0.1] * SIZE, RECEIVE, SEND) for i in range(COUNT)]
    for rank, (result, sent) in enumerate(fleet(SIZE).run(run)):
        assert all(same_bits(one, averages[i][rank]) for i, one in enumerate(result))
        assert sent == (len(SEND[rank]), 0)


def test_fifty_all_reduces_are_one_message_to_the_owner_and_one_from_it(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.execution.fusion.SPLIT_AFTER", 60.0)  # however busy the machine is

    def run() -> tuple[list[torch.Tensor], tuple[int, int]]:
        shoal.barrier()
        post = MessageCounter()
        with current().engine.lock:
            handles = [shoal.nonblocking.allreduce(sample(shoal.rank(), (5,), seed=i)) for i in range(COUNT)]
        return [handle.wait() for handle in handles], post.of("allreduce")

    averages = [reduced("average", samples(SIZE, (5,), seed=i)) for i in range(COUNT)]
    for rank, (result, sent) in enumerate(fleet(SIZE).run(run)):
        assert all(same_bits(one, averages[i]) for i, one in enumerate(result))
        assert sent == (1 if rank else SIZE - 1, 0)


def test_calls_in_the_same_round_of_a_schedule_are_fused_and_others_are_not(fleet: Fleets) -> None:
    """Ten tensors in each of three rounds of a one-peer schedule, all submitted before any progress is made."""

    def run() -> tuple[list[float], tuple[int, int]]:
        schedule = shoal.topology.GetDynamicOnePeerSendRecvRanks(shoal.topology.ExponentialTwoGraph(8), shoal.rank())
        shoal.barrier()
        post, handles = MessageCounter(), []
        with current().engine.lock:
            for _ in range(3):
                send, receive = next(schedule)
                handles += [
                    shoal.nonblocking.neighbor_allreduce(
                        torch.tensor(float(shoal.rank() + i)), 0.5, dict.fromkeys(receive, 0.5), send
                    )
                    for i in range(10)
                ]
        return [handle.wait().item() for handle in handles], post.of("neighbor_allreduce")

    for rank, (result, sent) in enumerate(fleet(8).run(run)):
        behind = [(rank - hop) % 8 for hop in (1, 2, 4)]
        assert result == [(rank + other) / 2 + i for other in behind for i in range(10)]
        assert sent == (3, 0)


def test_agents_that_submit_the_same_in_another_order_fuse_equally(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fused operation has to be split."""
    monkeypatch.setattr("shoal.execution.fusion.SPLIT_AFTER", 60.0)  # however busy the machine is

    def run() -> tuple[list[float], int, Counter[tuple[str, bool]]]:
        order, handles = list(range(COUNT)), {}
        random.Random(shoal.rank()).shuffle(order)
        shoal.barrier()
        post, fusion, apart = MessageCounter(), current().engine.fusion, []
        unpack = fusion._unpack
        fusion._unpack = lambda received: (apart.append(received), unpack(received))[1]  # type: ignore[method-assign]
        with current().engine.lock:
            for i in order:
                handles[i] = shoal.nonblocking.allreduce(torch.tensor(float(i + shoal.rank())), name=f"gradient {i}")
        results = [handles[i].wait().item() for i in range(COUNT)]
        return results, len(apart), post.sent

    for rank, (result, apart, sent) in enumerate(fleet(2).run(run)):
        assert result == [i + 0.5 for i in range(COUNT)], rank
        assert (apart, sent) == (0, Counter({("allreduce", True): 1}))


def test_alternating_calls_of_several_kinds_are_one_message_of_each(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.execution.fusion.SPLIT_AFTER", 60.0)  # however busy the machine is

    def run() -> Counter[tuple[str, bool]]:
        rank, other = shoal.rank(), 1 - shoal.rank()
        shoal.barrier()
        post, handles, x = MessageCounter(), [], torch.ones(3)
        with current().engine.lock:
            for i in range(10):
                handles.append(shoal.nonblocking.allreduce(x, name=f"mean {i}"))
                handles.append(shoal.nonblocking.neighbor_allreduce(x, name=f"static {i}"))
                handles.append(shoal.nonblocking.neighbor_allreduce(x, 0.5, {other: 0.5}, {other: 1}, name=f"edge {i}"))
        assert all(torch.equal(handle.wait(), x) for handle in handles), rank
        return post.sent

    assert fleet(2).run(run) == [Counter({("allreduce", True): 1, ("neighbor_allreduce", True): 2})] * 2


def test_agents_that_fuse_differently_have_the_bits_of_single_calls(fleet: Fleets) -> None:
    """Each agent submits in another order, and waits for some calls in between, so that bursts differ in length."""

    def run(seed: int) -> list[tuple[int, torch.Tensor]]:
        rank, chance = shoal.rank(), random.Random(10 * seed)
        handles: dict[int, Handle] = {}
        for start in range(0, 60, 20):  # waiting for one completes all before it, and the others join
            order = list(range(start, start + 20))
            random.Random(100 * seed + rank).shuffle(order)
            for index in order:
                out = torch.empty(shape_of(index), dtype=dtype_of(index)) if index % 3 == 0 else None
                handles[index] = exchanged(index, out=out)
                if random.Random(f"{seed} {rank} {index}").random() < 0.15:
                    with current().engine.lock:
                        pass
                    current().engine.progress.drive_until(lambda: False, 0.0)  # begins what there is
            if chance.random() < 0.5 and rank % 2:
                handles[start].wait(20)
        return [(index, handle.wait(20)) for index, handle in handles.items()]

    wanted = [expected(index) for index in range(60)]
    for seed in range(3):
        for rank, result in enumerate(fleet(SIZE).run(run, seed)):
            assert len(result) == 60
            for index, one in result:
                assert same_bits(one, wanted[index][rank]), (seed, rank, index)


@pytest.mark.parametrize("one_by_one", range(SIZE))
def test_an_agent_with_single_calls_works_with_agents_that_fuse(fleet: Fleets, one_by_one: int) -> None:
    """So does the owner of the all-reduces."""

    def run() -> list[torch.Tensor]:
        if shoal.rank() == one_by_one:
            return [exchanged(index).wait() for index in range(20)]
        with current().engine.lock:
            handles = [exchanged(index) for index in range(20)]
        return [handle.wait() for handle in handles]

    for rank, result in enumerate(fleet(SIZE).run(run)):
        assert all(same_bits(one, expected(index)[rank]) for index, one in enumerate(result))


@pytest.mark.parametrize("kind", [pushed_and_pulled, all_reduced])
def test_a_shape_that_differs_in_one_call_fails_only_that_call(fleet: Fleets, kind: Callable[..., Handle]) -> None:
    def run() -> dict[str, Any]:
        other, x = 1 - shoal.rank(), torch.ones(4)
        handles: dict[str, Handle] = {}
        with current().engine.lock:
            for name in "abcde":
                given = torch.ones(2 + shoal.rank()) if name == "c" else x
                if kind is all_reduced:
                    handles[name] = shoal.nonblocking.allreduce(given, name=name)
                else:
                    edge = {other: 0.5}
                    handles[name] = shoal.nonblocking.neighbor_allreduce(given, 0.5, edge, edge, name=name)
        result = outcomes(handles)
        shoal.barrier()
        return result

    well = {name: [1.0 if kind is all_reduced else 0.75] * 4 for name in "abde"}
    assert fleet(2).run(run) == [{**well, "c": ("Mismatch", (0, 1))}] * 2


def test_one_shape_that_differs_fails_only_its_all_reduce_of_one_owner(fleet: Fleets) -> None:
    def run() -> dict[str, Any]:
        x = {name: torch.ones(3 if name == "b" and shoal.rank() == 2 else 2) for name in "abc"}
        with current().engine.lock:
            handles = {name: shoal.nonblocking.allreduce(one, name=name) for name, one in x.items()}
        results = outcomes(handles)
        shoal.barrier()
        return results

    for result in fleet(SIZE).run(run):
        assert (result["a"], result["c"]) == ([1.0, 1.0], [1.0, 1.0])
        assert result["b"][0] == "Mismatch"
        assert 0 in result["b"][1]


def edges_from_0_to_1(unaware: int, notified: threading.Event) -> dict[str, Any]:
    """Three calls; one of the two agents leaves out the edge in the second.

    It learns of that at its next call, where that one had ended before.
    """
    handles: dict[str, Handle] = {}
    with current().engine.lock:
        for name in "abc":
            named = {} if name == "b" and shoal.rank() == unaware else {1 - shoal.rank(): 1.0}
            edge: Edges = [{}, named] if shoal.rank() == 0 else [named, {}]
            handles[name] = shoal.nonblocking.neighbor_allreduce(torch.ones(2), 0.5, *edge, name=name)
    result = outcomes(handles)
    if shoal.rank() != unaware:
        assert notified.wait(30)  # it is there until the other has heard
        return result
    if result["b"] == [0.5, 0.5]:
        assert wait_until(lambda: current().engine.lifecycle.late_refusal is not None)
        with pytest.raises(shoal.Mismatch) as caught:
            shoal.barrier()
        assert "'b'" in str(caught.value)
        result["b"] = "Mismatch", tuple(sorted(caught.value.ranks))
    notified.set()
    return result


@pytest.mark.parametrize("unaware", [0, 1])
def test_an_edge_that_one_end_omits_in_one_call_is_an_error_at_both(fleet: Fleets, unaware: int) -> None:
    """As without fusion: a sender with a complete result still waits until the receiver has confirmed the edge."""
    results = fleet(2).run(edges_from_0_to_1, unaware, threading.Event())
    right: list[dict[str, Any]] = [{name: [value] * 2 for name in "ac"} for value in (0.5, 1.5)]
    for one in right:
        one["b"] = "Mismatch", (0, 1)
    assert results == right


def test_a_sender_is_not_confirmed_before_the_receivers_call(fleet: Fleets) -> None:
    """Rank 1 has made one of the calls when it splits rank 0's message for all three."""

    def run() -> list[bool]:
        rank, names = shoal.rank(), "abc"
        shoal.barrier()
        if rank == 1:
            first = shoal.neighbor_allreduce(torch.ones(1), 0.5, {0: 0.5}, {}, name="a").item()
            shoal.barrier()
            shoal.barrier()
            rest = [shoal.neighbor_allreduce(torch.ones(1), 0.5, {0: 0.5}, {}, name=name).item() for name in "bc"]
            return [one == 1.0 for one in (first, *rest)]
        with current().engine.lock:
            handles = [
                shoal.nonblocking.neighbor_allreduce(torch.ones(1), 0.5, {}, {1: 1.0}, name=name) for name in names
            ]
        shoal.barrier()
        early = [handle.poll() for handle in handles]
        shoal.barrier()
        return [not early[1], not early[2], *(handle.wait().item() == 0.5 for handle in handles)]

    assert fleet(2).run(run) == [[True] * 5, [True] * 3]


@pytest.mark.parametrize("kind", ["push-pull", "all-reduce"])
def test_a_call_that_an_agent_omits_is_named_at_its_deadline(fleet: Fleets, kind: str) -> None:
    def run() -> dict[str, Any]:
        rank, names = shoal.rank(), "abc" if shoal.rank() == 1 else "abcd"
        handles: dict[str, Handle] = {}
        with current().engine.lock:
            for name in names:
                x = torch.ones(2)
                if kind == "all-reduce":
                    handles[name] = shoal.nonblocking.allreduce(x, name=name, timeout=0.7)
                else:
                    one, behind = {(rank + 1) % 3: 1.0}, {(rank - 1) % 3: 0.5}
                    handles[name] = shoal.nonblocking.neighbor_allreduce(x, 0.5, behind, one, name=name, timeout=0.7)
        result = outcomes(handles)
        shoal.barrier()
        return result

    well = {name: [1.0, 1.0] for name in "abc"}
    results = fleet(3).run(run)
    assert results[1] == well
    for rank in (0, 2):
        assert {**results[rank], "d": None} == {**well, "d": None}
        assert results[rank]["d"][0] == "DeadlineExceeded"
        assert 1 in results[rank]["d"][1]


def test_no_state_is_left(fleet: Fleets) -> None:
    def run() -> bool:
        engine = current().engine
        for round_ in range(10):
            for handle in [exchanged(20 * round_ + i) for i in range(20)]:
                handle.wait()
        shoal.barrier()
        books = engine.fusion
        return wait_until(
            lambda: not (books._active or books._early or engine.lifecycle.unbegun) and engine.sender.drained
        )

    assert all(fleet(SIZE).run(run))


def test_large_tensors_and_blocking_calls_do_not_wait_for_others(fleet: Fleets) -> None:
    def run() -> list[tuple[int, int]]:
        other = 1 - shoal.rank()
        shoal.barrier()
        post = MessageCounter()
        large = torch.ones(5000)
        with current().engine.lock:
            handles = [shoal.nonblocking.allreduce(large) for _ in range(2)]
            handles += [shoal.nonblocking.neighbor_allreduce(large, 0.5, {other: 0.5}, {other: 1}) for _ in range(2)]
        assert all(torch.equal(handle.wait(), large) for handle in handles)
        shoal.allreduce(torch.ones(2))
        shoal.neighbor_allreduce(torch.ones(2), 0.5, {other: 0.5}, {other: 1})
        return [post.of("allreduce"), post.of("neighbor_allreduce")]

    assert fleet(2).run(run) == [[(0, 3), (0, 3)]] * 2


def test_survivors_continue_with_fused_operations(fleet: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3, or the owner of the all-reduces, fails before it takes part in a burst of the others."""
    monkeypatch.setenv("SHOAL_ON_LOSS", "continue")

    def run(departing: int) -> list[float] | None:
        shoal.barrier()
        if shoal.rank() == departing:
            shoal.shutdown()
            return None
        rank = shoal.rank()
        x, others = torch.tensor(10.0**rank, dtype=torch.float64), [index for index in range(SIZE) if index != rank]
        handles = []
        with current().engine.lock:
            for _ in range(5):
                handles.append(shoal.nonblocking.allreduce(x, average=False))
                weights = dict.fromkeys(others, 0.25)
                handles.append(shoal.nonblocking.neighbor_allreduce(x, 0.25, weights, others))
        return [handle.wait().item() for handle in handles]

    for departed in (3, 0):
        left = [rank for rank in range(SIZE) if rank != departed]
        total = sum(10.0**rank for rank in left)
        results = fleet(SIZE).run(run, departed)
        for rank in left:
            assert results[rank] == pytest.approx([total, (total + 10.0**rank) / 4] * 5), (departed, rank)


@pytest.mark.parametrize("on_loss", ["raise", "continue"])
def test_operations_that_restart_after_a_failure_are_not_fused(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch, on_loss: str
) -> None:
    monkeypatch.setenv("SHOAL_ON_LOSS", on_loss)

    def run() -> set[str]:
        x, other, fused = torch.ones(2), 1 - shoal.rank(), set()
        stop = shoal.observability.events().subscribe(
            lambda event: fused.add(event.operation) if event.kind == "fused" else None
        )
        with current().engine.lock:
            handles = [shoal.nonblocking.allreduce(x) for _ in range(3)]
            handles += [shoal.nonblocking.neighbor_allreduce(x, 0.5, {other: 0.5}) for _ in range(3)]
            handles += [shoal.nonblocking.neighbor_allreduce(x, 0.5, {other: 0.5}, {other: 1}) for _ in range(3)]
        assert all(torch.equal(handle.wait(), x) for handle in handles)
        stop()
        return fused

    averages = {"neighbor_allreduce"}
    assert fleet(2).run(run) == [averages if on_loss == "continue" else averages | {"allreduce (average)"}] * 2


class EqualFamily:
    """A family of which all are equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EqualFamily)

    __hash__ = None  # type: ignore[assignment]

    def fused_steps(self, operation: Operation, parts: list[FusionSpec]) -> Steps[list[torch.Tensor | Exception]]:
        raise NotImplementedError
        yield


def unbegun(plans: list[Plan]) -> deque[Operation]:
    """Calls submitted while others failed or joined: each with the ranks that it is planned for."""
    result: deque[Operation] = deque()
    for round_, plan in enumerate(plans):
        operation = Operation("op", "x", round_, 1.0)
        operation.handle = cast("Handle", object())
        operation.fusible = FusionSpec(torch.zeros(1), (1,), None, lambda _: iter(()), EqualFamily())  # type: ignore[arg-type,return-value]
        operation.recovery = Recovery(operation.fusible.alone, FailurePolicy.SKIP_MISSING, plan)
        result.append(operation)
    return result


def test_calls_planned_for_a_subset_are_not_fused() -> None:
    failed, entered = Plan((3,)), Plan((), 1)
    waiting = unbegun([failed, failed, Plan(), entered, Plan()])
    taken_plans = []
    while waiting:
        members: list[Operation] = []
        take_fusible(waiting, members)
        taken_plans.append([one.round for one in members])
    assert taken_plans == [[0], [1], [2, 3, 4]]
