"""Fleet: agents as threads of one process, each with its own view; failures end all, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import networkx as nx
import pytest
import torch

import shoal
from shoal.engine.engine import Engine
from shoal.runtime.agent import Agent
from support.leftovers import nothing_is_left, resident_bytes
from support.limits import scaled

Fleets = Callable[..., shoal.Fleet]


@pytest.mark.parametrize("size", [1, 2, 3, 8, 16])
def test_results_are_in_rank_order_whichever_agent_ends_first(fleet: Fleets, size: int) -> None:
    def run(base: int, *, step: int) -> int:
        time.sleep(0.002 * (size - shoal.rank()))
        return base + step * shoal.rank()

    assert fleet(size).run(run, 100, step=2) == [100 + 2 * rank for rank in range(size)]


def test_a_fleet_may_run_repeatedly(fleet: Fleets) -> None:
    one = fleet(3)
    for step in range(10):
        assert one.run(lambda step=step: shoal.allreduce(torch.tensor(float(step))).item()) == [float(step)] * 3


def test_every_run_starts_fresh(fleet: Fleets) -> None:
    def change() -> None:
        shoal.set_topology(shoal.topology.RingGraph(3))
        shoal.neighbor_allreduce(torch.ones(2), "x")

    one = fleet(3)
    one.run(change)
    results = one.run(lambda: (shoal.observability.bytes_sent(), shoal.topology.IsTopologyEquivalent(*graphs())))
    assert results == [(0, True)] * 3


def graphs() -> tuple[nx.DiGraph, nx.DiGraph]:
    return shoal.load_topology(), shoal.topology.ExponentialTwoGraph(shoal.size())


class ScriptError(Exception):
    pass


def fall(rank: int) -> None:
    raise ScriptError(f"of rank {rank}")


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("failing", ["first", "last"])
def test_an_exception_of_one_agent_ends_all_with_its_traceback(fleet: Fleets, size: int, failing: str) -> None:
    odd = 0 if failing == "first" else size - 1

    def run() -> None:
        shoal.barrier()
        if shoal.rank() == odd:
            fall(odd)
        shoal.allreduce(torch.ones(10_000))

    started = time.monotonic()
    with pytest.raises(ScriptError, match=f"of rank {odd}") as caught:
        fleet(size).run(run)
    assert time.monotonic() - started < scaled(5.0)
    assert "in fall" in "".join(traceback.format_tb(caught.value.__traceback__))


@pytest.mark.parametrize("seed", range(6))
def test_an_exception_at_a_random_point_of_a_random_program_ends_all(fleet: Fleets, seed: int) -> None:
    chance = random.Random(seed)
    size, step_of_fall = chance.randint(2, 6), chance.randint(0, 11)
    odd = chance.randrange(size)
    program = [chance.choice(["mix", "sum", "gather", "broadcast", "barrier"]) for _ in range(12)]

    def run() -> None:
        own = random.Random(100 * seed + shoal.rank())
        x = torch.ones(chance_numel)
        for step, kind in enumerate(program):
            if shoal.rank() == odd and step == step_of_fall:
                fall(odd)
            time.sleep(own.random() * 0.002)
            if kind == "mix":
                shoal.neighbor_allreduce(x)
            elif kind == "sum":
                shoal.allreduce(x)
            elif kind == "gather":
                shoal.allgather(x)
            elif kind == "broadcast":
                shoal.broadcast(x, step % size)
            else:
                shoal.barrier()

    chance_numel = chance.choice([1, 3000, 50_000])
    with pytest.raises(ScriptError, match=f"of rank {odd}"):
        fleet(size).run(run)


def test_the_others_get_the_failed_rank_and_its_exception(fleet: Fleets) -> None:
    received: list[shoal.PeerLost] = []
    together = threading.Barrier(3)

    def run() -> None:
        together.wait(30)
        if shoal.rank() == 1:
            fall(1)
        try:
            for _ in range(1000):
                shoal.allreduce(torch.ones(3))
        except shoal.PeerLost as error:
            received.append(error)
            raise

    with pytest.raises(ScriptError):
        fleet(3).run(run)
    assert len(received) == 2
    for error in received:
        assert error.ranks == (1,)
        assert "ScriptError: of rank 1" in str(error)


def test_an_agent_in_an_endless_loop_is_named_and_abandoned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread cannot be ended from outside. The caller still gets the failure, after a grace period."""
    monkeypatch.setattr("shoal.runtime.fleet.GRACE_SECONDS", 0.1)
    go, together = threading.Event(), threading.Barrier(3)

    def run() -> None:
        together.wait(30)
        if shoal.rank() == 0:
            fall(0)
        assert go.wait(20)

    with nothing_is_left():
        with caplog.at_level(logging.WARNING, "shoal"), pytest.raises(ScriptError):
            shoal.Fleet(3).run(run)
        assert "[1, 2]" in caplog.text
        go.set()


def test_a_system_exit_of_an_agent_is_reraised(fleet: Fleets) -> None:
    def run() -> None:
        if shoal.rank() == 1:
            raise SystemExit(3)
        shoal.barrier()

    with pytest.raises(SystemExit) as caught:
        fleet(2).run(run)
    assert caught.value.code == 3


def test_an_interrupt_of_the_caller_ends_the_agents(fleet: Fleets) -> None:
    """Ctrl-C arrives in the main thread, which waits for the fleet."""
    waiting = threading.Barrier(3)

    def run() -> None:
        waiting.wait(30)
        if shoal.rank() == 0:
            time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGINT)
        shoal.neighbor_allreduce(torch.ones(1), 1.0, {(shoal.rank() + 1) % 3: 1.0}, {}, enable_topo_check=False)

    started = time.monotonic()
    with pytest.raises((KeyboardInterrupt, shoal.Mismatch)):
        fleet(3).run(run)
    assert time.monotonic() - started < scaled(6.0)


def test_a_fleet_inside_an_agent_is_independent(fleet: Fleets) -> None:
    def inner(outer: int) -> tuple[int, int, float]:
        return shoal.rank(), shoal.size(), shoal.allreduce(torch.tensor(float(outer))).item()

    def run() -> tuple[list[tuple[int, int, float]], int, float]:
        own = shoal.rank()
        results = fleet(2).run(inner, own)
        return results, shoal.rank(), shoal.allreduce(torch.tensor(float(own))).item()

    assert fleet(3).run(run) == [([(0, 2, float(r)), (1, 2, float(r))], r, 1.0) for r in range(3)]


def test_two_concurrent_fleets_are_independent(fleet: Fleets) -> None:
    result: dict[int, list[float]] = {}

    def run(base: float) -> float:
        x = torch.tensor(base + shoal.rank())
        for _ in range(20):
            x = shoal.neighbor_allreduce(x, "shared name")
        return x.item()

    def start(base: int) -> None:
        result[base] = fleet(4).run(run, float(base))

    threads = [threading.Thread(target=start, args=(base,)) for base in (0, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert result[0] == pytest.approx([1.5] * 4)
    assert result[1000] == pytest.approx([1001.5] * 4)


def test_the_caller_of_a_fleet_is_no_agent_of_it(fleet: Fleets) -> None:
    assert not shoal.is_initialized()
    assert fleet(2).run(shoal.is_initialized) == [True, True]
    assert not shoal.is_initialized()


def test_agents_may_leave_early_and_rejoin(fleet: Fleets) -> None:
    def run() -> list[float]:
        values = []
        for step in range(3):
            values.append(shoal.allreduce(torch.tensor(float(step))).item())
            shoal.shutdown()
            assert not shoal.is_initialized()
            shoal.init()
            assert shoal.is_initialized()
        return values

    assert fleet(3).run(run) == [[0.0, 1.0, 2.0]] * 3


def test_repeated_shutdown_and_init_are_harmless(fleet: Fleets) -> None:
    def run() -> bool:
        shoal.set_topology(shoal.topology.RingGraph(2))
        shoal.init()
        same = shoal.topology.IsTopologyEquivalent(shoal.load_topology(), shoal.topology.RingGraph(2))
        shoal.barrier()
        shoal.shutdown()
        shoal.shutdown()
        return same

    assert fleet(2).run(run) == [True, True]


def test_a_large_fleet_in_one_process_works(fleet: Fleets) -> None:
    def run() -> float:
        x = torch.tensor(float(shoal.rank()), dtype=torch.float64)
        schedule = shoal.topology.GetDynamicOnePeerSendRecvRanks(shoal.load_topology(), shoal.rank())
        for _ in range(5):  # log2(32) rounds of the one-peer graph are the exact average
            send, receive = next(schedule)
            x = shoal.neighbor_allreduce(x, 0.5, dict.fromkeys(receive, 0.5), send)
        return x.item()

    assert fleet(32).run(run) == [15.5] * 32


def test_a_fleet_leaves_no_threads_descriptors_or_memory(transport: str) -> None:
    """Also a fleet whose agents exchanged large tensors, and a fleet that failed."""

    def run(fail: bool) -> None:
        for _ in range(3):
            shoal.neighbor_allreduce(torch.ones(500_000))
            shoal.allreduce(torch.ones(500_000))
        if fail and shoal.rank() == 1:
            fall(1)
        shoal.barrier()

    def once(fail: bool) -> None:
        with nothing_is_left():
            try:
                shoal.Fleet(3, transport=transport, timeout=20.0).run(run, fail)
            except ScriptError:
                assert fail

    for _ in range(2):
        once(False)
        once(True)
    gc.collect()  # exceptions hold frames, and frames tensors
    before = resident_bytes()
    for _ in range(12):
        once(False)
        once(True)
    gc.collect()
    # 24 fleets that kept their 2 MB arenas and results would hold well over 200 MB; heaps of threads vary by 60.
    assert resident_bytes() - before < 100e6


def test_random_generators_belong_to_the_agent_that_creates_one(fleet: Fleets) -> None:
    def run() -> list[float]:
        generator = torch.Generator().manual_seed(shoal.rank())
        shoal.barrier()
        return torch.rand(3, generator=generator).tolist()

    expected = [torch.rand(3, generator=torch.Generator().manual_seed(rank)).tolist() for rank in range(3)]
    assert fleet(3).run(run) == expected


def test_a_finished_fleet_ends_at_once(fleet: Fleets) -> None:
    """Agents that leave at the same time close each other's links. None waits for a departed one."""
    graph_of = [shoal.topology.ExponentialTwoGraph(8), shoal.topology.StarGraph(8), shoal.topology.MeshGrid2DGraph(8)]

    def run() -> None:
        for graph in graph_of:
            shoal.set_topology(graph)
            shoal.neighbor_allgather(torch.ones(2, 3))

    for _ in range(12):
        started = time.monotonic()
        fleet(8).run(run)
        assert time.monotonic() - started < scaled(5.0)


def test_an_agent_with_an_error_in_shutdown_fails_the_fleet(fleet: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example because a listener cannot write to its full disk. The other listeners are still called."""
    reported: list[int] = []

    def fail(agent: Agent) -> None:
        if agent.rank == 1:
            raise ScriptError("of the disk")

    monkeypatch.setattr("shoal.runtime.bootstrap.on_stop", [fail, lambda agent: reported.append(agent.rank)])
    with pytest.raises(ScriptError, match="of the disk"):
        within(10.0, lambda: fleet(3).run(shoal.barrier))
    assert sorted(reported) == [0, 1, 2]


def within(seconds: float, call: Callable[[], object]) -> object:
    """Make a call in another thread, so that a hanging call fails its test instead of the whole run."""
    results: list[object] = []

    def attempt() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, f"not done after {seconds} s"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def test_an_agent_that_fails_before_init_ends_the_agents_that_wait_for_it(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait in init, before any message can be sent to them."""

    class Broken(Engine):
        def __init__(self, rank: int, size: int, timeout: float, incarnation: int) -> None:
            if rank == 1:
                time.sleep(0.1)
                raise ScriptError("of the engine")
            super().__init__(rank, size, timeout, incarnation)

    monkeypatch.setattr("shoal.runtime.bootstrap.Engine", Broken)
    started = time.monotonic()
    with pytest.raises(ScriptError, match="of the engine"):
        fleet(3).run(shoal.barrier)
    assert time.monotonic() - started < scaled(4.0)


def test_an_agent_that_rejoins_after_a_failure_is_not_waited_for(fleet: Fleets) -> None:
    """One is in a later init when another one fails: the failed one will never call it."""

    def run() -> None:
        if shoal.rank() == 1:
            time.sleep(0.2)
            fall(1)
        shoal.shutdown()
        shoal.init()

    started = time.monotonic()
    with pytest.raises(ScriptError):
        fleet(3).run(run)
    assert time.monotonic() - started < scaled(4.0)


def test_a_thread_that_cannot_be_started_fails_the_fleet(fleet: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "agent-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    threads = torch.get_num_threads()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        fleet(3).run(shoal.barrier)
    assert time.monotonic() - started < scaled(4.0)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("kind", [GeneratorExit, KeyboardInterrupt, asyncio.CancelledError])
def test_an_extraordinary_exception_ends_all_too(fleet: Fleets, kind: type[BaseException]) -> None:
    def run() -> None:
        shoal.barrier()
        if shoal.rank() == 0:
            raise kind
        shoal.allreduce(torch.ones(3))

    started = time.monotonic()
    with pytest.raises(kind):
        fleet(3).run(run)
    assert time.monotonic() - started < scaled(4.0)


def test_a_failure_ends_nested_fleets_too(fleet: Fleets) -> None:
    received: list[shoal.PeerLost] = []
    inside = threading.Barrier(3)

    def inner() -> None:
        inside.wait(30)
        try:
            while True:
                shoal.allreduce(torch.ones(3))
                time.sleep(0.01)
        except shoal.PeerLost as error:
            received.append(error)
            raise

    def outer() -> None:
        if shoal.rank() == 0:
            inside.wait(30)
            fall(0)
        fleet(2).run(inner)

    started = time.monotonic()
    with pytest.raises(ScriptError):
        fleet(2).run(outer)
    assert time.monotonic() - started < scaled(4.0)
    assert len(received) == 2
    assert all("ScriptError: of rank 0" in str(error) for error in received)


def test_after_a_failure_no_nested_fleet_starts(fleet: Fleets) -> None:
    failed = threading.Event()
    started: list[int] = []

    def outer() -> None:
        if shoal.rank() == 0:
            fall(0)
        while not failed.is_set():
            try:
                shoal.allreduce(torch.ones(1))
            except shoal.PeerLost:
                failed.set()
        fleet(2).run(lambda: started.append(1))

    with pytest.raises(ScriptError):
        fleet(2).run(outer)
    assert not started


def test_an_interrupt_while_agents_are_in_init_ends_them(fleet: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Engine):
        def __init__(self, rank: int, size: int, timeout: float, incarnation: int) -> None:
            super().__init__(rank, size, timeout, incarnation)
            if rank == 2:
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.5)

    monkeypatch.setattr("shoal.runtime.bootstrap.Engine", Slow)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fleet(3).run(shoal.barrier)
    assert time.monotonic() - started < scaled(4.0)


def test_a_generator_that_runs_a_fleet_may_be_closed(fleet: Fleets) -> None:
    """As pytest does with a fixture: the run has ended when the generator is suspended."""

    def results() -> Iterator[list[float]]:
        while True:
            yield fleet(2).run(lambda: shoal.allreduce(torch.tensor(float(shoal.rank()))).item())

    several = results()
    assert [next(several), next(several)] == [[0.5, 0.5]] * 2
    several.close()  # type: ignore[attr-defined]


async def coroutine() -> None:
    shoal.barrier()


def generator() -> Iterator[int]:
    yield shoal.rank()


@pytest.mark.parametrize("function", [coroutine, generator, partial(generator)])
def test_a_function_whose_call_runs_nothing_is_refused(function: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"runs none of its code"):
        shoal.Fleet(2).run(function)


def test_a_global_seed_in_an_agent_warns_with_the_remedy() -> None:
    """Threads share torch's generator: one agent's seed changes the others' numbers."""
    before = torch.manual_seed

    def seeds() -> None:
        if shoal.rank() == 0:
            torch.manual_seed(1)

    with pytest.warns(UserWarning, match=r"torch.Generator\(\).manual_seed\(seed \+ shoal.rank\(\)\)"):
        shoal.Fleet(2).run(seeds)
    shoal.Fleet(1).run(seeds)
    assert torch.manual_seed is torch.random.manual_seed is before
    torch.manual_seed(1)


def test_agents_own_generators_repeat_in_threads() -> None:
    def draw() -> list[float]:
        generator = torch.Generator().manual_seed(5 + shoal.rank())
        return torch.randn(3, generator=generator).tolist()

    results = shoal.Fleet(3).run(draw)
    assert results == shoal.Fleet(3).run(draw)
    assert results[0] != results[1]


def test_a_thread_that_an_agent_starts_is_told_how_to_belong_to_it(fleet: Fleets) -> None:
    """With init() it would become an agent of its own, and its averages would be of itself alone."""

    def run() -> tuple[str, int]:
        found: list[Any] = []

        def unbound() -> None:
            try:
                shoal.allreduce(torch.ones(1))
            except shoal.NotInitialized as error:
                found.append(str(error))

        bound = shoal.Fleet.bind(lambda: found.append(shoal.rank()))
        for target in (unbound, bound):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        return found[0], found[1]

    for rank, (message, own) in enumerate(fleet(2).run(run)):
        assert "shoal.Fleet.bind(function)" in message and own == rank


def test_init_in_a_thread_of_a_fleets_process_warns(fleet: Fleets) -> None:
    def run() -> list[str]:
        def begin() -> None:
            shoal.init()
            shoal.shutdown()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            thread = threading.Thread(target=begin)
            thread.start()
            thread.join()
        return [str(one.message) for one in caught]

    assert any("shoal.Fleet.bind" in text for text in fleet(1).run(run)[0])
