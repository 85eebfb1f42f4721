"""Who is gone, and since when we may believe it.

A connection that ends, a process that ends, and the word of a third agent can all arrive before the last thing that the
agent itself said, which may be a goodbye. So unless nothing of it can still come, a sign makes an agent a suspect for a
moment, and only then, without a goodbye, a loss. News of a loss is passed on along all links; every agent has a link to
the next rank, so it reaches everybody.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from ..transport.router import Router
from ..transport.wire import DIED, Message
from .membership import Membership

GRACE = 0.5
"""Seconds in which what an agent said last may still arrive."""
STRANGER_GRACE = 5.0
"""The same for an agent without a connection to this one: others, which have one, know better, and pass it on."""


class Departure(NamedTuple):
    """An agent that is gone."""

    rank: int
    cause: str
    died: bool
    told_by: int


class Departures:
    """One agent's suspicions."""

    def __init__(self, rank: int, membership: Membership, router: Router) -> None:
        self._rank = rank
        self._membership = membership
        self._router = router
        self._suspects: dict[int, tuple[float, Departure]] = {}

    def sign(self, peer: int, cause: str, final: bool) -> float:
        """An agent seems to be gone. Returns when that is to be believed, as ``time.monotonic()``."""
        due = time.monotonic() + (0.0 if final else GRACE if self._router.knows(peer) else STRANGER_GRACE)
        if peer not in self._suspects or due < self._suspects[peer][0]:
            self._suspects[peer] = (due, Departure(peer, cause, True, self._rank))
        return self._suspects[peer][0]

    def notice(self, source: int, message: Message) -> Departure | float:
        """An agent says that it leaves, or that another is gone: a departure, or when to come back for it."""
        rank, died = message.token, bool(message.flags & DIED)
        said = Departure(rank, message.text, died, source)
        return said if died or source == rank else self.hearsay(said)

    def hearsay(self, said: Departure) -> float:
        """An agent is said to have left, but not by what it sends to us. Returns when to come back for it."""
        rank = said.rank
        if rank not in self._membership.view.alive or self._router.hears(rank):
            return float("inf")  # its own goodbye comes after all that it has sent to us
        due = self._suspects[rank][0] if rank in self._suspects else time.monotonic() + GRACE
        self._suspects[rank] = (due, said)
        return due

    def believed(self, now: float) -> list[Departure]:
        """The suspects whose time is up."""
        return [departure for due, departure in self._suspects.values() if now >= due]

    def forget(self, rank: int) -> None:
        self._suspects.pop(rank, None)

    @property
    def next(self) -> float:
        """When the next suspect is due."""
        return min((due for due, _ in self._suspects.values()), default=float("inf"))
