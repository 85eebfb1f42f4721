"""Steps by kernels are torch.optim's, and the published copy is the parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shoal.kernels.steps import adamw_step, sgd_step
from support.kernels import DEVICE, QUIET, WAYS, same_numbers

pytestmark = QUIET
STEPS = 6
SGD = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.03, "momentum": 0.9, "weight_decay": 1e-3},
    {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "maximize": True},
    {"lr": 0.07, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
]
ADAMW: list[dict[str, Any]] = [
    {"lr": 1e-3},
    {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0},
    {"lr": 0.1, "betas": (0.3, 0.5), "weight_decay": 0.1, "maximize": True},
]


def gradients(n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, generator=generator, dtype=dtype) for _ in range(STEPS + 1)]


def by_torch(optimizer: Any, start: torch.Tensor, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters after each step, on the CPU."""
    param, found = start.clone().requires_grad_(), []
    taken = optimizer([param])
    for grad in grads:
        param.grad = grad.clone()
        taken.step()
        found.append(param.detach().clone())
    return found


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2500])
@pytest.mark.parametrize("options", SGD, ids=str)
def test_sgd_has_the_bits_of_torch(way: Any, dtype: torch.dtype, n: int, options: dict[str, Any]) -> None:
    start, *grads = gradients(n, dtype)
    param = start.clone().to(DEVICE)
    buffer, published = torch.full_like(param, torch.nan) if "momentum" in options else None, torch.empty_like(param)
    wanted = by_torch(lambda params: torch.optim.SGD(params, **options), start, grads)
    for number, (grad, after) in enumerate(zip(grads, wanted, strict=True)):
        given = grad.to(DEVICE)
        sgd_step(param, given, buffer, published, first=not number, way=way, **options)
        assert same_numbers(param, after) and same_numbers(published, after) and same_numbers(given, grad)


def after_adamw(way: Any, start: torch.Tensor, grads: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    param = start.clone().to(DEVICE)
    mean, square, published = torch.zeros_like(param), torch.zeros_like(param), torch.empty_like(param)
    found = []
    for number, grad in enumerate(grads):
        adamw_step(param, grad.to(DEVICE), mean, square, published, step=number + 1, way=way, **options)
        assert same_numbers(param, published)
        found.append(param.cpu().clone())
    return found


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2500])
@pytest.mark.parametrize("options", ADAMW, ids=str)
def test_adamw_is_torchs_but_for_the_roots(
    way: Any, dtype: torch.dtype, n: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bits where torch takes rounded roots, too; on a CPU its own are off by a unit at times."""
    start, *grads = gradients(n, dtype)
    found = after_adamw(way, start, grads, **options)
    if way == "triton":
        monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: torch.from_numpy(np.sqrt(x.detach().numpy())))
    wanted = by_torch(lambda params: torch.optim.AdamW(params, foreach=False, **options), start, grads)
    assert all(same_numbers(one, other) for one, other in zip(found, wanted, strict=True))


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", ADAMW, ids=str)
def test_a_step_of_adamw_is_within_units_in_the_last_place_of_torchs(
    way: Any, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """A root that is off by a unit makes the denominator off by two, and the change by three; the sum rounds once."""
    start, grad, *_ = gradients(2500, dtype)
    (found,) = after_adamw(way, start, [grad], **options)
    (wanted,) = by_torch(lambda params: torch.optim.AdamW(params, foreach=False, **options), start, [grad])
    eps = torch.finfo(dtype).eps
    assert ((found - wanted).abs() <= eps * (3 * (wanted - start).abs() + wanted.abs())).all()


@WAYS
def test_what_cannot_be_a_step_is_an_error(way: Any) -> None:
    param, grad = torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE)
    with pytest.raises(ValueError, match="without a buffer"):
        sgd_step(param, grad, None, lr=0.1, momentum=0.9, way=way)
    with pytest.raises(ValueError, match="Nesterov"):
        sgd_step(param, grad, None, lr=0.1, nesterov=True, way=way)
    with pytest.raises(ValueError, match="share memory"):
        sgd_step(param, param, None, lr=0.1, way=way)
    with pytest.raises(ValueError, match="float32 or float64"):
        sgd_step(param.half(), grad.half(), None, lr=0.1, way=way)
    with pytest.raises(ValueError, match="tensor 1 has"):
        sgd_step(param, grad[:3], None, lr=0.1, way=way)
    with pytest.raises(ValueError, match="the first step is 1"):
        adamw_step(param, grad, grad.clone(), grad.clone(), step=0, way=way)
