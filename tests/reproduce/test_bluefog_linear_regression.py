"""The linear regression of the BlueFog paper: the whole command, small, and its verdict."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "reproduce"))

import bluefog_linear_regression as experiment
from _common import verdict

FINE = {way: [1e-14, 2e-14] for way in experiment.WAYS} | {experiment.DGD: [0.1, 0.2]}


@pytest.mark.slow
def test_the_command_ends_with_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert experiment.main(["--quick", "--seeds", "2"]) == 0
    assert "agrees: all 7 claims hold" in capsys.readouterr().out


def test_results_that_differ_are_named() -> None:
    same = dict.fromkeys(experiment.LISTINGS, 1e-15)
    assert verdict(experiment.claims(FINE, same)).startswith("agrees")
    biased = FINE | {experiment.DIFFUSION: [0.1, 0.1]}
    assert verdict(experiment.claims(biased, same)).startswith("differs in 2 of 7 claims: Exact diffusion corrects")
    stopped = FINE | {experiment.PUSH_SUM: [1e-14, 1e-4]}
    assert "push-sum gradient tracking" in verdict(experiment.claims(stopped, same))
    other = same | {experiment.DGD: 0.1}
    assert "The programs of listings" in verdict(experiment.claims(FINE, other))
