"""Who wants to come in: connections that have not proved themselves, and how many there may be.

Whoever can reach a listener can connect to it, and say nothing. So each origin (an address; on one machine, a process)
has a few places. Who comes when they are full takes that of the oldest there, unless it has only just come; then the
new one is closed. A flood from one address takes no place at others, and an agent that comes from the same address, and
is closed, too, tries again until it gets in (``Router._cut``).
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
    """The connections of one agent that have not proved themselves yet."""

    def __init__(self) -> None:
        self._known: Counter[str] = Counter()
        self._origins: dict[Incoming, str] = {}  # the oldest first
        self._at: dict[str, dict[Incoming, None]] = {}  # by origin, the oldest first

    def expect(self, origin: str) -> None:
        """An agent of the job is there."""
        self._known[origin] += 1

    def has_room(self, origin: str, now: float) -> bool:
        """Whether one more from there may come, for which the oldest may have to go."""
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
        self._origins[connection] = origin
        self._at.setdefault(origin, {})[connection] = None

    def remove(self, connection: Incoming) -> bool:
        """False where it is none of them."""
        origin = self._origins.pop(connection, None)
        if origin is None:
            return False
        del self._at[origin][connection]
        if not self._at[origin]:
            del self._at[origin]
        return True

    @property
    def oldest(self) -> float:
        """When the one came that has waited for longest; infinity if there are none."""
        return next((connection.since for connection in self._origins), float("inf"))

    def forget(self, before: float) -> None:
        """Close those that came before a time."""
        for connection in self:
            if connection.since > before:
                return
            connection.fail("it never said who it is")

    def __iter__(self) -> Iterator[Incoming]:
        return iter(list(self._origins))
