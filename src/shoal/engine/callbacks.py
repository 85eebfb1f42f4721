"""What callers asked to be told, until somebody drives who may tell them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from ..interrupts import released

log = logging.getLogger("shoal")
T = TypeVar("T")


class Callbacks:
    """Those of one agent. They are added under the engine's lock, and run without it.

    Attributes:
        due: What is to be called, with what, and whose it is. Looked at after every call, so it is no property.
    """

    def __init__(self) -> None:
        self.due: deque[tuple[Callable[[Any], None], Any, object]] = deque()

    def add(self, callback: Callable[[T], None], argument: T, what: object) -> None:
        """Have ``callback(argument)`` called; ``what`` says in the log whose it was, if it fails."""
        self.due.append((callback, argument, what))

    def run(self) -> None:
        """Call those that are due. What they raise is logged."""
        while self.due:
            try:
                callback, argument, what = self.due.popleft()
            except IndexError:  # another thread of this agent was quicker
                return
            try:
                with released:
                    callback(argument)
            except (Exception, SystemExit):
                log.exception("a callback of %s failed", what)
