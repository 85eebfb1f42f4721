"""The status of an agent, for waiting agents and for ``shoal status``.

It has the agent's waiting calls, the call that ended last, and the training steps. The data exist in any case, so a
status costs nothing until it is requested.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import clock
from .._timeouts import format_seconds
from .._version import __version__
from ..fault_tolerance.agreement import Agreement
from ..operations.membership import NOT_YET
from ..operations.operation import Operation, describe, needed_by
from ..operations.services import Services
from ..operations.shared_parts import SharedParts
from ..operations.submission_gate import SubmissionGate
from .training_metrics import StepCounter, TrainingMetrics

MOST = 8
"""Waiting calls that are listed; further ones are only counted."""
AT_ONCE = 0.02
"""Seconds that a call on a window usually takes if it does not wait; a shorter one is not listed."""
_LONGEST = 200
"""Characters of a call's description at most."""


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
    """Builds the status of one agent. Used under the engine's lock."""

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
        stage = (operation.fused or operation).stage
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
            if not operation.background and ((ranks := self.waited_for(operation)) or operation.moves)
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

    @property
    def busy(self) -> dict[str, Any]:
        """The short status for another process, while another thread holds the engine's lock: the agent's identity."""
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

    def as_json(self) -> dict[str, Any]:
        """The full status for another process."""
        doing, view = self.doing, self._membership.view
        data = asdict(doing)
        data["waiting"] = [asdict(wait) for wait in doing.waiting[:MOST]]
        return {
            **self.busy,
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
