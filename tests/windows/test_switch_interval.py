"""The interpreter's switch interval is short while a neighbour is served, and the user's own at all other times."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

import shoal
from shoal.windows.owner_service import SWITCH_INTERVAL_SECONDS, short_switch_interval
from shoal.windows.window_memory import OWN, WindowMemory
from support.leftovers import wait_until
from support.limits import scaled

Fleets = Callable[..., shoal.Fleet]
USERS = 0.004


@pytest.fixture(autouse=True)
def users_interval() -> Iterator[None]:
    """A user who has set an interval of his own."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(USERS)
    yield
    sys.setswitchinterval(before)


def now() -> float:
    return round(sys.getswitchinterval(), 6)


@pytest.fixture
def at_locks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, bool]]:
    """The interval when rank 1 asks for a lock of rank 0's window, and whether it got it."""
    results = []
    try_acquire = WindowMemory.try_acquire

    def recording_acquire(self: WindowMemory, byte: int, who: int) -> bool:
        got = try_acquire(self, byte, who)
        if who == 1 and byte != OWN:
            results.append((now(), got))
        return got

    monkeypatch.setattr(WindowMemory, "try_acquire", recording_acquire)
    return results


@pytest.mark.transport("network")
@pytest.mark.parametrize("numel", [1, 1_000_000], ids=["all at once", "in pieces"])
def test_a_put_is_written_with_a_short_switch_interval(at_locks: list[tuple[float, bool]], numel: int) -> None:
    def run() -> float:
        x = torch.full((numel,), float(shoal.rank()))
        shoal.bluefog.win_create(x, "x")
        if shoal.rank() == 1:
            shoal.bluefog.win_put(x, "x")
        shoal.barrier()
        return float(shoal.bluefog.win_update("x", 0.0, {1 - shoal.rank(): 1.0}, clone=True)[-1])

    assert shoal.Fleet(2, transport="network", timeout=20.0).run(run)[0] == 1.0
    assert at_locks == [(SWITCH_INTERVAL_SECONDS, True)]
    assert now() == USERS


@pytest.mark.transport("network")
def test_an_acquired_lock_is_retried_with_a_short_switch_interval(at_locks: list[tuple[float, bool]]) -> None:
    held = threading.Event()

    def run() -> bool:
        x = torch.zeros(1)
        shoal.bluefog.win_create(x, "x")
        if shoal.rank() == 1:
            held.wait(30)
            done = shoal.bluefog.win_put(x, "x", require_mutex=True)
        else:
            with shoal.bluefog.win_mutex("x", for_self=True):
                held.set()
                done = wait_until(lambda: len(at_locks) > 2)
        shoal.barrier()
        return done

    assert shoal.Fleet(2, transport="network", timeout=20.0).run(run) == [True, True]
    assert at_locks[0][1] is False
    assert {interval for interval, _ in at_locks} == {SWITCH_INTERVAL_SECONDS}
    assert now() == USERS


def test_the_last_exit_restores_the_users_interval() -> None:
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(short_switch_interval())
        second.enter_context(short_switch_interval())
        first.close()
        assert now() == SWITCH_INTERVAL_SECONDS
        second.close()
        assert now() == USERS


def test_a_change_by_the_user_during_the_block_is_kept() -> None:
    with short_switch_interval():
        sys.setswitchinterval(0.002)
    assert now() == 0.002


def test_a_change_by_the_user_is_kept_after_another_thread_exits() -> None:
    with short_switch_interval():
        sys.setswitchinterval(0.002)
        with short_switch_interval():
            assert now() == SWITCH_INTERVAL_SECONDS
    assert now() == 0.002


def test_a_shorter_interval_of_the_user_is_kept() -> None:
    sys.setswitchinterval(0.00012)
    with short_switch_interval():
        assert now() == 0.00012
    assert now() == 0.00012


@pytest.mark.parametrize("microseconds", [90, 501, 19_987])
def test_an_interval_is_restored_exactly_however_often(microseconds: int) -> None:
    """``sys.getswitchinterval`` returns slightly less than whole microseconds for these."""
    sys.setswitchinterval((microseconds + 0.5) * 1e-6)
    for _ in range(3):
        with short_switch_interval():
            pass
    assert now() == round(microseconds * 1e-6, 6)


def test_a_child_process_has_the_users_interval_and_no_active_block() -> None:
    script = f"""
import os, sys
from shoal.windows.owner_service import short_switch_interval
sys.setswitchinterval({USERS})
with short_switch_interval():
    child = os.fork()
    if not child:
        found = [sys.getswitchinterval()]
        with short_switch_interval():
            found.append(sys.getswitchinterval())
        found.append(sys.getswitchinterval())
        print([round(one, 6) for one in found], flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=scaled(50))
    assert done.stdout == f"{[USERS, SWITCH_INTERVAL_SECONDS, USERS]}\n", done.stderr
