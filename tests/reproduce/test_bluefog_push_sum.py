"""Asynchronous push-sum of the BlueFog paper: the whole command, small, its equations, and its verdict."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "reproduce"))

import bluefog_push_sum as experiment
from _common import verdict

FINE = {1: [experiment.Run([1e-3, 1e-12], 0.5, 1e-9, 1e-14)] * 2}
REAL = [experiment.RealRun(1e-12, 1e-15, [100, 10])] * 2


def test_the_command_ends_with_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert experiment.main(["--quick"]) == 0
    stdout = capsys.readouterr().out
    assert ("the paper" in stdout and "of 6 claims" in stdout) or "all 6 claims hold" in stdout


def test_mass_is_conserved_and_the_mean_is_found_where_plain_averaging_does_not_find_it() -> None:
    run = experiment.simulate(seed=1, longest=3, ticks=1500)
    assert run.drift < 1e-12
    assert run.error[-1] < 1e-4 < run.error[0]
    assert run.spread < 1e-3 < 0.1 < run.plain


def test_results_that_differ_are_named() -> None:
    def told(simulated: dict[int, list[experiment.Run]] = FINE, real: list[experiment.RealRun] = REAL) -> str:
        return verdict(experiment.claims(simulated, real))

    assert told() == "agrees: all 5 claims hold"
    ((run, _),) = FINE.values()
    assert "Push-sum finds the unbiased mean" in told({1: [run, replace(run, error=[1e-3])]})
    assert "Plain asynchronous averaging" in told({1: [run, replace(run, plain=1e-6)]})
    assert "keeps its value" in told({1: [replace(run, drift=0.1)]})
    assert "Listing 3" in told(real=[replace(REAL[0], error=0.1)])
    assert "does not wait" in told(real=[replace(REAL[0], steps=[10, 10])])
