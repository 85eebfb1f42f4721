"""Agents that are threads of one process: a message is an object put into the receiver's inbox."""

from __future__ import annotations

import threading
import uuid
import weakref
from collections import deque

from .link import Published, Receiver
from .poller import Poller
from .wire import Message, Payload

_inboxes: weakref.WeakValueDictionary[str, Inbox] = weakref.WeakValueDictionary()
PROCESS = uuid.uuid4().hex
"""Tells this process from every other, also from one that was forked from it (see ``Inbox``)."""


class Inbox:
    """Where the threads of this process leave messages for one agent."""

    def __init__(self, poller: Poller) -> None:
        self.address = uuid.uuid4().hex
        self._poller = poller
        self._lock = threading.Lock()
        self._messages: deque[tuple[int, Message | str]] = deque()
        self._closed = False
        _inboxes[self.address] = self

    def put(self, source: int, item: Message | str) -> bool:
        """Leave a message, or the cause why ``source`` will send no more. False when the agent has left."""
        with self._lock:
            if self._closed:
                return False
            self._messages.append((source, item))
            self._poller.wake()
        return True

    def drain(self, receiver: Receiver) -> None:
        while self._messages:
            source, item = self._messages.popleft()
            if isinstance(item, str):
                receiver.on_closed(source, item, True)
            else:
                receiver.on_message(source, item)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        _inboxes.pop(self.address, None)


class ThreadLink:
    """To another thread of this process."""

    transport = "threads"
    idle = True

    def __init__(self, rank: int, own: Inbox, peer: int, address: str) -> None:
        self.peer = peer
        self._rank = rank
        self._own = own
        self._inbox = _inboxes.get(address)

    def post(self, message: Message, published: Published | None = None, start: int = 0, stop: int = 0) -> None:
        if published is not None:
            data = published.part(start, stop)
            message.payload = Payload(data, data.numel())
        if self._inbox is None or not self._inbox.put(self._rank, message):
            self._own.put(self.peer, "it has left")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if self._inbox is not None:
            self._inbox.put(self._rank, "its link closed")
            self._inbox = None
