"""Gathering and exchange of tensors as they are: ``neighbor_allgather``, ``neighbor_alltoall`` and ``alltoall``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import prod

import torch

from ..arithmetic import complete
from ..errors import PeerLost
from ..execution.operation import FailurePolicy, Handle, Operation
from ..execution.stage import BackendRequest, Exchange, Send, Steps
from ..kernels.sums import copy
from ..runtime.agent import Agent, current
from ..topology._validate import as_int
from ..transport.messages import Kind, Message, Payload
from .arguments import (
    LAYOUT,
    Group,
    Result,
    as_ranks,
    caller_group,
    channel_name,
    check_gatherable,
    joined,
    payload,
    rotated,
)
from .backend_ops import members as members_of


def neighbor_allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    src_ranks: Iterable[int] | None = None,
    dst_ranks: Iterable[int] | None = None,
    enable_topo_check: bool = True,
    group: Group | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """The tensors of this agent's in-neighbours, joined along dimension 0; its own is not among them.

    Args:
        tensor: Any dtype, at least one dimension. The first dimension may differ between agents, the others not.
        name: Matches the calls of different agents; unnamed calls match by their order.
        src_ranks: With ``dst_ranks``: the ranks to receive from, any ranks; the result is in the order given here.
        dst_ranks: With ``src_ranks``: the ranks to send to.
        enable_topo_check: Confirm on each edge that both sides know of it.
        group: Among these ranks only; as for :func:`~shoal.neighbor_allreduce`.
        timeout: Seconds until the deadline.

    Returns:
        Shape ``[sum of the first dimensions, ...]``; in ascending order of rank on the static topology. Without any
        source, ``[0, ...]``.
    """
    return neighbor_allgather_nonblocking(
        tensor,
        name,
        src_ranks=src_ranks,
        dst_ranks=dst_ranks,
        enable_topo_check=enable_topo_check,
        group=group,
        timeout=timeout,
    ).wait()


def neighbor_allgather_nonblocking(
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    src_ranks: Iterable[int] | None = None,
    dst_ranks: Iterable[int] | None = None,
    enable_topo_check: bool = True,
    group: Group | None = None,
    timeout: float | None = None,
) -> Handle[torch.Tensor]:
    """:func:`shoal.neighbor_allgather` without waiting."""
    op = "neighbor_allgather"
    agent = current(op)
    tensor = check_gatherable(op, tensor)
    if (src_ranks is None) != (dst_ranks is None):
        raise ValueError(f"{op}: give both src_ranks and dst_ranks (any ranks), or neither (the static topology)")
    static = agent.topology
    given: tuple[Sequence[int], Sequence[int]] | None = None
    if src_ranks is not None and dst_ranks is not None:
        given = (
            as_ranks(op, "src_ranks", src_ranks, agent.rank, agent.size),
            as_ranks(op, "dst_ranks", dst_ranks, agent.rank, agent.size),
        )

    members = caller_group(op, group, agent)
    rest = members.rest(agent.size)
    for argument, ranks in zip(("src_ranks", "dst_ranks"), given or (), strict=False):
        members.check(op, argument, ranks)

    def steps(operation: Operation) -> Steps[torch.Tensor]:
        engine = agent.engine
        published = engine.publish(operation, tensor)
        shape, total = tuple(tensor.shape), published.data.numel()
        now = static.without(tuple(sorted({*operation.excluded_ranks, *rest})))
        sources, targets = given or (now.mixing.source_ranks, now.mixing.destination_ranks)
        sends = rotated([Send(rank, published, 0, total, shape) for rank in targets], agent)
        digest, checked = (0, enable_topo_check) if given else (now.digest, False)
        among = None if given else now.component(operation.left_of(range(agent.size)))
        carried = BackendRequest(among, properties="" if given else f"topology {digest:08x}", confirm=given is not None)
        arrived = yield Exchange(
            sends,
            sorted(sources),
            tensor.dtype,
            rest=shape[1:],
            checked=checked,
            digest=digest,
            carried=carried,
        )
        return (yield from joined(agent, tensor, [(rank, arrived[rank]) for rank in sources if rank in arrived]))

    channel, named = members.channel(op, name), name is not None
    return agent.engine.submit(
        op, channel, steps, timeout, named, on_loss=FailurePolicy.SKIP_MISSING, among=members.ranks
    )


ALLTOALL = "neighbor_alltoall"


def neighbor_alltoall(
    tensor: torch.Tensor, ranks: Sequence[int], name: str | None = None, *, timeout: float | None = None
) -> torch.Tensor:
    """Send each of some agents a row, and receive a row from each of them.

    Args:
        tensor: ``[len(ranks), ...]``: row k goes to ``ranks[k]``. Any dtype; rows of equal shape on both sides.
        ranks: The ranks to exchange rows with: any ranks, each once. Both agents of a link name each other.
        name: Matches the calls of different agents; unnamed calls match by their order.
        timeout: Seconds until :class:`~shoal.DeadlineExceeded`.

    Returns:
        A tensor of the same shape: row k is the row that ``ranks[k]`` sent to this agent.

    Raises:
        ValueError: The number of rows differs from the number of ranks, or a rank is not another agent's.
        Mismatch: A neighbour sends rows of another shape or dtype.
        PeerLost: Agents are gone. With ``on_loss="continue"`` only if one of ``ranks`` is.
        DeadlineExceeded: Agents did not call in time.
    """
    return submit_alltoall(current(ALLTOALL), tensor, ranks, name, timeout=timeout).wait()


def submit_alltoall(
    agent: Agent,
    tensor: torch.Tensor,
    ranks: Sequence[int],
    name: str | None = None,
    *,
    timeout: float | None = None,
    own_for_lost: bool = False,
    everybody: bool = False,
    layout: int = 0,
) -> Handle[torch.Tensor]:
    """Start the exchange, for the public function and the algorithms.

    Args:
        own_for_lost: The row of a lost rank is this agent's own row for it; else a lost rank is an error.
        everybody: All agents call it, each with its own.
        layout: Digest of the composition of the rows; all agents must have the same.
    """
    tensor = check_gatherable(ALLTOALL, tensor)
    order = as_ranks(ALLTOALL, "ranks", ranks, agent.rank, agent.size)
    if len(order) != len(tensor):
        raise ValueError(f"{ALLTOALL}: {len(tensor)} rows for {len(order)} ranks; give a row for each")
    row = tuple(tensor.shape[1:])

    def steps(operation: Operation) -> Steps[torch.Tensor]:
        published = agent.engine.publish(operation, tensor)
        length = tensor[0].numel() if len(order) else 0
        present = [k for k, rank in enumerate(order) if rank not in operation.excluded_ranks]
        ahead = sorted(present, key=lambda k: (order[k] - agent.rank) % agent.size)
        sends = [Send(order[k], published, k * length, (k + 1) * length, row) for k in ahead]
        carried = BackendRequest(() if everybody else None, confirm=True)
        sources = sorted(order[k] for k in present)
        arrived = yield Exchange(sends, sources, tensor.dtype, row, digest=layout, digest_of=LAYOUT, carried=carried)
        lost = sorted(set(order).difference(arrived))
        if lost and not own_for_lost:  # by now the others have their rows
            raise PeerLost(f"{operation} on rank {agent.rank}: ranks {lost} are gone, and have sent no rows", lost)
        result = Result(agent, None, tensor, tuple(tensor.shape))
        there = [(k, payload(arrived, rank)) for k, rank in enumerate(order) if rank in arrived]
        yield from complete([row_payload for _, row_payload in there])
        if lost:
            result.flat.copy_(published.data)
        for k, row_payload in there:
            copy(result.flat[k * length : (k + 1) * length], row_payload.data)
        return result.finish()

    return agent.engine.submit(
        ALLTOALL, channel_name(ALLTOALL, name), steps, timeout, name is not None, on_loss=FailurePolicy.SKIP_MISSING
    )


def alltoall_nonblocking(
    tensor: torch.Tensor,
    splits: Iterable[int] | torch.Tensor | None = None,
    name: str | None = None,
    *,
    group: Group | None = None,
    timeout: float | None = None,
) -> Handle[tuple[torch.Tensor, list[int]]]:
    """Send every agent rows of its own, and receive rows from each, all at once.

    Args:
        tensor: Any dtype, at least one dimension; all but the first are equal on all agents.
        splits: How many rows go to each agent, in the order of ranks; equally many, if not given.
        name: Matches the calls of different agents; unnamed calls match by their order.
        group: Among these ranks only; as for :func:`~shoal.allreduce`.
        timeout: Seconds until the deadline.

    Returns:
        A handle of the rows of all, in the order of ranks, and the number of rows from each.

    Raises:
        ValueError: The splits do not cover every row.
        Mismatch: Agents' tensors differ in more than their first dimension.
    """
    op, agent = "alltoall", current("alltoall")
    members = caller_group(op, group, agent)
    ranks = members.ranks or tuple(range(agent.size))
    tensor = check_gatherable(op, tensor)
    ends = [0, *accumulate(_rows(op, agent.rank, len(tensor), len(ranks), splits))]
    rest = tuple(tensor.shape[1:])
    parts = {rank: (low, high) for rank, (low, high) in zip(ranks, pairwise(ends), strict=True)}

    def steps(operation: Operation) -> Steps[tuple[torch.Tensor, list[int]]]:
        published, row = agent.engine.publish(operation, tensor), prod(rest)
        others = [rank for rank in operation.callers(agent.size) if rank != agent.rank]
        sends = [
            Send(rank, published, low * row, high * row, (high - low, *rest))
            for rank, (low, high) in parts.items()
            if rank in others
        ]
        carried = BackendRequest(members_of(agent, operation, ranks))
        arrived = yield Exchange(rotated(sends, agent), others, tensor.dtype, rest=rest, carried=carried)
        low, high = parts[agent.rank]
        mine = Payload(published.data[low * row : high * row], (high - low) * row)
        own = Message(Kind.DATA, dtype=tensor.dtype, shape=(high - low, *rest), payload=mine)
        came = [
            (rank, own if rank == agent.rank else arrived[rank])
            for rank in ranks
            if rank not in operation.excluded_ranks
        ]
        whole = yield from joined(agent, tensor, came)
        return whole, [message.shape[0] for _, message in came]

    channel, named = members.channel(op, name), name is not None
    return agent.engine.submit(op, channel, steps, timeout, named, on_loss=FailurePolicy.FAIL, among=members.ranks)


def _rows(op: str, rank: int, rows: int, count: int, splits: object) -> list[int]:
    """How many rows go to each."""
    if splits is None:
        if rows % count:
            raise ValueError(
                f"{op} on rank {rank}: {rows} rows are not equally many for each of {count} agents; give splits"
            )
        return [rows // count] * count
    if isinstance(splits, torch.Tensor):
        splits = splits.tolist()
    if not isinstance(splits, Iterable) or isinstance(splits, (str, bytes)):
        raise TypeError(f"{op}: splits must be a list of whole numbers, or a tensor of them, not {splits!r}")
    found = [as_int(split, "splits") for split in splits]
    if len(found) != count or min(found) < 0 or sum(found) != rows:
        raise ValueError(
            f"{op} on rank {rank}: splits={found}: it takes {count} numbers, one for each agent, none negative, whose "
            f"sum is the number of rows, {rows}"
        )
    return found
