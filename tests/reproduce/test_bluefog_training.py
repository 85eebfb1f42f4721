"""Figure 13, tables II and III of the BlueFog paper: the whole command, small, and its verdict."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
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


@pytest.mark.slow
def test_the_command_ends_with_a_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "training.png"
    assert experiment.main(["--quick", "--seeds", "2", "--steps", "20", "--figure", str(picture)]) == 0
    stdout = capsys.readouterr().out
    assert all(way in stdout for way in experiment.WAYS) and "of 14 claims" in stdout
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_cifar10_is_read_from_the_given_folder(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        pixels = chance.integers(0, 256, (60, 3072), dtype=np.uint8)
        (tmp_path / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": [index % 10 for index in range(60)]}))
    task = experiment.cifar10(experiment.AGENTS, [0], 10.0, str(tmp_path))
    (curve,) = experiment.train(experiment.ATC, task, 0.1, experiment.PARTS)
    assert len(curve.accuracy) == experiment.PARTS and all(0 <= one <= 100 for one in curve.accuracy)


def test_agents_with_equal_starts_and_data_are_equal() -> None:
    """Parallel SGD and all forms of momentum are then the same steps, which shows that the rates mean the same."""
    task = experiment.digits(experiment.AGENTS, [0], 100.0)
    same = task.shards[0][0]
    task.shards[0] = [same] * experiment.AGENTS
    task._weights.fill_(1.0)
    one = task.gradient

    def gradient(x):
        result = one(x)
        return result[:, :1].expand_as(result)

    task.gradient = gradient
    losses = [experiment.train(way, task, 0.1, 10)[0].loss[-1] for way in (experiment.PARALLEL, *experiment.TABLE_3)]
    plain = [
        loss for way, loss in zip((experiment.PARALLEL, *experiment.TABLE_3), losses, strict=True) if "QG" not in way
    ]
    assert plain == pytest.approx([plain[0]] * len(plain), rel=1e-4)


def test_runs_that_train_together_equal_separate_runs() -> None:
    together = experiment.train(experiment.ATC, experiment.digits(experiment.AGENTS, [3, 4], 0.1), 0.2, 20)
    for seed, curve in zip((3, 4), together, strict=True):
        (alone,) = experiment.train(experiment.ATC, experiment.digits(experiment.AGENTS, [seed], 0.1), 0.2, 20)
        assert curve.loss == pytest.approx(alone.loss, rel=1e-4)


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
