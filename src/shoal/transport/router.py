"""Which transport leads to which agent, and the links and listeners of one agent.

Threads of one process talk through memory they share anyway; processes of one machine through shared memory; the rest
through the network. "One machine" means one boot of one kernel, one network namespace and one user; it is about how
bytes can move, and has nothing to do with ``SHOAL_AGENTS_PER_MACHINE``, which only groups ranks.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from . import network, shared_memory
from .addresses import LOOPBACK, beside, interface_address, is_loopback, reachable_address
from .handshake import Accepting, Connecting
from .link import Link, Receiver
from .memory import Arena, ResultPool
from .poller import Poller
from .sealing import Crc, Unchecked
from .sockets import GREETING_SECONDS, Incoming
from .threads import Inbox, ThreadLink
from .tls import Certificates

log = logging.getLogger("shoal")

TRANSPORTS = ("threads", "shared_memory", "network")
MAX_STRANGERS = 256
"""Connections that have not proved themselves yet, at most; others wait in the system's queue."""
SLOW_SECONDS = 1.0
"""After which a stranger has to make room, where others wait."""
PAUSE_SECONDS = 0.05
"""For which nobody is let in where there is no room, or no descriptor."""


@dataclass(frozen=True)
class Place:
    """Where an agent runs: what decides which transports can reach it."""

    rank: int
    host: str
    boot: str
    namespace: int
    uid: int
    process: str
    pid: int
    started: int

    @property
    def machine(self) -> tuple[str, int, int]:
        return self.boot, self.namespace, self.uid


@dataclass(frozen=True)
class Endpoint:
    """Where an agent listens; empty where it does not."""

    inbox: str = ""
    unix: str = ""
    host: str = ""
    port: int = 0


_process = uuid.uuid4().hex


def _name_process() -> None:
    global _process
    _process = uuid.uuid4().hex


os.register_at_fork(after_in_child=_name_process)


def process_start(pid: int) -> int:
    """When a process of this machine started, in clock ticks since boot; 0 where that cannot be read."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def here(rank: int) -> Place:
    """The place of the caller."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/net").stat().st_ino
    pid = os.getpid()
    return Place(rank, socket.gethostname(), boot, namespace, os.getuid(), _process, pid, process_start(pid))


class Router:
    """The links of one agent. Made before anybody is known; ``listen`` and then ``meet`` complete it."""

    def __init__(self, rank: int, poller: Poller, receiver: Receiver, arena: Arena, pool: ResultPool) -> None:
        self.rank = rank
        self.place = here(rank)
        self.poller = poller
        self.arena = arena
        self.links: dict[int, Link] = {}
        self.incoming: dict[int, list[Incoming]] = {}
        self.inbox = Inbox(rank, poller)
        self._receiver = receiver
        self._pool = pool
        self.certificates: Certificates | None = None  # of this agent, where there is TLS between machines
        self._guard = network.OPEN
        self._secret = b""
        self._host = ""
        self._places: list[Place] = []
        self._endpoints: list[Endpoint] = []
        self._kinds: list[str] = []
        self._strangers: list[Incoming] = []
        self._listeners: list[tuple[socket.socket, Callable[[socket.socket], None]]] = []
        self._listens_again = float("inf")  # where it has paused
        self._short = False  # the last connection could not be taken
        self._pidfds: dict[int, int] = {}
        self.rejected = 0

    def choose(self, places: list[Place], forced: str = "") -> list[str]:
        """The transport to each rank. ``forced`` (``SHOAL_TRANSPORT``) is used for all, or refused with the reason."""
        if forced and forced not in TRANSPORTS:
            raise ValueError(f"SHOAL_TRANSPORT={forced!r}; it may be one of {', '.join(TRANSPORTS)}")
        mine = self.place
        kinds = []
        for place in places:
            best = "network"
            if place.machine == mine.machine:
                best = "threads" if place.process == mine.process else "shared_memory"
            if forced and TRANSPORTS.index(forced) < TRANSPORTS.index(best):
                raise ValueError(
                    f"SHOAL_TRANSPORT={forced} cannot reach rank {place.rank} on {place.host} from rank {mine.rank} on "
                    f"{mine.host}: they share no {'process' if forced == 'threads' else 'machine'}; unset it, or use "
                    f"{best}"
                )
            kinds.append(forced or best)
        return kinds

    def listen(self, places: list[Place], forced: str, interface: str, rendezvous: str, reached: list[str]) -> Endpoint:
        """Open what this agent needs to be reached, and nothing more.

        ``reached`` are the addresses at which the agents, by rank, have reached the rendezvous; empty where unknown.
        """
        self._places = places
        self._kinds = self.choose(places, forced)
        others = {kind for rank, kind in enumerate(self._kinds) if rank != self.rank}
        unix, host, port = "", "", 0
        if "shared_memory" in others:
            unix = f"shoal-{uuid.uuid4().hex}"
            self._listen(shared_memory.listen(unix), self._accept_local)
        if "network" in others:
            self._host = host = self._address(interface, rendezvous, reached)
            sock = network.listen(host)
            port = sock.getsockname()[1]
            self._listen(sock, self._accept_remote)
        return Endpoint(self.inbox.address, unix, host, port)

    def _address(self, interface: str, rendezvous: str, reached: list[str]) -> str:
        """Where to listen for agents that share no memory with this one."""
        if interface:
            far = [address for address in reached if address and not is_loopback(address)]
            return interface_address(interface, prefer_ipv6=bool(far) and ":" in far[0])
        network_of = [(place.boot, place.namespace) for place in self._places]
        if len(set(network_of)) == 1:
            return LOOPBACK
        mine = network_of[self.rank]
        return reachable_address(
            reached[self.rank] or rendezvous,
            [address for rank, address in enumerate(reached) if network_of[rank] != mine],
        )

    def _listen(self, sock: socket.socket, accept: Callable[[socket.socket], None]) -> None:
        self._listeners.append((sock, accept))
        self._let_in(sock, accept)

    def _let_in(self, sock: socket.socket, accept: Callable[[socket.socket], None]) -> None:
        self.poller.add(sock.fileno(), lambda _: accept(sock))

    def _pause(self) -> None:
        """Let nobody in for a moment."""
        if self._listens_again == float("inf"):
            for sock, _ in self._listeners:
                self.poller.remove(sock.fileno())
        self._listens_again = time.monotonic() + PAUSE_SECONDS

    def _listen_again(self) -> None:
        self._listens_again = float("inf")
        for sock, accept in self._listeners:
            self._let_in(sock, accept)

    def meet(self, endpoints: list[Endpoint], secret: bytes, well_kept: bool = False) -> None:
        """Learn where everybody listens, and watch the processes of this machine.

        Args:
            endpoints: By rank.
            secret: What agents prove that they know.
            well_kept: Nobody else can know it.
        """
        self._endpoints = endpoints
        self._secret = secret
        check = Unchecked if self.certificates else hashlib.sha256 if well_kept else Crc
        self._guard = network.Guard(self.certificates, check)
        for place in self._places:
            if place.machine == self.place.machine and place.process != self.place.process:
                self._watch(place)

    def _watch(self, place: Place) -> None:
        """Be told when a process ends, also when a child of its keeps its sockets open."""
        try:
            fd = os.pidfd_open(place.pid)
        except OSError:
            return
        if process_start(place.pid) != place.started:  # another process namespace, so another process
            os.close(fd)
            return
        self._pidfds[place.rank] = fd
        self.poller.add(fd, lambda _, rank=place.rank: self._on_process_end(rank))  # type: ignore[misc]

    def _on_process_end(self, rank: int) -> None:
        fd = self._pidfds.pop(rank)
        self.poller.remove(fd)
        os.close(fd)
        self._receiver.on_closed(rank, "its process ended", certain=True)

    def transport_to(self, rank: int) -> str:
        return self._kinds[rank]

    def place_of(self, rank: int) -> Place:
        return self._places[rank]

    @property
    def places(self) -> list[Place]:
        return self._places

    def link(self, peer: int) -> Link:
        """The link to a peer, opened when it is first needed."""
        link = self.links.get(peer)
        if link is None:
            link = self._open(peer)
            self.links[peer] = link
        return link

    def _open(self, peer: int) -> Link:
        kind, endpoint = self._kinds[peer], self._endpoints[peer]
        if kind == "threads":
            return ThreadLink(self.rank, self.inbox, peer, endpoint.inbox)
        greeting = Connecting(self._secret, self.rank, peer)
        if kind == "shared_memory":
            sock = shared_memory.connect(endpoint.unix)
            return shared_memory.SharedMemoryLink(sock, peer, greeting, self.poller, self._receiver)
        sock = network.start_connecting(beside(endpoint.host, self._host), endpoint.port)
        return network.NetworkLink(sock, peer, greeting, self.poller, self._receiver, self._guard)

    def _accept_local(self, listener: socket.socket) -> None:
        for sock in self._accepted(listener):
            self._admit(sock, lambda s, g: shared_memory.SharedMemoryIncoming(s, g, self.poller, self._receiver))

    def _accept_remote(self, listener: socket.socket) -> None:
        for sock in self._accepted(listener):
            self._admit(sock, self._over_network)

    def _over_network(self, sock: socket.socket, greeting: Accepting) -> Incoming:
        return network.NetworkIncoming(sock, greeting, self.poller, self._receiver, self._pool, self._guard)

    def _accepted(self, listener: socket.socket) -> Iterator[socket.socket]:
        """Whoever wants to connect, as long as there is room."""
        while len(self._strangers) < MAX_STRANGERS:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptor is left, or the network failed for this one
                if not self._short:
                    log.warning("rank %d cannot take a connection, and goes on trying: %s", self.rank, error)
                self._short = True
                break
            self._short = False
            yield sock
        self._pause()

    def _admit(self, sock: socket.socket, make: Callable[[socket.socket, Accepting], Incoming]) -> None:
        try:
            connection = make(sock, Accepting(self._secret, self.rank, len(self._places)))
        except OSError:
            sock.close()
            self.rejected += 1
            return
        connection.on_known = self._introduce
        connection.on_end = self._forget
        self._strangers.append(connection)

    def _introduce(self, connection: Incoming) -> None:
        """A stranger has proved to be an agent; move it to where that agent's connections are."""
        self._strangers.remove(connection)
        self.incoming.setdefault(connection.peer, []).append(connection)

    def _forget(self, connection: Incoming) -> None:
        if connection in self._strangers:
            self._strangers.remove(connection)
            self.rejected += 1
        elif connection in self.incoming.get(connection.peer, ()):
            self.incoming[connection.peer].remove(connection)

    def forget_strangers(self, now: float) -> None:
        patience = GREETING_SECONDS if len(self._strangers) < MAX_STRANGERS else SLOW_SECONDS
        for connection in [c for c in self._strangers if now - c.since >= patience]:
            connection.fail("it never said who it is")
        if now >= self._listens_again:
            self._listen_again()

    @property
    def next_check(self) -> float:
        """When the oldest stranger's time is up, or a pause."""
        oldest = self._strangers[0].since + GREETING_SECONDS if self._strangers else float("inf")
        return min(oldest, self._listens_again)

    def say_goodbye(self, lost: int = -1, cause: str = "") -> None:
        """Tell those that connected to us that we leave, because rank ``lost`` (-1: nobody) was lost for ``cause``."""
        self.inbox.last_word = lost, cause
        for connections in self.incoming.values():
            for connection in connections:
                connection.say_goodbye(lost, cause)

    @property
    def heard(self) -> bool:
        """Somebody is still connected to us."""
        return any(self.incoming.values())

    def knows(self, rank: int) -> bool:
        """A connection to or from this rank is open, so that its end shows there."""
        return rank in self.links or self.hears(rank)

    def hears(self, rank: int) -> bool:
        """A connection from this rank is open, so that its goodbye or its end will be noticed there."""
        return bool(self.incoming.get(rank))

    def shared_by(self, peer: int, ident: int) -> tuple[torch.Tensor, int]:
        """A memory file that a peer has shared, and its descriptor, -1 if it is not to be locked."""
        for connection in self.incoming.get(peer, ()):
            if isinstance(connection, shared_memory.SharedMemoryIncoming):
                found = connection.memory.segment(ident)
                if found is not None:
                    return found
        raise KeyError(f"rank {peer} has shared no memory {ident}")

    def inbox_of(self, peer: int) -> str:
        """Where a peer that is a thread of this process hears."""
        return self._endpoints[peer].inbox

    def retire_memory(self) -> None:
        """Tell everybody which memory files of ours are gone."""
        while self.arena.retired:
            ident = self.arena.retired.pop()
            for link in self.links.values():
                if isinstance(link, shared_memory.SharedMemoryLink):
                    link.forget(ident)

    def drop(self, peer: int) -> None:
        """Close what leads to and from a peer that is gone."""
        link = self.links.pop(peer, None)
        if link is not None:
            link.close()
        for connection in self.incoming.pop(peer, []):
            connection.close()

    def _connections(self) -> Iterable[Incoming]:
        yield from self._strangers
        for connections in self.incoming.values():
            yield from connections

    def close(self) -> None:
        for link in list(self.links.values()):
            link.close()
        for connection in list(self._connections()):
            connection.close()
        for sock, _ in self._listeners:
            self.poller.remove(sock.fileno())
            sock.close()
        for fd in self._pidfds.values():
            self.poller.remove(fd)
            os.close(fd)
        self.inbox.close()
        self.links, self.incoming, self._strangers, self._listeners, self._pidfds = {}, {}, [], [], {}

    def descriptors(self) -> list[int]:
        """Every descriptor that a forked child must close, or this agent's end would not be noticed."""
        socks = [getattr(link, "sock", None) for link in self.links.values()]
        socks += [connection.sock for connection in self._connections()] + [sock for sock, _ in self._listeners]
        found = [sock.fileno() for sock in socks if sock is not None] + list(self._pidfds.values())
        for connection in self._connections():
            if isinstance(connection, shared_memory.SharedMemoryIncoming):
                found += connection.memory.descriptors()
        return found
