"""Handles as functions, the way BlueFog's users write them."""

from __future__ import annotations

from typing import TypeVar

from ..engine.operation import Handle

T = TypeVar("T")


def _check(handle: object) -> None:
    if not isinstance(handle, Handle):
        raise ValueError(f"{handle!r} is no handle; the nonblocking operations return handles")


def poll(handle: Handle[T]) -> bool:
    """Whether the operation has ended. Never blocks."""
    _check(handle)
    return handle.poll()


def wait(handle: Handle[T], timeout: float | None = None) -> T:
    """The result of a nonblocking operation; blocks until it is there. See :meth:`Handle.wait`."""
    _check(handle)
    return handle.wait(timeout)


synchronize = wait
