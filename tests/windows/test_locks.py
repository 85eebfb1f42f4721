"""Locks on bytes of a file: in the order of arrival, and free when their holder, or whoever waits, is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.windows import locks
from shoal.windows.locks import Busy, ByteLocks
from support.leftovers import wait_until


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(64))
        file.flush()
        yield file.name


def opened(path: str) -> ByteLocks:
    fd = os.open(path, os.O_RDWR)
    try:
        return ByteLocks(fd)
    finally:
        os.close(fd)


def deadline() -> float:
    return time.monotonic() + 30.0


def waits(path: str, byte: int, count: int) -> bool:
    """Whether so many places in the queue of a byte are held."""
    node, result = Path(path).stat().st_ino, 0
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if f":{node}" in line and fields[1] != "->" and fields[-2] != "EOF":
            result += int(fields[-2]) // locks._PLACES == byte + 1
    return result == count


def take_in_line(line: ByteLocks, order: list[int], me: int) -> None:
    line.acquire(0, deadline())
    order.append(me)
    line.release(0)


@pytest.fixture
def no_waiter_counts_as_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a thread may wait longer for a processor, and the next one would take its turn."""
    monkeypatch.setattr(locks, "_PATIENCE", 30.0)


@pytest.mark.usefixtures("no_waiter_counts_as_stopped")
def test_waiters_acquire_a_lock_in_the_order_of_their_arrival(path: str) -> None:
    """Each with its own file description, as agents have. Then threads that share one."""
    for shared in (False, True):
        holder, common = opened(path), opened(path)
        holder.acquire(0, deadline())
        order: list[int] = []
        threads = []
        for me in range(6):
            own = common if shared else opened(path)
            threads.append(threading.Thread(target=take_in_line, args=(own, order, me)))
            threads[-1].start()
            if shared:
                assert wait_until(lambda: len(common._of(0).waiters) == me + 1)  # noqa: B023
            else:
                assert wait_until(lambda: waits(path, 0, me + 1))  # noqa: B023
        holder.release(0)
        for thread in threads:
            thread.join(60.0)
        assert order == list(range(6))
        assert waits(path, 0, 0)


@pytest.mark.usefixtures("no_waiter_counts_as_stopped")
def test_a_thread_that_acquires_a_lock_repeatedly_lets_waiters_in_between(path: str) -> None:
    greedy, waiter = opened(path), opened(path)
    greedy.acquire(0, deadline())
    order: list[int] = []
    thread = threading.Thread(target=take_in_line, args=(waiter, order, 0))
    thread.start()
    assert wait_until(lambda: waits(path, 0, 1))
    greedy.release(0)
    times = 0
    while not order:
        greedy.acquire(0, deadline())
        times += 1
        greedy.release(0)
        assert times <= 2 * locks._UNSEEN
    thread.join(60.0)


def wait_in_queue(path: str) -> None:
    opened(path).acquire(0, deadline())
    time.sleep(60.0)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_waiter_does_not_block_a_lock(path: str, by: signal.Signals) -> None:
    holder, other = opened(path), opened(path)
    holder.acquire(0, deadline())
    process = multiprocessing.get_context("fork").Process(target=wait_in_queue, args=(path,))
    process.start()
    try:
        assert wait_until(lambda: waits(path, 0, 1))
        assert process.pid is not None
        os.kill(process.pid, by)
        if by is signal.SIGKILL:
            process.join(20.0)
        else:
            os.waitpid(process.pid, os.WUNTRACED)
        holder.release(0)
        for _ in range(3):
            other.acquire(0, deadline())
            other.release(0)
    finally:
        process.kill()
        process.join()


def test_a_lock_whose_holder_is_killed_is_granted_to_the_next_waiter(path: str) -> None:
    process = multiprocessing.get_context("fork").Process(target=wait_in_queue, args=(path,))
    process.start()
    other = opened(path)
    try:
        assert wait_until(lambda: not other.try_acquire(0) or other.release(0))  # type: ignore[func-returns-value]
    finally:
        process.kill()
        process.join()
    other.acquire(0, deadline())
    other.release(0)


def test_a_deadline_ends_a_wait_and_removes_the_waiter(path: str) -> None:
    holder, other = opened(path), opened(path)
    holder.acquire(0, deadline())
    with pytest.raises(Busy):
        other.acquire(0, time.monotonic() + 0.05)
    assert waits(path, 0, 0)
    holder.release(0)
    other.acquire(0, deadline())
