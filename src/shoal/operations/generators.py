"""The generators that operations are made of, and those of them that wait for what is done elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import GEN_SUSPENDED, getgeneratorstate

from .future import Future
from .operation import Operation
from .progress import Progress


def is_suspended(operation: Operation) -> bool:
    """It has begun, and has not come to its end."""
    return operation.generator is not None and getgeneratorstate(operation.generator) == GEN_SUSPENDED


def drop_generator(operation: Operation) -> None:
    """Drop the generator of an operation, which closes it unless a thread runs it; that thread closes it afterwards.

    Never ``generator.close()`` here: another thread may run the generator, or begin to, and Python 3.11 has crashed in
    that. The thread that runs a generator holds a reference, so only an idle generator ends here.
    """
    operation.generator = None


class FutureWaiter:
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

    def wait(self, operation: Operation, later: Future) -> None:
        """An operation waits for something."""
        operation.waiting_more = True
        later.add_done_callback(partial(self._done, operation))

    def _done(self, operation: Operation, error: BaseException | None) -> None:
        """From a thread of its own."""
        with self._progress.lock:
            if error is None:
                self._goes_on(operation)
            elif operation.error is None:
                self._fail(operation, error)
            self._progress.wake()
