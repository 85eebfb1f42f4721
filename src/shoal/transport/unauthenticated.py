"""Unauthenticated connections, and the limits of their number.

Any process that can reach a listener can connect to it, and send nothing. So each origin (an address; on one machine, a
process) has a few slots. If they are full, a new connection replaces the oldest one, unless that one is very recent;
then the new one is closed. A flood from one address takes no slots of others. An agent at the same address whose
connection is closed, too, retries until it succeeds (``Router._cut``).
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator

from .sockets import Incoming

ROOM = 16
"""Places for one origin."""
KNOWN_ROOM = 64
"""Places for an origin where agents of the job are, besides one for each: a crowd there leaves them a good chance."""
MOST_UNKNOWN = 256
"""Places for all unknown origins together."""
HURRY_SECONDS = 0.05
"""So long a place is kept. A handshake takes an agent that is not busy a millisecond."""


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
            unknown = [there for one, there in self._at.items() if one not in self._known]
            if sum(map(len, unknown)) < MOST_UNKNOWN:
                return True
            here = max(unknown, key=len)
        oldest = next(iter(here))
        if now - oldest.since < HURRY_SECONDS:
            return False
        oldest.fail("it has not said who it is, and others wait")
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
        if not self._at[origin]:
            del self._at[origin]
        return True

    def forget(self, before: float) -> None:
        """Close the connections that arrived before a time."""
        for connection in self:
            if connection.since > before:
                return
            connection.fail("it never said who it is")

    def __iter__(self) -> Iterator[Incoming]:
        return iter(list(self.origins))
