"""Moves every operation of one agent forward.

The problem: many operations in flight, submitted by several threads in any order, matched with those of other agents
without a coordinator; no thread may spin, a call of four bytes must not pay for a thread switch, and nothing may wait
for ever.

How it works. An operation is a generator (``operation.py``). The engine resumes it when the messages of its stage have
come (``matching.py`` says which those are) and posts what it wants sent. What nobody here will ever ask for is
refused, and both sides raise. An agent that has waited a moment for a message asks the sender whether it will come
(ASK), and one that will not send denies it (DENY): that finds a disagreement in milliseconds that would otherwise end
in the deadline, and costs nothing in a round where everybody comes. Who drives all this is in ``wheel.py``; who is
gone, in ``departures.py``.

Rejected: asyncio (a callback costs more than a small operation has), a thread for each operation, and doing all in one
progress thread (two thread switches for each blocking call, under one interpreter lock).
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..errors import Mismatch, NotInitialized, PeerLost, ShoalError
from ..transport.link import Lease, Published
from ..transport.memory import Arena, ResultPool
from ..transport.poller import Poller
from ..transport.router import Router
from ..transport.wire import Kind, Message, Payload
from .departures import Departure, Departures
from .events import Events
from .matching import Channel, Fate, Rounds, disagreement, unexpected
from .membership import Membership
from .operation import MORE, Arrived, Exchange, Handle, Operation, Stage, Steps, describe
from .outbox import Outbox
from .patience import ASK_AFTER, overdue, remind
from .wheel import Wheel

log = logging.getLogger("shoal")
T = TypeVar("T")

HANG_UP_SECONDS = 1.0
"""How long an agent that leaves waits for the others to hang up."""
PUBLISH_BYTES = 1 << 14
"""Tensors larger than this are published in shared memory; smaller ones travel inside the message."""


class Engine:
    """The exchange of one agent with the others."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.events = Events()
        self.membership = Membership(size)
        self.arena = Arena()
        self.pool = ResultPool()
        self.poller = Poller()
        self.wheel = Wheel(self, self.poller, f"shoal-{rank}")
        self.lock = self.wheel.lock
        self.router = Router(rank, self.poller, self, self.arena, self.pool)
        self.next_check = float("inf")
        self._rounds = Rounds()
        self._departures = Departures(rank, self.membership, self.router)
        self._outbox = Outbox(rank, self.router, self.membership, self.events, self.on_closed)
        self._ready: deque[Operation] = deque()
        self._callbacks: deque[tuple[Callable[[Handle[Any]], None], Handle[Any]]] = deque()
        self._refused: ShoalError | None = None  # a refusal of a round that had already ended here
        self._ended: ShoalError | None = None  # why no operation is possible any more
        self._deaf = False
        self._closing = False

    def start(self) -> None:
        self.wheel.start()

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensors sent to others so far."""
        return self._outbox.bytes_sent

    # Submitting

    def submit(
        self,
        op: str,
        name: str,
        steps: Callable[[Operation], Steps[T]],
        timeout: float | None = None,
        alone: bool = True,
    ) -> Handle[T]:
        """Begin an operation.

        Args:
            op: What is called, for matching and for messages.
            name: What it is matched by. Names beginning with ``~`` are Shoal's own.
            steps: Makes the generator of the operation. It runs in the caller's thread until its first exchange.
            timeout: Seconds until :class:`~shoal.DeadlineExceeded`.
            alone: Refuse a second operation under the same name while one is in flight.
        """
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout={timeout}: it must be a positive number of seconds")
        with self.lock:
            self._check_open(op)
            operation = self._rounds.begin(op, name, self.timeout if timeout is None else timeout, alone)
            handle: Handle[T] = Handle(self, operation)
            operation.handle = handle
            self.next_check = min(self.next_check, operation.deadline)
        if self.events.active:
            self.events.emit("submitted", op, name, operation.round)
        operation.generator = steps(operation)
        self._resume(operation, None)
        with self.lock:
            self.wheel.submitted()
        if self._callbacks:
            self.after()
        return handle

    def _check_open(self, op: str) -> None:
        if self._closing:
            raise NotInitialized(f"{op}: this agent has shut down; call shoal.init() first")
        if self._ended is not None:
            raise type(self._ended)(f"{op}: {self._ended}", self._ended.ranks)
        if self._refused is not None:
            refused, self._refused = self._refused, None
            raise refused

    def publish(self, operation: Operation, tensor: torch.Tensor) -> Published:
        """Copy a tensor to where other agents can read it, flat, until they all have and the operation has ended."""
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes <= PUBLISH_BYTES and tensor.is_cpu:
            return Published(tensor.detach().clone(memory_format=torch.contiguous_format).view(-1))
        region = self.arena.allocate(nbytes)
        lease = Lease(self.arena, region)
        operation.leases.append(lease)
        data = region.as_tensor(tensor.dtype, tensor.numel())
        data.view(tensor.shape).copy_(tensor.detach())
        return Published(data, region, lease)

    # The life of an operation

    def _resume(self, operation: Operation, arrived: Arrived | None) -> None:
        """Run an operation to its next exchange, without the lock: it may compute."""
        generator = operation.generator
        assert generator is not None
        start = time.perf_counter_ns() if self.events.active else 0
        item: Exchange | str | None = None
        result, error = None, None
        try:
            item = generator.send(arrived) if arrived is not None else next(generator)
        except StopIteration as stop:
            result = stop.value
        except BaseException as caught:
            error = caught
        if start and arrived is not None:
            self.events.emit("summed", operation.op, operation.name, operation.round, start)
        try:
            with self.lock:
                self._go_on(operation, item, result, error)
        except BaseException as interrupt:
            with self.lock:
                self._fail(operation, interrupt)
            raise
        if error is not None and not isinstance(error, Exception):
            raise error

    def _go_on(
        self, operation: Operation, item: Exchange | str | None, result: Any, error: BaseException | None
    ) -> None:
        """Do what an operation asked for when it stopped computing."""
        if operation.error is not None:  # it was failed meanwhile
            self._close_generator(operation)
        elif item is MORE:
            operation.waiting_more = True
        elif isinstance(item, Exchange):
            self._enter(operation, item)
        elif error is None and operation.unconfirmed:
            operation.outcome = (result,)
            self._leave_stage(operation)
            if self._rounds.has_late(operation):
                self._settle(operation, None, None)
        else:
            self._settle(operation, result, error)

    def _enter(self, operation: Operation, exchange: Exchange) -> None:
        """Begin a stage: take what came early, then send."""
        self._leave_stage(operation)
        number = operation.next_stage if exchange.stage is None else exchange.stage
        stage = Stage(number, exchange, set(exchange.sources), {})
        operation.stage = stage
        operation.next_stage = number + 1
        for source, message in self._rounds.came_early(operation, stage):
            self._match(operation, stage, source, message)
        view = self.membership.view
        gone = [rank for rank in stage.needs if rank not in view.alive] if view.epoch else []
        if gone or self._ended is not None:
            self._fail(operation, self._ended or self._miss(operation, gone))
        if operation.error is not None:
            return
        for source in self._rounds.asked_early(operation, stage):
            if not stage.sends_to(source):
                self._outbox.deny(source, operation, number)
        channel = self._rounds.channel(operation)
        if channel.deferred or not channel.may_send(operation, stage):
            channel.deferred.append((operation, stage))
        else:
            self._outbox.post(channel, operation, stage)
        if stage.complete:
            self._ready.append(operation)
        else:
            self.next_check = min(self.next_check, time.monotonic() + ASK_AFTER)

    def _leave_stage(self, operation: Operation) -> None:
        """The operation is done with the messages of its stage: their senders may have their memory back."""
        stage = operation.stage
        if stage is None:
            return
        for source, message in stage.arrived.items():
            self._outbox.done_with(source, message)
        stage.arrived = {}
        operation.stage = None

    def _settle(self, operation: Operation, result: Any, error: BaseException | None) -> None:
        """End an operation, with a result or an error."""
        operation.error = error
        ended_well = error is None
        late, asks = self._rounds.end(operation, error is not None)
        self._leave_stage(operation)
        for lease in operation.leases:
            lease.release()
        operation.leases = []
        for source, message in late:
            if ended_well:
                error = operation.error = self._refuse(source, message, unexpected(source, self.rank))
            else:
                self._outbox.done_with(source, message)
        for number, source in asks:
            self._outbox.deny(source, operation, number)
        self._send_deferred(self._rounds.channel(operation))
        handle, operation.handle = operation.handle, None  # or the pair would keep the result until a collection
        assert handle is not None
        callbacks = handle.end(result, error)
        self._callbacks.extend((callback, handle) for callback in callbacks)
        self.wheel.notify()
        if self.events.active:
            kind, detail = ("finished", "") if error is None else ("failed", f"{type(error).__name__}: {error}")
            self.events.emit(kind, operation.op, operation.name, operation.round, detail=detail)

    def _fail(self, operation: Operation, error: BaseException) -> None:
        """End an operation from outside. Its generator is closed by whoever runs it, or here if nobody does."""
        if operation.handle is not None:
            self._settle(operation, None, error)
            self._close_generator(operation)

    @staticmethod
    def _close_generator(operation: Operation) -> None:
        try:
            if operation.generator is not None:
                operation.generator.close()
        except ValueError:
            pass  # it is running; whoever runs it sees the error next

    def _send_deferred(self, channel: Channel) -> None:
        while channel.deferred:
            operation, stage = channel.deferred[0]
            if operation.stage is stage and not channel.may_send(operation, stage):
                return
            channel.deferred.popleft()
            if operation.stage is stage:
                self._outbox.post(channel, operation, stage)
                if stage.complete:
                    self._ready.append(operation)

    # What others say

    def on_message(self, source: int, message: Message) -> None:
        kind = message.kind
        if kind is Kind.DATA:
            self._on_data(source, message)
        elif kind is Kind.DONE:
            self._on_reply(message.token)
        elif kind is Kind.REFUSE:
            self._on_refuse(source, message)
        elif kind is Kind.ASK:
            self._on_ask(source, message)
        elif kind is Kind.DENY:
            self._on_deny(source, message)
        elif kind is Kind.NOTICE:
            self._on_notice(source, message)

    def _on_data(self, source: int, message: Message) -> None:
        if self.events.active:
            self.events.emit("received", message.op, message.name, message.round, 0, source, message.nbytes)
        fate, operation = self._rounds.fate(message)
        if fate is Fate.EARLY:
            self._rounds.keep(source, message)
        elif fate is Fate.LATE:
            self._outbox.done_with(source, message)
        elif fate is Fate.UNEXPECTED or operation is None or operation.stage is None:
            error = self._refuse(source, message, unexpected(source, self.rank))
            if operation is not None:
                self._fail(operation, error)
            else:
                self._blame(source, message.name, error)
        else:
            stage = operation.stage
            self._match(operation, stage, source, message)
            if operation.error is None and stage.complete:
                self._ready.append(operation)

    def _match(self, operation: Operation, stage: Stage, source: int, message: Message) -> None:
        reason = disagreement(operation, stage, source, message, self.rank)
        if reason:
            self._fail(operation, self._refuse(source, message, reason))
            return
        stage.missing.discard(source)
        stage.arrived[source] = message
        if message.payload is not None and not message.payload.complete:
            message.payload.owner = operation

    def _refuse(self, source: int, message: Message, reason: str) -> Mismatch:
        """Turn a message away. Returns the error for this side."""
        what = describe(message.op, message.name, message.round)
        self._outbox.refuse(source, message, f"{what}: rank {self.rank} refused it: {reason}")
        message.flags = 0
        return Mismatch(f"{what}: {reason}", (source, self.rank))

    def _on_reply(self, token: int) -> None:
        answered = self._outbox.answered(token)
        if answered is None:
            return
        operation, channel = answered
        if operation.outcome is not None and not operation.unconfirmed and operation.error is None:
            outcome, operation.outcome = operation.outcome, None
            self._settle(operation, outcome[0], None)
        self._send_deferred(channel)

    def _on_refuse(self, source: int, message: Message) -> None:
        """A peer says that our message, or our silence, did not fit."""
        error = Mismatch(message.text, (source, self.rank))
        fate, operation = self._rounds.fate(message)
        if operation is not None:
            self._fail(operation, error)
        elif fate is Fate.UNEXPECTED:
            self._blame(source, message.name, error)
        self._on_reply(message.token)

    def _blame(self, source: int, name: str, error: Mismatch) -> None:
        """A round that has ended well here did not fit a peer: what waits for that peer under the name, or else the
        next call, raises."""
        waiting = [operation for operation in self._rounds.under(name) if source in operation.waiting_for]
        for operation in waiting:
            self._fail(operation, error)
        if not waiting:
            self._refused = error

    def _on_ask(self, source: int, message: Message) -> None:
        fate, operation = self._rounds.fate(message)
        if fate is Fate.EARLY:
            self._rounds.keep_ask(source, message)
        elif fate is not Fate.NOW or not (operation and operation.stage and operation.stage.sends_to(source)):
            # If it was sent all the same, it arrives before this denial, which is then void.
            self._outbox.deny(source, message, message.stage)

    def _on_deny(self, source: int, message: Message) -> None:
        fate, operation = self._rounds.fate(message)
        stage = operation.stage if operation else None
        if fate is not Fate.NOW or operation is None or stage is None or source not in stage.missing:
            return
        text = (
            f"{operation}: rank {self.rank} expects a tensor from rank {source}, which took part in this round without "
            f"sending one to rank {self.rank}, or whose own call failed"
        )
        message.token = 0
        self._outbox.refuse(source, message, text)
        self._fail(operation, Mismatch(text, (source, self.rank)))

    def on_arrived(self, payload: Payload) -> None:
        operation = payload.owner
        if isinstance(operation, Operation) and operation.waiting_more:
            operation.waiting_more = False
            self._ready.append(operation)

    # Agents that are gone

    def on_closed(self, peer: int, cause: str, final: bool = False) -> None:
        if peer not in self.membership.view.alive or self._deaf:
            self.router.drop(peer)
        elif not self._outbox.said_goodbye:  # after it, an end is somebody hanging up
            self.next_check = min(self.next_check, self._departures.sign(peer, cause, final))

    def on_left(self, peer: int) -> None:
        said = Departure(peer, "it called shoal.shutdown()", False, peer)
        self.next_check = min(self.next_check, self._departures.hearsay(said))

    def _on_notice(self, source: int, message: Message) -> None:
        said = self._departures.notice(source, message)
        if isinstance(said, Departure):
            self._on_gone(said)
        else:
            self.next_check = min(self.next_check, said)

    def _on_gone(self, gone: Departure) -> None:
        """An agent died or left; tell the neighbours, and end what cannot be completed without it."""
        rank, cause, died, told_by = gone
        self._departures.forget(rank)
        if rank == self.rank:
            self._break(f"rank {told_by} counts it as lost ({cause})")
            return
        if not self.membership.remove(rank, cause, died):
            if died and rank in self.membership.view.left and self._ended is None:  # it left, and somebody missed it
                self._outbox.pass_on(gone)
                self._lose(f"rank {rank} is gone: {cause}", rank)
            return
        if self.events.active:
            self.events.emit("lost", "died" if died else "left", "", 0, peer=rank, detail=cause)
        self._outbox.pass_on(gone)
        if died:
            told = f", as rank {told_by} says" if told_by not in (self.rank, rank) else ""
            self._lose(f"rank {rank} was lost ({cause}{told})", rank)
        for token in self._outbox.owed_by(rank):
            self._on_reply(token)
        for operation in self._rounds.in_flight():
            stage = operation.stage
            if stage is not None and (rank in stage.missing or (not stage.posted and stage.sends_to(rank))):
                self._fail(operation, self._miss(operation, [rank]))
        self.router.drop(rank)

    def _lose(self, what: str, rank: int) -> None:
        """Without this agent nothing goes on: end all operations, now and from now on."""
        self._ended = self._ended or PeerLost(
            f"{what}; the agents that are left can shut down and start again", (rank,)
        )
        for operation in self._rounds.in_flight():
            self._fail(operation, PeerLost(f"{operation} on rank {self.rank}: {self._ended}", self._ended.ranks))

    def _miss(self, operation: Operation, ranks: list[int]) -> PeerLost:
        """An operation needs agents that have left. To be missed makes that a loss, of which the others must hear."""
        rank = ranks[0]
        cause = f"it left while rank {self.rank} needed it for {operation}"
        self._outbox.pass_on(Departure(rank, cause, True, self.rank))
        what = "; ".join(self.membership.describe(one) for one in ranks)
        error = PeerLost(f"{operation} on rank {self.rank} needs agents that are gone: {what}", ranks)
        self._ended = self._ended or PeerLost(f"{what}, and was needed; shut down and start again", ranks)
        return error

    def abort(self, error: ShoalError) -> None:
        """End all operations, now and from now on, with ``error``. The others are not told."""
        with self.lock:
            self._ended = self._ended or error
            for operation in self._rounds.in_flight():
                self._fail(operation, error)
            self.poller.wake()

    # Time

    def check(self, now: float) -> None:
        """Whatever is due: departures, questions, stall reports, deadlines. Sets when to come back."""
        self.router.forget_strangers(now)
        if not self._outbox.said_goodbye and not self._deaf:
            for departure in self._departures.believed(now):
                self._on_gone(departure)
        following = self._departures.next if not self._outbox.said_goodbye else float("inf")
        for operation in self._rounds.in_flight():
            if now >= operation.deadline and not operation.computing:
                self._fail(operation, overdue(operation, self.rank, self._rounds, self._outbox))
            else:
                following = min(following, remind(operation, now, self.rank, self._outbox))
        self.next_check = min(following, self.router.next_check)

    # Driving

    def wait_for(self, handle: Handle[Any], timeout: float | None = None) -> bool:
        """Wait until an operation has ended, driving if nobody else does. False when ``timeout`` came first."""
        if self.wheel.mine:
            raise RuntimeError(
                f"waiting for {handle.operation} inside a callback or listener of Shoal would never end: start "
                "operations there, and wait for them elsewhere"
            )
        started = time.perf_counter_ns() if self.events.active else 0
        limit = time.monotonic() + timeout if timeout is not None else float("inf")
        done = self.wheel.drive_until(handle.poll, limit)
        if started:
            operation = handle.operation
            self.events.emit("waited", operation.op, operation.name, operation.round, started)
        return done

    def advance(self) -> None:
        ready = self._ready
        while True:
            while ready:
                operation = ready.popleft()
                stage = operation.stage
                if stage is not None and operation.error is None:
                    self._resume(operation, stage.arrived)
            with self.lock:
                self._outbox.flush()
            if not ready:
                return

    def handle(self, due: list[tuple[Callable[[int], None], int]]) -> None:
        try:
            for callback, events in due:
                callback(events)
            self.router.inbox.drain(self)
            self.next_check = min(self.next_check, self.router.next_check)
        except Exception:  # a fault of ours; an agent that no longer hears must not look as if it did
            log.exception("rank %d: the exchange failed", self.rank)
            self._break("an internal error ended the exchange; its log says which")
        except BaseException:
            self._break("it was interrupted while it handled messages")
            raise

    def _break(self, cause: str) -> None:
        """This agent has lost track of what the others said; it must not judge them any more."""
        self._deaf = True
        self.abort(ShoalError(f"rank {self.rank}: {cause}; shut down and start again", (self.rank,)))

    def after(self) -> None:
        while self._callbacks:
            callback, handle = self._callbacks.popleft()
            try:
                callback(handle)
            except Exception:
                log.exception("a callback of %s failed", handle.operation)

    # The end

    def close(self, deadline: float, farewell: str = "", died: bool = False) -> None:
        """Say goodbye, give others what they still wait for, and free everything."""
        if self.wheel.mine:
            raise RuntimeError("shoal.shutdown() cannot be called from a callback of Shoal")
        gone = NotInitialized("this agent has shut down while the operation was in flight; wait for its handle first")
        with self.lock:
            if self._closing:
                return
            for operation in self._rounds.in_flight():
                if died or not self._rounds.channel(operation).defers(operation):
                    self._fail(operation, gone)
            self._closing = True
        self._drain(lambda: self._outbox.settled and not self._rounds.in_flight(), deadline)
        with self.lock:
            self._outbox.say_goodbye(farewell or "it called shoal.shutdown()", died)
        self._drain(lambda: self._outbox.empty, deadline)
        # Whoever heard it hangs up; then nothing unread is thrown away, which a socket would report as a failure.
        self._drain(lambda: not self.router.heard, min(deadline, time.monotonic() + HANG_UP_SECONDS))
        with self.lock:
            for operation in self._rounds.in_flight():
                self._fail(operation, gone)
        self.wheel.stop()
        self.after()
        self.router.close()
        self.arena.close()
        self.pool.clear()
        self.poller.close()

    def _drain(self, drained: Callable[[], bool], deadline: float) -> None:
        """Drive until the others have what they need, unless this agent's exchange has failed."""
        if self.wheel.started:
            self.wheel.drive_until(lambda: drained() or self._ended is not None, deadline)

    def abandon_in_child(self) -> None:
        """In a forked child: close what would keep this agent's end from being noticed. Touches no lock."""
        for fd in [*self.router.descriptors(), *self.arena.descriptors(), *self.poller.descriptors()]:
            try:
                os.close(fd)
            except OSError:
                pass
