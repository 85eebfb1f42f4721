"""Greenlets replace threads, with virtual time: one event at a time, in an order drawn by a seed."""

from __future__ import annotations

import contextvars
import heapq
import random
from collections.abc import Callable
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

FOREVER = float("inf")
STEP = 2e-6
"""Seconds that a step takes at least."""


class Stuck(AssertionError):
    """The run does not come to its end."""


class Task:
    """One thread of one agent."""

    def __init__(self, scheduler: Scheduler, run: Callable[[], Any], agent: int, name: str, ident: int) -> None:
        self.agent, self.name, self.ident = agent, name, ident
        self.alive = True
        self.killed = False  # with its process, and never runs again
        self.blocked = False
        self.grad = True  # whether autograd records, which each thread has for itself
        self.waits = 0  # how often it has waited, so that a late timer is recognised
        self._scheduler = scheduler
        self._run = run
        self.greenlet = greenlet(self._main, scheduler.hub)
        self.greenlet.gr_context = contextvars.Context()
        self.joined: list[Task] = []

    def _main(self) -> None:
        try:
            self._run()
        finally:
            self.alive = False
            for task in self.joined:
                self._scheduler.wake(task)


class Scheduler:
    """Runs tasks, one at a time.

    Attributes:
        now: Virtual time, in seconds.
        chance: All draws of the run come from it.
        slow: By agent: the longest pause before each of its steps, in seconds.
        dead: Agents that have crashed and have not been started again.
        done: All agents have ended, so that the run is over.
    """

    def __init__(self, seed: int) -> None:
        self.now = 1000.0
        self.chance = random.Random(seed)
        self.slow: dict[int, float] = {}
        self.dead: set[int] = set()
        self.steps = 0
        self.done = False
        self.over = False
        self.hub = getcurrent()
        self.current: Task | None = None
        self.tasks: list[Task] = []
        self._at_steps: list[tuple[int, int, Callable[[], None]]] = []
        self._next_step = FOREVER
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def spawn(self, run: Callable[[], Any], agent: int, name: str) -> Task:
        self._count += 1
        task = Task(self, run, agent, name, 1_000_000 + self._count)
        self.tasks.append(task)
        self._ready.append(task)
        return task

    def at(self, when: float, call: Callable[..., object], *args: Any) -> None:
        """Have something happen at a time."""
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, call, args))

    def at_step(self, step: int, call: Callable[[], None]) -> None:
        """Have something happen before a step, or before the next one if that is over."""
        self._count += 1
        heapq.heappush(self._at_steps, (step, self._count, call))
        self._next_step = self._at_steps[0][0]

    def _happen(self) -> None:
        while self._at_steps and self._at_steps[0][0] <= self.steps:
            heapq.heappop(self._at_steps)[2]()
        self._next_step = self._at_steps[0][0] if self._at_steps else FOREVER

    def crash(self, agent: int) -> None:
        """Its process ends: none of its tasks runs again."""
        self.dead.add(agent)
        for task in self.tasks:
            task.killed = task.killed or task.agent == agent

    def wake(self, task: Task) -> None:
        if task.blocked:
            task.blocked = False
            pause = self.slow.get(task.agent, 0.0)
            if pause:
                self.at(self.now + self.chance.random() * pause, self._ready.append, task)
            else:
                self._ready.append(task)

    def block(self, until: float = FOREVER) -> None:
        """The current task waits until it is woken, or until a time."""
        task = self.current
        if self.over or task is None:
            raise GreenletExit
        task.blocked = True
        task.waits += 1
        if until < FOREVER:
            self.at(until, self._time_out, task, task.waits)
        self.hub.switch()
        if self.over:
            raise GreenletExit

    def _time_out(self, task: Task, turn: int) -> None:
        if task.waits == turn:
            self.wake(task)

    def sleep(self, seconds: float) -> None:
        self.block(self.now + max(seconds, STEP))

    def yield_now(self) -> None:
        """Let others run first, maybe."""
        task = self.current
        if task is not None and not self.over:
            self._ready.append(task)
            self.hub.switch()
            if self.over:
                raise GreenletExit

    def run(self, limit: float, most_steps: int) -> None:
        """Run until ``done`` is set; :class:`Stuck` where it is not by a time, or nothing can happen any more."""
        ready, timers, random, grad = self._ready, self._timers, self.chance.random, torch.is_grad_enabled
        while not self.done:
            while timers and timers[0][0] <= self.now:
                _, _, call, args = heapq.heappop(timers)
                call(*args)
            if not ready:
                if not timers:
                    raise Stuck("nothing can happen any more")
                self.now = timers[0][0]
                continue
            at = int(random() * len(ready))
            ready[at], ready[-1] = ready[-1], ready[at]
            task = ready.pop()
            if task.killed or not task.alive:
                continue
            self.now += STEP * (1.0 + random())
            self.steps += 1
            if self.steps >= self._next_step:
                self._happen()
                if task.killed:
                    continue
            if self.now > limit or self.steps > most_steps:
                raise Stuck(f"it goes on after {self.steps:,} steps and {self.now - 1000.0:.1f} s of virtual time")
            self.current = task
            if grad() is not task.grad:
                torch.set_grad_enabled(task.grad)
            task.greenlet.switch()
            task.grad = grad()
            self.current = None

    def end(self) -> None:
        """End all remaining tasks."""
        self.over = True
        torch.set_grad_enabled(True)
        for task in self.tasks:
            if task.alive and task.greenlet:
                task.greenlet.throw(GreenletExit)
        self._timers.clear()
        self._ready.clear()
