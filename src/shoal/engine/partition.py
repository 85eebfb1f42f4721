"""Parts of a job that have gone on without each other come together where the network does: the smaller ones give way.

A network that has fallen apart leaves parts that count each other as lost (``agreement.py``), and send each other
nothing any more: that they could, nobody would notice. So in a part that is smaller than what is out of its reach each
agent asks one of those now and then, in turn (``transport/peer_probe.py``). Whoever lives, counts the one that asks as
lost and has agreed with others to go on answers with how large its part is, and its lowest rank. Where the other part
is the larger one, this one ends with :class:`~shoal.PeerLost`, and whoever hears of it first tells all of its part: an
agent that is started again at once must not enter the part that gives way.

Which part is larger is decided by what they are when they meet, and not by what was out of reach once. That is an
order of all parts, so of any number of them the largest goes on; where each gave way to all that it could not reach,
three parts of two would all end, and so would two that had both lost agents meanwhile. Who was stopped, and wakes, does
not count the others as lost, and answers nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import torch

from ..errors import NONSENSE, PeerLost
from ..transport.peer_probe import PeerProbe
from ..transport.router import Router
from ..transport.wire import Kind, Message, ProtocolError
from .agreement import Agreement, partition_order
from .membership import Membership, View
from .progress import Progress
from .rejoin import Rejoin
from .sender import Sender
from .services import MinimalService, as_tensor, when_complete
from .submission_gate import SubmissionGate

WORD = "~reunion"
EVERY = 1.0
"""Seconds between two questions."""
PATIENCE = 3.0
"""Seconds after which a question without an answer is dropped: a cable is out, or a process is stopped."""
_SHIFT = 32
"""An answer is how many agents a part has, above the lowest rank in it; 0 says nothing."""


class PartitionResolver(MinimalService):
    """One agent's part in it. Used under the engine's lock.

    Args:
        send: Sends a peer what belongs to no operation; see :func:`~.outbox.send_alone`.
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
        """This agent is in a part that goes on."""
        return not (self._closed or self._entry.outside or self._gate.closing or self._gate.ended is not None)

    # Asking

    def check(self, now: float) -> float:
        """Ask the next one, when it is time; see :class:`~.services.Service`."""
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
        """Whom to ask, where those that are out of reach may be the larger part."""
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
        """A part of so many agents can be reached again; whether this one ends because of that."""
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
        """What this agent's part is, for one that it goes on without."""
        alive = self._membership.view.alive
        is_with_it = rank in alive and incarnation >= self._router.place_of(rank).incarnation
        if is_with_it or self._gate.paused or not self._is_running:
            return 0
        return len(alive) << _SHIFT | min(alive)

    def serve(self, source: int, message: Message) -> None:
        """An agent of this part has heard of a larger one; see :class:`~.services.Service`."""
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
