"""Fixtures of the contract suite: every test that takes ``transport`` runs over threads, shared memory and TCP; those
of tests/ops over process groups, too, unless they are marked as being about links."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import hypothesis
import pytest

import shoal
from support import PROCESS_GROUP, TRANSPORTS
from support.leftovers import nothing_is_left

pytest_plugins = ["support.transport_counts", "support.case_selection", "pytester"]
SITE = str(Path(__file__).parent / "support" / "site")
gc.disable()  # until all tests are collected: that makes many objects, and no garbage
hypothesis.settings.register_profile("shoal", deadline=None)  # an example may take long on a busy machine
hypothesis.settings.load_profile("shoal")
# A client of torch's store looks up the name of the server's address, 127.0.0.1 too, and prints it nowhere.
# No test waits 10 s for a name server that does not answer.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"


def pytest_configure() -> None:
    """Let signals reach the agents of tests about them, also where the tests run in the background and ignore some.

    And have interpreters that tests start import torch in less time: ``support/site``.
    """
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([SITE, *(one for one in path if one not in ("", SITE))])
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only the contract suite, and tests that request process groups by name, run over process groups."""
    left_out = [item for item in items if _over_process_groups(item) and not _is_contract(item)]
    if left_out:
        items[:] = [item for item in items if item not in set(left_out)]
        config.hook.pytest_deselected(items=left_out)


def _over_process_groups(item: pytest.Item) -> bool:
    return any(mark.args == (PROCESS_GROUP,) for mark in item.iter_markers("transport"))


def _is_contract(item: pytest.Item) -> bool:
    by_fixture = "transport" in getattr(item, "callspec", item).params if hasattr(item, "callspec") else False
    return not by_fixture or (item.path.parent.name == "ops" and item.get_closest_marker("links") is None)


def pytest_collection_finish() -> None:
    """Let a full collection look only at what tests make: all of torch and thousands of tests cost 0.5 s every time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def memory_goes_back() -> Iterator[None]:
    """Return freed memory to the system: glibc would keep the memory of each test's agents, and gigabytes add up."""
    yield
    gc.collect()
    gc.freeze()  # what the tests have imported, such as torch's compiler
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


OVER = (*TRANSPORTS, PROCESS_GROUP)


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.transport(name)) for name in OVER])
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a transport. The test leaves no thread and no descriptor behind, or fails."""
    with nothing_is_left():
        yield request.param


@pytest.fixture
def fleet(transport: str) -> Callable[..., shoal.Fleet]:
    """Makes fleets over the transport; a wait that should not be there ends after 20 s instead of 300."""
    return partial(shoal.Fleet, transport=transport, timeout=20.0)
