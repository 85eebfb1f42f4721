"""What is done elsewhere, as on a device, and operations wait for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol


class Later(Protocol):
    """What an operation waits for that yields it."""

    @property
    def done(self) -> bool:
        """It is done. What went wrong is raised."""

    def tell(self, then: Callable[[BaseException | None], None], /) -> None:
        """Call ``then`` when it is done, or now if it is, with what went wrong. From any thread."""


def reached(later: Later) -> Generator[Later, Any, None]:
    """Wait until something is done."""
    while not later.done:
        yield later
