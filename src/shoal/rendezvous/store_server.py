"""The server of the rendezvous store: the protocol of torch's ``TCPStore``, with quotas for other users and machines.

A launcher runs it, or rank 0 if it hosts the store. torch's own server stores data from any client without a limit, so
another user of the machine could fill its memory. The store is also used by the script's process groups, whose clients
are torch's, so clients cannot be asked for a proof.

The kernel knows the user of a connection from the same machine. Data of this process's own user and of root are not
limited, as in torch's server. Any other user of the machine, and each other address, has a quota for stored data, for
incomplete requests, and for connections. A connection that exceeds it is closed.

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import resource
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from ..transport.addresses import address_of, owner_of
from .store_requests import INT, LENGTH, WORD, Arguments, InvalidRequest, StoreRequest, scan

NEWEST_TORCH = (2, 15)
"""The newest version of torch whose requests are known to be in :class:`StoreRequest`."""
LOCAL_QUOTA = 1 << 20
"""Quota in bytes of each other user of this machine."""
REMOTE_QUOTA = 1 << 26
"""Quota in bytes of each other address, which all agents of a machine may share."""
TOTAL_QUOTA = 1 << 28
"""Quota in bytes of all other users and addresses together."""
CONNECTION_COST, KEY_COST, PART_COST = 1 << 14, 1 << 8, 1 << 7
"""Bytes that are charged for a connection, for a key, and for a part of an answer, in addition to its data."""
_MAGIC = 0x3C85F7CE
_PREFIX = b"/"
"""The prefix that torch's clients add to each key."""
_CHUNK, _MOST_WAITING = 1 << 16, 1 << 20
_PAUSE_SECONDS = 0.1
_READY, _NOT_READY = b"\0", b"\1"
_STOP_WAITING, _WAIT_CANCELED = b"\0", b"\1"


def is_known() -> bool:
    """Whether all requests of the installed torch's clients are known."""
    try:
        major, minor = importlib.metadata.version("torch").split(".")[:2]
        return (int(major), int(minor)) <= NEWEST_TORCH
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False


@dataclass(eq=False)
class _Quota:
    """The bytes that this server may keep for one source, or for all together; no ``limit`` if that is None."""

    limit: int | None
    total: _Quota | None = None
    used: int = 0

    def acquire(self, count: int) -> None:
        if self.limit is not None:
            if self.used + count > self.limit:
                raise InvalidRequest
            if self.total is not None:
                # Before `used` grows: if the total refuses, this quota has counted nothing.
                self.total.acquire(count)
        self.used += count

    def release(self, count: int) -> None:
        self.used -= count
        if self.limit is not None and self.total is not None:
            self.total.release(count)


@dataclass(eq=False)
class _Value:
    data: bytes
    quota: _Quota
    cost: int


@dataclass(eq=False)
class _StoreConnection:
    sock: socket.socket
    quota: _Quota
    inbox: bytearray = field(default_factory=bytearray)
    scan: Iterator[int] | None = None
    outbox: deque[memoryview] = field(default_factory=deque)
    unsent: int = 0
    events: int = selectors.EVENT_READ
    is_valid: bool = False
    awaited: set[bytes] = field(default_factory=set)
    awaited_cost: int = 0
    barrier: bytes | None = None


class StoreServer:
    """Serves a store on a listening socket, in the caller's thread.

    Args:
        listener: The socket; this object closes it.
        values: The values that are stored at the beginning.
    """

    def __init__(self, listener: socket.socket, values: Mapping[str, bytes]) -> None:
        self._listener = listener
        self._trusted = _Quota(None)
        self._total = _Quota(TOTAL_QUOTA)
        self._sources: dict[object, _Quota] = {}
        self._values: dict[bytes, _Value] = {}
        self._queues: dict[bytes, deque[_Value]] = {}
        self._waiting: dict[bytes, list[_StoreConnection]] = {}
        self._barriers: dict[bytes, list[_StoreConnection]] = {}
        self._connections: set[_StoreConnection] = set()
        self._is_full = self._has_ended = False
        self._selector = selectors.DefaultSelector()
        self._handlers: dict[int, Callable[[_StoreConnection, Arguments], None]] = {
            StoreRequest.SET: self._set,
            StoreRequest.COMPARE_SET: self._compare_set,
            StoreRequest.GET: self._get,
            StoreRequest.ADD: self._add,
            StoreRequest.CHECK: self._check,
            StoreRequest.WAIT: self._wait,
            StoreRequest.NUM_KEYS: lambda client, _: self._send(client, INT.pack(len(self._values))),
            StoreRequest.DELETE_KEY: self._delete,
            StoreRequest.APPEND: self._append,
            StoreRequest.MULTI_GET: self._multi_get,
            StoreRequest.MULTI_SET: self._multi_set,
            StoreRequest.CANCEL_WAIT: self._cancel_wait,
            StoreRequest.PING: lambda client, arguments: self._send(client, arguments.word()),
            StoreRequest.QUEUE_PUSH: self._queue_push,
            StoreRequest.QUEUE_POP: self._queue_pop,
            StoreRequest.QUEUE_LEN: self._queue_len,
            StoreRequest.LIST_KEYS: self._list_keys,
            StoreRequest.BARRIER: self._barrier,
        }
        for key, data in values.items():
            self._put(_PREFIX + key.encode(), data, self._trusted)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> NoReturn:
        """Serve until the process is ended."""
        # Raise the limit of connections as far as the system allows: a job has several of each agent.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        while True:
            self.step(None)

    def serve_until(self, ended: socket.socket) -> None:
        """Serve until the other end of the socket ``ended`` is closed; then close all sockets, also ``ended``."""
        self._selector.register(ended, selectors.EVENT_READ, ended)
        try:
            while not self._has_ended:
                self.step(None)
        finally:
            self.close()
            ended.close()

    def step(self, seconds: float | None) -> None:
        """Serve the requests that arrive within ``seconds``."""
        if self._is_full:
            seconds = _PAUSE_SECONDS if seconds is None else min(seconds, _PAUSE_SECONDS)
        events = self._selector.select(seconds)
        if self._is_full:
            self._is_full = False
            self._selector.register(self._listener, selectors.EVENT_READ)
        for key, mask in events:
            if key.fileobj is self._listener:
                self._accept()
            # A request served before, in this batch of events, may have closed the connection.
            elif key.data in self._connections:
                self._serve(key.data, mask)
            elif key.fileobj is key.data:
                self._has_ended = True

    def close(self) -> None:
        for client in list(self._connections):
            self._close(client)
        self._selector.close()
        self._listener.close()

    # Connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # no free descriptors: accept again later
            self._selector.unregister(self._listener)
            self._is_full = True
            return
        sock.setblocking(False)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            quota = self._quota_of(sock)
            quota.acquire(CONNECTION_COST)
        except (OSError, InvalidRequest):
            sock.close()
            return
        client = _StoreConnection(sock, quota)
        self._connections.add(client)
        self._selector.register(sock, selectors.EVENT_READ, client)

    def _quota_of(self, sock: socket.socket) -> _Quota:
        peer, own = address_of(sock.getpeername()), address_of(sock.getsockname())
        try:
            uid = owner_of(peer, own)
        except OSError:  # a sandbox without socket diagnosis: no limit, as in torch's server
            return self._trusted
        if uid in (0, os.geteuid()):
            return self._trusted
        source: object = peer[0] if uid is None else uid
        is_local = uid is not None or peer[0].is_loopback or peer[0] == own[0]
        # A stranger with ever new addresses adds one entry for each, which counts towards the total.
        if source not in self._sources:
            self._total.acquire(KEY_COST)
            self._sources[source] = _Quota(LOCAL_QUOTA if is_local else REMOTE_QUOTA, self._total)
        return self._sources[source]

    def _close(self, client: _StoreConnection) -> None:
        if client not in self._connections:  # a late answer to its own request has closed it
            return
        self._connections.discard(client)
        self._stop_waiting(client)
        self._selector.unregister(client.sock)
        client.sock.close()
        client.quota.release(CONNECTION_COST + len(client.inbox) + client.unsent)

    def _serve(self, client: _StoreConnection, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(client)
            if mask & selectors.EVENT_READ:
                self._read(client)
            self._answer(client)
        except Exception:  # refused, disconnected, or out of memory: other clients must still be served
            self._close(client)

    def _read(self, client: _StoreConnection) -> None:
        with contextlib.suppress(BlockingIOError):
            data = client.sock.recv(_CHUNK)
            if not data:
                raise InvalidRequest
            # Before the bytes are kept: `_close` releases as many as the inbox has.
            client.quota.acquire(len(data))
            client.inbox += data

    def _answer(self, client: _StoreConnection) -> None:
        """Answer all complete requests, while the client reads the answers."""
        while client.inbox and client.unsent <= _MOST_WAITING:
            client.scan = client.scan or scan(client.inbox)
            size = next(client.scan)
            if not size:
                break
            client.scan = None
            request, arguments = client.inbox[0], Arguments(client.inbox)
            if client.is_valid and request in self._handlers:
                self._handlers[request](client, arguments)
            else:
                self._validate(client, request, arguments)
            if client not in self._connections:  # it has set the key for which it waited itself, and has left
                return
            del client.inbox[:size]
            client.quota.release(size)
        self._flush(client)

    def _validate(self, client: _StoreConnection, request: int, arguments: Arguments) -> None:
        """Check the first request of torch's clients, which must precede all others."""
        if client.is_valid or request != StoreRequest.VALIDATE or arguments.word() != WORD.pack(_MAGIC):
            raise InvalidRequest
        client.is_valid = True

    def _send(self, client: _StoreConnection, *parts: bytes) -> None:
        for part in parts:
            if part:
                client.quota.acquire(len(part) + PART_COST)
                client.unsent += len(part) + PART_COST
                client.outbox.append(memoryview(part))

    def _flush(self, client: _StoreConnection) -> None:
        with contextlib.suppress(BlockingIOError):
            while client.outbox:
                part = client.outbox[0]
                sent = client.sock.send(part)
                client.outbox[0] = part[sent:]
                taken = sent
                if sent == len(part):
                    client.outbox.popleft()
                    taken += PART_COST
                client.unsent -= taken
                client.quota.release(taken)
        # Unread answers of a client must not grow: its next requests wait until it has read them.
        reads = selectors.EVENT_READ if client.unsent <= _MOST_WAITING else 0
        events = reads | (selectors.EVENT_WRITE if client.outbox else 0)
        if events != client.events:
            client.events = events
            self._selector.modify(client.sock, events, client)

    def _reply_later(self, client: _StoreConnection, *parts: bytes) -> None:
        """Answer an earlier request of a client, while the request of another client is served."""
        try:
            self._send(client, *parts)
            self._flush(client)
        except (InvalidRequest, OSError):
            self._close(client)

    # Values

    def _put(self, key: bytes, data: bytes, quota: _Quota) -> None:
        cost = len(key) + len(data) + KEY_COST
        # Before the old value goes: a refused request must leave it in place.
        quota.acquire(cost)
        self._forget(key)
        self._values[key] = _Value(data, quota, cost)
        for client in self._waiting.pop(key, []):
            self._arrived(client, key)

    def _forget(self, key: bytes) -> bool:
        old = self._values.pop(key, None)
        if old is not None:
            old.quota.release(old.cost)
        return old is not None

    def _value(self, key: bytes) -> bytes:
        return self._values[key].data if key in self._values else b""

    def _has(self, key: bytes) -> bool:
        return key in self._values or bool(self._queues.get(key))

    def _set(self, client: _StoreConnection, arguments: Arguments) -> None:
        key, data = arguments.text(), arguments.text()
        self._put(key, data, client.quota)

    def _compare_set(self, client: _StoreConnection, arguments: Arguments) -> None:
        key, expected, desired = arguments.text(), arguments.text(), arguments.text()
        if key not in self._values and expected:
            self._send_value(client, expected)
            return
        if self._value(key) == expected:
            self._put(key, desired, client.quota)
        self._send_value(client, self._value(key))

    def _send_value(self, client: _StoreConnection, data: bytes) -> None:
        self._send(client, LENGTH.pack(len(data)), data)

    def _get(self, client: _StoreConnection, arguments: Arguments) -> None:
        self._send_value(client, self._value(arguments.text()))

    def _add(self, client: _StoreConnection, arguments: Arguments) -> None:
        key, amount = arguments.text(), arguments.number()
        count = self._count(key, amount)
        self._put(key, str(count).encode(), client.quota)
        self._send(client, INT.pack(count))

    def _count(self, key: bytes, amount: int) -> int:
        """The value of a counter after an amount is added."""
        try:
            count = int(self._value(key) or b"0") + amount
            INT.pack(count)
        except (ValueError, struct.error):
            raise InvalidRequest from None
        return count

    def _check(self, client: _StoreConnection, arguments: Arguments) -> None:
        self._send(client, _READY if all(map(self._has, arguments.texts())) else _NOT_READY)

    def _delete(self, client: _StoreConnection, arguments: Arguments) -> None:
        self._send(client, INT.pack(self._forget(arguments.text())))

    def _append(self, client: _StoreConnection, arguments: Arguments) -> None:
        key, data = arguments.text(), arguments.text()
        self._put(key, self._value(key) + data, client.quota)

    def _multi_get(self, client: _StoreConnection, arguments: Arguments) -> None:
        for key in arguments.texts():
            self._send_value(client, self._value(key))

    def _multi_set(self, client: _StoreConnection, arguments: Arguments) -> None:
        for key, data in [(arguments.text(), arguments.text()) for _ in range(arguments.count())]:
            self._put(key, data, client.quota)

    def _list_keys(self, client: _StoreConnection, arguments: Arguments) -> None:
        self._send(client, INT.pack(len(self._values)))
        for key in self._values:
            self._send_value(client, key)

    # Waiting

    def _wait(self, client: _StoreConnection, arguments: Arguments) -> None:
        missing = {key for key in arguments.texts() if not self._has(key)}
        if not missing:
            self._send(client, _STOP_WAITING)
            return
        self._stop_waiting(client)
        cost = sum(len(key) + KEY_COST for key in missing)
        client.quota.acquire(cost)
        client.awaited, client.awaited_cost = missing, cost
        for key in missing:
            self._waiting.setdefault(key, []).append(client)

    def _arrived(self, client: _StoreConnection, key: bytes) -> None:
        client.awaited.discard(key)
        if not client.awaited:
            self._stop_waiting(client)
            self._reply_later(client, _STOP_WAITING)

    def _cancel_wait(self, client: _StoreConnection, arguments: Arguments) -> None:
        self._stop_waiting(client)
        self._send(client, _WAIT_CANCELED)

    def _stop_waiting(self, client: _StoreConnection) -> None:
        for key in client.awaited:
            self._leave(self._waiting, key, client)
        client.quota.release(client.awaited_cost)
        client.awaited, client.awaited_cost = set(), 0
        if client.barrier is not None:
            self._leave(self._barriers, client.barrier, client)
            client.barrier = None

    @staticmethod
    def _leave(table: dict[bytes, list[_StoreConnection]], key: bytes, client: _StoreConnection) -> None:
        others = [other for other in table.get(key, []) if other is not client]
        if others:
            table[key] = others
        else:
            table.pop(key, None)

    def _barrier(self, client: _StoreConnection, arguments: Arguments) -> None:
        """Count an arrival at a barrier in the key's value, and release all clients at the last one."""
        key, size = arguments.text(), arguments.number()
        self._stop_waiting(client)
        count = self._count(key, 1)
        self._put(key, str(count).encode(), client.quota)
        if count < size:
            client.barrier = key
            self._barriers.setdefault(key, []).append(client)
            return
        for other in self._barriers.pop(key, []):
            other.barrier = None
            self._reply_later(other, _STOP_WAITING)
        self._send(client, _STOP_WAITING)

    # Queues

    def _queue_push(self, client: _StoreConnection, arguments: Arguments) -> None:
        key, data = arguments.text(), arguments.text()
        cost = len(key) + len(data) + KEY_COST
        client.quota.acquire(cost)
        self._queues.setdefault(key, deque()).append(_Value(data, client.quota, cost))
        waiting = self._waiting.get(key)
        if waiting:
            first = waiting[0]
            self._leave(self._waiting, key, first)
            self._arrived(first, key)

    def _queue_pop(self, client: _StoreConnection, arguments: Arguments) -> None:
        key = arguments.text()
        queue = self._queues.get(key)
        if not queue:
            self._send(client, INT.pack(0))
            return
        first = queue.popleft()
        if not queue:
            del self._queues[key]
        first.quota.release(first.cost)
        self._send(client, INT.pack(1))
        self._send_value(client, first.data)

    def _queue_len(self, client: _StoreConnection, arguments: Arguments) -> None:
        self._send(client, INT.pack(len(self._queues.get(arguments.text(), ()))))


class ThreadedServer:
    """A :class:`StoreServer` in a thread of this process, which runs until :meth:`close`.

    Args:
        listener: The listening socket; this object closes it.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._end, ended = socket.socketpair()
        serve = StoreServer(listener, {}).serve_until
        self._thread = threading.Thread(target=serve, args=(ended,), name="shoal-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the server; its port is free then. A second call does nothing."""
        self._end.close()
        self._thread.join()
