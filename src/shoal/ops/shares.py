"""Assembles a tensor on several agents, of which each holds a share."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..arithmetic import complete
from ..operations.operation import BackendRequest, Exchange, FailurePolicy, Handle, Operation, Send, Steps
from ..runtime.agent import Agent
from .arguments import LAYOUT, channel_name, payload, rotated
from .backend_ops import members
from .reduce_scatter import shape_digest

OP = "allgather of shares"


def submit_shares(
    agent: Agent,
    share: torch.Tensor,
    whole: torch.Tensor,
    cut: Mapping[int, tuple[int, int]],
    name: str,
    layout: int = 0,
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
        for rank, part in [*((rank, one.data) for rank, one in there.items()), (agent.rank, share)]:
            start, stop = cut[rank]
            whole[start:stop].copy_(part)
        return whole

    return agent.engine.submit(OP, channel_name(OP, name), steps, on_loss=FailurePolicy.SKIP_MISSING)
