"""Recipes of deep learning in a stacked fleet, each against plain training of every agent by ``torch.optim.SGD``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import networkx as nx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.algorithms import Gradient, GradientDescent, Momentum, Run
from shoal.algorithms.runs.gradients import Augment
from shoal.sim import StackedFleet, StackedModel, flipped_and_shifted

PARTS = [torch.arange(0, 26), torch.arange(26, 40), torch.arange(40, 60).flip(0)]
SIZE, BATCH, STEPS, LR = len(PARTS), 5, 17, 0.1
ALONE = nx.from_edgelist([(rank, rank) for rank in range(SIZE)], nx.DiGraph)
"""No agent receives from another, so each trains as if it were the only one."""
Batch = tuple[torch.Tensor, torch.Tensor]


def data(dtype: torch.dtype) -> Batch:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(60, 2, 6, 6, dtype=dtype, generator=draw), torch.randint(4, (60,), generator=draw)


def network(dtype: torch.dtype, norm: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4) if norm else nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, 4)).to(dtype)


def schedule(step: int) -> float:
    """A warm-up, and two falls."""
    return (step + 1) / 4 if step < 4 else 1.0 if step < 9 else 0.1 if step < 14 else 0.01


def stacked(
    model: StackedModel, dtype: torch.dtype, *, augment: Augment | None, decay: float, vectorize: bool
) -> tuple[Run, list[list[Batch]]]:
    """A run of agents that do not communicate, and the batches that each agent took."""
    inputs, targets = data(dtype)
    gradient = model.gradient(
        F.cross_entropy, inputs, targets, PARTS, BATCH, augment=augment, weight_decay=decay, vectorize=vectorize
    )
    batches: list[list[Batch]] = [[] for _ in range(SIZE)]

    def watched(x: torch.Tensor) -> torch.Tensor:
        result = gradient.again(x)
        assert gradient._sample is not None
        for rank, taken in enumerate(batches):
            taken.append((gradient._sample[0][rank].clone(), gradient._sample[1][rank].clone()))
        return result

    algorithm = Momentum(GradientDescent(LR), 0.9)
    run = StackedFleet(ALONE, seed=2).run(
        algorithm,
        model.start,
        Gradient(watched, draw=gradient.draw),
        STEPS,
        lr_lambda=schedule,
        every=0,
        unchecked=("connected", "differences die out"),
    )
    return run, batches


def train_plain_torch(module: nn.Module, batches: list[Batch], decay: float) -> nn.Module:
    """Plain PyTorch: no line of Shoal."""
    module = copy.deepcopy(module)
    sgd = torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9, weight_decay=decay)
    rates = torch.optim.lr_scheduler.LambdaLR(sgd, schedule)
    for inputs, targets in batches:
        sgd.zero_grad()
        F.cross_entropy(module(inputs), targets).backward()
        sgd.step()
        rates.step()
    return module


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("augment", [None, flipped_and_shifted(1)], ids=["plain", "augmented"])
@pytest.mark.parametrize("decay", [0.0, 1e-2])
def test_each_agent_trains_as_in_torch(decay: float, augment: Augment | None, norm: bool, vectorize: bool) -> None:
    """Schedule, momentum, weight decay, augmentation, batch norm.

    Torch fuses lr * m into the sum and Shoal rounds it first, so the two differ in the last digits.
    """
    module = network(torch.float64, norm)
    model = StackedModel(module, SIZE)
    run, batches = stacked(model, torch.float64, augment=augment, decay=decay, vectorize=vectorize)
    for rank in range(SIZE):
        expected = train_plain_torch(module, batches[rank], decay).state_dict()
        result = model.module(run.x[rank], rank).state_dict()
        assert expected.keys() == result.keys()
        for name, value in expected.items():
            assert (result[name] - value).abs().max() < 1e-11, (rank, name)
    if norm:
        assert model.statistics["1.num_batches_tracked"].tolist() == [STEPS] * SIZE


def test_gradients_computed_agent_by_agent_have_the_bits_of_torch() -> None:
    module = network(torch.float32, norm=True)
    model, (inputs, targets) = StackedModel(module, SIZE), data(torch.float32)
    gradient = model.gradient(F.cross_entropy, inputs, targets, PARTS, BATCH, weight_decay=1e-2)
    run = StackedFleet(ALONE).run(
        GradientDescent(0.0), model.start, gradient, 1, unchecked=("connected", "differences die out")
    )
    result = gradient.again(run.x)
    assert gradient._sample is not None
    for rank in range(SIZE):
        alone = copy.deepcopy(module)
        F.cross_entropy(alone(gradient._sample[0][rank]), gradient._sample[1][rank]).backward()
        expected = torch.cat([(parameter.grad + 1e-2 * parameter).flatten() for parameter in alone.parameters()])  # type: ignore[operator]
        # The sum with the decay is one operation here, and two above.
        assert (result[rank] - expected).abs().max() < 1e-8
    bare = model.gradient(F.cross_entropy, inputs, targets, PARTS, BATCH)
    run = StackedFleet(ALONE).run(
        GradientDescent(0.0), model.start, bare, 1, unchecked=("connected", "differences die out")
    )
    result = bare.again(run.x)
    assert bare._sample is not None
    for rank in range(SIZE):
        alone = copy.deepcopy(module)
        F.cross_entropy(alone(bare._sample[0][rank]), bare._sample[1][rank]).backward()
        assert torch.equal(result[rank], torch.cat([parameter.grad.flatten() for parameter in alone.parameters()]))  # type: ignore[union-attr]


def test_each_agent_iterates_over_its_own_shard_of_any_length() -> None:
    model = StackedModel(nn.Sequential(nn.Flatten(), nn.Linear(72, 4)), SIZE)
    numbers = torch.arange(60.0).view(60, 1, 1, 1).expand(60, 2, 6, 6)
    gradient = model.gradient(F.cross_entropy, numbers, torch.zeros(60, dtype=torch.int64), PARTS, BATCH)
    assert gradient.epoch_steps.tolist() == [5, 2, 4]
    seen: list[torch.Tensor] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        assert gradient._sample is not None
        seen.append(gradient._sample[0][:, :, 0, 0, 0].long())
        return torch.zeros_like(x)

    StackedFleet(ALONE).run(
        GradientDescent(0.0),
        model.start,
        Gradient(watched, draw=gradient.draw),
        20,
        every=0,
        unchecked=("connected", "differences die out"),
    )
    for rank, (part, steps) in enumerate(zip(PARTS, gradient.epoch_steps.tolist(), strict=True)):
        for begin in range(0, 20, steps):
            taken = torch.cat([batch[rank] for batch in seen[begin : begin + steps]]).tolist()
            assert len(set(taken)) == len(taken)
            assert set(taken) <= set(part.tolist())


def test_decay_by_name_excludes_biases() -> None:
    model, (inputs, targets) = StackedModel(network(torch.float64, norm=False), SIZE), data(torch.float64)

    def full(decay: float | Callable[[str], float]) -> torch.Tensor:
        made = model.gradient(F.cross_entropy, inputs, targets, PARTS, BATCH, weight_decay=decay)
        return made.full(model.start)

    plain, named = full(0.0), full(lambda name: 0.5 if name.endswith("weight") else 0.0)
    decayed = model.module((named - plain)[1])
    for (name, result), one in zip(decayed.named_parameters(), model.module(model.start[1]).parameters(), strict=True):
        expected = 0.5 * one if name.endswith("weight") else 0 * one
        assert (result - expected).abs().max() < 1e-12


def test_the_mean_model_has_the_mean_statistics_and_outputs_are_those_of_eval() -> None:
    module = network(torch.float64, norm=True)
    model, (inputs, _) = StackedModel(module, SIZE), data(torch.float64)
    run, _ = stacked(model, torch.float64, augment=None, decay=0.0, vectorize=False)
    for rank, outputs in enumerate(model.outputs(run.x, inputs.expand(SIZE, *inputs.shape))):
        assert (outputs - model.module(run.x[rank], rank).eval()(inputs)).abs().max() < 1e-12
    mean = model.module(run.x.mean(0))
    torch.testing.assert_close(mean.get_buffer("1.running_var"), model.statistics["1.running_var"].mean(0))
    result = model.outputs(run.x.mean(0, keepdim=True), inputs.unsqueeze(0))
    assert (result[0] - mean.eval()(inputs)).abs().max() < 1e-12
    with pytest.raises(ValueError, match="2 rows of parameters"):
        model.outputs(run.x[:2], inputs.expand(2, *inputs.shape))


def test_a_new_run_starts_with_the_modules_statistics() -> None:
    model = StackedModel(network(torch.float64, norm=True), SIZE)
    first = stacked(model, torch.float64, augment=None, decay=0.0, vectorize=False)[0]
    after = {name: one.clone() for name, one in model.statistics.items()}
    again = stacked(model, torch.float64, augment=None, decay=0.0, vectorize=False)[0]
    assert torch.equal(first.x, again.x)
    assert all(torch.equal(one, model.statistics[name]) for name, one in after.items())


def test_records_and_full_gradients_do_not_change_the_statistics() -> None:
    model, (inputs, targets) = StackedModel(network(torch.float64, norm=True), SIZE), data(torch.float64)
    gradient = model.gradient(F.cross_entropy, inputs, targets, PARTS, BATCH)
    StackedFleet(ALONE).run(
        GradientDescent(0.1), model.start, gradient, 2, every=1, unchecked=("connected", "differences die out")
    )
    before = model.statistics["1.running_mean"].clone()
    gradient.full(model.start)
    assert gradient.loss(model.start) is not None
    assert torch.equal(before, model.statistics["1.running_mean"])
    assert model.statistics["1.num_batches_tracked"].tolist() == [2] * SIZE


def test_resnet20_trains_as_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its batch norm, on noise: two steps are those of torch. Float32, and 20 layers multiply its rounding."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from _models import resnet20

    module, parts = resnet20().make(), [torch.arange(6), torch.arange(6, 12)]
    inputs, targets = resnet20().batch(12, 0)
    model = StackedModel(module, 2)
    gradient = model.gradient(
        F.cross_entropy, inputs, targets, parts, 3, augment=flipped_and_shifted(), weight_decay=1e-4
    )
    graph = nx.from_edgelist([(0, 0), (1, 1)], nx.DiGraph)
    batches: list[Batch] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        results = gradient.again(x)
        assert gradient._sample is not None
        batches.append((gradient._sample[0][1].clone(), gradient._sample[1][1].clone()))
        return results

    run = StackedFleet(graph).run(
        Momentum(GradientDescent(LR), 0.9),
        model.start,
        Gradient(watched, draw=gradient.draw),
        2,
        lr_lambda=schedule,
        every=0,
        unchecked=("connected", "differences die out"),
    )
    expected = train_plain_torch(module, batches, 1e-4).state_dict()
    result = model.module(run.x[1], 1).state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-5)


def test_inconsistent_parts_are_refused() -> None:
    model, (inputs, targets) = StackedModel(network(torch.float64, norm=False), SIZE), data(torch.float64)
    with pytest.raises(ValueError, match="2 parts for 3 agents"):
        model.gradient(F.cross_entropy, inputs, targets, PARTS[:2], BATCH)
    with pytest.raises(ValueError, match="the smallest part has 14"):
        model.gradient(F.cross_entropy, inputs, targets, PARTS, 15)
    with pytest.raises(ValueError, match="no batch has been drawn"):
        model.gradient(F.cross_entropy, inputs, targets, PARTS, BATCH)(model.start)
