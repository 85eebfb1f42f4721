"""Where agents that know only their rank find each other: a small store of keys and values, used by ``init`` alone.

:func:`open_store` picks the store for a launch: the one of a ``torch.distributed`` that the script has initialised,
the one that torchrun or ``shoal run`` serves, or one that rank 0 hosts until it closes it. Afterwards every agent holds
what it needs, and neither the store nor rank 0 is needed again.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from ..errors import DeadlineExceeded, PeerLost, ShoalError
from ..interrupts import SLICE, held, pause, slices
from ..transport.addresses import interface_address, is_loopback, numeric, own_form, resolved, text_of
from .launch import LOOPBACK, Launch, current, join_address

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as NativeStore

log = logging.getLogger("shoal")

T = TypeVar("T")

REPORT_AFTER = 30.0
"""Seconds after which who waits in ``init`` says in the log for whom, or for what."""
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.02
# A server of a moment ago (the script's own process group, an earlier attempt) may need a little to leave its port.
_PORT_SECONDS = 3.0
# After the deadline of ``open_store``, one message to a live server still gets this long.
_LEAST_SECONDS = 5.0
_BACKLOG = 4096
_HOSTED = "hosted"
PREFIX = "shoal/"
ROOM, CLAIMED = "room", "claimed"
"""What the store of a launcher says, of no job, to those who may join it: see ``joining.py``."""


class Store(Protocol):
    """Keys and values that all agents of a job see. Every wait ends at its deadline and gives way to Ctrl-C."""

    address: str
    """Where this agent has reached it; empty where it was not reached over a network."""

    def set(self, key: str, value: bytes) -> None:
        """Make ``value`` what every later ``get`` of ``key`` returns."""

    def get(self, key: str, deadline: float) -> bytes:
        """Wait until somebody has set ``key``, at most until ``time.monotonic()`` is ``deadline``.

        Raises:
            DeadlineExceeded: nobody had; the message names the key.
        """

    def first(self, keys: Sequence[str], deadline: float) -> tuple[str, bytes]:
        """Wait until somebody has set one of ``keys``; the first of them that is set, and its value. As :meth:`get`."""

    def has(self, key: str) -> bool:
        """Whether somebody has set ``key``."""

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the counter ``key``, which starts at zero, and return its new value."""

    def delete(self, key: str) -> None:
        """Forget ``key``, which nobody will ask for any more."""

    def close(self) -> None:
        """Let go of the store; a second call does nothing. If this agent hosts it, its port is free afterwards."""


class ThreadStore:
    """The store of agents that are threads of one process, who share one object. ``close`` does nothing."""

    address = ""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._over: ShoalError | None = None

    def abort(self, error: ShoalError) -> None:
        """End all waits, now and from now on, with an error."""
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
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise DeadlineExceeded(f"nobody set the key {keys[0]!r} in time")
                held.checkpoint()
                self._changed.wait(min(remaining, SLICE if held.here else threading.TIMEOUT_MAX))

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
        """Other threads may still use the store."""


class TcpStore:
    """The store of agents that are processes: a store of ``torch.distributed``, our keys behind a prefix.

    torch's calls neither give way to Ctrl-C nor end in time when a server accepts and never answers (measured on torch
    2.13: the constructor of ``TCPStore`` then hangs for good, whatever its timeout). So one thread of our own makes
    them, and the caller waits for it with a deadline. A key is polled with ``check``, because ``wait`` writes warnings
    to stderr each time it times out.
    """

    def __init__(
        self,
        connect: Callable[[], NativeStore],
        *,
        prefix: str,
        name: str,
        server_ranks: tuple[int, ...],
        deadline: float,
        address: str = "",
    ) -> None:
        self.address = address
        self._prefix = prefix
        self._name = name
        self._server_ranks = server_ranks
        self._deadline = deadline
        self._native: NativeStore | None = None
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve_calls, name="shoal-rendezvous", daemon=True)
        self._thread.start()
        try:
            self._call(lambda: self._adopt(connect()), f"connect to {name}", deadline)
        except BaseException:
            self.close()
            raise

    def set(self, key: str, value: bytes) -> None:
        self._call(lambda: self._store.set(self._prefix + key, cast(str, value)), f"set {key!r} in {self._name}")

    def get(self, key: str, deadline: float) -> bytes:
        return self.first([key], deadline)[1]

    def first(self, keys: Sequence[str], deadline: float) -> tuple[str, bytes]:
        seconds = _FIRST_PAUSE
        what = f"get {keys[0]!r} from {self._name}"
        while True:
            for key in keys:
                if self._call(partial(self._check, key), what, deadline):
                    return key, self._call(partial(self._get, key), what, deadline)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise DeadlineExceeded(f"nobody set the key {keys[0]!r} in {self._name} in time")
            pause(min(seconds, remaining))
            seconds = min(2 * seconds, _LONGEST_PAUSE)

    def has(self, key: str) -> bool:
        return self._call(partial(self._check, key), f"look for {key!r} in {self._name}")

    def _check(self, key: str) -> bool:
        return bool(self._store.check([self._prefix + key]))

    def _get(self, key: str) -> bytes:
        return self._store.get(self._prefix + key)

    def add(self, key: str, amount: int) -> int:
        what = f"add to {key!r} in {self._name}"
        return self._call(lambda: int(self._store.add(self._prefix + key, amount)), what)

    def swap(self, key: str, old: bytes, new: bytes) -> bytes:
        """Make ``new`` the value of ``key`` where it is ``old``; returns what it is then."""
        both = cast(str, old), cast(str, new)
        return self._call(lambda: self._store.compare_set(self._prefix + key, *both), f"set {key!r} in {self._name}")

    def delete(self, key: str) -> None:
        self._call(lambda: self._store.delete_key(self._prefix + key), f"delete {key!r} in {self._name}")

    def close(self) -> None:
        self._calls.put(None)
        # Longer only if the server has stopped answering; then the thread is beyond help, and it is a daemon.
        self._thread.join(1.0)

    @property
    def _store(self) -> NativeStore:
        if self._native is None:
            raise RuntimeError(f"{self._name} is closed")
        return self._native

    def _adopt(self, native: NativeStore) -> None:
        self._native = native

    def _call(self, function: Callable[[], T], what: str, deadline: float | None = None) -> T:
        if not self._thread.is_alive():
            raise RuntimeError(f"cannot {what}: it is closed")
        if deadline is None:
            deadline = max(self._deadline, time.monotonic() + _LEAST_SECONDS)
        answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._calls.put((function, answer))
        for slice_ in slices(max(deadline, time.monotonic() + 0.1)):
            try:
                result, error = answer.get(timeout=slice_)
            except queue.Empty:
                continue
            if error is not None:
                raise self._explained(error, what) from error
            return cast(T, result)
        raise DeadlineExceeded(f"could not {what} in time: no answer", self._server_ranks)

    def _explained(self, error: BaseException, what: str) -> BaseException:
        import torch.distributed

        if isinstance(error, torch.distributed.DistNetworkError):
            return PeerLost(f"could not {what}: its server is gone ({error})", self._server_ranks)
        return RuntimeError(f"could not {what}: {error}")

    def _serve_calls(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                # The only reference: torch's server ends, and frees its port, when its object does.
                self._native = None
                return
            function, answer = call
            try:
                answer.put((function(), None))
            except BaseException as error:
                # A traceback would keep the frames alive, and with them the store whose port must become free.
                answer.put((None, error.with_traceback(None)))


def open_store(launch: Launch, deadline: float) -> Store:
    """Open the store of this job; all agents call it.

    A world of one gets a :class:`ThreadStore` and opens no port. A process group that the script has initialised gives
    its store and stays as it was. Else the store is at ``launch.host`` and ``launch.port``: served by the launcher, or
    hosted there by rank 0 until rank 0 calls ``close``, which it may do when every agent has finished with the store.

    Args:
        deadline: when to give up connecting, in seconds of ``time.monotonic()``.

    Raises:
        DeadlineExceeded: nobody answered at host:port; ``ranks`` is ``(0,)`` if rank 0 should have hosted it there.
        OSError: rank 0 cannot listen on the port.
        ValueError: the launch contradicts the process group, or has no address.
    """
    prefix = f"{PREFIX}{launch.job}/{launch.attempt}/"
    found = _store_of_process_group(launch)
    if launch.size == 1:
        return ThreadStore()
    if found is not None:
        name = "the store of torch.distributed"
        return TcpStore(lambda: found, prefix=prefix, name=name, server_ranks=(), deadline=deadline)
    if launch.host is None or launch.port is None:
        raise ValueError(f"{launch.size} agents, but no address to meet at: set SHOAL_RENDEZVOUS=host:port")
    host, port = launch.host, launch.port
    name = f"the rendezvous store at {join_address(host, port)}"

    def connect(address: str, server_ranks: tuple[int, ...]) -> TcpStore:
        # To the very address that answered: the host may have several, and torch's own search for one is noisy.
        begin = partial(client, address, port, deadline)
        return TcpStore(begin, prefix=prefix, name=name, server_ranks=server_ranks, deadline=deadline, address=address)

    if launch.store_is_served:
        return connect(_await_server(launch, deadline), ())
    if launch.rank > 0:
        return _store_of_rank_0(launch, connect, deadline)
    listener = _listen_patiently(host, port, os.environ.get("SHOAL_INTERFACE", ""), deadline)
    server = partial(_server, listener, deadline)
    store = TcpStore(server, prefix=prefix, name=name, server_ranks=(0,), deadline=deadline)
    try:
        store.set(_HOSTED, b"")
    except BaseException:  # a Ctrl-C, say: nobody else has the store to close it
        store.close()
        raise
    return store


def tell_of_the_end(key: str, why: str) -> None:
    """Say in the store of this environment's job that its agent has ended. For a launcher."""
    launch = current()
    deadline = time.monotonic() + _LEAST_SECONDS
    with contextlib.closing(open_store(launch, deadline)) as store:
        store.set(key, json.dumps({"rank": launch.rank, "why": why}).encode())


def listen(host: str, port: int, interface: str = "") -> socket.socket:
    """Listen on ``port`` of the one interface that ``host`` leads to, where that can be told, and else of all.

    Args:
        host: How others reach this machine; it need not resolve here. Where it is an address of this machine, or a name
            that means one and no more, that is where they come.
        port: 0 takes a free one.
        interface: Where ``host`` says nothing: it means another machine's address here (a NAT's), the loopback
            interface (as the own name does in Debian's /etc/hosts), or several. An interface or address of this
            machine, as ``SHOAL_INTERFACE``; empty: all interfaces.

    Raises:
        OSError: The port is taken.
        ValueError: There is no such interface.
    """
    address = _own_address(host) or (interface_address(interface, prefer_ipv6=":" in host) if interface else "")
    if address:
        family, name = resolved(address, port)
        return socket.create_server(name, family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def serve(descriptor: int, room: str = "") -> None:
    """Serve a store on an inherited listening socket until this process is ended: a launcher's helper process.

    Args:
        descriptor: The socket.
        room: What it says to those who may join the run; empty: nobody may.
    """
    store = _server(socket.socket(fileno=descriptor), time.monotonic() + threading.TIMEOUT_MAX)
    store.set(PREFIX + CLAIMED, "0 nobody")
    store.set(PREFIX + ROOM, room)
    try:
        while True:
            signal.pause()
    finally:
        del store


def _store_of_process_group(launch: Launch) -> NativeStore | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if (rank, size) != (launch.rank, launch.size):
        raise ValueError(
            f"torch.distributed is initialised as rank {rank} of {size}, but the launch ({launch.launcher}) says rank "
            f"{launch.rank} of {launch.size}: let launch.current() decide, or initialise them alike"
        )
    return cast("NativeStore", distributed.distributed_c10d._get_default_store())


def _store_of_rank_0(launch: Launch, connect: Callable[..., TcpStore], deadline: float) -> TcpStore:
    """Connect to the store that rank 0 hosts for this very ``init``.

    Its port may have had an owner a moment ago: a process group that the script has just destroyed, or our own store of
    the ``init`` before. Whoever is let in by that one loses the connection soon, and tries again.
    """
    while True:
        address = _await_server(launch, deadline)
        store = None
        try:
            store = connect(address, (0,))
            store.get(_HOSTED, deadline)
            return store
        except BaseException as error:
            if store is not None:
                store.close()
            if isinstance(error, PeerLost) and time.monotonic() < deadline:
                continue
            if not isinstance(error, DeadlineExceeded):
                raise
            raise DeadlineExceeded(
                f"rank {launch.rank}: what answers at {join_address(launch.host, launch.port)} is not the rendezvous "
                "store of this job, or rank 0 has not come; SHOAL_RENDEZVOUS=host:port chooses another address",
                (0,),
            ) from None


def _await_server(launch: Launch, deadline: float) -> str:
    """Wait until something listens; returns the address at which it does.

    torch's own attempts cannot be interrupted, and print a page for every failure.
    """
    host, port = cast(str, launch.host), cast(int, launch.port)
    server = "the launcher serves" if launch.store_is_served else "rank 0 hosts"
    what = f"the rendezvous store that {server} at {join_address(host, port)}"
    begun = time.monotonic()
    report_at = begun + REPORT_AFTER
    seconds = 0.01
    while True:
        try:
            with socket.create_connection(
                (host, port), timeout=max(0.1, min(2.0, deadline - time.monotonic()))
            ) as link:
                # Linux may connect a socket to itself when nobody listens on a port of the ephemeral range.
                if link.getsockname() != link.getpeername():
                    return text_of(link.getpeername())
            problem = "connection refused"
        except OSError as error:
            problem = str(error)
        now = time.monotonic()
        if now >= deadline:
            served = (
                "Check that a launcher was started with --node-rank 0" if launch.store_is_served else "Check that it"
            )
            raise DeadlineExceeded(
                f"rank {launch.rank} could not reach {what} ({problem}). {served} and still runs, that {host} is its "
                "machine, and that no firewall closes the port; SHOAL_RENDEZVOUS=host:port chooses another",
                () if launch.store_is_served else (0,),
            )
        if now >= report_at:
            report_at = float("inf")
            log.warning(
                "shoal.init() on rank %d has waited %.0f s for %s (%s); it gives up after %.0f s",
                launch.rank,
                now - begun,
                what,
                problem,
                deadline - begun,
            )
        pause(seconds)
        seconds = min(2 * seconds, 0.25)


def _listen_patiently(host: str, port: int, interface: str, deadline: float) -> socket.socket:
    give_up = min(deadline, time.monotonic() + _PORT_SECONDS)
    while True:
        try:
            return listen(host, port, interface)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= give_up:
                raise OSError(
                    error.errno,
                    f"rank 0 cannot host the rendezvous store at {join_address(host, port)} ({error.strerror}): choose "
                    "another address with SHOAL_RENDEZVOUS=host:port, the same for every agent",
                ) from None
        pause(0.05)


def _server(listener: socket.socket, deadline: float) -> NativeStore:
    name = listener.getsockname()
    address, port = text_of(name), name[1]
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        # It reaches itself by the short way, whether or not its public name resolves here.
        address = LOOPBACK
    return _tcp_store(address, port, deadline, is_master=True, master_listen_fd=listener.detach())


def client(host: str, port: int, deadline: float) -> NativeStore:
    """A connection to a store that is served there."""
    return _tcp_store(host, port, deadline, is_master=False)


def _tcp_store(host: str, port: int, deadline: float, **options: Any) -> NativeStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # torch counts milliseconds in 32 bits.
    timeout = timedelta(seconds=min(max(1.0, deadline - time.monotonic()), 1e6))
    return cast("NativeStore", TCPStore(host, port, timeout=timeout, wait_for_workers=False, **options))


def _own_address(host: str) -> str:
    """The address of this machine at which others, and it itself, find ``host``; empty where that is not certain."""
    given = numeric(host)
    found = [given] if given else _addresses_of(host)
    if host == "localhost":  # whoever looks there is on this machine
        return LOOPBACK if LOOPBACK in found or not found else found[0]
    # As a name of several addresses may mean other ones elsewhere, which one the others use cannot be told.
    beyond = {one for one in found if given or not is_loopback(one)}
    if len(beyond) != 1:
        return ""
    [address] = beyond
    bare = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(bare, "ipv4_mapped", None)
    return "" if bare.is_unspecified else own_form(str(mapped or address))


def _addresses_of(name: str) -> list[str]:
    try:
        return [text_of(one[4]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]  # type: ignore[arg-type]
    except (OSError, UnicodeError):
        return []
