"""Fleets that are simulated from a seed (docs/testing.md)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shoal.ops import neighbor
from support.simulation.network import Weather
from support.simulation.programs import Call, Program
from support.simulation.runs import run, shrunk
from support.simulation.scenarios import Fault, Scenario

FOUND = {
    "a root that only waits for confirmations passed no probe on": Scenario(
        1,
        Program(
            2, "full", [Call(0, "push-pull", 2, True, ({1: 1.0}, {0: 1.0})), Call(1, "object", 1, True, ({}, {}))], 1
        ),
        Weather(),
        (Fault("missing call", 0, 0),),
    ),
}
"""Runs that have found defects, and which."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def failures(first: int, count: int, most: int = 1) -> list[Scenario]:
    found = []
    for seed in range(first, first + count):
        scenario = Scenario.draw(seed)
        if run(scenario).problems:
            found.append(scenario)
            if len(found) == most:
                break
    return found


def check(seed: int) -> None:
    report = run(Scenario.draw(seed))
    assert not report.problems, f"python -m support.simulation --seed {seed}\n{report.scenario}\n{report.problems}"


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_seeds(first: int) -> None:
    for seed in range(first, first + 20):
        check(seed)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1000, 200_000, 1000))
def test_many_seeds(first: int) -> None:
    for seed in range(first, first + 1000):
        check(seed)


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_stays_away(what: str) -> None:
    assert not run(FOUND[what]).problems


@pytest.mark.parametrize("seed", [2, 20, 35])
def test_a_seed_gives_the_same_run_again(seed: int) -> None:
    first, second = (run(Scenario.draw(seed)) for _ in range(2))
    assert first.digest == second.digest
    assert first.steps > 100


def test_a_defect_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a call takes a weight for its square, an average is wrong."""
    mix = neighbor.mix_steps

    def wrong(*args, **kwargs):  # type: ignore[no-untyped-def]
        result = yield from mix(*args, **kwargs)
        if result.numel() == 7:
            result.add_(1.0)
        return result

    monkeypatch.setattr(neighbor, "mix_steps", wrong)
    (found,) = failures(0, 100)
    short = shrunk(found)
    assert len(short.program.calls) == 1 and not short.faults
    assert "of 7 numbers" in str(short)


def test_no_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail(f"{self.name} was started"))
    check(2)
