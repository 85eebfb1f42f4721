"""The algorithm of an all-reduce, by the size of the tensor and the number of agents.

Two agents send each other the whole tensor: one hop, and as few bytes as any other algorithm. More have owners of its
numbers (``reduce_scatter.py``), few where a message costs more than its bytes and as many as there are agents where it
costs less: c messages' time is that of their bytes with the square root of the bytes over what a message costs. Where
several agents of each of several machines share its NIC, large tensors go machine by machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import torch

from ..arithmetic import machines_among, reduce
from ..operations.operation import BackendRequest, Exchange, Operation, Send, Steps
from ..runtime.agent import Agent
from ..transport.link import Published
from .arguments import LAYOUT, Result, payload
from .backend_ops import members, reduced_by_backend, uses_backend
from .reduce_scatter import put_together, reduced_by_machines, reduced_by_owners

MESSAGE_BYTES, FAR_MESSAGE_BYTES = 1 << 19, 1 << 13
"""What a message costs, in bytes that are summed in its time, on one machine and over a network of 1 Gbit/s. Measured
with ``benchmarks/allreduce.py`` on a machine of two cores; either may be wrong by a factor of four and cost little."""
BY_MACHINES_BYTES = 1 << 18
"""From which size on tensors go machine by machine, in four hops."""


def owners_of(agent: Agent, group: Sequence[int], nbytes: int) -> Sequence[int]:
    """The owners of the shares of a tensor: ranks of the group, equal on all agents and spread over the group."""
    size = len(group)
    if agent.engine.backend is not None:  # all go through as many stages
        return group
    if nbytes < 4 * FAR_MESSAGE_BYTES:
        return group[:1]
    transport_to = agent.engine.transport_to
    far = any(transport_to(rank) == "network" for rank in group)
    count = min(size, max(1, isqrt(nbytes // (FAR_MESSAGE_BYTES if far else MESSAGE_BYTES))))
    return [group[place * size // count] for place in range(count)]


def reduced(
    agent: Agent,
    operation: Operation,
    tensor: torch.Tensor,
    how: str,
    group: Sequence[int],
    out: torch.Tensor | None,
    zero_copy: bool,
    layout: int = 0,
    owned: bool = False,
) -> Steps[torch.Tensor]:
    """The reduction of the tensors of a group, on each of it.

    Args:
        zero_copy: Others read ``tensor`` in place, where they can.
        layout: Digest of the joined tensors, if it is made of several.
        owned: ``tensor`` has no other user, and may become the result.
    """
    if uses_backend(agent, tensor, group):
        return (yield from reduced_by_backend(agent, operation, tensor, how, tuple(group), out, layout, owned))
    publish = agent.engine.publish
    shape = tuple(tensor.shape)
    if len(group) <= 2:
        published = publish(operation, tensor, zero_copy=zero_copy)
        return (yield from _with_each_other(agent, operation, published, tensor, how, group, out, layout))
    machines = machines_among(agent, group, tensor.dtype) if tensor.nbytes >= BY_MACHINES_BYTES else ()
    if machines:
        here = next(ranks for ranks in machines if agent.rank in ranks)
        alike = [ranks[here.index(agent.rank)] for ranks in machines]
        published = publish(operation, tensor, zero_copy=zero_copy, pieces=len(here))
        result = Result(agent, out, tensor, shape)
        yield from reduced_by_machines(agent, operation, published, shape, how, here, alike, result.flat, layout)
        return result.finish()
    owners = owners_of(agent, group, tensor.numel() * tensor.element_size())
    published = publish(operation, tensor, zero_copy=zero_copy, pieces=len(owners))
    share, arrived = yield from reduced_by_owners(agent, operation, published, shape, how, group, owners, layout)
    result = Result(agent, out, tensor, shape)
    yield from put_together(agent, None if share is None else share.data, arrived, owners, result.flat)
    return result.finish()


def _with_each_other(
    agent: Agent,
    operation: Operation,
    published: Published,
    tensor: torch.Tensor,
    how: str,
    group: Sequence[int],
    out: torch.Tensor | None,
    layout: int,
) -> Steps[torch.Tensor]:
    """Every agent receives every agent's tensor, and reduces all of it."""
    shape, total = tuple(tensor.shape), published.data.numel()
    others = [rank for rank in group if rank != agent.rank]
    sends = [Send(rank, published, 0, total, shape) for rank in others]
    carried = BackendRequest(members(agent, operation, group)) if others else None
    arrived = yield Exchange(sends, others, tensor.dtype, shape, digest=layout, digest_of=LAYOUT, carried=carried)
    result = Result(agent, out, tensor, shape)
    payloads = [payload(arrived, rank) for rank in others]
    yield from reduce(result.flat, how, published.data, group.index(agent.rank), payloads)
    return result.finish()
