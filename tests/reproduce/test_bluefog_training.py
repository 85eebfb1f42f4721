"""Figure 13, tables II and III of the BlueFog paper: the whole command, small, and its verdict."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "reproduce"))

import bluefog_training as experiment
from _common import verdict

FINE = {way: [97.0, 97.1, 97.2] for way in experiment.WAYS} | {
    experiment.H_ATC: [97.1, 97.2, 97.3],
    experiment.H_AWC: [97.1, 97.2, 97.3],
    experiment.ATC: [96.5, 96.6, 96.7],
    experiment.AWC: [96.0, 96.1, 96.2],
}
SECONDS = {way: 1.0 if way.endswith(experiment.STATIC) else 0.9 for way in experiment.WAYS} | {experiment.PARALLEL: 1.2}


def test_the_command_ends_with_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few = {name: experiment.WAYS[name] for name in (experiment.PARALLEL, experiment.ATC)}
    monkeypatch.setattr(experiment, "best_rate", lambda way, task, steps: pytest.fail("a quick run has one rate"))
    picture = tmp_path / "training.png"
    assert experiment.main(["--quick", "--seeds", "2", "--steps", "20", "--figure", str(picture)]) == 0
    told = capsys.readouterr().out
    assert all(way in told for way in few) and "of 14 claims" in told
    assert picture.stat().st_size > 10_000


def test_agents_that_begin_alike_with_equal_data_differ_in_no_way() -> None:
    """Parallel SGD and all forms of momentum are then the same steps, which shows that the rates mean the same."""
    task = experiment.digits(experiment.AGENTS, [0], 100.0)
    same = task.shards[0][0]
    task.shards[0] = [same] * experiment.AGENTS
    task._weights.fill_(1.0)
    one = task.gradient

    def gradient(x):
        found = one(x)
        return found[:, :1].expand_as(found)

    task.gradient = gradient
    losses = [experiment.train(way, task, 0.1, 10).loss[-1] for way in (experiment.PARALLEL, *experiment.TABLE_3)]
    plain = [
        loss for way, loss in zip((experiment.PARALLEL, *experiment.TABLE_3), losses, strict=True) if "QG" not in way
    ]
    assert plain == pytest.approx([plain[0]] * len(plain), rel=1e-4)


def test_results_that_differ_are_named() -> None:
    def told(seconds: dict[str, float] = SECONDS, **changed: list[float]) -> str:
        return verdict(experiment.claims(FINE | changed, seconds))

    assert told() == "agrees: all 14 claims hold"
    way = experiment.VANILLA + experiment.DYNAMIC
    assert told(**{way: [90.0, 90.1, 90.2]}).startswith("differs in 2 of 14 claims: vanilla DmSGD, dynamic ends as")
    assert "H-ATC is more accurate than ATC" in told(**{experiment.ATC: [97.2, 97.2, 97.2]})
    assert "ATC is more accurate than AWC" in told(**{experiment.AWC: [96.6, 96.6, 96.6]})
    equal = dict.fromkeys(experiment.WAYS, 1.0)
    assert told(equal).startswith("differs in 2 of 14 claims: The dynamic graph takes less time")
