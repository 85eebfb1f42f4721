"""Opens the store in which agents that know only their rank find each other (``store.py``). Only ``init`` uses it.

:func:`open_store` picks the store for a launch: the store of a ``torch.distributed`` that the script has initialised,
the store that torchrun or ``shoal run`` serves, or a store that rank 0 hosts until it closes it. Afterwards every agent
has all data that it needs, and needs neither the store nor rank 0 again.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from .. import clock, config
from .._signals import pause
from ..errors import DeadlineExceeded, PeerLost
from ..transport.addresses import interface_address, is_loopback, numeric, own_form, resolved, text_of
from . import store_server
from .launch import LOOPBACK, Launch, current, join_address
from .store import Store, StoreLocation, TcpStore, ThreadStore

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as NativeStore

log = logging.getLogger("shoal")

REPORT_AFTER = 30.0
"""Seconds after which an agent that waits in ``init`` logs the awaited ranks or service."""
# A server that has just ended (the script's own process group, an earlier attempt) may need a moment to free its port.
_PORT_SECONDS = 3.0
_BACKLOG = 4096
_PUBLISH_SECONDS = 300.0
_TRY_SECONDS = 60.0
_TRY = "import sys; from shoal.rendezvous.rendezvous import try_client; try_client(int(sys.argv[1]))"
_HOSTED = "hosted"
PREFIX = "shoal/"
INVITATION, CLAIMED = "invitation", "claimed"
"""The keys of a launcher's store for joining agents, outside of any job's prefix: see ``elastic_join.py``."""


def open_store(launch: Launch, deadline: float) -> Store:
    """Open the store of this job; all agents call it.

    A single agent gets a :class:`ThreadStore` and opens no port. If the script has initialised a process group, its
    store is used and the group is not changed. Otherwise the store is at ``launch.host`` and ``launch.port``. The
    launcher serves it, or rank 0 hosts it until rank 0 calls ``close``, which it may do when no agent needs the store
    any more.

    Args:
        deadline: The deadline of connecting, in seconds of ``clock.monotonic()``.

    Raises:
        DeadlineExceeded: No server answered at host:port; ``ranks`` is ``(0,)`` if rank 0 should have hosted it there.
        OSError: Rank 0 cannot listen on the port.
        ValueError: The launch contradicts the process group, or has no address.
    """
    # A restarted job must not read the keys of its earlier attempt, nor of another job in the same store.
    prefix = f"{PREFIX}{launch.job}/{launch.attempt}/" + (f"{launch.beside}/" if launch.beside else "")
    found = _store_of_process_group(launch)
    if launch.size == 1:
        return ThreadStore()
    if found is not None:
        server = StoreLocation("the store of torch.distributed")
        return TcpStore(lambda: found, server, prefix=prefix, deadline=deadline)
    if launch.host is None or launch.port is None:
        raise ValueError(
            f"{launch.size} agents, but no address of the rendezvous store: set SHOAL_RENDEZVOUS=host:port"
        )
    host, port = launch.host, launch.port
    name = f"the rendezvous store at {join_address(host, port)}"

    def connect(address: str, server_ranks: tuple[int, ...]) -> TcpStore:
        # Connect to the address that answered: the host may have several, and torch's own search logs each failure.
        begin = partial(client, address, port, deadline)
        return TcpStore(begin, StoreLocation(name, server_ranks, address), prefix=prefix, deadline=deadline)

    if launch.store_is_served:
        return connect(_await_server(launch, deadline), ())
    if launch.rank > 0:
        return _store_of_rank_0(launch, connect, deadline)
    listener = _listen_patiently(host, port, config.read().interface, deadline)
    if _clients_agree(deadline):
        begin = partial(client, *_reached_at(listener), deadline)
        thread: store_server.ThreadedServer | None = store_server.ThreadedServer(listener)
    else:
        begin, thread = partial(_torchs_server, listener, deadline), None
    store = TcpStore(begin, StoreLocation(name, (0,), thread=thread), prefix=prefix, deadline=deadline)
    try:
        # The others wait for this key: another server may have used the port until now, and may still answer them.
        store.set(_HOSTED, b"")
    except BaseException:  # such as Ctrl-C: no other code has the store to close it
        store.close()
        raise
    return store


def publish_end(key: str, why: str) -> None:
    """Publish in the store of this environment's job that its agent has ended. For a launcher.

    It retries for as long as other agents may wait: the server of the store may need as long to import torch as this
    process does.
    """
    launch = current()
    deadline = clock.monotonic() + _PUBLISH_SECONDS
    with contextlib.closing(open_store(launch, deadline)) as store:
        store.set(key, json.dumps({"rank": launch.rank, "why": why}).encode())


def listen(host: str, port: int, interface: str = "") -> socket.socket:
    """Listen on ``port`` of the one interface that ``host`` leads to, or of all if that is not certain.

    Args:
        host: The name or address by which other machines reach this one; it need not resolve here. If it is an address
            of this machine, or a name with exactly one such address, that address is used.
        port: 0 takes a free one.
        interface: Used if ``host`` does not determine an address: if it means another machine's address here (a NAT's),
            the loopback interface (as the own name does in Debian's /etc/hosts), or several addresses. An interface or
            address of this machine, as ``SHOAL_INTERFACE``; empty for all interfaces.

    Raises:
        OSError: The port is in use.
        ValueError: There is no such interface.
    """
    address = _own_address(host) or (interface_address(interface, prefer_ipv6=":" in host) if interface else "")
    if address:
        family, name = resolved(address, port)
        return socket.create_server(name, family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def serve(descriptor: int, invitation: str = "") -> None:
    """Serve a store on an inherited listening socket until this process is ended. For a launcher's helper process.

    The server is a :class:`~.store_server.StoreServer`, or torch's own if the clients of a newer torch need more
    requests.

    Args:
        descriptor: The descriptor of the socket.
        invitation: The invitation for agents that may join the job; empty if none may.
    """
    listener = socket.socket(fileno=descriptor)
    values = {PREFIX + CLAIMED: b"0 nobody", PREFIX + INVITATION: invitation.encode()}
    if _clients_agree(clock.monotonic() + _TRY_SECONDS):
        # It does not return. The rest serves a torch whose clients need other requests.
        store_server.StoreServer(listener, values).serve()
    store = _torchs_server(listener, clock.monotonic() + threading.TIMEOUT_MAX)
    for key, value in values.items():
        store.set(key, value.decode())
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
    here = (launch.ranks[launch.rank], launch.processes) if launch.ranks else (launch.rank, launch.size)
    if (rank, size) != here:
        raise ValueError(
            f"torch.distributed is initialised as rank {rank} of {size}, but the launch ({launch.launcher}) says rank "
            f"{launch.rank} of {launch.size}: let launch.current() decide, or initialise them alike"
        )
    return cast("NativeStore", distributed.distributed_c10d._get_default_store())


def _store_of_rank_0(launch: Launch, connect: Callable[..., TcpStore], deadline: float) -> TcpStore:
    """Connect to the store that rank 0 hosts for this call of ``init``.

    Another server may just have used its port: a process group that the script has just destroyed, or Shoal's store of
    the previous ``init``. An agent that has connected to that server soon loses the connection, and tries again.
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
            if isinstance(error, PeerLost) and clock.monotonic() < deadline:
                continue
            if not isinstance(error, DeadlineExceeded):
                raise
            raise DeadlineExceeded(
                f"rank {launch.rank}: the process at {join_address(launch.host, launch.port)} is not the rendezvous "
                "store of this job, or rank 0 has not come; SHOAL_RENDEZVOUS=host:port chooses another address",
                (0,),
            ) from None


def _await_server(launch: Launch, deadline: float) -> str:
    """Wait until a server listens. Returns the address at which it does.

    torch's own attempts cannot be interrupted, and print many lines for every failure.
    """
    host, port = cast(str, launch.host), cast(int, launch.port)
    server = "the launcher serves" if launch.store_is_served else "rank 0 hosts"
    store = f"the rendezvous store that {server} at {join_address(host, port)}"
    begun = clock.monotonic()
    report_at = begun + REPORT_AFTER
    seconds = 0.01
    while True:
        try:
            with socket.create_connection(
                (host, port), timeout=max(0.1, min(2.0, deadline - clock.monotonic()))
            ) as link:
                # Linux may connect a socket to itself if no server listens on a port of the ephemeral range.
                if link.getsockname() != link.getpeername():
                    return text_of(link.getpeername())
            problem = "connection refused"
        except UnicodeError as error:
            raise ValueError(
                f"rank {launch.rank}: {host!r}, the host of the rendezvous store, cannot be the name of a machine "
                f"({error}); set SHOAL_RENDEZVOUS=host:port (or MASTER_ADDR) to the machine of rank 0"
            ) from None
        except OSError as error:
            problem = str(error)
        now = clock.monotonic()
        if now >= deadline:
            served = (
                "Check that a launcher was started with --node-rank 0" if launch.store_is_served else "Check that it"
            )
            raise DeadlineExceeded(
                f"rank {launch.rank} could not reach {store} ({problem}). {served} and still runs, that {host} is its "
                "machine, and that no firewall closes the port; SHOAL_RENDEZVOUS=host:port chooses another",
                () if launch.store_is_served else (0,),
            )
        if now >= report_at:
            report_at = float("inf")
            log.warning(
                "shoal.init() on rank %d has waited %.0f s for %s (%s); it gives up after %.0f s",
                launch.rank,
                now - begun,
                store,
                problem,
                deadline - begun,
            )
        pause(seconds)
        seconds = min(2 * seconds, 0.25)


def _listen_patiently(host: str, port: int, interface: str, deadline: float) -> socket.socket:
    give_up = min(deadline, clock.monotonic() + _PORT_SECONDS)
    while True:
        try:
            return listen(host, port, interface)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or clock.monotonic() >= give_up:
                raise OSError(
                    error.errno,
                    f"rank 0 cannot host the rendezvous store at {join_address(host, port)} ({error.strerror}): choose "
                    "another address with SHOAL_RENDEZVOUS=host:port, the same for every agent",
                ) from None
        pause(0.05)


def _clients_agree(deadline: float) -> bool:
    """Whether the clients of the installed torch can use :class:`~.store_server.StoreServer`.

    The clients of an unknown version are tested in a separate process, which can be ended in any state.
    """
    if store_server.is_known():
        return True
    listener = socket.create_server((LOOPBACK, 0))
    command = [sys.executable, "-c", _TRY, str(listener.getsockname()[1])]
    with contextlib.closing(store_server.ThreadedServer(listener)):
        seconds = max(1.0, min(_TRY_SECONDS, deadline - clock.monotonic()))
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=seconds)
        except (OSError, subprocess.SubprocessError) as error:
            log.warning(
                "the rendezvous store is torch's own, which stores data of any client without a limit: the clients of "
                "this version of torch cannot use Shoal's (%s)",
                type(error).__name__,
            )
            return False
    return True


def try_client(port: int) -> None:
    """Make all requests of ``init`` and of process groups; raises an exception if an answer is wrong."""
    store: Any = client(LOOPBACK, port, clock.monotonic() + _TRY_SECONDS)
    store.set("key", "1")
    store.append("key", "2")
    store.multi_set(["a", "b"], ["3", "4"])
    found = [store.get("key"), store.add("number", 2), store.check(["key", "none"]), *store.multi_get(["a", "b"])]
    found += [store.compare_set("key", "12", "5"), store.delete_key("a"), store.num_keys()]
    store.wait(["key", "b"], timedelta(seconds=_TRY_SECONDS))
    if found != [b"12", 2, False, b"3", b"4", b"5", True, 3]:
        raise ValueError(f"the store answers {found}")


def _torchs_server(listener: socket.socket, deadline: float) -> NativeStore:
    address, port = _reached_at(listener)
    # Without libuv: torch 2.6 could not serve at a given socket with it.
    return _tcp_store(address, port, deadline, is_master=True, master_listen_fd=listener.detach(), use_libuv=False)


def _reached_at(listener: socket.socket) -> tuple[str, int]:
    """The address and port at which this process reaches a socket on which it listens."""
    name = listener.getsockname()
    address, port = text_of(name), int(name[1])
    # Through the loopback interface, whether or not its public name resolves here.
    return LOOPBACK if ipaddress.ip_address(address.partition("%")[0]).is_unspecified else address, port


def client(host: str, port: int, deadline: float) -> NativeStore:
    """A connection to the store that is served at this address."""
    return _tcp_store(host, port, deadline, is_master=False)


def _tcp_store(host: str, port: int, deadline: float, **options: Any) -> NativeStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # torch counts milliseconds in 32 bits.
    timeout = timedelta(seconds=min(max(1.0, deadline - clock.monotonic()), 1e6))
    return cast("NativeStore", TCPStore(host, port, timeout=timeout, wait_for_workers=False, **options))


def is_own(host: str) -> bool:
    """Whether a name or an address means this machine, also if it leads to the loopback interface here."""
    return bool(_own_address(host)) or any(map(is_loopback, _addresses_of(host)))


def _own_address(host: str) -> str:
    """The address of this machine by which it and other machines reach ``host``; empty if that is not certain."""
    given = numeric(host)
    found = [given] if given else _addresses_of(host)
    if host == "localhost":  # every client of this name is on this machine
        return LOOPBACK if LOOPBACK in found or not found else found[0]
    # A name with several addresses may resolve differently elsewhere, so the address that others use is unknown.
    beyond = {address for address in found if given or not is_loopback(address)}
    if len(beyond) != 1:
        return ""
    [address] = beyond
    bare = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(bare, "ipv4_mapped", None)
    return "" if bare.is_unspecified else own_form(str(mapped or address))


def _addresses_of(name: str) -> list[str]:
    try:
        return [text_of(info[4]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]  # type: ignore[arg-type]
    except (OSError, UnicodeError):
        return []
