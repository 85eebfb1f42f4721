"""With ``on_loss="continue"``, the survivors agree which agents are lost, and which rounds are the first without them.

Agents notice a loss at different times, and some have then begun rounds that others have not. Without an agreement one
agent would count the lost agent in a round and another would not, or would wait for an agent with a newer plan. So
every survivor stops beginning operations, and sends a report to all others: the lost ranks and the rounds that it has
begun. An agent that has received equal reports from all survivors decides. All make the same decision, without a leader
and without the store:

- Neighbour operations: all agents complete, as planned, a round that any agent had begun. The lost agent's missing
  messages are left out, because edges are independent. Later rounds are planned among the survivors.
- Collective operations, whose result is equal on all agents: an agent with the result sends it to agents without it
  (``recovery.py``). If no survivor has it, the operation restarts among them. Large results are not cached.
  So that all agents have a large result, such an operation ends only when all have confirmed it (``discover`` without
  destinations, one small message in each of ``ceil(log2 n)`` steps).

If another agent is lost during the agreement, all survivors report again. Reports count together only if they name the
same lost ranks, so no agent decides on reports from before the last loss. This is virtual synchrony (Birman, Joseph,
"Exploiting virtual synchrony in distributed systems", SOSP 1987). The failure detector errs only towards loss: an agent
that wrongly counts as lost is notified and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from ..errors import PeerLost, ProtocolError, ShoalError
from ..execution.control_messages import Service, read_json
from ..execution.fusion import Fusion
from ..execution.lifecycle import Lifecycle
from ..execution.membership import WHOLE, Departure, Plan, Ranks
from ..execution.operation import FailurePolicy, Operation
from ..execution.shared_parts import SharedParts
from ..execution.submission_gate import impossible_without
from ..transport.messages import Message
from .loss_reports import Decision, LossReport, merged_decisions, parsed_report
from .membership_states import AgentEvent, MembershipTable, partition_order
from .recovery import ResultTransfer, await_result, complete_without, conclude, move_by_links, restart

AGREEMENT = "~agreement"
"""The name of this service's messages."""
MOST_DECISIONS = 32
"""The number of decisions that are kept when an agent is admitted; later rounds follow one of these."""


@dataclass(frozen=True)
class MembershipChange:
    """A new membership, on which the members have agreed.

    Attributes:
        lost: The ranks that were lost or shut down since the last change, ascending.
        alive: The members, ascending.
        entered: The ranks admitted since the last change, in place of lost agents or for the first time, ascending.
    """

    lost: tuple[int, ...]
    alive: tuple[int, ...]
    entered: tuple[int, ...] = ()


class LossReactions(Protocol):
    """The reactions to a loss that an agreement calls for."""

    def take_notice(self, departure: Departure) -> None:
        """Handle another agent's notice about a third one."""

    def abort(self, error: ShoalError) -> None:
        """End all current and later operations with ``error``."""


class Agreement(Service):
    """One agent's part in agreements. Used under the engine's lock.

    Args:
        results: Sends the results that this agent keeps for other agents.

    Attributes:
        active: Whether agents agree on losses. Otherwise a loss ends all operations, and this object is not used.
        listeners: Called by the driving thread with every change.
        decisions: The earlier decisions that may still be needed.
    """

    def __init__(
        self,
        parts: SharedParts,
        membership: MembershipTable,
        lifecycle: Lifecycle,
        fusion: Fusion,
        results: ResultTransfer,
    ) -> None:
        self.active = False
        self.listeners: list[Callable[[MembershipChange], None]] = []
        self._rank = parts.rank
        self._size = parts.size
        self._matcher = parts.matcher
        self._membership = membership
        self._lifecycle = lifecycle
        self._gate = lifecycle.gate
        self._fusion = fusion
        self._callbacks = lifecycle.callbacks
        self._results = results
        self._sender = parts.sender
        self._check_by = parts.progress.check_by
        self._failures: LossReactions
        self._stops_as_minority = False
        self._reports: dict[int, LossReport] = {}  # the last report of each agent
        self.decisions: list[Decision] = []

    def react_by(self, failures: LossReactions) -> None:
        """Set the reactions to losses that other agents report."""
        self._failures = failures

    def activate(self, stops_as_minority: bool = False) -> None:
        """Agree on losses instead of ending all operations.

        ``stops_as_minority``: end all operations nevertheless if the unreachable agents may be the majority.
        """
        self.active, self._stops_as_minority = True, stops_as_minority
        self._lifecycle.departed_peers.survive(self.need_departed)

    @property
    def gone(self) -> Ranks:
        """The lost ranks on which all survivors have agreed, ascending."""
        return self._gate.plan.gone

    @property
    def plan(self) -> Plan:
        """The plan of operations that begin now."""
        return self._gate.plan

    @property
    def alive(self) -> Ranks:
        """The surviving ranks, as agreed, ascending."""
        return tuple(rank for rank in range(self._size) if rank not in self.gone)

    @property
    def missing(self) -> list[int]:
        """The ranks whose matching report is still missing."""
        # A report with another plan is from before the last loss or admission: agents would decide differently on it.
        plan = self._noticed
        return [
            rank
            for rank in self._membership.view.alive
            if rank not in self._reports or self._reports[rank].plan != plan
        ]

    @property
    def out_of_reach(self) -> frozenset[int]:
        """The lost ranks whose processes may still run, in another partition."""
        return frozenset(self._membership.view.out_of_reach)

    @property
    def _noticed(self) -> Plan:
        alive = self._membership.view.alive
        return Plan(tuple(rank for rank in range(self._size) if rank not in alive), self._gate.plan.n_admitted)

    def plan_of(self, name: str, round_: int, on_loss: FailurePolicy) -> tuple[Plan, frozenset[int]]:
        """The plan of a round that begins now, and the ranks of the plan that were lost and replaced since it was made.

        A round between neighbours keeps the plan with which an agent has begun it, because its weights follow from
        that. The agents admitted since then take no part in it.
        """
        if on_loss is FailurePolicy.RETRY:
            return self._begin_attempt(name, round_), frozenset()
        late = self._admitted_after(name, round_)
        for decision in reversed(self.decisions):
            if round_ >= decision.begun.get(name, 0):
                return decision.plan, late
        return WHOLE, late

    def _begin_attempt(self, name: str, round_: int) -> Plan:
        """Plan an attempt of a round of a collective operation, which restarts with every loss.

        The plan includes all members except those admitted after an agent had begun the round.
        """
        # An attempt can fail at once, if its root is lost. An agent that agrees on the loss only later has to know of
        # the attempt; else the result of an earlier one would count there.
        if self.decisions and round_ < self.decisions[-1].begun.get(name, 0):
            last = self.decisions[-1]
            self.decisions[-1] = replace(last, restarted=last.restarted | {(name, round_)})
        gone, n_admitted = self.plan
        late = self._admitted_after(name, round_).difference(gone)
        return Plan(tuple(sorted({*gone, *late})), n_admitted - len(late)) if late else self.plan

    def _admitted_after(self, name: str, round_: int) -> frozenset[int]:
        """The ranks whose agents were admitted after another agent had begun a round."""
        entries = {rank: decision for decision in self.decisions for rank in decision.admitted}  # each rank's last
        return frozenset(rank for rank, entry in entries.items() if entry.begun.get(name, 0) > round_)

    def need_departed(self, rank: int) -> None:
        """Record that an agent has shut down and an operation needs it. The next check begins an agreement."""
        self._membership.apply(AgentEvent.NEED, rank)
        if rank not in self.gone:
            self._gate.expect_pause()
            self._check_by(0.0)

    # Reports

    def report_losses(self) -> None:
        """Pause, and report the lost agents and the rounds begun here to all survivors; again after each loss.

        The last report to arrive ends the agreement.
        """
        if not self._gate.paused:
            # Only the members of a fused operation can be reported and repaired; it has no recovery of its own.
            self._fusion.split_all()
            self._gate.pause()
        report = self._own_report()
        self._reports[self._rank] = report
        view = self._membership.view
        self._sender.send_control(view.others(self._rank), AGREEMENT, report.as_data(view))
        self._decide()

    def _own_report(self) -> LossReport:
        open_: dict[str, dict[int, int | None]] = {}
        for operation in self._matcher.in_flight():
            recovery = operation.recovery
            if recovery is not None and operation.restarts:
                attempt = None if recovery.result is None else recovery.plan.losses
                open_.setdefault(operation.name, {})[operation.round] = attempt
        kept: dict[str, list[int]] = {}
        for name, round_ in self._results.cache.results:
            kept.setdefault(name, []).append(round_)
        return LossReport(self._noticed, self._matcher.all_begun(), open_, kept, self.decisions, self.out_of_reach)

    def serve(self, source: int, message: Message) -> None:
        """Take another agent's report; see :class:`~.control_messages.Service`."""
        losses, report = read_json(message, "a loss", partial(parsed_report, size=self._size))
        if not self.active:
            return
        if report.plan.n_admitted > self._gate.plan.n_admitted:
            self._conclude_admission()
        if report.plan.n_admitted != self._gate.plan.n_admitted:
            return  # its sender has to admit agents first, and will report again
        self._reports[source] = report
        alive = self._membership.view.alive
        for rank, cause, died in losses:
            if rank in alive:
                self._failures.take_notice(Departure(rank, cause, died, source))
        if not self._gate.paused and set(self._noticed.gone) >= set(report.plan.gone) > set(self.gone):
            self.report_losses()  # a departed agent is needed there, but not here
        else:
            self._decide()

    # Decisions

    def _decide(self) -> None:
        if not self._gate.paused or self.missing or self._membership.view.is_cut_off:
            return
        plan, before = self._noticed, self.gone
        by_rank = {rank: self._reports[rank] for rank in self._membership.view.alive}
        reports = list(by_rank.values())
        # One survivor that saw a process end is enough: that agent is in no other partition.
        beyond = frozenset.intersection(*(report.out_of_reach for report in reports))
        if self._stops_as_minority and partition_order(self._membership.view.alive) < partition_order(beyond):
            self._stop_as_minority(sorted(beyond))
            return
        # Some agents may have agreed on a smaller loss, and begun rounds, before they learned of the larger one.
        self.decisions = merged_decisions(reports)
        n_admitted = self._gate.plan.n_admitted
        for operation in self._matcher.in_flight():
            if operation.on_end is not None and self._all_have_result(operation, by_rank):
                conclude(self._lifecycle, operation)
                if self._gate.plan.n_admitted != n_admitted:  # the admitted agents take part in the agreement
                    return
        begun: dict[str, int] = {}
        for report in reports:
            for name, count in report.begun.items():
                # A round that one agent has begun keeps its plan on all; a smaller count would give it two plans.
                begun[name] = max(count, begun.get(name, 0))
        self.decisions.append(Decision(plan, begun))
        self._reports = {}
        # First: the process groups and restarted operations below read the new plan from the gate.
        self._gate.resume(plan.gone)
        move_by_links(self._lifecycle)
        self._announce(lost=tuple(rank for rank in plan.gone if rank not in before))
        for operation in self._matcher.in_flight():
            self._repair(operation, by_rank)
        self._send_results(by_rank)

    def _send_results(self, reports: dict[int, LossReport]) -> None:
        """Send cached results to agents without them, if this agent is the first that has the result."""
        for name, round_ in self._results.cache.results:
            keepers = [rank for rank, report in reports.items() if report.keeps(name, round_)]
            if min(keepers, default=-1) == self._rank:
                for rank in [rank for rank, report in reports.items() if report.lacks(name, round_)]:
                    self._results.send(rank, name, round_)

    def _repair(self, operation: Operation, reports: Mapping[int, LossReport]) -> None:
        recovery = operation.recovery
        if recovery is None:
            if not operation.one_sided:
                self._lifecycle.fail(operation, impossible_without(operation, self.gone))
        elif not operation.restarts:
            complete_without(self._lifecycle, operation, self.gone)
        # The reports are equal on all survivors. An agent on which the operation has ended would join no restart.
        elif self._all_have_result(operation, reports):
            conclude(self._lifecycle, operation)
        elif any(report.keeps(operation.name, operation.round) for report in reports.values()):
            await_result(self._lifecycle, operation)
        else:
            restart(self._lifecycle, operation, self._begin_attempt(operation.name, operation.round))

    def _all_have_result(self, operation: Operation, reports: Mapping[int, LossReport]) -> bool:
        """Whether all survivors that take part have the result of the last attempt that one of them knows."""
        recovery, among, key = operation.recovery, operation.among, (operation.name, operation.round)
        assert recovery is not None
        restarts = [decision.plan.losses for decision in self.decisions if key in decision.restarted]
        attempt = max([recovery.plan.losses, *restarts])
        concerned = [report for rank, report in reports.items() if among is None or rank in among]
        return all(report.has(*key, attempt) for report in concerned)

    def _stop_as_minority(self, beyond: list[int]) -> None:
        """End this partition, because the unreachable agents may continue without it."""
        here = list(self._membership.view.alive)
        self.yield_to_majority(
            PeerLost(
                f"ranks {here} cannot reach ranks {beyond}, which may go on without them: they stop, as the smaller "
                "part of a job with SHOAL_ON_PARTITION=stop. Started again, they take the state of the others",
                beyond,
            )
        )

    def yield_to_majority(self, why: PeerLost) -> None:
        """End this agent as part of the smaller partition, also during an agreement."""
        # Calls that wait at the paused gate get the error only when it opens.
        self._gate.resume(self.gone)
        self._failures.abort(why)

    def _announce(self, lost: Ranks = (), entered: Ranks = ()) -> None:
        change = MembershipChange(lost, self.alive, entered)
        for listener in self.listeners:
            self._callbacks.add(listener, change, change)

    # Admission

    def _conclude_admission(self) -> None:
        """Conclude an admission: its operation has ended on another agent, so all have its result."""
        n_admitted = self._gate.plan.n_admitted
        for operation in self._matcher.in_flight():
            if (
                operation.on_end is not None
                and operation.recovery is not None
                and operation.recovery.result is not None
            ):
                conclude(self._lifecycle, operation)
                if self._gate.plan.n_admitted != n_admitted:
                    return
        raise ProtocolError("it has admitted an agent without the other members")

    def admit(self, ranks: Ranks, begun: dict[str, int]) -> None:
        """Plan with admitted agents the rounds that no agent had begun.

        If an agreement is in progress, :meth:`send_report_again` has to follow once the new agents know of it.

        Args:
            ranks: The admitted agents.
            begun: The number of rounds that some agent had begun, by name, as all members have agreed.
        """
        plan = Plan(tuple(rank for rank in self.gone if rank not in ranks), self._gate.plan.n_admitted + len(ranks))
        self.decisions = [*self.decisions[1 - MOST_DECISIONS :], Decision(plan, begun, ranks)]
        self._gate.install_plan(plan)
        self._announce(entered=ranks)

    def send_report_again(self) -> None:
        """Send this agent's report again after :meth:`admit`, if an agreement is in progress."""
        if self._gate.paused:
            self.report_losses()

    def enter(self, plan: Plan, decisions: list[Decision]) -> None:
        """Adopt the agreed state: this agent has been admitted."""
        entered = tuple(sorted({self._rank, *self.gone} - set(plan.gone)))
        self.decisions = decisions
        self._gate.install_plan(plan)
        self._announce(entered=entered)

    def begin_without(self, ranks: Ranks) -> None:
        """Plan all rounds without agents that have not started, as if they had been lost before."""
        self._gate.install_plan(Plan(ranks))
        self.decisions = [Decision(self.plan, {})]

    def stand_alone(self) -> None:
        """Plan all rounds without other agents, while this agent waits to rejoin."""
        self.begin_without(tuple(rank for rank in range(self._size) if rank != self._rank))

    # As a service

    def check(self, now: float) -> float:
        """Begin an agreement for a departed agent that is needed; see :class:`~.control_messages.Service`."""
        if not self._gate.paused and set(self._membership.view.needed).difference(self.gone):
            self.report_losses()
        return float("inf")
