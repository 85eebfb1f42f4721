"""What a device is to Shoal.

Work on a device is queued in streams: what is called returns before it is done. Who hands a tensor to another agent
has to know that it is written, so a place in a stream can be waited for (:class:`Mark`), by a thread that does nothing
else.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A place in a stream."""

    def wait(self) -> None:
        """Until all that was queued before it is done. Other threads run meanwhile."""


class Stream(Protocol):
    """A queue of a device's work, which is done in its order."""

    def after(self, other: Any) -> None:
        """What is queued here from now on waits for what is queued in another stream of the device so far."""

    def working(self) -> AbstractContextManager[object]:
        """What the calling thread calls within is queued here."""

    def mark(self) -> Mark:
        """The place behind all that is queued."""

    def uses(self, tensor: torch.Tensor) -> None:
        """The memory of a tensor is not used again before what is queued here is done, whoever lets go of it."""


class Memory(Protocol):
    """Memory of a device that other processes of the machine can map.

    Attributes:
        ident: Its number among those of its agent.
        size: In bytes.
        fd: The descriptor that others map it by.
        data: All of it, ``[size]`` in uint8, on the device.
    """

    ident: int
    size: int
    fd: int
    data: torch.Tensor

    def close(self) -> None:
        """Give up the descriptor; the memory goes when the last tensor over it is gone, here and at the readers."""


class Device(Protocol):
    """One device of this machine."""

    def current(self) -> Stream:
        """That which the calling thread queues in."""

    def stream(self) -> Stream:
        """A new one."""

    def share(self, ident: int, size: int) -> Memory:
        """New memory.

        Raises:
            MemoryError: There is none.
        """

    def staging(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the CPU that the device copies to and from while others work, uninitialised, ``[numel]``."""


class Unshareable(Exception):
    """Memory of a device cannot be shared, or not be mapped; it says why."""
