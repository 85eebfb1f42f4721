"""Wait for any of an agent's descriptors, and be woken by other threads."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class Poller:
    """``epoll`` with a callback for each descriptor. ``poll`` is called by one thread at a time, the rest by any.

    Attributes:
        waker: An eventfd; to write to it also ends a ``poll``, without a lock.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._lock = threading.Lock()
        self.waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self.waker, READ)
        self._asleep = False
        self._woken = False

    def add(self, fd: int, callback: Callable[[int], None], events: int = READ) -> None:
        self._callbacks[fd] = callback
        self._epoll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def remove(self, fd: int) -> None:
        if self._callbacks.pop(fd, None) is not None:
            try:
                self._epoll.unregister(fd)
            except OSError:
                pass

    def wake(self) -> None:
        """End the ``poll`` that is in progress, or the next one."""
        with self._lock:
            if self._woken:
                return
            self._woken = True
            if self._asleep:
                os.eventfd_write(self.waker, 1)

    def poll(self, timeout: float) -> list[tuple[Callable[[int], None], int]]:
        """Wait up to ``timeout`` seconds; the callbacks that are due, each with its events."""
        with self._lock:
            if self._woken:
                timeout = 0
            else:
                self._asleep = True
        try:
            ready = self._epoll.poll(timeout)
        finally:
            with self._lock:
                self._asleep = False
                self._woken = False
        due = []
        for fd, events in ready:
            if fd == self.waker:
                os.eventfd_read(fd)
                continue
            callback = self._callbacks.get(fd)
            if callback is not None:
                due.append((callback, events))
        return due

    def descriptors(self) -> list[int]:
        return [self._epoll.fileno(), self.waker]

    def close(self) -> None:
        with self._lock:
            self._woken = True  # a late wake finds nothing to do
        self._callbacks.clear()
        self._epoll.close()
        os.close(self.waker)
