"""Many operations in flight: handles, any order of submission, several threads of one agent, rounds ahead."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from shoal.execution.operation import Handle
from shoal.runtime.agent import current
from support.leftovers import wait_until
from support.limits import scaled
from support.reference import averaged_over, same_bits
from support.samples import sample, samples

Fleets = Callable[..., shoal.Fleet]


def shuffled(names: list[str], seed: int) -> list[str]:
    return random.Random(seed).sample(names, len(names))


@pytest.mark.parametrize("numel", [2, 1000, 8000])
def test_a_hundred_names_in_flight_match_in_any_order(fleet: Fleets, numel: int) -> None:
    names = [f"tensor {i}" for i in range(100)]

    def run() -> list[float]:
        rank = shoal.rank()
        handles = {
            name: shoal.nonblocking.neighbor_allreduce(torch.full((numel,), float(i + rank)), name)
            for i, name in sorted(enumerate(names), key=lambda pair: shuffled(names, rank).index(pair[1]))
        }
        return [handles[name].wait().mean().item() for name in shuffled(names, 10 + rank)]

    for rank, result in enumerate(fleet(3).run(run)):
        assert result == pytest.approx([names.index(name) + 1.0 for name in shuffled(names, 10 + rank)])


def test_unnamed_operations_match_by_call_order_within_their_type(fleet: Fleets) -> None:
    """The kinds are interleaved differently on each agent; within a kind the order is the same."""

    def run() -> tuple[list[float], list[float], list[int]]:
        x = torch.tensor([float(shoal.rank())])
        begin: dict[str, Callable[[int], shoal.Handle[torch.Tensor]]] = {
            "mix": lambda i: shoal.nonblocking.neighbor_allreduce(x + i),
            "sum": lambda i: shoal.nonblocking.allreduce(x + i),
            "gather": lambda i: shoal.nonblocking.allgather((x + i).int()),
        }
        order = ["mix"] * 5 + ["sum"] * 5 + ["gather"] * 5
        random.Random(shoal.rank()).shuffle(order)
        handles: dict[str, list[shoal.Handle[torch.Tensor]]] = {kind: [] for kind in begin}
        for kind in order:
            handles[kind].append(begin[kind](len(handles[kind])))
        return (
            [handle.wait().item() for handle in handles["mix"]],
            [handle.wait().item() for handle in handles["sum"]],
            [int(handle.wait().sum().item()) for handle in handles["gather"]],
        )

    averages = [0.5 + i for i in range(5)]
    assert fleet(2).run(run) == [(averages, averages, [1 + 2 * i for i in range(5)])] * 2


def test_several_threads_of_one_agent_may_call_at_once(fleet: Fleets) -> None:
    numels = [3, 6000] * 5

    def run() -> bool:
        def work(thread: int) -> list[torch.Tensor]:
            return [
                shoal.neighbor_allreduce(sample(shoal.rank(), (numels[step],), seed=step), f"{thread}/{step}")
                for step in range(10)
            ]

        with ThreadPoolExecutor(4) as pool:
            result = list(pool.map(shoal.Fleet.bind(work), range(4)))
        graph = shoal.topology.ExponentialTwoGraph(3)
        for step in range(10):
            inputs = samples(3, (numels[step],), seed=step)
            expected = averaged_over(graph, inputs, is_weighted=False)[shoal.rank()]
            assert all(same_bits(results[step], expected) for results in result)
        return True

    assert fleet(3).run(run) == [True] * 3


def test_an_unbound_thread_is_no_agent(fleet: Fleets) -> None:
    def run() -> str:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(shoal.rank)
            with pytest.raises(shoal.NotInitialized):
                future.result()
            assert pool.submit(shoal.Fleet.bind(shoal.rank)).result() == shoal.rank()
        return "both"

    assert fleet(2).run(run) == ["both"] * 2


def test_waiting_in_another_thread_than_the_one_that_submitted_works(fleet: Fleets) -> None:
    def run() -> float:
        handle = shoal.nonblocking.neighbor_allreduce(torch.tensor(float(shoal.rank())))
        with ThreadPoolExecutor(3) as pool:
            return sum(result.item() for result in pool.map(lambda _: handle.wait(), range(3)))

    assert fleet(2).run(run) == [1.5, 1.5]


def test_poll_becomes_true_without_a_wait(fleet: Fleets) -> None:
    def run() -> bool:
        handle = shoal.nonblocking.neighbor_allreduce(torch.ones(5000))
        assert wait_until(handle.poll)
        assert shoal.bluefog.poll(handle)
        return shoal.bluefog.wait(handle) is handle.wait()

    assert fleet(3).run(run) == [True] * 3


def test_poll_is_false_and_does_not_block_while_a_neighbour_is_missing(fleet: Fleets) -> None:
    go = threading.Event()

    def run() -> float:
        if shoal.rank() == 1:
            assert go.wait(30)
        handle = shoal.nonblocking.neighbor_allreduce(torch.tensor(float(shoal.rank())))
        if shoal.rank() == 0:
            started = time.monotonic()
            assert not any(handle.poll() for _ in range(100))
            assert time.monotonic() - started < scaled(1.0)
            assert "in flight" in repr(handle)
            go.set()
        result = handle.wait().item()
        assert "done" in repr(handle)
        return result

    assert fleet(2).run(run) == [0.5, 0.5]


def test_wait_twice_synchronize_and_wait_give_one_result(fleet: Fleets) -> None:
    def run() -> bool:
        handle = shoal.nonblocking.neighbor_allreduce(torch.ones(3))
        first = handle.wait()
        return (
            handle.wait() is first
            and shoal.bluefog.synchronize(handle) is first
            and shoal.bluefog.wait(handle, 1.0) is first
        )

    assert all(fleet(2).run(run))


def test_a_wait_with_a_timeout_ends_and_leaves_the_operation_in_flight(fleet: Fleets) -> None:
    go = threading.Event()

    def run() -> float:
        if shoal.rank() == 1:
            assert go.wait(30)
            return shoal.neighbor_allreduce(torch.tensor(1.0), "late").item()
        handle = shoal.nonblocking.neighbor_allreduce(torch.tensor(0.0), "late")
        started = time.monotonic()
        with pytest.raises(shoal.DeadlineExceeded, match=r"'late' round 0.*0\.05 s.*\[1\]") as caught:
            handle.wait(0.05)
        assert caught.value.ranks == (1,)
        assert 0.04 < time.monotonic() - started < scaled(2.0)
        with pytest.raises(shoal.DeadlineExceeded):
            shoal.bluefog.wait(handle, timeout=0.01)
        with pytest.raises(shoal.DeadlineExceeded):
            handle.wait(0.0)
        go.set()
        return handle.wait().item()

    assert fleet(2).run(run) == [0.5, 0.5]


def test_done_callbacks_run_once_with_the_handle_before_or_after_the_end(fleet: Fleets) -> None:
    def run() -> list[str]:
        seen: list[tuple[str, float]] = []
        with current().engine.lock:  # the operation must not end between the two
            handle = shoal.nonblocking.neighbor_allreduce(torch.tensor(float(shoal.rank())))
            handle.add_done_callback(lambda h: seen.append(("first", h.wait().item())))
            handle.add_done_callback(lambda h: seen.append(("second", h.wait().item())))
        handle.wait()
        assert wait_until(lambda: len(seen) == 2)
        handle.add_done_callback(lambda h: seen.append(("late", h.wait().item())))
        assert {value for _, value in seen} == {0.5}
        return [name for name, _ in seen]

    assert fleet(2).run(run) == [["first", "second", "late"]] * 2


def test_a_callback_that_raises_is_logged_and_has_no_other_effect(
    fleet: Fleets, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> float:
        handle = shoal.nonblocking.neighbor_allreduce(torch.tensor(float(shoal.rank())), "unlucky")
        ran = threading.Event()

        def fail(_: shoal.Handle[torch.Tensor]) -> None:
            ran.set()
            raise ZeroDivisionError("of the test")

        handle.add_done_callback(fail)
        handle.wait()
        assert ran.wait(30)
        return shoal.neighbor_allreduce(torch.tensor(2.0)).item()

    assert fleet(2).run(run) == [2.0, 2.0]
    assert "callback of neighbor_allreduce 'unlucky' round 0 failed" in caplog.text


def test_a_callback_runs_as_the_agent_that_added_it(fleet: Fleets) -> None:
    """In any thread, so that a chain of operations can be written in callbacks."""

    def run() -> float:
        chain: list[shoal.Handle[torch.Tensor]] = []
        finished = threading.Event()

        def next_step(handle: shoal.Handle[torch.Tensor]) -> None:
            if len(chain) == 3:
                finished.set()
                return
            chain.append(shoal.nonblocking.neighbor_allreduce(handle.wait() + shoal.rank(), "chain"))
            chain[-1].add_done_callback(next_step)

        shoal.nonblocking.neighbor_allreduce(torch.tensor(0.0), "chain").add_done_callback(next_step)
        assert finished.wait(30)
        return chain[-1].wait().item()

    assert fleet(2).run(run) == [1.5, 1.5]


def test_a_callback_that_waits_for_another_operation_raises_a_deadlock_error(fleet: Fleets) -> None:
    go = threading.Event()

    def run() -> float:
        if shoal.rank() == 1:
            shoal.allreduce(torch.ones(1), name="now")
            assert go.wait(30)
            return shoal.neighbor_allreduce(torch.tensor(1.0), "later").item()
        later = shoal.nonblocking.neighbor_allreduce(torch.tensor(0.0), "later")
        errors: list[Exception] = []

        def wait_in_callback(_: shoal.Handle[torch.Tensor]) -> None:
            try:
                later.wait()
            except Exception as error:
                errors.append(error)
            go.set()

        shoal.nonblocking.allreduce(torch.ones(1), name="now").add_done_callback(wait_in_callback)
        assert go.wait(30)
        assert [type(error) for error in errors] == [RuntimeError]
        assert "would never end" in str(errors[0])
        return later.wait().item()

    assert fleet(2).run(run) == [0.5, 0.5]


def test_a_sender_may_be_many_rounds_ahead_on_a_directed_edge(fleet: Fleets) -> None:
    """Agent 0 has no source and does not wait. The others read its rounds in order, without loss."""
    count = 20

    def run() -> list[float]:
        graph = shoal.topology.with_weights(*[torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 1, 0]]).numpy()] * 2)
        shoal.set_topology(graph, is_weighted=True)
        handles: list[shoal.Handle[torch.Tensor]] = []
        for i in range(count):
            if shoal.rank() and i % 7 == 0:
                time.sleep(0.005)
            x = torch.full((9000 if i % 2 else 3,), float(10 * i + shoal.rank()))
            if i >= 3:
                handles[i - 3].wait()  # a name is in flight once
            handles.append(shoal.nonblocking.neighbor_allreduce(x, f"name {i % 3}"))
        return [handle.wait().mean().item() for handle in handles]

    def run_unnamed() -> list[float]:
        shoal.set_topology(shoal.topology.with_weights(*[torch.tensor([[1.0, 0], [1, 0]]).numpy()] * 2), True)
        handles = [
            shoal.nonblocking.neighbor_allreduce(torch.full((9000,), float(i + 100 * shoal.rank())))
            for i in range(count)
        ]
        return [handle.wait().mean().item() for handle in handles]

    assert fleet(3).run(run) == [[10.0 * i + max(0, rank - 1) for i in range(count)] for rank in range(3)]
    assert fleet(2).run(run_unnamed) == [[float(i) for i in range(count)]] * 2


@pytest.mark.links("who sends may go on before who reads has come")
def test_unnamed_calls_run_at_most_two_unread_rounds_ahead(fleet: Fleets) -> None:
    """Otherwise an agent without sources would fill its machine's memory while its reader sleeps."""
    awake = threading.Event()

    def run() -> list[bool]:
        shoal.set_topology(shoal.topology.with_weights(*[torch.tensor([[1.0, 0], [1, 0]]).numpy()] * 2), True)
        if shoal.rank() == 1:
            awake.wait(30)
        done = []
        for i in range(3):
            handle = shoal.nonblocking.neighbor_allreduce(torch.ones(9000))
            done.append(wait_until(handle.poll, 5.0 if i < 2 else 0.1))
            if i == 2:
                awake.set()
            handle.wait()
        return done

    assert fleet(2).run(run)[0] == [True, True, False]


def test_a_name_whose_reader_is_late_does_not_block_other_names(fleet: Fleets) -> None:
    go = threading.Event()

    def run() -> float:
        ahead = {1: 1.0} if shoal.rank() == 0 else {}
        behind = {0: 1.0} if shoal.rank() == 1 else {}

        def send(name: str, value: float) -> shoal.Handle[torch.Tensor]:
            x = torch.full((9000,), value)
            return shoal.nonblocking.neighbor_allreduce(x, 1.0, behind, ahead, enable_topo_check=False, name=name)

        if shoal.rank() == 0:
            stuck = []
            for i in range(3):  # two rounds may be unread, the third waits for its turn
                with ThreadPoolExecutor(1) as pool:
                    stuck.append(pool.submit(shoal.Fleet.bind(send), f"behind {i}", 1.0).result())
            other = shoal.neighbor_allreduce(torch.ones(9000), 1.0, {1: 1.0}, {1: 1.0}, name="other")
            go.set()
            return other[0].item() + sum(handle.wait()[0].item() for handle in stuck)
        other = shoal.neighbor_allreduce(torch.ones(9000), 1.0, {0: 1.0}, {0: 1.0}, name="other")
        assert go.wait(30)
        return other[0].item() + sum(send(f"behind {i}", 0.0).wait()[0].item() for i in range(3))

    assert fleet(2).run(run) == [5.0, 5.0]


def test_an_agent_may_submit_long_before_its_neighbour_and_compute(fleet: Fleets) -> None:
    """The exchange progresses while the caller computes: the result is complete before it waits."""

    def run() -> bool:
        if shoal.rank() == 1:
            time.sleep(0.02)
        handle = shoal.nonblocking.allreduce(torch.ones(100_000))
        assert wait_until(handle.poll)
        started = time.perf_counter()
        handle.wait()
        return time.perf_counter() - started < scaled(0.5)

    assert fleet(2).run(run) == [True, True]


def test_a_wait_with_a_timeout_reads_what_it_waits_for_under_the_lock() -> None:
    """The driving thread changes it: without the lock the wait raised "dictionary changed size during iteration"."""
    lock, locked = threading.RLock(), []

    class Waiting:
        in_transfer = False

        @property
        def blocked_on(self) -> list[int]:
            locked.append(lock._is_owned())  # type: ignore[attr-defined]
            if len(locked) == 2:  # it ends before this thread has the lock
                handle.done = True
            return [1]

    driver = SimpleNamespace(lock=lock, wait_for=lambda *_: False)
    handle: Any = Handle(driver, Waiting())  # type: ignore[arg-type]
    with pytest.raises(shoal.DeadlineExceeded, match="waits for ranks"):
        handle.wait(0)
    assert handle.wait(0) is None
    assert locked == [True, True]


@pytest.mark.parametrize("thing", [None, 3, torch.ones(1)])
def test_invalid_handles_are_refused(thing: Any) -> None:
    for function in (shoal.bluefog.poll, shoal.bluefog.wait, shoal.bluefog.synchronize):
        with pytest.raises((TypeError, ValueError), match="no handle"):
            function(thing)


def test_names_of_internal_calls_are_reserved(fleet: Fleets) -> None:
    def run() -> tuple[float, float]:
        own = shoal.nonblocking.allreduce(torch.ones(2), name="metrics")
        result = shoal.metrics({"loss": float(shoal.rank())})
        return result["loss"].mean, shoal.bluefog.wait(own)[0].item()

    assert fleet(2).run(run) == [(0.5, 1.0)] * 2


def test_one_name_may_be_in_use_for_two_kinds_of_operation(fleet: Fleets) -> None:
    def run() -> tuple[float, float]:
        sum_ = shoal.nonblocking.allreduce(torch.ones(2), average=False, name="x")
        sent = shoal.nonblocking.broadcast(torch.full((2,), float(shoal.rank())), 1, name="x")
        return shoal.bluefog.wait(sent)[0].item(), shoal.bluefog.wait(sum_)[0].item()

    assert fleet(2).run(run) == [(1.0, 2.0)] * 2


def test_a_name_of_one_kind_is_refused_while_it_is_in_flight(fleet: Fleets) -> None:
    def run() -> None:
        if shoal.rank():
            shoal.barrier()
        handle = shoal.nonblocking.allreduce(torch.ones(2), name="x")
        if not shoal.rank():  # the other one comes after the barrier
            with pytest.raises(ValueError, match="'x' is still in flight"):
                shoal.nonblocking.allreduce(torch.ones(2), name="x")
            shoal.barrier()
        shoal.bluefog.wait(handle)

    fleet(2).run(run)


def test_a_name_used_once_costs_only_its_round_counter(fleet: Fleets) -> None:
    """Also after the others have read its messages. It once cost 1.3 KB and a lookup in each round."""
    count = 1000

    def run() -> tuple[float, int]:
        def use(first: int) -> None:
            for number in range(first, first + count):
                shoal.neighbor_allreduce(torch.ones(2), name=f"used once {number}")

        use(0)
        shoal.barrier()
        rounds = current().engine.matcher
        assert wait_until(lambda: not rounds._channels)
        names = [*rounds._begun]
        return sum(sys.getsizeof(name) for name in names) / len(names), sys.getsizeof(rounds._begun) // len(names)

    for name_bytes, entry_bytes in fleet(2).run(run):
        assert name_bytes + entry_bytes < 300
