"""Handles as functions, the way BlueFog's users write them, and handles of several operations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .. import clock
from .._timeouts import parse_timeout
from ..errors import Mismatch
from ..operations.operation import Handle

T = TypeVar("T")


class HandleOfMany(Handle[T]):
    """The future result of several operations.

    Args:
        handles: Handles of the operations, at least one.
        finish: Computes the result from theirs; called once, by the first caller that needs it.
        explain: More text for the error if agents disagree.
    """

    __slots__ = ("_explain", "_finish", "_handles", "_is_finished", "_lock")

    def __init__(
        self,
        handles: Sequence[Handle[Any]],
        finish: Callable[[list[Any]], T],
        explain: Callable[[Mismatch], str] | None = None,
    ) -> None:
        super().__init__(handles[0]._driver, handles[0].operation)
        self._handles, self._finish, self._explain = handles, finish, explain
        self._lock, self._is_finished = threading.Lock(), False

    def poll(self) -> bool:
        return all(handle.poll() for handle in self._handles)

    def wait(self, timeout: float | None = None) -> T:
        until = None if timeout is None else clock.monotonic() + parse_timeout(timeout, 0.0, zero=True)
        found = []
        for handle in self._handles:
            try:
                found.append(handle.wait(None if until is None else max(0.0, until - clock.monotonic())))
            except Exception as error:
                if not handle.poll():  # the operation continues; only this wait has timed out
                    raise
                self._give_up(error)
                if type(error) is Mismatch and self._explain is not None:
                    raise Mismatch(f"{error}. {self._explain(error)}", error.ranks) from None
                raise
        with self._lock:
            if not self._is_finished:
                self._result, self._is_finished = self._finish(found), True
        return self._result  # type: ignore[return-value]

    def _give_up(self, error: BaseException) -> None:
        """End the remaining operations, which other agents may not have: if the lists differ, so may their dtypes."""
        for handle in self._handles:
            if not handle.poll():
                self._driver.give_up(handle, error)

    def add_done_callback(self, callback: Callable[[Handle[T]], None]) -> None:
        remaining = len(self._handles)

        def one_ended(_: Handle[Any]) -> None:
            nonlocal remaining
            with self._lock:
                remaining -= 1
                last = not remaining
            if last:
                callback(self)

        for handle in self._handles:
            handle.add_done_callback(one_ended)

    def __repr__(self) -> str:
        return f"<Handle of {self.operation}: {'done' if self.poll() else 'in flight'}>"


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
