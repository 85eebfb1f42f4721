"""Operations that wait for what is done elsewhere, as on a device, and not for what others send."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from inspect import GEN_SUSPENDED, getgeneratorstate
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .operation import Operation
    from .progress import Progress


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


def is_suspended(operation: Operation) -> bool:
    """It has begun, and has not come to its end."""
    return operation.generator is not None and getgeneratorstate(operation.generator) == GEN_SUSPENDED


class Elsewhere:
    """Has operations go on when what they wait for is done.

    Args:
        progress: Of their agent.
        fail: Ends one with an error.
        goes_on: Takes one that can go on. Both are called with the lock.
    """

    def __init__(
        self,
        progress: Progress,
        fail: Callable[[Operation, BaseException], None],
        goes_on: Callable[[Operation], None],
    ) -> None:
        self._progress, self._fail, self._goes_on = progress, fail, goes_on

    def wait(self, operation: Operation, later: Later) -> None:
        """An operation waits for something."""
        later.tell(partial(self._done, operation))

    def _done(self, operation: Operation, error: BaseException | None) -> None:
        """From a thread of its own."""
        with self._progress.lock:
            if error is None:
                self._goes_on(operation)
            elif operation.error is None:
                self._fail(operation, error)
            self._progress.wake()
