"""Agents that are not let in yet: what they say waits, so that nobody hears of a round from whom it does not know.

An agent that has been started again connects to the others long before they let it in, and these let it in each at
another moment. The same for itself: until it has entered, what others send is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from .link import Receiver
from .quotas import Quota, message_cost
from .sockets import Incoming
from .wire import Message

ENTRY = "~entry"
"""The name of messages about entering, which do not wait."""


class BufferingReceiver:
    """The :class:`Receiver` of a connection that leads into the lobby."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._kept: list[tuple[int, Message]] = []
        self._budget = Quota("messages that came before it was let in")
        self._closed: tuple[int, str, bool, bool] | None = None

    def on_message(self, source: int, message: Message) -> None:
        if message.name == ENTRY:
            self._receiver.on_message(source, message)
        else:
            self._budget.take(message_cost(message))
            self._kept.append((source, message))

    def on_arrived(self, source: int, message: Message) -> None:
        self._receiver.on_arrived(source, message)

    def on_closed(self, peer: int, cause: str, final: bool = False, certain: bool = False) -> None:
        self._closed = (peer, cause, final, certain)

    def on_cut(self, peer: int, cause: str) -> None:
        """Whoever waits connects once more."""

    def on_shut_out(self, peer: int) -> None:
        """Only connections that lead away are told."""

    def on_left(self, peer: int, lost: int = -1, cause: str = "") -> None:
        """Only connections that lead away hear a goodbye."""

    def open(self) -> None:
        """Hand on what was kept, in its order."""
        for source, message in self._kept:
            self._receiver.on_message(source, message)
        self._kept = []
        if self._closed is not None:
            self._receiver.on_closed(*self._closed)


class PendingPeers:
    """The connections from agents that are not let in yet, and from all while this agent itself is not."""

    def __init__(self) -> None:
        self._waiting: dict[Incoming, BufferingReceiver] = {}
        self._let_in: list[tuple[Incoming, BufferingReceiver]] = []

    def add(self, connection: Incoming, receiver: Receiver) -> None:
        self._waiting[connection] = threshold = BufferingReceiver(receiver)
        connection.deliver_to(threshold)

    def remove(self, connection: Incoming) -> bool:
        """It has ended. False where it was not here."""
        return self._waiting.pop(connection, None) is not None

    def replace(self, before: Incoming, connection: Incoming) -> None:
        """One connection has taken the place of another, if that was here."""
        if before in self._waiting:
            self._waiting[connection] = self._waiting.pop(before)
        self._let_in = [(connection if one is before else one, threshold) for one, threshold in self._let_in]

    def of(self, rank: int, incarnation: int) -> list[Incoming]:
        """The connections of an agent."""
        return [one for one in self._waiting if (one.peer, one.incarnation) == (rank, incarnation)]

    def admit(self, connection: Incoming) -> None:
        """It is as any other from now on; what it has said follows with :meth:`open`."""
        self._let_in.append((connection, self._waiting.pop(connection)))

    def open(self, receiver: Receiver) -> None:
        """Hand on what those have said that were let in. For the thread that drives."""
        while self._let_in:
            connection, threshold = self._let_in.pop(0)
            connection.deliver_to(receiver)
            threshold.open()

    def __iter__(self) -> Iterator[Incoming]:
        return iter(list(self._waiting))
