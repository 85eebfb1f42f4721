"""DiLoCo and SlowMo around torch's optimizers: the papers' loops, written out with the same optimizers."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.algorithms import Algorithm, DiLoCo, GradientDescent, SlowMo
from support.optimizers import MODEL, SIZE, batch, flat

Fleets = Callable[..., shoal.Fleet]
EVERY, ROUNDS = 3, 4
OF_ALL: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


def schedule(step: int) -> float:
    """The learning rate falls, and stays the same within a round."""
    return 1 / (1 + step // EVERY)


def one_step(model: torch.nn.Module, optimizer: Any, rates: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    model(batch(rank, step)).square().mean().backward()
    optimizer.step()
    rates.step()


def train(algorithm: Algorithm, per_exchange: int, steps: int = EVERY * ROUNDS) -> Tensor:
    model = deepcopy(MODEL)
    adam = torch.optim.AdamW(model.parameters(), **OF_ALL)
    optimizer = shoal.DecentralizedOptimizer(
        adam, model, algorithm, topology=shoal.topology.RingGraph(SIZE), num_steps_per_communication=per_exchange
    )
    rates = torch.optim.lr_scheduler.LambdaLR(adam, schedule)
    for step in range(steps):
        one_step(model, optimizer, rates, shoal.rank(), step)
    return flat(model)


def by_hand(outer_step: Callable[[torch.nn.Parameter, float], None], weights: torch.nn.Parameter) -> Tensor:
    """All agents' steps with an AdamW of their own, and an outer step for each round."""
    models = [deepcopy(MODEL) for _ in range(SIZE)]
    inner = [torch.optim.AdamW(model.parameters(), **OF_ALL) for model in models]
    rates = [torch.optim.lr_scheduler.LambdaLR(one, schedule) for one in inner]
    for round_ in range(ROUNDS):
        for step in range(round_ * EVERY, (round_ + 1) * EVERY):
            for rank, model in enumerate(models):
                one_step(model, inner[rank], rates[rank], rank, step)
        mean = torch.stack([flat(model) for model in models]).mean(0)
        weights.grad = weights.detach() - mean
        outer_step(weights, schedule(round_ * EVERY))
        for model in models:
            torch.nn.utils.vector_to_parameters(weights.detach().clone(), model.parameters())
    return weights.detach()


@pytest.mark.parametrize("in_the_algorithm", [True, False])
def test_diloco_is_adamw_inside_and_nesterov_outside(fleet: Fleets, in_the_algorithm: bool) -> None:
    every, per_exchange = (EVERY, 1) if in_the_algorithm else (1, EVERY)
    results = torch.stack(fleet(SIZE).run(train, DiLoCo(GradientDescent(1.0), every), per_exchange))
    weights = torch.nn.Parameter(flat(MODEL))
    nesterov = torch.optim.SGD([weights], lr=0.7, momentum=0.9, nesterov=True)
    expected = by_hand(lambda weights, rate: nesterov.step(), weights)
    assert (expected - flat(MODEL)).abs().max() > 0.01
    assert (results - expected).abs().max() < 1e-12


@pytest.mark.parametrize("in_the_algorithm", [True, False])
def test_slow_momentum_is_scaled_by_the_current_learning_rate(fleet: Fleets, in_the_algorithm: bool) -> None:
    every, per_exchange = (EVERY, 1) if in_the_algorithm else (1, EVERY)
    results = torch.stack(fleet(SIZE).run(train, SlowMo(GradientDescent(1.0), every, 0.7), per_exchange))
    memory = torch.zeros_like(flat(MODEL))

    def outer_step(weights: torch.nn.Parameter, rate: float) -> None:
        assert weights.grad is not None
        memory.mul_(0.7).add_(weights.grad / rate)
        with torch.no_grad():
            weights -= rate * memory

    assert (results - by_hand(outer_step, torch.nn.Parameter(flat(MODEL)))).abs().max() < 1e-12
