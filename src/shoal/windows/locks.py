"""Locks on the bytes of a memory file, first come, first served. The kernel gives a lock up when its holder dies.

A lock in shared memory itself would stay locked for ever when its holder is killed. A byte-range lock on an open file
description does not, costs a microsecond, and needs no memory. It has four gaps that are closed here:

- It does not exclude two threads that use one description, so this process also keeps a set of the bytes it holds.
- It is lost when the description is closed, which therefore waits for the last holder.
- It cannot wait until a deadline, so it is retried at increasing intervals.
- It has no queue, so an agent that takes a lock in a loop could keep others from it for seconds. A waiter holds a lock
  on one more byte, its place in the queue: far behind the file, at an offset that is the time of its arrival. The
  waiter with the first place gets the lock. An agent that does not wait yet checks for places first: once in
  ``_UNSEEN`` times and in ``_UNSEEN_SECONDS``, because a check costs as much as the lock. The kernel frees the place of
  a killed process, as any lock. A stopped process does not block the queue: if the lock stays free for ``_PATIENCE``,
  the next waiter takes it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Callable

from .. import clock
from .._signals import deferred

F_OFD_GETLK, F_OFD_SETLK = 36, 37
_FLOCK = struct.Struct("hhxxxxqqixxxx")
_FREE = struct.pack("h", fcntl.F_UNLCK)
_PLACES = 1 << 48
"""Offsets for the queue of one byte: a place is a time since the machine has started, in microseconds. Of an offset's
63 bits this leaves room for 32,766 bytes, and for eight years."""
_TRIES = 20
"""Attempts in a row before the first pause: most locks are held for microseconds."""
_SHORTEST, _LONGEST = 20e-6, 1e-3
_PATIENCE = 0.1
"""Seconds: a waiter that does not take a free lock for so long, in its turn, counts as stopped."""
_UNSEEN, _UNSEEN_SECONDS = 8, 1e-3
"""How often, and for how long, a lock may be taken without a check of the queue: the limit of overtaking a waiter."""
_SHARE = 1 / 32
"""A pause is this share of the time waited so far, which bounds the delay of noticing a free lock."""


class Busy(Exception):
    """The lock was not free until the deadline.

    Attributes:
        keeper: The rank that had it, if known.
    """

    def __init__(self, keeper: int | None = None) -> None:
        super().__init__(keeper)
        self.keeper = keeper


class Freed(Exception):
    """The memory that the locks protect has been freed."""


class _Waiter:
    """A thread that waits for one byte."""

    __slots__ = ("arrived", "free_since", "is_first", "place")

    def __init__(self) -> None:
        # 0 means that the waiter has no place yet, so a place is never 0. The clock is the machine's, and thus orders
        # the waiters of all its processes.
        self.arrived = max(1, clock.monotonic_ns() // 1000 % _PLACES)
        self.place = 0  # in the queue of all processes; 0: none yet
        self.is_first = False  # in that queue
        self.free_since = 0.0  # the lock, while it is another waiter's turn; 0.0: it is not free


def _request(kind: int, start: int, length: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)


class _Byte:
    """The requests to the kernel for one byte, and the threads of this process that wait for it, in their order."""

    __slots__ = ("anybody", "lock", "looks_at", "passed", "queue", "unlock", "unseen", "waiters")

    def __init__(self, byte: int) -> None:
        self.lock, self.unlock = _request(fcntl.F_WRLCK, byte, 1), _request(fcntl.F_UNLCK, byte, 1)
        self.queue = (byte + 1) * _PLACES
        self.passed = 0  # places before this one are of processes that are stopped
        self.anybody = _request(fcntl.F_WRLCK, self.queue, _PLACES)
        self.waiters: list[_Waiter] = []
        self.unseen = _UNSEEN  # times that the lock was taken without a look at the queue
        self.looks_at = 0.0  # when to look again at the latest


class ByteLocks:
    """Exclusive locks on single bytes of the file behind a descriptor, for all threads of this agent."""

    def __init__(self, fd: int) -> None:
        # A separate description: locks belong to descriptions, and a received descriptor shares its sender's.
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        # Also keeps the descriptor open while a thread is about to use its number, which might be reused.
        self._guard = threading.Lock()
        self._held: set[int] = set()
        self._bytes: dict[int, _Byte] = {}
        self._closed = False

    def _of(self, byte: int) -> _Byte:
        found = self._bytes.get(byte)
        if found is None:
            found = self._bytes[byte] = _Byte(byte)
        return found

    def try_acquire(self, byte: int) -> bool:
        """Take a lock if it is free, even before waiters: the queue does not apply to attempts without waiting.

        Raises:
            Freed: The locks have been closed.
        """
        with self._guard:
            return self._take(byte, self._of(byte))

    def _take(self, byte: int, state: _Byte) -> bool:
        # A lock granted after close() would keep the description open, and its holder would write to a window that is
        # freed.
        if self._closed:
            raise Freed
        # The kernel grants a lock again to the description that has it, so two threads of this process would both get
        # it.
        if byte in self._held or not self._lock(state.lock):
            return False
        self._held.add(byte)
        return True

    def _lock(self, request: bytes) -> bool:
        try:
            fcntl.fcntl(self._fd, F_OFD_SETLK, request)
        # POSIX lets a system report a taken lock by either error. Others, such as a bad descriptor, are defects and
        # must reach the caller.
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _sees_queue(self, state: _Byte) -> bool:
        """Whether another process waits."""
        state.unseen, state.looks_at = 1, clock.monotonic() + _UNSEEN_SECONDS
        return self._is_held(state.anybody)

    def _is_held(self, query: bytes) -> bool:
        """Whether another process holds any of some bytes."""
        return fcntl.fcntl(self._fd, F_OFD_GETLK, query)[:2] != _FREE

    def _is_first(self, state: _Byte, place: int) -> bool:
        """Whether no other process holds a place before this one."""
        rest = place - state.passed
        return rest <= 0 or not self._is_held(_request(fcntl.F_WRLCK, state.queue + state.passed, rest))

    def release(self, byte: int) -> None:
        with self._guard:
            # Both under the guard: a thread that sees the byte as not held must not find the kernel's lock still taken
            # by its own process.
            self._held.discard(byte)
            fcntl.fcntl(self._fd, F_OFD_SETLK, self._bytes[byte].unlock)
            # The window was closed while this lock was held. Its last holder closes the description, because closing
            # gives up all locks of it at once.
            if self._closed:
                self._close_if_unused()

    def acquire(self, byte: int, deadline: float, check: Callable[[], None] = lambda: None) -> None:
        """Take a lock, waiting until ``deadline`` (``clock.monotonic()``), in the order of arrival.

        Args:
            check: Called between attempts; what it raises ends the wait.

        Raises:
            Busy: Others held it all the time.
            Freed: The locks have been closed.
        """
        with self._guard:
            if self._closed:
                raise Freed
            state = self._bytes.get(byte) or self._of(byte)
            # Limited by count and by time: without the limits an agent that locks in a loop would never see the queue,
            # and its waiters would starve.
            if (
                state.unseen < _UNSEEN
                and not state.waiters
                and byte not in self._held
                and clock.monotonic() < state.looks_at
            ):
                state.unseen += 1  # without a check of the queue: the whole cost of an uncontended lock
                try:
                    fcntl.fcntl(self._fd, F_OFD_SETLK, state.lock)
                    self._held.add(byte)
                    return
                except (BlockingIOError, PermissionError):
                    pass
            # The kernel reports no locks of this description itself, so the queue shows other processes only. Without
            # the test of waiters a call would overtake threads of its own process.
            elif not state.waiters and not self._sees_queue(state) and self._take(byte, state):
                return
            state.unseen = _UNSEEN  # there may be others, so look the next time
            waiter = _Waiter()
            state.waiters.append(waiter)
        try:
            self._wait(byte, state, waiter, deadline, check)
        finally:
            # Also after an error: a place that stays would make every other waiter wait for its turn until it loses
            # patience.
            with self._guard:
                state.waiters.remove(waiter)
                if waiter.place and self._fd >= 0:
                    fcntl.fcntl(self._fd, F_OFD_SETLK, _request(fcntl.F_UNLCK, state.queue + waiter.place, 1))

    def _wait(self, byte: int, state: _Byte, waiter: _Waiter, deadline: float, check: Callable[[], None]) -> None:
        tries, since, was_first = 0, clock.monotonic(), False
        while True:
            with self._guard:
                if self._take_in_turn(byte, state, waiter):
                    return
            tries += 1
            if tries < _TRIES:
                # Without the guard, so that the holder's thread can run and release; it needs the guard for that.
                clock.sleep(0)
                continue
            # Only in the pauses, as most locks are free within the first tries. It ends the wait if the owner is lost,
            # has freed the window, or this agent shuts down.
            check()
            deferred.checkpoint()
            now = clock.monotonic()
            if now > deadline:
                raise Busy
            if waiter.is_first and not was_first:  # its predecessor has only just taken the lock
                was_first, since = True, now
            clock.sleep(min(_LONGEST, max(_SHORTEST, (now - since) * _SHARE)))

    def _take_in_turn(self, byte: int, state: _Byte, waiter: _Waiter) -> bool:
        """Take the lock if it is this waiter's turn among the threads of this process and the other processes."""
        if self._closed:
            raise Freed
        leads = state.waiters[0] is waiter  # among the waiters of this process
        # Only the first waiter of a process has a place in the queue of all processes: the others of its process follow
        # it in their own order.
        if leads and not waiter.place:
            place = waiter.arrived
            # A refusal comes from another process only: in this one, one waiter at a time has a place.
            while not self._lock(_request(fcntl.F_WRLCK, state.queue + place, 1)):  # two have arrived at the same time
                place += 1
            waiter.place = place
        if leads and not waiter.is_first:
            waiter.is_first = self._is_first(state, waiter.place)
        if leads and waiter.is_first:
            return self._take(byte, state)
        if byte in self._held or self._is_held(state.lock):
            # Somebody has the lock, so the queue moves. Patience runs only while the lock is free and the waiter whose
            # turn it is does not take it.
            waiter.free_since = 0.0
            return False
        now = clock.monotonic()
        if not waiter.free_since:
            waiter.free_since = now
        if now - waiter.free_since < _PATIENCE:
            return False
        if leads:
            # Later checks skip the stopped process's place. Otherwise each waiter behind it would lose the same
            # patience again, for each lock.
            state.passed = waiter.place
            state.anybody = _request(fcntl.F_WRLCK, state.queue + state.passed, _PLACES - state.passed)
        return self._take(byte, state)

    @property
    def descriptor(self) -> int:
        return self._fd

    def close(self) -> None:
        """Grant no more locks, and close the description once no lock is held."""
        with self._guard:
            self._closed = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._closed and not self._held and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
