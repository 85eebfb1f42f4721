"""The stages of an operation: what it yields to the engine, and the stage that the engine makes of it.

An operation is a generator (``operation.py``). It yields an :class:`Exchange`, a :class:`Future` of work outside of it,
such as on a device, or :data:`MORE`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

import torch

from .. import clock
from ..transport.link import Published
from ..transport.messages import Message, Where
from ..transport.process_group import Collective

T = TypeVar("T")

MORE: Final = "more"
"""Yielded by an operation that waits for further pieces of its payloads."""

NOTHING: Final = float("nan")
"""The scale of a message without a tensor, which notifies an expecting neighbour that it gets none this round."""

Arrived = dict[int, Message]
"""The messages of one exchange, by source."""


@dataclass(slots=True)
class Send:
    """One message of an exchange: elements ``start`` to ``stop`` of the published tensor, as a tensor of ``shape``.

    Attributes:
        scale: The factor by which the receiver multiplies it.
        p: Its associated weight, for a window.
    """

    destination: int
    published: Published
    start: int
    stop: int
    shape: tuple[int, ...]
    scale: float = 1.0
    p: float = 0.0


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """States that a backend, which needs one order of operations on all agents, may move the tensors of a stage.

    Attributes:
        among: The participating ranks, ascending; empty for all members. Each of them reaches this stage. None: only
            the ends of the edges participate, and only they know their ranks.
        collective: A collective operation of the backend that replaces the sends.
        properties: A description of the properties that must be equal on all ranks, if no message carries them.
        confirm: Whether the receiver confirms that it expects the message, because both ends know the edge
            independently.
    """

    among: tuple[int, ...] | None = ()
    collective: Collective | None = None
    properties: str = ""
    confirm: bool = False


@dataclass(slots=True)
class Exchange:
    """One stage of an operation on this agent."""

    sends: Sequence[Send]
    sources: Sequence[int]
    dtype: torch.dtype | None = None
    """The dtype that every source must send; None for any."""
    shape: tuple[int, ...] | None = None
    rest: tuple[int, ...] | None = None
    """The dimensions after the first that every source must send, if only the first may differ; None for any."""
    checked: bool = False
    """Whether the operation ends only when every destination has confirmed that it expected the message."""
    digest: int = 0
    """A hash of the topology, the root, or other arguments, which must be equal on both sides of an edge."""
    digest_of: str = "topology"
    coordinates: bool = False
    """Whether it moves no tensor of the caller: agents only exchange the edges, or synchronize."""
    stage: int | None = None
    """The stage's number within the operation, if agents pass different numbers of stages; else they are counted."""
    stage_lead: int = 0
    """Subtracted from the stage's number in its messages: their receivers, which pass more stages, take them before."""
    carried: BackendRequest | None = None
    """Allows a backend to move the tensors; None for links only."""
    on_device: bool | None = None  # whether callers' tensors are on a device, if both sides must agree


class Future(Protocol):
    """Work for which an operation waits when it yields it."""

    @property
    def done(self) -> bool:
        """Whether the work is done. Raises its error."""

    def add_done_callback(self, then: Callable[[BaseException | None], None], /) -> None:
        """Call ``then`` with the error, if any, when the work is done, or now if it is. Call it from any thread."""


def await_future(later: Future) -> Generator[Future, Any, None]:
    """Wait until the work of a future is done."""
    while not later.done:
        yield later


Yields = Exchange | Future | str
Steps = Generator[Yields, Arrived, T]
"""The generator of an operation. It yields exchanges or futures, receives the messages, and returns the result."""


@dataclass(slots=True)
class Stage:
    """An exchange in progress."""

    number: int
    exchange: Exchange
    missing: set[int]
    arrived: Arrived
    posted: bool = False
    to_move: bool = False  # whether a backend still has to move the tensors
    transfer_requested: bool = False  # whether the backend has been requested to
    unconfirmed: set[int] = field(default_factory=set)  # receivers that have not confirmed
    absent: set[int] = field(default_factory=set)  # members that have not reached it, as far as the backend knows
    transferred_with: set[int] = field(default_factory=set)  # members of the transfer, once it has begun
    started: float = field(default_factory=lambda: clock.monotonic())
    probed_at: float = 0.0
    """When the missing agents were last probed; 0 if they were not."""
    reported_waits: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """For each missing agent, the ranks that it has reported to wait for."""

    @property
    def needs(self) -> set[int]:
        """The ranks from which the stage still has to receive, and those to which it sends."""
        carried = self.exchange.carried if self.to_move else None
        others = carried.collective.members if carried is not None and carried.collective is not None else ()
        return self.missing | {send.destination for send in self.exchange.sends} | {*others}

    def expect_confirmation(self, rank: int) -> None:
        """Wait for a receiver's confirmation that it expects the tensor that the backend will move."""
        self.unconfirmed.add(rank)

    def confirmed_by(self, rank: int) -> None:
        """Record that an agent has reached this stage, or expects the tensor that the backend will move."""
        self.unconfirmed.discard(rank)
        self.absent.discard(rank)

    def redirect_to_links(self) -> None:
        """Redirect announced tensors to links, if the backend has not moved them."""
        self.to_move = self.transfer_requested = False
        self.unconfirmed, self.absent, self.transferred_with = set(), set(), set()
        for source, message in list(self.arrived.items()):
            if message.where is Where.CARRIED:
                del self.arrived[source]
                self.missing.add(source)

    def sends_to(self, rank: int) -> bool:
        return any(send.destination == rank for send in self.exchange.sends)

    def will_send(self, rank: int, number: int) -> bool:
        """Whether this stage sends to ``rank``, so that no denial for stage ``number`` is needed."""
        return number == self.number - self.exchange.stage_lead and self.sends_to(rank)

    @property
    def complete(self) -> bool:
        return self.posted and not self.missing and not self.to_move

    def has_all_of(self, source: int) -> bool:
        """Whether the message of a source has arrived completely."""
        message = self.arrived.get(source)
        return message is not None and (message.payload is None or message.payload.complete)

    def take(self, source: int, message: Message) -> None:
        """Record the message of a source. Parts of its payload may still be missing."""
        self.missing.discard(source)
        self.arrived[source] = message
