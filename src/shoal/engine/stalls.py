"""Logs calls that wait for long: the call, the awaited ranks, the duration, and the status of those agents.

The driving thread answers a status request independently of the script. So an agent that computes, or waits for another
one, reports that. An agent that is stopped, hung or cut off does not answer, which is logged as well.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from .. import clock
from .._timeouts import format_seconds
from ..operations.operation import needed_by
from ..operations.services import Services
from ..operations.shared_parts import SharedParts
from ..transport.wire import Kind, Message
from .agent_status import StatusReporter

log = logging.getLogger("shoal")

STALL_AFTER = 30.0
"""Seconds after which a waiting operation is reported, unless ``SHOAL_STALL_SECONDS`` is set."""
DOING = "~doing"
"""The name of requests for an agent's status."""
BETWEEN_REPORTS = 1.0
"""Seconds between two reports at least: calls that become due in between are in the next report."""
ANSWER_WITHIN = 2.0
"""Seconds after which an agent without an answer is reported."""
_LONGEST = 400
"""Characters of an answer that are shown at most."""


class _Stalled(NamedTuple):
    """A call that has waited for long, perhaps only for its transfer. ``gives_up``: its timeout, if known."""

    call: str
    ranks: Sequence[int]
    since: float
    gives_up: float | None
    moves: bool = False


class Stalls:
    """The stall reports of one agent. Used under the engine's lock.

    Attributes:
        after: Seconds after which a waiting operation is reported.
    """

    def __init__(self, parts: SharedParts, about: StatusReporter, services: Services) -> None:
        self.after = STALL_AFTER
        self._about = about
        self._rank, self._matcher = parts.rank, parts.matcher
        self._membership, self._sender = parts.membership, parts.sender
        self._services, self._progress = services, parts.progress
        self._asked: dict[int, float] = {}  # time of the status request, by rank
        self._answers: dict[int, tuple[float, str]] = {}  # time and text of the last answer, by rank
        self._not_before = 0.0
        self._look_at_services = float("inf")
        self._reported: set[tuple[str, float]] = set()  # reported calls of services

    def report_after(self, seconds: float) -> None:
        """Set :attr:`after`."""
        self.after = seconds

    def begins_to_wait(self, since: float) -> None:
        """Schedule a check for a call without an operation that may begin to wait. From any thread, without the
        lock.
        """
        # First without the lock, because every call on a window comes here; min() repeats the comparison with the lock.
        if since + self.after < self._look_at_services:
            with self._progress.lock:
                self._look_at_services = min(self._look_at_services, since + self.after)
                self._progress.check_by(self._look_at_services)

    def check(self, now: float) -> float:
        """Check all operations. Returns when to check again, as ``clock.monotonic()``."""
        following, stalled = float("inf"), list[_Stalled]()
        for operation in self._matcher.in_flight():
            if operation.stalled or operation.background:
                continue
            due = max(operation.started + self.after, self._not_before)
            if now < due:
                following = min(following, due)
            else:
                operation.stalled = True
                waited_for = self._about.waited_for(operation)
                stalled.append(
                    _Stalled(str(operation), waited_for, operation.started, operation.timeout, operation.moves)
                )
        if now >= self._look_at_services:
            stalled += self._of_services(now)
        following = min(following, self._look_at_services)
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

    def _of_services(self, now: float) -> list[_Stalled]:
        """The calls without an operation, as on windows, that are due for a report."""
        self._look_at_services = float("inf")  # before the check: a thread that begins to wait sets it again
        calls = [call for service in self._services.all() for call in service.calls_that_wait()]
        self._reported &= {(call, since) for call, _, since in calls}
        stalled = []
        for call, ranks, since in calls:
            due = max(since + self.after, self._not_before)
            if (call, since) in self._reported:
                continue
            if now >= due:
                self._reported.add((call, since))
                stalled.append(_Stalled(call, ranks, since, None))
            else:
                self._look_at_services = min(self._look_at_services, due)
        return stalled

    def _report(self, stalled: list[_Stalled], now: float) -> None:
        """Log one report of all stalled calls, and request the status of the awaited agents."""
        first = min(stalled, key=lambda stall: stall.since)
        others = f" and {len(stalled) - 1} more" if len(stalled) > 1 else ""
        ranks = sorted({rank for stall in stalled for rank in stall.ranks})
        log.warning(
            "%s%s on rank %d has waited %s%s%s",
            first.call,
            others,
            self._rank,
            format_seconds(now - first.since),
            needed_by(ranks, first.moves),
            "" if first.gives_up is None else f"; it gives up after {format_seconds(first.gives_up)}",
        )
        for rank in ranks:
            if rank in self._membership.view.alive and rank not in self._asked and rank != self._rank:
                self._asked[rank] = now
                self._sender.send_message(rank, Message(Kind.ASK, DOING, DOING))

    # Status requests

    def answer(self, rank: int, _message: Message) -> None:
        """Send this agent's status to another agent."""
        self._sender.send_message(rank, Message(Kind.DENY, DOING, DOING, text=str(self._about.doing)))

    def on_answer(self, rank: int, message: Message) -> None:
        """Take the requested status of another agent."""
        # Only a requested answer is logged: a peer could otherwise fill the log.
        if self._asked.pop(rank, None) is not None:
            answer = " ".join(message.text.split())[:_LONGEST]
            self._answers[rank] = clock.monotonic(), answer
            log.warning("rank %d, for which rank %d waits: %s", rank, self._rank, answer)

    def last_answer(self, ranks: Sequence[int], since: float) -> str:
        """The status of the first of ``ranks`` that has answered after ``since``, for an error; empty if none has."""
        for rank in ranks:
            when, answer = self._answers.get(rank, (0.0, ""))
            if when > since:
                return f". {format_seconds(clock.monotonic() - when)} ago rank {rank} did this: {answer}"
        return ""
