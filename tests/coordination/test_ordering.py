"""One order on all agents, over process groups of Gloo: that it exists, its cost, and how it ends."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.coordination import attach
from shoal.coordination.attach import GroupStores
from shoal.coordination.ordering import CollectiveOrdering
from shoal.coordination.response_cache import ResponseCache
from shoal.coordination.round import RoundOutcome
from shoal.runtime.agent import current
from support import PROCESS_GROUP
from support.leftovers import nothing_is_left, wait_until
from support.limits import scaled

pytestmark = pytest.mark.transport(PROCESS_GROUP)
Fleets = Callable[..., shoal.Fleet]
SOON = 5.0


@pytest.fixture
def fleet() -> Any:
    with nothing_is_left():
        yield partial(shoal.Fleet, transport=PROCESS_GROUP, timeout=20.0)


def order() -> CollectiveOrdering:
    backend = current().engine.backend
    assert isinstance(backend, CollectiveOrdering)
    return backend


def costs() -> tuple[int, int, int]:
    counts = order().counts
    return counts.rounds, counts.negotiations, counts.moved


# There is one

CALLS: dict[str, Callable[[str], shoal.Handle[Any]]] = {
    "allreduce": lambda name: shoal.nonblocking.allreduce(torch.full((3,), float(shoal.rank())), name=name),
    "large allreduce": lambda name: shoal.nonblocking.allreduce(torch.full((40_000,), float(shoal.rank())), name=name),
    "average": lambda name: shoal.nonblocking.neighbor_allreduce(torch.full((5,), float(shoal.rank())), name=name),
    "broadcast": lambda name: shoal.nonblocking.broadcast(torch.full((2,), float(shoal.rank())), 1, name),
    "gather": lambda name: shoal.nonblocking.allgather(torch.full((1,), float(shoal.rank())), name),
    "ring": lambda name: shoal.nonblocking.neighbor_allreduce(
        torch.full((4,), float(shoal.rank())),
        0.5,
        {(shoal.rank() - 1) % shoal.size(): 0.5},
        {(shoal.rank() + 1) % shoal.size(): 1.0},
        name=name,
    ),
}


def expected(kind: str, rank: int, size: int) -> float:
    """The first number of the result; of a fully connected topology."""
    mean = (size - 1) / 2
    return {"broadcast": 1.0, "gather": 0.0, "ring": (rank + (rank - 1) % size) / 2}.get(kind, mean)


def schedules(seeds: list[int], size: int, count: int) -> list[list[list[tuple[str, str]]]]:
    """For each seed and agent: kinds and names of calls, the same for all agents, in an order of its own."""
    results = []
    for seed in seeds:
        draw = random.Random(seed)
        calls = [(draw.choice([*CALLS]), f"{seed % 7} {number}") for number in range(count)]
        results.append([draw.sample(calls, count) for _ in range(size)])
    return results


def go_through(fleet: Fleets, seeds: list[int], size: int, count: int) -> None:
    plans = schedules(seeds, size, count)

    def run() -> list[list[tuple[str, int]]]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(size))
        rank, result = shoal.rank(), []
        for plan in plans:
            ordered: list[tuple[str, int]] = []
            stop = shoal.observability.events().subscribe(
                lambda event, ordered=ordered: event.kind == "ordered" and ordered.append((event.name, event.round))
            )
            draw = random.Random(rank)
            handles = []
            for kind, name in plan[rank]:
                handles.append((kind, CALLS[kind](name)))
                if draw.random() < 0.2:
                    time.sleep(draw.random() * 1e-3)
            for kind, handle in draw.sample(handles, len(handles)):
                assert handle.wait().reshape(-1)[0].item() == pytest.approx(expected(kind, rank, size)), kind
            stop()
            result.append(ordered)
        return result

    for of_agents in zip(*fleet(size).run(run), strict=True):
        assert all(one == of_agents[0] for one in of_agents)
        assert len(of_agents[0]) == count


@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=8), st.integers(2, 4), st.integers(1, 12))
@settings(max_examples=25)
def test_agents_that_call_in_any_order_get_one_order_and_complete(seeds: list[int], size: int, count: int) -> None:
    go_through(partial(shoal.Fleet, transport=PROCESS_GROUP, timeout=20.0), seeds, size, count)


def test_agents_outside_of_a_group_take_no_part_in_its_calls(fleet: Fleets) -> None:
    def run() -> list[float]:
        rank, result = float(shoal.rank()), []
        for _ in range(3):  # first by a decision, then from the cache
            if rank < 2:
                result.append(shoal.allreduce(torch.tensor([rank]), False, name="of two", group=[0, 1]).item())
            result.append(shoal.allreduce(torch.tensor([rank]), False, name="of all").item())
        return result

    assert fleet(3).run(run) == [[1.0, 3.0] * 3, [1.0, 3.0] * 3, [3.0] * 3]


@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_schedules_have_one_order_and_complete(fleet: Fleets, part: int) -> None:
    for number in range(0, 1000, 50):
        first = 100_000 * part + number
        go_through(fleet, [*range(first, first + 50)], 2 + number // 50 % 4, 12)


UNORDERED = """
import torch, shoal
from shoal.coordination import attach
from shoal.coordination.attach import GroupStores
from shoal.coordination.ordering import CollectiveOrdering

def at_once(self, operation, stage):
    ask(self, operation, stage)
    (asked,) = self._pending.all()
    self._groups.move((0, 1), [self._step(asked.request, (0, 1))])

def run():
    names = [str(number) for number in range(20)]
    handles = {
        name: shoal.nonblocking.allreduce(torch.full((3,), float(name)), name=name, timeout=30 if ORDERED else 3)
        for name in (names if shoal.rank() else reversed(names))
    }
    return [handles[name].wait()[0].item() for name in names] == [float(name) for name in names]

ask = CollectiveOrdering.ask
if ORDERED:
    print(shoal.Fleet(2, transport="process-group", timeout=30).run(run))
else:
    CollectiveOrdering.ask, CollectiveOrdering.due = at_once, False
    print(shoal.Fleet(2, transport="process-group", timeout=5).run(run))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [True, False])
def test_without_ordering_calls_are_mispaired(ordered: bool) -> None:
    """The engine pairs wrong calls if each agent uses its own order. So the tests above could not pass without it."""
    command = [sys.executable, "-c", UNORDERED.replace("ORDERED", str(ordered))]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=40.0, check=False)
    except subprocess.TimeoutExpired:
        assert not ordered
        return
    assert ("[True, True]" in ended.stdout) == ordered, ended.stdout + ended.stderr


def test_links_do_not_use_ordering(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("nobody coordinates what travels by links")

    for name in ("__init__", "ask", "begin", "_ended"):
        monkeypatch.setattr(CollectiveOrdering, name, refused)
    plans = schedules([1, 2, 3], 3, 8)

    def run() -> None:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        rank = shoal.rank()
        assert current().engine.backend is None
        for plan in plans:
            for kind, handle in [(kind, CALLS[kind](name)) for kind, name in plan[rank]]:
                assert handle.wait().reshape(-1)[0].item() == pytest.approx(expected(kind, rank, 3)), kind

    for transport in ("threads", "shared_memory", "network"):
        shoal.Fleet(3, transport=transport, timeout=20.0).run(run)


# What it costs


@pytest.mark.parametrize(
    ("kind", "topology"),
    [
        ("adapt then combine", None),
        ("adapt then combine", shoal.topology.OnePeerExponential(4)),
        ("gradients", None),
        ("exact diffusion", shoal.topology.RingGraph(4)),
    ],
    ids=["static", "one-peer", "gradients", "exact diffusion"],
)
def test_training_negotiates_nothing_after_its_first_step(fleet: Fleets, kind: str, topology: Any) -> None:
    def run() -> list[int]:
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        plain = torch.optim.SGD(model.parameters(), lr=0.05)
        shoal.broadcast_parameters(model.state_dict())
        if kind == "gradients":
            optimizer = shoal.bluefog.DistributedGradientAllreduceOptimizer(plain, model)
        elif kind == "exact diffusion":
            algorithm = shoal.algorithms.ExactDiffusion(1.0, lazy=True)
            optimizer = shoal.DecentralizedOptimizer(plain, model, algorithm, topology=topology)
        else:
            optimizer = shoal.DecentralizedOptimizer(
                plain, model, topology=topology, overlap="backward", bucket_bytes=256
            )
        results = []
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            results.append(order().counts.negotiations)
        return results

    for result in fleet(4).run(run):
        assert result[1:] == result[:1] * 4


def test_known_calls_negotiate_nothing_in_any_order(fleet: Fleets) -> None:
    def run() -> list[tuple[int, int, int]]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        results = []
        for step in range(4):
            kinds = random.Random(10 * step + shoal.rank()).sample([*CALLS][:-1], len(CALLS) - 1)
            for handle in [CALLS[kind](kind) for kind in kinds]:
                handle.wait()
            results.append(costs())
            shoal.barrier()
        return results

    for result in fleet(3).run(run):
        assert result[0][1] > 0
        assert {negotiations for _, negotiations, _ in result} == {result[0][1]}
        assert [moved for _, _, moved in result] == [5, 10, 15, 20]


def test_without_a_cache_everything_is_negotiated(fleet: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE_CAPACITY", "0")

    def run() -> tuple[int, int, int]:
        for _ in range(10):
            shoal.allreduce(torch.ones(3), name="x")
        return costs()

    for rounds, negotiations, moved in fleet(2).run(run):
        assert negotiations == moved == 10
        assert rounds >= 10


def test_a_cache_smaller_than_the_working_set_costs_only_time(fleet: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE_CAPACITY", "3")

    def run() -> tuple[int, int]:
        for _ in range(4):
            handles = [shoal.nonblocking.allreduce(torch.full((2,), float(i)), name=f"{i}") for i in range(8)]
            assert [handle.wait()[0].item() for handle in handles] == [float(i) for i in range(8)]
        result = len(order()._cache), order().counts.negotiations
        shoal.barrier()  # a departure makes the others forget
        return result

    for entries, negotiations in fleet(3).run(run):
        assert entries == 3
        assert negotiations >= 4


def test_an_agent_without_requests_is_idle(fleet: Fleets) -> None:
    """The clock is not read while all agents are idle, nor while one waits for the others."""
    go, together = threading.Event(), threading.Barrier(3)

    def run() -> tuple[int, float]:
        shoal.allreduce(torch.ones(1), name="x")
        shoal.barrier()
        time.sleep(0.05)
        rounds, cpu = order().counts.rounds, time.process_time()
        if shoal.rank() == 0:
            handle = shoal.nonblocking.allreduce(torch.ones(1), name="x")
            time.sleep(0.5)
            used = time.process_time() - cpu
            go.set()
            handle.wait()
        else:
            assert go.wait(30)
            used = 0.0
            shoal.allreduce(torch.ones(1), name="x")
        result = order().counts.rounds - rounds
        together.wait(30)
        return result, used

    results = fleet(3).run(run)
    assert [rounds for rounds, _ in results] == [1] * 3
    assert results[0][1] < 0.1


# What ends it


def test_caches_that_differ_are_an_error_on_all_and_the_next_call_works(fleet: Fleets) -> None:
    together = threading.Barrier(3)

    def run() -> tuple[str, float]:
        for _ in range(3):
            shoal.allreduce(torch.ones(1), name="x")
        together.wait()
        if shoal.rank() == 1:
            order()._cache.put(order()._cache._entries and _request("y"))
        together.wait()
        with pytest.raises(shoal.Mismatch, match="remembers other operations") as caught:
            shoal.allreduce(torch.ones(1), name="x")
        together.wait()
        again = [shoal.allreduce(torch.full((1,), float(shoal.rank())), name=f"after {i}").item() for i in range(3)]
        assert again == [1.0] * 3
        return str(caught.value), shoal.allreduce(torch.full((1,), float(shoal.rank())), name="x").item()

    for message, value in fleet(3).run(run):
        assert "allreduce" in message
        assert value == 1.0


def _request(name: str) -> Any:
    from shoal.coordination.request import ALL, CallSignature, RequestKey, TransferRequest

    return TransferRequest(CallSignature(RequestKey(name, 0, ALL), "op"), 0)


def test_an_inconsistent_cache_would_give_a_wrong_sum() -> None:
    """The check above is needed: with bits of other positions, the call that is ready is another one."""
    one, other = ResponseCache(0, 8), ResponseCache(1, 8)
    for name in "ab":
        one.put(_request(name))
    for name in "ba":
        other.put(_request(name))
    requested = _request("a")
    common = one.vector([_later(requested)]) & other.vector([_later(_request("b"))])
    assert [entry.key.name for entry in one.ready(common)] != [entry.key.name for entry in other.ready(common)]


def _later(request: Any) -> Any:
    from shoal.coordination.request import TransferRequest

    return TransferRequest(request.entry, request.round + 1)


MISTAKES: dict[str, Callable[[bool], Any]] = {
    "shape": lambda odd: shoal.allreduce(torch.ones(4 if odd else 3), name="x"),
    "large shape": lambda odd: shoal.allreduce(torch.ones(40_001 if odd else 40_000), name="x"),
    "dtype": lambda odd: shoal.allreduce(torch.ones(3, dtype=torch.float64 if odd else torch.float32), name="x"),
    "reduction": lambda odd: shoal.allreduce(torch.ones(3), op="max" if odd else "sum", name="x"),
    "root": lambda odd: shoal.broadcast(torch.ones(3), 1 if odd else 0, "x"),
    "operation": lambda odd: (
        shoal.broadcast(torch.ones(3), 0, "x") if odd else shoal.allreduce(torch.ones(3), name="x")
    ),
    "kind": lambda odd: (
        shoal.neighbor_allreduce(torch.ones(3), "x") if odd else shoal.allreduce(torch.ones(3), name="x")
    ),
}


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("mistake", [*MISTAKES])
def test_a_mismatch_reaches_all_and_names_the_tensor_and_both_sides(
    fleet: Fleets, mistake: str, odd: int, known: bool
) -> None:
    def run() -> tuple[tuple[int, ...], str]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        for _ in range(2 * known):
            MISTAKES[mistake](False)
        started = time.monotonic()
        with pytest.raises(shoal.Mismatch) as caught:
            MISTAKES[mistake](shoal.rank() == odd)
        assert time.monotonic() - started < scaled(SOON)
        for _ in range(2):
            assert shoal.allreduce(torch.full((3,), float(shoal.rank())), name="after")[0].item() == 1.0
            MISTAKES[mistake](False)
        return caught.value.ranks, str(caught.value)

    for ranks, message in fleet(3).run(run):
        assert odd in ranks, message
        assert len(ranks) > 1, message
        assert f"'x' round {2 * known}" in message


def test_a_shape_that_changes_on_all_agents_is_no_mismatch(fleet: Fleets) -> None:
    def run() -> list[int]:
        results = []
        for step in range(9):
            x = torch.full((3 + step % 3,), float(shoal.rank()))
            assert shoal.allreduce(x, name="x").tolist() == [0.5] * len(x)
            assert shoal.neighbor_allreduce(x, "n").tolist() == [0.5] * len(x)
            results.append(order().counts.negotiations)
        return results

    for result in fleet(2).run(run):
        assert result[2] > result[0]
        assert result[2:] == [result[2]] * 7  # all three are known


def test_names_without_a_counterpart_end_at_the_deadline_and_name_the_absent_ranks(fleet: Fleets) -> None:
    def run() -> None:
        rank = shoal.rank()
        handle = shoal.nonblocking.allreduce(torch.ones(3), name=f"only {rank}", timeout=0.5)
        with pytest.raises(shoal.DeadlineExceeded) as caught:
            handle.wait()
        assert set(caught.value.ranks) == {0, 1, 2} - {rank}
        assert f"'only {rank}'" in str(caught.value)
        shoal.barrier()
        assert shoal.allreduce(torch.ones(3), name="all")[0].item() == 1.0

    fleet(3).run(run)


def test_only_the_absent_ranks_are_named_at_the_deadline(fleet: Fleets) -> None:
    done = threading.Barrier(3)

    def run() -> None:
        if shoal.rank() < 2:
            with pytest.raises(shoal.DeadlineExceeded) as caught:
                shoal.allreduce(torch.ones(3), name="x", timeout=0.5)
            assert caught.value.ranks == (2,)
        done.wait(30)

    fleet(3).run(run)


def test_a_local_failure_ends_the_call_on_all(fleet: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CHECK_FINITE", "1")

    def run() -> None:
        bad = torch.full((3,), float("nan") if shoal.rank() == 1 else 1.0)
        started = time.monotonic()
        for call in (lambda: shoal.allreduce(bad, name="a"), lambda: shoal.neighbor_allreduce(bad, "n")):
            with pytest.raises(shoal.NotFinite if shoal.rank() == 1 else shoal.Mismatch) as caught:
                call()
            assert shoal.rank() == 1 or "rank 1" in str(caught.value)
        assert time.monotonic() - started < scaled(SOON)
        assert shoal.allreduce(torch.ones(2), name="a")[0].item() == 1.0
        assert shoal.neighbor_allreduce(torch.ones(2), "n")[0].item() == 1.0

    fleet(3).run(run)


def test_an_agent_that_leaves_with_pending_calls_is_named_and_the_others_continue(fleet: Fleets) -> None:
    left, both = threading.Event(), threading.Barrier(2)

    def run() -> None:
        rank = shoal.rank()
        shoal.allreduce(torch.ones(1), name="x")
        if rank == 2:
            handles = [shoal.nonblocking.allreduce(torch.ones(3), name=f"{i}") for i in range(3)]
            shoal.shutdown()
            left.set()
            for handle in handles:
                with pytest.raises(shoal.NotInitialized):
                    handle.wait()
            return
        assert left.wait(30)
        # It has left, and operations between these two do not need it.
        pair = shoal.pair_gossip(torch.full((2,), float(rank)), 1 - rank, name="pair")
        assert pair.tolist() == [0.5, 0.5]
        both.wait(30)
        with pytest.raises(shoal.PeerLost, match="rank 2 has left"):
            shoal.allreduce(torch.ones(3), name="0")

    fleet(3).run(run)


def test_an_agent_whose_last_round_fails_leaves_in_good_order(fleet: Fleets) -> None:
    """It took part in that round. Another round would be without itself, and that would end its exchange with an error,
    so that it would not deliver what others still need of it."""
    together, left = threading.Barrier(3), threading.Event()

    def run() -> int:
        rank = shoal.rank()
        shoal.allreduce(torch.ones(1), name="x")
        together.wait()
        if rank == 1:
            order()._cache.put(_request("y"))  # now the caches differ, and the next round fails
        together.wait()
        if rank == 2:
            mine, engine = order(), current().engine
            shoal.shutdown()
            left.set()
            assert engine.ended is None
            return mine.counts.rounds
        assert left.wait(30)
        pair = shoal.pair_gossip(torch.full((2,), float(rank)), 1 - rank, name="pair")
        assert pair.tolist() == [0.5, 0.5]
        return 0

    *_, rounds = fleet(3).run(run)
    assert rounds == 2


def test_a_call_that_times_out_after_all_have_requested_it_still_runs(fleet: Fleets) -> None:
    """A round that reports an operation as ready binds all agents.

    The others do not miss an agent whose call times out later.
    """

    def run() -> list[float]:
        results = []
        for step in range(30):
            x = torch.full((20_000,), float(shoal.rank() + step))
            handle = shoal.nonblocking.neighbor_allreduce(x, name="x")
            if shoal.rank() == 0 and step % 3 == 0:
                engine = current().engine
                with engine.lock:
                    engine.lifecycle.fail(handle.operation, ValueError("given up"))
                    engine.poller.wake()
            try:
                results.append(handle.wait()[0].item() - step)
            except (ValueError, shoal.Mismatch):
                results.append(0.5)
            assert shoal.allreduce(torch.ones(2), name="y")[0].item() == 1.0
        return results

    assert fleet(2).run(run) == [[0.5] * 30] * 2


def test_an_agent_that_leaves_waits_for_the_transfers_of_one_that_was_lost_and_is_back() -> None:
    """The fact that the lost agent moves no tensors any more does not hold for its next incarnation."""
    calls: list[Callable[[], None]] = []
    groups = SimpleNamespace(stop=lambda: None, then=calls.append)
    engine = SimpleNamespace(rank=0, alive=(0, 1), matcher=None, current_plan=None, notify=lambda: None)
    one = CollectiveOrdering(engine)  # type: ignore[arg-type]
    one.move_by(lambda plan: groups)  # type: ignore[arg-type, return-value]
    one.on_departure(1, None)
    one.on_admission()
    one._release_leaving(RoundOutcome((0, 1), leaving=(0,)))
    one._await_no_more(0)
    assert not one.left
    one._await_no_more(1)
    assert one.left


def test_no_round_is_due_while_the_agent_shuts_down() -> None:
    """None can begin then, also if the last round was not reached: the driving thread would try it without end."""
    engine = SimpleNamespace(
        rank=0,
        alive=(0, 1),
        matcher=None,
        current_plan=None,
        ended=None,
        is_agreeing=False,
        is_closing=False,
        rounds_begun=lambda name: 0,
        wake=lambda: None,
    )
    order = CollectiveOrdering(engine)  # type: ignore[arg-type]
    order.leave()
    assert order.due
    engine.is_closing = True
    assert not order.due


def test_values_of_earlier_memberships_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each membership makes its own groups. Their values together may exceed the limit on what one agent may send."""
    monkeypatch.setattr(attach, "MOST_VALUES", 3)
    stores = GroupStores(SimpleNamespace(rank=0, timeout=1.0))  # type: ignore[arg-type]

    def arrives(label: str, key: str) -> None:
        place, value = stores._parsed(1, [f"{label} 0,1", key, "eA=="])
        stores._keep(1, place, value)

    for label in ("after 0 losses", "after 1 losses", "after 2 losses"):
        for key in "abc":
            arrives(label, key)
        assert stores.wait(label, f"{label} 0,1", ["a", "b", "c"], 0.0)
        with pytest.raises(ValueError, match="more than 3"):
            arrives(label, "d")
        stores.give_up(label)
        arrives(label, "late")
        assert not stores._values


def test_two_jobs_in_one_process_are_independent() -> None:
    def run(value: float) -> float:
        for _ in range(20):
            result = shoal.allreduce(torch.full((3,), value), name="x")[0].item()
        return result

    results: dict[float, list[float]] = {}

    def start(value: float) -> None:
        results[value] = shoal.Fleet(2, transport=PROCESS_GROUP, timeout=20.0).run(run, value)

    threads = [threading.Thread(target=start, args=(float(value),)) for value in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {float(value): [float(value)] * 2 for value in range(3)}


def test_a_coordination_round_is_visible_to_observers(fleet: Fleets) -> None:
    def run() -> list[str]:
        kinds: list[str] = []
        stop = shoal.observability.events().subscribe(lambda event: event.name == "x" and kinds.append(event.kind))
        shoal.allreduce(torch.ones(3), name="x")
        wait_until(lambda: "finished" in kinds)
        stop()
        return [kind for kind in kinds if kind in ("submitted", "asked", "ordered", "moved", "summed", "finished")]

    assert fleet(2).run(run) == [["submitted", "asked", "ordered", "moved", "summed", "finished"]] * 2


@pytest.mark.parametrize("what", ["reset", "on_admission"])
def test_a_failure_agreed_on_during_a_shutdown_leaves_no_thread(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    stop = CollectiveOrdering.stop

    def stop_then_call(self: CollectiveOrdering) -> None:
        stop(self)
        with self._engine.lock:
            getattr(self, what)()

    monkeypatch.setattr(CollectiveOrdering, "stop", stop_then_call)
    fleet(2).run(lambda: shoal.allreduce(torch.ones(2), name="x"))
    assert wait_until(lambda: not [one.name for one in threading.enumerate() if one.name.endswith("-gloo")])
