"""Moves every operation of one agent forward.

The problem: many operations in flight, submitted by several threads in any order, matched with those of other agents
without a coordinator; no thread may spin, a call of four bytes must not pay for a thread switch, and nothing may wait
for ever.

How it works. An operation is a generator (``operation.py``). The engine resumes it when the messages of its stage have
come (``matching.py`` says which those are) and posts what it wants sent. What nobody here will ever ask for is
refused, and both sides raise. An agent that has waited a moment for a message asks the sender whether it will come
(ASK), and one that will not send denies it (DENY): that finds a disagreement in milliseconds that would otherwise end
in the deadline, and costs nothing in a round where everybody comes. Who drives all this is in ``wheel.py``; what
the others say, in ``hearing.py``; who is gone, in ``departures.py``; what travels together, in ``bundles.py``.

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

from ..errors import NotInitialized, ShoalError
from ..interrupts import held, released
from ..transport.memory import Arena, ResultPool
from ..transport.poller import Poller
from ..transport.router import Router
from ..transport.wire import Message
from .closing import close
from .dispatch import Hearing, Service
from .events import Events
from .failures import Departures
from .fusion import Bundle, Bundles, Small
from .matching import Channel, Rounds
from .membership import Membership
from .operation import MORE, Arrived, Exchange, Handle, Operation, Send, Stage, Steps
from .outbox import Outbox
from .progress import AFTER_SMALL, Wheel
from .publishing import Publisher
from .seconds import as_seconds
from .watchdog import ASK_AFTER, overdue, remind

log = logging.getLogger("shoal")
T = TypeVar("T")


class Engine:
    """The exchange of one agent with the others."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.events = Events()
        self.membership = Membership(size)
        self.arena = Arena()
        self.publisher = Publisher(rank, self.arena)
        self.pool = ResultPool()
        self.poller = Poller()
        self.wheel = Wheel(self, self.poller, f"shoal-{rank}")
        self.lock = self.wheel.lock
        self.next_check = float("inf")
        self.ready: deque[Operation] = deque()
        self.rounds: Rounds = Rounds()
        self.bundles: Bundles = Bundles(self)
        self.hearing: Hearing = Hearing(self)
        self.router = Router(rank, self.poller, self.hearing, self.arena, self.pool)
        self.departures = Departures(rank, self.membership, self.router)
        self.outbox = Outbox(rank, self.router, self.membership, self.events, self.hearing.on_closed)
        self._callbacks: deque[tuple[Callable[[Handle[Any]], None], Handle[Any]]] = deque()
        self.services: dict[str, Service] = {}
        self.refused: ShoalError | None = None  # a refusal of a round that had already ended here
        self.ended: ShoalError | None = None  # why no operation is possible any more
        self.aborted = False  # not even a one-sided one, which the loss of others does not end
        self.deaf = False
        self.closing = False
        self.abandoned = False  # this is a forked child's copy

    def start(self) -> None:
        self.wheel.start()

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensors sent to others so far."""
        return self.outbox.bytes_sent

    # Submitting

    def submit(
        self,
        op: str,
        name: str,
        steps: Callable[[Operation], Steps[T]] | Small,
        timeout: float | None = None,
        alone: bool = True,
        one_sided: bool = False,
    ) -> Handle[T]:
        """Begin an operation.

        Args:
            op: What is called, for matching and for messages.
            name: What it is matched by. Names beginning with ``~`` are Shoal's own.
            steps: Makes the generator of the operation, which runs in the caller's thread until its first exchange; or
                what a small operation is about, which begins with others when somebody drives.
            timeout: Seconds until :class:`~shoal.DeadlineExceeded`.
            alone: Refuse a second operation under the same name while one is in flight.
            one_sided: The others need not call anything for it; so it goes on when one is lost that it does not need.
        """
        seconds = as_seconds(timeout, self.timeout)
        with held:
            handle = self._submit(op, name, steps, seconds, alone, one_sided)
        if self._callbacks:
            self.after()
        return handle

    def _submit(
        self,
        op: str,
        name: str,
        steps: Callable[[Operation], Steps[T]] | Small,
        seconds: float,
        alone: bool,
        one_sided: bool,
    ) -> Handle[T]:
        with self.lock:
            self._check_open(op, one_sided)
            operation = self.rounds.begin(op, name, seconds, alone)
            handle: Handle[T] = Handle(self, operation)
            operation.handle = handle
            operation.one_sided = one_sided
            self.next_check = min(self.next_check, operation.deadline)
            if self.refused is not None and not one_sided:
                # A round nevertheless: the others make theirs, and it would pair with the next one here.
                refused, self.refused = self.refused, None
                self.fail(operation, refused)
                return handle
            if isinstance(steps, Small):
                spoiled = self.publisher.problem(operation, steps.flat)
                if spoiled is not None:  # it fails alone, and not what it would travel with
                    self.fail(operation, spoiled)
                    return handle
                operation.small = steps
                self.bundles.add(operation)
                self.wheel.submitted(AFTER_SMALL)
                return handle
        if self.events.active:
            self.events.emit("submitted", op, name, operation.round)
        operation.generator = steps(operation)
        self.resume(operation, None)
        with self.lock:
            self.wheel.submitted()
        return handle

    def reason_against(self, one_sided: bool) -> ShoalError | None:
        """Why operations are not possible any more."""
        return self.ended if self.aborted or not one_sided else None

    def _check_open(self, op: str, one_sided: bool) -> None:
        if self.closing:
            raise NotInitialized(f"{op}: this agent has shut down; call shoal.init() first")
        ended = self.reason_against(one_sided)
        if ended is not None:
            raise type(ended)(f"{op}: {ended}", ended.ranks)

    def begin(self, operation: Operation) -> None:
        """Begin a small operation by itself."""
        small = operation.small
        assert small is not None
        operation.generator = small.family.alone(operation, small)
        self.resume(operation, None)

    # The life of an operation

    def resume(self, operation: Operation, arrived: Arrived | None) -> None:
        """Run an operation to its next exchange, without the lock: it may compute."""
        if torch.is_inference_mode_enabled():  # a thread's; but what one thread makes here, another may go on with
            with torch.inference_mode(False):
                self.resume(operation, arrived)
            return
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
                self.fail(operation, interrupt)
            raise
        if error is not None and not isinstance(error, Exception):
            raise error

    def _go_on(
        self, operation: Operation, item: Exchange | str | None, result: Any, error: BaseException | None
    ) -> None:
        """Do what an operation asked for when it stopped computing."""
        if isinstance(operation, Bundle):
            self.bundles.go_on(operation, item, result, error)
        elif operation.error is not None:  # it was failed meanwhile
            self.close_generator(operation)
            self.release(operation)
        elif item is MORE:
            operation.waiting_more = True
        elif isinstance(item, Exchange):
            self._enter(operation, item)
        elif error is None and operation.unconfirmed:
            operation.outcome = (result,)
            self._leave_stage(operation)
            if self.rounds.has_late(operation):
                self.settle(operation, None, None)
        else:
            self.settle(operation, result, error)

    def _enter(self, operation: Operation, exchange: Exchange) -> None:
        """Begin a stage: take what came early, then send."""
        self._leave_stage(operation)
        number = operation.next_stage if exchange.stage is None else exchange.stage
        stage = Stage(number, exchange, set(exchange.sources), {})
        self.bundles.begins(operation)
        operation.stage = stage
        operation.next_stage = number + 1
        for source, message in self.rounds.came_early(operation, number):
            self.hearing.match(operation, stage, source, message)
        view = self.membership.view
        needs = stage.missing if operation.sent else stage.needs
        gone = sorted(rank for rank in needs if rank not in view.alive) if view.epoch else []
        ended = self.reason_against(operation.one_sided)
        if gone or ended is not None:
            if ended is None:
                self.fail(operation, self.hearing.miss(operation, gone))
            else:
                self.fail(operation, type(ended)(f"{operation} on rank {self.rank}: {ended}", ended.ranks))
        if operation.error is not None:
            return
        for source in self.rounds.asked_early(operation, stage):
            if not stage.sends_to(source):
                self.outbox.deny(source, operation, number)
        channel = self.rounds.channel(operation)
        if operation.sent:
            stage.posted, operation.sent = True, False
        elif (channel.deferred and not operation.one_sided) or not channel.may_send(operation, stage):
            channel.deferred.append((operation, stage))
        else:
            self.outbox.post(channel, operation, stage)
        if stage.complete:
            self.ready.append(operation)
        else:
            self.next_check = min(self.next_check, time.monotonic() + ASK_AFTER)

    def _leave_stage(self, operation: Operation) -> None:
        """The operation is done with the messages of its stage: their senders may have their memory back."""
        stage = operation.stage
        if stage is None:
            return
        for source, message in stage.arrived.items():
            self.outbox.done_with(source, message)
        stage.arrived = {}
        operation.stage = None

    def settle(self, operation: Operation, result: Any, error: BaseException | None) -> None:
        """End an operation, with a result or an error."""
        operation.error = error
        ended_well = error is None
        late, asks = self.rounds.end(operation, error)
        self._leave_stage(operation)
        self.release(operation)
        for source, message in late:
            if ended_well:
                error = operation.error = self.hearing.refuse_unexpected(source, message)
            else:
                self.outbox.done_with(source, message)
        for number, source in asks:
            self.outbox.deny(source, operation, number, self.rounds.why(operation))
        self.send_deferred(self.rounds.channel(operation))
        handle, operation.handle = operation.handle, None  # or the pair would keep the result until a collection
        assert handle is not None
        callbacks = handle.end(result, error)
        self._callbacks.extend((callback, handle) for callback in callbacks)
        self.wheel.notify()
        if self.events.active:
            kind, detail = ("finished", "") if error is None else ("failed", f"{type(error).__name__}: {error}")
            self.events.emit(kind, operation.op, operation.name, operation.round, detail=detail)

    @staticmethod
    def release(operation: Operation) -> None:
        """Give back the memory that it published in; what others still read there has leases of its own."""
        for lease in operation.leases:
            lease.release()
        operation.leases = []

    def fail(self, operation: Operation, error: BaseException) -> None:
        """End an operation from outside. Its generator is closed by whoever runs it, or here if nobody does."""
        if isinstance(operation, Bundle):
            self.bundles.fail(operation, error)
        elif operation.handle is not None:
            self.settle(operation, None, error)
            self.close_generator(operation)

    @staticmethod
    def close_generator(operation: Operation) -> None:
        try:
            if operation.generator is not None:
                operation.generator.close()
        except ValueError:
            pass  # it is running; whoever runs it sees the error next

    def send_deferred(self, channel: Channel) -> None:
        waiting, channel.deferred = channel.deferred, deque()
        while waiting:
            operation, stage = waiting.popleft()
            if operation.stage is stage and not channel.may_send(operation, stage):
                channel.deferred.append((operation, stage))
                if not operation.one_sided:  # those behind it have to wait for their turn
                    channel.deferred.extend(waiting)
                    return
            elif operation.stage is stage:
                self.outbox.post(channel, operation, stage)
                if stage.complete:
                    self.ready.append(operation)
        self.rounds.tidy(channel)

    def answer(self, source: int, request: Message, tensor: torch.Tensor) -> None:
        """Send the one that asks for something, and waits for it as its second stage, a copy of a tensor."""
        reply = Operation(request.op, request.name, request.round, self.timeout)
        reply.one_sided = True
        published = self.publisher.publish(reply, tensor)
        numel = published.data.numel()
        exchange = Exchange([Send(source, published, 0, numel, (numel,))], (), digest=request.digest)
        self.outbox.post(Channel(request.name), reply, Stage(request.stage + 1, exchange, set(), {}))
        for lease in reply.leases:
            lease.release()

    def finish(self, handle: Handle[T], result: T | None, error: BaseException | None) -> None:
        """Keep the promise of something that a thread of this agent did by itself."""
        with held, self.lock:
            self._callbacks.extend((callback, handle) for callback in handle.end(result, error))
            self.wheel.notify()
            self.poller.wake()

    # Ended from outside

    def abort(self, error: ShoalError) -> None:
        """End all operations, now and from now on, with ``error``. The others are not told."""
        with held, self.lock:
            self.ended, self.aborted = self.ended or error, True
            for operation in self.rounds.in_flight():
                self.fail(operation, error)
            self.bundles.give_up(error)
            self.poller.wake()

    # Time

    def check(self, now: float) -> None:
        """Whatever is due: departures, questions, stall reports, deadlines. Sets when to come back."""
        try:
            self._check(now)
        except Exception as error:
            self.break_off(error)

    def _check(self, now: float) -> None:
        self.next_check = float("inf")  # what is done here may find more that is due
        self.router.check(now)
        if not self.outbox.said_goodbye and not self.deaf:
            for departure in self.departures.believed(now):
                self.hearing.on_gone(departure)
        following = self.departures.next if not self.outbox.said_goodbye else float("inf")
        following = min(following, self.bundles.check(now), *(one.check(now) for one in self.services.values()))
        for operation in self.rounds.in_flight():
            if now >= operation.deadline and not operation.computing:
                self.fail(operation, overdue(operation, self.rank, self.rounds, self.outbox))
            else:
                following = min(following, remind(operation, now, self.rank, self.outbox))
        self.next_check = min(self.next_check, following, self.router.next_check)

    # Driving

    def wait_for(self, handle: Handle[Any], timeout: float | None = None) -> bool:
        """Wait until an operation has ended, driving if nobody else does. False when ``timeout`` came first."""
        if self.abandoned:
            raise NotInitialized(
                f"waiting for {handle.operation}: this process was forked from that of rank {self.rank}, which goes on "
                "with it; wait there"
            )
        if self.wheel.mine:
            raise RuntimeError(
                f"waiting for {handle.operation} inside a callback or listener of Shoal would never end: start "
                "operations there, and wait for them elsewhere"
            )
        started = time.perf_counter_ns() if self.events.active else 0
        limit = time.monotonic() + timeout if timeout is not None else float("inf")
        while not (done := self.wheel.drive_until(handle.poll, limit)) and time.monotonic() < limit:
            held.checkpoint()  # a signal came; its handler raises, or the wait goes on
            if self.wheel.stopped:
                break
        if started:
            operation = handle.operation
            self.events.emit("waited", operation.op, operation.name, operation.round, started)
        return done

    def advance(self) -> None:
        try:
            self._advance()
        except Exception as error:  # a fault of ours; nobody else would hear of it in the progress thread
            with self.lock:
                self.break_off(error)

    def _advance(self) -> None:
        ready = self.ready
        while True:
            if self.bundles.waiting:
                self.bundles.start()
            while ready:
                operation = ready.popleft()
                stage = operation.stage
                if stage is not None and operation.error is None:
                    self.resume(operation, stage.arrived)
            with self.lock:
                self.outbox.flush()
            if not ready:
                return

    def handle(self, due: list[tuple[Callable[[int], None], int]]) -> None:
        try:
            for callback, events in due:
                callback(events)
            self.router.inbox.drain(self.hearing)
            self.pool.tidy()
            self.arena.tidy()
            self.next_check = min(self.next_check, self.router.next_check)
        except MemoryError as error:  # this agent's failure, not that of whoever sent something
            self.break_off(str(error) or "there is no memory for what others send")
        except Exception as error:  # a fault of ours; an agent that no longer hears must not look as if it did
            self.break_off(error)
        except BaseException:
            self.break_off("it was interrupted while it handled messages")
            raise

    def break_off(self, cause: str | Exception) -> None:
        """This agent has lost track of what the others said; it must not judge them any more."""
        if isinstance(cause, Exception):
            log.error("rank %d: the exchange failed", self.rank, exc_info=cause)
            cause = f"an internal error ended the exchange ({type(cause).__name__}: {cause}); its log says where"
        self.deaf = True
        self.abort(ShoalError(f"rank {self.rank}: {cause}; shut down and start again", (self.rank,)))

    def after(self) -> None:
        while self._callbacks:
            try:
                callback, handle = self._callbacks.popleft()
            except IndexError:  # another thread of this agent was quicker
                return
            try:
                with released:
                    callback(handle)
            except (Exception, SystemExit):
                log.exception("a callback of %s failed", handle.operation)

    # The end

    def check_may_close(self) -> None:
        """RuntimeError in a callback, whose thread is driving the exchange that is to be closed."""
        if self.wheel.mine:
            raise RuntimeError("shoal.shutdown() cannot be called from a callback of Shoal")

    def close(self, deadline: float, farewell: str = "", died: bool = False) -> None:
        """Say goodbye, give others what they still wait for, and free everything."""
        with held:
            close(self, deadline, farewell, died)

    def abandon_in_child(self) -> None:
        """In a forked child: close what would keep this agent's end from being noticed, and refuse whoever calls.

        The threads that held its locks are not there to let go of them.
        """
        self.lock._at_fork_reinit()  # type: ignore[attr-defined]
        self.closing = self.abandoned = True
        found = [*self.router.descriptors(), *self.arena.descriptors(), *self.poller.descriptors()]
        for fd in [*found, *(fd for service in self.services.values() for fd in service.descriptors())]:
            try:
                os.close(fd)
            except OSError:
                pass
