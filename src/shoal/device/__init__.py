"""Devices whose memory the CPU does not read: the interface of a device, with its streams and its shared memory.

``cuda.py`` implements it for NVIDIA's devices. This package imports torch and no other part of Shoal.

Work on a device is queued in streams: a call returns before its work is done. An agent that sends a tensor has to know
that it is written. So a thread without other work can wait for a position in a stream (:class:`Mark`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A place in a stream."""

    def wait(self) -> None:
        """Wait until all work queued before it is done. Other threads run in the meantime."""


class Stream(Protocol):
    """A queue of a device's work, which is done in its order."""

    def after(self, other: Any) -> None:
        """Make later work of this stream wait for the work queued in another stream of the device so far."""

    def working(self) -> AbstractContextManager[object]:
        """A context in which calls of this thread queue their work here."""

    def mark(self) -> Mark:
        """The position after all queued work."""

    def uses(self, tensor: torch.Tensor) -> None:
        """Do not reuse the memory of a tensor before the work queued here is done, even if all references are gone."""


class Memory(Protocol):
    """Memory of a device that other processes of the machine can map.

    Attributes:
        ident: Its number among the memory of its agent.
        size: In bytes.
        fd: The descriptor that others map it by.
        data: All of it, ``[size]`` in uint8, on the device.
    """

    ident: int
    size: int
    fd: int
    data: torch.Tensor

    def close(self) -> None:
        """Close the descriptor; the memory is freed when the last tensor over it is gone, here and at the readers."""


class Device(Protocol):
    """One device of this machine."""

    def current(self) -> Stream:
        """The stream of the calling thread."""

    def stream(self) -> Stream:
        """A new stream."""

    def share(self, ident: int, size: int) -> Memory:
        """New memory.

        Raises:
            MemoryError: There is none.
        """

    def staging(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the CPU that the device copies to and from while others work, uninitialised, ``[numel]``."""


class Unshareable(Exception):
    """Memory of a device cannot be shared, or not be mapped; it says why."""
