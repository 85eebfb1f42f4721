"""Steps of optimizers: parameters, gradients and state are read once, and what changes is written once."""

from typing import Any

import triton
import triton.language as tl

from .arithmetic import divided, square_root
from .types import fp64, i64


@triton.jit
def sgd(
    param: "Any",
    grad: "Any",
    buffer: "Any",
    published: "Any",
    n: "i64",
    lr: "fp64",
    momentum: "fp64",
    keeps: "fp64",
    weight_decay: "fp64",
    MOMENTUM: tl.constexpr,
    FIRST: tl.constexpr,
    NESTEROV: tl.constexpr,
    DECAYS: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    PUBLISHES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """torch.optim.SGD's step.

    Args:
        lr: The learning rate, times -1.
        keeps: One minus the dampening.
        FIRST: The buffer becomes the gradient, whatever is in it.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(param + at, mask=inside, other=0.0)
    step = tl.load(grad + at, mask=inside, other=0.0)
    if MAXIMIZE:
        step = -step
    if DECAYS:
        step = tl.fma(x, tl.full([BLOCK], weight_decay, x.dtype), step)
    if MOMENTUM:
        if FIRST:
            kept = step
        else:
            kept = tl.load(buffer + at, mask=inside, other=0.0) * tl.full([BLOCK], momentum, x.dtype)
            kept = tl.fma(step, tl.full([BLOCK], keeps, x.dtype), kept)
        tl.store(buffer + at, kept, mask=inside)
        if NESTEROV:
            step = tl.fma(kept, tl.full([BLOCK], momentum, x.dtype), step)
        else:
            step = kept
    x = tl.fma(step, tl.full([BLOCK], lr, x.dtype), x)
    tl.store(param + at, x, mask=inside)
    if PUBLISHES:
        tl.store(published + at, x, mask=inside)


@triton.jit
def adamw(
    param: "Any",
    grad: "Any",
    mean: "Any",
    square: "Any",
    published: "Any",
    n: "i64",
    shrinks: "fp64",
    forgets: "fp64",
    rest: "fp64",
    beta2: "fp64",
    forgets_square: "fp64",
    correction: "fp64",
    eps: "fp64",
    step_size: "fp64",
    SLOWLY: tl.constexpr,
    DECAYS: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    PUBLISHES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """torch.optim.AdamW's step.

    Args:
        shrinks: What weight decay multiplies parameters with.
        forgets: One minus the first beta, and ``rest`` one minus that.
        forgets_square: One minus the second beta.
        correction: The square root of the second bias correction.
        step_size: The learning rate over the first bias correction, times -1.
        SLOWLY: ``forgets`` is below a half: torch interpolates from the nearer end.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(param + at, mask=inside, other=0.0)
    g = tl.load(grad + at, mask=inside, other=0.0)
    m = tl.load(mean + at, mask=inside, other=0.0)
    v = tl.load(square + at, mask=inside, other=0.0)
    if MAXIMIZE:
        g = -g
    if DECAYS:
        x = x * tl.full([BLOCK], shrinks, x.dtype)
    if SLOWLY:
        m = tl.fma(g - m, tl.full([BLOCK], forgets, x.dtype), m)
    else:
        m = tl.fma(m - g, tl.full([BLOCK], rest, x.dtype), g)
    v = v * tl.full([BLOCK], beta2, x.dtype)
    v = tl.fma(g * tl.full([BLOCK], forgets_square, x.dtype), g, v)
    scale = divided(square_root(v), tl.full([BLOCK], correction, x.dtype)) + tl.full([BLOCK], eps, x.dtype)
    x = x + divided(m * tl.full([BLOCK], step_size, x.dtype), scale)
    tl.store(mean + at, m, mask=inside)
    tl.store(square + at, v, mask=inside)
    tl.store(param + at, x, mask=inside)
    if PUBLISHES:
        tl.store(published + at, x, mask=inside)
