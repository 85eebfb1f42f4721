"""The mean over all agents in a compressor's messages, against a second implementation of its description."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.compression import QSGD, Cast, Compressor, Identity, MinMaxUInt8, RandomK, Sign, TopK
from shoal.compression.random_numbers import Redrawn
from shoal.ops.encoded import Rest, submit_encoded_mean
from shoal.runtime.agent import current
from support.fault_points import Point, arm, over_both
from support.optimizers import LR, MODEL, batch, flat
from support.survivors import CONTINUE
from support.world import World

Fleets = Callable[..., shoal.Fleet]
COMPRESSORS = [Identity(), Cast(torch.bfloat16), MinMaxUInt8(), QSGD(7), Sign(), TopK(0.1), RandomK(0.2)]


def numbers(rank: int, round_: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * round_ + rank)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def means(compressor: Compressor, count: int, dtype: torch.dtype, feedback: bool, rounds: int) -> list[Tensor]:
    rest, result = Rest() if feedback else None, []
    for round_ in range(rounds):
        x = numbers(shoal.rank(), round_, count, dtype)
        assert submit_encoded_mean(current(), x, compressor, "x", rest).wait() is x
        result.append(x)
    return result


def by_hand(
    compressor: Compressor, size: int, count: int, dtype: torch.dtype, feedback: bool, rounds: int
) -> list[Tensor]:
    seed = zlib.crc32(b"x")
    cut = [(count * part // size, count * (part + 1) // size) for part in range(size)]
    sent = [torch.zeros(count, dtype=dtype) for _ in range(size)]
    back = [torch.zeros(high - low, dtype=dtype) for low, high in cut]
    results = []
    for round_ in range(rounds):
        own = [numbers(rank, round_, count, dtype) + sent[rank] for rank in range(size)]
        reported = [
            torch.cat(
                [
                    compressor(own[rank][low:high], Redrawn(seed, round_ * (size + 1) + part, rank))
                    for part, (low, high) in enumerate(cut)
                ]
            )
            for rank in range(size)
        ]
        result = []
        for part, (low, high) in enumerate(cut):
            mean = torch.zeros(high - low, dtype=dtype)
            for rank in range(size):
                mean = mean + reported[rank][low:high]
            mean = mean / size + back[part]
            result.append(compressor(mean, Redrawn(seed, round_ * (size + 1) + size, part)))
            if feedback:
                back[part] = mean - result[-1]
        if feedback:
            sent = [own - remote for own, remote in zip(own, reported, strict=True)]
        results.append(torch.cat(result))
    return results


@pytest.mark.parametrize("feedback", [False, True], ids=["forgets", "feeds back"])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_the_encoded_mean_is_its_description_bit_for_bit(fleet: Fleets, compressor: Compressor, feedback: bool) -> None:
    for size, count, dtype in [
        (1, 7, torch.float32),
        (3, 1000, torch.float32),
        (4, 4097, torch.float64),
        (4, 3, torch.float32),
    ]:
        expected = by_hand(compressor, size, count, dtype, feedback, 3)
        for result in fleet(size).run(means, compressor, count, dtype, feedback, 3):
            assert all(torch.equal(one, other) for one, other in zip(result, expected, strict=True))


def test_error_feedback_makes_the_mean_of_many_rounds_exact() -> None:
    """The mean of many rounds of the same numbers is their mean, and without feedback it is not."""

    def agent(feedback: bool) -> float:
        rest, x = Rest() if feedback else None, numbers(shoal.rank(), 0, 500, torch.float64)
        total = torch.zeros_like(x)
        for _ in range(200):
            total += submit_encoded_mean(current(), x.clone(), TopK(0.1), "x", rest).wait()
        mean = shoal.allreduce(x)
        return float((total / 200 - mean).norm() / mean.norm())

    fleet = shoal.Fleet(3)
    assert max(fleet.run(agent, True)) < 0.2
    assert min(fleet.run(agent, False)) > 0.5


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ((torch.ones(100), QSGD(127)), (torch.ones(100), MinMaxUInt8()), r"QSGD.*MinMaxUInt8|MinMaxUInt8.*QSGD"),
        ((torch.ones(100), Sign()), (torch.ones(99), Sign()), "number of elements or dtype"),
        ((torch.ones(100), TopK(0.1)), (torch.ones(100).double(), TopK(0.1)), "number of elements or dtype"),
    ],
    ids=["compressor", "number", "dtype"],
)
def test_differences_are_a_mismatch_on_both_agents_and_the_next_call_works(one: Any, other: Any, message: str) -> None:
    def agent() -> None:
        x, compressor = other if shoal.rank() else one
        with pytest.raises(shoal.Mismatch, match=message):
            submit_encoded_mean(current(), x.clone(), compressor, "x").wait()
        assert submit_encoded_mean(current(), torch.ones(10), Identity(), "x").wait().tolist() == [1.0] * 10

    shoal.Fleet(2, timeout=20.0).run(agent)


def optimizer_of(model: torch.nn.Module, compressor: Compressor, **options: Any) -> shoal.DecentralizedOptimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    return shoal.bluefog.DistributedGradientAllreduceOptimizer(sgd, model, compression=compressor, **options)


def take_steps(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(shoal.rank(), step)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("overlap", [None, "backward"])
def test_a_resumed_optimizer_continues_from_its_saved_state(fleet: Fleets, overlap: Any) -> None:
    def uninterrupted() -> Tensor:
        model = deepcopy(MODEL)
        optimizer = optimizer_of(model, TopK(0.2), overlap=overlap)
        take_steps(model, optimizer, range(8))
        optimizer.close()
        return flat(model)

    def in_two() -> Tensor:
        model = deepcopy(MODEL)
        optimizer = optimizer_of(model, TopK(0.2), overlap=overlap, name="first")
        take_steps(model, optimizer, range(4))
        saved = deepcopy(optimizer.state_dict())
        assert saved["shoal"]["way"]["rests"]
        optimizer.close()
        optimizer = optimizer_of(model, TopK(0.2), overlap=overlap)
        optimizer.load_state_dict(saved)
        take_steps(model, optimizer, range(4, 8))
        optimizer.close()
        return flat(model)

    first, second = fleet(3).run(uninterrupted), fleet(3).run(in_two)
    assert all(torch.equal(one, first[0]) for one in (*first, *second))


def test_fine_and_unbiased_compressors_have_no_error_feedback() -> None:
    def agent(compressor: Compressor) -> bool:
        model = deepcopy(MODEL)
        optimizer = optimizer_of(model, compressor)
        take_steps(model, optimizer, range(1))
        feeds = "rests" in optimizer.state_dict()["shoal"]["way"]
        optimizer.close()
        return feeds

    fleet = shoal.Fleet(2)
    assert [fleet.run(agent, one)[0] for one in (MinMaxUInt8(), QSGD(7), Sign())] == [False, False, True]


def steps_of_survivors(victim: int) -> tuple[list[float], tuple[int, ...]]:
    if shoal.rank() == victim:
        arm(Point("received", 25))
    model = deepcopy(MODEL)
    optimizer = optimizer_of(model, TopK(0.2))
    take_steps(model, optimizer, range(30))
    optimizer.close()
    return flat(model).tolist(), shoal.alive()


@over_both
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_stay_equal(environment: dict[str, Any], victim: int) -> None:
    left = [rank for rank in range(4) if rank != victim]
    with World(4, environment=environment | CONTINUE) as world:
        outcomes = world.run(steps_of_survivors, victim)
    results = [outcomes[rank].value for rank in left]
    assert all(one == (results[0][0], tuple(left)) for one in results)
