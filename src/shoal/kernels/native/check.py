"""Compare the compiled kernels with torch's operations when they are loaded, on a few numbers of each kind.

Agents with and without the kernels must compute the same bits. Whether torch fuses a multiply-add depends on its build
and on the CPU, so this module compares results instead of assuming it.
"""

from __future__ import annotations

import ctypes

import torch

from .interface import DIVIDE, DTYPES, MULTIPLY, NO_SCALE, REDUCTIONS

_NUMBERS = 96 + 5
"""A length with full tiles and a remainder; for torch, with full vectors and a remainder."""


def differing(kernels: ctypes.CDLL) -> str | None:
    """The first operation whose bits differ from torch's, for messages; None if there is none."""
    chance = torch.Generator().manual_seed(5)
    drawn = [torch.randn(_NUMBERS, generator=chance, dtype=torch.float64) for _ in range(3)]
    for dtype, code in DTYPES.items():
        inputs = [one.to(dtype) for one in drawn]
        pointers = (ctypes.c_void_p * 3)(*[one.data_ptr() for one in inputs])
        out = torch.empty(_NUMBERS, dtype=dtype)
        for scale in (NO_SCALE, MULTIPLY, DIVIDE):
            weights = (ctypes.c_double * 3)(0.3, 0.1, 0.7)
            kernels.shoal_weigh(code, out.data_ptr(), None, pointers, 3, weights, scale, 3.0, _NUMBERS, 0)
            if not torch.equal(out, _weighed(inputs, list(weights), scale)):
                return f"weighted sums of {dtype}"
        for how, number in REDUCTIONS.items():
            kernels.shoal_reduce(code, out.data_ptr(), pointers, 3, number, 0, _NUMBERS, 0)
            if not torch.equal(out, _reduced(inputs, how)):
                return f"reductions ({how}) of {dtype}"
    return None


def _weighed(inputs: list[torch.Tensor], weights: list[float], scale: int) -> torch.Tensor:
    wide = torch.promote_types(inputs[0].dtype, torch.float32)
    first, *others = [one.to(wide) for one in inputs]
    if scale == NO_SCALE:
        total = first * weights[0]
        for one, weight in zip(others, weights[1:], strict=True):
            total.add_(one, alpha=weight)
    else:
        total = first + others[0] + others[1]
        total = total * 3.0 if scale == MULTIPLY else total / 3.0
    return total.to(inputs[0].dtype)


def _reduced(inputs: list[torch.Tensor], how: str) -> torch.Tensor:
    wide = torch.promote_types(inputs[0].dtype, torch.float32)
    steps = {"product": torch.mul, "min": torch.minimum, "max": torch.maximum}
    first, *others = [one.to(wide) for one in inputs]
    for one in others:
        first = steps.get(how, torch.add)(first, one)
    return (first / 3.0 if how == "average" else first).to(inputs[0].dtype)
