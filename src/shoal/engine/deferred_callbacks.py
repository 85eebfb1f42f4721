"""What callers asked to be told, until somebody drives who may tell them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from .._signals import undeferred

log = logging.getLogger("shoal")
T = TypeVar("T")


class Callbacks:
    """Those of one agent. They are added under the engine's lock, and run without it.

    Attributes:
        due: What is to be called, with what, and whose it is. Looked at after every call, so it is no property.
    """

    def __init__(self) -> None:
        self.due: deque[tuple[Callable[[Any], None], Any, object]] = deque()
        self._running: list[None] = []  # one entry for each call; appending and popping need no lock

    @property
    def pending(self) -> bool:
        """A callback is due, or has not returned: it may still submit an operation."""
        return bool(self.due or self._running)

    def add(self, callback: Callable[[T], None], argument: T, what: object) -> None:
        """Have ``callback(argument)`` called; ``what`` says in the log whose it was, if it fails."""
        self.due.append((callback, argument, what))

    def run(self) -> None:
        """Call those that are due. What they raise is logged."""
        while self.due:
            self._running.append(None)  # before it is taken out, or there is a moment in which it does not count
            try:
                self._run_first()
            finally:
                self._running.pop()

    def _run_first(self) -> None:
        try:
            callback, argument, what = self.due.popleft()
        except IndexError:  # another thread of this agent was quicker
            return
        try:
            with undeferred:
                callback(argument)
        except (Exception, SystemExit):
            log.exception("a callback of %s failed", what)
