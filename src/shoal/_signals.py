"""Signals are handled between the steps of an exchange, never inside one.

The problem: Ctrl-C raises KeyboardInterrupt in the main thread after any bytecode, also between the two statements that
register an operation and give it its deadline, or that take a lock and remember it. No order of statements and no
``finally`` is safe from that; and a handler that a script has set (to raise ``SystemExit``, or to call
``shoal.shutdown()``) comes as suddenly.

So while the main thread is in a section (``with deferred:``), a handler that records the signal, and wakes the thread
if it waits, replaces the handlers of Python. These run when the outermost section ends, or at a ``checkpoint``, where
the state is consistent. Outside sections the handlers are the script's own, so code that reads or replaces them works
as usual. Other threads are never interrupted in this way, and have no cost.

Rejected: wrapping the handlers once for good (asyncio and notebooks compare and replace them); blocking signals in the
kernel (Python runs handlers in the main thread whichever thread a signal reaches); doing all work in another thread
(two thread switches for each call).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without its enums: this runs for every call
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Final

from . import clock

_signals = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SIGNALS: Final = tuple(int(signum) for signum in _signals)
"""The signals whose handlers are deferred: those from users and launchers, and alarms."""
SLICE = 0.05
"""Seconds for which the main thread waits at a time where a signal could not wake it."""

_getsignal, _setsignal, _ident = _signal.getsignal, _signal.signal, threading.get_ident
Handler = Callable[[int, FrameType | None], Any]


class DeferredSignals:
    """The sections of the main thread. There is one instance, :data:`deferred`; sections may be nested."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._depth = 0
        self._seen: tuple[Any, ...] = ()  # the handlers of all SIGNALS when they were last replaced
        self._handlers: dict[int, Handler] = {}  # the ones among them that Python would call
        self.came: list[tuple[int, FrameType | None]] = []  # received, and not handled yet
        self.waker = -1  # an eventfd that wakes the main thread while it waits in a section; only that thread sets it
        self._noting = self._note  # one object, to be recognised

    def __enter__(self) -> bool:
        """Whether this is the main thread; its signals are deferred after this call."""
        if _ident() != self._main:
            return False
        if not self._depth:
            self.close()
        self._depth += 1
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _ident() != self._main:
            return
        self._depth -= 1
        if not self._depth:
            self.open()
            if self.came:
                self.checkpoint()

    @property
    def here(self) -> bool:
        """The calling thread is in a section in which signals wait."""
        return self._depth > 0 and _ident() == self._main

    @property
    def pending(self) -> bool:
        """A signal has arrived that the calling thread has to handle. Without one, :attr:`came` is empty."""
        return bool(self.came) and _ident() == self._main

    def checkpoint(self) -> None:
        """Handle the received signals. For points with a consistent state: handlers may raise, and call any
        function.
        """
        while self.came and _ident() == self._main:
            signum, frame = self.came.pop(0)
            self._handlers[signum](signum, frame)

    def close(self) -> None:
        """Let signals wait. A handler may still raise before its turn: then all are as they were."""
        try:
            found = tuple(map(_getsignal, SIGNALS))
            if found != self._seen:
                # Our own handler is still set only if two signals came at the worst moment of the previous section.
                known = self._handlers
                found_now = {
                    signum: known.get(signum) if handler is self._noting else handler
                    for signum, handler in zip(SIGNALS, found, strict=True)
                }
                self._handlers = {signum: handler for signum, handler in found_now.items() if callable(handler)}
                self._seen = found
            for signum in self._handlers:
                _setsignal(signum, self._noting)
        except BaseException:
            self.open()
            raise

    def open(self) -> None:
        """Give the handlers back. One that raises before all are back does so in the end."""
        error: BaseException | None = None
        while True:
            try:
                for signum, handler in self._handlers.items():
                    if _getsignal(signum) is self._noting:
                        _setsignal(signum, handler)
                break
            except BaseException as raised:
                error = raised
        if error is not None:
            raise error

    def restart_in_child(self) -> None:
        """In a forked child the thread that forked is the main one, and in no section."""
        self._main, self._depth, self.waker = _ident(), 0, -1
        self.came.clear()
        self.open()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.came.append((signum, frame))
        if self.waker >= 0:
            try:
                os.eventfd_write(self.waker, 1)
            except OSError:
                pass


class UndeferredSignals:
    """For the caller's own code inside a section, such as a callback: signals are handled as outside."""

    def __enter__(self) -> None:
        if deferred.here:
            deferred.checkpoint()
            try:
                deferred.open()
            except BaseException:
                deferred.close()
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if deferred.here:
            deferred.close()


deferred: Final = DeferredSignals()
undeferred: Final = UndeferredSignals()
os.register_at_fork(after_in_child=deferred.restart_in_child)


def pause(seconds: float) -> None:
    """Sleep for a short time; a received signal is handled."""
    clock.sleep(seconds)
    deferred.checkpoint()


def slices(deadline: float) -> Iterator[float]:
    """How long to wait next, again and again until ``deadline`` (``clock.monotonic()``), signals being handled between.

    At least once, so that what is there already is found.
    """
    while True:
        deferred.checkpoint()
        rest = deadline - clock.monotonic()
        yield min(max(0.0, rest), SLICE if deferred.here else threading.TIMEOUT_MAX)
        if clock.monotonic() >= deadline:
            return


def acquire_with_deadline(lock: threading.Lock | threading.RLock, deadline: float) -> bool:
    """Acquire a lock of this process by ``deadline`` (``clock.monotonic()``), which may be infinite."""
    return any(lock.acquire(timeout=seconds) for seconds in slices(deadline))
