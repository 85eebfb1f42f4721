"""Several passes for an exchange: counted alike on all agents, however a script gets to its gradients."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shoal
from support.optimizers import LR, MODEL, SIZE, batch, flat

Fleets = Callable[..., shoal.Fleet]
Step = Callable[[torch.nn.Module, shoal.DecentralizedOptimizer, int], None]

ATC, AWC = (
    shoal.DecentralizedOptimizer,
    partial(shoal.DecentralizedOptimizer, algorithm=shoal.algorithms.GradientDescent(1.0, atc=False)),
)
GRADIENTS = shoal.bluefog.DistributedGradientAllreduceOptimizer


def loss_of(model: torch.nn.Module, step: int) -> Tensor:
    loss: Tensor = model(batch(shoal.rank(), step)).square().mean()
    return loss


def plain(model: torch.nn.Module, optimizer: shoal.DecentralizedOptimizer, step: int) -> None:
    loss_of(model, step).backward()
    optimizer.step()


def with_a_closure(model: torch.nn.Module, optimizer: shoal.DecentralizedOptimizer, step: int) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        return 0.0

    optimizer.step(closure)


def in_eval_mode(model: torch.nn.Module, optimizer: shoal.DecentralizedOptimizer, step: int) -> None:
    model.eval()
    plain(model, optimizer, step)


def past_the_root(model: torch.nn.Module, optimizer: shoal.DecentralizedOptimizer, step: int) -> None:
    x = batch(shoal.rank(), step)
    for layer in model.children():
        x = layer(x)
    x.square().mean().backward()
    optimizer.step()


def with_checkpointed_activations(model: torch.nn.Module, optimizer: shoal.DecentralizedOptimizer, step: int) -> None:
    x = batch(shoal.rank(), step).requires_grad_()
    checkpoint(model, x, use_reentrant=False).square().mean().backward()
    optimizer.step()


def with_more_forward_passes_on_one_agent(
    model: torch.nn.Module, optimizer: shoal.DecentralizedOptimizer, step: int
) -> None:
    loss = loss_of(model, step)
    if shoal.rank() == 0:
        loss_of(model, step + 1)
    loss.backward()
    optimizer.step()


HOW = [plain, with_a_closure, in_eval_mode, past_the_root, with_checkpointed_activations]
HOW += [with_more_forward_passes_on_one_agent]


@pytest.mark.parametrize("one_step", HOW)
@pytest.mark.parametrize("make", [ATC, AWC], ids=["atc", "awc"])
def test_every_second_step_is_followed_by_an_exchange(fleet: Fleets, make: Any, one_step: Step) -> None:
    def run() -> list[int]:
        shoal.set_topology(shoal.topology.RingGraph(2))
        model = deepcopy(MODEL)
        optimizer = make(torch.optim.SGD(model.parameters(), lr=LR), model, num_steps_per_communication=2)
        rounds = []
        for step in range(5):
            optimizer.zero_grad()
            one_step(model, optimizer, step)
            rounds.append(optimizer.rounds)
        optimizer.close()
        return rounds

    assert fleet(2).run(run) == [[0, 1, 1, 2, 2]] * 2


@pytest.mark.parametrize("make", [ATC, AWC], ids=["atc", "awc"])
def test_a_changed_interval_takes_effect_at_once(fleet: Fleets, make: Any) -> None:
    def run() -> list[int]:
        shoal.set_topology(shoal.topology.RingGraph(2))
        model = deepcopy(MODEL)
        optimizer = make(torch.optim.SGD(model.parameters(), lr=LR), model)
        rounds = []
        for step in range(6):
            if step == 2:
                optimizer.num_steps_per_communication = 2
            plain(model, optimizer, step)
            rounds.append(optimizer.rounds)
        return rounds

    assert fleet(2).run(run) == [[1, 2, 2, 3, 3, 4]] * 2


@pytest.mark.parametrize("overlap", [None, "backward"])
def test_gradients_are_averaged_also_in_a_step_with_fewer_passes(fleet: Fleets, overlap: str | None) -> None:
    """The last step of an epoch: three micro-batches, two for each step."""

    def run() -> Tensor:
        model = deepcopy(MODEL)
        sgd = torch.optim.SGD(model.parameters(), lr=LR)
        optimizer = GRADIENTS(sgd, model, num_steps_per_communication=2, overlap=overlap)
        for epoch in range(2):
            for passes in (2, 1):
                optimizer.zero_grad()
                for micro in range(passes):
                    loss_of(model, 10 * epoch + 2 * passes + micro).backward()
                optimizer.step()
        return flat(model)

    results = torch.stack(fleet(SIZE).run(run))
    assert (results == results[0]).all()
    assert not torch.equal(results[0], flat(MODEL))
