"""Accelerate's gather, reduce and pad operations, through Shoal: tensors in any nesting of lists, tuples and dicts."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import recursively_apply

from ..ops import safe_serialization
from ..ops.arguments import Internal
from ..ops.collective import allgather, allreduce, gather_by_rank
from .bit_casting import as_bits

_OPERATIONS = {"sum": "sum", "mean": "average", "max": "max"}


def gathered(tensors: Any) -> Any:
    """Each tensor of all agents, joined along dimension 0 in the order of ranks; a single number counts as one row."""
    return recursively_apply(_gathered, tensors, error_on_other_type=True)


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    rows = tensor[None] if tensor.ndim == 0 else tensor
    return allgather(as_bits(rows), Internal("frameworks.gather")).view(tensor.dtype)


def gathered_objects(objects: Any) -> list[Any]:
    """The objects of all agents, in the order of ranks: plain data, as :func:`~shoal.broadcast_object` sends it.

    Raises:
        TypeError: A part of the objects is not plain data.
    """
    found = gather_by_rank(safe_serialization.write(objects), Internal("frameworks.gather_objects"))
    return [one for data in found.values() for one in safe_serialization.read(data)]


def reduced(tensors: Any, reduction: str) -> Any:
    """Each tensor's sum, mean or maximum over the agents, or itself with ``"none"``."""
    if reduction == "none":
        return tensors
    if reduction not in _OPERATIONS:
        raise ValueError(f"reduction={reduction!r}: it may be {', '.join(map(repr, _OPERATIONS))} or 'none'")

    def of_one(tensor: torch.Tensor) -> torch.Tensor:
        return allreduce(tensor.detach(), op=_OPERATIONS[reduction], name=Internal("frameworks.reduce"))

    return recursively_apply(of_one, tensors, error_on_other_type=True)


def padded(tensors: Any, dim: int, pad_index: float, pad_first: bool) -> Any:
    """Each tensor as long in a dimension as the longest of all agents'."""

    def of_one(tensor: torch.Tensor) -> torch.Tensor:
        if dim >= tensor.ndim or dim < -tensor.ndim:
            return tensor
        own = tensor.shape[dim]
        longest = int(allreduce(torch.tensor(own), op="max", name=Internal("frameworks.pad")))
        if longest == own:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = longest
        found = tensor.new_full(shape, pad_index)
        found.narrow(dim, longest - own if pad_first else 0, own).copy_(tensor)
        return found

    return recursively_apply(of_one, tensors, error_on_other_type=True)
