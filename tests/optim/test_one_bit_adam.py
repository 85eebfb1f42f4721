"""Adam with compressed messages: torch's Adam during the warm-up, then a second implementation of its description."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.compression import Cast, Compressor, Identity, MinMaxUInt8, Sign
from support.optimizers import MODEL, batch, flat, gradient

Fleets = Callable[..., shoal.Fleet]
AGENTS, WARMUP, STEPS, LR, BETAS = 3, 4, 10, 0.01, (0.9, 0.99)


def train(compression: Compressor | None, batches: int = STEPS, **options: Any) -> Tensor:
    model = deepcopy(MODEL)
    adam = shoal.optim.OneBitAdam(model.parameters(), LR, warmup=WARMUP, betas=BETAS, **options)
    optimizer = shoal.bluefog.DistributedGradientAllreduceOptimizer(adam, model, compression=compression)
    train_steps(model, optimizer, range(batches))
    return flat(model)


def train_steps(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(shoal.rank(), step)).square().mean().backward()
        optimizer.step()


def mean_of(messages: list[Tensor], compressor: Compressor, sent: list[Tensor], back: list[Tensor]) -> Tensor:
    """A compressed reduce-scatter and all-gather of one bucket, which is laid out from the last parameter on."""
    size, count = len(messages), messages[0].numel()
    results = []
    feedback = not isinstance(compressor, MinMaxUInt8)  # whose messages are fine enough
    if feedback:
        messages = [own + rest for own, rest in zip(messages, sent, strict=True)]
    for part in range(size):
        where = slice(count * part // size, count * (part + 1) // size)
        reported = [compressor(own[where], None) for own in messages]  # type: ignore[arg-type]
        for rank, one in enumerate(reported):
            sent[rank][where] = messages[rank][where] - one
        total = sum(reported[1:], reported[0].clone()) / size + (back[part] if feedback else 0)
        output = compressor(total, None)  # type: ignore[arg-type]
        back[part] = total - output
        results.append(output)
    return torch.cat(results)


def by_hand(compressor: Compressor) -> Tensor:
    model = deepcopy(MODEL)
    sizes = [parameter.numel() for parameter in model.parameters()]

    def turned(x: Tensor, lengths: list[int]) -> Tensor:
        return torch.cat(x.split(lengths)[::-1])

    x = flat(model)
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    sent = [torch.zeros_like(x) for _ in range(AGENTS)]
    back: list[Tensor] = [torch.zeros((), dtype=x.dtype) for _ in range(AGENTS)]
    for t in range(1, STEPS + 1):
        each = [gradient(model, x, rank, t - 1) for rank in range(AGENTS)]
        if t <= WARMUP:
            g = sum(each[1:], each[0]) / AGENTS
            m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
        else:
            momenta = [turned(BETAS[0] * m + (1 - BETAS[0]) * g, sizes) for g in each]
            m = turned(mean_of(momenta, compressor, sent, back), sizes[::-1])
        second = v / (1 - BETAS[1] ** min(t, WARMUP))
        x = x - LR * m / (1 - BETAS[0] ** t) / (second.sqrt() + 1e-8)
    return x


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_warm_up_is_adam(weight_decay: float) -> None:
    models = [deepcopy(MODEL) for _ in range(2)]
    ours = shoal.optim.OneBitAdam(models[0].parameters(), LR, warmup=STEPS, betas=BETAS, weight_decay=weight_decay)
    remote = torch.optim.Adam(models[1].parameters(), LR, betas=BETAS, weight_decay=weight_decay)
    for step in range(STEPS):
        for model, optimizer in zip(models, (ours, remote), strict=True):
            optimizer.zero_grad()
            model(batch(0, step)).square().mean().backward()
            optimizer.step()
    assert torch.equal(flat(models[0]), flat(models[1]))


@pytest.mark.parametrize("compressor", [Identity(), MinMaxUInt8(), Sign()], ids=str)
def test_after_the_warm_up_momenta_are_averaged_as_described(fleet: Fleets, compressor: Compressor) -> None:
    results = fleet(AGENTS).run(train, compressor)
    for one in results:
        assert torch.equal(one, results[0])
    assert (results[0] - by_hand(compressor)).abs().max() < 1e-12


def test_without_compression_messages_have_the_full_size(fleet: Fleets) -> None:
    results = fleet(AGENTS).run(train, None)
    assert (results[0] - by_hand(Identity())).abs().max() < 1e-12


def test_after_the_warm_up_messages_are_short() -> None:
    def run() -> list[int]:
        model = nn.Linear(300, 100)
        shoal.broadcast_parameters(model.state_dict(), 0)
        adam = shoal.optim.OneBitAdam(model.parameters(), LR, warmup=2)
        optimizer = shoal.bluefog.DistributedGradientAllreduceOptimizer(adam, model, compression=Sign())
        sent = [shoal.observability.bytes_sent()]
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(1, 300)).square().sum().backward()
            optimizer.step()
            shoal.barrier()
            sent.append(shoal.observability.bytes_sent())
        return [after - before for before, after in itertools.pairwise(sent)]

    for steps in shoal.Fleet(2, transport="network").run(run):
        assert min(steps[:2]) > 100_000
        assert max(steps[2:]) < 10_000


def test_parameters_without_a_gradient_during_warm_up_get_steps_of_their_gradients_size() -> None:
    param = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    adam = shoal.optim.OneBitAdam([param], LR, warmup=3, betas=BETAS)
    for step in range(12):
        param.grad = torch.tensor([1.0, 0.0 if step < 5 else 50.0], dtype=torch.float64)
        before = param.detach().clone()
        adam.step()
        moved = (param.detach() - before).abs()
        assert moved[0] == pytest.approx(LR, rel=1e-6)
        assert moved[1] == 0 if step < 5 else 0 < moved[1] < 20 * LR
    assert math.isfinite(param.sum().item())


def test_a_second_moment_first_set_after_the_warm_up_is_the_squared_gradient() -> None:
    """Of the first mean without its factor 1 - b1: otherwise the first step would be ten times as long."""
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    adam = shoal.optim.OneBitAdam([param], LR, warmup=2, betas=BETAS)
    for gradient_ in (0.0, 0.0, 50.0):
        param.grad = torch.tensor([gradient_], dtype=torch.float64)
        adam.step()
    assert -param.item() == pytest.approx(LR * (1 - BETAS[0]) / (1 - BETAS[0] ** 3), rel=1e-6)


def test_after_closing_the_optimizer_steps_with_gradients_again() -> None:
    def run() -> tuple[Tensor, Tensor]:
        models = [deepcopy(MODEL) for _ in range(2)]
        adams = [shoal.optim.OneBitAdam(model.parameters(), LR, warmup=WARMUP, betas=BETAS) for model in models]
        around = shoal.bluefog.DistributedGradientAllreduceOptimizer(adams[0], models[0])
        train_steps(models[0], around, range(WARMUP + 2))
        around.close()
        train_steps(models[0], adams[0], range(WARMUP + 2, STEPS))
        train_steps(models[1], adams[1], range(STEPS))
        return flat(models[0]), flat(models[1])

    [(result, alone)] = shoal.Fleet(1).run(run)
    assert (result - alone).abs().max() < 1e-12


def test_agents_without_batches_do_not_count(fleet: Fleets) -> None:
    batches = [10, 6, 7]

    def run() -> Tensor:
        model = deepcopy(MODEL)
        adam = shoal.optim.OneBitAdam(model.parameters(), LR, warmup=WARMUP, betas=BETAS)
        optimizer = shoal.bluefog.DistributedGradientAllreduceOptimizer(adam, model)
        with optimizer.join():
            train_steps(model, optimizer, range(batches[shoal.rank()]))
        return flat(model)

    model, x = deepcopy(MODEL), flat(MODEL)
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for t in range(1, max(batches) + 1):
        each = [gradient(model, x, rank, t - 1) for rank in range(AGENTS) if t <= batches[rank]]
        g = sum(each[1:], each[0]) / len(each)
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g * g if t <= WARMUP else v
        x = x - LR * m / (1 - BETAS[0] ** t) / ((v / (1 - BETAS[1] ** min(t, WARMUP))).sqrt() + 1e-8)
    for one in fleet(AGENTS).run(run):
        assert (one - x).abs().max() < 1e-12


@pytest.mark.parametrize("at", [2, 7])
def test_resuming_is_bit_for_bit(fleet: Fleets, at: int) -> None:
    def make() -> tuple[nn.Module, Any]:
        model = deepcopy(MODEL)
        adam = shoal.optim.OneBitAdam(model.parameters(), LR, warmup=WARMUP, betas=BETAS)
        return model, shoal.bluefog.DistributedGradientAllreduceOptimizer(adam, model, compression=Sign())

    def run() -> bool:
        full, first, second = make(), make(), make()
        train_steps(*full, range(STEPS))
        train_steps(*first, range(at))
        saved = deepcopy((first[0].state_dict(), first[1].state_dict()))
        second[0].load_state_dict(saved[0])
        second[1].load_state_dict(saved[1])
        train_steps(*second, range(at, STEPS))
        return torch.equal(flat(full[0]), flat(second[0]))

    assert fleet(AGENTS).run(run) == [True] * AGENTS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup": 0}, "pass 1 or more"),
        ({"warmup": 1, "lr": -1.0}, "lr=-1.0"),
        ({"warmup": 1, "betas": (0.9, 1.0)}, "below 1"),
        ({"warmup": 1, "eps": 0.0}, "eps=0.0"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shoal.optim.OneBitAdam(MODEL.parameters(), **options)
    for count in (1.5, float("nan"), "3", True):
        with pytest.raises(TypeError, match="warmup must be an int"):
            shoal.optim.OneBitAdam(MODEL.parameters(), warmup=count)  # type: ignore[arg-type]


def test_overlap_with_the_backward_pass_is_refused() -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        adam = shoal.optim.OneBitAdam(model.parameters(), warmup=1)
        with pytest.raises(ValueError, match="OneBitAdam averages momenta behind the backward pass"):
            shoal.bluefog.DistributedGradientAllreduceOptimizer(
                adam, model, compression=Cast(torch.bfloat16), overlap="backward"
            )

    shoal.Fleet(1).run(run)
