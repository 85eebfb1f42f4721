"""The collectives for Lightning and torchmetrics, through Shoal.

The metrics of torchmetrics query torch.distributed, which reports a single process; ``synchronise`` makes them use
these collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

from ...ops.arguments import Group, Internal, as_bits
from ...ops.collective import allreduce, gather_by_rank
from ...ops.objects import broadcast_object

_OF_ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "average": lambda every: every.sum(0) / len(every),
    "sum": lambda every: every.sum(0),
    "max": lambda every: every.amax(0),
    "min": lambda every: every.amin(0),
    "product": lambda every: every.prod(0),
}
_OPERATIONS = {"mean": "average", "avg": "average", "sum": "sum", "max": "max", "min": "min", "product": "product"}


def gather_all(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The tensors of all agents, by rank; their shapes may differ. As torchmetrics' ``dist_sync_fn``."""
    tensor = tensor.detach()
    rows = tensor[None] if tensor.ndim == 0 else tensor
    found = gather_by_rank(as_bits(rows), Internal("lightning.gather"), group=_value_of(group)).values()
    return [part.view(tensor.dtype)[0] if tensor.ndim == 0 else part.view(tensor.dtype) for part in found]


def stacked(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """``[agents, *shape]``; without the first dimension where there is one agent, as Lightning has it.

    Raises:
        ValueError: The agents' shapes differ.
    """
    found = gather_all(tensor, group)
    if len(found) == 1:
        return tensor
    shapes = dict.fromkeys(tuple(part.shape) for part in found)
    if len(shapes) > 1:
        raise ValueError(
            f"all_gather: the agents' tensors have the shapes {', '.join(map(str, shapes))}, and are to be one tensor. "
            "Pad them, or take shoal.allgather, which joins them along dimension 0"
        )
    return torch.stack(found)


def reduced(value: Any, how: Any, group: Any = None) -> Any:
    """The mean, sum, maximum, minimum or product over the agents, of a tensor or a number; the same bits on all.

    A mean of whole numbers has a fraction. A single number is sent as bits, and may be NaN.

    Raises:
        ValueError: Another operation.
    """
    name = str(getattr(how, "name", how) or "mean").rpartition(".")[2].lower()
    if name not in _OPERATIONS:
        raise ValueError(f"reduce_op={how!r}: it may be {', '.join(_OPERATIONS)}")
    if not isinstance(value, torch.Tensor):
        return reduced(torch.tensor(value), how, group).item() if isinstance(value, int | float) else value
    tensor, operation = value.detach(), _OPERATIONS[name]
    if operation == "average" and not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.to(torch.get_default_dtype())
    if tensor.numel() > 1:
        return allreduce(tensor, op=operation, name=Internal("lightning.reduce"), group=_value_of(group))
    return _OF_ONE[operation](torch.stack(gather_all(tensor, group)))


def broadcast(value: Any, source: int) -> Any:
    """An object of one agent: plain data, tensors and paths.

    Raises:
        TypeError: At the source: another object, which receivers would not unpickle.
    """
    path = isinstance(value, Path)
    content: list[Any] = [path, str(value) if path else value]
    is_path, found = broadcast_object(content, source, Internal("lightning.broadcast"))
    return Path(found) if is_path else found


def _value_of(group: Any) -> Group | None:
    """A group of some agents, if not all: ranks, or a process group that the script has opened."""
    everybody = group is None or group is torch.distributed.group.WORLD
    found: Group | None = None if everybody else group
    return found


def several() -> bool:
    """Reports several processes to a metric before it synchronises."""
    return True


def synchronise(module: torch.nn.Module) -> None:
    """Make the metrics of a module compute over all agents, unless they have a synchronisation of their own."""
    for part in module.modules():
        if isinstance(part, Metric) and part.dist_sync_fn is None:
            part.dist_sync_fn = gather_all
            if part.distributed_available_fn is jit_distributed_available:
                part.distributed_available_fn = several


def release(module: torch.nn.Module) -> None:
    """Make them ask torch.distributed again."""
    for part in module.modules():
        if isinstance(part, Metric) and part.dist_sync_fn is gather_all:
            part.dist_sync_fn = None
            if part.distributed_available_fn is several:
                part.distributed_available_fn = jit_distributed_available
