"""Requests to the owner of a window on another machine, which serves them (``owner_service.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from .. import clock
from ..engine.engine import Engine
from ..errors import Mismatch
from ..execution.operation import Handle, Operation
from ..execution.stage import MORE, Exchange, Send, Steps
from .window_memory import WindowLayout, WriteKind

LOCK, UNLOCK = "win_lock", "win_unlock"
NO_SHARE = float("inf")
"""The p of a write that leaves the associated weight of the slot as it is."""
PREFIX = "~window"
"""The prefix that distinguishes requests for windows from other messages."""


def channel_of(name: str) -> str:
    """The message name that identifies requests for a window."""
    return f"{PREFIX} {name}"


def name_of(channel: str) -> str:
    return channel.removeprefix(f"{PREFIX} ")


class Request(NamedTuple):
    """What is asked of some owners.

    Attributes:
        op: A :class:`WriteKind`, or to take or release the mutex.
        weights: The factor of the tensor and of ``share``, by owner.
        tensor: Flat; None if the request has none.
        share: The associated weight of the tensor; None without one.
    """

    op: str
    weights: Mapping[int, float]
    tensor: torch.Tensor | None = None
    share: float | None = None


def ask(
    engine: Engine, name: str, number: int, layout: WindowLayout, request: Request, deadline: float
) -> Handle[dict[int, torch.Tensor]]:
    """Send a request to the owners. The result is each owner's reply: a flat tensor for a get.

    Args:
        engine: This agent's engine.
        name: The name of the window.
        number: Distinguishes the window from freed ones of the same name.
        layout: The layout of the window here; its shape and dtype are those of all agents.
        request: The request.
        deadline: In seconds of ``clock.monotonic()``.
    """
    op, weights, tensor, share = request

    def steps(operation: Operation) -> Steps[dict[int, torch.Tensor]]:
        flat = torch.empty(0, device="cpu") if tensor is None else tensor
        # Fractions are multiplied by the owner, as by a writer on its machine: rounded before the addition as well, an
        # accumulate would have other bits. Whole numbers are multiplied here: a scale is exact up to 2^53 only.
        whole = not (flat.is_floating_point() or flat.is_complex())
        factors = {rank: weight if whole else 1 for rank, weight in weights.items()}
        published = {
            factor: engine.publish(operation, flat if factor == 1 else flat * factor)
            for factor in set(factors.values())
        }
        sends = []
        for rank, weight in weights.items():
            shared, scale = published[factors[rank]], 1.0 if whole else weight
            p = NO_SHARE if share is None else share * weight
            sends.append(Send(rank, shared, 0, shared.data.numel(), (shared.data.numel(),), scale, p))
        yield Exchange(sends, (), digest=number)
        if op == UNLOCK:
            return {}
        arrived = yield Exchange((), list(weights), digest=number)
        found = {}
        for rank, message in arrived.items():
            payload = message.payload
            assert payload is not None
            while not payload.complete:
                yield MORE
            found[rank] = payload.data.clone() if op == WriteKind.GET.value else payload.data
            if op == WriteKind.GET.value and (payload.data.numel(), payload.data.dtype) != (
                layout.numel,
                layout.dtype,
            ):
                raise Mismatch(f"{op} {name!r}: rank {rank} answered with another tensor", (rank, engine.rank))
        return found

    rest = max(0.001, deadline - clock.monotonic())
    return engine.submit(op, channel_of(name), steps, rest, alone=False, one_sided=True)
