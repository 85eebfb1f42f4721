"""Steps of optimizers on flat memory, with the copy that neighbours read written in the same pass.

What is computed is what torch's optimizers compute, an operation at a time, each rounded once. SGD gives the bits of
``torch.optim.SGD`` on a CPU. AdamW differs there in one operation: torch's square root on a CPU is off by a unit in the
last place for some numbers (which ones depends on its build), where the program's is rounded to the nearest. On a CUDA
device torch's own optimizers round as their kernels were compiled, and need not give these bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .choice import Way, on_device_of, way_of
from .weighted_sum import BLOCK, check_alike, divide, overlap


def sgd_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    buffer: torch.Tensor | None,
    published: torch.Tensor | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    first: bool = False,
    way: Way | None = None,
) -> None:
    """One step of ``torch.optim.SGD``.

    Args:
        param: Flat, in float32 or float64; changed in place.
        grad: Like it; not changed.
        buffer: Of the momentum, changed in place; None where that is 0.
        published: Becomes a copy of ``param``, if given.
        first: There was no step before: ``buffer`` is not read.
        way: :func:`~shoal.kernels.choice.way_of` of ``param`` if not given.

    Raises:
        ValueError: The tensors are not alike, share memory, or are not of float32 or float64; or momentum has no
            buffer; or Nesterov's has none, or a dampening.
    """
    if momentum and buffer is None:
        raise ValueError(f"momentum={momentum} without a buffer: pass one")
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")
    state = [buffer] if momentum and buffer is not None else []
    _check(param, grad, [*state, *([published] if published is not None else [])])
    if (way or way_of(param)) == "torch" or not param.numel():
        _sgd_by_torch(param, grad, state, published, lr, momentum, dampening, weight_decay, nesterov, maximize, first)
        return
    from .programs.steps import sgd

    with on_device_of(param):
        sgd[(-(-len(param) // BLOCK),)](
            param,
            grad,
            state[0] if state else param,
            param if published is None else published,
            len(param),
            -float(lr),
            float(momentum),
            1 - float(dampening),
            float(weight_decay),
            MOMENTUM=bool(state),
            FIRST=first,
            NESTEROV=nesterov,
            DECAYS=weight_decay != 0,
            MAXIMIZE=maximize,
            PUBLISHES=published is not None,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )


def _sgd_by_torch(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: Sequence[torch.Tensor],
    published: torch.Tensor | None,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first: bool,
) -> None:
    step = -grad if maximize else grad
    if weight_decay:
        step = step.add(param, alpha=weight_decay)
    for buffer in state:
        if first:
            buffer.copy_(step)
        else:
            buffer.mul_(momentum).add_(step, alpha=1 - dampening)
        step = step.add(buffer, alpha=momentum) if nesterov else buffer
    param.add_(step, alpha=-lr)
    if published is not None:
        published.copy_(param)


def adamw_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    published: torch.Tensor | None = None,
    *,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    way: Way | None = None,
) -> None:
    """One step of ``torch.optim.AdamW``, without ``amsgrad``.

    Args:
        param: Flat, in float32 or float64; changed in place.
        grad: Like it; not changed.
        mean, square: torch's ``exp_avg`` and ``exp_avg_sq``; changed in place.
        published: Becomes a copy of ``param``, if given.
        step: Which one it is, from 1 on.
        way: :func:`~shoal.kernels.choice.way_of` of ``param`` if not given.

    Raises:
        ValueError: The tensors are not alike, share memory, or are not of float32 or float64; or ``step`` is below 1.
    """
    if step < 1:
        raise ValueError(f"step={step}: the first step is 1")
    _check(param, grad, [mean, square, *([published] if published is not None else [])])
    beta1, beta2 = betas
    step_size, correction = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    if (way or way_of(param)) == "torch" or not param.numel():
        grad = -grad if maximize else grad
        if weight_decay:
            param.mul_(1 - lr * weight_decay)
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        scale = square.sqrt()
        divide(scale, correction, scale)
        param.addcdiv_(mean, scale.add_(eps), value=-step_size)
        if published is not None:
            published.copy_(param)
        return
    from .programs.steps import adamw

    forgets = 1 - float(beta1)
    with on_device_of(param):
        adamw[(-(-len(param) // BLOCK),)](
            param,
            grad,
            mean,
            square,
            param if published is None else published,
            len(param),
            1 - float(lr) * weight_decay,
            forgets,
            1 - forgets if param.dtype == torch.float64 else _one_minus_in_float32(forgets),
            float(beta2),
            1 - float(beta2),
            float(correction),
            float(eps),
            -float(step_size),
            SLOWLY=abs(forgets) < 0.5,
            DECAYS=weight_decay != 0,
            MAXIMIZE=maximize,
            PUBLISHES=published is not None,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )


def _one_minus_in_float32(number: float) -> float:
    """As torch computes it for tensors of float32: of a number that is rounded first."""
    return float(1 - torch.tensor(number, dtype=torch.float32))


def _check(param: torch.Tensor, grad: torch.Tensor, written: Sequence[torch.Tensor]) -> None:
    if param.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"a step of parameters in {param.dtype}: pass float32 or float64")
    check_alike(param, [grad, *written])
    every = [param, grad, *written]
    if any(overlap(one, other) for at, one in enumerate(every) for other in every[:at]):
        raise ValueError("two of the tensors of a step share memory: pass tensors of their own")
