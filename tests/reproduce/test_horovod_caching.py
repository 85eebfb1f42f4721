"""Horovod's cache and groups: the whole command, small, and its verdict."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "reproduce"))

import horovod_caching as experiment
from _common import verdict

SEEDS = (0.0, 0.001, 0.002)


def steps(
    seconds: float, busy: float, waiting: float, negotiations: float, sizes: list[float]
) -> dict[str, list[float]]:
    found = {"seconds": seconds, "all-reduce": busy, "waiting": waiting}
    return {name: [value + of_seed for of_seed in SEEDS] for name, value in found.items()} | {
        "rounds": [9.0] * 3,
        "negotiations": [negotiations] * 3,
        "messages": [9.0] * 3,
        "counts": [9.0, 12.0],
        "sizes": sizes,
    }


SINGLE = steps(0.4, 0.3, 0.05, 0.0, [8.0, 1e4, 1e6])
GROUPED = steps(0.3, 0.1, 0.1, 0.0, [4e6, 5e6, 6e6])
FINE = {("cache", groups): GROUPED for groups in experiment.GROUPS} | {
    ("cache", 0): SINGLE,
    ("no cache", 0): steps(0.4, 0.3, 0.05, 9.0, [8.0]),
}


@pytest.mark.slow
def test_the_command_ends_with_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert experiment.main(["--quick", "--seeds", "1", "--only", "steps"]) == 0
    printed = capsys.readouterr().out
    assert "0 negotiations in a later step with it" in printed
    assert "not separated in" in printed, "one seed separates nothing"


def test_a_coordinator_has_more_messages_than_the_cache() -> None:
    (coordinator, _), (cached, _) = (experiment.counted(3, kind) for kind in ("coordinator", "cached"))
    assert coordinator > cached > 0


def test_steps_that_differ_are_named() -> None:
    assert verdict(experiment.step_claims(FINE)) == "agrees: all 6 claims hold"
    slower = FINE | {("cache", groups): steps(0.5, 0.4, 0.01, 0.0, [4e6]) for groups in (5, 10)}
    assert verdict(experiment.step_claims(slower)).startswith("differs in 3 of 6 claims: Figure 8")
    asked = FINE | {("cache", 0): SINGLE | {"negotiations": [1.0] * 3}}
    assert verdict(experiment.step_claims(asked)).startswith("differs in 1 of 6 claims: Section 3.1")


def test_a_coordinator_with_another_scaling_is_reported() -> None:
    grows = {("coordinator", 2): [4.0, 4.1], ("coordinator", 8): [60.0, 61.0]}
    cached = {("cached", 2): [4.0, 4.1], ("cached", 8): [20.0, 21.0]}
    assert verdict(experiment.control_claims(grows | cached)) == "agrees: all 2 claims hold"
    scales = {("coordinator", 2): [4.0, 4.1], ("coordinator", 8): [12.0, 12.1]}
    assert verdict(experiment.control_claims(scales | cached)).startswith("differs in 2 of 2")


def test_the_model_follows_the_rounds_of_negotiation() -> None:
    few = experiment.summit_step(768, 102e6, 0.2, 1, "coordinator")
    many = experiment.summit_step(768, 102e6, 0.2, 200, "coordinator")
    assert many > few
    assert experiment.summit_step(768, 102e6, 0.2, 200, "cached") < many


def test_speedups_of_summit_are_compared_with_the_papers() -> None:
    def shares(cached: float) -> dict[str, dict[str, dict[int, float]]]:
        def ways(compute: float) -> dict[str, dict[int, float]]:
            alone = dict.fromkeys(experiment.SUMMIT, compute)
            slow = {size: compute * (1.0 if size < 384 else 2.0 if size < 6000 else 1.7) for size in alone}
            grouped = alone | {6000: compute * 1.7 / 1.97}
            return {"no cache": slow, "cache": dict.fromkeys(alone, compute * cached), "cache and groups": grouped}

        return {
            "ResNet-50": ways(experiment.RESNET_50.compute),
            "STEMDL": ways(experiment.STEMDL_SECONDS),
        }

    assert verdict(experiment.summit_claims(shares(1.0))) == "agrees: all 4 claims hold"
    assert verdict(experiment.summit_claims(shares(1.7))).startswith("differs in 2 of 4 claims: Figure 7")


def test_an_agents_order_is_nearly_the_reverse() -> None:
    order = experiment.order_of(160, random.Random(1))
    assert sorted(order) == list(range(160))
    assert order != list(reversed(range(160)))
    assert max(abs(place - (159 - number)) for place, number in enumerate(order)) <= experiment.DISORDER
