"""Figure 11 of the BlueFog paper: its model, and its verdict. The measurement is that of ``shoal bench --scaling``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "reproduce"))

import bluefog_microbenchmark as experiment
from _common import verdict

TIMES = {way: [0.001, 0.0011, 0.0009] for way in experiment.NAMES}
MEASURED = {
    2: TIMES | {experiment.ALLREDUCE: [0.002, 0.0021, 0.0019]},
    4: TIMES | {experiment.ALLREDUCE: [0.008, 0.0081, 0.0079]},
}
MODELLED = {
    8: dict.fromkeys(experiment.NAMES, 0.001) | {experiment.ALLREDUCE: 0.002},
    16: dict.fromkeys(experiment.NAMES, 0.01) | {experiment.ALLREDUCE: 0.02},
    32: dict.fromkeys(experiment.NAMES, 0.01) | {experiment.ALLREDUCE: 0.03},
}


def test_the_command_ends_with_a_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(experiment, "measure", lambda agents, quick, report: MEASURED)
    assert experiment.main(["--quick"]) == 0
    told = capsys.readouterr().out
    assert "claims" in told and "figure 11" in told


def test_the_model_prefers_neighbors_and_shows_the_second_machine() -> None:
    modelled = experiment.model([8, 16])
    for way in (experiment.RING, experiment.DYNAMIC):
        assert modelled[16][way] < modelled[16][experiment.ALLREDUCE]
        assert modelled[16][way] > 2 * modelled[8][way]


def test_results_that_differ_are_named() -> None:
    assert verdict(experiment.claims(MEASURED, MODELLED)).startswith("agrees: all 9 claims")
    slow = MEASURED | {4: MEASURED[4] | {experiment.RING: [0.02, 0.021, 0.019]}}
    assert "neighbor_allreduce (ring) is faster than allreduce on CPUs (4 agents" in verdict(
        experiment.claims(slow, MODELLED)
    )
    flat = MODELLED | {16: MODELLED[8], 32: MODELLED[8]}
    told = verdict(experiment.claims(MEASURED, flat))
    assert told.startswith("differs in 2 of 9") and "slows down much" in told and "grows more with the number" in told
