"""A shorter switch interval while a neighbour is served.

A thread that wants the lock of an interpreter that runs pure Python gets it after the switch interval, 5 ms, and gives
it up in each system call and each operation of torch: a request of a few bytes would take ten such turns.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 0.0005


class _SwitchInterval:
    """The process's switch interval, which belongs to the user; several agents may serve at the same time.

    If the current value is not the short one that was set here, the user has changed it since.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._users = self._short = 0.0

    def shorten(self) -> None:
        with self._lock:
            now = sys.getswitchinterval()
            if not self._inside or now != self._short:
                self._users = now
                if now > SECONDS:
                    sys.setswitchinterval(SECONDS)
                self._short = sys.getswitchinterval()
            self._inside += 1

    def restore(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._put_back()

    def after_fork(self) -> None:
        """The child has none of the threads that were inside or held the lock."""
        self._lock = threading.Lock()
        if self._inside:
            self._put_back()
        self._inside = 0

    def _put_back(self) -> None:
        if sys.getswitchinterval() == self._short:
            # Python truncates to whole microseconds: setting the value that was read would often lose one each time.
            sys.setswitchinterval(self._users + 0.5e-6)


_interval = _SwitchInterval()
os.register_at_fork(after_in_child=_interval.after_fork)


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Switch threads more often within the block.

    Several threads may be inside at the same time, and one may be inside twice. The last one to leave restores the
    user's value, or keeps a value that the user has set since.
    """
    _interval.shorten()
    try:
        yield
    finally:
        _interval.restore()
