"""The generators of operations: how they run, are dropped, and wait for a future."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import GEN_SUSPENDED, getgeneratorstate
from typing import Any

from .. import clock
from .events import LONG_NS, Events
from .operation import Operation
from .profiling import profiler, span
from .progress import Progress
from .stage import Arrived, Future, Steps, Yields


def is_suspended(operation: Operation) -> bool:
    """Whether an operation's generator has begun and has not ended."""
    return operation.generator is not None and getgeneratorstate(operation.generator) == GEN_SUSPENDED


def drop_generator(operation: Operation) -> None:
    """Drop the generator of an operation. This closes it, unless a thread runs it; that thread closes it afterwards.

    Never call ``generator.close()`` here: another thread may run the generator, or begin to, and Python 3.11 has
    crashed in this case. The thread that runs a generator holds a reference, so only an idle generator ends here.
    """
    operation.generator = None


def run_generator(
    operation: Operation, generator: Steps[Any], arrived: Arrived | None, events: Events
) -> tuple[Yields | None, Any, BaseException | None]:
    """Run an operation's generator until it yields, returns, or raises. It computes, so the caller holds no lock.

    Args:
        arrived: The messages of its stage; None to begin.
        events: Receives the time of a sum, and of a long preparation.

    Returns:
        The yielded item, or None with the result or the error.
    """
    start = clock.perf_counter_ns() if events.active else 0
    item: Yields | None = None
    result, error = None, None
    try:
        if arrived is None:
            item = next(generator)
        elif profiler._is_profiler_enabled:
            with span(operation.op, operation.name, "sum"):
                item = generator.send(arrived)
        else:
            item = generator.send(arrived)
    except StopIteration as stop:
        result = stop.value
    except BaseException as caught:
        error = caught
    if start and (arrived is not None or clock.perf_counter_ns() - start > LONG_NS):
        kind = "prepared" if arrived is None else "summed"
        events.emit(kind, operation.op, operation.name, operation.round, start)
    return item, result, error


class FutureWaiter:
    """Resumes operations when the futures that they wait for are done.

    Args:
        progress: The progress engine of the agent.
        fail: Ends an operation with an error. Called with the lock.
        resume: Makes an operation ready to resume. Called with the lock.
    """

    def __init__(
        self,
        progress: Progress,
        fail: Callable[[Operation, BaseException], None],
        resume: Callable[[Operation], None],
    ) -> None:
        self._progress, self._fail, self._resume = progress, fail, resume

    def wait(self, operation: Operation, later: Future) -> None:
        """Let an operation wait for a future."""
        operation.waiting_more = True
        later.add_done_callback(partial(self._done, operation))

    def _done(self, operation: Operation, error: BaseException | None) -> None:
        """Resume or fail the operation. Called from the thread that completes the future."""
        with self._progress.lock:
            if error is None:
                self._resume(operation)
            elif operation.error is None:
                self._fail(operation, error)
            self._progress.wake()
