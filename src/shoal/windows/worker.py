"""The thread that runs an agent's nonblocking window calls one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from .. import clock
from .._signals import SLICE, deferred


class Worker:
    """A thread for window calls. It is a daemon, because the interpreter joins all other threads at exit, before the
    agent could leave.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int:
        """The identifier of its thread."""
        return self._thread.ident or 0

    def submit(self, call: Callable[[], None]) -> None:
        """Run a call, which must not raise, after all before it."""
        self._calls.put(call)

    def end(self, deadline: float) -> bool:
        """Take no more calls, and wait for the submitted ones; False if they have not ended by the deadline, or if a
        signal has arrived.
        """
        self._calls.put(None)
        while self._thread.is_alive() and clock.monotonic() < deadline and not deferred.pending:
            self._thread.join(min(SLICE, max(0.0, deadline - clock.monotonic())))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # it holds a window
