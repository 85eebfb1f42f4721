"""Chooses the transport to each peer, and owns the links and listeners of one agent.

Threads of one process exchange objects through their memory, processes of one machine through shared memory, all others
through the network. "One machine" means one boot of one kernel, one network namespace and one user: it decides how
bytes can move, and is unrelated to ``SHOAL_AGENTS_PER_MACHINE``, which only groups ranks.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import clock
from ..errors import ProtocolError
from . import addresses, network_link, shared_memory, status_socket
from .acceptor import CONNECTIONS, Acceptor, PendingPeers
from .addresses import beside, is_loopback
from .authentication import MESSAGES, Accepting, Connecting
from .link import Link, Receiver
from .messages import Message
from .network_link import strong, sums, unchecked
from .peer_address import Endpoint, PeerId, ProcessWatch, address_for_listening, choose_transports, local_peer_id
from .poller import Poller
from .reverse_connections import ReverseConnections
from .shared_regions import Arena, ResultPool
from .sockets import Incoming, Outgoing
from .threads import ThreadInbox, ThreadLink
from .tls import Certificates

log = logging.getLogger("shoal")

AGAIN_SECONDS, AGAIN_AT_MOST = 0.01, 0.1
"""The first pause before a link that was cut is tried again, and the longest."""
LOG_AT_ATTEMPT = 15
"""The attempt at which retrying is logged, once: about a second after the cut."""


class Router:
    """The links of one agent. Created before any peer is known: ``deliver_to``, ``listen``, ``meet`` complete it.

    Attributes:
        places, endpoints: The process of each agent, and where it listens, by rank.
        is_joining: Whether this agent waits to be admitted itself. Until then messages of other agents are buffered.
    """

    def __init__(self, rank: int, poller: Poller, arena: Arena, pool: ResultPool, incarnation: int = 0) -> None:
        self.rank = rank
        self.place = local_peer_id(rank, incarnation)
        self.poller = poller
        self.arena = arena
        self.links: dict[int, Link] = {}
        self.incoming: dict[int, list[Incoming]] = {}
        self.inbox = ThreadInbox(rank, poller)
        self._receiver: Receiver
        self._pool = pool
        self.certificates: Certificates | None = None  # of this agent, where there is TLS between machines
        self._guard = network_link.OPEN
        self._secret = b""
        self._host = ""
        self.places: list[PeerId] = []
        self.endpoints: list[Endpoint] = []
        self._kinds: list[str] = []
        self._forced = ""
        self.acceptor = Acceptor(poller, self._make_incoming)
        self._pending_peers = PendingPeers()
        self.is_joining = False
        self._leaving = False
        self._again: dict[int, float] = {}  # when links that were cut are tried again
        self._tries: dict[int, int] = {}
        self._shut_out: set[int] = set()  # lost agents
        self._cut_off: dict[int, Incoming] = {}  # the last connection from each agent, until it was cut
        self._answer: Callable[[int, int], int] = lambda rank, incarnation: 0
        self.reversing = ReverseConnections(self)
        self._processes = ProcessWatch(poller, self._on_process_end)

    def deliver_to(self, receiver: Receiver) -> None:
        """Set the receiver of all messages; called before any can arrive."""
        self._receiver = receiver

    def encrypt_with(self, certificates: Certificates | None) -> None:
        """Encrypt connections between machines. Call it before the start."""
        self.certificates = certificates

    def answer_by(self, answer: Callable[[int, int], int]) -> None:
        """Set the answer to a peer that only probes, by its rank and incarnation."""
        self._answer = answer

    def send_by(self, send: Callable[[int, Message], None]) -> None:
        """Set how a message is sent to a member; messages to other ranks are dropped."""
        self.send = send

    def describe_by(self, describe: Callable[[float], dict[str, Any]]) -> None:
        """Set the function that gives this agent's status; see :mod:`~.status_socket`."""
        self.describe = describe

    def listen(
        self,
        places: list[PeerId],
        forced: str,
        interface: str,
        rendezvous: str,
        reached: list[str],
        ports: range = range(1),
    ) -> Endpoint:
        """Open only the listeners that this agent needs.

        ``reached`` are the addresses from which the agents, by rank, have reached the rendezvous; empty if unknown.
        ``ports`` are the ports of the listener for agents of other machines; for 0 the system picks a port.
        """
        self.places = places
        self._forced = forced
        self._kinds = choose_transports(self.place, places, forced)
        others = {kind for rank, kind in enumerate(self._kinds) if rank != self.rank and kind}
        if not all(self._kinds):  # a joining agent connects from a place that reaches the rendezvous
            others.add(forced or "shared_memory")
            if interface or not is_loopback(reached[self.rank] or rendezvous):
                others.add("network")
        unix, host, port = "", "", 0
        if "shared_memory" in others:
            unix = self.acceptor.listen_locally()
        if "network" in others:
            self._host = host = address_for_listening(self.place, places, interface, rendezvous, reached)
            port = self.acceptor.listen_between_machines(host, ports)
        endpoint = Endpoint(self.inbox.address, unix, host, port, self.acceptor.private)
        status_socket.here.join(self)
        return endpoint

    @property
    def has_private_listener(self) -> bool:
        """Processes of this user can find a private listener."""
        return self.acceptor.private >= 0

    def open_private_listener(self) -> None:
        """Open the private listener, if the system allows."""
        self.acceptor.listen_privately()

    def meet(self, endpoints: list[Endpoint], secret: bytes, is_private: bool = False) -> None:
        """Set the endpoints of all agents, and watch the processes of this machine.

        Args:
            endpoints: By rank.
            secret: The shared secret that agents prove to know.
            is_private: No other user can know it.
        """
        self.endpoints = endpoints
        self._secret = secret
        check = unchecked if self.certificates else strong if is_private else sums
        self._guard = network_link.Guard(self.certificates, check)
        self.acceptor.expect(endpoint.host for endpoint in endpoints)
        for place in self.places:
            self._watch(place)

    def _watch(self, place: PeerId) -> None:
        if place.machine == self.place.machine and place.process != self.place.process:
            self._processes.watch(place)

    def _on_process_end(self, rank: int) -> None:
        self._receiver.on_closed(rank, "its process ended", certain=True)

    def transport_to(self, rank: int) -> str:
        return self._kinds[rank]

    def link(self, peer: int) -> Link:
        """The link to a peer, opened at its first use."""
        link = self.links.get(peer)
        if link is None:
            link = self._open(peer)
            self.links[peer] = link
        return link

    def _open(self, peer: int) -> Link:
        kind = self._kinds[peer]
        if not kind:
            raise OSError(errno.ENOTCONN, "it has not come yet")
        if kind == "threads":
            return ThreadLink(self.rank, self.inbox, peer, self.endpoints[peer].inbox)
        self.reversing.begin(peer)
        self.poller.wake()
        link = self.outgoing(peer, self._receiver)
        link.on_cut, link.on_request = self._cut, self.reversing.connect_back
        link.may_be_refused = lambda peer: peer not in self._cut_off  # its process has ended, where that was cut
        return link

    def outgoing(self, peer: int, receiver: Receiver, purpose: int = MESSAGES) -> Outgoing:
        """Connect to a peer in another process. ``purpose``: MESSAGES, QUESTION (a probe) or REVERSED."""
        sock, greeting = self._connect(peer, purpose)
        if self._kinds[peer] == "shared_memory":
            return shared_memory.SharedMemoryLink(sock, peer, greeting, self.poller, receiver)
        return network_link.NetworkLink(sock, peer, greeting, self.poller, receiver, self._guard)

    def _connect(self, peer: int, purpose: int = MESSAGES) -> tuple[socket.socket, Connecting]:
        """Begin to connect to a peer."""
        place = self.places[peer]
        if self._kinds[peer] == "shared_memory":
            sock = self._connect_locally(place, self.endpoints[peer])
        else:
            try:
                sock = addresses.start_connecting(*self.address_of(peer))
            except OSError as error:
                if error.errno not in addresses.UNREACHABLE or peer not in self.reversing:
                    raise
                self.reversing.unreachable(peer, error)
                sock = addresses.unconnected(self.address_of(peer)[0])  # the first read raises the error
        return sock, Connecting(self._secret, self.rank, peer, self.place.incarnation, place.incarnation, purpose)

    def address_of(self, peer: int) -> tuple[str, int]:
        """The address at which a peer listens for agents of other machines, as seen from here."""
        endpoint = self.endpoints[peer]
        return beside(endpoint.host, self._host), endpoint.port

    def _connect_locally(self, place: PeerId, endpoint: Endpoint) -> socket.socket:
        """Connect to an agent of this machine; if permitted, by its private listener, which others cannot flood."""
        if endpoint.listener >= 0 and (place.rank in self._processes or place.process == self.place.process):
            try:
                return addresses.connect(f"/proc/{place.pid}/fd/{endpoint.listener}")
            except PermissionError:
                pass
        return addresses.connect("\0" + endpoint.unix)

    def _cut(self, link: Outgoing, cause: str, at_once: bool) -> None:
        """A link was cut, for example by a peer without a free slot at start-up: retry until an operation's deadline.

        Queued messages stay. If no process listens any more, the next attempt shows it. A peer that has received our
        shutdown message has forgotten its count, and would receive messages again.
        """
        # Connecting again would make the peer wait for messages of an agent that has none left.
        if self._leaving and link.idle:
            link.fail(cause, certain=True)
            return
        if link.is_reversed:
            self.reversing.begin(link.peer, 0.0)
            if self._leaving:
                self.reversing.leave()
            self.poller.wake()
            return
        self.reversing.failed(link, link.problem)
        tries = self._tries[link.peer] = 0 if at_once else self._tries.get(link.peer, 0) + 1
        # A drawn part of it, or all agents would come back to a flooded listener at the same moments.
        pause = min(AGAIN_AT_MOST, AGAIN_SECONDS * 2.0 ** min(tries - 1, 10)) * clock.uniform(0.5, 1.0)
        self._again[link.peer] = clock.monotonic() + (pause if tries else 0.0)
        self.poller.wake()
        if tries == LOG_AT_ATTEMPT:
            log.warning("rank %d has no link to rank %d yet, and keeps trying: %s", self.rank, link.peer, cause)

    def _try_again(self, peer: int) -> None:
        del self._again[peer]
        link = self.links.get(peer)
        if isinstance(link, Outgoing) and not link.is_reversed:
            try:
                link.begin_again(*self._connect(peer))
            except OSError as error:
                link.fail(f"connecting to it failed: {error.strerror or error}")

    # Reversed connections

    def ask_to_connect(self, peer: int) -> None:
        """Ask a peer to open a reverse connection: over one of its own, or through other agents."""
        own = [*self.incoming.get(peer, ()), *self._pending_peers.of(peer, self.places[peer].incarnation)]
        direct = next((connection for connection in own if connection.resumes and not connection.is_reversed), None)
        if direct is not None:
            direct.ask_to_connect()
        else:
            self.reversing.ask_others(peer)

    def may_open_for(self, peer: int) -> bool:
        """Whether this agent may open a reverse connection to a peer."""
        return self._kinds[peer] == "network" and not self._leaving and peer not in self._shut_out

    def receive_over(self, link: network_link.NetworkLink) -> None:
        """Receive from a peer over an open reversed connection."""
        incarnation = self.places[link.peer].incarnation
        connection = network_link.NetworkIncoming.over(link, incarnation, self.poller, self._receiver, self._pool)
        self._attend_to(connection)
        try:
            self._introduce(connection)
            connection.send_arrived_count()
        except (OSError, ProtocolError):  # the peer connects again
            connection.close()
            self._forget(connection)

    def _make_incoming(self, sock: socket.socket, between_machines: bool) -> Incoming:
        greeting = Accepting(self._secret, self.rank, len(self.places), self.place.incarnation)
        connection: Incoming
        if between_machines:
            connection = network_link.NetworkIncoming(
                sock, greeting, self.poller, self._receiver, self._pool, self._guard
            )
        else:
            connection = shared_memory.SharedMemoryIncoming(sock, greeting, self.poller, self._receiver)
        self._attend_to(connection)
        return connection

    def _attend_to(self, connection: Incoming) -> None:
        connection.on_known, connection.on_end, connection.on_cut = self._introduce, self._forget, self._on_incoming_cut
        connection.is_shut_out, connection.answer = self._is_shut_out, self._answer
        if isinstance(connection, network_link.NetworkIncoming):
            connection.on_reversed = self.reversing.send_over

    def _introduce(self, connection: Incoming) -> None:
        """A connection is authenticated; file it under its agent."""
        self.acceptor.unauthenticated.remove(connection)
        self.reversing.ask_soon(connection.peer)
        incarnation = self.places[connection.peer].incarnation
        # Its messages wait too: handled before the agent is a member, they would meet round counters and plans of the
        # membership before it.
        if connection.incarnation > incarnation or self.is_joining:
            self._pending_peers.introduce(connection, self._receiver)
            return
        known = self.incoming.setdefault(connection.peer, [])
        before = known[0] if known else self._cut_off.pop(connection.peer, None)
        if before is not None and network_link.continues(connection, before):
            self.incoming[connection.peer] = [connection]
            self._pending_peers.replace(before, connection)
            return
        if len(known) >= CONNECTIONS:
            raise ProtocolError(f"it opened a connection more than the {CONNECTIONS} that an agent may have to another")
        known.append(connection)

    def _is_shut_out(self, rank: int, incarnation: int) -> bool:
        now = self.places[rank].incarnation
        return not self.is_joining and (incarnation < now or (incarnation == now and rank in self._shut_out))

    def _on_incoming_cut(self, connection: Incoming, _cause: str) -> None:
        """The incoming connection of an agent was cut. If it lives, it connects again."""
        # It is kept though it is closed: its count of units is where the next connection of this agent continues.
        connection.close()
        known = self.incoming.get(connection.peer, [])
        if connection in known:
            known.remove(connection)
            self._cut_off[connection.peer] = connection
            self._receiver.on_cut(connection.peer)

    def _forget(self, connection: Incoming) -> None:
        if self.acceptor.has_ended(connection):
            return
        if self._pending_peers.remove(connection):
            return
        if connection in self.incoming.get(connection.peer, ()):
            self.incoming[connection.peer].remove(connection)

    # Joining agents

    def has_pending(self, rank: int, incarnation: int) -> bool:
        """Whether an agent is connected and waits to be admitted."""
        # A connection that was cut stays among them: the agent may connect again, or it may have ended.
        return any(pending.sock.fileno() >= 0 for pending in self._pending_peers.of(rank, incarnation))

    def admit(self, place: PeerId, endpoint: Endpoint) -> None:
        """An agent has entered, with this address. Its buffered messages follow with :meth:`admit_pending`."""
        rank = place.rank
        if self.places[rank] != place:
            self.drop(rank)
            self._processes.forget(rank)
        if endpoint.host and not self.endpoints[rank].host:
            self.acceptor.expect_one_more(endpoint.host)
        self._shut_out.discard(rank)
        self.places[rank], self.endpoints[rank] = place, endpoint
        self._kinds[rank] = choose_transports(self.place, [place], self._forced)[0]
        if rank not in self._processes:
            self._watch(place)
        self._pending_peers.forget_before(rank, place.incarnation)
        for connection in self._pending_peers.of(rank, place.incarnation):
            self._pending_peers.admit(connection)
            self.incoming.setdefault(rank, []).append(connection)

    def admit_pending(self) -> None:
        """Deliver the buffered messages of admitted agents. For the driving thread."""
        self._pending_peers.open(self._receiver)

    def check(self, now: float) -> None:
        """Do due work: close silent connections, reopen listeners, retry links."""
        self.acceptor.check(now)
        self.reversing.check(now)
        for peer in [peer for peer, at in self._again.items() if now >= at]:
            self._try_again(peer)

    @property
    def next_check(self) -> float:
        """When work is due."""
        when = min(self.acceptor.next_check, self.reversing.due)
        return min(when, *self._again.values()) if self._again else when

    def send_shutdown(self, lost: int = -1, cause: str = "", to_all: bool = False) -> None:
        """Send the shutdown message to connected agents: we leave because rank ``lost`` (-1: none) was lost for
        ``cause``. At first only to those for which nothing is in transit, since they would count later messages as
        missing.
        """
        if not self._leaving:
            self._leaving = True
            self.reversing.leave()
        self.inbox.last_message = lost, cause
        for peer, connections in self.incoming.items():
            if to_all or peer not in self.links or self.links[peer].idle:
                for connection in connections:
                    connection.send_shutdown(lost, cause)

    @property
    def has_incoming(self) -> bool:
        """Whether any agent is still connected to us."""
        return any(self.incoming.values())

    def has_connection(self, rank: int) -> bool:
        """Whether this agent has a link to a rank, perhaps not open yet, or an open connection from it."""
        return rank in self.links or self.receives_from(rank)

    def receives_from(self, rank: int) -> bool:
        """A connection from this rank is open, so that its shutdown message or its end will be noticed."""
        return bool(self.incoming.get(rank))

    def is_cut_off(self, rank: int) -> bool:
        """The incoming connection of this rank was cut, and no other has replaced it yet."""
        return rank in self._cut_off and not self.receives_from(rank)

    def reaches(self, rank: int) -> bool:
        """A link to this rank exists or is being made: if that agent has ended, it will show there."""
        link = self.links.get(rank)
        if not isinstance(link, Outgoing):
            return link is not None
        return link.sock.fileno() >= 0 and not self.reversing.is_refused(rank)

    def shared_by(self, peer: int, ident: int) -> tuple[torch.Tensor, int]:
        """A memory file that a peer has shared, and its descriptor, -1 if it must not be locked."""
        for connection in self.incoming.get(peer, ()):
            if isinstance(connection, shared_memory.SharedMemoryIncoming):
                found = connection.memory.segment(ident)
                if found is not None:
                    return found
        raise KeyError(f"rank {peer} has shared no memory {ident}")

    def retire_memory(self) -> None:
        """Notify all peers of this agent's freed memory files."""
        while self.arena.retired:
            ident = self.arena.retired.pop()
            for link in self.links.values():
                if isinstance(link, shared_memory.SharedMemoryLink):
                    link.forget(ident)

    def shut_out(self, peer: int) -> None:
        """A peer was lost. If it lives, it is notified when it connects, and its messages are ignored."""
        self._shut_out.add(peer)
        self.drop(peer)

    def drop(self, peer: int) -> None:
        """Close the connections to and from a lost peer."""
        link = self.links.pop(peer, None)
        self._again.pop(peer, None)
        self._cut_off.pop(peer, None)
        self.reversing.forget(peer)
        if link is not None:
            link.close()
        for connection in self.incoming.pop(peer, []):
            connection.close()

    def _connections(self) -> Iterable[Incoming]:
        yield from self.acceptor.unauthenticated
        yield from self._pending_peers
        for connections in self.incoming.values():
            yield from connections

    def close(self) -> None:
        status_socket.here.leave(self)
        for link in list(self.links.values()):
            link.close()
        for connection in list(self._connections()):
            connection.close()
        self.acceptor.close()
        self.reversing.close()
        self._processes.close()
        self.inbox.close()
        self.incoming, self._again, self._cut_off = {}, {}, {}
        self.links.clear()
        self._pending_peers = PendingPeers()

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close, because they would hide this agent's end."""
        socks = [getattr(link, "sock", None) for link in self.links.values()]
        socks += [connection.sock for connection in self._connections()]
        found = [sock.fileno() for sock in socks if sock is not None]
        found += [*self._processes.descriptors(), *self.acceptor.descriptors(), *self.reversing.descriptors()]
        for connection in self._connections():
            if isinstance(connection, shared_memory.SharedMemoryIncoming):
                found += connection.memory.descriptors()
        return found
