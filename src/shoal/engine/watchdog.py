"""Checks the deadlines of operations, and sends probes before them (``stalls.py`` logs long waits).

With ``SHOAL_DROP_AFTER`` it also probes awaited agents and drops agents without an answer. The driving thread answers
independently of the script, so a long evaluation is tolerated. An agent that is stopped, hung or cut off does not
answer. An agent that itself waits for a stopped one answers, and is not dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import DeadlineExceeded
from ..fault_tolerance.agreement import Agreement
from ..fault_tolerance.failures import Failures
from ..operations.deadlock import LOOK_AFTER, Deadlocks
from ..operations.lifecycle import ASK_AFTER, Lifecycle
from ..operations.operation import SAME_CALLS, Operation
from ..operations.shared_parts import SharedParts
from ..transport.wire import HERE, Kind, Message
from .stalls import Stalls

ALIVE = "~alive"
"""The name of probes whether an agent is alive."""
ASK_ALL_AFTER = 1.0
"""Seconds after which an operation that a backend is to move probes participants that have not reached it."""
LATE = 1.0
"""Seconds of delay of a check after which this agent was stopped itself, and repeats its probes."""


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
            if now >= operation.deadline and not operation.is_runnable:
                self._lifecycle.fail(operation, self._overdue(operation))
            else:
                due = operation.deadline  # also while it computes: it may have to wait again afterwards
                following = min(following, due, self._ask(operation, now))
        return following if self.drop_after == float("inf") else min(following, self._drop_silent_agents(now))

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
            stage = (operation.fused or operation).stage
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
            return self._look_for_circle(operation, now)
        # Probe before a stall is reported and before the deadline: both name the ranks that block according to the
        # answers.
        first = ASK_AFTER if stage.missing else min(ASK_ALL_AFTER, operation.timeout / 2, self._stalls.after / 2)
        due = stage.started + max(first, 2 * (stage.asked - stage.started))
        if now < due:
            return due
        stage.asked = now
        flags = 0 if stage.missing else HERE
        for source in sorted(stage.missing or stage.absent):
            question = Message(Kind.ASK, operation.op, operation.name, operation.round, stage.number, flags=flags)
            self._sender.send_message(source, question)
        if now >= stage.started + LOOK_AFTER:
            self._deadlocks.look(operation)
        return 2 * now - stage.started

    def _look_for_circle(self, operation: Operation, now: float) -> float:
        """Search for a deadlock if an operation with all its messages waits for confirmations.

        Such a wait may be part of a cycle, too. The search begins after a while, and again whenever the wait has
        doubled.
        """
        stage = (operation.fused or operation).stage
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
            problem = "a part of what they sent has not arrived"
        elif operation.unconfirmed or (stage is not None and stage.unconfirmed):
            problem = "they did not confirm that they expected it"
        else:
            behind = min(operation.channel.unacknowledged, default=operation.round)
            waiting = self._sender.receivers_behind(operation.name)
            problem = f"they have not read what was sent to them in round {behind}"
        why = self._sender.problems_with(waiting)
        return DeadlineExceeded(
            f"{operation} on rank {self._rank} waited {operation.timeout:g} s for ranks {waiting}: {problem}. "
            + (why or remedy)
            + self._stalls.last_answer(waiting, operation.started),
            waiting,
        )
