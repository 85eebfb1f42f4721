"""Gathering the tensors of neighbours, each as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..operations.operation import BackendRequest, Exchange, FailurePolicy, Handle, Operation, Send, Steps
from ..runtime.agent import current
from .arguments import as_ranks, check_gatherable, joined, rotated
from .groups import Group, caller_group


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
    """:func:`neighbor_allgather` without waiting."""
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
        among = None if given else now.members(operation.left_of(range(agent.size)))
        carried = BackendRequest(among, what="" if given else f"topology {digest:08x}", confirm=given is not None)
        arrived = yield Exchange(sends, sorted(sources), tensor.dtype, checked=checked, digest=digest, carried=carried)
        return (yield from joined(agent, op, tensor, [(rank, arrived[rank]) for rank in sources if rank in arrived]))

    channel, named = members.channel(op, name), name is not None
    return agent.engine.submit(
        op, channel, steps, timeout, named, on_loss=FailurePolicy.SKIP_MISSING, among=members.ranks
    )
