"""The protocol of all transports: the operations of a link, and its notifications to the agent that owns it.

A link is one-way: from this agent to one peer. Replies are sent over the peer's link to this agent. So agents need not
agree which of them connects, and messages keep their order in each direction, as matching needs. If a firewall allows
connections in one direction only, the peer opens the connection (``reverse_connections.py``).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from .messages import Message
from .shared_regions import Arena, Region


class Published:
    """A tensor that other agents can read: flat and contiguous, in a region of the arena if it is large.

    It is a copy, or, with ``zero_copy``, the tensor itself: its owner must not change it until all have read it.
    """

    __slots__ = ("_bytes", "_checks", "data", "lease", "region", "zero_copy")

    def __init__(
        self, data: torch.Tensor, region: Region | None = None, lease: Lease | None = None, zero_copy: bool = False
    ) -> None:
        self.data = data
        self.region = region
        self.lease = lease
        self.zero_copy = zero_copy
        self._bytes: memoryview | None = None
        self._checks: dict[tuple[int, int], str] = {}

    @property
    def on_cpu(self) -> torch.Tensor:
        """The numbers in memory that the CPU reads."""
        return self.data

    def part(self, start: int, stop: int) -> torch.Tensor:
        return self.data[start:stop] if stop - start != self.data.numel() else self.data

    def copy(self, start: int, stop: int) -> bytes:
        """A copy of elements ``start`` to ``stop``, as bytes. The tensor has no region, so the CPU can read it."""
        size, address = self.data.element_size(), self.data.data_ptr()
        return ctypes.string_at(address + start * size, (stop - start) * size) if stop > start else b""

    def bytes(self, start: int, stop: int) -> memoryview:
        """Elements ``start`` to ``stop`` as bytes, in place."""
        if self._bytes is None:
            flat = (
                self.on_cpu.view(torch.uint8) if self.data.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
            self._bytes = memoryview(flat.numpy())  # type: ignore[arg-type]
        size = self.data.element_size()
        return self._bytes[start * size : stop * size]

    def check_of(self, start: int, piece: memoryview, check: Callable[[memoryview], str]) -> str:
        """The checksum of the bytes ``piece`` from ``start`` on: computed once for all destinations."""
        place = start, len(piece)
        found = self._checks.get(place)
        if found is None:
            found = self._checks[place] = check(piece)
        return found


class Lease:
    """Counts the users of a region: the operation itself, and every destination that has not acknowledged."""

    __slots__ = ("_arena", "_count", "_lock", "region")

    def __init__(self, arena: Arena, region: Region) -> None:
        self._arena = arena
        self.region = region
        self._count = 1
        self._lock = threading.Lock()

    def hold(self) -> None:
        with self._lock:
            self._count += 1

    def release(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count:
                return
        self._arena.release(self.region)


class Receiver(Protocol):
    """The notifications of a transport. Called by the thread that drives the agent's progress, one at a time."""

    def on_message(self, source: int, message: Message) -> None: ...

    def on_arrived(self, source: int, message: Message) -> None:
        """More of a message's payload has arrived."""

    def on_closed(self, peer: int, cause: str, final: bool = False, certain: bool = False) -> None:
        """The peer seems to be lost; ``cause`` is the evidence.

        Args:
            final: No earlier message of it can still arrive, as at the end of its stream.
            certain: The peer's process has ended, or the peer closed the connection; else the network may have failed.
        """

    def on_cut(self, peer: int) -> None:
        """The peer's connection was cut although the peer may live: then it connects again."""

    def on_shut_out(self, peer: int) -> None:
        """The peer counts this agent as lost, and ignores its messages."""

    def on_left(self, peer: int, lost: int = -1, cause: str = "") -> None:
        """A peer to which we only send has sent its shutdown message; its other messages may still be in transit.

        It left because it had lost rank ``lost`` (-1: for other reasons), for ``cause``; without a cause it only missed
        that rank in a one-sided call.
        """


class NullReceiver:
    """The :class:`Receiver` of a connection that brings no messages."""

    def on_message(self, source: int, message: Message) -> None: ...

    def on_arrived(self, source: int, message: Message) -> None: ...

    def on_closed(self, peer: int, cause: str, final: bool = False, certain: bool = False) -> None: ...

    def on_cut(self, peer: int) -> None: ...

    def on_shut_out(self, peer: int) -> None: ...

    def on_left(self, peer: int, lost: int = -1, cause: str = "") -> None: ...


class Link(Protocol):
    """The connection from this agent to ``peer``. No method blocks."""

    peer: int

    def post(self, message: Message, published: Published | None = None, start: int = 0, stop: int = 0) -> None:
        """Queue a message, with elements ``start`` to ``stop`` of the published tensor as its payload."""

    def flush(self) -> None:
        """Hand queued bytes to the system, as many as it takes."""

    @property
    def idle(self) -> bool:
        """No message is queued."""

    def close(self) -> None: ...
