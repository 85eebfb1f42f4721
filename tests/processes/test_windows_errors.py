"""Wrong calls on windows are errors at the caller alone: its own process and all others continue."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import shoal
from support.limits import scaled
from support.window_agents import every_operation
from support.world import World

CALLER, LEFT, STRANGER, RIGHT = 0, 3, 2, 1
"""The agents of a ring of four, as agent 0 sees them."""
COMPLAINTS = {
    "no window": ("KeyError", "'y'"),
    "another shape": ("ValueError", "shape [2]"),
    "another dtype": ("ValueError", "torch.float32"),
    "stranger": ("ValueError", f"[{STRANGER}]"),
    "nobody": ("ValueError", "4"),
}
"""The class of the exception of each kind of wrong call, and its expected text."""
Failure = tuple[str, str]
"""The class of an exception and its text."""


# What agents do


def failure_of(call: Callable[[], object]) -> Failure:
    """The error of a call; empty if it raises none."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def make_window(name: str = "x") -> None:
    """A ring, and a window of two float32 on all its agents."""
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    assert shoal.bluefog.win_create(torch.full((2,), float(shoal.rank())), name)
    shoal.barrier()


def invalid_calls(stranger: int) -> dict[str, Failure]:
    """Call everything wrongly that can be called wrongly, with ``stranger`` for a rank that is no neighbour."""
    good = torch.zeros(2)
    calls: dict[str, Callable[[], object]] = {
        "put to no window": lambda: shoal.bluefog.win_put(good, "y"),
        "accumulate to no window": lambda: shoal.bluefog.win_accumulate(good, "y"),
        "get from no window": lambda: shoal.bluefog.win_get("y"),
        "update no window": lambda: shoal.bluefog.win_update("y"),
        "collect no window": lambda: shoal.bluefog.win_update_then_collect("y"),
        "lock no window": lambda: shoal.bluefog.win_mutex("y").__enter__(),
        "free no window": lambda: shoal.bluefog.win_free("y"),
        "count no window": lambda: shoal.bluefog.get_win_version("y"),
        "put another shape": lambda: shoal.bluefog.win_put(torch.zeros(3), "x"),
        "accumulate another shape": lambda: shoal.bluefog.win_accumulate(torch.zeros(2, 1), "x"),
        "put another dtype": lambda: shoal.bluefog.win_put(torch.zeros(2, dtype=torch.float64), "x"),
        "accumulate another dtype": lambda: shoal.bluefog.win_accumulate(torch.zeros(2, dtype=torch.int32), "x"),
        "put to a stranger": lambda: shoal.bluefog.win_put(good, "x", dst_weights={stranger: 1.0}),
        "accumulate to a stranger": lambda: shoal.bluefog.win_accumulate(good, "x", dst_weights=[stranger]),
        "get from a stranger": lambda: shoal.bluefog.win_get("x", src_weights={stranger: 1.0}),
        "update with a stranger": lambda: shoal.bluefog.win_update("x", 0.5, {stranger: 0.5}),
        "lock a stranger": lambda: shoal.bluefog.win_mutex("x", ranks=[stranger]).__enter__(),
        "put to nobody": lambda: shoal.bluefog.win_put(good, "x", dst_weights={shoal.size(): 1.0}),
        "put later to no window": lambda: shoal.bluefog.win_put_nonblocking(good, "y"),
        "put later to a stranger": lambda: shoal.bluefog.win_put_nonblocking(good, "x", dst_weights={stranger: 1.0}),
    }
    return {what: failure_of(call) for what, call in calls.items()}


def keep_working(rounds: int, name: str = "x") -> None:
    """Put, get and update as usual, whatever others do concurrently."""
    for _ in range(rounds):
        shoal.bluefog.win_put(torch.ones(2), name)
        shoal.bluefog.win_get(name)
        shoal.bluefog.win_update(name)


def free(name: str = "x") -> None:
    shoal.bluefog.win_free(name)


def counts(name: str = "x") -> int:
    """How often anything has been written to the slots of this agent."""
    return sum(one.puts + one.gets + one.accumulates for one in shoal.bluefog.win_slots(name).values())


def create_another(odd: int, shape: int, dtype: torch.dtype) -> bool:
    """Make a window together; agent ``odd`` with another shape or dtype than the others' two float32."""
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    own = torch.zeros(shape, dtype=dtype) if shoal.rank() == odd else torch.zeros(2)
    return shoal.bluefog.win_create(own, "x", timeout=10.0)


def put_to(to: int, name: str = "x") -> bool:
    return shoal.bluefog.win_put(torch.ones(2), name, dst_weights={to: 1.0})


def get_from(source: int, name: str = "x") -> bool:
    return shoal.bluefog.win_get(name, src_weights={source: 1.0})


def names() -> list[str]:
    return shoal.bluefog.get_current_created_window_names()


# The tests


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("shared_memory", marks=pytest.mark.transport("shared_memory")),
        pytest.param("network", marks=pytest.mark.transport("network")),
    ],
)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(4, environment={"SHOAL_TRANSPORT": request.param}) as made:
        yield made


@pytest.fixture(autouse=True)
def all_still_work(world: World) -> Iterator[None]:
    """After each test every agent is running and has no window, and all can still average."""
    yield
    assert world.alive == [0, 1, 2, 3]
    assert world.results(names) == [[]] * 4
    result = world.results(every_operation, 3)
    assert [one["put"] for one in result] == [[10.0 * (j + 1) * (i + 1) for j in range(4) if j != i] for i in range(4)]


def test_invalid_calls_are_errors_at_the_caller_while_the_others_work(world: World) -> None:
    world.results(make_window)
    busy = [world.run_on(rank, keep_working, 40) for rank in (RIGHT, STRANGER, LEFT)]
    result = world.results(invalid_calls, STRANGER, on=[CALLER])[0]
    assert [one.outcome().error for one in busy] == [""] * 3
    for what, (error, message) in result.items():
        expected, output = next(one for end, one in COMPLAINTS.items() if what.endswith(end))
        assert error == expected, what
        assert output in message, f"{what}: {message}"
    world.results(free)


def test_invalid_calls_write_to_no_slot(world: World) -> None:
    world.results(make_window)
    world.results(invalid_calls, STRANGER, on=[CALLER])
    assert world.results(counts) == [0] * 4
    world.results(free)


@pytest.mark.parametrize(("shape", "dtype"), [(3, torch.float32), (2, torch.float64)], ids=["shape", "dtype"])
def test_a_window_of_another_kind_is_an_error_at_both_ends_of_each_of_its_edges(
    world: World, shape: int, dtype: torch.dtype
) -> None:
    outcomes = world.run(create_another, CALLER, shape, dtype)
    assert [one.error for one in outcomes] == ["Mismatch", "Mismatch", "", "Mismatch"]
    for outcome in outcomes:
        if outcome.error:
            assert CALLER in outcome.ranks
            assert str(dtype) in outcome.message and f"[{shape}]" in outcome.message
    assert world.results(names) == [[], [], ["x"], []]
    [writer] = world.run(put_to, RIGHT, on=[STRANGER])  # it made its window, its neighbours did not
    assert writer.error == "Mismatch" and RIGHT in writer.ranks and "freed" in writer.message
    world.results(free, on=[STRANGER])


def test_a_window_freed_by_a_neighbour_is_an_error_for_writes_to_it(world: World) -> None:
    world.results(make_window)
    world.results(free, on=[RIGHT])
    for function in (put_to, get_from):
        [outcome] = world.run(function, RIGHT, on=[CALLER])
        assert outcome.error == "Mismatch" and RIGHT in outcome.ranks and "freed" in outcome.message
        assert world.results(function, LEFT, on=[CALLER]) == [True]
    [outcome] = world.run(put_to, CALLER, on=[RIGHT])
    assert outcome.error == "KeyError" and "'x'" in outcome.message
    world.results(free, on=[CALLER, STRANGER, LEFT])


def test_freeing_one_window_does_not_affect_others(world: World) -> None:
    world.results(make_window, "kept")
    world.results(make_window)
    busy = [world.run_on(rank, keep_working, 40, "kept") for rank in (RIGHT, STRANGER, LEFT)]
    world.results(free, on=[CALLER])
    world.results(keep_working, 40, "kept", on=[CALLER])
    assert [one.outcome().error for one in busy] == [""] * 3
    world.results(free, on=[RIGHT, STRANGER, LEFT])
    assert world.results(names) == [["kept"]] * 4
    world.results(free, "kept")


CRASHES = """
import time
import shoal, torch
shoal.init()
x = torch.zeros(4)
shoal.bluefog.win_create(x, "x")
shoal.barrier()
if shoal.rank() == 1:
    with shoal.bluefog.win_mutex("x", for_self=True):
        shoal.barrier()
        started = time.monotonic()
        try:
            shoal.barrier()
        except shoal.PeerLost as lost:
            print("heard", time.monotonic() - started, lost.ranks, "a bug in the script" in str(lost), flush=True)
else:
    shoal.barrier()
    shoal.bluefog.win_put_nonblocking(x, "x", require_mutex=True)
    time.sleep(0.3)
    raise ValueError("a bug in the script")
"""


@pytest.mark.transport("shared_memory")
def test_a_script_that_fails_while_one_of_its_calls_waits_ends_with_an_error(tmp_path: Path) -> None:
    script = tmp_path / "crashes.py"
    script.write_text(CRASHES)
    world = World(2, init=False)
    try:
        pending = [world.run_on(rank, runpy.run_path, str(script), None, "__main__", caught=False) for rank in range(2)]
        codes = [one.outcome().message for one in pending]
        failed, other = (member.log.read_text() for member in world.members)
    finally:
        world.destroy()
    assert codes == ["exit code 1", "exit code 0"]
    assert "ValueError: a bug in the script" in failed
    (line,) = [line for line in other.splitlines() if "heard" in line]
    seconds, *rest = line.partition("heard ")[2].split(maxsplit=1)
    assert float(seconds) < scaled(5) and rest == ["(0,) True"]
