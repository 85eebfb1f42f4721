"""Buffers the messages of agents that are not admitted yet, so that no agent receives messages from a non-member.

A restarted agent connects to the others long before they admit it, and each of them admits it at another moment. The
same holds for a joining agent itself: until it is admitted, messages of the others are buffered.
"""

from __future__ import annotations

from collections.abc import Iterator

from .incoming import Incoming
from .link import NullReceiver, Receiver
from .network_link import continues
from .quotas import Quota, message_cost
from .wire import Message, ProtocolError

ENTRY = "~entry"
"""The name of messages about entering, which do not wait."""
CONNECTIONS = 2
"""The limit from one agent to another: its link, and its replacement if the link was cut during the handshake."""


class BufferingReceiver(NullReceiver):
    """The :class:`Receiver` of a connection from an agent that is not admitted.

    An agent whose connection is cut connects again. The remaining notifications are for outgoing connections.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._kept: list[tuple[int, Message]] = []
        self._budget = Quota("messages that arrived before it was admitted")
        self._closed: tuple[int, str, bool, bool] | None = None

    def on_message(self, source: int, message: Message) -> None:
        if message.name == ENTRY:
            self._receiver.on_message(source, message)
        else:
            # An agent that is not admitted may send for as long as it waits. Without a quota its messages could fill
            # this agent's memory.
            self._budget.take(message_cost(message))
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
        waiting = self.of(connection.peer, connection.incarnation)
        if waiting and continues(connection, waiting[0]):
            self.replace(waiting[0], connection)
            return
        if len(waiting) >= CONNECTIONS:
            raise ProtocolError("it opened one connection more while it waits to be admitted")
        self._waiting[connection] = buffer = BufferingReceiver(receiver)
        connection.deliver_to(buffer)

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
