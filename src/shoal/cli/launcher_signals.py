"""The signals that a launcher gets, as bytes in a pipe: they are handled in its loop, and none is missed.

One context exists for the whole life of a launcher. A Ctrl-C between the end of one run and the begin of the next is
read by the next reader.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Protocol

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CAUGHT = (*FORWARDED, signal.SIGCHLD, signal.SIGTSTP)
_PR_SET_PDEATHSIG = 1
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


def death_with(parent: int) -> Callable[[], None]:
    """Make the function that the child calls between fork and exec, with all lookups made before the fork.

    SIGKILL and not SIGTERM: when the launcher has been killed, no process is left to escalate.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    arguments = [ctypes.c_ulong(value) for value in (_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)]

    def bind() -> None:
        prctl(*arguments)
        if os.getppid() != parent:
            # The launcher died before the call, so its death will not be announced.
            os.kill(os.getpid(), signal.SIGKILL)

    return bind
