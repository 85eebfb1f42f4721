"""What outlives a connection that was cut: what was sent and is not known to have come, and how much has come.

A router may forget a connection, or a firewall reset it, while both agents live. The one that connects does so again,
is told how much of what it sent has come, and sends the rest once more: so every message comes exactly once, in order.
The same where a bit was turned on the way: the receiver ends the connection.
What is sent is counted in units: a packet, or a chunk of a tensor with the packet that announces it.
"""

from __future__ import annotations

import errno
from collections import deque
from typing import Generic, TypeVar

from .protocol import ProtocolError

T = TypeVar("T")
SAY_AFTER_UNITS = 64
SAY_AFTER_BYTES = 1 << 22
"""How much comes before the receiver says so: until then the sender keeps it."""
MOST_SPOILED = 3
"""Times in a row, without a unit that is as it was sent between them: then that is no accident."""


class ConnectionCut(ProtocolError):
    """The other side has closed the connection, or somebody between."""


def is_connection_cut(error: Exception) -> bool:
    """Whether an error may mean no more than that the connection is gone. One that is silent for too long is another
    thing: its host is gone."""
    return isinstance(error, ConnectionCut | ConnectionResetError | ConnectionAbortedError | BrokenPipeError) or (
        isinstance(error, OSError) and error.errno == errno.ENOTCONN
    )


class SendBuffer(Generic[T]):
    """What one agent has sent to another, until that has said that it came."""

    def __init__(self) -> None:
        self._acknowledged = 0
        self._kept: deque[T] = deque()
        self._again: deque[T] = deque()  # of those before a cut, what is to be sent once more

    def keep(self, unit: T) -> None:
        """It is sent now."""
        self._kept.append(unit)

    def acknowledge(self, count: int) -> None:
        """The receiver has ``count`` units in all. Raises :class:`ProtocolError` where that cannot be."""
        news = count - self._acknowledged
        if not 0 <= news <= len(self._kept):
            most = self._acknowledged + len(self._kept)
            raise ProtocolError(f"it has had {count:,} packets; {self._acknowledged:,} to {most:,} were expected")
        for _ in range(news):
            self._kept.popleft()
        self._acknowledged = count

    def resend_after(self, count: int) -> None:
        """Another connection is there, and ``count`` units had come before it."""
        self._kept.extend(self._again)
        self.acknowledge(count)
        self._kept, self._again = deque(), self._kept

    def next_to_resend(self) -> T | None:
        """What is to be sent once more, in its order, before anything new."""
        return self._again.popleft() if self._again else None

    @property
    def idle(self) -> bool:
        """Nothing is to be sent once more."""
        return not self._again

    def clear(self) -> None:
        self._kept.clear()
        self._again.clear()


class ReceivedOffset:
    """How much one agent has had from another, and when to say so."""

    def __init__(self) -> None:
        self.count = 0
        self._said = 0
        self._nbytes = 0
        self._spoiled = 0

    def one_more(self, nbytes: int) -> bool:
        """A unit has come; whether it is time to say so."""
        self.count += 1
        self._nbytes += nbytes
        self._spoiled = 0
        return self.count - self._said >= SAY_AFTER_UNITS or self._nbytes >= SAY_AFTER_BYTES

    def add_corrupt(self) -> bool:
        """A unit was changed on the way; whether that was too often."""
        self._spoiled += 1
        return self._spoiled >= MOST_SPOILED

    def said(self) -> int:
        """The count, which is being said now."""
        self._said, self._nbytes = self.count, 0
        return self.count
