"""Agents enter a run that goes on: in the place of one that was lost, or for the first time.

Who comes connects to all that it can reach, and asks to be let in. Until it is, it is alone: what it does is with
nobody, and what others send to it waits (``transport/lobby.py``). The others let in who waits at a point that is the
same line of the script for all of them, by an operation of all (``ops/entering.py``): its end is the same for all,
whoever dies meanwhile, and lets in the same agents everywhere. Each then tells those where all are and how many rounds
of each name have begun, before anything else; the first word of it makes a newcomer one of them. From there on it is an
agent as any other, and its death a loss as any other.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from .. import clock
from ..errors import NONSENSE, DeadlineExceeded, NotInitialized, PeerLost, ShoalError
from ..interrupts import held
from ..transport.lobby import ENTRY
from ..transport.outside import Sign
from ..transport.place import Endpoint, Place
from ..transport.router import Router
from ..transport.sockets import Outgoing
from ..transport.wire import Kind, Message, ProtocolError, Where
from .agreement import Agreement, as_counts, as_ranks, decisions_as_data, decisions_of
from .failures import Failures
from .matching import Matcher
from .membership import Membership, Plan
from .operation import Operation
from .outbox import Outbox
from .progress import Progress
from .services import MinimalService, as_tensor, once_whole

log = logging.getLogger("shoal")
T = TypeVar("T")


class Newcomer(NamedTuple):
    """An agent that asks to be let in."""

    place: Place
    endpoint: Endpoint

    def as_data(self) -> list[dict[str, Any]]:
        """As it travels."""
        return [asdict(self.place), asdict(self.endpoint)]

    def as_json(self) -> bytes:
        return json.dumps(self.as_data()).encode()

    @classmethod
    def of(cls, said: Any, rank: int) -> Newcomer:
        """As it was before it travelled; one of :data:`NONSENSE` where it is none, or not of this rank."""
        place, endpoint = said
        newcomer = cls(_checked(Place, place), _checked(Endpoint, endpoint))
        if newcomer.place.rank != rank or not 0 <= newcomer.place.incarnation < 1 << 32:
            raise ValueError(f"the place of rank {newcomer.place.rank}")
        return newcomer


def _checked(kind: type[T], said: Mapping[str, Any]) -> T:
    """A place or an endpoint, whose fields are numbers and texts."""
    for one in fields(kind):  # type: ignore[arg-type]
        if one.type != type(said[one.name]).__name__:
            raise TypeError(f"{one.name} is {said[one.name]!r}")
    return kind(**said)


class Entry(MinimalService):
    """One agent's part in it, on either side of the door. Used under the engine's lock.

    Args:
        send: Sends a peer what belongs to no operation; see :func:`~.outbox.send_alone`.

    Attributes:
        outside: This agent waits to be let in itself.
        patience: Seconds for which it waits, if nothing else is said.
        on_entry: Called when agents have entered, or this one has.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        progress: Progress,
        matcher: Matcher,
        membership: Membership,
        router: Router,
        outbox: Outbox,
        agreement: Agreement,
        failures: Failures,
        send: Callable[[int, Message, torch.Tensor], None],
    ) -> None:
        self.outside = False
        self.patience = float("inf")
        self.on_entry: Callable[[], None] = lambda: None
        self._asked: dict[int, Newcomer] = {}
        self._sign = Sign()
        self._unreachable: list[int] = []  # all others, once no connection to any of them can be opened
        self._rank = rank
        self._size = size
        self._progress = progress
        self._matcher = matcher
        self._membership = membership
        self._router = router
        self._outbox = outbox
        self._agreement = agreement
        self._failures = failures
        self._send = send

    def be_patient(self, seconds: float) -> None:
        """How long to wait for being let in."""
        self.patience = seconds

    # Inside

    def asking(self) -> dict[int, Newcomer]:
        """Who asks to be let in, by rank, and is still connected."""
        return {rank: one for rank, one in self._asked.items() if self._router.waits(rank, one.place.incarnation)}

    def let_in_at_the_end_of(self, operation: Operation) -> None:
        """Its result is, on all agents, who enters and how many rounds of each name have begun."""
        operation.on_end = self._let_in

    def begun(self) -> dict[str, int]:
        """How many rounds of each name this agent has begun."""
        return self._matcher.all_begun()

    def _let_in(self, found: tuple[Mapping[int, Newcomer], dict[str, int]]) -> None:
        newcomers, begun = found
        if not newcomers:
            return
        ranks = tuple(sorted(newcomers))
        self._outbox.forget_news(ranks)
        for rank, one in newcomers.items():
            self._asked.pop(rank, None)
            self._failures.forget(rank)
            self._router.admit(one.place, one.endpoint)
            self._membership.add(rank)
        self._agreement.admit(ranks, begun)
        self.on_entry()
        said = json.dumps(self._welcome(begun)).encode()
        for rank in ranks:
            self._send(rank, Message(Kind.DATA, ENTRY, ENTRY), as_tensor(said))
        self._agreement.tell_again()
        self._progress.check_by(0.0)

    def _welcome(self, begun: dict[str, int]) -> dict[str, Any]:
        """What a newcomer has to know."""
        router = self._router
        everybody = [Newcomer(*one).as_data() for one in zip(router.places, router.endpoints, strict=True)]
        decisions = decisions_as_data(self._agreement.decisions)
        view = self._membership.view
        ended = {rank: cause for rank, cause in view.died.items() if rank not in view.out_of_reach}
        return {
            "everybody": everybody,
            "plan": self._agreement.now,
            "begun": begun,
            "decisions": decisions,
            "ended": ended,
        }

    # Outside

    def wait_outside(self) -> None:
        """Be alone, until the others have been asked, and let this agent in."""
        self._membership.stand_alone(self._rank)
        self._agreement.stand_alone()
        self.outside = True
        self._sign.show()
        self._router.wait_outside()

    def ask(self) -> None:
        """Ask all agents to be let in; those that are there no more do not answer."""
        text = Newcomer(self._router.place, self._router.endpoints[self._rank]).as_json()
        for rank in (rank for rank in range(self._size) if rank != self._rank):
            message = Message(Kind.DATA, ENTRY, ENTRY, shape=(len(text),), nbytes=len(text), body=text)
            message.where = Where.INLINE
            try:
                link = self._router.link(rank)
            except OSError:
                continue
            link.post(message)
            link.flush()

    def wait(self, seconds: float, says_so: float) -> None:
        """Ask the others to let this agent in, and wait until they have, saying so in the log now and then.

        Takes the lock itself.

        Args:
            seconds: For how long.
            says_so: After how many seconds, again and again.

        Raises:
            PeerLost: They have ended; or no connection to any of them can be opened.
            DeadlineExceeded: They have not, for so many seconds.
        """
        progress, limit = self._progress, clock.monotonic() + seconds
        with held, progress.lock:
            self._unreachable = []
            self.ask()
            self._router.poller.wake()
        while not progress.drive_until(
            lambda: not self.waits or bool(self._unreachable), min(limit, clock.monotonic() + says_so)
        ):
            held.checkpoint()
            if progress.stopped:
                raise NotInitialized("this agent has shut down; call shoal.init() first")
            if self._unreachable:
                break
            if clock.monotonic() >= limit:
                raise self.not_let_in(seconds)
            problems = self._outbox.problems_with(sorted(self._router.links))
            log.warning(
                "rank %d waits to be let in: at the others' next Checkpoint.save%s",
                self._rank,
                f"; {problems}" if problems else "",
            )
        if self._unreachable:
            error = self.nobody_reached()
            with progress.lock:  # or shutdown would wait for what they have not taken
                for rank in self._unreachable:
                    self._router.drop(rank)
            raise error
        if self.outside:
            raise self.nobody_left()

    def check_inside(self, what: str) -> None:
        """ShoalError where this agent waits to be let in."""
        if self.outside:
            raise self.not_in_yet(what)

    def not_in_yet(self, what: str) -> ShoalError:
        return ShoalError(
            f"{what} on rank {self._rank}: this agent came later, and has not entered the run of the others: it does "
            "where it loads its shoal.Checkpoint, which has to come first; see docs/survival.md",
            (self._rank,),
        )

    @property
    def waits(self) -> bool:
        """It may still be let in."""
        return self.outside and bool(self._router.links)

    def not_let_in(self, seconds: float) -> DeadlineExceeded:
        """The others have not let this agent in."""
        asked = sorted(self._router.links)
        problems = self._outbox.problems_with(asked)
        return DeadlineExceeded(
            f"rank {self._rank} has waited {seconds:g} s to be let in: ranks {asked} have called no Checkpoint.save. "
            "SHOAL_ENTRY_TIMEOUT sets how long to wait" + (f"; {problems}" if problems else ""),
            asked,
        )

    def nobody_reached(self) -> PeerLost:
        """No connection to any of the others can be opened, and so none of them knows that this agent waits."""
        return PeerLost(
            f"rank {self._rank} was started later, and none of the others hears that it waits to be let in: "
            f"{self._outbox.problems_with(self._unreachable)}. Open the data ports of one of them at least to this "
            "machine (SHOAL_PORTS sets which these are)",
            self._unreachable,
        )

    def nobody_left(self) -> PeerLost:
        """The others have ended before they let this agent in."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        return PeerLost(
            f"rank {self._rank} came later, and nobody is there any more who could let it in: the others have ended",
            others,
        )

    def _enter(self, said: Any) -> None:
        plan = Plan(as_ranks(said["plan"][0], self._size), int(said["plan"][1]))
        everybody = [Newcomer.of(one, rank) for rank, one in enumerate(said["everybody"])]
        begun, decisions = as_counts(said["begun"]), decisions_of(said["decisions"], self._size)
        ended = {int(rank): str(cause)[:1000] for rank, cause in said["ended"].items()}
        if len(everybody) != self._size or self._rank in plan.gone:
            raise ValueError(f"it is about {len(everybody)} agents without {plan.gone}")
        self.outside = False
        self._sign.take_down()
        self._router.stop_waiting()
        self._matcher.begin_at(begun)
        for rank, one in enumerate(everybody):
            if rank != self._rank and rank not in plan.gone:
                self._router.admit(one.place, one.endpoint)
                self._membership.add(rank)
        for rank in plan.gone:  # who could not be reached until now is not to hear that this agent waits
            link = self._router.links.get(rank)
            if isinstance(link, Outgoing) and not link.has_been_open:
                self._router.drop(rank)
        self._membership.begin_without({rank: cause for rank, cause in ended.items() if rank in plan.gone})
        self._agreement.enter(plan, decisions)
        self.on_entry()
        self._progress.notify()
        self._progress.check_by(0.0)

    # As a service

    def serve(self, source: int, message: Message) -> None:
        """An agent asks to be let in, or lets this one in; see :class:`~.services.Service`."""
        once_whole(message, partial(self._heard, source, message))

    def _heard(self, source: int, message: Message, text: bytes) -> None:
        try:
            said = json.loads(text)
            if isinstance(said, list):
                self._asked[source] = Newcomer.of(said, source)
            elif self.outside:
                self._enter(said)
        except NONSENSE as error:
            raise ProtocolError(f"what was said of an entry makes no sense: {error}") from None
        self._outbox.acknowledge(source, message)
        if source in self.asking() and source in self._membership.view.alive:
            self._failures.on_closed(source, "it has been started again", True, True)

    def check(self, now: float) -> float:
        """Hear what those have said who were let in; see :class:`~.services.Service`."""
        self._router.open_lobby()
        if not self.outside or self._unreachable:
            return float("inf")
        closed = [self._router.reversing.closed_at(peer) for peer in self._router.links]
        when = max(closed, default=float("inf"))
        if now >= when:  # others pass a request on for a reversed connection as soon as one of them is reached
            self._unreachable = sorted(self._router.links)
            self._progress.notify()
            return float("inf")
        return when

    def descriptors(self) -> list[int]:
        return self._sign.descriptors()

    def close(self, deadline: float) -> None:
        self._sign.take_down()
