"""Retransmission after a cut connection: the units that are sent and not acknowledged, and the count of received ones.

A router may drop a connection, or a firewall reset it, while both agents live. The connecting agent then connects
again, learns how many of its units have arrived, and sends the rest again: every message arrives exactly once, in
order. The same happens after a corrupted unit: the receiver ends the connection. A unit is a packet, or a chunk of a
tensor with the packet that announces it.
"""

from __future__ import annotations

import errno
from collections import deque
from typing import Generic, TypeVar

from ..errors import ProtocolError

T = TypeVar("T")
ACKNOWLEDGE_AFTER_UNITS = 64
ACKNOWLEDGE_AFTER_BYTES = 1 << 22
"""Units and bytes after which the receiver acknowledges; until then the sender keeps the units."""
MOST_CORRUPT = 3
"""Corrupted units in a row, without a correct one between them: more is no accident."""


class ConnectionCut(ProtocolError):
    """The other side, or a device on the path, has closed the connection."""


def is_connection_cut(error: Exception) -> bool:
    """Whether an error may mean only that the connection is gone. A connection that is silent for too long does not
    count, because its host is gone.
    """
    return isinstance(error, ConnectionCut | ConnectionResetError | ConnectionAbortedError | BrokenPipeError) or (
        isinstance(error, OSError) and error.errno == errno.ENOTCONN
    )


class SendBuffer(Generic[T]):
    """The units that one agent has sent to another and that are not acknowledged."""

    def __init__(self) -> None:
        self._acknowledged = 0
        self._kept: deque[T] = deque()
        self._again: deque[T] = deque()  # units from before a cut that are to be sent again

    def keep(self, unit: T) -> None:
        """Keep a unit that is being sent, until it is acknowledged."""
        self._kept.append(unit)

    def acknowledge(self, count: int) -> None:
        """Drop the units that have arrived: ``count`` in all. Raises :class:`ProtocolError` if that count is
        impossible.
        """
        news = count - self._acknowledged
        # An impossible count would drop units that have not arrived, or put all later counts out of step.
        if not 0 <= news <= len(self._kept):
            most = self._acknowledged + len(self._kept)
            raise ProtocolError(f"it confirmed {count:,} packets; {self._acknowledged:,} to {most:,} were expected")
        # Units have no numbers on the wire: the position in this queue is the number. So it is kept in the order of
        # sending, and nothing is removed from its middle.
        for _ in range(news):
            self._kept.popleft()
        self._acknowledged = count

    def resend_after(self, count: int) -> None:
        """Prepare to send again on a new connection: ``count`` units had arrived before the cut."""
        # This may be the second cut: units that still wait to be sent again follow those already sent again.
        self._kept.extend(self._again)
        self.acknowledge(count)
        self._kept, self._again = deque(), self._kept

    def next_to_resend(self) -> T | None:
        """The next unit to send again, in order, before any new one."""
        return self._again.popleft() if self._again else None

    @property
    def idle(self) -> bool:
        """No unit has to be sent again."""
        return not self._again

    def clear(self) -> None:
        self._kept.clear()
        self._again.clear()


class ReceivedOffset:
    """The count of units that one agent has received from another, and the units and bytes to acknowledge."""

    def __init__(self) -> None:
        self.count = 0
        self._reported = 0
        self._nbytes = 0
        self._corrupt = 0

    def one_more(self, nbytes: int) -> bool:
        """Count a received unit. Returns whether it is time to acknowledge."""
        self.count += 1
        self._nbytes += nbytes
        self._corrupt = 0
        # Without acknowledgements the sender keeps everything that it has ever sent; one for each unit would cost a
        # system call on both sides.
        return self.count - self._reported >= ACKNOWLEDGE_AFTER_UNITS or self._nbytes >= ACKNOWLEDGE_AFTER_BYTES

    def add_corrupt(self) -> bool:
        """Count a corrupted unit. Returns whether there were too many in a row."""
        self._corrupt += 1
        return self._corrupt >= MOST_CORRUPT

    def report(self) -> int:
        """The count to acknowledge; records that it is acknowledged now."""
        self._reported, self._nbytes = self.count, 0
        return self.count
