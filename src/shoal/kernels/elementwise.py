"""Copies and scaled copies of large tensors in one pass over memory.

Results that caches would not keep are written past them. Each function has the bits of the torch operation that it
names, and the same bits with and without the compiled kernels.
"""

from __future__ import annotations

import torch

from .native import sums as native


def copy(out: torch.Tensor, tensor: torch.Tensor) -> None:
    """``out.copy_(tensor)``, for tensors of one shape."""
    if native.copies(out, tensor):
        native.copy(out, tensor)
    else:
        out.copy_(tensor)


def scale(out: torch.Tensor, tensor: torch.Tensor, weight: float) -> None:
    """``torch.mul(tensor, weight, out=out)``, for tensors of one shape and dtype."""
    if native.fits(out, [tensor]):
        native.weigh(out, [tensor], [weight])
    else:
        torch.mul(tensor, weight, out=out)


def add_scaled(out: torch.Tensor, tensor: torch.Tensor, other: torch.Tensor, weight: float) -> None:
    """``torch.add(tensor, other, alpha=weight, out=out)``, for tensors of one shape and dtype.

    16-bit types are added in float32 and rounded once; torch itself would round the weight to 16 bits, too.
    """
    if native.fits(out, [tensor, other]) and abs(weight) <= torch.finfo(torch.float32).max:
        native.weigh(out, [tensor, other], [1.0, weight])
    elif tensor.dtype in (torch.float16, torch.bfloat16):
        out.copy_(tensor.float().add_(other.float(), alpha=weight))
    else:
        torch.add(tensor, other, alpha=weight, out=out)
