"""With ``on_loss="continue"``: the agents that are left agree on who is gone, and from which round on.

A loss is noticed by each agent at another moment, and meanwhile some have begun rounds that others have not. Were each
to go on by itself, one would count the lost agent in a round and another would not, or would wait for whoever had made
a new plan already. So every agent that is left stops beginning anything, and tells all others whom it misses and which
rounds it has begun. Whoever has heard the same from all that are left decides, and all decide the same, without a
leader and without the store:

- A round of an operation between neighbours that somebody had begun is completed by all as it was planned, without what
  the lost agent has not sent; each edge counts for itself. Later rounds are planned among those that are left.
- An operation of all agents that gives all the same result ends with it where everybody has it, and begins anew among
  those that are left where somebody does not. So that nobody has it alone, it ends only when all have said that they
  have it (``discover`` of nobody, one small message in ``ceil(log2 n)`` steps each).

Who is lost meanwhile is added, and all tell each other again. What an agent said is matched by whom it misses, so that
nobody decides on what was said before the last loss. This is virtual synchrony (Birman, Joseph, "Exploiting virtual
synchrony in distributed systems", SOSP 1987), with a failure detector that only errs towards loss: who is taken for
lost wrongly is told so, and ends.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..interrupts import released
from ..transport.wire import Message, Payload, ProtocolError
from .fusion import Fusion
from .lifecycle import Lifecycle, cannot_go_on
from .matching import Channel, Matcher
from .membership import Departure, Membership
from .operation import Exchange, Operation, Send, Stage
from .outbox import Outbox
from .publishing import Publisher
from .repair import conclude, go_on_without, restart

log = logging.getLogger("shoal")

WORD = "~agreement"
Ranks = tuple[int, ...]


@dataclass(frozen=True)
class MembershipChange:
    """A new membership that the agents that are left have agreed on.

    Attributes:
        lost: the ranks that are gone since the last one, died or left, ascending.
        alive: those that are left.
    """

    lost: tuple[int, ...]
    alive: tuple[int, ...]


@dataclass(frozen=True)
class _Report:
    """What an agent has begun, by name; and what is open of operations of all, with whether it has the result."""

    begun: dict[str, int]
    open: dict[str, dict[int, bool]]

    def has(self, name: str, round_: int) -> bool:
        """The agent has the result of an operation of all."""
        return self.begun.get(name, 0) > round_ and self.open.get(name, {}).get(round_, True)


class Agreement:
    """One agent's part in it. Used under the engine's lock.

    Attributes:
        active: Losses are agreed on; else they end all operations, and nothing here is used.
        gone: The ranks that are gone, as all that are left have agreed, ascending.
        changing: A loss is being agreed on.
        changes: What listeners have still to be told, for whoever drives.
        listeners: Called with every change, in the thread that drives.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        matcher: Matcher,
        membership: Membership,
        publisher: Publisher,
        outbox: Outbox,
        lifecycle: Lifecycle,
        fusion: Fusion,
        told: Callable[[Departure], None],
        check_by: Callable[[float], None],
    ) -> None:
        self.active = False
        self.gone: Ranks = ()
        self.changing = False
        self.changes: deque[MembershipChange] = deque()
        self.listeners: list[Callable[[MembershipChange], None]] = []
        self._rank = rank
        self._size = size
        self._matcher = matcher
        self._membership = membership
        self._publisher = publisher
        self._outbox = outbox
        self._lifecycle = lifecycle
        self._fusion = fusion
        self._told = told
        self._check_by = check_by
        self._rounds = 0
        self._missed = False  # somebody who left, where no loss is being agreed on
        self._reports: dict[Ranks, dict[int, _Report]] = {}
        self._history: list[tuple[Ranks, dict[str, int]]] = []  # whom rounds from these on are planned without

    def activate(self) -> None:
        """Agree on losses, instead of ending all operations."""
        self.active = True
        self._lifecycle.survive(self.missed)

    def tell(self) -> None:
        """Tell whoever asked for it what has changed. Without the lock."""
        while self.changes:
            try:
                change = self.changes.popleft()
            except IndexError:  # another thread of this agent was quicker
                return
            for listener in list(self.listeners):
                try:
                    with released:
                        listener(change)
                except (Exception, SystemExit):
                    log.exception("a listener of %s failed", change)

    @property
    def alive(self) -> Ranks:
        """The ranks that are left, as agreed on, ascending."""
        return tuple(rank for rank in range(self._size) if rank not in self.gone)

    @property
    def missing(self) -> list[int]:
        """The ranks that have still to say whom they miss."""
        said = self._reports.get(self._noticed, {})
        return [rank for rank in self._membership.view.alive if rank not in said]

    @property
    def _noticed(self) -> Ranks:
        alive = self._membership.view.alive
        return tuple(rank for rank in range(self._size) if rank not in alive)

    def plan(self, name: str, round_: int, restarts: bool) -> Ranks:
        """Whom a round that begins now is planned without."""
        if restarts:
            return self.gone
        for gone, begun in reversed(self._history):
            if round_ >= begun.get(name, 0):
                return gone
        return ()

    def missed(self) -> None:
        """Somebody who has left is missed here; what follows, follows when time is looked at."""
        self._missed = True
        self._check_by(0.0)

    # Telling, and hearing

    def change(self) -> None:
        """Somebody is gone, and is missed: stop, and tell all that are left."""
        self._missed = False
        if not self.changing:
            self.changing = True
            self._fusion.split_all()
            self._lifecycle.freeze()
        gone, report = self._noticed, self._report()
        self._reports.setdefault(gone, {})[self._rank] = report
        said = {"gone": self._why(gone), "begun": report.begun, "open": report.open}
        data = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
        for peer in self._membership.view.alive:
            if peer != self._rank:
                self._send(peer, data)
        self._decide()

    def _report(self) -> _Report:
        open_: dict[str, dict[int, bool]] = {}
        for operation in self._matcher.in_flight():
            recovery = operation.recovery
            if recovery is not None and recovery.restarts:
                open_.setdefault(operation.name, {})[operation.round] = recovery.result is not None
        return _Report(self._matcher.all_begun(), open_)

    def _why(self, gone: Ranks) -> list[tuple[int, str, bool]]:
        """How the loss of each showed, and whether it died."""
        view = self._membership.view
        return [(rank, view.died.get(rank, "it left"), rank in view.died) for rank in gone]

    def _send(self, peer: int, data: torch.Tensor) -> None:
        words = Operation(WORD, WORD, self._rounds, float("inf"))
        words.one_sided = True
        self._rounds += 1
        published = self._publisher.publish(words, data)
        exchange = Exchange([Send(peer, published, 0, data.numel(), tuple(data.shape))], ())
        self._outbox.post(Channel(WORD), words, Stage(0, exchange, set(), {}))
        self._lifecycle.release(words)

    def serve(self, source: int, message: Message) -> None:
        """An agent says whom it misses; see :class:`~.services.Service`."""
        payload = message.payload
        if payload is None or message.dtype != torch.uint8:
            raise ProtocolError("what was said of a loss is no text")
        if not payload.complete:
            payload.on_more = partial(self._more, source, message, payload)
            return
        self._heard(source, message, payload)

    def _more(self, source: int, message: Message, payload: Payload) -> None:
        if payload.complete:
            payload.on_more = None
            self._heard(source, message, payload)

    def _heard(self, source: int, message: Message, payload: Payload) -> None:
        said, report = _parsed(bytes(payload.data.numpy()), self._size)
        self._outbox.acknowledge(source, message)
        if not self.active:
            return
        gone = tuple(rank for rank, _, _ in said)
        self._reports.setdefault(gone, {})[source] = report
        alive = self._membership.view.alive
        for rank, cause, died in said:
            if rank in alive:
                self._told(Departure(rank, cause, died, source))
        if not self.changing and set(self._noticed) >= set(gone) > set(self.gone):
            self.change()  # who left was not missed here, and is missed there
        else:
            self._decide()

    # Deciding

    def _decide(self) -> None:
        if not self.changing or self.missing:
            return
        gone = self._noticed
        reports = [report for rank, report in self._reports[gone].items() if rank in self._membership.view.alive]
        begun: dict[str, int] = {}
        for report in reports:
            for name, count in report.begun.items():
                begun[name] = max(count, begun.get(name, 0))
        lost = tuple(rank for rank in gone if rank not in self.gone)
        self.gone, self.changing = gone, False
        self._reports = {key: value for key, value in self._reports.items() if len(key) > len(gone)}
        self._history.append((gone, begun))
        self.changes.append(MembershipChange(lost, self.alive))
        self._lifecycle.thaw()
        for operation in self._matcher.in_flight():
            recovery = operation.recovery
            if recovery is None:
                if not operation.one_sided:
                    self._lifecycle.fail(operation, cannot_go_on(operation, gone))
            elif not recovery.restarts:
                go_on_without(self._lifecycle, operation, gone)
            elif all(report.has(operation.name, operation.round) for report in reports):
                conclude(self._lifecycle, operation)
            else:
                restart(self._lifecycle, operation, gone)

    # As a service

    @property
    def cause(self) -> int | None:
        return None

    def on_gone(self, rank: int, because: int | None) -> None:
        """Who else is gone while the others agree is gone from what they agree on."""

    def check(self, now: float) -> float:
        """Begin what was put off; see :class:`~.services.Service`."""
        if self._missed and set(self._noticed) > set(self.gone):
            self.change()
        return float("inf")

    def descriptors(self) -> list[int]:
        return []

    def holds_topology(self) -> list[str]:
        return []

    def close(self, deadline: float) -> None:
        """Nothing is under way that others wait for: who leaves is gone, and the rest agrees on that."""


def _parsed(text: bytes, size: int) -> tuple[list[tuple[int, str, bool]], _Report]:
    """What another agent said. ProtocolError if it is nonsense."""
    try:
        said: Any = json.loads(text)
        gone = [(int(rank), str(cause)[:1000], bool(died)) for rank, cause, died in said["gone"]]
        begun = {str(name): int(count) for name, count in said["begun"].items()}
        open_ = {
            str(name): {int(round_): bool(has) for round_, has in rounds.items()}
            for name, rounds in said["open"].items()
        }
        ranks = [rank for rank, _, _ in gone]
        if ranks != sorted(set(ranks)) or not all(0 <= rank < size for rank in ranks):
            raise ValueError(f"ranks {ranks}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"what was said of a loss makes no sense: {error}") from None
    return gone, _Report(begun, open_)
