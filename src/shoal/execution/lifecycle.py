"""The life of an operation: submitted, resumed, entering its stages, ended with a result or an error.

An operation is a generator (``operation.py``). It is resumed when the messages of its stage have arrived, which
``matching.py`` decides. Only this module begins, resumes and ends operations: ``dispatch.py`` calls it for messages,
``watchdog.py`` for deadlines, ``failure_detector.py`` for lost agents. ``fusion.py`` overrides how fused operations
proceed and fail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

import torch

from .. import clock
from ..errors import Mismatch, ShoalError
from ..transport.messages import Message, Where
from .backend_stages import BackendStages
from .events import LONG_NS, profiler, span
from .matching import Channel, disagreement, unexpected
from .membership import WHOLE, Plan
from .operation import FailurePolicy, FusionSpec, Handle, HandleDriver, Operation, Recovery, describe
from .progress import AFTER_SMALL, Callbacks
from .publishing import Publisher
from .shared_parts import SharedParts
from .stage import MORE, Arrived, Exchange, Stage, Steps, Yields
from .submission_gate import DepartedPeerPolicy, SubmissionGate, impossible_without

T = TypeVar("T")

ASK_AFTER = 0.02
"""Seconds without a message after which this agent probes its sender."""


class Lifecycle:
    """The lifecycle of all operations of one agent. Used under the engine's lock, unless a method takes it itself.

    Args:
        unpack_fused: Unpacks the fused messages for an operation; called before it enters a stage, if there are any.
        planned: Returns the agreed plan of a round of a name, and the ranks lost since; for operations that may
            survive a loss.
        on_ended: Called at the end of an operation that restarts after a loss, with a copy of its result, or None.

    Attributes:
        ready: The operations that the driving thread resumes.
        unbegun: The operations that may be fused and begin when a thread drives. Fusion takes them from here.
        fused_early: The fused messages with parts for operations that have not begun, by name and round of each part.
            Fusion keeps them here.
        gate: Decides which operations may begin.
        callbacks: The callbacks that the driving thread runs.
        departed_peers: Reports agents that have shut down although they are needed.
        backend_stages: Manages the stages whose tensors a backend moves.
    """

    def __init__(
        self,
        parts: SharedParts,
        publisher: Publisher,
        unpack_fused: Callable[[Operation], None],
        planned: Callable[[str, int, FailurePolicy], tuple[Plan, frozenset[int]]],
        callbacks: Callbacks,
        on_ended: Callable[[Operation, torch.Tensor | None], None],
    ) -> None:
        self.ready: deque[Operation] = deque()
        self.unbegun: deque[Operation] = deque()
        self.fused_early: dict[tuple[str, int], list[Any]] = {}
        self.gate = SubmissionGate(parts.progress.notify)
        self.late_refusal: ShoalError | None = None  # of a round that had ended here; the next call raises it
        self.callbacks = callbacks
        self.callers: set[int] = set()  # threads that have begun an operation, by get_ident()
        self._rank = parts.rank
        self._progress = parts.progress
        self._lock = parts.progress.lock
        self._matcher = parts.matcher
        self._publisher = publisher
        self._sender = parts.sender
        self._membership = parts.membership
        self._events = parts.events
        self._unpack_fused = unpack_fused
        self._planned = planned
        self._on_ended = on_ended
        self.departed_peers = DepartedPeerPolicy(parts, self.gate)
        self.backend_stages = BackendStages(parts, self.gate, self.go_on)

    # Begin

    def submit(
        self,
        driver: HandleDriver,
        op: str,
        name: str,
        steps: Callable[[Operation], Steps[T]] | FusionSpec,
        seconds: float,
        alone: bool,
        one_sided: bool,
        on_loss: FailurePolicy = FailurePolicy.FAIL,
        background: bool = False,
        among: Sequence[int] | None = None,
        error: BaseException | None = None,
    ) -> Handle[T] | None:
        """Begin an operation; see :meth:`Engine.submit`. Takes the lock itself, and starts the generator without it.

        With ``error`` it fails at once. None if the operation has to wait, because the gate is shut.
        """
        with self._lock:
            gate = self.gate
            self.callers.add(get_ident())
            if gate.closing or gate.ended is not None:
                gate.check_open(op, one_sided)
            if gate.shut and not one_sided and error is None:
                return None
            operation = self._matcher.begin(op, name, seconds, alone)
            if gate.plan.gone and on_loss is FailurePolicy.FAIL and not one_sided:
                error = error or impossible_without(operation, gate.plan.gone)
            if self._events.active:
                self._events.emit("submitted", op, name, operation.round)
            if on_loss is not FailurePolicy.FAIL and error is None:
                begins = steps.alone if isinstance(steps, FusionSpec) else steps
                unplanned = WHOLE, frozenset[int]()
                plan, lost = unplanned if gate.plan == WHOLE else self._planned(name, operation.round, on_loss)
                operation.recovery = recovery = Recovery(begins, on_loss, plan, lost)
                if recovery.first_stage:
                    self.begin_attempt(operation, recovery.first_stage)
            handle: Handle[T] = Handle(driver, operation)
            operation.handle = handle
            operation.one_sided, operation.background, operation.among = one_sided, background, among
            self._progress.check_by(operation.deadline)
            if self.late_refusal is not None and not (one_sided or background):
                error, self.late_refusal = error or self.late_refusal, None
            if error is not None:
                # The failed call still uses a round: the other agents make theirs, which would otherwise match the next
                # call here.
                self.fail(operation, error)
                return handle
            if isinstance(steps, FusionSpec):
                spoiled = self._publisher.problem(operation, steps.flat)
                if spoiled is not None:  # it fails alone; fused, it would fail the others
                    self.fail(operation, spoiled)
                    return handle
                operation.fusible = steps
                self.unbegun.append(operation)
                self._progress.submitted(AFTER_SMALL)
                return handle
        if not self._create_generator(operation, steps):
            assert operation.error is not None
            raise operation.error
        self.resume(operation, None)
        with self._lock:
            self._progress.submitted()
        return handle

    def begin(self, operation: Operation) -> None:
        """Begin, by itself, an operation that may be fused. Called with or without the lock."""
        fusible = operation.fusible
        assert fusible is not None
        if self._create_generator(operation, fusible.alone):
            self.resume(operation, None)

    def _create_generator(
        self, operation: Operation, begins: Callable[[Operation], Steps[Any]], past_first: bool = False
    ) -> bool:
        """Create the generator of an operation; ``past_first`` advances it past its first exchange, sent before.

        It computes. An error fails the operation, so that other agents do not wait for it.
        """
        try:
            operation.generator = generator = begins(operation)
            if past_first:
                next(generator)
        except BaseException as error:
            with self._lock:
                self.fail(operation, error)
            if not isinstance(error, Exception):
                raise
            return False
        return True

    # Continue

    def make_ready(self, operation: Operation) -> None:
        """Queue an operation whose stage is complete; the driving thread resumes it."""
        self.ready.append(operation)

    def resume(self, operation: Operation, arrived: Arrived | None) -> None:
        """Run an operation to its next exchange. Without the lock, because it may compute."""
        if torch.is_inference_mode_enabled():  # another thread may continue with these tensors
            with torch.inference_mode(False):
                self.resume(operation, arrived)
            return
        generator = operation.generator
        if generator is None:  # it has failed since
            return
        started = clock.perf_counter_ns() if self._events.active else 0
        item: Yields | None = None
        result, error = None, None
        try:
            if arrived is None:
                item = next(generator)
            elif profiler._is_profiler_enabled:
                with span(operation.op, operation.name, "sum"):
                    item = generator.send(arrived)
            else:
                item = generator.send(arrived)
        except StopIteration as stop:
            result = stop.value
        except BaseException as caught:
            error = caught
        if started and (arrived is not None or clock.perf_counter_ns() - started > LONG_NS):
            kind = "prepared" if arrived is None else "summed"
            self._events.emit(kind, operation.op, operation.name, operation.round, started)
        try:
            with self._lock:
                if operation.generator is generator:
                    (operation.owner or self).proceed(operation, item, result, error)
                else:  # it has restarted or failed while the generator ran
                    generator.close()
                    if operation.error is not None:
                        operation.release()  # the generator may have published since the failure
        except BaseException as interrupt:
            with self._lock:
                self.fail(operation, interrupt)
            raise
        if error is not None and not isinstance(error, Exception):
            raise error

    def resume_ready(self) -> None:
        """Resume all operations that are ready. Without the lock."""
        ready = self.ready
        while ready:
            operation = ready.popleft()
            stage = operation.stage
            # A restarting operation may leave the queue: the agreement queues it again, or ends it with its result.
            if operation.error is not None or (self.gate.paused and operation.restarts):
                continue
            recovery = operation.recovery
            if recovery is not None and recovery.again:
                recovery.again = False
                # In its stage it passes its first exchange, and receives the messages of that stage again.
                if self._create_generator(operation, recovery.steps, past_first=stage is not None):
                    self.resume(operation, None if stage is None else stage.arrived)
            elif stage is not None or operation.is_suspended:
                self.resume(operation, None if stage is None else stage.arrived)

    def proceed(self, operation: Operation, item: Yields | None, result: Any, error: BaseException | None) -> None:
        """Handle the value that an operation has yielded, or its end."""
        if operation.error is not None:  # it has failed since
            operation.drop_generator()
            operation.release()
        elif self.gate.paused and error is None and operation.restarts:
            pass  # the survivors are about to agree whether it restarts
        elif item is MORE:
            operation.waiting_more = True
        elif isinstance(item, Exchange):
            self._enter(operation, item)
        elif item is not None and not isinstance(item, str):
            operation.waiting_more = True
            item.add_done_callback(partial(self._future_done, operation))
        elif error is None and operation.unconfirmed:
            self.await_confirmation(operation, result)
        else:
            self.settle(operation, result, error)

    def await_confirmation(self, operation: Operation, result: Any) -> None:
        """Keep the result of an operation until its destinations have confirmed its messages."""
        operation.outcome = (result,)
        self.leave_stage(operation)
        # Without this check, the last one may precede this wait, and a cycle of such waits would never be detected.
        self._progress.check_by(clock.monotonic() + ASK_AFTER)
        # A message for an operation that expects none is a mismatch: settle() refuses it and fails the operation.
        if self._matcher.has_early(operation):
            self.settle(operation, None, None)

    def _enter(self, operation: Operation, exchange: Exchange) -> None:
        """Begin a stage: take messages that arrived early, then send.

        The order matters because an early message may not match. Then nothing is sent, and no peer has to refuse it.
        """
        if operation.stage is not None:
            self.leave_stage(operation)
        number = operation.next_stage
        if exchange.stage is not None:
            number = exchange.stage + (operation.recovery.first_stage if operation.recovery is not None else 0)
        now, backend = clock.monotonic(), self.backend_stages
        to_move = backend.backend is not None and backend.carries(operation, exchange)
        stage = Stage(number, exchange, set(exchange.sources), {}, to_move=to_move, started=now)
        if self.fused_early:
            self._unpack_fused(operation)
        operation.stage = stage
        operation.next_stage = number + 1
        matcher, sent = self._matcher, number in operation.stages_sent
        if matcher.early:
            for source, message in matcher.early_messages(operation, number):
                if message.where is not Where.CARRIED or stage.to_move:  # else the tensor follows over a link
                    self.take(operation, stage, source, message)
        if self._membership.view.epoch or self.gate.ended is not None:
            lost = self.departed_peers.leave_out_departed(operation, stage, stage.missing if sent else stage.needs)
            if lost is not None:
                self.fail(operation, lost)
        if operation.error is not None:
            return
        if matcher.asks:
            for source, only_if_here in matcher.early_probes(operation, stage):
                self._sender.answer(source, operation, stage, only_if_here)
        channel = operation.channel
        if sent:
            stage.posted = True
        elif (channel.unacknowledged or channel.deferred) and channel.must_defer(operation, stage):
            channel.defer(operation, stage)
        else:
            self._sender.post(channel, operation, stage)
        if not self.go_on(operation, stage):
            self._progress.check_by(now + ASK_AFTER)

    def go_on(self, operation: Operation, stage: Stage) -> bool:
        """Queue the operation if its stage is complete; otherwise request the backend's transfer if it is due.

        Returns whether the stage was complete.
        """
        if stage.complete:
            self.ready.append(operation)
            return True
        if stage.to_move:
            self.backend_stages.ask_if_agreed(operation, stage)
        return False

    def leave_stage(self, operation: Operation) -> None:
        """Acknowledge the messages of a stage that the operation has used: their senders may free the memory."""
        stage = operation.stage
        if stage is None:
            return
        if stage.to_move:
            self.backend_stages.leave(operation, stage)
        for source, message in stage.arrived.items():
            self._sender.acknowledge(source, message)
        stage.arrived = {}
        operation.stage = None

    def send_deferred(self, channel: Channel) -> None:
        """Send the messages of a name that waited for its receivers."""
        if channel.deferred:
            for operation, stage in channel.sendable():
                self._sender.post(channel, operation, stage)
                self.go_on(operation, stage)
        self._matcher.tidy(channel)

    # Messages of other agents

    def take(self, operation: Operation, stage: Stage, source: int, message: Message) -> None:
        """Give a message to a stage if both agents agree on it; refuse it otherwise."""
        reason = disagreement(operation, stage, source, message, self._rank)
        if reason:
            self.fail(operation, self._refuse(source, message, reason))
        else:
            self.accept(operation, stage, source, message)

    def accept(self, operation: Operation, stage: Stage, source: int, message: Message) -> None:
        """Give a stage its message, and resume the operation when more of the payload arrives."""
        stage.take(source, message)
        carried = stage.exchange.carried
        # The sender requests the transfer only after this confirmation; without it, the tensor would never be moved.
        if stage.to_move and carried is not None and carried.confirm:
            self._sender.send_reached(source, operation, stage.number)
        payload = message.payload
        if payload is not None and not payload.complete:
            payload.on_more = partial(self._more_arrived, operation)

    def _more_arrived(self, operation: Operation) -> None:
        if operation.waiting_more:
            operation.waiting_more = False
            self.make_ready(operation)

    def _future_done(self, operation: Operation, error: BaseException | None) -> None:
        """Resume or fail an operation that waits for a future. Called from the thread that completes the future."""
        with self._lock:
            if error is None:
                self._more_arrived(operation)
            elif operation.error is None:
                self.fail(operation, error)
            self._progress.wake()

    def acknowledged(self, source: int, token: int) -> None:
        """Handle an acknowledgement: a receiver has read a message, or never will."""
        found = self._sender.acknowledged(source, token)
        if found is None:
            return
        sent, channel = found
        for operation in sent.parts:
            self._end_if_confirmed(operation)
        self.send_deferred(channel)

    def confirmed_in_part(self, source: int, message: Message) -> None:
        """Handle a confirmation: a receiver expected one of the tensors of a fused message."""
        operation = self._sender.confirmed_in_part(source, message)
        if operation is not None:
            self._end_if_confirmed(operation)

    def _end_if_confirmed(self, operation: Operation) -> None:
        may_restart = self.gate.paused and operation.restarts  # the survivors are about to agree
        if operation.outcome is not None and not operation.unconfirmed and operation.error is None and not may_restart:
            outcome, operation.outcome = operation.outcome, None
            self.settle(operation, outcome[0], None)

    def refuse_unexpected(self, source: int, message: Message) -> Mismatch:
        """Refuse a message that no operation here expects. Returns the error for this side."""
        return self._refuse(source, message, unexpected(source, self._rank))

    def _refuse(self, source: int, message: Message, reason: str) -> Mismatch:
        call = describe(message.op, message.name, message.round)
        self._sender.refuse(source, message, f"{call}: rank {self._rank} refused it: {reason}")
        return Mismatch(f"{call}: {reason}", (source, self._rank))

    def fail_after_end(self, source: int, message: Message, error: ShoalError) -> None:
        """Fail one call for a round that ended here and did not match: one that waits for the peer, or the next one."""
        # Each agent in the round may refuse it, at any later time: each refusal would fail another correct call.
        if not self._matcher.contradict(message, error):
            return
        for operation in self._matcher.under(message.name):
            if source in operation.waiting_for:
                self.fail(operation, error)
                return  # one error fails one call; the later rounds may match
        self.late_refusal = error

    # End

    def settle(self, operation: Operation, result: Any, error: BaseException | None) -> None:
        """End an operation with a result or an error."""
        operation.error = error
        ended_well = error is None
        late, asks = self._matcher.end(operation, error)  # first: the steps below may cause messages for it
        self.leave_stage(operation)
        recovery = operation.recovery
        if recovery is not None and recovery.on_loss is FailurePolicy.RETRY:
            self._on_ended(operation, recovery.copy if ended_well else None)
        if operation.leases or recovery is not None:
            operation.release()
        if operation.on_end is not None and ended_well:
            operation.on_end(result)
        for source, message in late:
            # The refused sender fails, so the operation has to fail here as well, although it has its result.
            if ended_well:
                error = operation.error = self.refuse_unexpected(source, message)
                self._matcher.contradict(operation, error)
            else:
                self._sender.acknowledge(source, message)
        for number, source, _ in asks:
            self._sender.deny(source, operation, number, self._matcher.failure_of(operation))
        self.send_deferred(operation.channel)
        handle, operation.handle = operation.handle, None  # a reference cycle would keep the result until a collection
        assert handle is not None
        self.finish(handle, result, error)
        if operation.on_outcome is not None:
            operation.on_outcome(result, error)
        if self._events.active:
            kind, detail = ("finished", "") if error is None else ("failed", f"{type(error).__name__}: {error}")
            self._events.emit(kind, operation.op, operation.name, operation.round, detail=detail)

    def fail(self, operation: Operation, error: BaseException) -> None:
        """End an operation from outside. A fused operation ends with all its members."""
        if operation.owner is not None:
            operation.owner.fail(operation, error)
        elif operation.handle is not None:
            self.settle(operation, None, error)
            operation.drop_generator()

    def fail_all(self, error: BaseException) -> None:
        """End all operations in flight."""
        for operation in self._matcher.in_flight():
            self.fail(operation, error)

    def close(self, error: ShoalError, died: bool) -> None:
        """Accept no more operations, and end operations that wait for other agents.

        Operations that only wait for their turn to send continue, unless this agent ``died``.
        """
        for operation in self._matcher.in_flight():
            if died or not operation.channel.defers(operation):
                self.fail(operation, error)
        self.gate.refuse_all()
        # Senders of messages for calls that this agent never made wait for an answer, perhaps to shut down as well.
        for source, message in self._matcher.give_up_early():
            self._sender.acknowledge(source, message)

    def finish(self, handle: Handle[T], result: T | None, error: BaseException | None) -> None:
        """Set the outcome of a handle."""
        for callback in handle.end(result, error):
            self.callbacks.add(callback, handle, handle.operation)
        self._progress.notify()

    # Restart after a loss

    def begin_attempt(self, operation: Operation, stage: int) -> None:
        """Continue at ``stage``. Messages for earlier stages belong to another attempt and are dropped."""
        operation.next_stage = stage
        for source, message in self._matcher.begin_attempt(operation, stage):
            self._sender.acknowledge(source, message)
