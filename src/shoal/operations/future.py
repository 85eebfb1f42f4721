"""What is done elsewhere, as on a device, and operations wait for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol


class Future(Protocol):
    """What an operation waits for that yields it."""

    @property
    def done(self) -> bool:
        """It is done. What went wrong is raised."""

    def add_done_callback(self, then: Callable[[BaseException | None], None], /) -> None:
        """Call ``then`` when it is done, or now if it is, with what went wrong. From any thread."""


def await_future(later: Future) -> Generator[Future, Any, None]:
    """Wait until something is done."""
    while not later.done:
        yield later
