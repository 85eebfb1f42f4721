"""Ctrl-C at any line of a call: it is raised, and nothing stays behind that no deadline ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shoal
from support import interrupt_points
from support.world import World

OVER = [
    pytest.param({}, id="shared_memory", marks=pytest.mark.transport("shared_memory")),
    pytest.param({"SHOAL_TRANSPORT": "network"}, id="network", marks=pytest.mark.transport("network")),
]
SAMPLES = 60
"""Lines of each call that CI tries; ``make soak`` tries all."""


@pytest.fixture(scope="module", params=OVER)
def pair(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(2, environment=request.param) as world:
        yield world


def lines_of(pair: World, kind: str) -> int:
    counts = [pair.run(interrupt_points.called_in_full, kind, f"{kind} counted {n}") for n in range(3)]
    return max(outcomes[0].value for outcomes in counts)


def sweep(pair: World, kind: str, step: float, start: float = 0.0) -> None:
    at, total = start, lines_of(pair, kind)
    while at < total:
        name = f"{kind} {step:g} at {at:g}"
        other = pair.run_on(1, interrupt_points.keep_up, kind, name)
        [interrupted] = pair.run(interrupt_points.interrupted, kind, name, int(at), on=[0])
        for one in (interrupted, other.outcome()):
            assert not one.error, f"line {int(at)} of {total}, rank {one.rank}: {one.error}: {one.message}\n{one.trace}"
        at += step
    assert pair.is_sound()


@pytest.mark.parametrize("kind", interrupt_points.CALLS)
def test_an_interrupt_at_a_line_of_a_call_is_raised_and_leaves_nothing_behind(pair: World, kind: str) -> None:
    sweep(pair, kind, lines_of(pair, kind) / SAMPLES)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", interrupt_points.CALLS)
def test_an_interrupt_at_every_line_of_a_call_is_raised_and_leaves_nothing_behind(pair: World, kind: str) -> None:
    sweep(pair, kind, 1)


@pytest.mark.parametrize("every", [40, pytest.param(1, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
def test_an_interrupt_in_calls_on_windows_leaves_no_lock_behind(pair: World, every: int) -> None:
    pair.results(interrupt_points.make_window)
    total = max(pair.results(interrupt_points.lines_of_window_calls, on=[0])[0] for _ in range(3))
    for first in range(0, total, 10 * every):
        points = list(range(first, min(total, first + 10 * every), every))
        pair.results(interrupt_points.interrupt_window_calls, points, on=[0])
    pair.results(interrupt_points.free_window)
    assert pair.is_sound()


@pytest.mark.parametrize("samples", [12, pytest.param(500, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("environment", [one.values[0] for one in OVER], ids=["shared_memory", "network"])
def test_an_interrupt_in_shutdown_and_in_init_leaves_nothing_behind(environment: dict[str, str], samples: int) -> None:
    with World(2, environment=environment) as world:
        other = world.run_on(1, interrupt_points.end)
        ends = world.results(interrupt_points.lines_of, "shutdown", on=[0])[0]
        assert not other.outcome().error
        other = world.run_on(1, interrupt_points.begin_whatever_comes)
        begins = world.results(interrupt_points.lines_of, "init", on=[0])[0]
        world.run(_barrier, on=[0])
        assert not other.outcome().error
        count = min(samples, max(ends, begins))
        for number in range(count):
            for other_does, interrupted, total in (
                (interrupt_points.end, interrupt_points.interrupted_end, ends),
                (interrupt_points.begin_whatever_comes, interrupt_points.interrupted_beginning, begins),
            ):
                at = number * total // count
                other = world.run_on(1, other_does)
                told = f"{interrupted.__name__}, line {at} of {total}"
                [one] = world.run(interrupted, at, on=[0])
                assert not one.error, f"{told}, rank 0: {one.trace}"  # before the other, which may wait for it in vain
                one = other.outcome()
                assert not one.error, f"{told}, rank 1: {one.trace}"


def _barrier() -> None:
    shoal.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("environment", [one.values[0] for one in OVER], ids=["shared_memory", "network"])
def test_a_signal_handler_may_shut_the_agent_down_while_it_waits(environment: dict[str, str]) -> None:
    with World(2, environment=environment) as world:
        other = world.run_on(1, interrupt_points.see_it_leave)
        [message] = world.results(interrupt_points.wait_until_a_handler_ends_it, on=[0])
        assert "has shut down" in message
        assert (other.outcome().error, world.size) == ("PeerLost", 2)
