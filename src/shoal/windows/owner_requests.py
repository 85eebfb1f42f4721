"""Requests to the owner of a window on another machine, which serves them (``requests.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from .. import clock
from ..engine.engine import Engine
from ..errors import Mismatch
from ..operations.operation import Handle, Operation
from ..operations.stage import MORE, Exchange, Send, Steps
from .window_memory import WindowLayout, WriteKind

LOCK, UNLOCK = "win_lock", "win_unlock"
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
        published = {}
        for weight in set(weights.values()):
            scaled = torch.empty(0) if tensor is None else tensor if weight == 1 else tensor * weight
            published[weight] = engine.publish(operation, scaled)
        sends = []
        for rank, weight in weights.items():
            shared = published[weight]
            p = 0.0 if share is None else share * weight
            sends.append(Send(rank, shared, 0, shared.data.numel(), (shared.data.numel(),), p))
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
