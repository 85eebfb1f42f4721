"""Stores in which agents meet: a few keys and values that all agents of a job share. Only ``init`` uses them.

Agents that are threads share one object; agents that are processes use a store of ``torch.distributed``.
``rendezvous.py`` chooses between them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from .. import clock
from .._signals import SLICE, deferred, pause, slices
from ..errors import DeadlineExceeded, PeerLost, ShoalError
from .store_server import ThreadedServer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as NativeStore

T = TypeVar("T")

LEAST_SECONDS = 5.0
"""Seconds at least for a request to a live server, even if the deadline of opening the store has passed."""
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.02


class Store(Protocol):
    """Keys and values that all agents of a job share. Waits end at their deadline and at Ctrl-C."""

    address: str
    """The address at which this agent has reached it; empty if not over a network."""

    def set(self, key: str, value: bytes) -> None:
        """Set ``key`` to ``value``, which every later ``get`` returns."""

    def get(self, key: str, deadline: float) -> bytes:
        """Wait until an agent has set ``key``, until the time ``deadline`` of ``clock.monotonic()``; return its value.

        Raises:
            DeadlineExceeded: No agent has set the key, which the message names.
        """

    def first(self, keys: Sequence[str], deadline: float) -> tuple[str, bytes]:
        """As :meth:`get`, for the first of ``keys`` that is set: return that key and its value.

        If a key stands before another one in ``keys`` and was set before it, that other one is never returned.
        """

    def has(self, key: str) -> bool:
        """Whether an agent has set ``key``."""

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the counter ``key``, which starts at zero, and return its new value."""

    def delete(self, key: str) -> None:
        """Delete ``key``, which no agent will read any more."""

    def close(self) -> None:
        """Release the store. A second call does nothing. If this agent hosts it, its port is free afterwards."""


class ThreadStore:
    """The store of agents that are threads of one process and share one object. ``close`` does nothing."""

    address = ""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._over: ShoalError | None = None

    def abort(self, error: ShoalError) -> None:
        """End all current and later waits with an error."""
        with self._changed:
            self._over = self._over or error
            self._changed.notify_all()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, deadline: float) -> bytes:
        return self.first([key], deadline)[1]

    def first(self, keys: Sequence[str], deadline: float) -> tuple[str, bytes]:
        with self._changed:
            while True:
                for key in keys:
                    if key in self._values:
                        return key, self._values[key]
                if self._over is not None:
                    raise type(self._over)(str(self._over), self._over.ranks)
                remaining = deadline - clock.monotonic()
                if remaining <= 0:
                    raise DeadlineExceeded(f"no agent set the key {keys[0]!r} in time")
                deferred.checkpoint()
                # In slices where signals are deferred: only checkpoint() runs their handlers.
                self._changed.wait(min(remaining, SLICE if deferred.here else threading.TIMEOUT_MAX))

    def has(self, key: str) -> bool:
        with self._changed:
            return key in self._values

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)

    def close(self) -> None:
        """Do nothing: other threads may still use the store."""


@dataclass(frozen=True)
class StoreLocation:
    """The server of a store.

    Attributes:
        name: Its name in error messages.
        ranks: The ranks of the agents that an error about it names.
        address: The address that answered.
        thread: The server, if this process hosts it.
    """

    name: str
    ranks: tuple[int, ...] = ()
    address: str = ""
    thread: ThreadedServer | None = None


class TcpStore:
    """The store of agents that are processes: a store of ``torch.distributed``, with a prefix for Shoal's keys.

    It also holds the server, if this process hosts the store. torch's calls neither react to Ctrl-C nor end in time if
    a server accepts and never answers (measured on torch 2.13: the constructor of ``TCPStore`` then hangs forever,
    whatever its timeout). So a separate thread makes these calls, and the caller waits for it with a deadline. A key is
    polled with ``check``, because ``wait`` writes warnings to stderr each time it times out.
    """

    def __init__(
        self,
        connect: Callable[[], NativeStore],
        server: StoreLocation,
        *,
        prefix: str,
        deadline: float,
    ) -> None:
        self.address = server.address
        self._server = server.thread
        self._prefix = prefix
        self._name = name = server.name
        self._server_ranks = server.ranks
        self._deadline = deadline
        self._native: NativeStore | None = None
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve_calls, name="shoal-rendezvous", daemon=True)
        self._thread.start()
        try:
            self._call(lambda: self._adopt(connect()), f"connect to {name}", deadline)
        except BaseException:
            # No caller has this object yet, so nothing else would end its thread and the server.
            self.close()
            raise

    def set(self, key: str, value: bytes) -> None:
        def confirmed() -> None:
            self._store.set(self._prefix + key, cast(str, value))
            # torch's server answers no `set`, but a connection's requests in turn. Without the second one another agent
            # may still get the value before, or a message to it may overtake the value.
            self._store.check([self._prefix + key])

        self._call(confirmed, f"set {key!r} in {self._name}")

    def get(self, key: str, deadline: float) -> bytes:
        return self.first([key], deadline)[1]

    def first(self, keys: Sequence[str], deadline: float) -> tuple[str, bytes]:
        seconds = _FIRST_PAUSE
        action = f"get {keys[0]!r} from {self._name}"
        while True:
            for place, key in enumerate(keys):
                if self._call(partial(self._check, key), action, deadline):
                    # An earlier key may have been set after it was checked, and before this one was set.
                    before = (
                        earlier
                        for earlier in keys[:place]
                        if self._call(partial(self._check, earlier), action, deadline)
                    )
                    key = next(before, key)
                    return key, self._call(partial(self._get, key), action, deadline)
            remaining = deadline - clock.monotonic()
            if remaining <= 0:
                raise DeadlineExceeded(f"no agent set the key {keys[0]!r} in {self._name} in time")
            pause(min(seconds, remaining))
            seconds = min(2 * seconds, _LONGEST_PAUSE)

    def has(self, key: str) -> bool:
        return self._call(partial(self._check, key), f"look for {key!r} in {self._name}")

    def _check(self, key: str) -> bool:
        return bool(self._store.check([self._prefix + key]))

    def _get(self, key: str) -> bytes:
        return self._store.get(self._prefix + key)

    def add(self, key: str, amount: int) -> int:
        action = f"add to {key!r} in {self._name}"
        return self._call(lambda: int(self._store.add(self._prefix + key, amount)), action)

    def swap(self, key: str, old: bytes, new: bytes) -> bytes:
        """Set ``key`` to ``new`` if its value is ``old``. Returns the value afterwards."""
        both = cast(str, old), cast(str, new)
        return self._call(lambda: self._store.compare_set(self._prefix + key, *both), f"set {key!r} in {self._name}")

    def delete(self, key: str) -> None:
        self._call(lambda: self._store.delete_key(self._prefix + key), f"delete {key!r} in {self._name}")

    def close(self) -> None:
        self._calls.put(None)
        # It takes longer only if the server does not answer any more; then the thread, a daemon, is abandoned.
        self._thread.join(1.0)
        if self._server is not None:
            self._server.close()

    @property
    def _store(self) -> NativeStore:
        if self._native is None:
            raise RuntimeError(f"{self._name} is closed")
        return self._native

    def _adopt(self, native: NativeStore) -> None:
        self._native = native

    def _call(self, function: Callable[[], T], action: str, deadline: float | None = None) -> T:
        if not self._thread.is_alive():
            raise RuntimeError(f"cannot {action}: it is closed")
        if deadline is None:
            deadline = max(self._deadline, clock.monotonic() + LEAST_SECONDS)
        answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._calls.put((function, answer))
        # At least a moment: a value that is set has to be found, even if the deadline is over.
        for slice_ in slices(max(deadline, clock.monotonic() + 0.1)):
            try:
                result, error = answer.get(timeout=slice_)
            except queue.Empty:
                continue
            if error is not None:
                raise self._explained(error, action) from error
            return cast(T, result)
        raise DeadlineExceeded(f"could not {action} in time: no answer", self._server_ranks)

    def _explained(self, error: BaseException, action: str) -> BaseException:
        import torch.distributed

        if isinstance(error, torch.distributed.DistNetworkError):
            return PeerLost(f"could not {action}: its server is gone ({error})", self._server_ranks)
        return RuntimeError(f"could not {action}: {error}")

    def _serve_calls(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                # The only reference: torch's server ends, and frees its port, with its object.
                self._native = None
                return
            function, answer = call
            try:
                answer.put((function(), None))
            except BaseException as error:
                # A traceback would keep the frames alive, and with them the store whose port must become free.
                answer.put((None, error.with_traceback(None)))
