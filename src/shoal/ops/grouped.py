"""Several tensors in one call: one message to each neighbour for all of a dtype, and nothing else in it.

A call of a small tensor costs its bookkeeping and not its bytes. A call is one round, with a stage for each dtype:
agents whose dtypes differ once still count their rounds alike. The tensors of a group are joined in the order given,
so the layout is the caller's, and the same on all agents; the sum of a number does not depend on what lies beside it,
so the bits are those of single calls.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from ..compression import Compressor
from ..engine.discovery import submit_to_all
from ..errors import Mismatch
from ..execution.layout_mismatch import LayoutExchange, described
from ..execution.operation import DerivedHandle, Handle, Operation
from ..execution.stage import Steps
from ..runtime.agent import current
from ..transport.messages import MOVABLE
from ..transport.shared_regions import ResultPool
from .arguments import (
    ALL,
    WEIGHABLE,
    Group,
    caller_group,
    check_gatherable,
    check_out,
    check_tensor,
    detached,
    on_device_of,
    put,
    split_name,
)
from .collective import as_root, broadcast_steps, complete_parts_of_all, reducible
from .encoded import encoded_by_call
from .neighbor import Weights, mix_steps, mixing_of
from .reduction import reduced
from .round_plan import plan_of, submit_planned

Tensors = Sequence[torch.Tensor]
_SHOWN = 4
"""Tensors of a group that an error lists, where it is not known which differs."""
_SMALL_BYTES, _BATCH_BYTES = 1 << 18, 16 << 20
"""Tensors of this size cost their bytes, and go alone; the memory of a batch of smaller ones."""


def in_batches(tensors: Tensors) -> list[list[int]]:
    """The positions of tensors that go together: small ones of one dtype, up to a limit. The same on all agents whose
    tensors have the same shapes and dtypes."""
    batches: list[list[int]] = []
    open_batches: dict[torch.dtype, tuple[list[int], int]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.nbytes > _SMALL_BYTES:
            batches.append([position])
            continue
        batch, size = open_batches.get(tensor.dtype, (None, 0))
        if batch is None or size + tensor.nbytes > _BATCH_BYTES:
            batches.append(batch := [])
            size = 0
        batch.append(position)
        open_batches[tensor.dtype] = batch, size + tensor.nbytes
    return batches


def grouped_allreduce(
    tensors: Tensors,
    average: bool = True,
    name: str | None = None,
    *,
    op: str | None = None,
    out: Tensors | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> list[torch.Tensor]:
    """:func:`~shoal.allreduce` of several tensors at once, bit for bit.

    Args:
        tensors: As of single calls, of any shapes; as many, of the same shapes and dtypes in the same order, on all
            agents. Tensors of one dtype are sent as one, the dtypes one after the other.
        average, name, op, group, timeout: As of a single call.
        out: Take the results, one for each tensor.

    Raises:
        Mismatch: Agents' groups differ.
    """
    return grouped_allreduce_nonblocking(tensors, average, name, op=op, out=out, group=group, timeout=timeout).wait()


def grouped_allreduce_nonblocking(
    tensors: Tensors,
    average: bool = True,
    name: str | None = None,
    *,
    op: str | None = None,
    out: Tensors | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> Handle[list[torch.Tensor]]:
    """As :func:`shoal.grouped_allreduce`, without waiting. The tensors are copied now; ``out`` must not be touched."""
    how = op if op is not None else ("average" if average else "sum")
    called, agent = "grouped_allreduce", current("grouped_allreduce")
    members = caller_group(called, group, agent)
    bundle = _Bundle(agent.engine.layout_exchange, called, tensors, out, reducible(how))
    joined = bundle.joined(agent.engine.pool)

    def steps(operation: Operation) -> Steps[Any]:
        group, found = operation.callers(agent.size), []
        for flat in joined:
            mean = yield from reduced(agent, operation, flat, how, group, None, False, bundle.digest, owned=True)
            found.append(mean)
        return found if len(found) > 1 else found[0]  # one tensor can be sent to others after a loss

    channel, named = members.channel(called, name), name is not None
    take = torch.clone if len(joined) == 1 and members is ALL else None
    return bundle.of_joined(
        submit_to_all(agent.engine, f"{called} ({how})", channel, steps, timeout, named, take, among=members.ranks)
    )


def grouped_neighbor_allreduce(
    tensors: Tensors,
    self_weight: float | str | None = None,
    src_weights: Weights | None = None,
    dst_weights: Weights | Iterable[int] | None = None,
    *,
    enable_topo_check: bool = True,
    compression: Compressor | None = None,
    name: str | None = None,
    out: Tensors | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> list[torch.Tensor]:
    """:func:`~shoal.neighbor_allreduce` of several tensors at once, bit for bit; compressed, they are one vector.

    Args:
        tensors, out: As of :func:`grouped_allreduce`; the same on both sides of an edge.
        self_weight, src_weights, dst_weights, enable_topo_check, compression, name, group, timeout: As of single calls.

    Raises:
        Mismatch: The groups of two neighbours differ.
    """
    return grouped_neighbor_allreduce_nonblocking(
        tensors,
        self_weight,
        src_weights,
        dst_weights,
        enable_topo_check=enable_topo_check,
        compression=compression,
        name=name,
        out=out,
        group=group,
        timeout=timeout,
    ).wait()


def grouped_neighbor_allreduce_nonblocking(
    tensors: Tensors,
    self_weight: float | str | None = None,
    src_weights: Weights | None = None,
    dst_weights: Weights | Iterable[int] | None = None,
    *,
    enable_topo_check: bool = True,
    compression: Compressor | None = None,
    name: str | None = None,
    out: Tensors | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> Handle[list[torch.Tensor]]:
    """As :func:`shoal.grouped_neighbor_allreduce`, without waiting. The tensors are copied now; leave ``out`` alone."""
    called, agent = "grouped_neighbor_allreduce", current("grouped_neighbor_allreduce")
    members = caller_group(called, group, agent)
    self_weight, name = split_name(called, self_weight, name)
    mixing, form = mixing_of(agent, self_weight, src_weights, dst_weights)
    bundle = _Bundle(agent.engine.layout_exchange, called, tensors, out, WEIGHABLE)
    joined = bundle.joined(agent.engine.pool)
    encoded = [
        None if compression is None else encoded_by_call(called, flat, compression, agent.rank, number)
        for number, flat in enumerate(joined)
    ]
    plan = plan_of(agent, called, name, mixing, form, enable_topo_check, False, members)
    averages: list[torch.Tensor] = []

    def steps(operation: Operation) -> Steps[list[torch.Tensor]]:
        edges = plan.edges(agent, operation, None)
        # After a loss the steps may begin again within a stage. The messages of earlier stages do not come again, so
        # their averages stay; but not in a restart among the survivors, which begins with the first stage.
        found = [] if operation.restarts else averages
        for flat, of_call in zip(joined[len(found) :], encoded[len(found) :], strict=True):
            message = None if of_call is None else of_call(operation)
            average = yield from mix_steps(
                agent,
                operation,
                flat,
                edges,
                None,
                checked=enable_topo_check,
                encoded=message,
                layout=bundle.digest,
            )
            found.append(average)
        return found

    return bundle.of_joined(submit_planned(agent, called, plan, steps, timeout, name is not None, members.ranks))


def grouped_broadcast(
    tensors: Tensors,
    root_rank: int,
    name: str | None = None,
    *,
    out: Tensors | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> list[torch.Tensor]:
    """The tensors of ``root_rank``, on every agent: :func:`~shoal.broadcast` of several at once, of whatever dtypes.

    Args:
        tensors: On the other agents they only say shapes and dtypes, which must be those of the root's.
        root_rank, name, group, timeout: As of a single call.
        out: Take the results, one for each tensor; ``tensors`` itself for those to change in place.

    Raises:
        Mismatch: Agents' groups, or roots, differ.
    """
    return grouped_broadcast_nonblocking(tensors, root_rank, name, out=out, group=group, timeout=timeout).wait()


def grouped_broadcast_nonblocking(
    tensors: Tensors,
    root_rank: int,
    name: str | None = None,
    *,
    out: Tensors | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> Handle[list[torch.Tensor]]:
    """:func:`shoal.grouped_broadcast` without waiting."""
    called, agent = "grouped_broadcast", current("grouped_broadcast")
    root, members = as_root(called, root_rank, agent), caller_group(called, group, agent)
    members.check(called, "root_rank", [root])
    bundle = _Bundle(agent.engine.layout_exchange, called, tensors, out, MOVABLE)
    mine = torch.cat([_bytes(tensor) for tensor in bundle.tensors] or [torch.empty(0, dtype=torch.uint8, device="cpu")])

    def steps(operation: Operation) -> Steps[list[torch.Tensor]]:
        shape = tuple(mine.shape)
        data = yield from broadcast_steps(agent, operation, mine, root, torch.uint8, shape, layout=bundle.digest)
        return bundle.of_bytes(data)

    channel, named = members.channel(called, name), name is not None
    return bundle.of_list(submit_to_all(agent.engine, called, channel, steps, timeout, named, among=members.ranks))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, *, group: Group | None = None, timeout: float | None = None
) -> list[torch.Tensor]:
    """:func:`~shoal.allgather` of several tensors at once, of any dtypes.

    Args:
        tensors: As for single calls: their first dimensions may differ between agents, the others not.
        name, group, timeout: As of a single call.

    Returns:
        For each the tensors of all agents, joined along dimension 0 in rank order.

    Raises:
        Mismatch: Agents' groups differ in more than first dimensions.
    """
    return grouped_allgather_nonblocking(tensors, name, group=group, timeout=timeout).wait()


def grouped_allgather_nonblocking(
    tensors: Tensors, name: str | None = None, *, group: Group | None = None, timeout: float | None = None
) -> Handle[list[torch.Tensor]]:
    """:func:`shoal.grouped_allgather` without waiting."""
    called, agent = "grouped_allgather", current("grouped_allgather")
    members = caller_group(called, group, agent)
    bundle = _Bundle(agent.engine.layout_exchange, called, tensors, None, MOVABLE, first_may_differ=True)
    for tensor in bundle.tensors:
        check_gatherable(called, tensor)
    rests = [(tuple(tensor.shape[1:]), tensor.dtype) for tensor in bundle.tensors]
    row = [prod(rest) * dtype.itemsize for rest, dtype in rests]
    # The digest travels in the data: first dimensions may differ, so the exchange cannot compare shapes by itself.
    says = [bundle.digest, *(len(tensor) for tensor in bundle.tensors)]
    mine = torch.cat(
        [torch.tensor(says, device="cpu").view(torch.uint8), *(_bytes(tensor) for tensor in bundle.tensors)]
    )

    def parts(operation: Operation, rank: int, data: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """The data of one agent: for each tensor the number of rows, and the bytes."""
        head = 8 * len(says)
        header = data[:head].clone().view(torch.int64).tolist() if len(data) >= head else []
        # The counts come from another agent, and are checked below before the data is split by them.
        sizes = [rows * width for rows, width in zip(header[1:], row, strict=False)]
        if header[:1] != says[:1] or min(header[1:], default=0) < 0 or head + sum(sizes) != len(data):
            raise Mismatch(
                f"{operation}: rank {rank} and rank {agent.rank} have a different list of tensors (their number, "
                "dtypes, or dimensions but the first)",
                (rank, agent.rank),
            )
        return list(zip(header[1:], torch.split(data[head:], sizes), strict=True))

    def steps(operation: Operation) -> Steps[list[torch.Tensor]]:
        arrived = yield from complete_parts_of_all(agent, operation, mine)
        each = [parts(operation, rank, data.view(-1)) for rank, data in arrived.items()]
        found = []
        for like, (rest, dtype), pieces in zip(bundle.tensors, rests, zip(*each, strict=True), strict=True):
            rows, data = zip(*pieces, strict=True)
            found.append(on_device_of(like, torch.cat(data).view(dtype).view(sum(rows), *rest)))
        return found

    channel, named = members.channel(called, name), name is not None
    return bundle.of_list(submit_to_all(agent.engine, called, channel, steps, timeout, named, among=members.ranks))


class _Bundle:
    """The tensors of a call, and the destinations of their results.

    Attributes:
        digest: Of the properties that must be equal on all agents.
    """

    def __init__(
        self,
        layouts: LayoutExchange,
        op: str,
        tensors: object,
        out: object,
        dtypes: tuple[torch.dtype, ...],
        *,
        first_may_differ: bool = False,
    ) -> None:
        self._layouts = layouts
        listed = _listed(op, "tensors", tensors)
        self.tensors = [check_tensor(op, tensor if out is None else detached(tensor), dtypes) for tensor in listed]
        self._out = None if out is None else _listed(op, "out", out)
        if self._out is not None and len(self._out) != len(self.tensors):
            raise ValueError(
                f"{op}: {len(self._out)} tensors as out, for {len(self.tensors)} results; give one for each"
            )
        for tensor, place in zip(self.tensors, self._out or [], strict=False):
            check_out(op, place, tensor.shape, tensor.dtype)
        first = (-1,) if first_may_differ else ()
        self._layout = [(first + tuple(tensor.shape[len(first) :]), tensor.dtype) for tensor in self.tensors]
        # Joined vectors of different lists may have the same length. Without the digest numbers of different tensors
        # would be summed.
        self.digest = zlib.crc32(repr(self._layout).encode())
        self._dtypes = list(dict.fromkeys(tensor.dtype for tensor in self.tensors)) or [torch.float32]

    def joined(self, pool: ResultPool) -> list[torch.Tensor]:
        """Copies, ``[numel]``: one for each dtype."""
        found = []
        for dtype in self._dtypes:
            parts = [tensor.detach().reshape(-1).cpu() for tensor in self.tensors if tensor.dtype == dtype]
            flat = pool.empty((sum(map(torch.numel, parts)),), dtype)
            found.append(torch.cat(parts, out=flat) if parts else flat)
        return found

    def of_joined(self, handle: Handle[Any]) -> Handle[list[torch.Tensor]]:
        """The results, of an operation on those of :meth:`joined`, whose result is a list or the only one."""
        return self._handle(handle, self._apart)

    def of_list(self, handle: Handle[list[torch.Tensor]]) -> Handle[list[torch.Tensor]]:
        """The results, of an operation that gives them all."""
        return self._handle(handle, self._placed)

    def _handle(self, handle: Handle[Any], finish: Callable[[Any], list[torch.Tensor]]) -> Handle[list[torch.Tensor]]:
        self._layouts.keep(handle.operation, self._layout)
        return DerivedHandle(handle, finish, partial(self._explain, handle.operation))

    def _explain(self, operation: Operation, error: Mismatch) -> str:
        """The tensor that differs from another agent's in the error; else a description of the tensors here."""
        differs = self._layouts.difference(operation, self._layout, error.ranks)
        if differs:
            return differs
        shown, more = described(self._layout[:_SHOWN]), len(self._layout) - _SHOWN
        return f"The tensors here are {len(self._layout)}: {', '.join(shown)}" + (
            f" and {more} more" if more > 0 else ""
        )

    def _apart(self, found: list[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []
        found = [found] if isinstance(found, torch.Tensor) else found
        pieces = {
            dtype: iter(torch.split(flat, [tensor.numel() for tensor in self.tensors if tensor.dtype == dtype]))
            for dtype, flat in zip(self._dtypes, found, strict=True)
        }
        for tensor in self.tensors:
            results.append(next(pieces[tensor.dtype]).view(tensor.shape))
        # Clones: the results are views of one vector, and a small one that is kept would keep all of it.
        return self._placed(results if self._out is not None else [tensor.clone() for tensor in results])

    def of_bytes(self, data: torch.Tensor) -> list[torch.Tensor]:
        pieces = torch.split(data, [tensor.nbytes for tensor in self.tensors])
        # Clones, because a view as a wider dtype needs an aligned beginning, and the piece before may have any number
        # of bytes.
        return [
            piece.clone().view(tensor.dtype).view(tensor.shape)
            for tensor, piece in zip(self.tensors, pieces, strict=True)
        ]

    def _placed(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._out is None:
            return [on_device_of(like, result) for result, like in zip(results, self.tensors, strict=True)]
        for found, place in zip(results, self._out, strict=True):
            put(found, place)
        return list(self._out)


def _listed(op: str, argument: str, tensors: object) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"{op}: {argument} must be a list of tensors, not {type(tensors).__name__}")
    return list(tensors)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.numel() < 2:  # which may have any stride and count as contiguous
        flat = flat.as_strided(flat.shape, (1,))
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)
