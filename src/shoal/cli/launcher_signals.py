"""The signals that a launcher gets, as bytes in a pipe: they are handled in its loop, and none is missed.

One context exists for the whole life of a launcher. A Ctrl-C between the end of one run and the begin of the next is
read by the next reader.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from types import FrameType, TracebackType
from typing import Protocol

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_CAUGHT = (*FORWARDED, signal.SIGCHLD, signal.SIGTSTP)
_MOST = 4096
_LONGEST = 3600.0
"""Seconds of one wait."""


class _Readable(Protocol):
    def fileno(self) -> int: ...


class Signals:
    """The received signals that were not read yet. For the main thread."""

    def __init__(self) -> None:
        self._receiver, self._sender = os.pipe()
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Signals:
        os.set_blocking(self._receiver, False)
        os.set_blocking(self._sender, False)
        previous = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        self._exits.callback(signal.set_wakeup_fd, previous)
        for signum in _CAUGHT:
            old = signal.getsignal(signum)
            # What nohup, or a shell that starts a job in the background, has chosen to ignore stays ignored.
            if old is signal.SIG_IGN and signum != signal.SIGCHLD:
                continue
            signal.signal(signum, _noted)
            self._exits.callback(signal.signal, signum, signal.SIG_DFL if old is None else old)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exits.close()
        os.close(self._receiver)
        os.close(self._sender)

    def fileno(self) -> int:
        """For a selector: readable when a signal has come."""
        return self._receiver

    def read(self) -> list[signal.Signals]:
        """The signals since the last call, in their order; none twice."""
        try:
            return [signal.Signals(number) for number in os.read(self._receiver, _MOST)]
        except BlockingIOError:
            return []

    def wait(self, seconds: float, *others: _Readable) -> list[signal.Signals]:
        """As :meth:`read`, after a time, or as soon as a signal has arrived or one of ``others`` is readable."""
        sources: list[int | _Readable] = [self._receiver, *others]
        select.select(sources, [], [], max(0.0, min(seconds, _LONGEST)))
        return self.read()


def _noted(signum: int, frame: FrameType | None) -> None:
    """The wake-up descriptor carries the signal; but without a handler Python would not write to it."""
