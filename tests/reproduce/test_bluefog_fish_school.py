"""The fish school of the BlueFog paper: the whole command, small, and its verdict."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "reproduce"))

import bluefog_fish_school as experiment
from _common import verdict

FEW = experiment.Results(
    experiment.School(8, 10), [1.0] * 2, [0.1] * 2, [50.0] * 2, [0.1] * 2, [1.0] * 2, [0.3] * 2, 0.0
)
MANY = replace(FEW, school=experiment.School(100, 10), gap=[5.0] * 2, changed=[0.9] * 2, difference=None)


def test_the_command_ends_with_a_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert experiment.main(["--quick", "--seeds", "1", "--figure", str(tmp_path / "fish.png")]) == 0
    stdout = capsys.readouterr().out
    assert "of 8 claims" in stdout or "all 8 claims hold" in stdout
    assert (tmp_path / "fish.png").stat().st_size > 10_000
    assert 2_000 < (tmp_path / "fish.gif").stat().st_size < 500_000


def test_results_that_differ_are_named() -> None:
    def told(**changed: object) -> str:
        return verdict(experiment.claims([replace(FEW, **changed), MANY]))

    assert told() == "agrees: all 8 claims hold"
    assert "8 fish disperse" in told(nearest=[1.0, 0.2])
    assert "8 fish encircle" in told(off_ring=[0.1, 0.5])
    assert "8 fish encircle" in told(gap=[50.0, 200.0])
    assert "8 fish know the predator's place" in told(error=[1.0, 1.0])
    assert "run by 8 real agents" in told(difference=0.1)
    assert "highly dynamic" in verdict(experiment.claims([FEW, replace(MANY, changed=[0.9, 0.1])]))
