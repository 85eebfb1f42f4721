"""Small operations that were submitted together travel together: one message to each neighbour, one sum.

A call of four kilobytes costs its bookkeeping, not its bytes. What waits to begin when somebody drives, on the same
topology and in the same dtype, therefore becomes a :class:`Bundle`: its tensors are joined, sent and summed as one, and
cut apart again. The sum of a number does not depend on its neighbours in memory, so the bits are the same.

No agent has to agree with another on what is bundled. A bundle's name says what is in it. From a neighbour that has
bundled the same, it is summed where it lies; what others send, in other bundles or one by one, is put in its place
until everything is there. And whenever something does not fit, or does not come for a while, a bundle is taken apart
(its messages have been sent already): from there on each operation goes the ordinary way of matching, questions,
refusals and deadlines, so that nothing here needs to know of errors. Used under the engine's lock.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ..transport.wire import MAX_NAME, Kind, Message, Payload, Where
from .matching import WINDOW, Channel, disagreement
from .operation import MORE, Exchange, Operation, Stage, Steps
from .runs import MOST_OPERATIONS, Run, keys, name_of, runs_of

if TYPE_CHECKING:
    from .engine import Engine

MOST_BYTES = 1 << 20
PATIENCE = 0.1
"""Seconds after which a bundle that waits is taken apart, so that each operation asks for itself."""


class Family(Protocol):
    """Operations that differ in nothing but their tensors."""

    def alone(self, operation: Operation, small: Small) -> Steps[torch.Tensor]: ...

    def together(self, operation: Operation, smalls: list[Small]) -> Steps[list[torch.Tensor | Exception]]: ...


@dataclass(slots=True)
class Small:
    """What a small operation is about: a flat copy of the caller's tensor, and where its result goes."""

    flat: torch.Tensor
    shape: tuple[int, ...]
    out: torch.Tensor | None
    family: Family


class Bundle(Operation):
    """Several operations as one."""

    __slots__ = ("channel", "members", "partial", "places")

    def __init__(self, name: str, members: list[Operation]) -> None:
        super().__init__(members[0].op, name, 0, members[0].timeout)
        self.members = members
        self.channel = Channel(name)
        self.partial: dict[int, _Partial] = {}
        self.places: dict[Operation, tuple[int, int]] = {}  # where each tensor begins and ends
        at = 0
        for one in members:
            assert one.small is not None
            self.places[one] = (at, at := at + one.small.flat.numel())


@dataclass(slots=True)
class _Partial:
    """What one source has sent for a bundle, in other bundles or one by one."""

    data: torch.Tensor
    like: Message
    here: set[Operation] = field(default_factory=set)


class Parcel(NamedTuple):
    """A bundle of a neighbour that is cut apart once all of it is here."""

    source: int
    message: Message


class Bundles:
    """The bundles of one agent, its own and those that came."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending: deque[Operation] = deque()
        self._active: dict[str, Bundle] = {}
        self._early: dict[tuple[str, int], list[Parcel]] = {}  # by the operations that are in them
        self._coming: list[Parcel] = []  # to be unpacked once all of it is here
        self._unread: list[Channel] = []

    # Going out

    def add(self, operation: Operation) -> None:
        """Begin an operation with whatever else is submitted until somebody drives."""
        self._pending.append(operation)

    @property
    def waiting(self) -> bool:
        """Something has been submitted that has not begun."""
        return bool(self._pending)

    def start(self) -> None:
        """Begin what was submitted. Takes the lock itself: it computes."""
        engine = self._engine
        while True:
            with engine.lock:
                if not self._pending:
                    return
                name, members = self._take()
                bundle = self._make(name, members) if len(members) > 1 else None
            try:
                if bundle is not None:
                    engine.resume(bundle, None)
                    continue
                for operation in members:
                    engine.begin(operation)
            except BaseException as interrupt:
                with engine.lock:
                    for operation in members:
                        engine.fail(operation, interrupt)
                raise

    def _take(self) -> tuple[str, list[Operation]]:
        """The next operations that may go together, and the name of their bundle."""
        members: list[Operation] = []
        runs: list[Run] = []
        name, first, following = "", 0, -1  # the run that grows
        shape: tuple[int, ...] = ()
        nbytes = length = 0
        while self._pending:
            operation = self._pending[0]
            small = operation.small
            assert small is not None
            if operation.handle is None:  # it has failed meanwhile
                self._pending.popleft()
                continue
            goes_on = operation.round == following and operation.name == name and small.shape == shape
            nbytes += small.flat.numel() * small.flat.element_size()
            length += 0 if goes_on else len(json.dumps(operation.name)) + 32 + 12 * len(small.shape)
            if members:
                like = members[0].small
                assert like is not None
                full = nbytes > MOST_BYTES or length > MAX_NAME - 64 or len(members) == MOST_OPERATIONS
                if full or small.flat.dtype != like.flat.dtype or small.family != like.family:
                    break
            if not goes_on:
                if members:
                    runs.append(Run(name, first, following - first, shape))
                name, shape, first = operation.name, small.shape, operation.round
            following = operation.round + 1
            members.append(operation)
            self._pending.popleft()
        if members:
            runs.append(Run(name, first, following - first, shape))
        return name_of(runs), members

    def _make(self, name: str, members: list[Operation]) -> Bundle | None:
        """A bundle, unless that would only be taken apart."""
        self._unread = [channel for channel in self._unread if channel.unacknowledged]
        if len(self._unread) >= WINDOW:
            return None
        bundle = Bundle(name, members)
        self._active[name] = bundle
        smalls = []
        for one in members:
            one.bundle = bundle
            assert one.small is not None
            smalls.append(one.small)
        bundle.generator = smalls[0].family.together(bundle, smalls)
        return bundle

    def go_on(self, bundle: Bundle, item: Exchange | str | None, result: Any, error: BaseException | None) -> None:
        """Do what a bundle asked for when it stopped computing."""
        if bundle.error is not None:  # it was taken apart, or given up, meanwhile
            self._engine.close_generator(bundle)
            self._engine.release(bundle)
        elif item is MORE:
            bundle.waiting_more = True
        elif isinstance(item, Exchange):
            self._enter(bundle, item)
        else:
            self._end(bundle, error)
            for operation, one in zip(bundle.members, result or [None] * len(bundle.members), strict=True):
                if operation.handle is not None:
                    own = one if isinstance(one, Exception) else error
                    self._engine.settle(operation, None if own is not None else one, own)

    def _enter(self, bundle: Bundle, exchange: Exchange) -> None:
        engine = self._engine
        stage = bundle.stage = Stage(0, exchange, set(exchange.sources), {})
        self._take_early(bundle)
        if bundle.error is not None:
            return
        alive = engine.membership.view.alive
        if all(rank in alive for rank in stage.needs):
            engine.outbox.post(bundle.channel, bundle, stage)
        if bundle.channel.unacknowledged:
            self._unread.append(bundle.channel)
        if not stage.posted:
            self.take_apart(bundle)
        elif stage.complete:
            engine.ready.append(bundle)
        else:
            engine.next_check = min(engine.next_check, time.monotonic() + PATIENCE)

    def _take_early(self, bundle: Bundle) -> None:
        """Take up what neighbours have sent for the operations of a bundle before it began."""
        rounds = self._engine.rounds
        for operation in bundle.members:
            for parcel in self._came_early(operation):
                if parcel.message.name == bundle.name:
                    self._forget(parcel)
                    self._match(bundle, parcel)
                else:
                    self._unpack(parcel)
                if bundle.error is not None:  # it has been taken apart
                    return
            if rounds.has_news(operation):
                for source, message in rounds.came_early(operation, 0):
                    self.put(operation, source, message)
            if bundle.error is not None:
                return

    def _end(self, bundle: Bundle, error: BaseException | None) -> None:
        """Give back what a bundle holds."""
        self._active.pop(bundle.name, None)
        bundle.error = error
        stage, bundle.stage = bundle.stage, None
        for source, message in stage.arrived.items() if stage is not None else ():
            self._engine.outbox.done_with(source, message)
        for lease in bundle.leases:
            lease.release()
        bundle.leases = []
        for operation in bundle.members:
            operation.bundle = None

    def take_apart(self, bundle: Bundle) -> None:
        """Let every operation of a bundle go its own way. What they send has been sent."""
        stage = bundle.stage
        arrived, posted = (stage.arrived, stage.posted) if stage is not None else ({}, False)
        if stage is not None:
            stage.arrived = {}
        partial, bundle.partial = bundle.partial, {}
        self._end(bundle, _TakenApart())
        self._engine.close_generator(bundle)
        # What has come is put where the operations will look for it: its sender may have left, which is nothing to
        # somebody who has its tensor.
        for source, message in arrived.items():
            self._unpack(Parcel(source, message))
        for source, part in partial.items():
            for one in part.here:
                assert one.small is not None
                data = part.data[slice(*bundle.places[one])]
                self._engine.hearing.on_message(source, _piece(part.like, one.name, one.round, one.small.shape, data))
        for operation in bundle.members:
            if operation.handle is not None:
                operation.sent = posted
                self._engine.begin(operation)

    def take_apart_without(self, rank: int) -> None:
        """An agent has left: what waits for it has to say so for itself."""
        for bundle in list(self._active.values()):
            if bundle.stage is not None and rank in bundle.stage.missing:
                self.take_apart(bundle)

    def fail(self, bundle: Bundle, error: BaseException) -> None:
        """End a bundle and all operations in it."""
        self._end(bundle, error)
        self._engine.close_generator(bundle)
        for operation in bundle.members:
            self._engine.fail(operation, error)

    def give_up(self, error: BaseException) -> None:
        """The operations have been failed; forget what they shared."""
        for bundle in list(self._active.values()):
            self._end(bundle, error)
            self._engine.close_generator(bundle)

    def give_up_early(self) -> None:
        """Nobody will begin what neighbours have sent bundles for; they may have their memory back."""
        for parcel in self._all_early():
            self._engine.rounds.release(*parcel)
            self._engine.outbox.done_with(*parcel)
        self._early.clear()

    def forget(self, rank: int) -> None:
        """An agent is lost: drop what came from it."""
        for parcel in self._all_early():
            if parcel.source == rank:
                self._forget(parcel)
        self._coming = [one for one in self._coming if one.source != rank]

    def _all_early(self) -> list[Parcel]:
        return list({id(parcel): parcel for parcels in self._early.values() for parcel in parcels}.values())

    def check(self, now: float) -> float:
        """Take apart what has waited long enough. Returns when to come back."""
        following = float("inf")
        for bundle in list(self._active.values()):
            if bundle.stage is None or not bundle.stage.missing:
                continue
            due = bundle.stage.started + PATIENCE
            if now >= due:
                self.take_apart(bundle)
            else:
                following = min(following, due)
        return following

    # Coming in

    def came(self, source: int, message: Message) -> None:
        """A bundle from a neighbour."""
        parcel = Parcel(source, message)
        bundle = self._active.get(message.name)
        if bundle is not None and bundle.stage is not None:
            self._match(bundle, parcel)
            if bundle.error is None and bundle.stage.complete:
                self._engine.ready.append(bundle)
            return
        runs = runs_of(message)
        if not runs:
            what = "a bundle of operations that does not add up"
            self._engine.outbox.refuse(source, message, f"rank {self._engine.rank} refused it: {what}")
            return
        if any(self._engine.rounds.has_begun(*key) for key in keys(runs)):
            self._unpack(parcel)
            return
        self._engine.rounds.charge(source, message)
        for key in keys(runs):
            self._early.setdefault(key, []).append(parcel)
        if self._engine.closing:
            self.give_up_early()

    def _match(self, bundle: Bundle, parcel: Parcel) -> None:
        source, message = parcel
        stage = bundle.stage
        assert stage is not None
        if source in bundle.partial or disagreement(bundle, stage, source, message, self._engine.rank):
            self.take_apart(bundle)
            self._unpack(parcel)
            return
        stage.missing.discard(source)
        stage.arrived[source] = message
        if message.payload is not None and not message.payload.complete:
            message.payload.owner = bundle

    def put(self, operation: Operation, source: int, message: Message) -> None:
        """A neighbour has sent by itself what goes into a bundle here."""
        assert message.payload is not None
        if not message.payload.complete and operation.bundle is not None:  # it cannot be put in its place yet
            self.take_apart(operation.bundle)
        place = self._place(operation, source, message, message.shape) if message.payload.complete else None
        if place is None:
            self._engine.hearing.on_message(source, message)
            return
        place.copy_(message.payload.data)
        self._engine.outbox.done_with(source, message)
        self._count(operation, source)

    def begins(self, operation: Operation) -> None:
        """An operation begins by itself; bundles that hold a message for it are of no use as they are."""
        if self._early:
            for parcel in self._came_early(operation):
                self._unpack(parcel)

    def _came_early(self, operation: Operation) -> Iterator[Parcel]:
        """The bundles that hold a message for an operation. What is done with one may have dealt with others."""
        while parcels := self._early.get((operation.name, operation.round)):
            yield parcels[0]

    def arrived(self, parcel: Parcel) -> None:
        """More of a bundle that is to be unpacked is here."""
        payload = parcel.message.payload
        if payload is not None and payload.complete:
            self._coming = [one for one in self._coming if one is not parcel]
            self._unpack(parcel)

    def is_coming(self, source: int, key: tuple[str, int]) -> bool:
        """A message for an operation is on its way from a neighbour, in a bundle of which not all is here."""
        return any(one.source == source and key in keys(runs_of(one.message)) for one in self._coming)

    def _unpack(self, parcel: Parcel) -> None:
        """Put what is in a bundle of a neighbour into bundles of ours, or make single messages of it."""
        self._forget(parcel)
        source, message = parcel
        payload = message.payload
        assert payload is not None
        if not payload.complete:
            payload.owner = partial(self.arrived, parcel)
            self._coming.append(parcel)
            return
        at = 0
        for name, first, length, shape in runs_of(message):
            numel = math.prod(shape)
            for round_ in range(first, first + length):
                part = payload.data[at : at + numel]
                at += numel
                operation = self._engine.rounds.active(name, round_)
                place = None if operation is None else self._place(operation, source, message, shape)
                if operation is not None and place is not None:
                    place.copy_(part)
                    self._count(operation, source)
                else:
                    self._engine.hearing.on_message(source, _piece(message, name, round_, shape, part.clone()))
        self._engine.outbox.done_with(source, message)

    def _place(
        self, operation: Operation, source: int, message: Message, shape: tuple[int, ...]
    ) -> torch.Tensor | None:
        """Where in a bundle a tensor from a neighbour goes. Where it does not fit, there is no bundle any more."""
        bundle, small = operation.bundle, operation.small
        if bundle is None or small is None:
            return None
        stage, partial = bundle.stage, bundle.partial.get(source)
        fits = (
            stage is not None
            and source in stage.missing
            and (message.op, message.digest) == (operation.op, stage.exchange.digest)
            and (message.dtype, shape) == (small.flat.dtype, small.shape)
            and not message.nothing
            and (partial is None or (message.scale == partial.like.scale and operation not in partial.here))
        )
        if not fits:
            self.take_apart(bundle)
            return None
        if partial is None:
            total = sum(one.small.flat.numel() for one in bundle.members if one.small is not None)
            partial = bundle.partial[source] = _Partial(torch.empty(total, dtype=message.dtype), message)
        start, end = bundle.places[operation]
        return partial.data[start:end]

    def _count(self, operation: Operation, source: int) -> None:
        """A tensor has been put in its place; with the last one, a source has sent all."""
        bundle = operation.bundle
        assert bundle is not None
        stage, partial = bundle.stage, bundle.partial[source]
        assert stage is not None
        partial.here.add(operation)
        if len(partial.here) < len(bundle.members):
            return
        del bundle.partial[source]
        shape = (partial.data.numel(),)
        stage.missing.discard(source)
        stage.arrived[source] = _piece(partial.like, bundle.name, 0, shape, partial.data)
        if stage.complete:
            self._engine.ready.append(bundle)

    def _forget(self, parcel: Parcel) -> None:
        """Take a bundle out of the list of those that came early."""
        if not self._early:
            return
        kept = False
        for key in keys(runs_of(parcel.message)):
            known = self._early.get(key, ())
            left = [one for one in known if one is not parcel]
            kept = kept or len(left) < len(known)
            if left:
                self._early[key] = left
            else:
                self._early.pop(key, None)
        if kept:
            self._engine.rounds.release(*parcel)


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


class _TakenApart(Exception):
    """What ended a bundle whose operations go on."""
