"""A weighted average of tensors that stay on their device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from ..arithmetic import complete
from ..execution.devices import PublishedOnDevice
from ..execution.stage import Steps, await_future
from ..kernels.sums import weighted_sum
from ..runtime.agent import Agent
from ..transport.messages import Message
from .arguments import Result


def average(
    agent: Agent,
    published: PublishedOnDevice,
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    own_weight: float,
    arrived: Sequence[tuple[int, Message]],
    weights: Sequence[float],
) -> Steps[torch.Tensor]:
    """``own_weight * own + sum of weight * payload``; ends when it is there.

    Args:
        published: This agent's tensor.
        out: Takes the result; a new tensor of ``shape`` if not given.
        arrived: The tensors of the neighbours, by ascending rank.
        weights: One for each of them.
    """
    payloads = [(rank, message.payload) for rank, message in arrived if message.payload is not None]
    yield from complete([payload for _, payload in payloads])
    sums = published.place.sums
    with sums.stream.working():
        theirs = [_brought(published.data, rank, payload.data) for rank, payload in payloads]
        result = Result(agent, out, published.data, shape, on_device=True)
        weighted_sum(result.flat, published.data, own_weight, theirs, weights)
        found = result.finish()
    queued = sums.queued()
    try:
        yield from await_future(queued)
    except GeneratorExit:  # it was abandoned: waiting here would block with the device
        with suppress(RuntimeError):  # an error of the device, which then does nothing more
            published.caller.after(sums.stream)  # the memory that it uses is the caller's only after it
        raise
    published.caller.uses(found)
    return found


def _brought(like: torch.Tensor, rank: int, data: torch.Tensor) -> torch.Tensor:
    """A neighbour's numbers, on this agent's device."""
    if data.is_meta:
        raise RuntimeError(
            f"the memory of rank {rank}'s device cannot be mapped here (the log says why); without "
            "SHOAL_DEVICE_MEMORY=1 tensors go through the CPU"
        )
    return data if data.device == like.device else torch.empty_like(like).copy_(data)
