"""Horovod's operations without waiting: what ends in ``_async``, and what waits for them.

Each is one of Shoal's operations; around it go factors and forms of a tensor, and the note for those that join.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from ...engine.operation import Handle
from ...ops.alltoall import alltoall_nonblocking
from ...ops.arguments import WEIGHABLE, check_gatherable, check_tensor, detached, put
from ...ops.collective import allgather_nonblocking, allreduce_nonblocking, broadcast_nonblocking
from ...ops.grouped import grouped_allgather_nonblocking, grouped_allreduce_nonblocking
from ...ops.handles import HandleOfMany, wait
from .joining import note
from .process_sets import ProcessSet, global_process_set, group_of
from .reductions import Average, How, listed, meant, scaled

T = TypeVar("T")
Tensors = Sequence[torch.Tensor]


def then(handle: Handle[Any], finish: Callable[[Any], T]) -> Handle[T]:
    """A handle of what is made of another one's result."""
    return HandleOfMany([handle], lambda found: finish(found[0]))


def noted(
    called: str, how: str, name: str | None, tensors: Tensors, process_set: ProcessSet, made: Handle[T]
) -> Handle[T]:
    """An operation that has begun: those may have to know of it that have joined."""
    if process_set.group is None:
        note(called, how, name, tensors, made)
    return made


def reduce_one(
    called: str,
    tensor: torch.Tensor,
    how: How,
    name: str | None,
    process_set: ProcessSet,
    out: torch.Tensor | None = None,
) -> Handle[torch.Tensor]:
    """Begin an all-reduce of a tensor; into ``out``, if it is given."""
    check_tensor(called, detached(tensor))
    group, (op, finish) = group_of(called, process_set), _as_shoals(how, [tensor], process_set)
    sent, direct = scaled(tensor.detach(), how.before), finish is None
    made = allreduce_nonblocking(sent, op=op, name=name, out=out if direct else None, group=group)
    noted("allreduce", op, name, [sent], process_set, made)
    if finish is None:
        return made
    last = finish
    return then(made, lambda found: _placed([last(found)], None if out is None else [out])[0])


def reduce_many(
    called: str,
    tensors: Tensors,
    how: How,
    name: str | None,
    process_set: ProcessSet,
    outs: Tensors | None = None,
) -> Handle[list[torch.Tensor]]:
    """Begin an all-reduce of several tensors at once; into ``outs``, if they are given."""
    tensors = listed(called, tensors)
    for one in tensors:
        check_tensor(called, detached(one))
    group, (op, finish) = group_of(called, process_set), _as_shoals(how, tensors, process_set)
    sent = [scaled(one.detach(), how.before) for one in tensors]
    made = grouped_allreduce_nonblocking(sent, op=op, name=name, out=outs if finish is None else None, group=group)
    noted("grouped_allreduce", op, name, sent, process_set, made)
    if finish is None:
        return made
    last = finish
    return then(made, lambda found: _placed([last(one) for one in found], outs))


def _as_shoals(
    how: How, tensors: Tensors, process_set: ProcessSet
) -> tuple[str, Callable[[torch.Tensor], torch.Tensor] | None]:
    """Shoal's word for a reduction, and what is done with its result."""
    if how.op is Average and any(one.dtype not in WEIGHABLE for one in tensors):
        return "sum", lambda total: _mean(total, process_set.size(), how.after)
    return how.word, None if how.after == 1.0 else lambda found: scaled(found, how.after)


def _mean(total: torch.Tensor, count: int, after: float) -> torch.Tensor:
    if total.dtype in WEIGHABLE:
        return scaled(total / count, after)
    return scaled(total, after / count) if after != 1.0 else torch.div(total, count, rounding_mode="trunc")


def _placed(results: list[torch.Tensor], outs: Tensors | None) -> list[torch.Tensor]:
    if outs is None:
        return results
    for found, out in zip(results, outs, strict=True):
        put(found, out)
    return list(outs)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """``allreduce`` without waiting, and without gradients."""
    how = meant("allreduce_async", average, op, prescale_factor, postscale_factor)
    return reduce_one("allreduce_async", tensor, how, name, process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """:func:`allreduce_async` in place; ``tensor`` must not be touched until the handle is synchronized."""
    how = meant("allreduce_async_", average, op, prescale_factor, postscale_factor)
    check_tensor("allreduce_async_", detached(tensor))
    return then(reduce_one("allreduce_async_", tensor, how, name, process_set, tensor.detach()), lambda _: tensor)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """``grouped_allreduce`` without waiting, and without gradients."""
    how = meant("grouped_allreduce_async", average, op, prescale_factor, postscale_factor)
    return reduce_many("grouped_allreduce_async", tensors, how, name, process_set)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """:func:`grouped_allreduce_async` in place."""
    called = "grouped_allreduce_async_"
    how = meant(called, average, op, prescale_factor, postscale_factor)
    for one in listed(called, tensors):
        check_tensor(called, detached(one))
    outs = [one.detach() for one in tensors]
    return then(reduce_many(called, tensors, how, name, process_set, outs), lambda _: list(tensors))


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """``allgather`` without waiting, and without gradients."""
    group, tensor = group_of("allgather_async", process_set), check_gatherable("allgather_async", detached(tensor))
    made = allgather_nonblocking(tensor, name, group=group)
    return noted("allgather", "", name, [tensor], process_set, made)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[torch.Tensor]]:
    """``grouped_allgather`` without waiting, and without gradients."""
    called = "grouped_allgather_async"
    group, tensors = group_of(called, process_set), [one.detach() for one in listed(called, tensors)]
    made = grouped_allgather_nonblocking(tensors, name, group=group)
    return noted("grouped_allgather", "", name, tensors, process_set, made)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """``broadcast`` without waiting, and without gradients."""
    group, tensor = group_of("broadcast_async", process_set), check_tensor("broadcast_async", detached(tensor))
    made = broadcast_nonblocking(tensor, root_rank, name, group=group)
    return noted("broadcast", "", name, [tensor], process_set, made)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """:func:`broadcast_async` in place; ``tensor`` must not be touched until the handle is synchronized."""
    check_tensor("broadcast_async_", detached(tensor))
    group, flat = group_of("broadcast_async_", process_set), tensor.detach()
    made = broadcast_nonblocking(flat, root_rank, name, out=flat, group=group)
    return then(noted("broadcast", "", name, [flat], process_set, made), lambda _: tensor)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Iterable[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """``alltoall`` without waiting, and without gradients."""
    made = exchange(tensor, splits, name, process_set)
    if splits is None:
        return then(made, lambda found: found[0])
    return then(made, lambda found: (found[0], torch.tensor(found[1], dtype=torch.int32)))


def exchange(
    tensor: torch.Tensor, splits: Iterable[int] | torch.Tensor | None, name: str | None, process_set: ProcessSet
) -> Handle[tuple[torch.Tensor, list[int]]]:
    """Begin an all-to-all; its result with how many rows have come from each."""
    group, tensor = group_of("alltoall", process_set), check_gatherable("alltoall", detached(tensor))
    return noted("alltoall", "", name, [tensor], process_set, alltoall_nonblocking(tensor, splits, name, group=group))


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """``reducescatter`` without waiting, and without gradients."""
    how = meant("reducescatter_async", None, op, prescale_factor, postscale_factor)
    check_gatherable("reducescatter_async", detached(tensor))
    made = reduce_one("reducescatter_async", tensor, how, name, process_set)
    return then(made, lambda found: share_of(found, process_set))


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """``grouped_reducescatter`` without waiting, and without gradients."""
    how = meant("grouped_reducescatter_async", None, op, prescale_factor, postscale_factor)
    for one in listed("grouped_reducescatter_async", tensors):
        check_gatherable("grouped_reducescatter_async", detached(one))
    made = reduce_many("grouped_reducescatter_async", tensors, how, name, process_set)
    return then(made, lambda found: [share_of(one, process_set) for one in found])


def share_of(whole: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """This agent's rows of a tensor: equally many for each, and one more for the first ones where they are not."""
    return whole.tensor_split(process_set.size())[process_set.rank()].clone()


def synchronize(handle: Handle[T]) -> T:
    """Wait for what ``_async`` has begun; its result."""
    return wait(handle)
