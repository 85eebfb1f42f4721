"""Collectives of a backend that moves tensors, instead of exchanges on whose every edge agents would have to agree.

Small tensors are gathered and reduced here in the usual order, with the same bits as over links. The backend sums large
tensors itself, in an order of its own that is the same on all agents, because it is fast at that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..arithmetic import places_by_machine, reduce
from ..execution.operation import Operation
from ..execution.stage import BackendRequest, Exchange, Steps
from ..runtime.agent import Agent
from ..transport.messages import Payload
from ..transport.process_group import REDUCED, Collective
from .arguments import LAYOUT, Result

GATHERED_BYTES = 1 << 16
"""The most that an agent receives if all agents get all tensors."""


def uses_backend(agent: Agent, tensor: torch.Tensor, group: Sequence[int]) -> bool:
    """An engine carries tensors, and has such a reduction."""
    if agent.engine.backend is None or len(group) == 1:
        return False
    return tensor.nbytes * (len(group) - 1) <= GATHERED_BYTES or tensor.dtype in REDUCED


def members(agent: Agent, operation: Operation, group: Sequence[int]) -> tuple[int, ...]:
    """The ranks of a group's exchange, in the format of :class:`~shoal.execution.stage.BackendRequest`."""
    everybody = len(group) == len(operation.left_of(range(agent.size)))
    return () if everybody else tuple(group)


def reduced_by_backend(
    agent: Agent,
    operation: Operation,
    tensor: torch.Tensor,
    how: str,
    group: tuple[int, ...],
    out: torch.Tensor | None,
    layout: int,
    owned: bool,
) -> Steps[torch.Tensor]:
    """The reduction of the tensors of a group, on each of it; as :func:`~.reduction.reduced`."""
    shape, pool = tuple(tensor.shape), agent.engine.pool
    spoiled = agent.engine.problem(operation, tensor)
    if spoiled is not None:
        raise spoiled
    result = Result(agent, out, tensor, shape)
    properties = _properties(f"{how} of {_name(tensor.dtype)}, shape {list(shape)}", layout)
    among = members(agent, operation, group)
    if operation.recovery is not None:  # it may restart, and needs its input
        tensor, owned = agent.engine.publish(operation, tensor).data.view(shape), False
    others = [rank for rank in group if rank != agent.rank]
    if tensor.nbytes * len(others) <= GATHERED_BYTES:
        data = tensor.view(-1) if owned else pool.empty(shape, tensor.dtype).copy_(tensor.detach()).view(-1)
        into = {rank: pool.empty((data.numel(),), data.dtype) for rank in others}
        yield Exchange((), (), carried=BackendRequest(among, Collective("gather", data, group, into=into), properties))
        payloads = [Payload(into[rank], data.numel()) for rank in others]
        parts = places_by_machine(agent, group, tensor.dtype)
        yield from reduce(result.flat, how, data, group.index(agent.rank), payloads, parts)
        return result.finish()
    # The backend works in place: use a copy if the caller could otherwise see a partial result.
    data = result.flat if out is None else pool.empty((result.flat.numel(),), tensor.dtype)
    if owned:
        data = tensor.view(-1)
    else:
        data.view(shape).copy_(tensor.detach())
    collective = Collective("allreduce", data, group, "sum" if how == "average" else how)
    yield Exchange((), (), carried=BackendRequest(among, collective, properties))
    if owned and out is None:
        return data.div_(len(group)) if how == "average" else data
    if how == "average":
        torch.div(data, len(group), out=result.flat)
    elif data is not result.flat:
        result.flat.copy_(data)
    return result.finish()


def broadcast_by_backend(
    agent: Agent,
    operation: Operation,
    tensor: torch.Tensor | None,
    root: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    group: tuple[int, ...],
    layout: int,
) -> Steps[torch.Tensor]:
    """The root's tensor, flat, on all; as :func:`~.collective.broadcast_steps`."""
    data = agent.engine.result_memory(shape, dtype)
    if agent.rank == root:
        assert tensor is not None
        spoiled = agent.engine.problem(operation, tensor)
        if spoiled is not None:
            raise spoiled
        data.copy_(tensor.detach())
    properties = _properties(f"tensor of root rank {root}, {_name(dtype)}, shape {list(shape)}", layout)
    flat = data.view(-1)
    if flat.numel():
        yield Exchange(
            (),
            (),
            carried=BackendRequest(
                members(agent, operation, group), Collective("broadcast", flat, group, root=root), properties
            ),
        )
    return flat


def _properties(properties: str, layout: int) -> str:
    """A readable description of all that must be equal on all agents."""
    return f"{properties}; {LAYOUT} {layout:08x}" if layout else properties


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
