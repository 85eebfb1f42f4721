"""One protocol for all transports: what a link does, and what it tells the agent that owns it.

A link is one-way: from this agent to one peer. Answers come back over the peer's link to this agent. So nobody has to
agree on who connects to whom, and the order of messages is kept in each direction, which is all that matching needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from .memory import Region
from .wire import Message, Payload


@dataclass(frozen=True)
class Published:
    """A tensor copied to where others can read it: flat and contiguous, in a region of the arena when it is large."""

    data: torch.Tensor
    region: Region | None = None

    def part(self, start: int, stop: int) -> torch.Tensor:
        return self.data[start:stop] if (start, stop) != (0, self.data.numel()) else self.data


class Receiver(Protocol):
    """What a transport tells its agent. Called by the thread that drives the agent's progress, one call at a time."""

    def on_message(self, source: int, message: Message) -> None: ...

    def on_arrived(self, payload: Payload) -> None:
        """More of a payload that comes in pieces is here."""

    def on_closed(self, peer: int, cause: str) -> None:
        """The peer's end of a connection closed without a word; ``cause`` says how it showed."""


class Link(Protocol):
    """The way from this agent to ``peer``. No method blocks."""

    peer: int
    transport: str

    def post(self, message: Message, published: Published | None = None, start: int = 0, stop: int = 0) -> None:
        """Queue a message, with elements ``start`` to ``stop`` of what was published as its payload."""

    def flush(self) -> None:
        """Hand what is queued to the system, as much as it takes."""

    @property
    def idle(self) -> bool:
        """Nothing is queued."""

    def close(self) -> None: ...
