"""Resolves network partitions: when partitions can reach each other again, the smaller ones end.

After a partition of the network each side counts the other as lost (``agreement.py``) and sends it nothing, so neither
would notice that the network has healed. Therefore each agent of a partition that may be the smaller one periodically
probes an unreachable agent, each in turn. A probe is only a handshake: the answer is a number, in the field that tells
a permanent connection how many of its units have arrived. The other side stores nothing for it, and neither side
regards its end as a loss. A live agent answers with the size and the lowest rank of its partition, if it counts the
prober as lost and has agreed to continue. If that partition is larger, the prober's partition ends with
:class:`~shoal.PeerLost`. The first agent to learn it notifies its whole partition, because an agent that is restarted
at once must not join the partition that ends.

Partitions compare their current sizes, not the number of agents once out of reach. This is a total order, so of any
number of partitions the largest continues. If each partition yielded to all agents that it cannot reach, three
partitions of two agents would all end. So would two partitions that had both lost agents since. A stopped agent that
resumes does not count other agents as lost, and does not answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import PeerLost
from ..execution.control_messages import Service, read_json
from ..execution.membership import View
from ..execution.shared_parts import SharedParts
from ..execution.submission_gate import SubmissionGate
from ..transport.authentication import QUESTION
from ..transport.link import NullReceiver
from ..transport.messages import Message
from ..transport.router import Router
from ..transport.sockets import Outgoing
from .agreement import Agreement
from .membership_states import MembershipTable, partition_order

PARTITION = "~partition"
"""The name of this service's messages."""
EVERY = 1.0
"""Seconds between two probes."""
PATIENCE = 3.0
"""Seconds after which a probe without an answer is dropped: a cable is unplugged, or a process is stopped."""
_SHIFT = 32
"""The shift of the partition's size in an answer, whose lower bits are its lowest rank; 0 means no information."""


class PartitionResolver(Service):
    """The partition resolver of one agent. Used under the engine's lock."""

    def __init__(
        self,
        parts: SharedParts,
        membership: MembershipTable,
        gate: SubmissionGate,
        agreement: Agreement,
    ) -> None:
        self._rank = parts.rank
        self._size = parts.size
        self._progress = parts.progress
        self._membership = membership
        self._router = parts.router
        self._sender = parts.sender
        self._gate = gate
        self._agreement = agreement
        self._probe = PeerProbe(parts.router)
        self._due = float("inf")
        self._asked_at = 0.0
        self._turn = parts.rank  # so that agents do not all probe the same one
        self._closed = False

    def activate(self) -> None:
        """Begin to answer probes and to watch the membership. Call it before the exchange starts."""
        self._router.answer_by(self._answer)
        self._membership.watch(self._look_again)

    def _look_again(self, _view: View) -> None:
        self._due = 0.0
        self._progress.check_by(0.0)

    @property
    def _is_running(self) -> bool:
        """Whether this agent is in a partition that continues."""
        # For a joining agent all others are out of reach. It would probe them, and yield to the job that it joins.
        return not (
            self._closed or self._membership.view.is_joining or self._gate.closing or self._gate.ended is not None
        )

    # Probes

    def check(self, now: float) -> float:
        """Probe the next agent, when it is time; see :class:`~.control_messages.Service`."""
        if now >= self._due:
            self._due = self._look(now)
        return self._due

    def _look(self, now: float) -> float:
        beyond = self._larger_beyond()
        if not beyond:
            self._probe.cancel()
            return float("inf")
        waits = self._probe.is_pending and now < self._asked_at + PATIENCE
        if not waits and not self._gate.paused:
            peer = beyond[self._turn % len(beyond)]
            self._turn, self._asked_at = self._turn + 1, now
            self._probe.ask(peer, partial(self._answered, peer))
        return now + EVERY

    def _larger_beyond(self) -> list[int]:
        """The unreachable agents to probe, if they may be the larger partition; otherwise empty."""
        beyond = self._agreement.out_of_reach if self._is_running else frozenset()
        if not beyond or partition_order(self._membership.view.alive) > partition_order(beyond):
            return []
        # A probe needs a socket: agents that are threads have none, and agents that have not come have no address.
        return [rank for rank in sorted(beyond) if self._router.transport_to(rank) not in ("", "threads")]

    def _answered(self, peer: int, answer: int) -> None:
        count, lowest = answer >> _SHIFT, answer & ((1 << _SHIFT) - 1)
        here = self._membership.view.others(self._rank)
        if not self._yields_to(peer, count, lowest):
            return
        self._sender.send_control(here, PARTITION, (peer, count, lowest))
        self._sender.flush()  # now: the failed operations may end the process before another flush

    def _yields_to(self, peer: int, count: int, lowest: int) -> bool:
        """End this partition if it yields to the given one, which can be reached again. Returns whether it does."""
        here = self._membership.view.alive
        if not 0 < count < self._size or not self._is_running or partition_order(here) >= (count, -lowest):
            return False
        why = "the larger part" if count > len(here) else f"as large a part, with the lowest rank, {lowest}"
        self._agreement.yield_to_majority(
            PeerLost(
                f"rank {peer} can be reached again, and has gone on without ranks {list(here)}, as one of {count}: "
                f"theirs is {why}, and this one gives way. Started again, rank {self._rank} takes their state",
                sorted(self._agreement.out_of_reach),
            )
        )
        return True

    # Answers, and notices in this partition

    def _answer(self, rank: int, incarnation: int) -> int:
        """The size and lowest rank of this agent's partition, for a prober that it counts as lost; otherwise 0."""
        alive = self._membership.view.alive
        # A process whose rank was restarted since is no member, although its rank is one.
        is_with_it = rank in alive and incarnation >= self._router.places[rank].incarnation
        # During an agreement this partition may still lose agents, or stop as the minority: no other must yield to it.
        if is_with_it or self._gate.paused or not self._is_running:
            return 0
        return len(alive) << _SHIFT | min(alive)

    def serve(self, source: int, message: Message) -> None:
        """Take a notice of an agent of this partition about a larger one; see :class:`~.control_messages.Service`."""
        peer, count, lowest = read_json(message, "another part", _parsed_part)
        # A late notice of an agent that this partition has lost must not end it.
        if source in self._membership.view.alive:
            self._yields_to(peer, count, lowest)

    # As a service

    def descriptors(self) -> list[int]:
        return self._probe.descriptors()

    def close(self, deadline: float) -> None:
        with self._progress.lock:
            # The shutdown still drives the exchange: a check would open another probe, which nothing would close.
            self._closed = True
            self._probe.cancel()


class PeerProbe:
    """The probes of one agent, one at a time. No call waits for an answer, and an error means no answer."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._question: Outgoing | None = None

    def ask(self, peer: int, answered: Callable[[int], None]) -> None:
        """Probe a peer in another process; the driving thread calls ``answered`` with the answer."""
        self.cancel()
        try:
            self._question = self._router.outgoing(peer, NullReceiver(), QUESTION)
        except OSError:
            return
        self._question.on_answer = answered

    @property
    def is_pending(self) -> bool:
        """An answer may still come."""
        return bool(self.descriptors())

    def cancel(self) -> None:
        """Ignore the answer of the current probe."""
        if self._question is not None:
            self._question.close()
            self._question = None

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close."""
        sock = None if self._question is None else self._question.sock
        return [] if sock is None or sock.fileno() < 0 else [sock.fileno()]


def _parsed_part(content: Any) -> tuple[int, int, int]:
    """A rank of another partition, and that partition's size and lowest rank."""
    peer, count, lowest = (int(number) for number in content)
    return peer, count, lowest
