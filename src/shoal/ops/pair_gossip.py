"""The average of two agents, in which no other agent takes part."""

from __future__ import annotations

import torch

from ..operations.operation import FailurePolicy, Handle, Operation
from ..operations.stage import Steps
from ..runtime.agent import current
from ..topology import Mixing
from .arguments import WEIGHABLE, channel_name, check_tensor
from .neighbor import mix_steps
from .round_plan import AgentEdges


def pair_gossip(
    tensor: torch.Tensor,
    target_rank: int,
    self_weight: float | None = None,
    pair_weight: float | None = None,
    name: str | None = None,
    *,
    timeout: float | None = None,
) -> torch.Tensor:
    """Average with one other agent; only the two take part. The result is detached.

    Both agents of the pair call it with each other's rank. Calls are counted for each pair separately.

    Args:
        tensor: As for :func:`neighbor_allreduce`.
        target_rank: The other agent.
        self_weight, pair_weight: ``self_weight x + pair_weight x_other``; the mean of the two if neither is given.
        name: Matches the calls of the two agents; unnamed calls match by their order.
        timeout: Seconds until the deadline.
    """
    return pair_gossip_nonblocking(tensor, target_rank, self_weight, pair_weight, name, timeout=timeout).wait()


def pair_gossip_nonblocking(
    tensor: torch.Tensor,
    target_rank: int,
    self_weight: float | None = None,
    pair_weight: float | None = None,
    name: str | None = None,
    *,
    timeout: float | None = None,
) -> Handle[torch.Tensor]:
    """:func:`pair_gossip` without waiting."""
    op = "pair_gossip"
    agent = current(op)
    tensor = check_tensor(op, tensor, WEIGHABLE)
    if (self_weight is None) != (pair_weight is None):
        raise ValueError(f"{op}: give both self_weight and pair_weight, or neither (the mean)")
    own, other = (0.5, 0.5) if self_weight is None or pair_weight is None else (self_weight, pair_weight)
    mixing = Mixing(agent.rank, own, {target_rank: other}, [target_rank], size=agent.size)
    low, high = sorted((agent.rank, int(target_rank)))
    channel = f"{channel_name(op, name)} of ranks {low} and {high}"
    edges = AgentEdges.of(agent, mixing, "push-pull", agent.topology, (low, high))

    def steps(operation: Operation) -> Steps[torch.Tensor]:
        return mix_steps(agent, operation, tensor, edges, None)

    return agent.engine.submit(op, channel, steps, timeout, name is not None, on_loss=FailurePolicy.SKIP_MISSING)
