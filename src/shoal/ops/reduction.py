"""Reductions over a group: the all-reduce, by one of several algorithms, and the reduce-scatter and all-gather in it.

Each number is reduced by one agent, its owner: all send it there, and the owner sends the result to all. With one owner
a tensor takes 2 (n - 1) messages, which is the least that there can be, and two hops. With as many owners as agents
each sends and receives 2 (n - 1) / n of a tensor, which is the least that there can be as well, in 2 n (n - 1)
messages: a reduce-scatter and an all-gather. Owners take the terms of a sum in one order (``arithmetic.py``), so the
bits do not depend on the choice of owners.

:func:`reduced` chooses the algorithm by the size of the tensor and the number of agents. Two agents send each other the
whole tensor: one hop, and as few bytes as any other algorithm. More have owners, few where a message costs more than
its bytes and as many as there are agents where it costs less: c messages' time is that of their bytes with the square
root of the bytes over what a message costs. Where several agents of each of several machines share its NIC, large
tensors go machine by machine.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from math import isqrt

import torch

from ..arithmetic import complete, machines_among, places_by_machine, reduce
from ..execution.operation import FailurePolicy, Handle, Operation
from ..execution.stage import MORE, Arrived, BackendRequest, Exchange, Send, Steps
from ..kernels.sums import copy, real
from ..runtime.agent import Agent
from ..transport.link import Published
from .arguments import LAYOUT, Result, channel_name, payload, rotated
from .backend_ops import members, reduced_by_backend, uses_backend

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
    yield from assemble(agent, None if share is None else share.data, arrived, owners, result.flat)
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


_TERMS, _RESULTS = 0, 1
"""The stages, from the first one of the reduction on."""


def shares(total: int, count: int) -> list[tuple[int, int]]:
    """``count`` nearly equal pieces of ``total`` elements, as (start, stop)."""
    return [(total * i // count, total * (i + 1) // count) for i in range(count)]


def shape_digest(shape: Sequence[int]) -> int:
    """Lets agents that hold different pieces of a tensor find out that their tensors differ in shape."""
    return zlib.crc32(repr(tuple(shape)).encode())


def reduced_by_owners(
    agent: Agent,
    operation: Operation,
    published: Published,
    shape: tuple[int, ...],
    how: str,
    group: Sequence[int],
    owners: Sequence[int],
    layout: int,
) -> Steps[tuple[Published | None, Arrived]]:
    """The reduction of the published tensors of all agents of ``group``: this agent's share, if it has one, and the
    others'.

    Args:
        operation: It may have passed other stages, as many on all agents.
        shape: The shape of the whole tensor.
        owners: Ranks of the group, ascending; each owns a share, as :func:`shares` cuts them.
        layout: Digest of the joined tensors, if it is made of several.
    """
    alone = len(owners) == 1
    digest = layout if alone else layout or shape_digest(shape)
    digest_of = LAYOUT if alone or layout else "shape"
    sends = terms_for(agent, published, shape, owners)
    first = operation.stages_passed
    if agent.rank not in owners:
        # One stage: the owners receive these messages in the first of their two stages.
        arrived = yield Exchange(
            sends,
            owners,
            published.data.dtype,
            shape if alone else None,
            digest=digest,
            digest_of=digest_of,
            stage=first + _RESULTS,
            stage_lead=_RESULTS - _TERMS,
        )
        return None, arrived
    start, stop = shares(published.data.numel(), len(owners))[owners.index(agent.rank)]
    part = shape if alone else (stop - start,)
    others = [rank for rank in group if rank != agent.rank]
    carried = BackendRequest(members(agent, operation, group)) if len(owners) == len(group) else None
    arrived = yield Exchange(
        sends,
        others,
        published.data.dtype,
        part,
        digest=digest,
        digest_of=digest_of,
        stage=first + _TERMS,
        carried=carried,
    )
    share = yield from share_of(agent, operation, published.data[start:stop], how, group, arrived)
    results = [Send(rank, share, 0, stop - start, part) for rank in others]
    arrived = yield Exchange(
        rotated(results, agent),
        [owner for owner in owners if owner != agent.rank],
        published.data.dtype,
        digest=digest,
        digest_of=digest_of,
        stage=first + _RESULTS,
        carried=carried,
    )
    return share, arrived


def terms_for(agent: Agent, published: Published, shape: tuple[int, ...], owners: Sequence[int]) -> list[Send]:
    """The sends of this agent's tensor to the owners."""
    total = published.data.numel()
    if len(owners) == 1:
        return [Send(owner, published, 0, total, shape) for owner in owners if owner != agent.rank]
    cut = zip(owners, shares(total, len(owners)), strict=True)
    sends = [
        Send(owner, published, start, stop, (stop - start,)) for owner, (start, stop) in cut if owner != agent.rank
    ]
    return rotated(sends, agent)


def share_of(
    agent: Agent, operation: Operation, own: torch.Tensor, how: str, group: Sequence[int], arrived: Arrived
) -> Steps[Published]:
    """The reduction of the received payloads and this agent's ``own``, in memory that others can read."""
    share = agent.engine.reserve(operation, own.numel(), own.dtype)
    payloads = [payload(arrived, rank) for rank in group if rank != agent.rank]
    parts = places_by_machine(agent, group, own.dtype)
    yield from reduce(share.data, how, own, group.index(agent.rank), payloads, parts)
    return share


def assemble(
    agent: Agent, share: torch.Tensor | None, arrived: Arrived, owners: Sequence[int], out: torch.Tensor
) -> Steps[None]:
    """Copy the shares of all owners to their places in ``out`` (flat), as they come."""
    if len(owners) == 1 and share is None:
        parts = [(out, payload(arrived, owners[0]))]
    else:
        parts = []
        for owner, (start, stop) in zip(owners, shares(out.numel(), len(owners)), strict=True):
            if owner != agent.rank:
                parts.append((out[start:stop], payload(arrived, owner)))
            elif share is not None:
                copy(out[start:stop], share)
    copied = [0] * len(parts)
    while True:
        for number, (place, source) in enumerate(parts):
            at, here = copied[number], source.available
            if here > at:
                copy(place[at:here], source.data[at:here])
                copied[number] = here
        if all(at == place.numel() for at, (place, _) in zip(copied, parts, strict=True)):
            return
        yield MORE


def reduced_by_machines(
    agent: Agent,
    operation: Operation,
    published: Published,
    shape: tuple[int, ...],
    how: str,
    here: Sequence[int],
    alike: Sequence[int],
    out: torch.Tensor,
    layout: int,
) -> Steps[None]:
    """Fill ``out`` (flat) with the reduction of the published tensors of agents on several machines, machine by
    machine.

    Within its machine each agent reduces a share, and then a share of that share with its counterparts on the other
    machines. With M machines, 2 (M - 1) / M of a tensor passes each way through the NIC of a machine, for any number of
    agents on it. With an owner for each agent it would be that number times as much.

    Args:
        shape: The shape of the whole tensor.
        here: The ranks on this machine.
        alike: The counterparts of this agent, one on each machine, in the order of machines.
        layout: Digest of the joined tensors, if it is made of several.
    """
    folded = "sum" if how == "average" else how
    share = yield from reduce_scatter(agent, operation, published, shape, folded, here, layout)
    part = yield from reduce_scatter(agent, operation, share, shape, folded, alike, layout)
    if how == "average":
        real(part.data).div_(len(here) * len(alike))
    whole = agent.engine.reserve(operation, share.data.numel(), share.data.dtype)
    yield from allgather_shares(agent, operation, part, whole.data, alike)
    yield from allgather_shares(agent, operation, whole, out, here)


def reduce_scatter(
    agent: Agent,
    operation: Operation,
    published: Published,
    shape: tuple[int, ...],
    how: str,
    group: Sequence[int],
    layout: int,
) -> Steps[Published]:
    """This agent's share of the reduction of what each agent of ``group`` published, where all are owners."""
    start, stop = shares(published.data.numel(), len(group))[group.index(agent.rank)]
    arrived = yield Exchange(
        terms_for(agent, published, shape, group),
        [rank for rank in group if rank != agent.rank],
        published.data.dtype,
        (stop - start,) if len(group) > 1 else None,
        digest=layout or shape_digest(shape),
        digest_of=LAYOUT if layout else "shape",
        carried=BackendRequest(members(agent, operation, group)),
    )
    return (yield from share_of(agent, operation, published.data[start:stop], how, group, arrived))


def allgather_shares(
    agent: Agent, operation: Operation, mine: Published, out: torch.Tensor, group: Sequence[int]
) -> Steps[None]:
    """Fill ``out`` (flat) with the shares of all agents of ``group``, where all are owners."""
    length = mine.data.numel()
    others = [rank for rank in group if rank != agent.rank]
    sends = [Send(rank, mine, 0, length, (length,)) for rank in others]
    carried = BackendRequest(members(agent, operation, group))
    arrived = yield Exchange(rotated(sends, agent), others, mine.data.dtype, carried=carried)
    yield from assemble(agent, mine.data, arrived, group, out)


def submit_shares(
    agent: Agent,
    share: torch.Tensor,
    whole: torch.Tensor,
    cut: Mapping[int, tuple[int, int]],
    name: str,
    layout: int,
) -> Handle[torch.Tensor]:
    """Start to copy the shares of several agents into a tensor, which must not be touched until the call has ended.

    Args:
        agent: The calling agent, one of them.
        share: The agent's own share, flat.
        whole: Flat, of the same dtype; it keeps its old values for an agent that is lost before it sent its share.
        cut: ``{rank: (start, stop)}``, the same on all of them.
        name: Matches the calls of different agents.
        layout: Digest of the joined tensors; all agents must have the same.
    """
    op = "allgather of shares"

    def steps(operation: Operation) -> Steps[torch.Tensor]:
        lengths = {rank: stop - start for rank, (start, stop) in cut.items()}
        # The agreed ranks: with its own view one agent would wait for a share that a lost agent never sent.
        others = [rank for rank in operation.left_of([*cut]) if rank != agent.rank]
        published = agent.engine.publish(operation, share)
        # An empty share is neither sent nor awaited: both ends leave it out by the same lengths, as cut is the same on
        # all.
        sends = [Send(rank, published, 0, share.numel(), (share.numel(),)) for rank in others if share.numel()]
        arrived = yield Exchange(
            rotated(sends, agent),
            [rank for rank in others if lengths[rank]],
            whole.dtype,
            # Agents that cut a tensor of the same length among other ranks would put shares in the wrong places.
            digest=shape_digest((*whole.shape, *cut)) ^ layout,
            digest_of="number of parameters, or agents on this machine" + (f", or {LAYOUT}" if layout else ""),
            carried=BackendRequest(members(agent, operation, sorted([agent.rank, *others]))),
        )
        there = {rank: payload(arrived, rank) for rank in arrived}
        # Before anything is copied: a share of which a part has arrived when its sender is lost must not mix with the
        # old values.
        yield from complete([*there.values()])
        for rank, part in [*((rank, received.data) for rank, received in there.items()), (agent.rank, share)]:
            start, stop = cut[rank]
            whole[start:stop].copy_(part)
        return whole

    return agent.engine.submit(op, channel_name(op, name), steps, on_loss=FailurePolicy.SKIP_MISSING)
