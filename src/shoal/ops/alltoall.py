"""A tensor of its own for each neighbour."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..arithmetic import complete
from ..engine.operation import Exchange, Operation, Send, Steps
from ..world.agent import current
from .arguments import Result, as_ranks, channel_name, check_gatherable, payload


def neighbor_alltoall(
    tensor: torch.Tensor, ranks: Sequence[int], name: str | None = None, *, timeout: float | None = None
) -> torch.Tensor:
    """Send each of some agents a row, and receive a row from each of them.

    Args:
        tensor: ``[len(ranks), ...]``: row k goes to ``ranks[k]``. Any dtype; rows of equal shape on both sides.
        ranks: With whom: any ranks, each once. Both agents of a link name each other.
        name: What calls are matched by; unnamed calls match by their order.
        timeout: Seconds until :class:`~shoal.DeadlineExceeded`.

    Returns:
        The same shape: row k is what ``ranks[k]`` sent to this agent.

    Raises:
        ValueError: Not a row for each rank, or ranks that are not others.
        Mismatch: A neighbour sends rows of another shape or dtype.
        PeerLost, DeadlineExceeded: Agents are gone, or did not come in time.
    """
    op = "neighbor_alltoall"
    agent = current(op)
    tensor = check_gatherable(op, tensor)
    order = as_ranks(op, "ranks", ranks, agent.rank, agent.size)
    if len(order) != len(tensor):
        raise ValueError(f"{op}: {len(tensor)} rows for {len(order)} ranks; give a row for each")
    row = tuple(tensor.shape[1:])

    def steps(operation: Operation) -> Steps[torch.Tensor]:
        published = agent.engine.publisher.publish(operation, tensor)
        length = tensor[0].numel() if len(order) else 0
        ahead = sorted(range(len(order)), key=lambda k: (order[k] - agent.rank) % agent.size)
        sends = [Send(order[k], published, k * length, (k + 1) * length, row) for k in ahead]
        arrived = yield Exchange(sends, sorted(order), tensor.dtype, row)
        result = Result(agent, None, tensor, tuple(tensor.shape))
        payloads = [payload(arrived, rank) for rank in order]
        yield from complete(payloads)
        for k, one in enumerate(payloads):
            result.flat[k * length : (k + 1) * length].copy_(one.data)
        return result.finish()

    return agent.engine.submit(op, channel_name(op, name), steps, timeout, name is not None).wait()
