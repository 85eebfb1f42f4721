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
from ..transport.wire import CERTAIN, DIED, Message
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
    """The agent that noticed."""
    certain: bool = False
    """Its process has ended, or it ended a connection itself; else the network between the two may be the cause."""
    because: int = -1
    """Where it left in good order: the agent that it had missed in a one-sided call, which is no loss to others."""


class Departures:
    """One agent's suspicions."""

    def __init__(self, rank: int, membership: Membership, router: Router) -> None:
        self._rank = rank
        self._membership = membership
        self._router = router
        self._suspects: dict[int, tuple[float, Departure]] = {}

    def sign(self, peer: int, cause: str, final: bool, certain: bool) -> float:
        """An agent seems to be gone. Returns when that is to be believed, as ``time.monotonic()``."""
        due = time.monotonic() + (0.0 if final else GRACE if self._router.knows(peer) else STRANGER_GRACE)
        known = self._suspects.get(peer)
        if known is not None:
            if known[1].told_by == peer:  # it has said why it goes; that counts
                return known[0]
            due = min(due, known[0])
        if known is None or due < known[0] or (known[1].died and known[1].told_by != self._rank):
            self._suspects[peer] = (due, Departure(peer, cause, True, self._rank, certain))
        return self._suspects[peer][0]

    def notice(self, source: int, message: Message) -> Departure | float:
        """An agent says that it leaves, or that another is gone: a departure, or when to come back for it."""
        rank, died, certain = message.token, bool(message.flags & DIED), bool(message.flags & CERTAIN)
        because = -1 if died else message.digest - 1
        said = Departure(rank, message.text, died, message.round if died else source, certain, because)
        if rank == self._rank:
            return said
        if source == rank or (died and (certain or not self._router.knows(rank))):
            return self._after_those_before(said)
        return self.hearsay(said)

    def _after_those_before(self, said: Departure) -> Departure | float:
        """An agent goes. Where another is about to be counted as lost, that may be why, and comes first."""
        due = max((due for due, one in self._suspects.values() if one.died and one.rank != said.rank), default=0.0)
        if not due:
            return said
        self._suspects.pop(said.rank, None)
        self._suspects[said.rank] = (due, said)
        return due

    def hearsay(self, said: Departure) -> float:
        """An agent is said to be gone, but not by itself, and we would notice. Returns when to come back for it.

        That it left, we hear from itself after all that it has sent to us. That it died, our own connections to it will
        show in a moment; where they do not, those two have lost each other.
        """
        rank = said.rank
        if rank not in self._membership.view.alive or (not said.died and self._router.hears(rank)):
            return float("inf")
        due = time.monotonic() + GRACE
        if rank in self._suspects:
            due, known = min(due, self._suspects[rank][0]), self._suspects[rank][1]
            said = known if known.died else said
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
