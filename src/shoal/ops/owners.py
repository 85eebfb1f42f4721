"""Each number is reduced by one agent, its owner: all send it there, and the owner sends the result to all.

With one owner a tensor takes 2 (n - 1) messages, which is the least that there can be, and two hops. With as many
owners as agents each sends and receives 2 (n - 1) / n of a tensor, which is the least that there can be as well, in
2 n (n - 1) messages: a reduce-scatter and an all-gather. ``allreduce.py`` says how many there are. Owners take the
terms of a sum in rank order, so the bits do not depend on who they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from ..arithmetic import reduce
from ..engine.operation import MORE, Exchange, Operation, Send, Steps
from ..transport.link import Published
from ..transport.wire import Payload
from ..world.agent import Agent
from .arguments import LAYOUT, payload, rotated


def shares(total: int, count: int) -> list[tuple[int, int]]:
    """``count`` nearly equal pieces of ``total`` elements, as (start, stop)."""
    return [(total * i // count, total * (i + 1) // count) for i in range(count)]


def shape_digest(shape: Sequence[int]) -> int:
    """Lets agents that hold different pieces of a tensor find out that their tensors differ in shape."""
    return zlib.crc32(repr(tuple(shape)).encode())


def reduce_at_owners(
    agent: Agent,
    operation: Operation,
    published: Published,
    shape: tuple[int, ...],
    how: str,
    group: Sequence[int],
    owners: Sequence[int],
    layout: int = 0,
) -> Steps[Published | None]:
    """This agent's share of the reduction of what each agent of ``group`` published, flat; None if it owns none.

    Args:
        shape: Of the whole tensor.
        owners: Ranks of the group, ascending; each owns a share, as :func:`shares` cuts them.
        layout: Of the tensors that are joined in it, where it is of several.
    """
    data = published.data
    cut = shares(data.numel(), len(owners))
    of = [shape if len(owners) == 1 else (stop - start,) for start, stop in cut]
    sends = [
        Send(owner, published, start, stop, part)
        for owner, (start, stop), part in zip(owners, cut, of, strict=True)
        if owner != agent.rank
    ]
    mine = owners.index(agent.rank) if agent.rank in owners else -1
    others = [rank for rank in group if rank != agent.rank] if mine >= 0 else []
    arrived = yield Exchange(
        rotated(sends, agent),
        others,
        data.dtype,
        of[mine],
        digest=layout or shape_digest(shape),
        digest_of=LAYOUT if layout else "shape",
    )
    if mine < 0:
        return None
    start, stop = cut[mine]
    share = agent.engine.publisher.room(operation, stop - start, data.dtype)
    position, payloads = group.index(agent.rank), [payload(arrived, rank) for rank in others]
    yield from reduce(share.data, how, data[start:stop], position, payloads)
    return share


def gather_from_owners(
    agent: Agent, share: Published | None, out: torch.Tensor, group: Sequence[int], owners: Sequence[int]
) -> Steps[None]:
    """Fill ``out`` (flat) with the shares of all owners. Owners give the one that they have."""
    cut = dict(zip(owners, shares(out.numel(), len(owners)), strict=True))
    sends = []
    if share is not None:
        total = share.data.numel()
        sends = [Send(rank, share, 0, total, (total,)) for rank in group if rank != agent.rank]
    others = [owner for owner in owners if owner != agent.rank]
    arrived = yield Exchange(rotated(sends, agent), others, out.dtype)
    if share is not None:
        start, stop = cut[agent.rank]
        out[start:stop].copy_(share.data)
    parts = [(out[slice(*cut[owner])], payload(arrived, owner)) for owner in others]
    yield from copy_as_they_come(parts)


def copy_as_they_come(parts: list[tuple[torch.Tensor, Payload]]) -> Steps[None]:
    """Copy each payload to its place, whichever comes first."""
    while True:
        for place, source in parts:
            if source.complete:
                place.copy_(source.data)
        parts = [(place, source) for place, source in parts if not source.complete]
        if not parts:
            return
        yield MORE


def reduce_scatter(
    agent: Agent, operation: Operation, published: Published, shape: tuple[int, ...], how: str, group: Sequence[int]
) -> Steps[torch.Tensor]:
    """This agent's share of the reduction of what each agent of ``group`` published, where all are owners."""
    share = yield from reduce_at_owners(agent, operation, published, shape, how, group, group)
    assert share is not None
    return share.data


def allgather_shares(
    agent: Agent, operation: Operation, mine: torch.Tensor, out: torch.Tensor, group: Sequence[int]
) -> Steps[None]:
    """Fill ``out`` (flat) with the shares of all agents of ``group``, where all are owners."""
    yield from gather_from_owners(agent, agent.engine.publisher.publish(operation, mine), out, group, group)
