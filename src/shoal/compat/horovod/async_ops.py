"""Horovod's asynchronous operations: the functions that end in ``_async``.

Each calls one of Shoal's operations with the reduction (:class:`ReduceOp`) and the factors of its arguments, and
announces the call to agents that have joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import torch

from ...errors import Mismatch, ShoalError
from ...execution.operation import DerivedHandle, Handle
from ...ops.arguments import WEIGHABLE, check_gatherable, check_tensor, detached, put
from ...ops.collective import allgather_nonblocking, allreduce_nonblocking, broadcast_nonblocking
from ...ops.gathering import alltoall_nonblocking
from ...ops.grouped import grouped_allgather_nonblocking, grouped_allreduce_nonblocking
from ...runtime.agent import current
from ...topology._validate import as_weight
from ...transport.messages import MOVABLE
from .agents import ProcessSet, global_process_set, group_of
from .uneven_inputs import note

HorovodInternalError = ShoalError
"""What Horovod raises of an operation that fails is the base class of Shoal's errors here."""


class InvalidArgument(HorovodInternalError, ValueError):
    """An argument that Horovod refuses only when the operation runs: there by one of these types, or by the other."""


class ReduceOp(IntEnum):
    """The reductions of the tensors of all agents."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


@dataclass(frozen=True)
class ScaledReduction:
    """The reduction of an all-reduce, with factors.

    Attributes:
        op: The reduction.
        before: The factor of each tensor before the reduction.
        after: The factor of the result.
    """

    op: ReduceOp
    before: float = 1.0
    after: float = 1.0

    @property
    def op_name(self) -> str:
        """Shoal's ``op``."""
        return self.op.name.lower()


def parse_reduction(
    called: str, average: bool | None, op: int | None, before: float = 1.0, after: float = 1.0
) -> ScaledReduction:
    """The reduction from the arguments of a call.

    Raises:
        ValueError: The arguments are contradictory or unknown.
    """
    given = op if op is not None else (Average if average is None or average else Sum)
    try:
        found = ReduceOp(given)
    except ValueError:
        raise ValueError(f"{called}: op={op!r}; it may be hvd.Average, Sum, Min, Max or Product") from None
    if average is not None and op is not None:
        raise ValueError(f"{called}: average={average!r} and op={found.name.title()} are both given; leave average out")
    if found is Adasum:
        raise ValueError(
            f"{called}: op=Adasum weighs gradients by the angles between them, pair by pair up a tree, and there is no "
            "such all-reduce here; take hvd.Average, with the learning rate scaled as for it"
        )
    return ScaledReduction(found, as_weight(before, "prescale_factor"), as_weight(after, "postscale_factor"))


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """A tensor times a factor; of integers what is left without the digits behind the point."""
    if factor == 1.0:
        return tensor
    return tensor * factor if tensor.dtype in WEIGHABLE else (tensor.double() * factor).to(tensor.dtype)


def listed(called: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a call of several."""
    if isinstance(tensors, torch.Tensor):
        raise TypeError(f"{called}: a list of tensors is wanted, not one tensor")
    return list(tensors)


T = TypeVar("T")
Tensors = Sequence[torch.Tensor]


def then(handle: Handle[Any], finish: Callable[[Any], T]) -> Handle[T]:
    """A handle of a function of another handle's result."""
    return DerivedHandle(handle, finish)


def announced(
    called: str, how: str, name: str | None, tensors: Tensors, process_set: ProcessSet, handle: Handle[T]
) -> Handle[T]:
    """An operation that has begun: those may have to know of it that have joined."""
    if process_set.group is None:
        note(called, how, name, tensors, handle)
    return handle


def reduce_one(
    called: str,
    tensor: torch.Tensor,
    how: ScaledReduction,
    name: str | None,
    process_set: ProcessSet,
    out: torch.Tensor | None = None,
) -> Handle[torch.Tensor]:
    """Begin an all-reduce of a tensor; into ``out``, if it is given."""
    check_tensor(called, detached(tensor))
    group, (op, finish) = group_of(called, process_set), _as_shoals(called, how, [tensor], process_set)
    sent, direct = scaled(tensor.detach(), how.before), finish is None
    handle = allreduce_nonblocking(sent, op=op, name=name, out=out if direct else None, group=group)
    announced("allreduce", op, name, [sent], process_set, handle)
    if finish is None:
        return handle
    last = finish
    return then(handle, lambda found: _placed([last(found)], None if out is None else [out])[0])


def reduce_many(
    called: str,
    tensors: Tensors,
    how: ScaledReduction,
    name: str | None,
    process_set: ProcessSet,
    outs: Tensors | None = None,
) -> Handle[list[torch.Tensor]]:
    """Begin an all-reduce of several tensors at once; into ``outs``, if they are given."""
    tensors = listed(called, tensors)
    for tensor in tensors:
        check_tensor(called, detached(tensor))
    group, (op, finish) = group_of(called, process_set), _as_shoals(called, how, tensors, process_set)
    sent = [scaled(tensor.detach(), how.before) for tensor in tensors]
    if op == "sum" and how.op is Average:  # beside integers: 16-bit numbers would overflow in the sum
        sent = [
            tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor
            for tensor in sent
        ]
    handle = grouped_allreduce_nonblocking(sent, op=op, name=name, out=outs if finish is None else None, group=group)
    announced("grouped_allreduce", op, name, sent, process_set, handle)
    if finish is None:
        return handle
    last = finish
    dtypes = [tensor.dtype for tensor in tensors]
    return then(
        handle,
        lambda found: _placed([last(one).to(dtype) for one, dtype in zip(found, dtypes, strict=True)], outs),
    )


def _as_shoals(
    called: str, how: ScaledReduction, tensors: Tensors, process_set: ProcessSet
) -> tuple[str, Callable[[torch.Tensor], torch.Tensor] | None]:
    """Shoal's name of a reduction, and the function to apply to its result.

    Raises:
        TypeError: A bool tensor is averaged or has a factor.
    """
    weighs = how.op is Average or how.before != 1.0 or how.after != 1.0
    if weighs and any(tensor.dtype not in WEIGHABLE for tensor in tensors):
        if any(tensor.dtype is torch.bool for tensor in tensors):
            raise TypeError(
                f"{called}: a bool tensor has no average and takes no factor; give op=hvd.Min for whether all are "
                "True, hvd.Max for whether any is, or tensor.float()"
            )
        if how.op is Average:
            return "sum", lambda total: _mean(total, process_set.size(), how.after)
    return how.op_name, None if how.after == 1.0 else lambda found: scaled(found, how.after)


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
    how = parse_reduction("allreduce_async", average, op, prescale_factor, postscale_factor)
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
    how = parse_reduction("allreduce_async_", average, op, prescale_factor, postscale_factor)
    return reduce_in_place("allreduce_async_", tensor, how, name, process_set)


def reduce_in_place(
    called: str, tensor: torch.Tensor, how: ScaledReduction, name: str | None, process_set: ProcessSet
) -> Handle[torch.Tensor]:
    """Begin an all-reduce of a tensor into itself."""
    check_tensor(called, detached(tensor))
    return then(reduce_one(called, tensor, how, name, process_set, tensor.detach()), lambda _: tensor)


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
    how = parse_reduction("grouped_allreduce_async", average, op, prescale_factor, postscale_factor)
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
    how = parse_reduction("grouped_allreduce_async_", average, op, prescale_factor, postscale_factor)
    return reduce_many_in_place("grouped_allreduce_async_", tensors, how, name, process_set)


def reduce_many_in_place(
    called: str, tensors: Tensors, how: ScaledReduction, name: str | None, process_set: ProcessSet
) -> Handle[list[torch.Tensor]]:
    """Begin an all-reduce of several tensors into themselves."""
    given = listed(called, tensors)
    for tensor in given:
        check_tensor(called, detached(tensor))
    outs = [tensor.detach() for tensor in given]
    return then(reduce_many(called, given, how, name, process_set, outs), lambda _: given)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """``allgather`` without waiting, and without gradients."""
    return gather_one("allgather_async", tensor, name, process_set)


def gather_one(called: str, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> Handle[torch.Tensor]:
    """Begin an all-gather of a tensor."""
    group, tensor = group_of(called, process_set), check_gatherable(called, detached(tensor))
    handle = allgather_nonblocking(tensor, name, group=group)
    return announced("allgather", "", name, [tensor], process_set, handle)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[torch.Tensor]]:
    """``grouped_allgather`` without waiting, and without gradients."""
    return gather_many("grouped_allgather_async", tensors, name, process_set)


def gather_many(called: str, tensors: Tensors, name: str | None, process_set: ProcessSet) -> Handle[list[torch.Tensor]]:
    """Begin an all-gather of several tensors at once."""
    group, tensors = (
        group_of(called, process_set),
        [check_gatherable(called, detached(tensor)) for tensor in listed(called, tensors)],
    )
    handle = grouped_allgather_nonblocking(tensors, name, group=group)
    return announced("grouped_allgather", "", name, tensors, process_set, handle)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """``broadcast`` without waiting, and without gradients."""
    return spread_one("broadcast_async", tensor, root_rank, name, process_set)


def spread_one(
    called: str, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> Handle[torch.Tensor]:
    """Begin a broadcast."""
    group, tensor = group_of(called, process_set), check_tensor(called, detached(tensor), MOVABLE)
    handle = broadcast_nonblocking(tensor, root_rank, name, group=group)
    return announced("broadcast", "", name, [tensor], process_set, handle)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """:func:`broadcast_async` in place; ``tensor`` must not be touched until the handle is synchronized."""
    return spread_in_place("broadcast_async_", tensor, root_rank, name, process_set)


def spread_in_place(
    called: str, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> Handle[torch.Tensor]:
    """Begin a broadcast into the tensor itself."""
    check_tensor(called, detached(tensor), MOVABLE)
    group, flat = group_of(called, process_set), tensor.detach()
    handle = broadcast_nonblocking(flat, root_rank, name, out=flat, group=group)
    return then(announced("broadcast", "", name, [flat], process_set, handle), lambda _: tensor)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Iterable[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """``alltoall`` without waiting, and without gradients."""
    handle = exchange("alltoall_async", tensor, splits, name, process_set)
    if splits is None:
        return then(handle, lambda found: found[0])
    return then(handle, lambda found: (found[0], torch.tensor(found[1], dtype=torch.int32, device="cpu")))


def exchange(
    called: str,
    tensor: torch.Tensor,
    splits: Iterable[int] | torch.Tensor | None,
    name: str | None,
    process_set: ProcessSet,
) -> Handle[tuple[torch.Tensor, list[int]]]:
    """Begin an all-to-all; its result with how many rows have come from each.

    Raises:
        InvalidArgument: The splits are no whole numbers, or their sum is not the number of rows.
    """
    group, tensor = group_of(called, process_set), check_gatherable(called, detached(tensor))
    try:
        handle = alltoall_nonblocking(tensor, splits, name, group=group)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{called}: {str(error).removeprefix('alltoall: ')}") from None
    return announced("alltoall", "", name, [tensor], process_set, handle)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """``reducescatter`` without waiting, and without gradients."""
    how = scattered("reducescatter_async", [tensor], op, prescale_factor, postscale_factor)
    handle = reduce_one("reducescatter_async", tensor, how, name, process_set)
    return then(handle, lambda found: share_of(found, process_set))


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """``grouped_reducescatter`` without waiting, and without gradients."""
    called = "grouped_reducescatter_async"
    tensors = listed(called, tensors)
    how = scattered(called, tensors, op, prescale_factor, postscale_factor)
    handle = reduce_many(called, tensors, how, name, process_set)
    return then(handle, lambda found: [share_of(result, process_set) for result in found])


def scattered(called: str, tensors: list[torch.Tensor], op: int, before: float, after: float) -> ScaledReduction:
    """The reduction of a call that scatters rows, after a check that its tensors have rows.

    Raises:
        InvalidArgument: The op is Adasum, which Horovod does not scatter either.
    """
    if op == Adasum:
        raise InvalidArgument(f"{called}: op=Adasum is no reduction whose rows can be scattered; take hvd.Average")
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and not tensor.dim():
            raise ValueError(f"{called}: rows are scattered, and a 0-dimensional tensor has none; use tensor.view(1)")
        check_gatherable(called, detached(tensor))
    return parse_reduction(called, None, op, before, after)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> SparseHandle:
    """The sum or the average of sparse tensors, as a sparse tensor; their entries may have different indices.

    Args:
        tensor: ``torch.sparse_coo``; the same shape and dtype on all.
        name: Matches the calls of different agents.
        op: ``Average`` or ``Sum``.
        process_set: The agents, all of which call it.

    Returns:
        A handle. Calling it returns its result, as in Horovod. The result is coalesced.

    Raises:
        TypeError: The tensor is not sparse.
        ValueError: Another op.
        Mismatch: The agents' shapes differ; raised by the handle.
    """
    called = "sparse_allreduce_async"
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        raise TypeError(f"{called}: it takes a tensor of layout torch.sparse_coo; for a dense one take allreduce_async")
    how = parse_reduction(called, None, op)
    if how.op not in (Average, Sum):
        raise ValueError(f"{called}: op={how.op_name}; sparse tensors are averaged or added up: hvd.Average or hvd.Sum")
    own = tensor.detach().coalesce()
    here, count = current(called).rank, process_set.size()
    # The shape as well: entries fit into any that is large enough, and each agent would take its own for the result's.
    layout = torch.tensor([[here, *own.shape]], device="cpu")
    handle = gather_many(called, [own.indices().T.contiguous(), own.values(), layout], name, process_set)

    def finish(found: list[Any]) -> torch.Tensor:
        indices, values, layouts = found
        for rank, *shape in layouts.tolist():
            if shape != list(own.shape):
                raise Mismatch(
                    f"{called}: rank {here} has a tensor of shape {list(own.shape)}, and rank {rank} one of {shape}; "
                    "the shapes of all agents must be equal",
                    (here, rank),
                )
        placed = torch.sparse_coo_tensor(
            indices.T, values, own.shape, dtype=own.dtype, device=own.device, check_invariants=True
        )
        total = placed.coalesce()
        return total / count if how.op is Average else total

    return SparseHandle(handle, finish)


class SparseHandle(DerivedHandle[torch.Tensor]):
    """A handle that is called for its result, as Horovod's of a sparse all-reduce."""

    __slots__ = ()

    def __call__(self) -> torch.Tensor:
        return self.wait()


def share_of(whole: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """This agent's rows of a tensor: equally many for each, and one more for the first ones where they are not."""
    return whole.tensor_split(process_set.size())[process_set.rank()].clone()
