"""Agents that are threads of one process: a message is an object put into the receiver's inbox."""

from __future__ import annotations

import threading
import weakref
from collections import deque

from .. import clock
from .link import Published, Receiver
from .messages import Message, Payload
from .poller import Poller

_inboxes: weakref.WeakValueDictionary[str, ThreadInbox] = weakref.WeakValueDictionary()


class ThreadInbox:
    """The queue of messages from threads of this process to one agent.

    Attributes:
        messages: Those that :meth:`drain` has not delivered.
    """

    def __init__(self, rank: int, poller: Poller) -> None:
        self.address = clock.random_hex(16)
        self._rank = rank
        self._poller = poller
        self._lock = threading.Lock()
        self.messages: deque[tuple[int, Message | tuple[int, str]]] = deque()
        self._writers: list[ThreadInbox] = []
        self._closed = False
        self.last_message = -1, ""  # the rank that the owner had lost when it left, and the cause
        _inboxes[self.address] = self

    def put(self, source: int, message: Message | tuple[int, str]) -> bool:
        """Add a message, or the shutdown notice of ``source``. False if the owner of the inbox has shut down."""
        with self._lock:
            if self._closed:
                return False
            self.messages.append((source, message))
            self._poller.wake()
        return True

    def expect(self, writer: ThreadInbox) -> None:
        """Remember an agent that writes here, to notify it when the owner leaves."""
        with self._lock:
            self._writers.append(writer)

    def drain(self, receiver: Receiver) -> None:
        while self.messages:
            source, message = self.messages.popleft()
            if isinstance(message, tuple):
                receiver.on_left(source, *message)
            else:
                receiver.on_message(source, message)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            writers, self._writers = self._writers, []
        _inboxes.pop(self.address, None)
        for writer in writers:
            writer.put(self._rank, self.last_message)


class ThreadLink:
    """A link to another thread of this process."""

    idle = True

    def __init__(self, rank: int, own: ThreadInbox, peer: int, address: str) -> None:
        self.peer = peer
        self._rank = rank
        self._own = own
        self._inbox = _inboxes.get(address)
        if self._inbox is not None:
            self._inbox.expect(own)

    def post(self, message: Message, published: Published | None = None, start: int = 0, stop: int = 0) -> None:
        if published is not None:
            data = published.part(start, stop)
            message.payload = Payload(data, data.numel())
        if self._inbox is None or not self._inbox.put(self._rank, message):
            self._own.put(self.peer, (-1, "") if self._inbox is None else self._inbox.last_message)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._inbox = None
