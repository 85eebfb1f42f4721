"""What hardly ever happens to an agent: several threads that wait and leave, callbacks that exit, descriptors that are
used up, more neighbours at once than are let in, a deadline in the middle of a copy.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from shoal.execution.operation import Operation
from shoal.runtime.agent import agent_context, bind, current
from shoal.runtime.bootstrap import leave
from shoal.transport import acceptor
from shoal.transport.link import Published
from support.leftovers import descriptors, wait_until
from support.world import World

Fleets = Callable[..., shoal.Fleet]


def test_several_threads_run_callbacks_without_interference() -> None:
    def run() -> list[str]:
        failures: list[str] = []
        limit = time.monotonic() + 1.5

        def work(name: str) -> None:
            try:
                while time.monotonic() < limit and not failures:
                    handle = shoal.nonblocking.allreduce(torch.ones(4), name=name)
                    for _ in range(6):
                        handle.add_done_callback(lambda _: None)
                    handle.wait()
            except BaseException as error:
                failures.append(repr(error))

        threads = [threading.Thread(target=bind(work), args=(f"n{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return failures

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert shoal.Fleet(1).run(run) == [[]]
    finally:
        sys.setswitchinterval(interval)


def test_a_callback_that_exits_does_not_end_the_progress_thread(fleet: Fleets) -> None:
    def run() -> bool:
        if shoal.rank() == 1:
            shoal.barrier()  # the other's callback is there before its call can end
        handle = shoal.nonblocking.allreduce(torch.ones(4))
        if shoal.rank() == 0:
            handle.add_done_callback(lambda _: sys.exit(1))
            shoal.barrier()
        assert wait_until(handle.poll)
        again = shoal.nonblocking.allreduce(torch.ones(4))
        done = wait_until(again.poll)  # nobody waits for it, so the thread must drive
        shoal.barrier()
        return done

    assert fleet(2).run(run) == [True, True]


def test_shutdown_in_a_callback_is_refused_and_the_agent_stays(fleet: Fleets) -> None:
    def run() -> list[Any]:
        output: list[Any] = []

        def leave_in_it(_: object) -> None:
            with pytest.raises(RuntimeError, match="cannot be called from a callback"):
                shoal.shutdown()
            output.append(shoal.is_initialized())

        with current().engine.lock:  # of one that has ended, it is called here
            shoal.nonblocking.allreduce(torch.ones(4)).add_done_callback(leave_in_it)
        assert wait_until(lambda: bool(output))
        output.append(shoal.allreduce(torch.ones(1)).item())
        return output

    assert fleet(2).run(run) == [[True, 1.0]] * 2


def test_a_shutdown_while_another_thread_of_the_agent_waits(fleet: Fleets) -> None:
    ended: list[type] = []

    def run() -> None:
        def average() -> None:
            try:
                while True:
                    shoal.neighbor_allreduce(torch.ones(100), name="a")
            except BaseException as error:
                ended.append(type(error))

        if shoal.rank() == 1:
            average()
            return
        thread = threading.Thread(target=bind(average))
        thread.start()
        time.sleep(0.02)  # in the middle of it
        shoal.shutdown()
        thread.join(30)
        assert not thread.is_alive()

    for _ in range(20):
        fleet(2).run(run)
    assert len(ended) == 40
    assert set(ended) <= {shoal.NotInitialized, shoal.PeerLost}


def test_an_agent_that_leaves_after_a_thirds_death_is_known_to_have_left(fleet: Fleets) -> None:
    all_, both = threading.Barrier(3), threading.Barrier(2)

    def run() -> tuple[tuple[int, ...], list[int]]:
        shoal.barrier()
        all_.wait(30)
        if shoal.rank() == 2:
            leave(agent_context(), "died for the test", True)
            return (), []
        assert wait_until(lambda: 2 in shoal.observability.membership().died)
        both.wait(30)
        if shoal.rank() == 1:
            shoal.shutdown()
            return (), []
        assert wait_until(lambda: 1 not in shoal.observability.membership().alive)
        view = shoal.observability.membership()
        return view.left, sorted(view.died)

    assert fleet(3).run(run)[0] == ((1,), [2])


def test_a_deadline_during_the_copy_releases_the_memory() -> None:
    over = threading.Event()

    def run() -> list[int]:
        if shoal.rank() == 1:
            over.wait(30)
            return []
        engine, result = current("test").engine, []
        publish = engine.publisher.publish

        def slowly(operation: Operation, tensor: torch.Tensor, **how: Any) -> Published:
            time.sleep(0.1)  # the progress thread checks the clock during this
            return publish(operation, tensor, **how)

        engine.publish = slowly  # type: ignore[method-assign]
        for _ in range(12):
            with pytest.raises(shoal.DeadlineExceeded):
                shoal.neighbor_allreduce(torch.ones(1 << 20), timeout=0.02)
            result.append(engine.arena.nbytes)
        over.set()
        return result

    sizes = shoal.Fleet(2, transport="shared_memory").run(run)[0]
    # A few may have been sent in time, and wait to be read.
    assert sizes[-1] <= 4 * sizes[0], f"it grows: {sizes}"


@pytest.mark.transport("network")
def test_a_small_tensor_whose_bytes_arrive_after_its_header_is_waited_for() -> None:
    """As one from a GPU: it is published in a region, and over a network its bytes follow."""

    def run() -> int:
        engine = current("test").engine
        if shoal.rank() == 0:

            def publish(operation: Operation, tensor: torch.Tensor, **how: Any) -> Published:
                published = engine.publisher._reserve(operation, tensor.numel(), tensor.dtype)
                published.data.view(tensor.shape).copy_(tensor)
                return published

            engine.publish = publish  # type: ignore[method-assign]
        shoal.barrier()
        wrong = 0
        for _ in range(60):
            if shoal.rank() == 0:
                time.sleep(0.003)
                for name in "ab":
                    shoal.neighbor_allreduce(torch.full((1000,), 4.0), name=name)
            else:
                two = [shoal.nonblocking.neighbor_allreduce(torch.full((1000,), 2.0), name=name) for name in "ab"]
                wrong += sum(not torch.equal(handle.wait(), torch.full((1000,), 3.0)) for handle in two)
        return wrong

    assert shoal.Fleet(2, transport="network").run(run) == [0, 0]


@pytest.mark.transport("network")
def test_neighbours_above_the_accept_limit_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "KNOWN_ROOM", -9)  # three at a time: all twelve are at one address

    def run() -> float:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(12))
        shoal.barrier()
        return shoal.neighbor_allreduce(torch.tensor([float(shoal.rank())])).item()

    assert shoal.Fleet(12, transport="network").run(run) == pytest.approx([5.5] * 12)


@pytest.mark.transport("network")
def test_an_agent_without_free_descriptors_accepts_connections_later() -> None:
    with World(2, environment={"SHOAL_TRANSPORT": "network"}) as world:
        assert world.results(average_after_running_out_of_descriptors) == [1.0, 1.0]


def average_after_running_out_of_descriptors() -> float:
    engine = current("test").engine
    if shoal.rank() == 0:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        intruder, held = socket.socket(), []
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, descriptors())) + 3, hard))
        try:
            while True:
                held.append(os.dup(1))
        except OSError:
            pass
        intruder.connect(("127.0.0.1", engine.router.endpoints[0].port))
        time.sleep(0.2)  # the agent would take it
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        intruder.close()
    return shoal.allreduce(torch.ones(2))[0].item()


def test_findings_of_a_clock_check_take_effect_at_their_own_time(fleet: Fleets) -> None:
    """A departure suspected during a check of the clock is confirmed at its own time."""

    def run() -> float:
        shoal.barrier()
        waited = 0.0
        if shoal.rank() == 0:
            engine = current("test").engine
            reported: list[float] = []

            class FindingDetector:
                def check(self, now: float) -> float:
                    if not reported:
                        reported.append(now)
                        engine.progress.next_check = min(engine.progress.next_check, now + 0.2)
                    elif len(reported) == 1:
                        reported.append(now)
                    return float("inf")

                def close(self, deadline: float) -> None: ...

                def descriptors(self) -> list[int]:
                    return []

            engine.services.add("~suspicious", FindingDetector())  # type: ignore[arg-type]
            with pytest.raises(shoal.DeadlineExceeded):
                shoal.neighbor_allreduce(torch.ones(4), name="alone", timeout=1.0)
            del engine.services._by_prefix["~suspicious"]
            waited = reported[1] - reported[0]
        shoal.barrier()
        return waited

    assert fleet(2).run(run)[0] < 0.5


@pytest.mark.parametrize("numel", [4, 100_000])
def test_agents_without_a_common_call_do_not_wait_for_each_other_at_shutdown(fleet: Fleets, numel: int) -> None:
    """Each has sent a message for a call that the other never makes."""

    def run() -> float:
        handles = [
            shoal.nonblocking.neighbor_allreduce(torch.ones(numel), name=f"of rank {shoal.rank()}.{part}", timeout=0.5)
            for part in range(3)
        ]
        for handle in handles:
            with pytest.raises(shoal.ShoalError):  # the deadline; or the other one has left already
                shoal.bluefog.wait(handle)
        began = time.monotonic()
        shoal.shutdown()
        return time.monotonic() - began

    assert max(fleet(2).run(run)) < 3.0
