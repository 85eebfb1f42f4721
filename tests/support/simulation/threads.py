"""What stands for the module ``threading``, and for ``queue.SimpleQueue``: each thread is a task of the scheduler.

Agents share no thread: ``enumerate()`` lists those of the agent that asks, as in a process of its own.
"""

from __future__ import annotations

import threading as real
from collections import deque
from collections.abc import Callable
from typing import Any

from .scheduler import FOREVER, Scheduler, Task

PREEMPTED = 0.02
"""How often a thread loses the processor where it takes a lock that several threads of an agent share."""


def _until(scheduler: Scheduler, timeout: float | None) -> float:
    return FOREVER if timeout is None or timeout < 0 else scheduler.now + timeout


def namespace(scheduler: Scheduler) -> Any:
    """The module, for one run."""

    class Lock:
        reentrant = False

        def __init__(self) -> None:
            self.owner: Task | None = None
            self.depth = 0
            self.queue: deque[Task] = deque()

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            me = scheduler.current
            if self.reentrant and self.owner is me and self.depth:
                self.depth += 1
                return True
            if self.reentrant and not self.depth and me is not None and scheduler.chance.random() < PREEMPTED:
                scheduler.yield_now()
            if self.depth:
                if not blocking:
                    return False
                until = _until(scheduler, timeout)
                while self.depth:
                    if scheduler.now >= until:
                        return False
                    assert me is not None, "a lock is held where nothing can be waited for"
                    self.queue.append(me)
                    scheduler.block(until)
                    if me in self.queue:
                        self.queue.remove(me)
            self.owner, self.depth = me, 1
            return True

        def release(self) -> None:
            self.depth -= 1
            if not self.depth:
                self.owner = None
                if self.queue:
                    scheduler.wake(self.queue.popleft())

        def locked(self) -> bool:
            return bool(self.depth)

        def __enter__(self) -> bool:
            if self.depth:
                return self.acquire()
            self.owner, self.depth = scheduler.current, 1
            return True

        def __exit__(self, *_: object) -> None:
            self.depth -= 1
            if not self.depth:
                self.owner = None
                if self.queue:
                    scheduler.wake(self.queue.popleft())

        def _is_owned(self) -> bool:
            return self.depth > 0 and self.owner is scheduler.current

    class RLock(Lock):
        reentrant = True

        def __enter__(self) -> bool:
            if self.depth and self.owner is scheduler.current:
                self.depth += 1
                return True
            return self.acquire()

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
            me, lock = scheduler.current, self.lock
            assert me is not None and lock.owner is me
            depth, lock.depth = lock.depth, 1
            lock.release()
            self.waiting.append(me)
            try:
                scheduler.block(_until(scheduler, timeout))
            finally:
                arrived = me not in self.waiting
                if not arrived:
                    self.waiting.remove(me)
                if not scheduler.over:
                    lock.acquire()
                else:
                    lock.owner = me
                lock.depth = depth
            return arrived

        def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
            until = _until(scheduler, timeout)
            while not (done := condition()) and scheduler.now < until:
                self.wait(None if until == FOREVER else until - scheduler.now)
            return done

        def notify(self, n: int = 1) -> None:
            for _ in range(min(n, len(self.waiting))):
                scheduler.wake(self.waiting.pop(0))

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
            me = scheduler.current
            assert me is not None
            self.task = scheduler.spawn(self._call, me.agent, self.name)
            threads[self.task] = self

        def run(self) -> None:
            self._call()

        def is_alive(self) -> bool:
            return self.task is not None and self.task.alive

        def join(self, timeout: float | None = None) -> None:
            until, me = _until(scheduler, timeout), scheduler.current
            while self.is_alive() and scheduler.now < until:
                assert self.task is not None and me is not None
                self.task.joined.append(me)
                scheduler.block(until)

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

    threads: dict[Task, Any] = {}

    def thread_of(task: Task | None) -> Any:
        if task is None:
            return real.current_thread()
        if task not in threads:
            threads[task] = thread = Thread(name=task.name)
            thread.task = task
        return threads[task]

    class Namespace:
        TIMEOUT_MAX = real.TIMEOUT_MAX
        local, main_thread = real.local, real.main_thread

        @staticmethod
        def get_ident() -> int:
            return scheduler.current.ident if scheduler.current is not None else 1

        @staticmethod
        def current_thread() -> Any:
            return thread_of(scheduler.current)

        @staticmethod
        def enumerate() -> list[Any]:
            me = scheduler.current
            return [thread_of(task) for task in scheduler.tasks if task.alive and me and task.agent == me.agent]

    result: Any = Namespace
    result.Lock, result.RLock, result.Condition, result.Event = Lock, RLock, Condition, Event
    result.Thread, result.SimpleQueue = Thread, SimpleQueue
    return result
