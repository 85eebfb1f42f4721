"""Admits agents to a running job: in place of a lost agent, or for the first time.

A joining agent connects to all agents that it can reach and requests admission. Until it is admitted it is isolated:
its operations have no other participants, and messages for it are buffered (``transport/acceptor.py``). The
members admit it at the same line of the script, by a collective operation (``ops/state_transfer.py``). All members have
the same result of that operation, also if agents fail during it, so all admit the same agents. Each member then sends
the joining agents the addresses of all members and the number of rounds begun under each name. The first such message
makes the joining agent a member, whose loss is handled like any other.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from functools import partial
from typing import Any, NamedTuple, TypeVar

from .. import clock
from .._signals import deferred
from ..errors import DeadlineExceeded, NotInitialized, PeerLost, ShoalError
from ..execution.control_messages import Service, parsed_ranks, read_json
from ..execution.membership import NOT_YET, Plan
from ..execution.operation import Operation
from ..execution.shared_parts import SharedParts
from ..execution.submission_gate import SubmissionGate
from ..transport.acceptor import ENTRY
from ..transport.messages import Kind, Message
from ..transport.peer_address import Endpoint, PeerId
from ..transport.sockets import Outgoing
from .agreement import Agreement
from .failure_detector import Failures
from .launcher_notes import RejoinMarker
from .loss_reports import decisions_as_data, parsed_decisions
from .membership_states import AgentEvent, MembershipTable

log = logging.getLogger("shoal")
T = TypeVar("T")


class JoiningPeer(NamedTuple):
    """An agent that requests admission."""

    place: PeerId
    endpoint: Endpoint

    def as_data(self) -> list[dict[str, Any]]:
        """Convert the peer to JSON data."""
        return [asdict(self.place), asdict(self.endpoint)]

    def as_json(self) -> bytes:
        return json.dumps(self.as_data()).encode()

    @classmethod
    def of(cls, data: Any, rank: int) -> JoiningPeer:
        """Parse the peer from JSON data; raises one of :data:`NONSENSE` if it is malformed or of another rank."""
        place, endpoint = data
        joining_peer = cls(_checked(PeerId, place), _checked(Endpoint, endpoint))
        if joining_peer.place.rank != rank or not 0 <= joining_peer.place.incarnation < 1 << 32:
            raise ValueError(f"the place of rank {joining_peer.place.rank}")
        return joining_peer


def _checked(kind: type[T], data: Mapping[str, Any]) -> T:
    """Create a peer address or an endpoint from JSON data. Each field must have its declared type."""
    for field in fields(kind):  # type: ignore[arg-type]
        if field.type != type(data[field.name]).__name__:
            raise TypeError(f"{field.name} is {data[field.name]!r}")
    return kind(**data)


class Rejoin(Service):
    """One agent's part in admissions, as a member or as the joining agent. Used under the engine's lock.

    Attributes:
        rejoin_seconds: Default timeout of :meth:`wait`, in seconds.
        on_admission: Called when agents have been admitted, or this agent has.
    """

    def __init__(
        self,
        parts: SharedParts,
        membership: MembershipTable,
        agreement: Agreement,
        failures: Failures,
        gate: SubmissionGate,
    ) -> None:
        self._gate = gate
        self.rejoin_seconds = float("inf")
        self.on_admission: Callable[[], None] = lambda: None
        self._requests: dict[int, JoiningPeer] = {}
        self._admission: Operation | None = None  # the operation that admits agents, while it is in flight
        self._marker = RejoinMarker()
        self._unreachable: list[int] = []  # all other ranks, if no connection to any can be opened
        self._rank = parts.rank
        self._size = parts.size
        self._progress = parts.progress
        self._matcher = parts.matcher
        self._membership = membership
        self._router = parts.router
        self._sender = parts.sender
        self._agreement = agreement
        self._failures = failures

    def set_timeout(self, seconds: float) -> None:
        """Set :attr:`rejoin_seconds`."""
        self.rejoin_seconds = seconds

    @property
    def is_joining(self) -> bool:
        """Whether this agent itself waits to be admitted."""
        return self._membership.view.is_joining

    def notify_of_admission(self, on_admission: Callable[[], None]) -> None:
        """Set :attr:`on_admission`."""
        self.on_admission = on_admission

    # As a member

    def joining_peers(self) -> dict[int, JoiningPeer]:
        """The agents that request admission and are still connected, by rank."""
        # An agent that has ended since is left out: the members would admit it, and lose it at once. A request stays
        # when it is granted: it may be that of a later start, and the admitted agent that of an earlier one.
        return {
            rank: peer
            for rank, peer in self._requests.items()
            if peer.place.incarnation > self._router.places[rank].incarnation
            and self._router.has_pending(rank, peer.place.incarnation)
        }

    def admit_after(self, operation: Operation) -> None:
        """Admit agents when ``operation`` ends. Its result on all members: the admitted agents, and begun rounds by
        name.
        """
        with self._progress.lock:
            self._gate.release()  # of an earlier attempt, which a loss has ended
            self._admission, operation.on_end, operation.on_outcome = operation, self._admit, self._release

    def hold(self) -> dict[str, int]:
        """Begin no operation until the admission ends. Returns the number of rounds that this agent has begun, by name.

        A round that began after this count, with the plan before the admission, would have another plan on agents that
        begin it later.
        """
        with self._progress.lock:
            if self._admission is not None:  # else it has ended, as when this agent shuts down
                self._gate.hold()
            return self._matcher.all_begun()

    def _release(self, _result: Any, _error: BaseException | None) -> None:
        self._admission = None
        self._gate.release()

    @property
    def awaited(self) -> list[int]:
        """The ranks for which the admission in progress waits."""
        return [] if self._admission is None else self._admission.waiting_for

    def _admit(self, found: tuple[Mapping[int, JoiningPeer], dict[str, int]]) -> None:
        joining_peers, begun = found
        if not joining_peers:
            return
        ranks = tuple(sorted(joining_peers))
        # Notices of losses are the first messages on a new link: they would report the admitted agents as lost.
        self._sender.forget_news(ranks)
        for rank, peer in joining_peers.items():
            # A suspicion of the predecessor would be confirmed later, and would exclude the new agent.
            self._failures.forget(rank)
            self._router.admit(peer.place, peer.endpoint)
        self._membership.apply_to_all(AgentEvent.ADMIT, dict.fromkeys(ranks, ""))
        self._agreement.admit(ranks, begun)
        self.on_admission()
        self._sender.send_control(ranks, ENTRY, self._admission_reply())
        self._agreement.send_report_again()
        # At once: check() delivers the buffered messages of the admitted agents.
        self._progress.check_by(0.0)
        for rank in ranks:
            self._lose_predecessor(rank)

    def _admission_reply(self) -> dict[str, Any]:
        """The content of the message that admits an agent: addresses, rounds and decisions."""
        router = self._router
        everybody = [JoiningPeer(*address).as_data() for address in zip(router.places, router.endpoints, strict=True)]
        decisions = decisions_as_data(self._agreement.decisions)
        view = self._membership.view
        # Unreachable agents are left out: the admitted agent keeps them as UNKNOWN, and so probes their partition, too.
        ended = {rank: cause for rank, cause in view.died.items() if rank not in view.out_of_reach}
        return {
            "everybody": everybody,
            "plan": self._agreement.plan,
            "decisions": decisions,
            "ended": ended,
        }

    # As a joining agent

    def begin_waiting(self) -> None:
        """Isolate this agent until the members admit it."""
        self._membership.stand_alone(self._rank)
        self._agreement.stand_alone()
        # The launcher counts no agent with this marker as a survivor that could admit others.
        self._marker.show()
        self._router.is_joining = True

    def request_admission(self) -> None:
        """Request admission from all agents. Agents that have ended do not answer."""
        text = JoiningPeer(self._router.place, self._router.endpoints[self._rank]).as_json()
        for rank in (rank for rank in range(self._size) if rank != self._rank):
            message = Message(Kind.CONTROL, ENTRY, ENTRY, shape=(len(text),), nbytes=len(text), body=text)
            try:
                # Directly over the link: the sender drops messages to ranks that are no members here.
                link = self._router.link(rank)
            except OSError:
                continue
            link.post(message)
            link.flush()

    def wait(self, seconds: float, report_every: float) -> None:
        """Request admission, and wait until the members have admitted this agent. Progress is logged.

        Takes the lock itself.

        Args:
            seconds: The timeout.
            report_every: Seconds between log messages.

        Raises:
            PeerLost: The members have ended, or no connection to any of them can be opened.
            DeadlineExceeded: The members have not admitted this agent within the timeout.
        """
        progress, limit = self._progress, clock.monotonic() + seconds
        with deferred, progress.lock:
            self._unreachable = []
            self.request_admission()
            self._router.poller.wake()
        while not progress.drive_until(
            lambda: not self.is_waiting or bool(self._unreachable), min(limit, clock.monotonic() + report_every)
        ):
            deferred.checkpoint()
            if progress.stopped:
                raise NotInitialized("this agent has shut down; call shoal.init() first")
            if self._unreachable:
                break
            if clock.monotonic() >= limit:
                raise self.rejoin_timeout(seconds)
            problems = self._router.reversing.problems_with(sorted(self._router.links))
            log.warning(
                "rank %d waits to be admitted, at the next Checkpoint.save of the others%s",
                self._rank,
                f"; {problems}" if problems else "",
            )
        if self._unreachable:
            error = self.no_member_reached()
            with progress.lock:  # otherwise shutdown would wait for messages to them
                for rank in self._unreachable:
                    self._router.drop(rank)
            raise error
        if self.is_joining:
            raise self.no_member_left()

    def check_joined(self, call: str) -> None:
        """Raise ShoalError for a call while this agent waits to be admitted."""
        if self.is_joining:
            raise self.not_joined(call)

    def not_joined(self, call: str) -> ShoalError:
        return ShoalError(
            f"{call} on rank {self._rank}: this agent started later than the others, and has not been admitted: load "
            "its shoal.Checkpoint first; see docs/rejoin.md",
            (self._rank,),
        )

    @property
    def is_waiting(self) -> bool:
        """Whether this agent may still be admitted."""
        return self.is_joining and bool(self._router.links)

    def rejoin_timeout(self, seconds: float) -> DeadlineExceeded:
        """The error if the members have not admitted this agent in time."""
        asked = sorted(self._router.links)
        problems = self._router.reversing.problems_with(asked)
        return DeadlineExceeded(
            f"rank {self._rank} has waited {seconds:g} s to be admitted: ranks {asked} have not called "
            "Checkpoint.save. SHOAL_ENTRY_TIMEOUT sets how long to wait" + (f"; {problems}" if problems else ""),
            asked,
        )

    def no_member_reached(self) -> PeerLost:
        """The error if no connection to a member can be opened, so that no member knows that this agent waits."""
        return PeerLost(
            f"rank {self._rank} started later than the others, and can connect to none of them to be admitted: "
            f"{self._router.reversing.problems_with(self._unreachable)}. Open the data ports of one of them at least "
            "to this machine (SHOAL_PORTS sets which these are)",
            self._unreachable,
        )

    def no_member_left(self) -> PeerLost:
        """The error if all members have ended before they admitted this agent."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        return PeerLost(
            f"rank {self._rank} started later than the others, and all of them have ended: none can admit it",
            others,
        )

    def _enter(self, data: Any) -> None:
        # Parse all before the first change: after a malformed message this agent has to wait as before.
        plan = Plan(parsed_ranks(data["plan"][0], self._size), int(data["plan"][1]))
        everybody = [JoiningPeer.of(entry, rank) for rank, entry in enumerate(data["everybody"])]
        decisions = parsed_decisions(data["decisions"], self._size)
        ended = {int(rank): str(cause)[:1000] for rank, cause in data["ended"].items()}
        if len(everybody) != self._size or self._rank in plan.gone or not decisions:
            raise ValueError(f"it is about {len(everybody)} agents without {plan.gone}, and {len(decisions)} decisions")
        self._marker.hide()
        self._router.is_joining = False
        # Before the buffered messages are delivered: these name rounds of the job, not of this agent in isolation. The
        # last decision is this admission.
        self._matcher.begin_at(decisions[-1].begun)
        for rank, peer in enumerate(everybody):
            if rank != self._rank and rank not in plan.gone:
                self._router.admit(peer.place, peer.endpoint)
        members = (rank for rank in range(self._size) if rank not in plan.gone)
        self._membership.apply_to_all(AgentEvent.ADMIT, dict.fromkeys(members, ""))
        for rank in plan.gone:  # an agent that was unreachable must not get the request later
            link = self._router.links.get(rank)
            if isinstance(link, Outgoing) and not link.has_been_open:
                self._router.drop(rank)
        absent = [rank for rank in plan.gone if ended.get(rank) == NOT_YET]
        self._membership.begin_without(absent)
        # Ranks without a known cause stay UNKNOWN: they may run in another partition.
        lost = {rank: ended[rank] for rank in plan.gone if rank in ended and rank not in absent}
        self._membership.apply_to_all(AgentEvent.LOSE, lost)
        self._agreement.enter(plan, decisions)
        self.on_admission()
        self._progress.notify()
        self._progress.check_by(0.0)

    # As a service

    def serve(self, source: int, message: Message) -> None:
        """Take a request for admission, or the message that admits this agent; see :class:`.Service`."""
        read_json(message, "an admission", partial(self._take, source))
        self._lose_predecessor(source)

    def _take(self, source: int, content: Any) -> None:
        if isinstance(content, list):
            joining_peer, before = JoiningPeer.of(content, source), self._requests.get(source)
            # Each start has a connection of its own, so the request of an earlier start may be read last.
            if before is None or before.place.incarnation <= joining_peer.place.incarnation:
                self._requests[source] = joining_peer
        # Every member sends the admission. The first one counts: a second would reset the round counters.
        elif self.is_joining:
            self._enter(content)

    def _lose_predecessor(self, source: int) -> None:
        """Count a member as lost whose rank asks for admission: it was started again."""
        # Only a rank that counts as lost can be admitted, and this agent may not have noticed the predecessor's end.
        if source in self.joining_peers() and source in self._membership.view.alive:
            self._failures.on_closed(source, "it has been started again", final=True, certain=True)

    def check(self, now: float) -> float:
        """Deliver buffered messages of admitted agents; while joining, end the wait if no member can be reached.

        See :class:`~.control_messages.Service`.
        """
        self._router.admit_pending()
        if not self.is_joining or self._unreachable:
            return float("inf")
        closed = [self._router.reversing.closed_at(peer) for peer in self._router.links]
        when = max(closed, default=float("inf"))
        if now >= when:  # once one agent is reached, it passes on requests for reversed connections
            self._unreachable = sorted(self._router.links)
            self._progress.notify()
            return float("inf")
        return when

    def descriptors(self) -> list[int]:
        return self._marker.descriptors()

    def close(self, deadline: float) -> None:
        self._marker.hide()
