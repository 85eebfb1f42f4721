"""Moves every operation of one agent forward.

The problem: many operations in flight, submitted by several threads in any order, matched with those of other agents
without a coordinator; no thread may spin, a call of four bytes must not pay for a thread switch, and nothing may wait
for ever.

How it works. A message is matched by (name, round, stage) on the edge it came over. A round is the agent's own count of
calls under that name, so an agent that skips one is noticed: its next message carries a number that does not fit. What
comes before this agent has asked for it waits in ``_early``; what nobody here will ever ask for is refused, and both
sides raise. An agent that has waited a moment for a message asks the sender whether it will come (ASK), and one that
will not send denies it (DENY): that finds a disagreement in milliseconds that would otherwise end in the deadline, and
costs nothing in a round where everybody comes.

Who drives is in ``wheel.py``.

Rejected: asyncio (a callback costs more than a small operation has), a thread for each operation, and doing all in the
progress thread (two thread switches for each blocking call, under one interpreter lock).
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..errors import DeadlineExceeded, Mismatch, NotInitialized, PeerLost, ShoalError
from ..transport.link import Lease, Link, Published
from ..transport.memory import Arena, ResultPool
from ..transport.poller import Poller
from ..transport.router import Router
from ..transport.wire import DIED, WANTS_REPLY, Kind, Message, Payload
from .events import Events
from .membership import Membership
from .operation import MORE, Arrived, Exchange, Handle, Operation, Send, Stage, Steps, describe
from .wheel import Wheel

log = logging.getLogger("shoal")
T = TypeVar("T")

ASK_AFTER = 0.02
"""Seconds without a message after which its sender is asked whether it will come."""
STALL_AFTER = 30.0
"""Seconds after which a report says who is missing."""
LEAVE_GRACE = 0.5
"""Seconds in which a goodbye may still arrive from a process that ended."""
PUBLISH_BYTES = 1 << 14
"""Tensors larger than this are published in shared memory."""
WINDOW, SMALL_WINDOW = 2, 256
"""Rounds of one name that a receiver may be behind: of large tensors, and of ones that travel inside the message."""
TOMBSTONES = 4096


class Channel:
    """The rounds of one name on this agent."""

    __slots__ = ("active", "deferred", "name", "rounds", "unacknowledged")

    def __init__(self, name: str) -> None:
        self.name = name
        self.rounds = 0
        self.active: dict[int, Operation] = {}
        self.unacknowledged: dict[int, int] = {}
        self.deferred: deque[tuple[Operation, Stage]] = deque()


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
        self.bytes_sent = 0
        self._channels: dict[str, Channel] = {}
        self._tokens: dict[int, tuple[int, Operation, Lease | None]] = {}
        self._early: dict[tuple[str, int], dict[tuple[int, int], Message]] = {}
        self._asks: dict[tuple[str, int], set[tuple[int, int]]] = {}
        self._tombstones: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._suspects: dict[int, tuple[float, str, bool]] = {}
        self._ready: deque[Operation] = deque()
        self._dirty: set[Link] = set()
        self._callbacks: deque[tuple[Callable[[Handle[Any]], None], Handle[Any]]] = deque()
        self._token = itertools.count(1)
        self._refused: ShoalError | None = None  # a refusal of a round that had already ended here
        self._ended: ShoalError | None = None  # why no operation is possible any more
        self.next_check = float("inf")
        self._closing = False
        self._pid = os.getpid()

    # Submitting

    def start(self) -> None:
        self.wheel.start()

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
            channel = self._channels.get(name)
            if channel is None:
                channel = self._channels[name] = Channel(name)
            if alone and channel.active:
                raise ValueError(
                    f"{describe(op, name, channel.rounds)}: an operation named {name!r} is still in flight on rank "
                    f"{self.rank}; wait for its handle first, or use another name"
                )
            operation = Operation(op, name, channel.rounds, self.timeout if timeout is None else timeout)
            channel.rounds += 1
            channel.active[operation.round] = operation
            handle: Handle[T] = Handle(self, operation)
            operation.handle = handle
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
        if self._closing or self._pid != os.getpid():
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
        try:
            item = generator.send(arrived) if arrived is not None else next(generator)
        except StopIteration as stop:
            if start and arrived:
                self.events.emit("summed", operation.op, operation.name, operation.round, start)
            self._finish(operation, stop.value, None)
        except BaseException as error:
            self._finish(operation, None, error)
            if not isinstance(error, Exception):
                raise
        else:
            if start and arrived:
                self.events.emit("summed", operation.op, operation.name, operation.round, start)
            with self.lock:
                if operation.error is not None:
                    self._close_generator(operation)
                elif item is MORE:
                    operation.waiting_more = True
                else:
                    self._enter(operation, item)  # type: ignore[arg-type]

    def _enter(self, operation: Operation, exchange: Exchange) -> None:
        """Begin a stage: take what came early, then send."""
        self._leave_stage(operation)
        number = operation.next_stage if exchange.stage is None else exchange.stage
        stage = Stage(number, exchange, set(exchange.sources), {})
        operation.stage = stage
        operation.next_stage = number + 1
        if self.membership.view.epoch:
            gone = [rank for rank in self._partners(exchange) if rank not in self.membership.view.alive]
            if gone:
                self._fail(operation, self._ended or self._lost_error(operation, gone))
                return
        if self._ended is not None:
            self._fail(operation, self._ended)
            return
        channel = self._channels[operation.name]
        key = (operation.name, operation.round)
        early = self._early.get(key)
        if early:
            for number, source in [k for k in early if k[0] == stage.number]:
                self._match(operation, stage, source, early.pop((number, source)))
        if operation.error is not None:
            return
        asks = self._asks.get(key)
        if asks:
            targets = {send.destination for send in exchange.sends}
            for number, source in [k for k in asks if k[0] == stage.number]:
                asks.discard((number, source))
                if source not in targets:
                    self._deny(source, operation.op, operation.name, operation.round, number)
        if channel.deferred or not self._may_send(channel, operation, exchange):
            channel.deferred.append((operation, stage))
        else:
            self._post(channel, operation, stage)
        if stage.complete:
            self._ready.append(operation)
        else:
            self.next_check = min(self.next_check, time.monotonic() + ASK_AFTER)

    @staticmethod
    def _partners(exchange: Exchange) -> set[int]:
        return {*exchange.sources, *(send.destination for send in exchange.sends)}

    def _may_send(self, channel: Channel, operation: Operation, exchange: Exchange) -> bool:
        if not channel.unacknowledged or not exchange.sends:
            return True
        large = channel.name[0] != "~" and any(send.published.region is not None for send in exchange.sends)
        return min(channel.unacknowledged) > operation.round - (WINDOW if large else SMALL_WINDOW)

    def _post(self, channel: Channel, operation: Operation, stage: Stage) -> None:
        exchange = stage.exchange
        listening = self.events.active
        often = exchange.checked or operation.round % (SMALL_WINDOW // 4) == 0
        message: Message | None = None
        last: Send | None = None
        for send in exchange.sends:
            published = send.published
            reply = often or published.region is not None
            token = next(self._token)
            same = last is not None and (last.published, last.start, last.stop) == (published, send.start, send.stop)
            nbytes = (send.stop - send.start) * published.data.element_size()
            message = Message(
                Kind.DATA,
                operation.op,
                operation.name,
                operation.round,
                stage.number,
                token,
                WANTS_REPLY if reply else 0,
                exchange.digest,
                send.scale,
                published.data.dtype,
                send.shape,
                nbytes=nbytes,
                tail=message.tail if same and message is not None else b"",
            )
            last = send
            if reply:
                if published.lease is not None:
                    published.lease.hold()
                self._tokens[token] = (send.destination, operation, published.lease)
                channel.unacknowledged[operation.round] = channel.unacknowledged.get(operation.round, 0) + 1
                if exchange.checked:
                    operation.unconfirmed[token] = send.destination
            link = self._link(send.destination)
            if link is None:
                return
            link.post(message, published, send.start, send.stop)
            self.bytes_sent += nbytes
            if listening:
                self.events.emit("sent", operation.op, operation.name, operation.round, 0, send.destination, nbytes)
        stage.posted = True

    def _link(self, peer: int) -> Link | None:
        """The link to a peer, marked for flushing; None (and the peer is gone) when it cannot be opened."""
        try:
            link = self.router.link(peer)
        except OSError as error:
            self.on_closed(peer, f"connecting to it failed: {error.strerror or error}")
            return None
        self._dirty.add(link)
        return link

    def _say(self, peer: int, message: Message) -> None:
        if peer in self.membership.view.alive:
            link = self._link(peer)
            if link is not None:
                link.post(message)

    def _leave_stage(self, operation: Operation) -> None:
        """The operation is done with the messages of its stage: their senders may have their memory back."""
        stage = operation.stage
        if stage is None:
            return
        for source, message in stage.arrived.items():
            self._done_with(source, message)
        stage.arrived = {}
        operation.stage = None

    def _done_with(self, source: int, message: Message) -> None:
        if message.flags & WANTS_REPLY:
            message.flags = 0
            self._say(source, Message(Kind.DONE, token=message.token))

    def _finish(self, operation: Operation, result: Any, error: BaseException | None) -> None:
        with self.lock:
            if operation.error is not None:  # it was failed while it computed
                return
            if error is None and operation.unconfirmed:
                operation.outcome = (result,)
                self._leave_stage(operation)
                return
            self._settle(operation, result, error)

    def _settle(self, operation: Operation, result: Any, error: BaseException | None) -> None:
        operation.error = error
        missing = operation.stage is not None and bool(operation.stage.missing)
        self._leave_stage(operation)
        channel = self._channels[operation.name]
        channel.active.pop(operation.round, None)
        for lease in operation.leases:
            lease.release()
        operation.leases = []
        key = (operation.name, operation.round)
        if missing:
            self._tombstones[key] = None
            if len(self._tombstones) > TOMBSTONES:
                self._tombstones.popitem(last=False)
        for (_, source), message in self._early.pop(key, {}).items():
            if error is None:
                self._refuse(source, message, "it expected no such message in this round")
            else:
                self._done_with(source, message)
        for number, source in self._asks.pop(key, ()):
            self._deny(source, operation.op, operation.name, operation.round, number)
        self._send_deferred(channel)
        handle, operation.handle = operation.handle, None  # or the pair would keep the result until a collection
        assert handle is not None
        handle._result, handle._error, handle.done = result, error, True
        if handle._callbacks:
            self._callbacks.extend((callback, handle) for callback in handle._callbacks)
            handle._callbacks = []
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
            pass  # it is running; it will see the error when it yields

    def _send_deferred(self, channel: Channel) -> None:
        while channel.deferred:
            operation, stage = channel.deferred[0]
            if operation.stage is not stage:
                channel.deferred.popleft()
                continue
            if not self._may_send(channel, operation, stage.exchange):
                return
            channel.deferred.popleft()
            self._post(channel, operation, stage)
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
        channel = self._channels.get(message.name)
        if channel is None or message.round >= channel.rounds:
            self._stash(source, message)
            return
        operation = channel.active.get(message.round)
        if operation is None:
            if (message.name, message.round) in self._tombstones:
                self._done_with(source, message)
            else:
                self._refuse(source, message, "it expected no such message in this round")
            return
        stage = operation.stage
        if stage is None or message.stage > stage.number:
            self._stash(source, message)
            return
        if message.stage < stage.number:
            self._refuse(source, message, "it expected no such message in this round")
            return
        self._match(operation, stage, source, message)
        if operation.error is None and stage.complete:
            self._ready.append(operation)

    def _stash(self, source: int, message: Message) -> None:
        self._early.setdefault((message.name, message.round), {})[(message.stage, source)] = message

    def _match(self, operation: Operation, stage: Stage, source: int, message: Message) -> None:
        exchange = stage.exchange
        reason = ""
        if message.op != operation.op:
            reason = f"rank {source} called {message.op} and rank {self.rank} called {operation.op}"
        elif message.digest != exchange.digest:
            reason = f"rank {source} and rank {self.rank} have a different {exchange.digest_of}"
        elif source not in stage.missing:
            reason = f"rank {self.rank} expects nothing from rank {source} in this round, but rank {source} sent to it"
        elif exchange.dtype is not None and message.dtype != exchange.dtype:
            reason = f"rank {source} sent {message.dtype} and rank {self.rank} expected {exchange.dtype}"
        elif exchange.shape is not None and message.shape != exchange.shape and not message.nothing:
            reason = (
                f"rank {source} sent a tensor of shape {list(message.shape)} and rank {self.rank} expected shape "
                f"{list(exchange.shape)}"
            )
        if reason:
            self._refuse(source, message, reason)
            self._fail(operation, Mismatch(f"{operation}: {reason}", (source, self.rank)))
            return
        stage.missing.discard(source)
        stage.arrived[source] = message
        if message.payload is not None and not message.payload.complete:
            message.payload.owner = operation

    def _refuse(self, source: int, message: Message, reason: str) -> None:
        message.flags = 0
        text = f"{describe(message.op, message.name, message.round)}: rank {self.rank} refused it: {reason}"
        self._say(source, Message(Kind.REFUSE, token=message.token, text=text))

    def _deny(self, source: int, op: str, name: str, round_: int, stage: int) -> None:
        self._say(source, Message(Kind.DENY, op, name, round_, stage))

    def _on_reply(self, token: int) -> None:
        """A destination has answered: give back what was held for it."""
        entry = self._tokens.pop(token, None)
        if entry is None:
            return
        _, operation, lease = entry
        if lease is not None:
            lease.release()
        channel = self._channels[operation.name]
        left = channel.unacknowledged.get(operation.round, 1) - 1
        if left:
            channel.unacknowledged[operation.round] = left
        else:
            channel.unacknowledged.pop(operation.round, None)
        operation.unconfirmed.pop(token, None)
        if operation.outcome is not None and not operation.unconfirmed and operation.error is None:
            outcome, operation.outcome = operation.outcome, None
            self._settle(operation, outcome[0], None)
        self._send_deferred(channel)

    def _on_refuse(self, source: int, message: Message) -> None:
        error = Mismatch(message.text, (source, self.rank))
        entry = self._tokens.get(message.token)
        if entry is not None and entry[1].handle is not None:
            self._fail(entry[1], error)
        else:
            self._refused = error
        self._on_reply(message.token)

    def _on_ask(self, source: int, message: Message) -> None:
        channel = self._channels.get(message.name)
        if channel is None or message.round >= channel.rounds:
            self._asks.setdefault((message.name, message.round), set()).add((message.stage, source))
            return
        operation = channel.active.get(message.round)
        stage = operation.stage if operation else None
        if operation and (stage is None or message.stage > stage.number):
            self._asks.setdefault((message.name, message.round), set()).add((message.stage, source))
        elif stage and message.stage == stage.number and source in {s.destination for s in stage.exchange.sends}:
            return  # it is on its way
        else:  # if it was sent, it arrived before this denial, which is then void
            self._deny(source, message.op, message.name, message.round, message.stage)

    def _on_deny(self, source: int, message: Message) -> None:
        channel = self._channels.get(message.name)
        operation = channel.active.get(message.round) if channel else None
        stage = operation.stage if operation else None
        if operation is None or stage is None or stage.number != message.stage or source not in stage.missing:
            return
        text = (
            f"{operation}: rank {self.rank} expects a tensor from rank {source}, which took part in this round without "
            f"sending one to rank {self.rank}, or whose own call failed"
        )
        self._say(source, Message(Kind.REFUSE, text=text))
        self._fail(operation, Mismatch(text, (source, self.rank)))

    def on_arrived(self, payload: Payload) -> None:
        operation = payload.owner
        if isinstance(operation, Operation) and operation.waiting_more:
            operation.waiting_more = False
            self._ready.append(operation)

    # Agents that are gone

    def on_closed(self, peer: int, cause: str, final: bool = False) -> None:
        """An agent seems to be gone. Unless nothing of it can still come, give its goodbye a moment to arrive."""
        if peer not in self.membership.view.alive:
            self.router.drop(peer)
            return
        due = time.monotonic() + (0.0 if final else LEAVE_GRACE)
        if peer not in self._suspects or due < self._suspects[peer][0]:
            self._suspects[peer] = (due, cause, True)
        self.next_check = min(self.next_check, due)

    def _on_notice(self, source: int, message: Message) -> None:
        """An agent says that it leaves, or passes on that another is gone."""
        rank, died = message.token, bool(message.flags & DIED)
        if died or source == rank:
            self._on_gone(rank, message.text, died, source)
        elif rank in self.membership.view.alive and not self.router.hears(rank):
            # What it sent to us may be on its way still; where we hear it, its own goodbye comes after that.
            due = self._suspects[rank][0] if rank in self._suspects else time.monotonic() + LEAVE_GRACE
            self._suspects[rank] = (due, message.text, False)
            self.next_check = min(self.next_check, due)

    def _on_gone(self, rank: int, cause: str, died: bool, told_by: int) -> None:
        """An agent died or left; tell the neighbours, and end what cannot be completed without it."""
        if rank == self.rank or not self.membership.remove(rank, cause, died):
            return
        self._suspects.pop(rank, None)
        if self.events.active:
            self.events.emit("lost", "died" if died else "left", "", 0, peer=rank, detail=cause)
        for other in list(self.router.links):
            if other not in (rank, told_by):
                self._say(other, Message(Kind.NOTICE, token=rank, flags=DIED if died else 0, text=cause))
        if died:
            told = f", as rank {told_by} says" if told_by not in (self.rank, rank) else ""
            self._ended = PeerLost(
                f"rank {rank} was lost ({cause}{told}); the agents that are left can shut down and start again", (rank,)
            )
        for token, entry in list(self._tokens.items()):
            if entry[0] == rank:
                self._on_reply(token)
        for operation in self._in_flight():
            stage = operation.stage
            if died:
                assert self._ended is not None
                self._fail(operation, PeerLost(f"{operation}: {self._ended}", (rank,)))
            elif stage is not None and (rank in stage.missing or rank in self._partners(stage.exchange)):
                if rank in stage.missing or not stage.posted:
                    self._fail(operation, self._lost_error(operation, [rank]))
                elif stage.complete and operation not in self._ready:
                    self._ready.append(operation)
        self.router.drop(rank)

    def _lost_error(self, operation: Operation, ranks: list[int]) -> PeerLost:
        what = "; ".join(self.membership.describe(rank) for rank in ranks)
        return PeerLost(f"{operation} on rank {self.rank} needs agents that are gone: {what}", ranks)

    def _in_flight(self) -> list[Operation]:
        return [operation for channel in self._channels.values() for operation in channel.active.values()]

    def abort(self, error: ShoalError) -> None:
        """End all operations, now and from now on, with ``error``. The others are not told."""
        with self.lock:
            self._ended = self._ended or error
            for operation in self._in_flight():
                self._fail(operation, error)
            self.poller.wake()

    # Time

    def check(self, now: float) -> None:
        """Whatever is due: suspects, questions, stall reports, deadlines. Sets when to come back."""
        following = float("inf")
        for rank, (due, cause, died) in list(self._suspects.items()):
            if now >= due:
                self._on_gone(rank, cause, died, self.rank)
            else:
                following = min(following, due)
        for operation in self._in_flight():
            stage = operation.stage
            if now >= operation.deadline:
                self._fail(operation, self._deadline_error(operation))
                continue
            following = min(following, operation.deadline)
            if stage is not None and not stage.asked and stage.missing:
                if now >= stage.started + ASK_AFTER:
                    stage.asked = True
                    for rank in stage.missing:
                        self._say(rank, Message(Kind.ASK, operation.op, operation.name, operation.round, stage.number))
                else:
                    following = min(following, stage.started + ASK_AFTER)
            if not operation.stalled:
                if now >= operation.started + STALL_AFTER:
                    operation.stalled = True
                    log.warning(
                        "%s on rank %d has waited %.0f s for ranks %s; it gives up after %.0f s",
                        operation,
                        self.rank,
                        now - operation.started,
                        operation.waiting_for,
                        operation.timeout,
                    )
                else:
                    following = min(following, operation.started + STALL_AFTER)
        self.next_check = following

    def _deadline_error(self, operation: Operation) -> DeadlineExceeded:
        waiting, stage = operation.waiting_for, operation.stage
        if stage is not None and stage.missing:
            what = "they did not take part"
        elif operation.unconfirmed:
            what = "they did not confirm that they expected it"
        else:
            behind = min(self._channels[operation.name].unacknowledged, default=operation.round)
            waiting = sorted({entry[0] for entry in self._tokens.values() if entry[1].name == operation.name})
            what = f"they have not read what was sent to them in round {behind}"
        return DeadlineExceeded(
            f"{operation} on rank {self.rank} waited {operation.timeout:g} s for ranks {waiting}: {what}. If they are "
            f"only slow, raise SHOAL_TIMEOUT or pass timeout=",
            waiting,
        )

    # Driving

    def wait_for(self, handle: Handle[Any], timeout: float | None = None) -> bool:
        """Wait until an operation has ended, driving if nobody else does. False when ``timeout`` came first."""
        if self.wheel.mine:
            raise RuntimeError(
                f"waiting for {handle.operation} inside a callback or listener of Shoal would never end: start "
                "operations there, and wait for them elsewhere"
            )
        started = time.perf_counter_ns() if self.events.active else 0
        done = self.wheel.drive_until(
            lambda: handle.done, time.monotonic() + timeout if timeout is not None else float("inf")
        )
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
                if self.arena.retired:
                    self.router.retire_memory()
                while self._dirty:
                    self._dirty.pop().flush()
            if not ready:
                return

    def handle(self, due: list[tuple[Callable[[int], None], int]]) -> None:
        try:
            for callback, events in due:
                callback(events)
            self.router.inbox.drain(self)
        except Exception:  # a fault of ours; an agent that no longer hears must not look as if it did
            log.exception("rank %d: the exchange failed", self.rank)
            self._break("an internal error ended the exchange; its log says which")
        except BaseException:
            self._break("it was interrupted while it handled messages")
            raise

    def after(self) -> None:
        while self._callbacks:
            callback, handle = self._callbacks.popleft()
            try:
                callback(handle)
            except Exception:
                log.exception("a callback of %s failed", handle.operation)

    def _break(self, cause: str) -> None:
        self._ended = self._ended or ShoalError(f"rank {self.rank}: {cause}; shut down and start again", (self.rank,))
        for operation in self._in_flight():
            self._fail(operation, self._ended)

    def add_callback(self, handle: Handle[Any], callback: Callable[[Handle[Any]], None]) -> bool:
        with self.lock:
            if handle.done:
                return False
            handle._callbacks.append(callback)
            return True

    # The end

    def close(self, deadline: float, farewell: str = "", died: bool = False) -> None:
        """Say goodbye, give others what they still wait for, and free everything."""
        if self.wheel.mine:
            raise RuntimeError("shoal.shutdown() cannot be called from a callback of Shoal")
        gone = NotInitialized("this agent has shut down while the operation was in flight; wait for its handle first")
        with self.lock:
            if self._closing:
                return
            for operation in self._in_flight():
                if died or operation.stage is None or operation.stage.posted:
                    self._fail(operation, gone)
            self._closing = True
        self._drain(lambda: not self._tokens and not self._in_flight(), deadline)
        with self.lock:
            notice = farewell or "it called shoal.shutdown()"
            for peer in list(self.router.links):
                self._say(peer, Message(Kind.NOTICE, token=self.rank, flags=DIED if died else 0, text=notice))
        self._drain(lambda: all(link.idle for link in self.router.links.values()), deadline)
        with self.lock:
            for operation in self._in_flight():
                self._fail(operation, gone)
        self.wheel.stop()
        self.after()
        self.router.close()
        self.arena.close()
        self.pool.clear()
        self.poller.close()

    def _drain(self, drained: Callable[[], bool], deadline: float) -> None:
        """Drive until the others have what they need, unless this agent's exchange has failed."""
        if not self.wheel.started:
            return
        self.wheel.drive_until(lambda: drained() or self._ended is not None, deadline)

    def abandon_in_child(self) -> None:
        """In a forked child: close what would keep this agent's end from being noticed. Touches no lock."""
        for fd in [*self.router.descriptors(), *self.arena.descriptors(), *self.poller.descriptors()]:
            try:
                os.close(fd)
            except OSError:
                pass
