"""What an agent hears from the others, and what follows from it: a message for an operation, an answer, a question, a
refusal, the news that somebody is gone. Everything here runs in the thread that drives the exchange, under its lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..errors import Mismatch, PeerLost, ShoalError
from ..transport.wire import DIED, Kind, Message, Payload, ProtocolError
from .failures import Departure
from .matching import Fate, disagreement, unexpected
from .operation import Operation, Stage, describe
from .runs import PREFIX

if TYPE_CHECKING:
    from .engine import Engine


class Service(Protocol):
    """What answers messages that belong to no operation here. Called under the engine's lock, but for ``close``."""

    def serve(self, source: int, message: Message) -> None:
        """A neighbour asks for something: a first message under a name that begins with this service's word."""

    @property
    def cause(self) -> int | None:
        """Whose loss is the reason where this agent leaves now; itself, or None, where nobody's is."""

    def on_gone(self, rank: int, because: int | None) -> None:
        """An agent is gone, because of the loss of another if that is known."""

    def check(self, now: float) -> float:
        """Do what is due; returns when to come back."""

    def descriptors(self) -> list[int]:
        """What a forked child must close."""

    def holds_topology(self) -> list[str]:
        """The names of what keeps the topology from being changed."""

    def close(self, deadline: float) -> None:
        """Not under the lock: end what is under way, by itself until the deadline."""


class Hearing:
    """The :class:`~shoal.transport.link.Receiver` of one agent."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rank = engine.rank
        self._rounds = engine.rounds
        self._bundles = engine.bundles
        self._events = engine.events
        self._membership = engine.membership

    def on_message(self, source: int, message: Message) -> None:
        try:
            self._on_message(source, message)
        except ProtocolError as error:  # also of what is put apart here, long after it came
            self.on_closed(source, str(error), True, True)

    def _on_message(self, source: int, message: Message) -> None:
        kind = message.kind
        if kind is Kind.DATA:
            self._on_data(source, message)
        elif kind is Kind.DONE:
            self._on_reply(source, message.token)
        elif kind is Kind.REFUSE:
            self._on_refuse(source, message)
        elif kind is Kind.ASK:
            self._on_ask(source, message)
        elif kind is Kind.DENY:
            self._on_deny(source, message)
        elif kind is Kind.NOTICE:
            self._on_notice(source, message)

    def _on_data(self, source: int, message: Message) -> None:
        if self._events.active:
            self._events.emit("received", message.op, message.name, message.round, 0, source, message.nbytes)
        if message.name.startswith(PREFIX):
            self._bundles.came(source, message)
            return
        service = self._service(message)
        if service is not None and message.stage == 0:
            service.serve(source, message)
            return
        fate, operation = self._rounds.fate(message)
        if operation is not None and operation.bundle is not None:
            self._bundles.put(operation, source, message)
        elif fate is Fate.LATE or (fate is Fate.EARLY and operation is None and self._engine.closing):
            self._engine.outbox.done_with(source, message)  # nobody here will take it up
        elif fate is Fate.EARLY:
            self._rounds.keep(source, message)
        elif fate is Fate.UNEXPECTED or operation is None or operation.stage is None:
            error = self.refuse_unexpected(source, message)
            if operation is not None:
                self._engine.fail(operation, error)
            else:
                self._blame(source, message.name, error)
        else:
            stage = operation.stage
            self.match(operation, stage, source, message)
            if operation.error is None and stage.complete:
                self._engine.ready.append(operation)

    def _service(self, message: Message) -> Service | None:
        services = self._engine.services
        return services.get(message.name.partition(" ")[0]) if services and message.name.startswith("~") else None

    def match(self, operation: Operation, stage: Stage, source: int, message: Message) -> None:
        """Give a stage a message that is for it, if the two agree."""
        reason = disagreement(operation, stage, source, message, self._rank)
        if reason:
            self._engine.fail(operation, self._refuse(source, message, reason))
            return
        stage.missing.discard(source)
        stage.arrived[source] = message
        if message.payload is not None and not message.payload.complete:
            message.payload.owner = operation

    def refuse_unexpected(self, source: int, message: Message) -> Mismatch:
        """Turn away what nobody here has asked for."""
        return self._refuse(source, message, unexpected(source, self._rank))

    def _refuse(self, source: int, message: Message, reason: str) -> Mismatch:
        """Turn a message away. Returns the error for this side."""
        what = describe(message.op, message.name, message.round)
        self._engine.outbox.refuse(source, message, f"{what}: rank {self._rank} refused it: {reason}")
        message.flags = 0
        return Mismatch(f"{what}: {reason}", (source, self._rank))

    def _on_reply(self, source: int, token: int) -> None:
        answered = self._engine.outbox.answered(source, token)
        if answered is None:
            return
        operation, channel = answered
        if operation.outcome is not None and not operation.unconfirmed and operation.error is None:
            outcome, operation.outcome = operation.outcome, None
            self._engine.settle(operation, outcome[0], None)
        self._engine.send_deferred(channel)

    def _on_refuse(self, source: int, message: Message) -> None:
        """A peer says that our message, or our silence, did not fit; or that it cannot go on without somebody."""
        lost = bool(message.flags & DIED)
        error = PeerLost(message.text, (message.digest,)) if lost else Mismatch(message.text, (source, self._rank))
        fate, operation = self._rounds.fate(message)
        if operation is not None:
            self._engine.fail(operation, error)
        elif fate is Fate.UNEXPECTED:
            self._blame(source, message.name, error)
        self._on_reply(source, message.token)

    def _blame(self, source: int, name: str, error: ShoalError) -> None:
        """A round that has ended well here did not fit a peer: what waits for that peer under the name, or else the
        next call, raises."""
        waiting = [operation for operation in self._rounds.under(name) if source in operation.waiting_for]
        for operation in waiting:
            self._engine.fail(operation, error)
        if not waiting:
            self._engine.refused = error

    def _on_ask(self, source: int, message: Message) -> None:
        if self._service(message) is not None:  # it answers when it can
            return
        fate, operation = self._rounds.fate(message)
        if fate is Fate.EARLY:
            self._rounds.keep_ask(source, message)
        elif fate is not Fate.NOW or not (operation and operation.stage and operation.stage.sends_to(source)):
            # If it was sent all the same, it arrives before this denial, which is then void.
            self._engine.outbox.deny(source, message, message.stage, self._rounds.why(message))

    def _on_deny(self, source: int, message: Message) -> None:
        fate, operation = self._rounds.fate(message)
        stage = operation.stage if operation else None
        if fate is not Fate.NOW or operation is None or stage is None or source not in stage.missing:
            return
        if self._bundles.is_coming(source, (message.name, message.round)):  # it was sent before, and is longer
            return
        why = (
            f"whose own call failed there ({message.text})"
            if message.text
            else f"which took part in this round without sending one to rank {self._rank}, or whose own call failed"
        )
        text = f"{operation}: rank {self._rank} expects a tensor from rank {source}, {why}"
        message.token = 0
        self._engine.outbox.refuse(source, message, text)
        self._engine.fail(operation, Mismatch(text, (source, self._rank)))

    def on_arrived(self, payload: Payload) -> None:
        owner = payload.owner
        if callable(owner):
            owner()
        elif isinstance(owner, Operation) and owner.waiting_more:
            owner.waiting_more = False
            self._engine.ready.append(owner)

    # Agents that are gone

    def on_closed(self, peer: int, cause: str, final: bool = False, certain: bool = False) -> None:
        if peer not in self._membership.view.alive or self._engine.deaf:
            self._engine.router.drop(peer)
        elif not self._engine.outbox.said_goodbye:  # after it, an end is somebody hanging up
            self._engine.next_check = min(
                self._engine.next_check, self._engine.departures.sign(peer, cause, final, certain)
            )

    def on_left(self, peer: int, lost: int = -1, cause: str = "") -> None:
        if cause and 0 <= lost < self._engine.size and lost != self._rank:
            self._believe(Departure(lost, cause, True, peer))
        said = Departure(peer, "it called shoal.shutdown()", False, peer, because=-1 if cause else lost)
        self._engine.next_check = min(self._engine.next_check, self._engine.departures.hearsay(said))

    def _on_notice(self, source: int, message: Message) -> None:
        said = self._engine.departures.notice(source, message)
        if isinstance(said, Departure):
            self.on_gone(said)
        else:
            self._engine.next_check = min(self._engine.next_check, said)

    def _believe(self, said: Departure) -> None:
        """What another agent says of a third."""
        if self._engine.router.knows(said.rank):
            self._engine.next_check = min(self._engine.next_check, self._engine.departures.hearsay(said))
        else:
            self.on_gone(said)

    def on_gone(self, gone: Departure) -> None:
        """An agent died or left; tell the neighbours, and end what cannot be completed without it."""
        rank, cause, died, told_by, _, because = gone
        self._engine.departures.forget(rank)
        if rank == self._rank:
            self._engine.break_off(f"rank {told_by} counts it as lost ({cause})")
            return
        if not self._membership.remove(rank, cause, died):
            missed = died and rank in self._membership.view.left  # it left, and somebody needed it after that
            if missed and self._engine.ended is None:
                self._engine.outbox.pass_on(gone)
                self._lose(f"rank {rank} is gone: {cause}", rank)
            return
        if self._events.active:
            self._events.emit("lost", "died" if died else "left", "", 0, peer=rank, detail=cause)
        self._engine.outbox.pass_on(gone)
        if died:
            self._lose(*self._explained(gone))
        for token in self._engine.outbox.owed_by(rank):
            self._on_reply(rank, token)
        for service in self._engine.services.values():
            service.on_gone(rank, because if 0 <= because < self._engine.size and because != self._rank else None)
        self._bundles.take_apart_without(rank)
        for operation in self._rounds.in_flight():
            stage = operation.stage
            if stage is None:
                continue
            # It also waits for somebody of whose tensor a part is still missing.
            if rank in operation.waiting_for or (not stage.posted and stage.sends_to(rank)):
                self._engine.fail(operation, self.miss(operation, [rank]))
        if died:
            self._bundles.forget(rank)
            self._rounds.forget(rank)
        self._engine.router.drop(rank)

    def _explained(self, gone: Departure) -> tuple[str, int] | tuple[str, int, int]:
        """What is to be said of a loss, and the ranks that it is about."""
        rank, cause, _, told_by, certain, _ = gone
        if told_by in (self._rank, rank):
            return f"rank {rank} was lost ({cause})", rank
        if not certain and self._engine.router.knows(rank):
            what = f"ranks {rank} and {told_by} have lost each other ({cause}, as rank {told_by} says)"
            return f"{what}, and both are there", rank, told_by
        return f"rank {rank} was lost ({cause}, as rank {told_by} says)", rank

    def _lose(self, what: str, *ranks: int) -> None:
        """Without these agents nothing goes on that needs all: end such operations, now and from now on."""
        ended = self._engine.ended
        if ended is None:
            ended = PeerLost(f"{what}; the agents that are left can shut down and start again", ranks)
            self._engine.ended = ended
        for operation in [one for one in self._rounds.in_flight() if not one.one_sided]:
            self._engine.fail(operation, PeerLost(f"{operation} on rank {self._rank}: {ended}", ended.ranks))
        self._bundles.give_up(ended)

    def miss(self, operation: Operation, ranks: list[int]) -> PeerLost:
        """An operation needs agents that have left. To be missed makes that a loss, of which the others must hear;
        but not where nobody else takes part."""
        rank = ranks[0]
        if operation.one_sided:
            gone = "; ".join(self._membership.describe(one) for one in ranks)
            return PeerLost(f"{operation} on rank {self._rank} needs agents that are gone: {gone}", ranks)
        cause = f"it left while rank {self._rank} needed it for {operation}"
        self._engine.outbox.pass_on(Departure(rank, cause, True, self._rank, certain=True))
        what = "; ".join(self._membership.describe(one) for one in ranks)
        error = PeerLost(f"{operation} on rank {self._rank} needs agents that are gone: {what}", ranks)
        self._engine.ended = self._engine.ended or PeerLost(f"{what}, and was needed; shut down and start again", ranks)
        return error
