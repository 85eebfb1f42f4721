"""Stands for the module ``threading``, and for ``queue.SimpleQueue``: each thread is a task of the scheduler.

It is that of one run at a time, which :func:`use` sets. Agents share no thread: ``enumerate()`` lists those of the
agent that asks, as in a process of its own.
"""

from __future__ import annotations

import threading as real
from collections import deque
from collections.abc import Callable
from typing import Any

from .scheduler import FOREVER, Scheduler, Task

PREEMPTED = 0.02
"""How often a thread loses the processor where it takes a lock that several threads of an agent share."""
TIMEOUT_MAX, local, main_thread = real.TIMEOUT_MAX, real.local, real.main_thread

_scheduler: Scheduler
_draw: Callable[[], float]
_threads: dict[Task, Thread] = {}


def use(scheduler: Scheduler) -> None:
    global _scheduler, _draw
    _scheduler, _draw = scheduler, scheduler.chance.random
    _threads.clear()


def _until(timeout: float | None) -> float:
    return FOREVER if timeout is None or timeout < 0 else _scheduler.now + timeout


class Lock:
    def __init__(self) -> None:
        self.owner: Task | None = None
        self.depth = 0
        self.queue: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self.depth and not (blocking and self._wait(timeout)):
            return False
        self.owner, self.depth = _scheduler.current, 1
        return True

    __enter__ = acquire

    def _wait(self, timeout: float) -> bool:
        """Wait until no thread has it."""
        me, until = _scheduler.current, _until(timeout)
        while self.depth:
            if _scheduler.now >= until:
                return False
            assert me is not None, "a lock is held where nothing can be waited for"
            self.queue.append(me)
            _scheduler.block(until)
            if me in self.queue:
                self.queue.remove(me)
        return True

    def release(self) -> None:
        self.depth -= 1
        if not self.depth:
            self.owner = None
            if self.queue:
                _scheduler.wake(self.queue.popleft())

    def __exit__(self, *_: object) -> None:
        self.release()

    def locked(self) -> bool:
        return bool(self.depth)

    def _is_owned(self) -> bool:
        return self.depth > 0 and self.owner is _scheduler.current


class RLock(Lock):
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = _scheduler.current
        if self.depth and self.owner is me:
            self.depth += 1
            return True
        if not self.depth and me is not None and _draw() < PREEMPTED:
            _scheduler.yield_now()
        if self.depth and not (blocking and self._wait(timeout)):
            return False
        self.owner, self.depth = me, 1
        return True

    __enter__ = acquire


class Condition:
    def __init__(self, lock: Any = None) -> None:
        self.lock = lock or RLock()
        self.acquire, self.release = self.lock.acquire, self.lock.release
        self.waiting: list[Task] = []

    def __enter__(self) -> bool:
        return bool(self.lock.acquire())

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        me, lock = _scheduler.current, self.lock
        assert me is not None and lock.owner is me
        depth, lock.depth = lock.depth, 1
        lock.release()
        self.waiting.append(me)
        try:
            _scheduler.block(_until(timeout))
        finally:
            notified = me not in self.waiting
            if not notified:
                self.waiting.remove(me)
            if not _scheduler.over:
                lock.acquire()
            else:
                lock.owner = me
            lock.depth = depth
        return notified

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        until = _until(timeout)
        while not (done := condition()) and _scheduler.now < until:
            self.wait(None if until == FOREVER else until - _scheduler.now)
        return done

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self.waiting))):
            _scheduler.wake(self.waiting.pop(0))

    def notify_all(self) -> None:
        self.notify(len(self.waiting))


class Event:
    def __init__(self) -> None:
        self.flag = False
        self.changed = Condition(Lock())

    def is_set(self) -> bool:
        return self.flag

    def set(self) -> None:
        self.flag = True
        self.changed.notify_all()

    def clear(self) -> None:
        self.flag = False

    def wait(self, timeout: float | None = None) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.flag, timeout)


class Thread:
    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str = "",
        args: Any = (),
        kwargs: Any = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name, self.daemon = name, daemon
        self.task: Task | None = None
        self._call = lambda: target(*args, **(kwargs or {})) if target is not None else None

    @property
    def ident(self) -> int | None:
        return None if self.task is None else self.task.ident

    def start(self) -> None:
        me = _scheduler.current
        assert me is not None
        self.task = _scheduler.spawn(self._call, me.agent, self.name)
        _threads[self.task] = self

    def run(self) -> None:
        self._call()

    def is_alive(self) -> bool:
        return self.task is not None and self.task.alive

    def join(self, timeout: float | None = None) -> None:
        until, me = _until(timeout), _scheduler.current
        while self.is_alive() and _scheduler.now < until:
            assert self.task is not None and me is not None
            self.task.joined.append(me)
            _scheduler.block(until)


class SimpleQueue:
    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.changed = Condition(Lock())

    def put(self, item: Any) -> None:
        self.items.append(item)
        self.changed.notify()

    def get(self) -> Any:
        with self.changed:
            self.changed.wait_for(lambda: bool(self.items))
        return self.items.popleft()


def _thread_of(task: Task | None) -> Any:
    if task is None:
        return real.current_thread()
    if task not in _threads:
        _threads[task] = one = Thread(name=task.name)
        one.task = task
    return _threads[task]


def get_ident() -> int:
    return _scheduler.current.ident if _scheduler.current is not None else 1


def current_thread() -> Any:
    return _thread_of(_scheduler.current)


def enumerate() -> list[Any]:
    me = _scheduler.current
    return [_thread_of(task) for task in _scheduler.tasks if task.alive and me and task.agent == me.agent]
