"""The resources that windows leave behind when they are made and freed repeatedly, also while in use.

``make soak`` runs the long counts; each test has a shorter variant for every run.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import networkx as nx
import pytest
import torch

import shoal
from shoal.windows.locks import ByteLocks, Freed
from support.leftovers import nothing_is_left
from support.window_points import cycle
from support.world import World

MEGABYTE = 1 << 20
OVER = pytest.mark.parametrize(
    "environment",
    [
        pytest.param({}, id="shared_memory", marks=pytest.mark.transport("shared_memory")),
        pytest.param({"SHOAL_TRANSPORT": "network"}, id="network", marks=pytest.mark.transport("network")),
    ],
)
Fleets = Callable[..., shoal.Fleet]


def cycle_in_processes(environment: dict[str, str], count: int, warm: int) -> None:
    with World(2, environment=environment) as world:
        for left, grown in world.results(cycle, count, warm, patience=1500.0):
            assert not left
            assert grown < 2 * MEGABYTE, f"{grown:,} bytes more after {count - warm} windows"


@pytest.mark.slow  # the next one is the same among threads
@OVER
def test_windows_created_and_freed_500_times_leave_nothing(environment: dict[str, str]) -> None:
    cycle_in_processes(environment, 500, 100)


def cycle_among_threads(count: int, warm: int) -> list[tuple[list[str], int]]:
    with nothing_is_left():
        return shoal.Fleet(2, timeout=20.0).run(cycle, count, warm)


@pytest.mark.transport("threads")
def test_windows_of_threads_created_and_freed_500_times_leave_nothing() -> None:
    """In a new process: the heap of this one also changes by what earlier tests have left to its allocator."""
    with World(1, init=False) as world:
        [agents] = world.results(cycle_among_threads, 500, 100)
    for left, grown in agents:
        assert not left
        assert grown < 2 * MEGABYTE


@pytest.mark.soak
@pytest.mark.timeout(1800)
@OVER
def test_windows_created_and_freed_10_000_times_leave_nothing(environment: dict[str, str]) -> None:
    cycle_in_processes(environment, 10_000, 500)


# Freed while it is used


def test_windows_freed_while_the_worker_writes_to_neighbours_cause_no_error(fleet: Fleets) -> None:
    def run() -> int:
        failures = 0
        for i in range(40):
            assert shoal.bluefog.win_create(torch.ones(2000), "x", zero_init=True)
            handles = [shoal.bluefog.win_accumulate_nonblocking(torch.ones(2000), "x") for _ in range(6)]
            if i % 2:
                with suppress(shoal.Mismatch):  # a neighbour has freed it already
                    shoal.bluefog.win_wait(handles[0])
            shoal.bluefog.win_free("x")
            for handle in handles[i % 2 :]:
                try:
                    shoal.bluefog.win_wait(handle)
                except shoal.Mismatch as error:
                    assert "has freed this window" in str(error)
                    failures += 1
        shoal.barrier()
        return failures

    assert sum(fleet(3).run(run)) > 0


def test_a_window_may_be_freed_while_its_mutexes_are_held(fleet: Fleets) -> None:
    def run() -> None:
        for i in range(6):
            assert shoal.bluefog.win_create(torch.ones(5), "x")
            shoal.barrier()
            with suppress(shoal.Mismatch), shoal.bluefog.win_mutex("x", for_self=i % 2 == 0):
                shoal.bluefog.win_free("x")
            if shoal.bluefog.get_current_created_window_names():  # somebody whose mutex was wanted was faster
                shoal.bluefog.win_free("x")
            shoal.barrier()

    fleet(3).run(run)


def test_a_window_freed_by_a_neighbour_before_all_have_created_it_refuses_writes(fleet: Fleets) -> None:
    """On a line 0 - 1 - 2 the window of 0 needs only 1, which still waits for 2 when 0 frees it."""

    def run() -> None:
        shoal.set_topology(nx.path_graph(3, create_using=nx.DiGraph).to_undirected().to_directed())
        rank = shoal.rank()
        if rank == 2:
            time.sleep(0.1)  # most likely enough for the others; the test holds in any order
        assert shoal.bluefog.win_create(torch.ones(5), "x")
        if rank == 0:
            shoal.bluefog.win_free("x")
        shoal.barrier()
        if rank == 1:
            with pytest.raises(shoal.Mismatch, match="has freed this window"):
                shoal.bluefog.win_put(torch.ones(5), "x", dst_weights={0: 1.0})
        if rank == 2:
            shoal.bluefog.win_put(torch.ones(5), "x")
        shoal.barrier()

    fleet(3).run(run)


def test_a_window_that_cannot_be_created_leaves_nothing(fleet: Fleets) -> None:
    def run() -> None:
        if shoal.rank() == 1:
            shoal.shutdown()
            return
        for _ in range(3):
            with pytest.raises((shoal.PeerLost, shoal.Mismatch)):
                shoal.bluefog.win_create(torch.ones(5), "x", timeout=5.0)

    fleet(2).run(run)


def test_a_window_with_a_departed_agent_is_refused_by_name(fleet: Fleets) -> None:
    departed = threading.Event()

    def run() -> None:
        if shoal.rank() == 1:
            shoal.shutdown()
            departed.set()
            return
        assert departed.wait(30)  # it listens no more
        with pytest.raises(shoal.PeerLost) as caught:
            shoal.bluefog.win_create(torch.ones(5), "x", timeout=5.0)
        assert caught.value.ranks == (1,)

    fleet(2).run(run)


# The locks themselves


@contextmanager
def memory_file() -> Iterator[int]:
    fd = os.memfd_create("locks")
    try:
        yield fd
    finally:
        os.close(fd)


def test_a_lock_held_when_locks_are_closed_stays_locked_until_its_release() -> None:
    with nothing_is_left(), memory_file() as fd:
        ours, remote = ByteLocks(fd), ByteLocks(fd)
        assert ours.try_acquire(0) and ours.try_acquire(1)
        ours.close()
        with pytest.raises(Freed):
            ours.try_acquire(2)
        assert not remote.try_acquire(0)
        ours.release(0)
        assert remote.try_acquire(0) and not remote.try_acquire(1)
        ours.release(1)
        assert ours.descriptor < 0
        assert remote.try_acquire(1)
        remote.release(0)
        remote.release(1)
        remote.close()


def test_closing_locks_while_threads_acquire_them_locks_no_other_file() -> None:
    """The next file that is opened reuses the number of a closed descriptor."""
    ends: list[BaseException] = []

    def use(locks: ByteLocks, byte: int) -> None:
        try:
            while True:
                if locks.try_acquire(byte):
                    locks.release(byte)
        except BaseException as error:
            ends.append(error)

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with nothing_is_left():
            for _ in range(100):
                with memory_file() as fd:
                    locks = ByteLocks(fd)
                    threads = [threading.Thread(target=use, args=(locks, byte % 2)) for byte in range(4)]
                    for thread in threads:
                        thread.start()
                    locks.close()
                    with memory_file() as other, memory_file() as another:
                        for thread in threads:
                            thread.join(30)
                        for innocent in (other, another):
                            probe = ByteLocks(innocent)
                            for byte in range(2):
                                assert probe.try_acquire(byte)
                                probe.release(byte)
                            probe.close()
    finally:
        sys.setswitchinterval(switching)
    assert len(ends) == 400 and all(isinstance(error, Freed) for error in ends), ends
