"""The owner's service for neighbours on other machines: the same operations as direct writers do on its memory.

It runs in the thread that drives the exchange, so it never waits: a request that finds a lock taken is retried a
millisecond later, in order of arrival.

The interpreter's switch interval is shorter while a neighbour is served. A thread that wants the lock of an interpreter
that runs pure Python gets it after the switch interval, 5 ms, and gives it up in each system call and each operation of
torch: a request of a few bytes would take ten such turns.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from .. import clock
from ..engine.engine import Engine
from ..transport.messages import Kind, Message, message_cost
from ..transport.quotas import Quota
from .locks import Freed
from .owner_requests import LOCK, NO_SHARE, UNLOCK, name_of
from .window_memory import MUTEX, OWN, WriteKind
from .window_part import WindowOwner, WindowPart

RETRY_SECONDS = 0.001
"""The pause before waiting requests are tried again."""
_HOW = {how.value: how for how in WriteKind}


class OwnerService:
    """The requests of other agents, under the engine's lock."""

    def __init__(self, owner: WindowOwner, engine: Engine) -> None:
        self._owner = owner
        self._engine = engine
        self._waiting: deque[tuple[int, Message]] = deque()
        self._quotas: defaultdict[int, Quota] = defaultdict(lambda: Quota("requests to windows that wait"))  # by source
        self._holders: dict[str, int] = {}  # the mutexes that agents of other machines have

    def serve(self, source: int, message: Message) -> None:
        """Handle a request. It waits for its complete tensor, and for earlier requests of the same agent."""
        payload = message.payload
        if payload is not None and not payload.complete:
            # Queued already now: a later small request of the same agent may be complete first, and must not overtake
            # this one.
            payload.on_more = partial(self.serve_complete, message)
            self._queue(source, message)
            return
        with self._serving():
            self._serve(source, message)

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """A short switch interval until the answers are sent."""
        with short_switch_interval():
            yield
            self._engine.flush()

    def _serve(self, source: int, message: Message) -> None:
        # An unlock never waits in the queue: behind a waiting request of the same agent for the same mutex it would
        # wait for itself.
        if message.op == UNLOCK:
            self._unlock(source, message)
        # Writes of one agent to one slot take effect in the order of its calls, even if the lock is free by now.
        elif any(_in_order(origin, earlier) == _in_order(source, message) for origin, earlier in self._waiting):
            self._queue(source, message)
        elif not self._try(source, message):
            self._queue(source, message)
            self._engine.check_by(0.0)

    def _queue(self, source: int, message: Message) -> None:
        # One request that never becomes complete would otherwise keep any number of later ones.
        self._quotas[source].acquire(message_cost(message))
        self._waiting.append((source, message))

    def _remove(self, source: int, message: Message) -> None:
        self._waiting.remove((source, message))
        self._quotas[source].release(message_cost(message))

    def serve_complete(self, message: Message) -> None:
        payload = message.payload
        if payload is not None and payload.complete:
            self.again()

    def again(self) -> bool:
        """Retry the waiting requests. Returns whether one has to be retried later."""
        if not self._waiting:
            return False
        with self._serving():
            return self._again()

    def _again(self) -> bool:
        blocked: set[_Order] = set()
        busy = False
        # A copy, because requests leave the queue in the loop; in the order of arrival, because a lock goes to the
        # agent that has waited longest.
        for source, message in list(self._waiting):
            key = _in_order(source, message)
            payload = message.payload
            # A request that cannot be served blocks the later ones of its agent and window, and no others.
            if key in blocked or (payload is not None and not payload.complete):
                blocked.add(key)
                continue
            if self._try(source, message):
                self._remove(source, message)
            else:
                blocked.add(key)
                busy = True
        if busy:
            self._engine.check_by(clock.monotonic() + RETRY_SECONDS)
        return busy

    def _try(self, source: int, message: Message) -> bool:
        """Perform a request. False if a lock is taken."""
        window = self._owner.find(message.name)
        # The number tells a freed window from its successor of the same name: a late put must not reach the new one.
        if window is None or window.number != message.digest:
            self._refuse_freed(source, message, "has freed this window, or never made it")
            return True
        try:
            return self._do(window, source, message)
        except Freed:
            self._refuse_freed(source, message, "has freed this window")
            return True

    def _do(self, window: WindowPart, source: int, message: Message) -> bool:
        # The far agent's own checks are not trusted. A write for a rank without a slot would raise KeyError in the
        # thread that drives this agent. A mutex belongs to the ends of edges: other agents may not keep them waiting.
        if not _has_edge(window, source, message.op):
            self._refuse(source, message, f"has no edge for {message.op} from rank {source} in this window")
            return True
        if message.op == LOCK:
            # The owner's process holds the kernel's lock in place of the far agent, which has no descriptor. So the
            # owner releases it when that agent is lost.
            if not window.memory.try_acquire(MUTEX, source):
                return False
            self._holders[message.name] = source
            self._answer(source, message)
            return True
        how = _HOW[message.op]
        if how is WriteKind.GET:
            return self._serve_get(window, source, message)
        payload, layout = message.payload, window.memory.layout
        # Not trusted either: a tensor of another size or dtype would raise there as well.
        if payload is None or (payload.data.numel(), payload.data.dtype) != (layout.numel, layout.dtype):
            self._refuse(source, message, f"expects {layout.numel} elements of {layout.dtype}")
            return True
        weight = message.scale
        if not (layout.dtype.is_floating_point or layout.dtype.is_complex):
            if weight != 1:
                self._refuse(source, message, f"expects {layout.dtype} without a scale")
                return True
            weight = 1  # torch adds whole numbers with an int only
        # The writer decides whether p moves: it has given the share away, even if p is not turned on here yet.
        p = None if message.p == NO_SHARE else message.p
        if not window.memory.try_write(how, source, payload.data.view(layout.shape), weight, p):
            return False
        self._answer(source, message)
        return True

    def _serve_get(self, window: WindowPart, source: int, message: Message) -> bool:
        # The owner's own calls change the tensor under this lock. A get without it could send half of an update.
        if not window.memory.try_acquire(OWN, source):
            return False
        try:
            self._answer(source, message, window.memory.own)
        finally:
            window.memory.locks.release(OWN)
        return True

    def _unlock(self, source: int, message: Message) -> None:
        """The source releases a mutex, or stops waiting for it."""
        self._engine.acknowledge(source, message)
        # The far agent has given up at its deadline. Left in the queue, its request would later take a mutex that
        # nobody releases. Not acknowledged, it would stay among the unread messages of that agent for good.
        given_up = _in_order(source, message)._replace(locks=True)
        for request in [request for request in self._waiting if _in_order(*request) == given_up]:
            self._remove(*request)
            self._engine.acknowledge(*request)
        # Only its holder may release it. A repeated unlock, or one after the window was freed, must not free the mutex
        # of another agent or of the window's successor.
        window = self._owner.find(message.name)
        if window is not None and window.number == message.digest and self._holders.get(message.name) == source:
            del self._holders[message.name]
            window.memory.locks.release(MUTEX)
            self._again()

    def forget(self, rank: int) -> None:
        """An agent is gone: release its mutexes and drop its requests."""
        self._waiting = deque(request for request in self._waiting if request[0] != rank)
        self._quotas.pop(rank, None)
        # The kernel frees the locks of a process that dies on this machine. For a far agent this process holds them, so
        # it has to do the same.
        for name in [name for name, holder in self._holders.items() if holder == rank]:
            del self._holders[name]
            window = self._owner.find(name)
            if window is not None:
                window.memory.locks.release(MUTEX)

    def forget_window(self, window: WindowPart, name: str) -> None:
        """A window is freed: refuse all requests that wait for it."""
        # The memory's locks are closed by now, and wait for the last holder. A far agent's mutex that stays would keep
        # their description open for ever.
        if self._holders.pop(name, None) is not None:
            window.memory.locks.release(MUTEX)
        with short_switch_interval():
            self._again()

    def _answer(self, source: int, message: Message, tensor: torch.Tensor | None = None) -> None:
        engine = self._engine
        engine.acknowledge(source, message)
        reply = Message(Kind.DATA, message.op, message.name, message.round, message.stage + 1, digest=message.digest)
        engine.send_tensor(source, reply, torch.empty(0, device="cpu") if tensor is None else tensor)

    def _refuse_freed(self, source: int, message: Message, why: str) -> None:
        cause = self._owner.cause
        if cause == self._engine.rank:
            why = "has ended with its windows open"
        elif cause is not None:
            why = f"{why}, since rank {cause} is gone"
        self._refuse(source, message, why, cause)

    def _refuse(self, source: int, message: Message, why: str, lost: int | None = None) -> None:
        rank = self._engine.rank
        text = f"{message.op} {name_of(message.name)!r} on rank {source}: rank {rank} {why}"
        self._engine.refuse(source, message, text, lost)


class _Order(NamedTuple):
    """Requests that are served in the order of their arrival. Writes do not wait for a mutex: only locks do."""

    source: int
    name: str
    number: int
    locks: bool


def _in_order(source: int, message: Message) -> _Order:
    return _Order(source, message.name, message.digest, message.op == LOCK)


def _has_edge(window: WindowPart, source: int, op: str) -> bool:
    """Whether an agent is a neighbour of the kind that an operation needs."""
    if op == LOCK:
        return source in window.sources or source in window.destinations
    return op in _HOW and source in (window.destinations if op == WriteKind.GET.value else window.sources)


SWITCH_INTERVAL_SECONDS = 0.0005
"""The switch interval while an agent serves requests."""


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
            # The first one inside notes the user's value. If it has changed since, the user has set it, and that value
            # is the one to restore.
            now = sys.getswitchinterval()
            if not self._inside or now != self._short:
                self._users = now
                if now > SWITCH_INTERVAL_SECONDS:
                    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
                self._short = sys.getswitchinterval()
            self._inside += 1

    def restore(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._put_back()

    def after_fork(self) -> None:
        """The child has none of the threads that were inside or held the lock."""
        # The fork may have happened while another thread held the lock; in the child nobody would release it.
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
