"""Fixtures of the contract suite: every test that takes ``transport`` runs over threads, shared memory and TCP."""

from __future__ import annotations

import ctypes
import gc
import signal
from collections.abc import Callable, Iterator
from functools import partial

import pytest

import shoal
from support import TRANSPORTS
from support.leftovers import nothing_is_left

pytest_plugins = ["support.transport_counts", "pytester"]


def pytest_configure() -> None:
    """Let signals reach the agents of tests about them, also where the tests run in the background and ignore some."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Let a full collection look only at what tests make: all of torch and thousands of tests cost 0.5 s every time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def memory_goes_back() -> Iterator[None]:
    """What agents that are threads had freed, glibc keeps for the next ones: in the end gigabytes that nobody uses."""
    yield
    gc.collect()
    gc.freeze()  # what the tests have imported, such as torch's compiler
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.transport(name)) for name in TRANSPORTS])
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a transport. The test leaves no thread and no descriptor behind, or fails."""
    with nothing_is_left():
        yield request.param


@pytest.fixture
def fleet(transport: str) -> Callable[..., shoal.Fleet]:
    """Makes fleets over the transport; a wait that should not be there ends after 20 s instead of 300."""
    return partial(shoal.Fleet, transport=transport, timeout=20.0)
