"""The cost of training: agents are as far apart as predicted, and invalid arguments are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shoal.algorithms import Algorithm, ChocoSGD, GradientDescent, LocalSteps
from shoal.compression import QSGD, Compressor, MinMaxUInt8, RandomK, Shrunk, Sign, TopK, Zstd
from shoal.netmodel import Training
from shoal.netmodel.training import parse_compression, steps_apart
from shoal.sim import StackedFleet
from shoal.topology import Idle, RingStarDelegates, Schedule, Static, find

LR, COLUMNS = 1e-3, 100


def apart_in_training(schedule: Schedule, algorithm: Algorithm, steps: int = 1500) -> float:
    """Of agents that each are drawn to a point of their own: where they take gradients, in steps of that."""
    points = torch.randn(schedule.size, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    points -= points.mean(0)
    squares: list[float] = []

    def gradient(x: torch.Tensor) -> torch.Tensor:
        squares.append(float((x - x.mean(0)).square().sum() / points.square().sum()))
        return x - points

    StackedFleet(schedule).run(algorithm, torch.zeros(COLUMNS, dtype=torch.float64), gradient, steps)
    return math.sqrt(float(np.mean(squares[len(squares) // 2 :]))) / LR


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("ring", 8),
        ("one-peer-exponential", 16),
        ("random-matchings", 10),
        ("ceca", 6),
        ("ceca-pairs", 12),
        ("base-3", 25),
    ],
)
def test_the_distance_between_agents_in_training_is_as_predicted(name: str, size: int, every: int) -> None:
    schedule = find(name).schedule(size)
    algorithm: Algorithm = GradientDescent(LR) if every == 1 else LocalSteps(GradientDescent(LR), every)
    assert steps_apart(schedule, every) == pytest.approx(apart_in_training(schedule, algorithm), rel=0.06)


@pytest.mark.parametrize("compressor", [TopK(0.2), RandomK(0.2), Sign(), Shrunk(QSGD(7))], ids=repr)
def test_compressed_messages_give_the_predicted_distance_between_agents(compressor: Compressor) -> None:
    torus, kept = find("torus").schedule(16), Training(compression=compressor).kept
    result = apart_in_training(torus, ChocoSGD(LR, kept, compressor))
    assert steps_apart(torus, kept=kept) == pytest.approx(result, rel=0.06)
    assert result > 1.2 * steps_apart(torus)


def test_a_global_average_leaves_only_the_distance_of_local_steps() -> None:
    assert steps_apart(None) == 0.0
    assert steps_apart(None, 3) == pytest.approx(math.sqrt((0 + 1 + 4) / 3))
    assert steps_apart(find("all-reduce").schedule(8), 3) == pytest.approx(steps_apart(None, 3), rel=1e-6)


@pytest.mark.parametrize("size", [8, 600])
def test_larger_rings_are_further_apart(size: int) -> None:
    ring, twice = (find("ring").schedule(count) for count in (size, 2 * size))
    assert steps_apart(twice) > steps_apart(ring) > steps_apart(find("exponential").schedule(size))


def test_without_exchanges_the_distance_grows_with_the_simulated_steps() -> None:
    assert 100 < steps_apart(Idle(4)) < 600


@pytest.mark.parametrize(
    ("compressor", "kept"),
    [
        (Zstd(TopK(0.1)), 0.1),
        (TopK(1e-4), 1e-4),
        (RandomK(1e-3), 1e-3),
        (RandomK(1e-4), 1e-4),
        (Zstd(RandomK(1e-4)), 1e-4),
    ],
    ids=str,
)
def test_a_share_of_the_numbers_keeps_that_share(compressor: Compressor, kept: float) -> None:
    assert Training(compression=compressor).kept == pytest.approx(kept, rel=0.01)


def test_local_steps_share_a_round() -> None:
    assert Training(local_steps=4, compute=0.5).seconds_per_step(2.0) == 1.0
    assert Training().seconds_per_step(2.0) == 2.0


def test_a_message_has_the_bytes_of_its_compressor() -> None:
    numbers = 1000
    for compressor in (TopK(0.01), Sign(), QSGD(7), MinMaxUInt8()):
        output = Training(compression=compressor).message(4.0 * numbers, "neighbor_allreduce")
        assert output == compressor.nbytes(numbers, torch.float32) < 4 * numbers
    assert Training(compression=0.25).message(4000.0, "allreduce") == 1000.0
    assert Training(compression=Sign()).message(4000.0, "allreduce") == 4000.0  # which nothing compresses


def test_heterogeneous_data_take_more_steps() -> None:
    assert Training(difference=0.0).times_the_steps(5.0) == 1.0
    assert Training(difference=0.5, accuracy=1.0).times_the_steps(4.0) == pytest.approx(math.sqrt(1 + 2**2))


def test_equal_differences_are_larger_relative_to_a_smaller_mean_gradient() -> None:
    """At a tenth of the mean gradient, differences of half its initial length are five times its length."""
    assert Training(difference=0.5, accuracy=0.1).times_the_steps(4.0) == pytest.approx(math.hypot(1, 20))
    assert Training(difference=0.5).times_the_steps(4.0) == pytest.approx(math.hypot(1, 20))


def test_settings_that_an_algorithm_refuses_are_refused_with_its_message() -> None:
    assert "doubly stochastic" in Training().refuses(RingStarDelegates(8, 4))
    assert "connected" in Training().refuses(Idle(4))
    assert Training().refuses(find("one-peer-exponential").schedule(8)) == ""
    compressed = Training(compression=Sign())
    assert "ChocoSGD needs W to be s" in compressed.refuses(find("one-peer-exponential").schedule(8))
    assert compressed.refuses(Static(np.full((4, 4), 0.25))) == ""


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"difference": -1.0}, "difference is -1.0. Pass a number, zero or more"),
        ({"difference": math.nan}, "difference is nan"),
        ({"compute": math.inf}, "compute is inf. Pass seconds"),
        ({"local_steps": 0}, "local_steps is 0. Pass a number of steps, at least 1"),
        ({"local_steps": 1.5}, "local_steps is 1.5"),
        ({"accuracy": 0.0}, "accuracy is 0.0. Pass the share of the mean gradient that is left"),
        ({"accuracy": 1.5}, "accuracy is 1.5"),
        ({"accuracy": math.nan}, "accuracy is nan"),
        ({"compression": 0.0}, "compression is 0.0. Pass the share of the bytes, above 0 and at most 1"),
        ({"compression": 2}, "compression is 2"),
        ({"compression": math.nan}, "compression is nan"),
        ({"compression": QSGD(1)}, "is no contraction"),
        ({"compression": RandomK(0.1, scaled=True)}, "is no contraction"),
    ],
)
def test_invalid_training_settings_are_refused(wrong: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Training(**wrong)  # type: ignore[arg-type]


def test_a_compressor_of_another_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="a share of the bytes, or a compressor"):
        Training(compression="sign")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("0.5", 0.5),
        ("topk:0.01", TopK(0.01)),
        ("RandomK:.1", RandomK(0.1)),
        ("qsgd:7", QSGD(7)),
        ("sign", Sign()),
        ("uint8", MinMaxUInt8()),
    ],
)
def test_compression_is_parsed_from_its_text(text: str, meant: object) -> None:
    assert parse_compression(text) == meant


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("zip", "'zip' is no share of the bytes and no compressor. Write 0.5"),
        ("", "'' is no share"),
        ("topk", "topk takes a number"),
        ("sign:3", "sign takes no number"),
        ("topk:2", "above 0 and at most 1"),
        ("topk:", "could not convert"),
        ("qsgd:0.5", "invalid literal"),
    ],
)
def test_unknown_compression_is_refused(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse_compression(text)
