"""The status of an agent, for waiting agents, ``shoal status``, the live page, and traces.

It has the agent's waiting calls, the call that ended last, the training steps, and the latest metrics of the script.
Nothing is computed for it: calls are in the tables of the engine, :func:`shoal.metrics` and
:func:`shoal.consensus_distance` record their results, and optimizers count their steps.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .. import clock
from .._version import __version__
from ..clock import format_seconds
from ..execution.control_messages import Services
from ..execution.events import Events
from ..execution.membership import NOT_YET
from ..execution.operation import Operation, describe, needed_by
from ..execution.shared_parts import SharedParts
from ..execution.submission_gate import SubmissionGate
from ..fault_tolerance.agreement import Agreement

MOST = 8
"""Waiting calls that are listed; further ones are only counted."""
AT_ONCE = 0.02
"""Seconds that a call on a window usually takes if it does not wait; a shorter one is not listed."""
_LONGEST = 200
"""Characters of a call's description at most."""
MOST_NAMES = 32
"""The number of names that are kept. Later names are ignored, since a script may use a new name in each step."""
_LONGEST_NAME = 80
"""Characters of a name at most."""


class MetricValue(NamedTuple):
    """One metric over all agents.

    Attributes:
        times: The number of measurements.
        own: This agent's value.
        mean, worst: The mean and the worst value over all agents.
        worst_rank: The rank of the worst value; -1 if all are equal.
    """

    times: int
    own: float
    mean: float
    worst: float
    worst_rank: int

    def as_json(self) -> dict[str, Any]:
        """Convert to JSON data. Values that JSON lacks are strings: ``nan``, ``inf``."""
        return {name: value if math.isfinite(value) else str(value) for name, value in self._asdict().items()}


class TrainingMetrics:
    """The metrics of one agent. Threads of its script record them, and any thread reads them."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._of: dict[str, MetricValue] = {}

    def note(self, name: str, own: float, mean: float, worst: float, worst_rank: int = -1) -> None:
        """Record a measurement."""
        name = name[:_LONGEST_NAME]
        before = self._of.get(name)
        if before is None and len(self._of) >= MOST_NAMES:
            return
        self._of[name] = value = MetricValue(1 if before is None else before.times + 1, own, mean, worst, worst_rank)
        if self._events.active:
            finite = {which: number for which, number in (("own", own), ("mean", mean)) if math.isfinite(number)}
            self._events.emit("measured", "metrics", name, value.times, detail=json.dumps(finite))

    @property
    def values(self) -> dict[str, MetricValue]:
        """The last value of each metric, by name."""
        return dict(self._of)


@dataclass(slots=True)
class _Counted:
    count: int
    ended: int  # end of the last step, in nanoseconds


class StepCounter:
    """The step counters of one agent. An optimizer belongs to one thread, which counts its steps."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._of: dict[str, _Counted] = {}

    def ended(self, name: str, began: int) -> None:
        """Count a step of an optimizer that was called at ``began`` (``clock.perf_counter_ns()``) and has ended.

        In a trace a step begins when the previous one ended, so it includes the forward and backward passes.
        """
        known = self._of.get(name)
        if known is None:
            known = self._of[name] = _Counted(0, began)
        before, known.ended = known.ended, clock.perf_counter_ns()
        known.count += 1
        if self._events.active:
            self._events.emit("stepped", "step", name, known.count, before, end=known.ended)

    @property
    def counts(self) -> dict[str, int]:
        """The number of steps, by optimizer."""
        # A copy first: the thread of an optimizer may add its name during the iteration.
        return {name: steps.count for name, steps in list(self._of.items())}

    @property
    def seconds_ago(self) -> float | None:
        """Seconds since the last step ended; None if there was none."""
        last = max((steps.ended for steps in list(self._of.values())), default=None)
        return None if last is None else (clock.perf_counter_ns() - last) / 1e9


@dataclass(frozen=True)
class WaitStatus:
    """A call that waits for other agents.

    Attributes:
        call: The operation, name and round of the call.
        ranks: The ranks that it waits for; empty if all have arrived and a backend still has to move its tensors.
        seconds: Seconds since the call was submitted.
        gives_up: Seconds until its deadline, if known.
    """

    call: str
    ranks: tuple[int, ...]
    seconds: float
    gives_up: float | None


@dataclass(frozen=True)
class AgentStatus:
    """The status of one agent.

    Attributes:
        waiting: The agent's waiting calls, the oldest first.
        stands_still: Whether a thread of its script is blocked in a call.
        agrees_with: The ranks that have not confirmed a loss; until they do no operation begins.
        ended: The call that ended last; empty if none has.
        seconds_ago: Seconds since that call ended.
    """

    waiting: tuple[WaitStatus, ...]
    stands_still: bool
    agrees_with: tuple[int, ...]
    ended: str
    seconds_ago: float

    def __str__(self) -> str:
        if self.agrees_with:
            found = f"an agent was lost, and it waits for ranks {list(self.agrees_with)} to acknowledge it"
        elif self.waiting:
            first, more = self.waiting[0], len(self.waiting) - 1
            since = f"since {format_seconds(first.seconds)}" + (f", and in {more} more" if more else "")
            found = f"it waits in {first.call}{needed_by(first.ranks, True)}, {since}"
        else:
            found = "it waits in no call of Shoal's, so its script does something else"
        if self.ended:
            found += f"; the last that ended was {self.ended}, {format_seconds(self.seconds_ago)} ago"
        return found


class StatusReporter:
    """Builds the status of one agent. Used under the engine's lock, except :meth:`describe`."""

    def __init__(
        self,
        parts: SharedParts,
        agreement: Agreement,
        gate: SubmissionGate,
        services: Services,
        steps: StepCounter,
        measured: TrainingMetrics,
    ) -> None:
        self._began = clock.time()
        self._script = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:_LONGEST] if any(sys.argv) else ""
        self._rank, self._router = parts.rank, parts.router
        self._matcher, self._sender = parts.matcher, parts.sender
        self._membership, self._progress, self._agreement = parts.membership, parts.progress, agreement
        self._gate, self._services, self._steps, self._measured = gate, services, steps, measured

    def waited_for(self, operation: Operation) -> list[int]:
        """The ranks that block an operation. This includes receivers that have not read its earlier messages."""
        stage = operation.current_stage
        waiting = operation.blocked_on
        if not waiting and stage is not None and not stage.posted:
            return self._sender.receivers_behind(operation.name)
        return waiting

    @property
    def doing(self) -> AgentStatus:
        """The current status."""
        now = clock.monotonic()
        waiting = [
            WaitStatus(str(operation)[:_LONGEST], tuple(ranks), now - operation.started, operation.deadline - now)
            for operation in self._matcher.in_flight()
            if not operation.background and ((ranks := self.waited_for(operation)) or operation.in_transfer)
        ]
        for service in self._services.all():
            for call, ranks, since in service.calls_that_wait():
                if now - since > AT_ONCE:
                    waiting.append(WaitStatus(call, tuple(ranks), now - since, None))
        waiting.sort(key=lambda wait: -wait.seconds)
        op, name, round_, ended = self._matcher.ended_last
        return AgentStatus(
            tuple(waiting),
            self._progress.caller_waits or any(wait.gives_up is None for wait in waiting),
            tuple(self._agreement.missing) if self._gate.paused else (),
            describe(op, name, round_)[:_LONGEST] if op else "",
            now - ended if op else 0.0,
        )

    def describe(self, within: float) -> dict[str, Any]:
        """The status for `shoal status`; only the agent's identity if the engine's lock is not free ``within`` seconds.

        Called from any thread.
        """
        # With a limit: the caller may hold another agent's lock, and the holder of this one may wait for that.
        if not self._progress.lock.acquire(timeout=within):
            return self._identity
        try:
            return self._as_json()
        finally:
            self._progress.lock.release()

    @property
    def _identity(self) -> dict[str, Any]:
        router = self._router
        first = router.places[0] if router.places else router.place
        return {
            "version": __version__,
            "rank": self._rank,
            "size": max(1, len(router.places)),
            "incarnation": router.place.incarnation,
            "pid": os.getpid(),
            "host": router.place.host,
            "job": f"{first.host}:{first.pid}",
            "script": self._script,
            "since": self._began,
        }

    def _as_json(self) -> dict[str, Any]:
        doing, view = self.doing, self._membership.view
        data = asdict(doing)
        data["waiting"] = [asdict(wait) for wait in doing.waiting[:MOST]]
        return {
            **self._identity,
            **data,
            "waits_in": len(doing.waiting),
            "lost": [rank for rank, cause in view.died.items() if cause != NOT_YET],
            "left": list(view.left),
            "over": "" if self._gate.ended is None else str(self._gate.ended)[: 2 * _LONGEST],
            "steps": self._steps.counts,
            "stepped_ago": self._steps.seconds_ago,
            "measured": {name: value.as_json() for name, value in self._measured.values.items()},
            "here": [(at.rank, at.pid) for at in self._router.places if at.machine == self._router.place.machine],
            "calls": self._matcher.calls,
            "bytes_sent": self._sender.bytes_sent,
        }
