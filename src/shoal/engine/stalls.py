"""Who waits for long says so in the log: in what, for whom, since when, and what those do meanwhile, by their own word.

The thread that drives answers such a question, whatever the script does. So an agent that computes, or waits for
another, says that; one that is stopped, hung or cut off says nothing, and that is a finding, too.
"""

from __future__ import annotations

import logging
import time

from ..transport.wire import Kind, Message
from .matching import Matcher
from .membership import Membership
from .operation import Operation, describe
from .outbox import Outbox

log = logging.getLogger("shoal")

STALL_AFTER = 30.0
"""Seconds after which an operation that waits is reported, unless ``SHOAL_STALL_SECONDS`` says otherwise."""
DOING = "~doing"
"""The name under which agents ask each other what they do."""
BETWEEN_REPORTS = 1.0
"""Seconds between two reports at least: what else is due meanwhile is in the next."""
ANSWER_WITHIN = 2.0
"""Seconds after which it is reported that an agent does not answer."""
_LONGEST = 400
"""Characters of an answer that are shown."""


class Stalls:
    """The reports of one agent. Used under the engine's lock.

    Attributes:
        after: Seconds for which an operation waits before it is reported.
    """

    def __init__(self, rank: int, matcher: Matcher, membership: Membership, outbox: Outbox) -> None:
        self.after = STALL_AFTER
        self._rank, self._matcher, self._membership, self._outbox = rank, matcher, membership, outbox
        self._asked: dict[int, float] = {}  # what they do, when
        self._not_before = 0.0

    def check(self, now: float) -> float:
        """Look at all operations. Returns when to come back, as ``time.monotonic()``."""
        following, stalled = float("inf"), list[Operation]()
        for operation in self._matcher.in_flight():
            if operation.stalled:
                continue
            due = max(operation.started + self.after, self._not_before)
            if now < due:
                following = min(following, due)
            else:
                operation.stalled = True
                stalled.append(operation)
        if stalled:
            self._not_before = now + BETWEEN_REPORTS
            self._report(stalled, now)
        for rank, when in list(self._asked.items()):
            due = when + ANSWER_WITHIN
            if now < due:
                following = min(following, due)
            else:
                del self._asked[rank]
                log.warning("rank %d does not answer rank %d: it is stopped, hung, or cut off", rank, self._rank)
        return following

    def _report(self, stalled: list[Operation], now: float) -> None:
        """One report of all that have waited for so long now; whoever they wait for is asked what it does."""
        first = min(stalled, key=lambda one: one.started)
        others = f" and {len(stalled) - 1} more" if len(stalled) > 1 else ""
        ranks = sorted({rank for one in stalled for rank in one.held_up_by})
        log.warning(
            "%s%s on rank %d has waited %s for ranks %s; it gives up after %s",
            first,
            others,
            self._rank,
            _seconds(now - first.started),
            ranks,
            _seconds(first.timeout),
        )
        for rank in ranks:
            if rank in self._membership.view.alive and rank not in self._asked and rank != self._rank:
                self._asked[rank] = now
                self._outbox.say(rank, Message(Kind.ASK, DOING, DOING))

    # Others ask

    def answer(self, rank: int) -> None:
        """Tell another what this agent does."""
        self._outbox.say(rank, Message(Kind.DENY, DOING, DOING, text=self.doing))

    def heard(self, rank: int, text: str) -> None:
        """What another does, which was asked."""
        if self._asked.pop(rank, None) is not None:
            log.warning("rank %d, for which rank %d waits: %s", rank, self._rank, " ".join(text.split())[:_LONGEST])

    @property
    def doing(self) -> str:
        """What this agent does, in words."""
        now = time.monotonic()
        waiting = [one for one in self._matcher.in_flight() if one.waiting_for]
        if waiting:
            first = min(waiting, key=lambda one: one.started)
            more = f", and in {len(waiting) - 1} more" if len(waiting) > 1 else ""
            found = f"it waits in {first} for ranks {first.held_up_by}, since {_seconds(now - first.started)}{more}"
        else:
            found = "it waits in no call of Shoal's, so its script does something else"
        op, name, round_, ended = self._matcher.ended_last
        if op:
            found += f"; the last that ended was {describe(op, name, round_)}, {_seconds(now - ended)} ago"
        return found


def _seconds(seconds: float) -> str:
    """Three digits of a short time, and whole seconds of a long one."""
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
