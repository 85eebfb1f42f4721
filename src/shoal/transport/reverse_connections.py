"""Connections from peers that this agent cannot connect to, because a firewall refuses or drops its requests.

Each agent opens the connection for its own messages. If that fails at first contact, the peer is requested to open a
*reversed* connection: the peer connects and authenticates as usual, and this agent sends over that connection. The
request uses a connection that the peer has opened for its own messages. Without one, other agents forward it. After a
cut the peer is requested again; both sides know which units had arrived (``retransmit.py``).

If neither direction opens a connection, the peer counts as lost after :data:`CLOSED_SECONDS`, with the address, the
port and the reason. The cause is then the network: the kernel of a running machine answers connection requests
independently of its processes. A peer that was connected before does not become lost in this way, because an outage may
pass.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from .. import clock
from ..errors import ProtocolError
from .acceptor import Acceptor
from .authentication import MESSAGES, REVERSED, Accepting
from .link import Link, NullReceiver, Receiver
from .messages import Kind, Message
from .network_link import NetworkIncoming, NetworkLink
from .peer_address import PeerId
from .retransmit import ConnectionCut
from .sockets import Incoming, Outgoing

CONNECT = "~connect"
"""The name of requests for a reversed connection that other agents pass on."""
ASK_SECONDS = 1.0
"""The time a connection may take before the peer is requested to open it, and between two requests."""
SOON_SECONDS = 0.25
"""So long it may take where the peer has connected to this agent."""
CLOSED_SECONDS = 12.0
"""After so long without an answer both directions count as closed: four requests to connect have had none by then."""
REFUSED_SECONDS = 3.0
"""The same where a connection is refused. The peer's process may have ended, so that is found out sooner."""
LEAVING_SECONDS = 1.0
"""The same where this agent shuts down. A peer that has read its shutdown message has closed both directions; one that
lives connects its own direction again at once."""


@dataclass(slots=True)
class _Attempts:
    """To connect to one peer."""

    since: float
    ask_at: float
    limit: float = CLOSED_SECONDS
    problem: str = "no answer"


class ReverseConnectionHost(Protocol):
    """The interface to the agent's router."""

    rank: int
    places: list[PeerId]
    links: dict[int, Link]
    is_joining: bool
    acceptor: Acceptor
    send: Callable[[int, Message], None]

    def address_of(self, peer: int) -> tuple[str, int]: ...

    def transport_to(self, rank: int) -> str: ...

    def receives_from(self, rank: int) -> bool: ...

    def ask_to_connect(self, peer: int) -> None: ...

    def may_open_for(self, peer: int) -> bool: ...

    def outgoing(self, peer: int, receiver: Receiver, purpose: int = MESSAGES) -> Outgoing: ...

    def receive_over(self, link: NetworkLink) -> None: ...


class ReverseConnections:
    """The peers to which the way of one agent is not open yet, and the reversed connections that it opens for others.

    Attributes:
        due: When :meth:`check` has something to do, as ``clock.monotonic()``.
    """

    def __init__(self, agent: ReverseConnectionHost) -> None:
        self.due = float("inf")
        self._agent = agent
        self._attempts: dict[int, _Attempts] = {}
        self._opening: dict[int, Outgoing] = {}
        self._requests = 0  # requests of this agent that others pass on
        self._passed_on: dict[tuple[int, int], int] = {}  # the last request's number, by origin and target

    # For messages of this agent

    def begin(self, peer: int, pause: float = ASK_SECONDS) -> None:
        """An attempt to connect to a peer begins; after the pause it is asked."""
        now = clock.monotonic()
        self._attempts[peer] = _Attempts(now, now + pause)
        self.due = min(self.due, now + pause)

    def leave(self) -> None:
        """This agent shuts down: wait no longer than ``LEAVING_SECONDS`` for reversed connections that were cut.

        Messages may be queued for a peer that shut down before this agent did. Without this, the shutdown would wait
        for a connection that no process opens.
        """
        now = clock.monotonic()
        for peer, attempts in self._attempts.items():
            link = self._agent.links.get(peer)
            if isinstance(link, NetworkLink) and link.is_reversed:
                attempts.limit = min(attempts.limit, now - attempts.since + LEAVING_SECONDS)

    def __contains__(self, peer: int) -> bool:
        return peer in self._attempts

    def is_refused(self, peer: int) -> bool:
        """The last attempt was refused: there is no listener, or a firewall refuses."""
        attempts = self._attempts.get(peer)
        return attempts is not None and attempts.limit == REFUSED_SECONDS

    def failed(self, link: Outgoing, error: Exception | None) -> None:
        """An attempt has failed, and another one follows. The first of them has the peer asked at once."""
        attempts = self._attempts.get(link.peer)
        code = error.errno if isinstance(error, OSError) else None
        if attempts is None or code in (errno.ENOTCONN, errno.EADDRNOTAVAIL):
            return
        if code is None or code in (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED):  # it was connected
            del self._attempts[link.peer]
            return
        if attempts.problem == "no answer" and code != errno.ETIMEDOUT:
            attempts.ask_at = self.due = 0.0
        attempts.limit = REFUSED_SECONDS if code == errno.ECONNREFUSED else CLOSED_SECONDS
        if code != errno.ETIMEDOUT:
            attempts.problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)

    def unreachable(self, peer: int, error: OSError) -> None:
        """The system knows no way to a peer."""
        attempts = self._attempts.get(peer)
        if attempts is not None:
            attempts.problem = error.strerror or str(error)

    def ask_soon(self, peer: int) -> None:
        """A request may reach the peer now, as that has connected."""
        attempts = self._attempts.get(peer)
        if attempts is not None:
            attempts.ask_at = min(attempts.ask_at, attempts.since + SOON_SECONDS)
            self.due = min(self.due, attempts.ask_at)

    def forget(self, peer: int) -> None:
        """The peer is lost, or has shut down."""
        self._attempts.pop(peer, None)
        link = self._opening.pop(peer, None)
        if link is not None:
            link.close()

    def problem_with(self, peer: int) -> str:
        """Why there is no connection to a peer, empty if there is one, or none is needed."""
        attempts, link = self._attempts.get(peer), self._agent.links.get(peer)
        if attempts is None or not isinstance(link, NetworkLink) or self._is_settled(link):
            return ""
        if link.is_reversed:
            return f"rank {peer} has not opened its connection to rank {self._agent.rank} again, which was cut"
        host, port = self._agent.address_of(peer)
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return f"rank {self._agent.rank} cannot connect to rank {peer} at {where} ({attempts.problem}: a firewall?)"

    def closed_at(self, peer: int) -> float:
        """When both directions count as closed, as ``clock.monotonic()``, if no connection opens until then; infinity
        if one is open, or the last attempt was refused: the peer may be started again, at another port.
        """
        attempts, link = self._attempts.get(peer), self._agent.links.get(peer)
        if attempts is None or not isinstance(link, NetworkLink) or self._is_settled(link) or self.is_refused(peer):
            return float("inf")
        return float("inf") if self._agent.receives_from(peer) else attempts.since + attempts.limit

    def problems_with(self, ranks: list[int]) -> str:
        """Why this agent has no connection to some of these ranks; empty if it has them or needs none."""
        return "; ".join(filter(None, map(self.problem_with, ranks)))

    @staticmethod
    def _is_settled(link: NetworkLink) -> bool:
        return link.open or (not link.is_reversed and link.is_connected)

    def check(self, now: float) -> None:
        """Ask, or give up, those whose time it is."""
        if now < self.due:
            return
        for peer, attempts in list(self._attempts.items()):
            link = self._agent.links.get(peer)
            if not isinstance(link, NetworkLink) or self._is_settled(link):
                del self._attempts[peer]
                continue
            # A peer whose own connection is open is alive, and can still be asked over it. Its loss would be noticed
            # there.
            is_over = now >= attempts.since + attempts.limit
            if is_over and not self._agent.receives_from(peer) and not self._agent.is_joining:
                # Read before the attempt is removed: without one problem_with() has no reason to give.
                why = self.problem_with(peer)
                del self._attempts[peer]
                link.fail(why)
                continue
            if now >= attempts.ask_at:
                # Repeated: a request, or the connection that it asks for, may be lost, and nothing reports that to this
                # agent.
                attempts.ask_at = now + ASK_SECONDS
                self._agent.ask_to_connect(peer)
        self.due = min((attempts.ask_at for attempts in self._attempts.values()), default=float("inf"))

    def send_over(self, connection: Incoming, peer: int, greeting: Accepting) -> None:
        """Use a reversed connection that a peer has opened. It is not needed if this agent has a connection of its own
        by now.

        Raises:
            ConnectionCut: It is not needed; or it comes from another process of that rank than the known one.
        """
        link = self._agent.links.get(peer)
        # Both directions may open at the same time. The link keeps its own connection, because messages may already be
        # under way on it.
        wanted = isinstance(link, NetworkLink) and (link.is_reversed or not link.open)
        if not wanted or greeting.incarnation != self._agent.places[peer].incarnation:
            raise ConnectionCut("nothing is to be sent over it")
        assert isinstance(link, NetworkLink) and isinstance(connection, NetworkIncoming)
        # The socket now belongs to the link. Left there, the connection would keep a place of its origin, and count as
        # one that never proved itself.
        self._agent.acceptor.unauthenticated.remove(connection)
        connection.give_to(link, greeting.keys, greeting.welcome())

    # Requests that other agents pass on

    def ask_others(self, target: int) -> None:
        """Request through other agents that a peer connects to this agent, which cannot connect to the peer."""
        self._requests += 1
        self._pass_on(Message(Kind.ASK, CONNECT, CONNECT, self._requests, self._agent.rank, target))

    def on_request(self, request: Message) -> None:
        """Handle an agent's request that another agent connects to it: connect, or pass the request on, once.

        Raises:
            ProtocolError: A rank of the request does not exist.
        """
        origin, target = request.stage, request.token
        if max(origin, target) >= len(self._agent.places):
            raise ProtocolError(f"a connect request from rank {origin} to rank {target} names an unknown rank")
        if origin == self._agent.rank or request.round <= self._passed_on.get((origin, target), 0):
            return
        # Agents that pass each request on to all others would do so endlessly without this record.
        self._passed_on[origin, target] = request.round
        if target == self._agent.rank:
            self.connect_back(origin)
        else:
            self._pass_on(replace(request, tail=b""))

    def _pass_on(self, request: Message) -> None:
        """Send a request over all open links, because a queued request would arrive too late."""
        agent, target = self._agent, request.token
        for peer, link in list(agent.links.items()):
            if not isinstance(link, Outgoing) or link.open:
                agent.send(peer, request)
        if target not in agent.links and agent.transport_to(target) != "network":
            agent.send(target, request)

    # For messages to this agent

    def connect_back(self, peer: int) -> None:
        """Open a reversed connection to a peer, on its request."""
        before = self._opening.get(peer)
        # The peer repeats its request while this connection is being opened. A second one would replace it here, and
        # nobody would close the first.
        if (before is not None and before.sock.fileno() >= 0) or not self._agent.may_open_for(peer):
            return
        try:
            link = self._opening[peer] = self._agent.outgoing(peer, NullReceiver(), purpose=REVERSED)
        except OSError:  # the peer repeats its request
            return
        link.on_reversed = self._opened

    def _opened(self, link: Outgoing) -> None:
        # It is not opening any more: forget() and close() must not close a connection that receives messages.
        del self._opening[link.peer]
        assert isinstance(link, NetworkLink)
        self._agent.receive_over(link)

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close."""
        return [fd for fd in (link.sock.fileno() for link in self._opening.values()) if fd >= 0]

    def close(self) -> None:
        for peer in list(self._opening):
            self.forget(peer)
