"""Callbacks of callers, kept until a driving thread may run them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from .._signals import undeferred

log = logging.getLogger("shoal")
T = TypeVar("T")


class Callbacks:
    """The callbacks of one agent. They are added under the engine's lock, and run without it.

    Attributes:
        due: The function, argument and owner of each callback. A plain attribute, because it is read after every call.
    """

    def __init__(self) -> None:
        self.due: deque[tuple[Callable[[Any], None], Any, object]] = deque()
        self._running: list[None] = []  # one entry for each call; appending and popping need no lock

    @property
    def pending(self) -> bool:
        """Whether a callback is due or has not returned: it may still submit an operation."""
        return bool(self.due or self._running)

    def add(self, callback: Callable[[T], None], argument: T, owner: object) -> None:
        """Run ``callback(argument)`` later; ``owner`` names it in the log if it fails."""
        self.due.append((callback, argument, owner))

    def run(self) -> None:
        """Run the callbacks that are due. Exceptions are logged."""
        while self.due:
            self._running.append(None)  # before popleft(), or `pending` would miss the callback for a moment
            try:
                self._run_first()
            finally:
                self._running.pop()

    def _run_first(self) -> None:
        try:
            callback, argument, owner = self.due.popleft()
        except IndexError:  # another thread of this agent has taken it
            return
        try:
            with undeferred:
                callback(argument)
        except (Exception, SystemExit):
            log.exception("a callback of %s failed", owner)
