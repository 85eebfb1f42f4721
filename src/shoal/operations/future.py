"""The interface of work outside of an operation, such as on a device, for which operations wait."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol


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
