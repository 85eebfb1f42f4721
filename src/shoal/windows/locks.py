"""Locks on the bytes of a memory file. The kernel gives a lock up when its holder dies.

A lock in shared memory itself would stay locked for ever when its holder is killed. A byte-range lock on an open file
description does not, costs a microsecond, and needs no memory. It has three gaps that are closed here: it does not
exclude two threads that use one description (so what this process holds is kept besides), it is lost when the
description is closed (which therefore waits for the last holder), and it cannot wait until a deadline (it is tried
again and again, more and more rarely).
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable

from ..interrupts import held

F_OFD_SETLK = 37
_FLOCK = struct.Struct("hhxxxxqqixxxx")
_TRIES = 20
"""Attempts in a row before the first pause: most locks are held for microseconds."""
_SHORTEST, _LONGEST = 20e-6, 1e-3


class Busy(Exception):
    """The lock was not free until the deadline.

    Attributes:
        keeper: The rank that had it, where that is known.
    """

    def __init__(self, keeper: int | None = None) -> None:
        super().__init__(keeper)
        self.keeper = keeper


class Freed(Exception):
    """What the locks are for has been given up."""


class ByteLocks:
    """Exclusive locks on single bytes of the file behind a descriptor, for all threads of this agent."""

    def __init__(self, fd: int) -> None:
        # A description of our own: locks belong to descriptions, and a descriptor that was sent shares its sender's.
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        # Also keeps the descriptor open while a thread is about to use its number, which could be somebody else's then.
        self._guard = threading.Lock()
        self._held: set[int] = set()
        self._closed = False

    def try_acquire(self, byte: int) -> bool:
        """Take a lock if it is free.

        Raises:
            Freed: The locks have been closed.
        """
        with self._guard:
            if self._closed:
                raise Freed
            if byte in self._held:
                return False
            try:
                fcntl.fcntl(self._fd, F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
            except (BlockingIOError, PermissionError):
                return False
            self._held.add(byte)
            return True

    def release(self, byte: int) -> None:
        with self._guard:
            self._held.discard(byte)
            fcntl.fcntl(self._fd, F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))
            self._close_if_unused()

    def acquire(self, byte: int, deadline: float, check: Callable[[], None] = lambda: None) -> None:
        """Take a lock, waiting until ``deadline`` (``time.monotonic()``).

        Args:
            check: Called between attempts; what it raises ends the wait.

        Raises:
            Busy: Somebody else held it all the time.
            Freed: The locks have been closed.
        """
        pause = _SHORTEST
        tries = 0
        while not self.try_acquire(byte):
            tries += 1
            if tries < _TRIES:
                time.sleep(0)
                continue
            check()
            held.checkpoint()
            if time.monotonic() > deadline:
                raise Busy
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    @property
    def descriptor(self) -> int:
        return self._fd

    def close(self) -> None:
        """Grant no lock any more, and give up the description once nothing is held."""
        with self._guard:
            self._closed = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._closed and not self._held and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
