"""Locks on the bytes of a memory file. The kernel gives a lock up when its holder dies.

A lock in shared memory itself would stay locked for ever when its holder is killed. A byte-range lock on an open file
description does not, costs a microsecond, and needs no memory. It has two gaps that are closed here: it does not
exclude two threads that use one description (a lock of this process besides), and it cannot wait until a deadline (it
is tried again and again, more and more rarely).
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

F_OFD_SETLK = 37
_FLOCK = struct.Struct("hhxxxxqqixxxx")
_TRIES = 20
"""Attempts in a row before the first pause: most locks are held for microseconds."""
_SHORTEST, _LONGEST = 20e-6, 1e-3


class Busy(Exception):
    """The lock was not free until the deadline."""


class ByteLocks:
    """Exclusive locks on single bytes of the file behind a descriptor, for all threads of this agent."""

    def __init__(self, fd: int) -> None:
        # A description of our own: locks belong to descriptions, and a descriptor that was sent shares its sender's.
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._threads: dict[int, threading.Lock] = defaultdict(threading.Lock)

    def try_acquire(self, byte: int) -> bool:
        """Take a lock if it is free."""
        mine = self._threads[byte]
        if not mine.acquire(blocking=False):
            return False
        try:
            if self._fd >= 0:  # a window that was freed may still be looked at by threads of this process
                fcntl.fcntl(self._fd, F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        except BaseException as error:
            mine.release()
            if isinstance(error, (BlockingIOError, PermissionError)):
                return False
            raise
        return True

    def release(self, byte: int) -> None:
        if self._fd >= 0:
            fcntl.fcntl(self._fd, F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))
        self._threads[byte].release()

    def acquire(self, byte: int, deadline: float, check: Callable[[], None] = lambda: None) -> None:
        """Take a lock, waiting until ``deadline`` (``time.monotonic()``).

        Args:
            check: Called between attempts; what it raises ends the wait.

        Raises:
            Busy: Somebody else held it all the time.
        """
        pause = _SHORTEST
        tries = 0
        while not self.try_acquire(byte):
            tries += 1
            if tries < _TRIES:
                time.sleep(0)
                continue
            check()
            if time.monotonic() > deadline:
                raise Busy
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    @contextmanager
    def hold(self, bytes_: list[int], deadline: float, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold several locks, taken in ascending order."""
        held: list[int] = []
        try:
            for byte in sorted(bytes_):
                self.acquire(byte, deadline, check)
                held.append(byte)
            yield
        finally:
            for byte in reversed(held):
                self.release(byte)

    @property
    def descriptor(self) -> int:
        return self._fd

    def close(self) -> None:
        """Give up the description, and with it whatever is held."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
