"""The progress engine of an agent: one thread at a time drives, that is, polls the sockets and resumes operations.

A waiting caller drives by itself, so a small blocking operation involves no other thread. Otherwise the progress thread
drives, so nonblocking operations advance while the caller computes. The progress thread pauses briefly whenever a
caller submits or drives, because the next call probably follows. So a burst of submissions is sent in few packets, and
two threads do not exchange the interpreter lock for each of them.

The driving thread also runs the callbacks of callers (:class:`Callbacks`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from .. import clock
from .._signals import SLICE, deferred, undeferred
from ..transport.poller import Poller

AFTER_DRIVING = 0.002
"""Seconds for which the progress thread does not drive after a caller has driven."""
AFTER_SUBMITTING = 0.0005
"""The same after a caller has submitted."""
AFTER_SMALL = 0.002
"""The same after the submission of a small operation: more may follow, and fusing them is cheaper."""
LONGEST_PAUSE = 0.02
"""Seconds for which callers that submit and never wait can keep the progress thread from driving.

Also its longest sleep while callers drive repeatedly; otherwise it checks twice in each ``AFTER_DRIVING``."""
STOP_SECONDS = 5.0
"""Seconds that :meth:`Progress.stop` waits for another driving thread, whose operations have all ended by then."""
AFTER_FAILING = 0.1
"""Seconds after which the progress thread tries again if driving has failed."""
FOREVER = float("inf")
BACKLOG_POLLS = 300
"""Polls at most that take the backlog of messages: more packets than a Unix socket holds."""
LONGEST_POLL = 1.0
"""Seconds of one poll at most.

A signal that arrives just before the system call does not end it, and released memory is only reclaimed between two
polls."""
log = logging.getLogger("shoal")
T = TypeVar("T")


class Driven(Protocol):
    """The interface of the object that the progress engine drives."""

    def advance(self) -> None:
        """Resume all operations that are ready, and pass their messages to the sockets. Without the lock."""

    def handle(self, due: list[tuple[Callable[[int], None], int]]) -> None:
        """Handle received messages. With the lock."""

    def check(self, now: float) -> float:
        """Check deadlines. With the lock. Returns when to check again, as ``clock.monotonic()``."""

    def after(self) -> None:
        """Run callbacks. Without the lock."""

    def break_off(self, error: Exception) -> None:
        """End the operations that wait for this object, because it cannot be driven any more. With the lock."""


class Progress:
    """Callers and the progress thread take turns at driving. ``lock`` also guards the driven object's tables."""

    def __init__(self, driven: Driven, poller: Poller, name: str) -> None:
        self.lock = threading.RLock()
        self.waiters = 0
        self.next_check = FOREVER
        """``clock.monotonic()`` at which deadlines have to be checked."""
        self._driven = driven
        self._poller = poller
        self._driver = 0  # the ident of the driving thread; 0 if none drives
        self._done: Callable[[], bool] | None = None  # the condition of a caller that drives without a time limit
        self._paused_until = 0.0  # the progress thread does not drive before this time
        self._last_driven = 0.0  # when a thread last stopped driving
        self._must_yield = False  # a caller has submitted: the progress thread has to stop driving
        self._polled = False  # whether the last driving thread has polled
        self._caller_drives = 0  # times that callers have driven, since the progress thread last checked
        self._sleeps_until = 0.0  # when the progress thread wakes by itself
        self._closing = False
        self._running = threading.Event()
        self._turn = threading.Condition(self.lock)
        self._progress_turn = threading.Condition(self.lock)
        self._thread = threading.Thread(target=self._progress, name=name, daemon=True)

    def start(self) -> None:
        threads = torch.get_num_threads()
        self._thread.start()
        self._running.wait()
        torch.set_num_threads(threads)  # new threads take the last value that any thread has set

    def stop(self) -> None:
        """End driving. A thread that runs a callback for longer than :data:`STOP_SECONDS` ends after it."""
        with self.lock:
            self._closing = True
            self._progress_turn.notify_all()
            self._turn.notify_all()
            self._poller.wake()
            limit = clock.monotonic() + STOP_SECONDS
            self.waiters += 1  # so that the driving thread notifies this one when it stops
            while self._driver not in (0, self._thread.ident) and clock.monotonic() < limit:
                self._turn.wait(STOP_SECONDS)
            self.waiters -= 1
        # Without the lock, because the progress thread takes it again before it ends.
        if self.started:
            self._thread.join(max(0.0, limit - clock.monotonic()))
            if self._thread.is_alive():
                log.warning("%s still runs a callback, and this agent shuts down without it", self._thread.name)

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    @property
    def stopped(self) -> bool:
        """Whether driving has been stopped for good."""
        return self._closing

    @property
    def caller_waits(self) -> bool:
        """Whether a thread of the script is blocked in an operation."""
        return bool(self.waiters) or self._driver not in (0, self._thread.ident)

    @property
    def awaited(self) -> object:
        """The object that the calling thread waits for without a time limit: the owner of its ``done`` method. None if
        the caller is the progress thread, or if another thread waits as well.
        """
        if self._driver != threading.get_ident() or self._driver == self._thread.ident or self.waiters:
            return None
        return getattr(self._done, "__self__", None)

    @property
    def is_driving(self) -> bool:
        """Whether the calling thread is driving."""
        return self._driver == threading.get_ident()

    def check_by(self, when: float) -> None:
        """Check deadlines by this time at the latest. Call it with the lock, or from a driven object."""
        if when < self.next_check:
            self.next_check = when

    def submitted(self, away: float = AFTER_SUBMITTING) -> None:
        """Prepare to drive new work after the progress thread has paused for ``away`` seconds. With the lock."""
        if self._driver in (0, self._thread.ident):
            soon = clock.monotonic() + away
            if self._driver and not self._must_yield:
                self._must_yield = True
                self._last_driven = soon  # the pause below counts from the moment at which that thread stops
                self._poller.wake()
            # Bounded: a caller that submits and never waits would otherwise keep the progress thread away for good.
            self._paused_until = max(self._paused_until, min(soon, self._last_driven + LONGEST_PAUSE))
        elif self._driver != threading.get_ident():
            # Another caller drives and may be in poll(), which would otherwise last until the next message or deadline.
            self._poller.wake()

    def wake(self) -> None:
        """Wake the driving thread, because work is ready. Call it from any thread."""
        self._poller.wake()

    def notify(self) -> None:
        """Wake the waiting threads, because an operation has ended. Call it with the lock."""
        if self.waiters:
            self._turn.notify_all()

    def drive_until(self, done: Callable[[], bool], limit: float = FOREVER) -> bool:
        """Drive, or let another thread drive, until ``done()`` or the time ``limit``.

        A thread that drives already must not call it. In the main thread it also returns, without driving, when a
        signal has arrived, so that the signal can be handled.
        """
        with deferred as in_main_thread:
            if not self._take_over(done, limit, SLICE if in_main_thread else 60.0):
                return done()
            if in_main_thread:
                # The handler only records a signal, so without a waker it would wait until poll() ends by itself.
                deferred.waker = self._poller.waker
            began = clock.monotonic()
            again = began - self._last_driven < AFTER_DRIVING  # a loop of calls: the next is probably near
            try:
                ended = self._drive(done, limit)
            finally:
                if in_main_thread:
                    # The poller may be closed before the next signal, and another file may then have this descriptor.
                    deferred.waker = -1
                with self.lock:
                    self._driver = 0
                    self._caller_drives += 1
                    if self._polled:
                        self._last_driven = clock.monotonic()
                        self._paused_until = self._last_driven + AFTER_DRIVING
                        long = self._last_driven - began > AFTER_DRIVING
                        if long and not again and self._sleeps_until > self._paused_until:
                            self._progress_turn.notify()  # the caller may compute for long now
                    # A waiting thread that is not notified takes over only at the end of its slice, up to 60 s later.
                    if self.waiters:
                        self._turn.notify_all()
                # _drive() returns without running the callbacks that its last advance() has added.
                self._driven.after()
            return ended or done()

    def _take_over(self, done: Callable[[], bool], limit: float, slice_: float) -> bool:
        """Wait until no thread drives, and take over; False if there is no reason to drive any more.

        ``slice_``: the seconds of one wait, which a signal would not end.
        """
        with self.lock:
            if self._driver:
                self.waiters += 1
                try:
                    while self._driver and not (done() or self._closing or deferred.pending):
                        rest = limit - clock.monotonic()
                        if rest <= 0:
                            return False
                        # The progress thread notices a waiter only between two polls. Unless it is woken, it drives on
                        # until a message.
                        self._poller.wake()
                        self._turn.wait(min(rest, slice_))
                finally:
                    self.waiters -= 1
            if self._closing or (deferred.came and deferred.pending) or done():
                return False
            self._driver = threading.get_ident()
            return True

    def _drive(self, done: Callable[[], bool], limit: float) -> bool:
        """Drive until ``done()``, a signal, or the time ``limit``. Returns whether ``done()``."""
        if torch.is_inference_mode_enabled():  # as in the engine: any thread may use the memory of received messages
            with torch.inference_mode(False):
                return self._drive(done, limit)
        driven, poller = self._driven, self._poller
        self._polled = False
        # A caller with a time limit continues by itself. Seen as blocked, it could get a wrong deadlock error.
        self._done = done if limit == FOREVER else None
        while True:
            # Before the poll: messages of a call that was just submitted are still queued, and no answer can come
            # before them.
            driven.advance()
            if done():
                return True
            now = clock.monotonic()
            if now >= limit or (deferred.came and deferred.pending):
                return False
            self._polled = True
            due = poller.poll(max(0.0, min(self.next_check, limit, now + LONGEST_POLL) - now))
            with self.lock:
                driven.handle(due)
                if clock.monotonic() >= self.next_check:
                    self._take_backlog()
                    self.next_check = FOREVER  # the check below may add deadlines
                    self.check_by(driven.check(clock.monotonic()))
            driven.after()
            # A callback may have outlasted stop(), which waits for it with a limit. What is driven is closed since.
            if self._closing:
                return False

    def _take_backlog(self) -> None:
        """Take all messages that have arrived, before deadlines are checked.

        This thread may have waited long for the interpreter lock, before the last poll or after it. A shutdown message,
        or the notice of the loss that explains the delay, may be unread.
        """
        for _ in range(BACKLOG_POLLS):
            due = self._poller.poll(0.0)
            if not due:
                return
            self._driven.handle(due)

    def _progress(self) -> None:
        torch.set_num_threads(1)
        self._running.set()
        me = threading.get_ident()
        while True:
            with self.lock:
                self._must_yield, pause = False, AFTER_DRIVING / 4
                while not self._closing:
                    away = self._paused_until - clock.monotonic()
                    # A waiting caller drives first. If the progress thread did, each blocking call would cost two
                    # thread switches.
                    if not self._driver and not self.waiters and away <= 0:
                        break
                    pause = (
                        min(2 * pause, LONGEST_PAUSE) if self._driver or self._caller_drives > 1 else AFTER_DRIVING / 2
                    )
                    self._caller_drives = 0
                    self._sleeps_until = clock.monotonic() + max(away, pause)
                    self._progress_turn.wait(max(away, pause))
                if self._closing:
                    return
                self._driver = me
            try:
                self._drive(lambda: bool(self.waiters) or self._closing or self._must_yield, FOREVER)
            except Exception as error:  # such as no memory; without this thread no operation would advance
                with self.lock:
                    self._driven.break_off(error)
                    # If driving fails each time, the pause keeps this thread from using a whole core.
                    self._progress_turn.wait(AFTER_FAILING)
            finally:
                with self.lock:
                    # Also after an error: while a driver is set, no other thread can take over.
                    self._driver = 0
                    self._last_driven = clock.monotonic() if self._polled else self._last_driven
                    self._turn.notify_all()


class Callbacks:
    """The callbacks of one agent. They are added under the engine's lock, and run without it.

    Attributes:
        due: The function, argument and owner of each callback. A plain attribute, because it is read after every call.
    """

    def __init__(self) -> None:
        self.due: deque[tuple[Callable[[Any], None], Any, object]] = deque()
        self._running: list[None] = []  # one entry for each call; appending and popping need no lock

    @property
    def pending(self) -> bool:
        """Whether a callback is due or has not returned: it may still submit an operation."""
        return bool(self.due or self._running)

    def add(self, callback: Callable[[T], None], argument: T, owner: object) -> None:
        """Run ``callback(argument)`` later; ``owner`` names it in the log if it fails."""
        self.due.append((callback, argument, owner))

    def run(self) -> None:
        """Run the callbacks that are due. Exceptions are logged."""
        while self.due:
            self._running.append(None)  # before popleft(), or `pending` would miss the callback for a moment
            try:
                self._run_first()
            finally:
                self._running.pop()

    def _run_first(self) -> None:
        try:
            callback, argument, owner = self.due.popleft()
        except IndexError:  # another thread of this agent has taken it
            return
        try:
            with undeferred:
                callback(argument)
        except (Exception, SystemExit):
            log.exception("a callback of %s failed", owner)
