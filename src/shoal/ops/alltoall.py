"""A tensor of its own for each neighbour."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..arithmetic import complete
from ..engine.operation import Carried, Exchange, Handle, OnLoss, Operation, Send, Steps
from ..errors import PeerLost
from ..world.agent import Agent, current
from .arguments import Result, as_ranks, channel_name, check_gatherable, payload

OP = "neighbor_alltoall"


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
        PeerLost: Agents are gone. With ``on_loss="continue"`` only where one of ``ranks`` is.
        DeadlineExceeded: They did not come in time.
    """
    return submit(current(OP), tensor, ranks, name, timeout=timeout).wait()


def submit(
    agent: Agent,
    tensor: torch.Tensor,
    ranks: Sequence[int],
    name: str | None = None,
    *,
    timeout: float | None = None,
    own_for_lost: bool = False,
    everybody: bool = False,
) -> Handle[torch.Tensor]:
    """Begin it, for the public function and the algorithms.

    Args:
        own_for_lost: The row of a rank that is gone is what this agent had for it; else that is an error.
        everybody: All agents call it, each with its own.
    """
    tensor = check_gatherable(OP, tensor)
    order = as_ranks(OP, "ranks", ranks, agent.rank, agent.size)
    if len(order) != len(tensor):
        raise ValueError(f"{OP}: {len(tensor)} rows for {len(order)} ranks; give a row for each")
    row = tuple(tensor.shape[1:])

    def steps(operation: Operation) -> Steps[torch.Tensor]:
        published = agent.engine.publisher.publish(operation, tensor)
        length = tensor[0].numel() if len(order) else 0
        left = [k for k, rank in enumerate(order) if rank not in operation.gone]
        ahead = sorted(left, key=lambda k: (order[k] - agent.rank) % agent.size)
        sends = [Send(order[k], published, k * length, (k + 1) * length, row) for k in ahead]
        carried = Carried(() if everybody else None, confirm=True)
        arrived = yield Exchange(sends, sorted(order[k] for k in left), tensor.dtype, row, carried=carried)
        lost = sorted(set(order).difference(arrived))
        if lost and not own_for_lost:  # by now the others have their rows
            raise PeerLost(f"{operation} on rank {agent.rank}: ranks {lost} are gone, and have sent no rows", lost)
        result = Result(agent, None, tensor, tuple(tensor.shape))
        there = [(k, payload(arrived, rank)) for k, rank in enumerate(order) if rank in arrived]
        yield from complete([one for _, one in there])
        if lost:
            result.flat.copy_(published.data)
        for k, one in there:
            result.flat[k * length : (k + 1) * length].copy_(one.data)
        return result.finish()

    return agent.engine.submit(OP, channel_name(OP, name), steps, timeout, name is not None, on_loss=OnLoss.GO_ON)
