"""Copies and scaled copies of large tensors: one pass over memory, written past caches that would not keep the result.

Each has the bits of the operation of torch that it names.
"""

from __future__ import annotations

import torch

from .native import sums as native


def copy(out: torch.Tensor, tensor: torch.Tensor) -> None:
    """``out.copy_(tensor)``, of tensors of one shape."""
    if native.copies(out, tensor):
        native.copy(out, tensor)
    else:
        out.copy_(tensor)


def scale(out: torch.Tensor, tensor: torch.Tensor, weight: float) -> None:
    """``torch.mul(tensor, weight, out=out)``, of tensors of one shape and dtype."""
    if native.fits(out, [tensor]):
        native.weigh(out, [tensor], [weight])
    else:
        torch.mul(tensor, weight, out=out)


def add_scaled(out: torch.Tensor, tensor: torch.Tensor, other: torch.Tensor, weight: float) -> None:
    """``torch.add(tensor, other, alpha=weight, out=out)``, of tensors of one shape and dtype."""
    if native.fits(out, [tensor, other]) and abs(weight) <= torch.finfo(torch.float32).max:
        native.weigh(out, [tensor, other], [1.0, weight])
    else:
        torch.add(tensor, other, alpha=weight, out=out)
