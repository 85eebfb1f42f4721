"""Small operations that were submitted together are fused: one message to each neighbour, one sum.

A call of four kilobytes costs its bookkeeping, not its bytes. What waits to begin when somebody drives, on the same
topology and in the same dtype, therefore becomes a :class:`FusedOperation`: its tensors are joined, sent and summed as
one, and cut apart again. The sum of a number does not depend on its neighbours in memory, so the bits are the same.

No agent has to agree with another on what is fused. The name of a fused operation says what is in it. From a neighbour
that has fused the same, its message is summed where it lies; what others send, fused otherwise or one by one, is put in
its place until everything is there. And whenever something does not fit, or does not come for a while, a fused
operation is split (its messages have been sent already): from there on each of its members goes the ordinary way of
matching, questions, refusals and deadlines, so that nothing here needs to know of errors.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from ..transport.wire import MAX_NAME, Kind, Message, Payload, Where
from .events import Events
from .fused_name import MOST_OPERATIONS, Run, keys, name_of, runs_of
from .lifecycle import Lifecycle
from .matching import WINDOW, Channel, Matcher, disagreement
from .membership import Membership
from .operation import MORE, Exchange, Mover, Operation, Stage
from .outbox import Outbox
from .progress import Progress

MOST_BYTES = 1 << 20
SPLIT_AFTER = 0.1
"""Seconds after which a fused operation that waits is split, so that each of its members asks for itself."""


class FusedOperation(Operation):
    """Several operations as one. It is in nobody's book: its members are, and stand for it where it fails."""

    __slots__ = ("channel", "fusion", "members", "partial", "places")

    def __init__(self, name: str, members: list[Operation], fusion: Fusion) -> None:
        super().__init__(members[0].op, name, 0, members[0].timeout)
        self.members = members
        self.fusion = fusion
        self.channel = Channel(name)
        self.partial: dict[int, _Partial] = {}
        self.places: dict[Operation, tuple[int, int]] = {}  # where each tensor begins and ends
        at = 0
        for one in members:
            assert one.fusible is not None
            self.places[one] = (at, at := at + one.fusible.flat.numel())

    def proceed(self, mover: Mover, item: Exchange | str | None, result: Any, error: BaseException | None) -> None:
        self.fusion.proceed(self, item, result, error)

    def fail(self, mover: Mover, error: BaseException) -> None:
        self.fusion.fail(self, error)


@dataclass(slots=True)
class _Partial:
    """What one source has sent for a fused operation, fused otherwise or one by one."""

    data: torch.Tensor
    like: Message
    here: set[Operation] = field(default_factory=set)


class _Received(NamedTuple):
    """The fused message of a neighbour."""

    source: int
    message: Message


class _Split(Exception):
    """What ended a fused operation whose members go on."""


class Fusion:
    """The fused operations of one agent, and the fused messages that came. Used under the engine's lock.

    Args:
        deliver: Takes a message as if it had come by itself.
    """

    def __init__(
        self,
        rank: int,
        progress: Progress,
        matcher: Matcher,
        membership: Membership,
        outbox: Outbox,
        lifecycle: Lifecycle,
        events: Events,
        deliver: Callable[[int, Message], None],
    ) -> None:
        self._active: dict[str, FusedOperation] = {}
        self._early: dict[tuple[str, int], list[_Received]] = {}  # by the operations that are in them
        self._coming: list[_Received] = []  # to be unpacked once all of it is here
        self._unread: list[Channel] = []
        self._rank = rank
        self._lock = progress.lock
        self._progress = progress
        self._matcher = matcher
        self._membership = membership
        self._outbox = outbox
        self._lifecycle = lifecycle
        self._events = events
        self._deliver = deliver

    # Going out

    def begin(self) -> None:
        """Begin what was submitted, fused where it may be. Takes the lock itself: it computes."""
        while self._lifecycle.unbegun:
            with self._lock:
                name, members = self._take()
                fused = self._fuse(name, members) if len(members) > 1 else None
            try:
                if fused is not None:
                    self._lifecycle.resume(fused, None)
                    continue
                for operation in members:
                    self._lifecycle.begin(operation)
            except BaseException as interrupt:
                with self._lock:
                    for operation in members:
                        self._lifecycle.fail(operation, interrupt)
                raise

    def _take(self) -> tuple[str, list[Operation]]:
        """The next operations that may be fused, and the name of what becomes of them."""
        unbegun = self._lifecycle.unbegun
        members: list[Operation] = []
        runs: list[Run] = []
        name, first, following = "", 0, -1  # the run that grows
        shape: tuple[int, ...] = ()
        nbytes = length = 0
        while unbegun:
            operation = unbegun[0]
            fusible = operation.fusible
            assert fusible is not None
            if operation.handle is None:  # it has failed meanwhile
                unbegun.popleft()
                continue
            goes_on = operation.round == following and operation.name == name and fusible.shape == shape
            nbytes += fusible.flat.numel() * fusible.flat.element_size()
            length += 0 if goes_on else len(json.dumps(operation.name)) + 32 + 12 * len(fusible.shape)
            if members:
                like = members[0].fusible
                assert like is not None
                full = nbytes > MOST_BYTES or length > MAX_NAME - 64 or len(members) == MOST_OPERATIONS
                if full or fusible.flat.dtype != like.flat.dtype or fusible.family != like.family:
                    break
            if not goes_on:
                if members:
                    runs.append(Run(name, first, following - first, shape))
                name, shape, first = operation.name, fusible.shape, operation.round
            following = operation.round + 1
            members.append(operation)
            unbegun.popleft()
        if members:
            runs.append(Run(name, first, following - first, shape))
        return name_of(runs), members

    def _fuse(self, name: str, members: list[Operation]) -> FusedOperation | None:
        """One operation of several, unless that would only be split."""
        self._unread = [channel for channel in self._unread if channel.unacknowledged]
        if len(self._unread) >= WINDOW:  # receivers are behind: by itself each of them waits for its turn to send
            return None
        fused = FusedOperation(name, members, self)
        self._active[name] = fused
        if self._events.active:
            self._events.emit("fused", fused.op, name, 0)
        parts = []
        for one in members:
            one.fused = fused
            assert one.fusible is not None
            parts.append(one.fusible)
        fused.generator = parts[0].family.together(fused, parts)
        return fused

    def proceed(
        self, fused: FusedOperation, item: Exchange | str | None, result: Any, error: BaseException | None
    ) -> None:
        """Do what a fused operation asked for when it stopped computing."""
        if fused.error is not None:  # it was split, or failed, meanwhile
            self._lifecycle.close_generator(fused)
            self._lifecycle.release(fused)
        elif item is MORE:
            fused.waiting_more = True
        elif isinstance(item, Exchange):
            self._enter(fused, item)
        else:
            self._end(fused, error)
            for operation, one in zip(fused.members, result or [None] * len(fused.members), strict=True):
                if operation.handle is not None:
                    own = one if isinstance(one, Exception) else error
                    self._lifecycle.settle(operation, None if own is not None else one, own)

    def _enter(self, fused: FusedOperation, exchange: Exchange) -> None:
        stage = fused.stage = Stage(0, exchange, set(exchange.sources), {})
        self._take_early(fused)
        if fused.error is not None:
            return
        if stage.needs.issubset(self._membership.view.alive):
            self._outbox.post(fused.channel, fused, stage)
        if fused.channel.unacknowledged:
            self._unread.append(fused.channel)
        if not stage.posted:  # somebody is gone: each member says so by its own name and round
            self._split(fused)
        elif stage.complete:
            self._lifecycle.make_ready(fused)
        else:
            self._progress.check_by(time.monotonic() + SPLIT_AFTER)

    def _take_early(self, fused: FusedOperation) -> None:
        """Take up what neighbours have sent for the members before they began."""
        for operation in fused.members:
            for received in self._came_early(operation):
                if received.message.name == fused.name:
                    self._forget(received)
                    self._match(fused, received)
                else:
                    self._unpack(received)
                if fused.error is not None:  # it has been split
                    return
            if self._matcher.has_news(operation):
                for source, message in self._matcher.came_early(operation, 0):
                    self.put(operation, source, message)
                    if fused.error is not None:
                        return

    def _end(self, fused: FusedOperation, error: BaseException | None) -> None:
        """Give back what a fused operation holds."""
        self._active.pop(fused.name, None)
        fused.error = error
        if self._events.active:
            self._events.emit("parted", fused.op, fused.name, 0, detail="" if error is None else str(error))
        stage, fused.stage = fused.stage, None
        for source, message in stage.arrived.items() if stage is not None else ():
            self._outbox.acknowledge(source, message)
        self._lifecycle.release(fused)
        for operation in fused.members:
            operation.fused = None

    def _split(self, fused: FusedOperation) -> None:
        """Let every member go its own way. What they send has been sent."""
        stage = fused.stage
        arrived, posted = (stage.arrived, stage.posted) if stage is not None else ({}, False)
        if stage is not None:
            stage.arrived = {}
        partial, fused.partial = fused.partial, {}
        self._end(fused, _Split("each goes on by itself"))
        self._lifecycle.close_generator(fused)
        # What has come is put where the members will look for it: its sender may have left, which is nothing to
        # somebody who has its tensor.
        for source, message in arrived.items():
            self._unpack(_Received(source, message))
        for source, part in partial.items():
            for one in part.here:
                assert one.fusible is not None
                data = part.data[slice(*fused.places[one])]
                self._deliver(source, _piece(part.like, one.name, one.round, one.fusible.shape, data))
        for operation in fused.members:
            if operation.handle is not None:
                operation.sent = posted
                self._lifecycle.begin(operation)

    def split_all(self) -> None:
        """Let every operation go its own way, also those that have not begun."""
        for fused in list(self._active.values()):
            if fused.stage is not None:
                self._split(fused)
        while self._lifecycle.unbegun:
            self._lifecycle.begin(self._lifecycle.unbegun.popleft())

    def split_those_without(self, rank: int) -> None:
        """An agent has left: what waits for it has to say so for itself."""
        for fused in list(self._active.values()):
            if fused.stage is not None and rank in fused.stage.missing:
                self._split(fused)

    def fail(self, fused: FusedOperation, error: BaseException) -> None:
        """End a fused operation and all its members."""
        self._end(fused, error)
        self._lifecycle.close_generator(fused)
        for operation in fused.members:
            self._lifecycle.fail(operation, error)

    def give_up(self, error: BaseException) -> None:
        """The members have been failed; forget what they shared."""
        for fused in list(self._active.values()):
            self._end(fused, error)
            self._lifecycle.close_generator(fused)

    def give_up_early(self) -> None:
        """Nobody will begin what neighbours have fused; they may have their memory back."""
        for received in self._all_early():
            self._matcher.release(*received)
            self._outbox.acknowledge(*received)
        self._early.clear()

    def forget(self, rank: int) -> None:
        """An agent is lost: drop what came from it."""
        for received in self._all_early():
            if received.source == rank:
                self._forget(received)
        self._coming = [one for one in self._coming if one.source != rank]

    def _all_early(self) -> list[_Received]:
        return list({id(one): one for several in self._early.values() for one in several}.values())

    def check(self, now: float) -> float:
        """Split what has waited long enough. Returns when to come back."""
        following = float("inf")
        for fused in list(self._active.values()):
            if fused.stage is None or not fused.stage.missing:
                continue
            due = fused.stage.started + SPLIT_AFTER
            if now >= due:
                self._split(fused)
            else:
                following = min(following, due)
        return following

    # Coming in

    def came(self, source: int, message: Message) -> None:
        """A fused message from a neighbour."""
        received = _Received(source, message)
        fused = self._active.get(message.name)
        if fused is not None and fused.stage is not None:
            self._match(fused, received)
            if fused.error is None and fused.stage.complete:
                self._lifecycle.make_ready(fused)
            return
        runs = runs_of(message)
        if not runs:
            self._outbox.refuse(source, message, f"rank {self._rank} refused it: fused operations that do not add up")
            return
        if any(self._matcher.has_begun(*key) for key in keys(runs)):
            self._unpack(received)
            return
        self._matcher.charge(source, message)
        for key in keys(runs):
            self._early.setdefault(key, []).append(received)
        if self._lifecycle.gate.closing:
            self.give_up_early()

    def _match(self, fused: FusedOperation, received: _Received) -> None:
        source, message = received
        stage = fused.stage
        assert stage is not None
        # Where a part of it has come by itself, and is in its place, the whole must not be taken in besides.
        if source in fused.partial or disagreement(fused, stage, source, message, self._rank):
            self._split(fused)
            self._unpack(received)
        else:
            self._lifecycle.accept(fused, stage, source, message)

    def put(self, operation: Operation, source: int, message: Message) -> None:
        """A neighbour has sent by itself what is a part of a fused operation here."""
        assert message.payload is not None
        fused: FusedOperation | None = operation.fused
        if not message.payload.complete and fused is not None:  # it cannot be put in its place yet
            self._split(fused)
        place = self._place(operation, source, message, message.shape) if message.payload.complete else None
        if place is None:
            self._deliver(source, message)
            return
        place.copy_(message.payload.data)
        self._outbox.acknowledge(source, message)
        self._count(operation, source)

    def begins(self, operation: Operation) -> None:
        """An operation begins a stage by itself; fused messages that hold one for it are of no use as they are."""
        if self._early:
            for received in self._came_early(operation):
                self._unpack(received)

    def _came_early(self, operation: Operation) -> Iterator[_Received]:
        """The fused messages that hold one for an operation. What is done with one may have dealt with others."""
        while several := self._early.get((operation.name, operation.round)):
            yield several[0]

    def _more_came(self, received: _Received) -> None:
        """More of a message that is to be unpacked is here."""
        payload = received.message.payload
        if payload is not None and payload.complete:
            self._coming = [one for one in self._coming if one is not received]
            self._unpack(received)

    def is_coming(self, source: int, key: tuple[str, int]) -> bool:
        """A message for an operation is on its way from a neighbour, in a fused one of which not all is here."""
        return any(one.source == source and key in keys(runs_of(one.message)) for one in self._coming)

    def _unpack(self, received: _Received) -> None:
        """Put what is in a fused message into fused operations of ours, or make single messages of it."""
        self._forget(received)
        source, message = received
        payload = message.payload
        assert payload is not None
        if not payload.complete:
            payload.on_more = partial(self._more_came, received)
            self._coming.append(received)
            return
        at = 0
        for name, first, length, shape in runs_of(message):
            numel = math.prod(shape)
            for round_ in range(first, first + length):
                part = payload.data[at : at + numel]
                at += numel
                operation = self._matcher.active(name, round_)
                place = None if operation is None else self._place(operation, source, message, shape)
                if operation is not None and place is not None:
                    place.copy_(part)
                    self._count(operation, source)
                else:
                    self._deliver(source, _piece(message, name, round_, shape, part.clone()))
        self._outbox.acknowledge(source, message)

    def _place(
        self, operation: Operation, source: int, message: Message, shape: tuple[int, ...]
    ) -> torch.Tensor | None:
        """Where in a fused operation a tensor from a neighbour goes. Where it does not fit, that is split."""
        fused: FusedOperation | None = operation.fused
        fusible = operation.fusible
        if fused is None or fusible is None:
            return None
        stage, partial = fused.stage, fused.partial.get(source)
        fits = (
            stage is not None
            and source in stage.missing
            and (message.op, message.digest) == (operation.op, stage.exchange.digest)
            and (message.dtype, shape) == (fusible.flat.dtype, fusible.shape)
            and not message.nothing
            and (partial is None or (message.scale == partial.like.scale and operation not in partial.here))
        )
        if not fits:
            self._split(fused)
            return None
        if partial is None:
            total = sum(one.fusible.flat.numel() for one in fused.members if one.fusible is not None)
            partial = fused.partial[source] = _Partial(torch.empty(total, dtype=message.dtype), message)
        start, end = fused.places[operation]
        return partial.data[start:end]

    def _count(self, operation: Operation, source: int) -> None:
        """A tensor has been put in its place; with the last one, a source has sent all."""
        fused: FusedOperation | None = operation.fused
        assert fused is not None
        stage, partial = fused.stage, fused.partial[source]
        assert stage is not None
        partial.here.add(operation)
        if len(partial.here) < len(fused.members):
            return
        del fused.partial[source]
        stage.take(source, _piece(partial.like, fused.name, 0, (partial.data.numel(),), partial.data))
        if stage.complete:
            self._lifecycle.make_ready(fused)

    def _forget(self, received: _Received) -> None:
        """Take a message out of the list of those that came early."""
        if not self._early:
            return
        kept = False
        for key in keys(runs_of(received.message)):
            known = self._early.get(key, ())
            left = [one for one in known if one is not received]
            kept = kept or len(left) < len(known)
            if left:
                self._early[key] = left
            else:
                self._early.pop(key, None)
        if kept:
            self._matcher.release(*received)


def _piece(like: Message, name: str, round_: int, shape: tuple[int, ...], data: torch.Tensor) -> Message:
    """A message that says of one tensor what another said of several."""
    return Message(
        Kind.DATA,
        like.op,
        name,
        round_,
        digest=like.digest,
        scale=like.scale,
        dtype=like.dtype,
        shape=shape,
        payload=Payload(data, data.numel()),
        where=Where.INLINE,
        nbytes=data.numel() * data.element_size(),
    )
