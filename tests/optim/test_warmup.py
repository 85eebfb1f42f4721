"""The learning rate that grows with the number of agents: its start and end, and the schedule after it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, ExponentialLR, LRScheduler, SequentialLR

import shoal

LR, STEPS, AFTER = 0.1, 5, 4
Schedule = Callable[[torch.optim.Optimizer], LRScheduler]


def sgd(lr: float | torch.Tensor = LR) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=lr)


def rates(optimizer: torch.optim.Optimizer, scheduler: LRScheduler, steps: int) -> list[float]:
    """Of each step."""
    results = []
    for _ in range(steps):
        results.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return results


def on_one_agent(function: Callable[[], Any]) -> Any:
    return shoal.Fleet(1).run(function)[0]


def ramp(factor: float, step: int) -> float:
    return LR * (1 + (factor - 1) * min(step, STEPS) / STEPS)


def test_the_rate_rises_linearly_to_the_number_of_agents_times_its_value() -> None:
    def run() -> list[float]:
        optimizer = sgd()
        return rates(optimizer, shoal.optim.Warmup(optimizer, STEPS), STEPS + 3)

    for each in shoal.Fleet(4).run(run):
        assert each == pytest.approx([ramp(4, step) for step in range(STEPS + 3)], rel=1e-12)


def test_a_factor_may_be_passed() -> None:
    optimizer = sgd()
    result = rates(optimizer, shoal.optim.Warmup(optimizer, STEPS, factor=math.sqrt(8)), STEPS + 1)
    assert result == pytest.approx([ramp(math.sqrt(8), step) for step in range(STEPS + 1)], rel=1e-12)


def test_one_agent_keeps_its_rate() -> None:
    def run() -> list[float]:
        optimizer = sgd()
        return rates(optimizer, shoal.optim.Warmup(optimizer, STEPS), STEPS + 2)

    assert on_one_agent(run) == [LR] * (STEPS + 2)


def followed_by_cosine(optimizer: torch.optim.Optimizer) -> LRScheduler:
    warmup = shoal.optim.Warmup(optimizer, STEPS, factor=4)
    return SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, AFTER)], milestones=[STEPS])


def with_decay(optimizer: torch.optim.Optimizer) -> LRScheduler:
    warmup = shoal.optim.Warmup(optimizer, STEPS, factor=4)
    return ChainedScheduler([warmup, ExponentialLR(optimizer, 0.9)])


def cosine_after_ramp(step: int) -> float:
    done = max(0, step - STEPS) / AFTER
    return ramp(4, step) * (1 + math.cos(math.pi * done)) / 2


both = pytest.mark.parametrize(
    ("schedule", "expected"),
    [(followed_by_cosine, cosine_after_ramp), (with_decay, lambda step: ramp(4, step) * 0.9**step)],
    ids=["sequential", "chained"],
)


@both
def test_the_wrapped_schedule_applies_to_the_raised_rate(schedule: Schedule, expected: Callable[[int], float]) -> None:
    optimizer = sgd()
    result = rates(optimizer, schedule(optimizer), STEPS + AFTER)
    assert result == pytest.approx([expected(step) for step in range(STEPS + AFTER)], rel=1e-12)


@both
@pytest.mark.parametrize("stop", [2, STEPS, STEPS + 2])
def test_warm_up_resumes_bit_for_bit(schedule: Schedule, expected: object, stop: int) -> None:
    optimizer = sgd()
    full = rates(optimizer, schedule(optimizer), STEPS + AFTER)
    optimizer = sgd()
    scheduler = schedule(optimizer)
    first = rates(optimizer, scheduler, stop)
    states = optimizer.state_dict(), scheduler.state_dict()
    optimizer = sgd()
    scheduler = schedule(optimizer)
    optimizer.load_state_dict(states[0])
    scheduler.load_state_dict(states[1])
    assert first + rates(optimizer, scheduler, STEPS + AFTER - stop) == full


def test_warm_up_works_on_a_decentralized_optimizer() -> None:
    def run() -> list[float]:
        shoal.set_topology(shoal.topology.RingGraph(4))
        model = torch.nn.Linear(2, 1)
        optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model)
        scheduler = shoal.optim.Warmup(optimizer, STEPS)
        results = []
        for _ in range(STEPS + 1):
            results.append(optimizer.param_groups[0]["lr"])
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
        return results

    for each in shoal.Fleet(4, timeout=20.0).run(run):
        assert each == pytest.approx([ramp(4, step) for step in range(STEPS + 1)], rel=1e-12)


def test_groups_that_share_a_tensor_as_their_rate_are_raised_once() -> None:
    shared = torch.tensor(LR, dtype=torch.float64)
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=shared)
    scheduler = shoal.optim.Warmup(optimizer, STEPS, factor=4)
    rates(optimizer, scheduler, STEPS)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([4 * LR] * 2, rel=1e-12)
    assert float(shared) == LR


@pytest.mark.parametrize(
    ("steps", "factor"), [(0, 2.0), (-1, 2.0), (5, 0.5), (5, math.nan)], ids=["0", "-1", "falling", "nan"]
)
def test_invalid_warm_ups_are_refused(steps: int, factor: float) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        shoal.optim.Warmup(sgd(), steps, factor)


def test_an_existing_scheduler_is_named_as_the_reason() -> None:
    optimizer = sgd()
    CosineAnnealingLR(optimizer, 10)
    with pytest.raises(ValueError, match="Make Warmup first"):
        shoal.optim.Warmup(optimizer, STEPS, factor=2)
    assert optimizer.param_groups[0]["lr"] == LR
