"""Synchronization of models, optimizers and objects over all agents."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ...ops import objects, safe_serialization
from ...ops.arguments import Internal
from ...ops.collective import gather_by_rank
from ...ops.objects import Parameters
from .process_sets import ProcessSet, global_process_set, group_of

T = TypeVar("T")


def broadcast_parameters(params: Parameters, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Give every agent the values of ``root_rank``, in place: of a ``state_dict()``, or of named parameters."""
    objects.broadcast_parameters(params, root_rank, group=group_of("broadcast_parameters", process_set))


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Give every agent the optimizer's state and options of ``root_rank``. No step is taken for it; ``model`` is not
    needed."""
    objects.broadcast_optimizer_state(optimizer, root_rank)


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """The object of ``root_rank`` on every agent: plain data and tensors, as for :func:`shoal.broadcast_object`."""
    return objects.broadcast_object(obj, root_rank, name, group=group_of("broadcast_object", process_set))


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """The objects of all agents, by rank: of the same kinds as those of :func:`broadcast_object`.

    Raises:
        TypeError: A part of the object is not plain data; nothing is sent.
    """
    group = group_of("allgather_object", process_set)
    try:
        written = safe_serialization.write(obj)
    except (TypeError, ValueError) as error:
        raise type(error)(f"allgather_object sends plain data and tensors, and {error}") from None
    found = gather_by_rank(written, Internal(f"horovod.allgather_object {name or ''}"), group=group)
    return [safe_serialization.read(found[rank]) for rank in sorted(found)]
