"""Ctrl-C at any line of a call: it is raised, and nothing stays behind that no deadline ends."""

from __future__ import annotations

from collections.abc import Iterator

import interrupt_points
import pytest

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
