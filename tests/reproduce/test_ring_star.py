"""Ring-Star's figures and tables: the whole command, small, its recipe, and its verdict."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "reproduce"))

import ring_star as experiment
from _common import verdict

SEEDS = (0.0, 0.1, 0.2)


def around(value: float) -> list[float]:
    return [value + of_seed for of_seed in SEEDS]


def table(small: dict[str, float], large: dict[str, float]) -> dict[tuple[str, int], list[float]]:
    return {(name, 16): around(value) for name, value in small.items()} | {
        (name, 64): around(value) for name, value in large.items()
    }


RESNET_16 = dict(zip(experiment.METHODS, (91.98, 91.93, 91.68, 91.59, 90.76), strict=True))
RESNET_64 = dict(zip(experiment.METHODS, (90.90, 90.50, 89.44, 87.32, 81.32), strict=True))


@pytest.mark.slow
def test_the_command_ends_with_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert experiment.main(["--quick", "--seeds", "2", "--only", "figure1", "time"]) == 0
    printed = capsys.readouterr().out
    for title in ("Figure 1:", "Table 3, digits", "Figure 3:"):
        assert title in printed
    assert "[16 x 1] is Ring" in printed and re.search("agrees|differs in|not separated in", printed)


def test_the_papers_own_numbers_agree_and_others_are_reported() -> None:
    paper = table(RESNET_16, RESNET_64)
    assert verdict(experiment.table_claims("Table 3", paper, paper)).startswith("agrees: all 4 claims")
    far = table(RESNET_16, RESNET_64 | {experiment.RING_STAR: 89.0})
    assert "differs in 4 of 4 claims: Table 3: Ring-Star is at most 1 point below" in verdict(
        experiment.table_claims("Table 3", far, far)
    )
    same = table(RESNET_16, dict.fromkeys(experiment.METHODS, 90.9))
    assert verdict(experiment.table_claims("Table 3", paper, same)).startswith("differs in 1 of 4")


def test_a_figure_1_without_a_gain_is_reported() -> None:
    def row(name: str, group: int, age: float, cost: float, accuracy: float) -> experiment.Configuration:
        return experiment.Configuration(name, group, age, cost, cost, around(accuracy), around(accuracy))

    others = {
        experiment.ALLREDUCE: row("Allreduce", 1, 1.0, 9.0, 95.0),
        experiment.RING_RANDOM: row("RingRandom", 1, 6.0, 2.0, 93.0),
        experiment.RING: row("Ring", 1, 16.0, 2.0, 91.0),
    }
    stars = [
        row("[64 x 1]", 1, 16.0, 2.0, 91.0),
        row("[8 x 8]", 8, 2.0, 4.0, 94.0),
        row("[1 x 64]", 64, 1.0, 9.0, 95.0),
    ]
    assert verdict(experiment.figure_1_claims(stars, others)) == "agrees: all 7 claims hold"
    stars[1] = row("[8 x 8]", 8, 7.0, 4.0, 92.0)
    assert verdict(experiment.figure_1_claims(stars, others)).startswith(
        "differs in 2 of 7 claims: Figure 1: every Ring-Star has a lower age than RingRandom"
    )


def test_slow_sparse_topologies_contradict_figure_3() -> None:
    def trained(curve: list[float]) -> experiment.Trained:
        return experiment.Trained(curve[-1], curve[-1], [0.0, 10.0, 20.0], curve, 10)

    runs = {name: [trained([0.0, 90.0 + seed, 95.0 + seed]) for seed in SEEDS] for name in experiment.METHODS[:4]}
    cheap = dict.fromkeys(runs, 1.0) | {experiment.ALLREDUCE: 2.0}
    assert verdict(experiment.time_claims(runs, {"model": cheap})) == "agrees: all 3 claims hold"
    dear = dict.fromkeys(runs, 2.0) | {experiment.ALLREDUCE: 1.0, experiment.RING: 1.5}
    assert verdict(experiment.time_claims(runs, {"model": dear})).startswith("differs in 3 of 3")


def test_figure_2_compares_the_curves_of_the_two_largest_sizes() -> None:
    heights = dict(zip(experiment.METHODS, (80.0, 79.5, 70.0, 69.0, 20.0), strict=True))

    def runs(**changed: float) -> experiment.Runs:
        return {
            (name, workers): [
                experiment.Trained(90.0, 90.0, [0.0, 10.0], [value - 5 + seed, value + 5 + seed], 10) for seed in SEEDS
            ]
            for workers in (16, 32, 64)
            for name, value in (heights | (changed if workers == 64 else {})).items()
        }

    assert verdict(experiment.epoch_claims("digits", runs())) == "agrees: all 2 claims hold"
    slow = verdict(experiment.epoch_claims("digits", runs(Allreduce=80.6)))
    assert slow.startswith("differs in 1 of 2 claims: Figure 2, digits: the curve of Ring-Star")
    fast = verdict(experiment.epoch_claims("digits", runs(Ring=80.0)))
    assert fast.startswith("differs in 1 of 2 claims: Figure 2, digits: Ring-Star learns faster")


def test_the_learning_rate_warms_up_to_the_scaled_one_and_falls_twice() -> None:
    shards = experiment.Shards(experiment.digits(0, 41), 64, 0)
    last = shards.steps - 1
    assert shards.rate(0) == pytest.approx(0.1)
    assert shards.rate(last // 4) == pytest.approx(0.8)
    assert (shards.rate(last * 5 // 8), shards.rate(last)) == pytest.approx((0.08, 0.008))
    assert experiment.Shards(experiment.digits(0, 41), 64, 0, scaled=False).rate(last // 4) == pytest.approx(0.1)


def test_curves_reach_a_target_between_two_points() -> None:
    assert experiment.reached([0, 10, 20], [0.0, 50.0, 100.0], 75.0) == 15
    assert experiment.reached([0, 10, 20], [0.0, 50.0, 60.0], 75.0) == 40


def test_two_digit_images_are_two_digits_side_by_side() -> None:
    task = experiment.numbers(0, 1)
    (images, labels), (of_test, _) = task.train, task.test
    assert images.shape == (3200, 128) and of_test.shape == (500, 128) and set(labels.tolist()) == set(range(100))
    (digits, names), _ = experiment._digits(0)
    left = images[0].view(8, 16)[:, :8]
    which = [number for number, image in enumerate(digits) if torch.equal(image, left)]
    assert names[which[0]] == labels[0] // 10


def test_cifar_10_replaces_the_digits(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        batch = {b"data": chance.integers(256, size=(52, 3072), dtype=np.uint8), b"labels": [1] * 52}
        (tmp_path / name).write_bytes(pickle.dumps(batch))
    found = experiment.train(experiment.cifar10(str(tmp_path), 1), experiment.RING_STAR, 8, 0)
    assert found.steps_per_epoch == 1 and 0 <= found.own <= 100
