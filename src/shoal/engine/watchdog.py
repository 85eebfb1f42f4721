"""Watches calls that wait for other agents: probes before their deadlines, the deadlines, and logs of long waits.

The log has the call, the awaited ranks, the duration, and the status of those agents. The driving thread answers probes
and status requests independently of the script, so a long evaluation is tolerated. An agent that is stopped, hung or
cut off does not answer: this is logged, and with ``SHOAL_DROP_AFTER`` the agent is dropped. An agent that itself waits
for a stopped one answers, and is not dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .. import clock
from ..clock import format_seconds
from ..errors import DeadlineExceeded
from ..execution.control_messages import Services
from ..execution.deadlock import LOOK_AFTER, Deadlocks
from ..execution.lifecycle import ASK_AFTER, Lifecycle
from ..execution.operation import SAME_CALLS, Operation, needed_by
from ..execution.shared_parts import SharedParts
from ..fault_tolerance.agreement import Agreement
from ..fault_tolerance.failure_detector import Failures
from ..transport.messages import HERE, Kind, Message
from .agent_status import StatusReporter

log = logging.getLogger("shoal")

ALIVE = "~alive"
"""The name of probes whether an agent is alive."""
ASK_ALL_AFTER = 1.0
"""Seconds after which an operation that a backend is to move probes participants that have not reached it."""
LATE = 1.0
"""Seconds of delay of a check after which this agent was stopped itself, and repeats its probes."""
AFTER_DEADLINE = 1.0
"""Seconds until the next check of an operation that computes beyond its deadline."""
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
    in_transfer: bool = False


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

    def check_after_wait(self, since: float) -> None:
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
                    _Stalled(str(operation), waited_for, operation.started, operation.timeout, operation.in_transfer)
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
            needed_by(ranks, first.in_transfer),
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


class Watchdog:
    """The watchdog of one agent's operations. Used under the engine's lock.

    Attributes:
        drop_after: Seconds after which an awaited agent that does not answer counts as lost.
    """

    def __init__(
        self,
        parts: SharedParts,
        lifecycle: Lifecycle,
        failures: Failures,
        agreement: Agreement,
        deadlocks: Deadlocks,
        stalls: Stalls,
    ) -> None:
        self.drop_after = float("inf")
        self._asked: dict[int, float] = {}  # time of the unanswered probe, by rank
        self._answered: dict[int, float] = {}  # time of the last answered probe, by rank
        self._looked: dict[Operation, float] = {}  # time of the last deadlock probe, if it waits for confirmations
        self._failures = failures
        self._agreement = agreement
        self._deadlocks = deadlocks
        self._stalls = stalls
        self._rank = parts.rank
        self._lifecycle = lifecycle
        self._matcher = parts.matcher
        self._membership = parts.membership
        self._sender = parts.sender
        self._router = parts.router

    def drop_silent_after(self, seconds: float) -> None:
        """Set :attr:`drop_after`."""
        self.drop_after = seconds

    def check(self, now: float) -> float:
        """Check all operations. Returns when to check again, as ``clock.monotonic()``."""
        following = float("inf")
        operations = self._matcher.in_flight()
        if self._looked:
            # Otherwise the table would keep ended operations in memory.
            self._looked = {known: self._looked[known] for known in operations if known in self._looked}
        for operation in operations:
            # A runnable operation has all its messages and waits for this agent only: its error would blame others.
            if now >= operation.deadline and not (operation.is_runnable or self._is_beginning(operation)):
                self._lifecycle.fail(operation, self._overdue(operation))
            else:
                due = min(operation.deadline, self._ask(operation, now))
                # While it computes beyond its deadline: it may have to wait again. Without this, checks would follow
                # each other without a pause.
                following = min(following, due if due > now else now + AFTER_DEADLINE)
        return following if self.drop_after == float("inf") else min(following, self._drop_silent_agents(now))

    def _is_beginning(self, operation: Operation) -> bool:
        """Whether the operation waits for a thread of this agent only, which has not run it to its first stage."""
        # It is suspended before its first stage while the survivors of a loss agree: that wait needs its deadline.
        waits = operation.is_suspended or operation.waiting_for or operation.outcome is not None
        return not (waits or operation.has_entered or self._sender.receivers_behind(operation.name))

    def answer(self, source: int, message: Message) -> None:
        """Answer the probe of another agent."""
        self._sender.deny(source, message, 0)

    def on_answer(self, rank: int, _message: Message) -> None:
        """Record that an agent has answered a probe."""
        asked = self._asked.pop(rank, None)
        if asked is not None:
            self._answered[rank] = asked

    def _drop_silent_agents(self, now: float) -> float:
        """Probe agents awaited for half of :attr:`drop_after`, and drop agents without an answer in the other half."""
        half, following = self.drop_after / 2, float("inf")
        alive = self._membership.view.alive
        since = dict(
            sorted((entry for entry in self._waited_for() if entry[0] in alive), reverse=True)
        )  # the earliest time of each rank
        # Not awaited now: an old unanswered probe would drop such an agent as soon as it is awaited again.
        for rank in set(self._asked).difference(since):
            del self._asked[rank]
        for rank, start in since.items():
            asked = self._asked.get(rank)
            due = max(start, self._answered.get(rank, 0.0)) + half if asked is None else asked + half
            # Checked so late, this agent was stopped itself. The answer may be unread, so it probes again before it
            # drops others.
            if now >= due and (asked is None or now > due + LATE):
                self._asked[rank], due = now, now + half
                self._sender.send_message(rank, Message(Kind.ASK, ALIVE, ALIVE))
            elif now >= due:
                self._failures.give_up_on(rank, f"it has not answered for {self.drop_after:g} s")
                return now
            following = min(following, due)
        return following

    def _waited_for(self) -> Iterator[tuple[int, float]]:
        """Yield each awaited rank, and the time since when it is awaited."""
        for operation in self._matcher.in_flight():
            stage = operation.current_stage
            start = operation.started if stage is None else stage.started
            behind = self._sender.receivers_behind(operation.name) if stage is not None and not stage.posted else []
            for rank in {*operation.waiting_for, *behind}:
                yield rank, start
        # No operation begins until they report: a stopped one would hold up all survivors until their deadlines.
        if self._lifecycle.gate.paused:
            for rank in self._agreement.missing:
                yield rank, 0.0

    def _ask(self, operation: Operation, now: float) -> float:
        """Probe silent sources, and again whenever the wait has doubled: by then they may wait for other agents.

        Returns when to check the operation again.
        """
        stage = operation.stage
        if stage is None or not (stage.missing or stage.absent):
            return self._look_for_cycle(operation, now)
        # Probe before a stall is reported and before the deadline: both name the ranks that block according to the
        # answers.
        first = ASK_AFTER if stage.missing else min(ASK_ALL_AFTER, operation.timeout / 2, self._stalls.after / 2)
        due = stage.started + max(first, 2 * (stage.probed_at - stage.started))
        if now < due:
            return due
        stage.probed_at = now
        flags = 0 if stage.missing else HERE
        for source in sorted(stage.missing or stage.absent):
            question = Message(Kind.ASK, operation.op, operation.name, operation.round, stage.number, flags=flags)
            self._sender.send_message(source, question)
        if now >= stage.started + LOOK_AFTER:
            self._deadlocks.look(operation)
        return 2 * now - stage.started

    def _look_for_cycle(self, operation: Operation, now: float) -> float:
        """Search for a deadlock if an operation with all its messages waits for confirmations.

        Such a wait may be part of a cycle, too. The search begins after a while, and again whenever the wait has
        doubled.
        """
        stage = operation.current_stage
        if not (operation.unconfirmed or (stage is not None and stage.unconfirmed)):
            return operation.deadline
        looked = self._looked.get(operation, operation.started)
        due = max(operation.started + max(LOOK_AFTER, ASK_AFTER), 2 * looked - operation.started)
        if now < due:
            return due
        self._looked[operation] = now
        self._deadlocks.look(operation)
        return 2 * now - operation.started

    def _overdue(self, operation: Operation) -> DeadlineExceeded:
        """The error of an operation whose deadline has passed: the awaited ranks, and the step that is missing."""
        waiting, part = operation.blocked_on, operation.fused or operation
        remedy = "If they are only slow, raise SHOAL_TIMEOUT or pass timeout="
        stage = part.stage
        if stage is not None and stage.missing:
            problem = "they did not answer" if operation.one_sided else "they did not take part"
            remedy += "" if operation.one_sided else f". {SAME_CALLS}"
        elif stage is not None and stage.to_move and not (operation.unconfirmed or stage.unconfirmed):
            problem = (
                "they did not come to it" if waiting else "all have come to it, and its tensors have not been moved"
            )
        elif part.waiting_more:
            problem = "a part of what they sent has not arrived" if waiting else "the work on its device is not done"
        elif operation.unconfirmed or (stage is not None and stage.unconfirmed):
            problem = "they did not confirm that they expected it"
        elif behind := self._sender.receivers_behind(operation.name):
            earliest = min(operation.channel.unacknowledged, default=operation.round)
            waiting, problem = behind, f"they have not read what was sent to them in round {earliest}"
        elif self._lifecycle.gate.paused:
            waiting, problem = self._agreement.missing, "they have not acknowledged the loss of an agent"
        else:
            problem = "after the loss of an agent, its result has not arrived from a survivor"
        why, whom = self._router.reversing.problems_with(waiting), f" for ranks {waiting}" if waiting else ""
        return DeadlineExceeded(
            f"{operation} on rank {self._rank} waited {operation.timeout:g} s{whom}: {problem}. "
            + (why or remedy)
            + self._stalls.last_answer(waiting, operation.started),
            waiting,
        )
