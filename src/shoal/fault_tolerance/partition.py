"""Network partitions: when partitions can reach each other again, the smaller ones end.

After a partition of the network each side counts the other as lost (``agreement.py``) and sends it nothing, so neither
would notice that the network has healed. Each agent of a partition that is smaller than the agents out of its reach
therefore probes one of those now and then, in turn (``transport/peer_probe.py``). A live agent that counts the prober
as lost, and that has agreed to continue, answers with the size and the lowest rank of its partition. If that partition
is larger, the prober's ends with :class:`~shoal.PeerLost`. The first agent to learn it notifies its whole partition,
because an agent that is restarted at once must not enter the partition that ends.

Partitions compare what they are when they meet, not what was once out of reach. This is a total order, so of any number
of partitions the largest continues. If each yielded to all agents that it cannot reach, three partitions of two would
all end, and so would two that had both lost agents meanwhile. An agent that was stopped and resumes does not count the
others as lost, and answers nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import torch

from ..errors import NONSENSE, PeerLost
from ..operations.membership import Membership, View
from ..operations.progress import Progress
from ..operations.sender import Sender
from ..operations.services import MinimalService, as_tensor, when_complete
from ..operations.submission_gate import SubmissionGate
from ..transport.peer_probe import PeerProbe
from ..transport.router import Router
from ..transport.wire import Kind, Message, ProtocolError
from .agreement import Agreement, partition_order
from .rejoin import Rejoin

WORD = "~reunion"
EVERY = 1.0
"""Seconds between two questions."""
PATIENCE = 3.0
"""Seconds after which a question without an answer is dropped: a cable is out, or a process is stopped."""
_SHIFT = 32
"""An answer is how many agents a part has, above the lowest rank in it; 0 says nothing."""


class PartitionResolver(MinimalService):
    """One agent's part in the resolution. Used under the engine's lock.

    Args:
        send: Sends a peer a message outside of any operation; see :func:`~.sender.send_alone`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        progress: Progress,
        membership: Membership,
        router: Router,
        sender: Sender,
        gate: SubmissionGate,
        agreement: Agreement,
        entry: Rejoin,
        send: Callable[[int, Message, torch.Tensor], None],
    ) -> None:
        self._rank = rank
        self._size = size
        self._progress = progress
        self._membership = membership
        self._router = router
        self._sender = sender
        self._gate = gate
        self._agreement = agreement
        self._entry = entry
        self._send = send
        self._asking = PeerProbe(router)
        self._due = float("inf")
        self._asked_at = 0.0
        self._turn = rank  # so that not all ask the same one
        self._closed = False

    def activate(self) -> None:
        """Before the exchange starts."""
        self._router.answer_by(self._answer)
        self._membership.watch(self._look_again)

    def _look_again(self, _view: View) -> None:
        self._due = 0.0
        self._progress.check_by(0.0)

    @property
    def _is_running(self) -> bool:
        """This agent is in a partition that continues."""
        return not (self._closed or self._entry.outside or self._gate.closing or self._gate.ended is not None)

    # Asking

    def check(self, now: float) -> float:
        """Probe the next agent, when it is time; see :class:`~.services.Service`."""
        if now >= self._due:
            self._due = self._look(now)
        return self._due

    def _look(self, now: float) -> float:
        beyond = self._larger_beyond()
        if not beyond:
            self._asking.cancel()
            return float("inf")
        waits = self._asking.is_pending and now < self._asked_at + PATIENCE
        if not waits and not self._gate.paused:
            peer = beyond[self._turn % len(beyond)]
            self._turn, self._asked_at = self._turn + 1, now
            self._asking.ask(peer, partial(self._answered, peer))
        return now + EVERY

    def _larger_beyond(self) -> list[int]:
        """The agents to probe, if those out of reach may be the larger partition."""
        beyond = self._agreement.out_of_reach if self._is_running else frozenset()
        if not beyond or partition_order(self._membership.view.alive) > partition_order(beyond):
            return []
        return [rank for rank in sorted(beyond) if self._router.transport_to(rank) not in ("", "threads")]

    def _answered(self, peer: int, answer: int) -> None:
        count, lowest = answer >> _SHIFT, answer & ((1 << _SHIFT) - 1)
        here = self._membership.view.alive
        if not self._yields_to(peer, count, lowest):
            return
        said = json.dumps((peer, count, lowest)).encode()
        for other in here:
            if other != self._rank:
                data = as_tensor(said)
                self._send(other, Message(Kind.DATA, WORD, WORD), data)
        self._sender.flush()  # now: what waits for this agent's operations may end it before anything else is sent

    def _yields_to(self, peer: int, count: int, lowest: int) -> bool:
        """A partition of this size can be reached again; whether this one ends because of it."""
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

    # Answering, and hearing

    def _answer(self, rank: int, incarnation: int) -> int:
        """This agent's partition, for a prober that it counts as lost."""
        alive = self._membership.view.alive
        is_with_it = rank in alive and incarnation >= self._router.place_of(rank).incarnation
        if is_with_it or self._gate.paused or not self._is_running:
            return 0
        return len(alive) << _SHIFT | min(alive)

    def serve(self, source: int, message: Message) -> None:
        """An agent of this partition has learnt of a larger one; see :class:`~.services.Service`."""
        when_complete(message, partial(self._heard, source, message))

    def _heard(self, source: int, message: Message, text: bytes) -> None:
        self._sender.acknowledge(source, message)
        try:
            peer, count, lowest = (int(one) for one in json.loads(text))
        except NONSENSE as error:
            raise ProtocolError(f"what was said of another part makes no sense: {error}") from None
        if source in self._membership.view.alive:
            self._yields_to(peer, count, lowest)

    # As a service

    def descriptors(self) -> list[int]:
        return self._asking.descriptors()

    def close(self, deadline: float) -> None:
        with self._progress.lock:
            self._closed = True
            self._asking.cancel()
