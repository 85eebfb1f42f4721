"""Accepts connections for one agent: opens its listeners, and keeps connections until they are authenticated, and
messages until their sender is admitted.

Any process that can reach a listener can connect to it, and send nothing. So each origin (an address; on one machine, a
process) has a few slots. If they are full, a new connection replaces the oldest one, unless that one is very recent;
then the new one is closed. A flood from one address takes no slots of others. An agent at the same address whose
connection is closed, too, retries until it succeeds (``Router._cut``).

No agent receives messages from a non-member. A restarted agent connects to the others long before they admit it, and
each of them admits it at another moment: until then its messages are buffered. The same holds for a joining agent
itself: until it is admitted, messages of the others are buffered.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .. import clock
from ..errors import ProtocolError
from . import addresses, listeners
from .link import NullReceiver, Receiver
from .messages import Message, message_cost
from .network_link import continues
from .poller import Poller
from .quotas import Quota
from .sockets import GREETING_SECONDS, Incoming

ENTRY = "~entry"
"""The name of messages about entering, which do not wait."""
CONNECTIONS = 2
"""The limit from one agent to another: its link, and its replacement if the link was cut during the handshake."""
ROOM = 16
"""Places for one origin."""
KNOWN_ROOM = 64
"""Places for an origin where agents of the job are, besides one for each: a crowd there leaves them a good chance."""
MOST_UNKNOWN = 256
"""Places for all unknown origins together."""
HURRY_SECONDS = 0.05
"""So long a place is kept. A handshake takes an agent that is not busy a millisecond."""


class Acceptor:
    """The accepting side of one agent.

    Args:
        poller: The agent's.
        make: Makes a connection of an accepted socket: one between machines if the second argument is true.

    Attributes:
        private: The descriptor by which processes of this user find the private listener; -1 if there is none.
        unauthenticated: The connections that have not proved themselves yet.
        rejected: How many connections never did.
    """

    def __init__(self, poller: Poller, make: Callable[[socket.socket, bool], Incoming]) -> None:
        self.private = -1
        self.unauthenticated = Unauthenticated()
        self.rejected = 0
        self._poller = poller
        self._make = make
        self._listeners: list[listeners.RateLimitedListener] = []
        self._far: socket.socket | None = None  # listens for agents of other machines

    def _listen(self, sock: socket.socket, on_accept: Callable[[socket.socket, Any], None]) -> None:
        self._listeners.append(listeners.RateLimitedListener(sock, self._poller, on_accept))

    def listen_locally(self) -> str:
        """Listen for processes of this machine; the name of the socket."""
        name = f"shoal-{clock.random_hex(16)}"
        self._listen(addresses.listen_unix(name), self._accept_local)
        self.listen_privately()
        return name

    def listen_privately(self) -> None:
        """Open a listener for processes of this user, if the system allows."""
        private = listeners.listen_privately()
        if private is not None:
            sock, self.private = private
            self._listen(sock, self._accept_local)

    def listen_between_machines(self, host: str, ports: range) -> int:
        """Listen on an address, at the first free one of some ports; which that is."""
        self._far = addresses.listen_tcp(host, ports)
        self._listen(self._far, self._accept_remote)
        return int(self._far.getsockname()[1])

    def expect(self, hosts: Iterable[str]) -> None:
        """Agents of the job are at these addresses: they get a queue of their own, if the system allows."""
        known = [host for host in hosts if host]
        for host in known:
            self.unauthenticated.expect(origin_of(host))
        for_agents = listeners.listen_for(known, self._far) if self._far is not None else None
        if for_agents is not None:
            self._listen(for_agents, self._accept_remote)

    def expect_one_more(self, host: str) -> None:
        """An agent has come later, which is at this address."""
        self.unauthenticated.expect(origin_of(host))

    def _accept_local(self, sock: socket.socket, _address: Any) -> None:
        pid, uid = addresses.peer_credentials(sock)
        # An abstract socket name has no rights: any user of this network namespace can connect to it.
        if uid != os.getuid():  # unheard
            sock.close()
            self.rejected += 1
        else:
            self._accept(sock, f"pid {pid}", False)

    def _accept_remote(self, sock: socket.socket, address: Any) -> None:
        self._accept(sock, origin_of(address[0]), True)

    def _accept(self, sock: socket.socket, origin: str, between_machines: bool) -> None:
        try:
            # Before a connection is made of it: that sends a greeting and registers with the poller, which a flood must
            # not cause without limit.
            if not self.unauthenticated.has_room(origin, clock.monotonic()):
                raise OSError(errno.EAGAIN, "the limit of pending peers is reached")
            connection = self._make(sock, between_machines)
        except OSError:
            sock.close()
            self.rejected += 1
            return
        self.unauthenticated.add(connection, origin)

    def has_ended(self, connection: Incoming) -> bool:
        """A connection has ended; False if it was authenticated before."""
        if not self.unauthenticated.remove(connection):
            return False
        self.rejected += 1
        return True

    def check(self, now: float) -> None:
        """Close connections that say nothing; look at listeners again."""
        # A process that connects and sends nothing would otherwise keep a descriptor and a place until this agent ends.
        self.unauthenticated.forget(now - GREETING_SECONDS)
        for listener in self._listeners:
            listener.check(now)

    @property
    def next_check(self) -> float:
        """When something is due. It is asked after every poll, and the answer is nearly always infinity."""
        when = float("inf")
        if self.unauthenticated.origins:
            when = next(iter(self.unauthenticated.origins)).since + GREETING_SECONDS
        for listener in self._listeners:
            if listener.next_turn < when:
                when = listener.next_turn
        return when

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close, without those of connections."""
        return [*(listener.sock.fileno() for listener in self._listeners), self.private]

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        if self.private >= 0:
            os.close(self.private)
        self._listeners, self.private = [], -1
        self.unauthenticated = Unauthenticated()


def origin_of(address: str) -> str:
    """An IPv4 address; of an IPv6 one its network of 2^64, which one host may have for itself."""
    bare = address.partition("%")[0]
    return socket.inet_pton(socket.AF_INET6, bare)[:8].hex() if ":" in bare else bare


class Unauthenticated:
    """The connections of one agent that have not proved themselves yet.

    Attributes:
        origins: The origin of each connection, the oldest first.
    """

    def __init__(self) -> None:
        self._known: Counter[str] = Counter()
        self.origins: dict[Incoming, str] = {}
        self._at: dict[str, dict[Incoming, None]] = {}  # by origin, the oldest first

    def expect(self, origin: str) -> None:
        """An agent of the job is there."""
        self._known[origin] += 1

    def has_room(self, origin: str, now: float) -> bool:
        """Whether one more connection from an origin may be added; the oldest may be closed for it."""
        here = self._at.get(origin, {})
        if origin in self._known:
            if len(here) < KNOWN_ROOM + self._known[origin]:
                return True
        elif len(here) < ROOM:
            unknown = [connections for known, connections in self._at.items() if known not in self._known]
            if sum(map(len, unknown)) < MOST_UNKNOWN:
                return True
            # The origin with the most places gives one up. A flood from many addresses then does not push out a single
            # agent at an unknown one.
            here = max(unknown, key=len)
        oldest = next(iter(here))
        # The newcomer is refused, and not the connection in its handshake. Otherwise a flood would let no handshake
        # come to its end.
        if now - oldest.since < HURRY_SECONDS:
            return False
        oldest.fail("it has not authenticated, and others wait")
        return True

    def add(self, connection: Incoming, origin: str) -> None:
        self.origins[connection] = origin
        self._at.setdefault(origin, {})[connection] = None

    def remove(self, connection: Incoming) -> bool:
        """Remove a connection. False if it is not among these."""
        origin = self.origins.pop(connection, None)
        if origin is None:
            return False
        del self._at[origin][connection]
        # A flood from many addresses would otherwise leave an entry for each of them.
        if not self._at[origin]:
            del self._at[origin]
        return True

    def forget(self, before: float) -> None:
        """Close the connections that arrived before a time."""
        for connection in self:
            # The oldest come first, so all later ones are recent.
            if connection.since > before:
                return
            connection.fail("it never authenticated")

    def __iter__(self) -> Iterator[Incoming]:
        return iter(list(self.origins))


class BufferingReceiver(NullReceiver):
    """The :class:`Receiver` of a connection from an agent that is not admitted.

    An agent whose connection is cut connects again. The remaining notifications are for outgoing connections.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._kept: list[tuple[int, Message]] = []
        self._quota = Quota("messages that arrived before it was admitted")
        self._closed: tuple[int, str, bool, bool] | None = None

    def on_message(self, source: int, message: Message) -> None:
        if message.name == ENTRY:
            self._receiver.on_message(source, message)
        else:
            # An agent that is not admitted may send for as long as it waits. Without a quota its messages could fill
            # this agent's memory.
            self._quota.acquire(message_cost(message))
            self._kept.append((source, message))

    def on_arrived(self, source: int, message: Message) -> None:
        self._receiver.on_arrived(source, message)

    def on_closed(self, peer: int, cause: str, final: bool = False, certain: bool = False) -> None:
        # Kept like a message: reported now, it would be the end of an agent that is not a member, before the messages
        # that came ahead of it.
        self._closed = (peer, cause, final, certain)

    def open(self) -> None:
        """Deliver the buffered messages in their order."""
        for source, message in self._kept:
            self._receiver.on_message(source, message)
        self._kept = []
        if self._closed is not None:
            self._receiver.on_closed(*self._closed)


class PendingPeers:
    """The connections from agents that are not admitted, and from all while this agent itself is not."""

    def __init__(self) -> None:
        self._waiting: dict[Incoming, BufferingReceiver] = {}
        self._admitted: list[tuple[Incoming, BufferingReceiver]] = []

    def introduce(self, connection: Incoming, receiver: Receiver) -> None:
        """Buffer the messages of an authenticated connection for ``receiver``.

        Raises:
            ProtocolError: The agent has too many connections.
        """
        self.forget_before(connection.peer, connection.incarnation)
        waiting = self.of(connection.peer, connection.incarnation)
        if waiting and continues(connection, waiting[0]):
            self.replace(waiting[0], connection)
            return
        if len(waiting) >= CONNECTIONS:
            raise ProtocolError("it opened one connection more while it waits to be admitted")
        self._waiting[connection] = buffer = BufferingReceiver(receiver)
        connection.deliver_to(buffer)

    def forget_before(self, rank: int, incarnation: int) -> None:
        """Drop the connections that were cut of earlier starts of an agent: nothing continues them."""
        for known in list(self._waiting):
            if known.peer == rank and known.incarnation < incarnation and known.sock.fileno() < 0:
                del self._waiting[known]

    def remove(self, connection: Incoming) -> bool:
        """A connection has ended. False if it was not pending."""
        return self._waiting.pop(connection, None) is not None

    def replace(self, before: Incoming, connection: Incoming) -> None:
        """One connection has replaced another, if that was pending."""
        if before in self._waiting:
            self._waiting[connection] = self._waiting.pop(before)
        # Admitted, and not yet open: the buffered messages must be forwarded to the connection in use.
        self._admitted = [(connection if known is before else known, buffer) for known, buffer in self._admitted]

    def of(self, rank: int, incarnation: int) -> list[Incoming]:
        """The pending connections of an agent."""
        return [pending for pending in self._waiting if (pending.peer, pending.incarnation) == (rank, incarnation)]

    def admit(self, connection: Incoming) -> None:
        """The agent becomes a member; its buffered messages follow with :meth:`open`."""
        self._admitted.append((connection, self._waiting.pop(connection)))

    def open(self, receiver: Receiver) -> None:
        """Deliver the buffered messages of admitted agents. For the driving thread."""
        while self._admitted:
            connection, buffer = self._admitted.pop(0)
            # This thread also reads the connections, so no newer message can come between the buffered ones.
            connection.deliver_to(receiver)
            buffer.open()

    def __iter__(self) -> Iterator[Incoming]:
        return iter(list(self._waiting))
