"""Fuses small operations that are submitted together: one message to each neighbour, and one sum.

The cost of a call of four kilobytes is its bookkeeping, not its bytes. Operations that wait to begin when a thread
drives, and that differ only in their tensors, therefore become a :class:`FusedOperation`. Their tensors are joined,
sent and summed as one, and split again. The sum of an element does not depend on its neighbours in memory, so the
results are bitwise the same.

Agents do not have to agree on what is fused. The name of a fused operation lists its members. A message of a neighbour
that has fused the same members is summed in place. Tensors of neighbours that have fused differently, or not at all,
are copied to their places until all have arrived. If something does not match, or does not arrive for a while, the
fused operation is split. Each member then begins by itself: it receives what has arrived for its stages, does not
repeat sends, and follows the ordinary matching, probes, refusals and deadlines. So fusion needs no error handling of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from .. import clock
from ..transport.messages import COMMON, CONFIRM, Message, Parts
from .fused_operation import (
    MOST_BYTES,
    FusedOperation,
    Partial,
    UnpackedMessage,
    fusible,
    keys,
    message_part,
    runs_of,
    take_fusible,
)
from .lifecycle import Lifecycle
from .matching import Channel, disagreement
from .operation import Operation
from .shared_parts import SharedParts
from .stage import MORE, Exchange, Stage, Yields

MOST_UNREAD = 16
MOST_UNREAD_BYTES = 4 * MOST_BYTES
"""Bytes of unacknowledged fused operations. Above it, and above :data:`MOST_UNREAD` operations, no more are fused."""
SPLIT_AFTER = 0.1
"""Seconds after which a waiting fused operation is split, so that each of its members sends probes of its own."""


class _Split(Exception):
    """The reason for the end of a fused operation whose members continue."""


class Fusion:
    """The fused operations of one agent, and the fused messages that have arrived. Used under the engine's lock.

    Args:
        deliver: Takes a message as if it had arrived by itself.
    """

    def __init__(self, parts: SharedParts, lifecycle: Lifecycle, deliver: Callable[[int, Message], None]) -> None:
        self._active: dict[str, FusedOperation] = {}
        # By name and round of each member. The lifecycle asks for them only if there are some.
        self._early: dict[tuple[str, int], list[UnpackedMessage]] = lifecycle.fused_early
        self._coming: list[UnpackedMessage] = []  # to be unpacked when they have arrived completely
        self._unread: dict[Channel, int] = {}  # bytes
        self._rank = parts.rank
        self._lock = parts.progress.lock
        self._progress = parts.progress
        self._matcher = parts.matcher
        self._membership = parts.membership
        self._sender = parts.sender
        self._lifecycle = lifecycle
        self._events = parts.events
        self._deliver = deliver

    # Outgoing

    def begin(self) -> None:
        """Begin submitted operations, fused if possible. Takes the lock itself, because it computes."""
        while self._lifecycle.unbegun:
            members: list[Operation] = []
            try:
                with self._lock:
                    name = take_fusible(self._lifecycle.unbegun, members)
                    fused = self._fuse(name, members) if len(members) > 1 else None
                if fused is not None:
                    self._lifecycle.resume(fused, None)
                    continue
                for operation in members:
                    self._lifecycle.begin(operation)
            except BaseException as interrupt:
                with self._lock:
                    # The members are in no queue any more. Unless they fail here, their callers wait until the
                    # deadline.
                    for operation in members:
                        self._lifecycle.fail(operation.fused or operation, interrupt)
                raise

    def _fuse(self, name: str, members: list[Operation]) -> FusedOperation | None:
        """Create one operation of several, unless it would have to be split at once."""
        self._unread = {channel: nbytes for channel, nbytes in self._unread.items() if channel.unacknowledged}
        if len(self._unread) >= MOST_UNREAD or sum(self._unread.values()) >= MOST_UNREAD_BYTES:
            return None  # receivers are behind: unfused, each operation defers its sends
        fused = FusedOperation(name, members, self)
        for member in members:
            # A member has no stage of its own. Without this, dispatch would keep each tensor sent for it as an early
            # one.
            member.fused = fused
        # The generator runs without the lock. If another thread aborts now, give_up() has to find this operation, or it
        # would still send its message.
        self._active[name] = fused
        if self._events.active:
            self._events.emit("fused", fused.op, name, 0)
        parts = [fusible(member) for member in members]
        fused.generator = parts[0].family.fused_steps(fused, parts)
        return fused

    def proceed(self, fused: FusedOperation, item: Yields | None, result: Any, error: BaseException | None) -> None:
        """Handle the value that a fused operation has yielded, or its end."""
        if fused.error is not None:  # it was split, or failed, while its generator ran
            fused.drop_generator()
            # The generator may have published memory since _end() released the rest; nothing else would free it.
            fused.release()
        elif item is MORE:
            fused.waiting_more = True
        elif isinstance(item, Exchange):
            self._enter(fused, item)
        else:
            self._end(fused, error)
            for operation, member_result in zip(fused.members, result or [None] * len(fused.members), strict=True):
                self._conclude(operation, member_result, error)

    def _conclude(self, operation: Operation, result: Any, error: BaseException | None) -> None:
        """End a member, or let it wait until the destinations of the fused operation have confirmed."""
        own = result if isinstance(result, Exception) else error
        if operation.handle is None:  # it has failed since
            return
        if own is None and operation.unconfirmed:
            self._lifecycle.await_confirmation(operation, result)
        else:
            self._lifecycle.settle(operation, None if own is not None else result, own)

    def _enter(self, fused: FusedOperation, exchange: Exchange) -> None:
        if fused.stage is not None:
            # A split restarts the members at their first stage, so they need the messages of all earlier stages again.
            fused.had += [UnpackedMessage(source, message) for source, message in fused.stage.arrived.items()]
        number = fused.next_stage if exchange.stage is None else exchange.stage
        fused.next_stage = number + 1
        stage = fused.stage = Stage(number, exchange, set(exchange.sources), {})
        # Early messages first, as in Lifecycle._enter(). If one splits the operation, no receiver has to unpack a
        # message.
        self._take_early(fused, number)
        if fused.error is not None:
            return
        if stage.needs.issubset(self._membership.view.alive):
            self._sender.post(fused.channel, fused, stage)
        if stage.posted:
            fused.stages_sent |= {number}
        if fused.channel.unacknowledged:
            self._unread[fused.channel] = fused.nbytes
        if not stage.posted:  # an agent is lost: each member reports it by its own name and round
            self._split(fused)
        elif stage.complete:
            self._lifecycle.make_ready(fused)
        else:
            # The members have no stage, so the watchdog sends no probe for them. Without a check by then, nothing would
            # split the operation in time.
            self._progress.check_by(clock.monotonic() + SPLIT_AFTER)

    def _take_early(self, fused: FusedOperation, stage: int) -> None:
        """Take messages that neighbours sent for a stage of the members before it began here."""
        for operation in fused.members:
            for received in self._early_messages(operation, stage):
                if received.message.name == fused.name:
                    # Forgotten first: _match() may split the operation, and its members would then unpack the message a
                    # second time.
                    self._forget(received)
                    self._match(fused, received)
                else:
                    self._unpack(received)
                if fused.error is not None:  # it has been split
                    return
            if self._matcher.has_early(operation):
                for source, message in self._matcher.early_messages(operation, stage):
                    self.put(operation, source, message)
                    if fused.error is not None:
                        return

    def _end(self, fused: FusedOperation, error: BaseException | None) -> None:
        """Free the resources of a fused operation."""
        self._active.pop(fused.name, None)
        fused.error = error
        if self._events.active:
            self._events.emit("parted", fused.op, fused.name, 0, detail="" if error is None else str(error))
        stage, fused.stage = fused.stage, None
        arrived = stage.arrived.items() if stage is not None else ()
        for source, message in (*fused.had, *arrived):
            self._sender.acknowledge(source, message)
        fused.had = []
        fused.release()
        for operation in fused.members:
            # Otherwise put() would keep later tensors for a stage of the fused operation, which never begins.
            operation.fused = None

    def _split(self, fused: FusedOperation) -> None:
        """Let every member begin by itself. It receives the messages that have arrived, and does not send again."""
        stage = fused.stage
        # Take the messages out before _end(), which acknowledges those it finds: their senders could then reuse the
        # memory.
        had, fused.had = fused.had, []
        if stage is not None:
            had += [UnpackedMessage(source, message) for source, message in stage.arrived.items()]
            stage.arrived = {}
        incomplete, fused.partial = fused.partial, {}
        self._end(fused, _Split("each goes on by itself"))
        fused.drop_generator()
        # Deliver the messages before the members begin: a member then does not need a sender that has shut down since.
        for received in had:
            self._unpack(received)
        for source, part in incomplete.items():
            for member in part.here:
                data = part.data if part.common else part.data[slice(*fused.places[member])]
                shape = part.like.shape if part.common else fusible(member).shape
                # These tensors were acknowledged when they were copied to their places, so the messages ask for no
                # second answer.
                self._deliver(source, message_part(part.like, member.name, member.round, shape, data))
        for operation in fused.members:
            if operation.handle is not None:
                # A receiver that has matched the fused message would refuse the same tensor sent again.
                operation.stages_sent = fused.stages_sent
                self._lifecycle.begin(operation)

    def split_all(self) -> None:
        """Split all fused operations, and begin without fusion the operations that have not begun."""
        for fused in list(self._active.values()):
            if fused.stage is not None:
                self._split(fused)
        while self._lifecycle.unbegun:
            self._lifecycle.begin(self._lifecycle.unbegun.popleft())

    def split_those_without(self, rank: int) -> None:
        """Split the operations that wait for a lost or departed agent: each member has to report it by itself."""
        for fused in list(self._active.values()):
            if fused.stage is not None and rank in fused.stage.missing:
                self._split(fused)

    def fail(self, fused: FusedOperation, error: BaseException) -> None:
        """End a fused operation and all its members."""
        self._end(fused, error)
        fused.drop_generator()
        for operation in fused.members:
            self._lifecycle.fail(operation, error)

    def give_up(self, error: BaseException) -> None:
        """Drop the shared state of all fused operations; their members have failed."""
        for fused in list(self._active.values()):
            self._end(fused, error)
            fused.drop_generator()

    def give_up_early(self) -> None:
        """Acknowledge fused messages for operations that will not begin here: their senders may reuse the memory."""
        for received in self._all_early():
            self._matcher.release(*received)
            self._sender.acknowledge(*received)
        self._early.clear()

    def forget(self, rank: int) -> None:
        """Drop the messages of a lost agent."""
        for received in self._all_early():
            if received.source == rank:
                self._forget(received)
        self._coming = [incomplete for incomplete in self._coming if incomplete.source != rank]

    def _all_early(self) -> list[UnpackedMessage]:
        return list({id(received): received for early in self._early.values() for received in early}.values())

    def check(self, now: float) -> float:
        """Split operations that have waited for :data:`SPLIT_AFTER`. Returns when to check again."""
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

    # Incoming

    def on_fused_message(self, source: int, message: Message) -> None:
        """Take a fused message of a neighbour."""
        received = UnpackedMessage(source, message)
        fused = self._active.get(message.name)
        # A message for a later stage waits below. One for an earlier stage is a mismatch, which the members then
        # report.
        if fused is not None and fused.stage is not None and message.stage <= fused.stage.number:
            self._match(fused, received)
            if fused.error is None and fused.stage.complete:
                self._lifecycle.make_ready(fused)
            return
        runs = runs_of(message)
        if not runs:
            self._sender.refuse(source, message, f"rank {self._rank} refused it: fused operations that do not add up")
            return
        # A member that has begun takes early messages only when it enters a stage, which may not happen again.
        if fused is None and any(self._matcher.has_begun(*key) for key in keys(runs)):
            self._unpack(received)
            return
        self._matcher.charge(source, message)
        for key in keys(runs):
            self._early.setdefault(key, []).append(received)
        # No call of this agent takes it any more. Unanswered, its sender would wait, perhaps in its own shutdown.
        if self._lifecycle.gate.closing:
            self.give_up_early()

    def _match(self, fused: FusedOperation, received: UnpackedMessage) -> None:
        source, message = received
        stage = fused.stage
        assert stage is not None
        # If a part of the message has arrived by itself and is in its place, taking the whole message would count it
        # twice.
        other = message.stage != stage.number or source in fused.partial
        if other or disagreement(fused, stage, source, message, self._rank):
            self._split(fused)
            self._unpack(received)
        else:
            self._lifecycle.accept(fused, stage, source, message)

    def put(self, operation: Operation, source: int, message: Message) -> None:
        """Take a tensor that a neighbour has sent by itself for a member of a fused operation."""
        assert message.payload is not None
        fused: FusedOperation | None = operation.fused
        if _is_ahead(fused, message):
            self._matcher.keep(source, message)
            return
        if not message.payload.complete and fused is not None:  # its place can only be filled at once
            self._split(fused)
        if message.payload.complete and self._place(operation, source, message, message.shape, message.payload.data):
            # Only after the copy: from the acknowledgement on, the sender may overwrite the tensor.
            self._sender.acknowledge(source, message)
        else:
            self._deliver(source, message)

    def unpack_for(self, operation: Operation) -> None:
        """Unpack the fused messages for an operation that begins a stage by itself."""
        for received in self._early_messages(operation):
            self._unpack(received)

    def _early_messages(self, operation: Operation, stage: int | None = None) -> Iterator[UnpackedMessage]:
        """Yield the early fused messages that contain an operation, up to a stage of it.

        The caller has to remove each one; handling may remove others.
        """
        key = operation.name, operation.round
        while early := [
            received for received in self._early.get(key, ()) if stage is None or received.message.stage <= stage
        ]:
            yield early[0]

    def _on_more_arrived(self, received: UnpackedMessage) -> None:
        """Unpack a fused message if the piece that has arrived was its last."""
        payload = received.message.payload
        if payload is not None and payload.complete:
            self._coming = [incomplete for incomplete in self._coming if incomplete is not received]
            self._unpack(received)

    def is_coming(self, source: int, key: tuple[str, int]) -> bool:
        """Whether a fused message with a part for an operation has arrived only in part."""
        return any(
            incomplete.source == source and key in keys(runs_of(incomplete.message)) for incomplete in self._coming
        )

    def _unpack(self, received: UnpackedMessage) -> None:
        """Put the tensors of a fused message into fused operations here, or deliver them as single messages."""
        self._forget(received)
        source, message = received
        payload = message.payload
        assert payload is not None
        if not payload.complete:
            payload.on_more = partial(self._on_more_arrived, received)
            self._coming.append(received)
            return
        runs = runs_of(message)
        # A sender that wants confirmation receives one for each part.
        parts = Parts(sum(run.length for run in runs)) if message.flags & CONFIRM else None
        at, common = 0, bool(message.flags & COMMON)
        for_all = payload.data.clone() if common else None  # a copy for each member might exceed the memory
        for name, first, length, of_one in runs:
            shape = message.shape if common else of_one
            numel = math.prod(shape)
            for round_ in range(first, first + length):
                data = payload.data[at : at + numel]
                at += 0 if common else numel
                # Looked up for each part: the delivery of an earlier part may have ended this operation or split the
                # fused one.
                operation = self._matcher.active_operation(name, round_)
                if operation is not None and self._place(operation, source, message, shape, data):
                    if parts is not None:
                        self._sender.acknowledge(source, message_part(message, name, round_, shape, data, parts))
                else:
                    # The message may be kept after the acknowledgement, which lets the sender reuse the payload's
                    # memory.
                    own = data.clone() if for_all is None else for_all
                    self._deliver(source, message_part(message, name, round_, shape, own, parts))
        # Only after the loop, which reads the payload: the sender may overwrite it from the acknowledgement on.
        if parts is None:
            self._sender.acknowledge(source, message)

    def _place(
        self, operation: Operation, source: int, message: Message, shape: tuple[int, ...], data: torch.Tensor
    ) -> bool:
        """Copy a neighbour's tensor to its place in a fused operation.

        False if there is no such place. If the tensor does not match, the fused operation is split.
        """
        fused: FusedOperation | None = operation.fused
        if fused is None or _is_ahead(fused, message):
            return False
        stage, incomplete, like = fused.stage, fused.partial.get(source), fusible(operation)
        assert stage is not None
        common = stage.exchange.coordinates
        wanted = (stage.exchange.dtype, shape) if common else (like.flat.dtype, like.shape)
        # Each clause protects the joined tensor. A message of another stage, or of a source whose message is complete,
        # is no part of the current sum. Op, digest, dtype, shape and layout must agree, as in disagreement(). "Nothing"
        # has no data to copy. The joined message has one scale, and a second tensor of a member would count twice. A
        # common payload stands for all members, so all must have sent the same one.
        fits = (
            message.stage == stage.number
            and source in stage.missing
            and (message.op, message.digest) == (operation.op, stage.exchange.digest)
            and (message.dtype, shape) == wanted
            and bool(message.flags & COMMON) == common
            and not message.nothing
            and (incomplete is None or (message.scale == incomplete.like.scale and operation not in incomplete.here))
            and (incomplete is None or not common or torch.equal(incomplete.data, data))
        )
        if not fits:
            self._split(fused)
            return False
        if incomplete is None:
            total = data.numel() if common else fused.places[fused.members[-1]][1]
            incomplete = fused.partial[source] = Partial(torch.empty(total, dtype=message.dtype, device="cpu"), message)
        place = incomplete.data if common else incomplete.data[slice(*fused.places[operation])]
        place.copy_(data)
        self._count(fused, stage, incomplete, operation, source)
        return True

    def _count(self, fused: FusedOperation, stage: Stage, partial: Partial, operation: Operation, source: int) -> None:
        """Record that a member's tensor is in its place. With the last one, the source's message is complete."""
        partial.here.add(operation)
        if len(partial.here) < len(fused.members):
            return
        del fused.partial[source]
        # This message asks for no answer, because each part has been acknowledged by itself.
        stage.take(source, message_part(partial.like, fused.name, 0, (partial.data.numel(),), partial.data))
        if stage.complete:
            self._lifecycle.make_ready(fused)

    def _forget(self, received: UnpackedMessage) -> None:
        """Remove a message from the early ones."""
        if not self._early:
            return
        kept = False
        for key in keys(runs_of(received.message)):
            early = self._early.get(key, ())
            remaining = [other for other in early if other is not received]
            kept = kept or len(remaining) < len(early)
            if remaining:
                self._early[key] = remaining
            else:
                self._early.pop(key, None)
        # Only kept messages were charged. Released without a charge, a message would give its sender too large a quota.
        if kept:
            self._matcher.release(*received)


def _is_ahead(fused: FusedOperation | None, message: Message) -> bool:
    """Whether a message is for a stage that a fused operation has not reached."""
    return fused is not None and (fused.stage is None or message.stage > fused.stage.number)
