"""The failure detector: suspects, confirms and reports lost agents, and ends the operations that need them.

The end of a connection, the end of a process, and a third agent's notice can all arrive before the last message of the
agent itself, which may be its shutdown message. So an agent is first a suspect, unless nothing more of it can arrive.
It counts as lost only if no shutdown message arrives within a short time. Agents pass a notice of a loss on along all
links. Every agent has a link to the next rank, so the notice reaches all.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from .. import clock
from ..errors import PeerLost, ProtocolError, ShoalError
from ..execution.control_messages import Services
from ..execution.fusion import Fusion
from ..execution.lifecycle import Lifecycle
from ..execution.membership import NEEDED, Departure, needed_departure
from ..execution.operation import SAME_CALLS
from ..execution.shared_parts import SharedParts
from ..transport.messages import CERTAIN, DIED, SILENT, Message
from ..transport.router import Router
from .agreement import Agreement
from .membership_states import PRESENT, AgentEvent, AgentState, MembershipTable, departure_event

GRACE = 0.5
"""Seconds in which the last messages of an agent may still arrive."""
UNCONNECTED_GRACE = 5.0
"""The same for an agent without a connection to this one: connected agents detect its end and notify others."""


class FailureDetector:
    """The suspects of one agent, each with the time of its confirmation."""

    def __init__(self, rank: int, membership: MembershipTable, router: Router) -> None:
        self._rank = rank
        self._membership = membership
        self._router = router
        self._suspects: dict[int, tuple[float, Departure]] = {}

    def suspect(self, peer: int, cause: str, final: bool, certain: bool) -> float:
        """Suspect an agent that seems to be lost. Returns the time of the confirmation, as ``clock.monotonic()``."""
        # Its incoming connection was cut and not replaced: nothing more arrives, so a grace would only delay the loss.
        final = final or self._router.is_cut_off(peer)
        due = clock.monotonic() + (0.0 if final else GRACE if self._router.has_connection(peer) else UNCONNECTED_GRACE)
        known = self._suspects.get(peer)
        if known is not None:
            if known[1].reported_by == peer:  # its own shutdown message has the cause
                if known[0] == float("inf"):  # its last messages were awaited; there may be none left
                    follows = float("inf") if self._router.receives_from(peer) else due
                    self._schedule(clock.monotonic() if final else follows, known[1])
                return self._suspects[peer][0]
            # A later sign must not postpone the confirmation: the signs of one loss arrive one by one.
            due = min(due, known[0])
            if known[0] == float("inf") and not final:  # others report its shutdown; its message may be lost
                self._schedule(due, known[1])
                return due
        # An own sign replaces another agent's report. With the report as the cause, the error would say that only those
        # two agents have lost each other, and that both still run.
        if known is None or due < known[0] or (known[1].died and known[1].reported_by != self._rank):
            self._schedule(due, Departure(peer, cause, died=True, reported_by=self._rank, certain=certain))
        return self._suspects[peer][0]

    def notice(self, source: int, message: Message) -> Departure | float:
        """Handle an agent's notice of its own shutdown or of another agent's loss.

        Returns the departure, or the time to check again.
        """
        rank, died, certain = message.token, bool(message.flags & DIED), bool(message.flags & CERTAIN)
        because = -1 if died else message.digest - 1
        silent = bool(message.flags & SILENT)
        reported_by = message.round if died else source
        departure = Departure(rank, message.text, died, reported_by, certain, because, silent)
        if rank == self._rank:
            return departure
        if source == rank and not died:
            departure = self._unless_lost_before(departure)
        # Otherwise this agent's own connections decide: the reporter may have lost only its own connection.
        if source == rank or (died and (certain or not self._router.has_connection(rank))):
            return self._after_those_before(departure)
        return self.report(departure)

    def _unless_lost_before(self, departure: Departure) -> Departure:
        """The departure of a shutdown message, or an earlier loss of the same agent that is about to be confirmed.

        An agent that another agent excludes as lost sends shutdown messages to all others. Then the certain loss that a
        third agent has reported remains the cause.
        """
        known = self._suspects.get(departure.rank)
        if known is not None and known[1].died and known[1].certain and known[1].reported_by != self._rank:
            return known[1]
        return departure

    def _after_those_before(self, departure: Departure) -> Departure | float:
        """Delay a departure until earlier suspects are confirmed, because their loss may be its cause."""
        # An agent's own message comes after all losses that it has named. A third agent's report keeps the place of
        # the first sign: at the end, the cause would be confirmed after the shutdowns that it has caused.
        if departure.reported_by == departure.rank:
            self._suspects.pop(departure.rank, None)
        earlier = takewhile(lambda rank: rank != departure.rank, self._suspects)
        due = max((self._suspects[rank][0] for rank in earlier if self._suspects[rank][1].died), default=0.0)
        if not due:
            return departure
        self._schedule(due, departure)
        return due

    def report(self, departure: Departure) -> float:
        """Take a third agent's report of a loss that this agent would notice itself. Returns when to check again.

        If the agent has shut down, its shutdown message follows all its other messages, also while it is still
        connecting. So the shutdown waits until that message arrives on this agent's link. If the agent died, this
        agent's connections show that soon. If they do not, only those two agents have lost each other.
        """
        rank, own = departure.rank, departure.reported_by == departure.rank
        hears = not departure.died and self._router.receives_from(rank)
        if rank not in self._membership.view.alive or (hears and not own):
            return float("inf")
        shows = not departure.died and not own and self._router.reaches(rank)
        due = float("inf") if shows or hears else clock.monotonic() + GRACE
        if rank in self._suspects:
            due, known = min(due, self._suspects[rank][0]), self._suspects[rank][1]
            if known.died and not (own and known.reported_by == self._rank):  # the end was that of its shutdown
                departure = known
            if departure.reported_by == rank:
                del self._suspects[rank]  # to the end: the loss that its shutdown message names may be its cause
        self._schedule(due, departure)
        return due

    def _schedule(self, due: float, departure: Departure) -> None:
        """Await the confirmation of a departure until ``due``."""
        self._membership.apply(AgentEvent.SUSPECT, departure.rank)
        self._suspects[departure.rank] = (due, departure)

    def _in_order(self) -> Iterator[tuple[float, Departure]]:
        """Each suspect, with the time of its confirmation.

        An agent that reports its own end is confirmed after all earlier suspects, because their loss may be its cause.
        The end of its connections must not change that.
        """
        earlier = 0.0
        for due, departure in self._suspects.values():
            at = max(due, earlier) if departure.reported_by == departure.rank else due
            if departure.died:
                earlier = max(earlier, at)
            yield at, departure

    def confirmed(self, now: float) -> list[Departure]:
        """The suspects whose confirmation is due."""
        return [departure for due, departure in self._in_order() if now >= due]

    def nothing_follows(self, rank: int) -> None:
        """Confirm a suspect without a delay of its own, because nothing more can arrive from it."""
        if rank in self._suspects:
            self._schedule(clock.monotonic(), self._suspects[rank][1])

    def forget(self, rank: int) -> None:
        self._suspects.pop(rank, None)

    @property
    def next(self) -> float:
        """When the next confirmation is due."""
        return min((due for due, _ in self._in_order()), default=float("inf"))


class Failures:
    """One agent's reaction to lost agents. Used under the engine's lock."""

    def __init__(
        self,
        parts: SharedParts,
        membership: MembershipTable,
        lifecycle: Lifecycle,
        fusion: Fusion,
        services: Services,
        agreement: Agreement,
    ) -> None:
        rank = parts.rank
        self._detector = FailureDetector(rank, membership, parts.router)
        self._rank = rank
        self._size = parts.size
        self._progress = parts.progress
        self._matcher = parts.matcher
        self._membership = membership
        self._router = parts.router
        self._sender = parts.sender
        self._lifecycle = lifecycle
        self._fusion = fusion
        self._services = services
        self._agreement = agreement
        self._events = parts.events
        agreement.react_by(self)
        lifecycle.departed_peers.lose_needed_by(lambda gone: self._lose_needed(needed_departure(gone, rank)))

    # Signs of a loss

    def on_closed(self, peer: int, cause: str, final: bool = False, certain: bool = False) -> None:
        """Handle the end of a connection or of a process; see :class:`~shoal.transport.link.Receiver`."""
        if peer not in self._membership.view.alive or self._membership.view.is_cut_off:
            self._router.drop(peer)
        elif not self._sender.has_sent_shutdown:  # after it, peers close their connections
            self._progress.check_by(self._detector.suspect(peer, cause, final, certain))

    def on_cut(self, peer: int) -> None:
        """Handle the cut of a connection on which an agent has sent. The link to it shows whether its process has
        ended.
        """
        if peer not in self._membership.view.alive or self._membership.view.is_cut_off:
            self._router.drop(peer)
        elif not self._sender.has_sent_shutdown and not self._sender.reach(peer):
            self._detector.nothing_follows(peer)
            self._progress.check_by(self._detector.next)

    def on_shut_out(self, peer: int) -> None:
        """Handle a peer that counts this agent as lost: this agent was cut off and does not know it."""
        if peer in self._membership.view.alive and not self._sender.has_sent_shutdown:
            self.cut_off(f"rank {peer} counts it as lost")

    def on_left(self, peer: int, lost: int = -1, cause: str = "") -> None:
        """Handle an agent's shutdown message. With a ``cause``, it shut down because of the loss of the agent
        ``lost``.
        """
        # The cause before its effect: suspects that are due together are confirmed in this order.
        if cause and 0 <= lost < self._size and lost != self._rank:
            self.take_notice(Departure(lost, cause, died=True, reported_by=peer))
        because = -1 if cause else lost
        departure = Departure(peer, "it called shoal.shutdown()", died=False, reported_by=peer, because=because)
        self._progress.check_by(self._detector.report(departure))

    def on_notice(self, source: int, message: Message) -> None:
        """Handle an agent's notice of its own shutdown or of another agent's loss."""
        # The sender has chosen the number. An IndexError in the driving thread would end this agent instead of it.
        if message.token >= self._size:
            raise ProtocolError(f"a notice about rank {message.token} of {self._size}")
        departure = self._detector.notice(source, message)
        if isinstance(departure, Departure):
            self._confirm(departure)
        else:
            self._progress.check_by(departure)

    def take_notice(self, departure: Departure) -> None:
        """Handle another agent's notice about a third one."""
        if self._router.has_connection(departure.rank):
            self._progress.check_by(self._detector.report(departure))
        else:
            self._confirm(departure)

    def give_up_on(self, rank: int, cause: str) -> None:
        """Count an agent as lost, whatever the state of its connections. It is notified if it reads messages again."""
        self._confirm(Departure(rank, cause, died=True, reported_by=self._rank, certain=True, silent=True))

    def leave_behind(self, rank: int, why: str) -> bool:
        """Count an agent as lost whose own call failed in a round that others have begun, because it cannot catch up.

        This applies with agreements only, whether its script ends or not. False without agreements.
        """
        if self._agreement.active:
            cause = f"its own call failed: {why}"
            self._confirm(Departure(rank, cause, died=True, reported_by=self._rank, certain=True))
        return self._agreement.active

    def forget(self, rank: int) -> None:
        """Drop suspicions of an earlier agent of an admitted rank."""
        self._detector.forget(rank)

    def check(self, now: float) -> float:
        """Confirm suspects that are due. Returns when to check again."""
        # Peers close their connections to an agent that has shut down or is excluded. These ends are no losses, and
        # confirmed they would be passed on.
        if self._sender.has_sent_shutdown or self._membership.view.is_cut_off:
            return float("inf")
        for departure in self._detector.confirmed(now):
            self._confirm(departure)
        return self._detector.next

    # Reaction to a loss

    def _confirm(self, gone: Departure) -> None:
        """Remove an agent that died or shut down: notify the neighbours, and end operations that need it."""
        rank, cause, died, reported_by, _, because, _ = gone
        self._detector.forget(rank)
        if rank == self._rank:
            # The others close their connections to this agent. It would take that for their loss, and report it.
            self.cut_off(f"rank {reported_by} counts it as lost ({cause})")
            return
        before = self._membership.state(rank)
        after = self._membership.apply(departure_event(gone), rank, cause)
        # Each agent passes a notice on once: without this return, notices would circulate without end.
        if before not in PRESENT:
            if died and after is AgentState.NEEDED:  # it has shut down, and another agent needs it
                if self._agreement.active:
                    self._agreement.need_departed(rank)
                else:
                    self._lose_needed(gone)
            return
        if self._events.active:
            self._events.emit("lost", "died" if died else "left", "", 0, peer=rank, detail=cause)
        self._sender.pass_on(gone)
        if died and not self._agreement.active:
            self._lose(*self._explained(gone))
        # The lost agent acknowledges nothing more: the memory of messages to it would stay leased, and later rounds of
        # their names would wait for it.
        for token in self._sender.unacknowledged_by(rank):
            self._lifecycle.acknowledged(rank, token)
        known = 0 <= because < self._size and because != self._rank
        self._services.on_departure(rank, because if known else None)
        self._fusion.split_those_without(rank)
        for operation in self._matcher.in_flight():
            stage = operation.stage
            if stage is None:
                continue
            # It also waits for an agent whose tensor has arrived only in part.
            if rank not in operation.waiting_for and (stage.posted or not stage.sends_to(rank)):
                continue
            if operation.one_sided:
                self._lifecycle.fail(operation, self._lifecycle.departed_peers.error_of(operation, [rank]))
            else:  # it ends, or the survivors agree how it continues
                self._lifecycle.departed_peers.report_needed([rank])
        # The messages of an agent that has shut down are complete, and later stages here still use them. Those of a
        # dead agent may be incomplete.
        if died:
            self._fusion.forget(rank)
            self._matcher.forget(rank)
        # This includes agents that have shut down: a later answer of theirs would send all earlier messages again, and
        # this agent has no record any more that these have arrived.
        self._router.shut_out(rank)
        # A shutdown alone begins no agreement, but one in progress has to name that agent. The survivors count only
        # reports of equal plans, and would wait for this agent's.
        if self._agreement.active and (died or self._lifecycle.gate.paused):
            self._agreement.report_losses()

    def _lose_needed(self, gone: Departure) -> None:
        """End the same calls on all agents: an agent that has shut down is needed, which counts as a loss."""
        if self._lifecycle.gate.ended is None:
            self._sender.pass_on(gone)
            self._lose(*self._explained(gone))

    def _explained(self, gone: Departure) -> tuple[str, int] | tuple[str, int, int]:
        """The error message of a loss, and the ranks that it names."""
        rank, cause, _, reported_by, certain, _, _ = gone
        if cause == NEEDED:
            return f"rank {rank} {cause.removeprefix('it ')}. {SAME_CALLS}", rank
        if reported_by in (self._rank, rank):
            return f"rank {rank} was lost ({cause})", rank
        if not certain and self._router.has_connection(rank):
            text = f"ranks {rank} and {reported_by} have lost each other ({cause}, as rank {reported_by} says)"
            return f"{text}, and both are there", rank, reported_by
        return f"rank {rank} was lost ({cause}, as rank {reported_by} says)", rank

    def _lose(self, cause: str, *ranks: int) -> None:
        """End current and later operations that need all agents."""
        gate, lifecycle = self._lifecycle.gate, self._lifecycle
        ended = gate.end(PeerLost(f"{cause}; the agents that are left can shut down and start again", ranks))
        for operation in [call for call in self._matcher.in_flight() if not call.one_sided]:
            lifecycle.fail(operation, PeerLost(f"{operation} on rank {self._rank}: {ended}", ended.ranks))
        self._fusion.give_up(ended)

    def cut_off(self, why: str) -> None:
        """End all current and later operations, because this agent must not report losses any more."""
        self._membership.apply(AgentEvent.CUT_OFF, self._rank)
        self.abort(ShoalError(f"rank {self._rank}: {why}; shut down and start again", (self._rank,)))

    def abort(self, error: ShoalError) -> None:
        """End all current and later operations with ``error``. The other agents are not notified."""
        self._lifecycle.gate.abort(error)
        self._lifecycle.fail_all(error)
        self._fusion.give_up(error)
