"""The engine of one agent: composes the parts that advance its operations, drives them, and shuts them down.

The problem: several threads submit many operations in any order, and these are matched with other agents' operations
without a coordinator. No thread may spin, a call of four bytes must not pay for a thread switch, and every wait has a
deadline.

How it works. ``lifecycle.py`` resumes an operation when the messages of its stage have arrived and posts its sends. A
message that no operation here will ever expect is refused, and both sides raise. An agent that has waited briefly for a
message probes its sender (ASK). A sender that will not send the message denies it (DENY). So disagreements are detected
in milliseconds instead of at the deadline, and a round without disagreement costs no extra message. ``progress.py``
decides which thread drives, ``dispatch.py`` handles messages by kind, ``failures.py`` lost agents, ``fusion.py`` fused
operations, ``watchdog.py`` deadlines. Imports have one direction, in the order in which the parts are created below. A
part that needs a later one receives a function.

Rejected: asyncio (a callback costs more than a small operation), a thread for each operation, and a progress thread
that does all the work (two thread switches for each blocking call, under one interpreter lock).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from .. import clock
from .._signals import deferred
from .._timeouts import parse_timeout
from ..errors import DeadlineExceeded, NotInitialized, ShoalError
from ..fault_tolerance.agreement import WORD, Agreement
from ..fault_tolerance.failures import Failures
from ..fault_tolerance.membership_states import MembershipTable
from ..fault_tolerance.partition import WORD as TOGETHER
from ..fault_tolerance.partition import PartitionResolver
from ..fault_tolerance.rejoin import Rejoin
from ..fault_tolerance.result_cache import HAD, RESULT, ResultCache, ResultTransfer
from ..operations.deadlock import DEADLOCK, Deadlocks
from ..operations.deferred_callbacks import Callbacks
from ..operations.devices import Devices
from ..operations.events import Events
from ..operations.fusion import Fusion
from ..operations.layout_mismatch import TENSORS, LayoutExchange
from ..operations.lifecycle import Lifecycle
from ..operations.matching import Matcher
from ..operations.membership import WHOLE, Plan
from ..operations.operation import FailurePolicy, FusionSpec, Handle, Operation
from ..operations.profiling import deferred_span, profiler, span
from ..operations.progress import Progress
from ..operations.publishing import Publisher
from ..operations.sender import Sender, send_alone
from ..operations.services import Services
from ..operations.shared_parts import SharedParts
from ..operations.stage import Steps as Generating
from ..transport.pending_peers import ENTRY
from ..transport.poller import Poller
from ..transport.router import Router
from ..transport.shared_regions import Arena, ResultPool
from .agent_status import StatusReporter
from .dispatch import Dispatch, Probe
from .face import EngineFace
from .shutdown import Shutdown
from .stalls import DOING, Stalls
from .training_metrics import StepCounter, TrainingMetrics
from .watchdog import ALIVE, Watchdog

log = logging.getLogger("shoal")
T = TypeVar("T")
PLAN = "plan"
"""The operation of :meth:`Engine.plan`."""


class Engine(EngineFace):
    """The exchange of one agent with the other agents."""

    def __init__(self, rank: int, size: int, timeout: float, incarnation: int = 0) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.events = events = Events()
        self.membership = membership = MembershipTable(size)
        self.services = services = Services()
        self.arena = Arena()
        self.pool = ResultPool()
        self.poller = Poller()
        self.router = router = Router(rank, self.poller, self.arena, self.pool, incarnation)
        self.devices = Devices(rank, self.arena, lambda: "network" in map(router.transport_to, range(size)))
        self.publisher = Publisher(rank, self.arena, self.devices)
        self.progress = progress = Progress(self, self.poller, f"shoal-{rank}")
        self.matcher = matcher = Matcher()
        self.sender = sender = Sender(
            rank, router, membership, events, lambda peer, cause: self.failures.on_closed(peer, cause)
        )
        self.callbacks = callbacks = Callbacks()
        parts = SharedParts(rank, size, router, events, membership, matcher, progress, sender)
        self.result_cache = result_cache = ResultCache(parts)
        self.lifecycle = lifecycle = Lifecycle(
            parts,
            self.publisher,
            lambda operation: self.fusion.begins(operation),
            lambda name, round_, on_loss: self.agreement.plan_of(name, round_, on_loss),
            callbacks,
            result_cache.ended,
        )
        self.fusion = fusion = Fusion(parts, lifecycle, lambda source, message: self.dispatch.take(source, message))
        self.result_transfer = results = ResultTransfer(parts, lifecycle, result_cache)
        self.agreement = agreement = Agreement(parts, membership, lifecycle, fusion, results)
        self.failures = failures = Failures(parts, membership, lifecycle, fusion, services, agreement)
        self.rejoin = Rejoin(parts, membership, agreement, failures)
        self.partition_resolver = PartitionResolver(parts, membership, lifecycle.gate, agreement)
        self.deadlocks = deadlocks = Deadlocks(parts, lifecycle, timeout)
        self.step_counter, self.training_metrics = StepCounter(events), TrainingMetrics(events)
        self.status_reporter = about = StatusReporter(
            parts, agreement, lifecycle.gate, services, self.step_counter, self.training_metrics
        )
        self.stalls = stalls = Stalls(parts, about, services)
        self.watchdog = watchdog = Watchdog(parts, lifecycle, failures, agreement, deadlocks, stalls)
        self.layout_exchange = LayoutExchange(rank, membership, sender, progress)
        services.add(TENSORS, self.layout_exchange)
        probes = {
            ALIVE: Probe(watchdog.answer, watchdog.on_answer),
            DOING: Probe(stalls.answer, stalls.on_answer),
            DEADLOCK: Probe(deadlocks.serve, deadlocks.judge),
        }
        self.dispatch = Dispatch(parts, lifecycle, fusion, failures, services, probes)
        router.describe_by(self._describe)
        router.ask_others_by(sender.ask_to_connect)
        router.deliver_to(self.dispatch)
        self._shutdown = Shutdown(parts, lifecycle, fusion, services, result_cache)
        # The face of the engine. Modules outside of the engine use no other part of it.
        publisher, arena = self.publisher, self.arena
        # For operations and backends:
        self.publish, self.publish_joined = publisher.publish, publisher.publish_joined
        self.keep_unpublished, self.reserve = publisher.keep, publisher.room
        self.problem, self.result_memory = publisher.problem, self.pool.empty
        self.send_control, self.send_bytes = sender.send_control, sender.send_bytes
        self.send_tensor = partial(send_alone, publisher, sender)
        self.acknowledge, self.refuse, self.flush = sender.acknowledge, sender.refuse, sender.flush
        self.count_sent, self.transport_to = sender.count, router.transport_to
        self.rounds_begun, self.fail = matcher.begun, lifecycle.fail
        self.active_operation, self.in_flight = matcher.active, matcher.in_flight
        stages = lifecycle.backend_stages
        self.transferred, self.send_withdrawal = stages.moved, stages.send_withdrawal
        self.check_by, self.wake, self.notify = progress.check_by, self.poller.wake, progress.notify
        self.drive_until, self.begins_to_wait = progress.drive_until, stalls.begins_to_wait
        self.check_joined, self.joining_peers = self.rejoin.check_joined, self.rejoin.asking
        self.add_service, self.service = services.add, services.get
        self.cut_off = failures.break_off
        # For optimizers:
        self.step_ended, self.note_metric = self.step_counter.ended, self.training_metrics.note
        # For windows and buckets: memory that neighbours map.
        self.find_shared, self.next_region, self.shared_memory = arena.find, arena.next_ident, arena.empty
        self.retire_region, self.share_region = arena.retired.append, sender.share
        self.describe_member = membership.describe
        # For the start, and for monitoring:
        self.listen, self.meet, self.begin_waiting = router.listen, router.meet, self.rejoin.begin_waiting
        self.describe, self.record_events = router.describe, events.record
        self.edge_counters, self.is_waited_for = sender.traffic, matcher.is_waited_for
        self.watch_membership = membership.watch
        self.lock = progress.lock  # guards all of the exchange
        self.abandoned = False  # whether this is a forked child's copy
        self.compresses_locally = False  # compressors encode messages within this machine, too

    def start(self) -> None:
        self.progress.start()

    def _describe(self, within: float) -> dict[str, Any]:
        """This agent's status, for `shoal status`. Called from any thread, which may hold another agent's lock."""
        # With a limit: the caller may hold another agent's lock, and the holder of this one may wait for that.
        if not self.lock.acquire(timeout=within):
            return self.status_reporter.busy
        try:
            return self.status_reporter.as_json()
        finally:
            self.lock.release()

    # Operations

    def submit(
        self,
        op: str,
        name: str,
        steps: Callable[[Operation], Generating[T]] | FusionSpec,
        timeout: float | None = None,
        alone: bool = True,
        one_sided: bool = False,
        on_loss: FailurePolicy = FailurePolicy.FAIL,
        background: bool = False,
        among: Sequence[int] | None = None,
    ) -> Handle[T]:
        """Begin an operation.

        Args:
            op: The public name of the call, for matching and for error messages.
            name: The name by which calls are matched. Names that begin with ``~`` are internal to Shoal.
            steps: Creates the generator of the operation, which runs in the caller's thread until its first exchange. A
                :class:`~.operation.FusionSpec` describes an operation that may be fused, and that begins when a thread
                drives.
            timeout: Seconds until :class:`~shoal.DeadlineExceeded`.
            alone: Refuse the operation while one of the same kind and name is in flight.
            one_sided: The other agents make no matching call. The operation survives the loss of an agent that it does
                not need.
            on_loss: The reaction to the loss of a needed agent, with ``on_loss="continue"``.
            background: Whether the operation is internal: its waiting is not reported, and no error is kept for it.
            among: The ranks that call it, if not all.
        """
        seconds = self.timeout if timeout is None else parse_timeout(timeout, self.timeout)
        if not self.agreement.active:
            on_loss = FailurePolicy.FAIL
        if self.membership.view.is_joining and on_loss is not FailurePolicy.RETRY and op != PLAN:
            raise self.rejoin.not_joined(op)
        limit = 0.0
        while True:
            with deferred_span(op, name, "submit") if profiler._is_profiler_enabled else deferred:
                handle = self.lifecycle.submit(
                    self, op, name, steps, seconds, alone, one_sided, on_loss, background, among
                )
            if handle is not None:
                break
            limit = limit or clock.monotonic() + seconds
            self._await_agreement(op, limit, seconds)
        if self.callbacks.due:
            self.after()
        return handle

    def plan(self, name: str) -> Plan:
        """The plan of the next round of a name. For a call of several operations."""
        if not self.agreement.active:
            return WHOLE
        return self.submit(PLAN, name, _planned, on_loss=FailurePolicy.SKIP_MISSING).wait()

    def _await_agreement(self, op: str, limit: float, seconds: float) -> None:
        """Wait until the survivors have agreed on a loss."""
        lifecycle, progress = self.lifecycle, self.progress
        call = f"{op} on rank {self.rank}"
        # This thread would have to receive the reports for which it waits.
        if progress.mine:
            raise RuntimeError(
                f"{call}: an agent was lost just now, and nothing can begin inside a callback until then"
            )
        while not progress.drive_until(lambda: not lifecycle.gate.paused, limit):
            deferred.checkpoint()
            if progress.stopped:
                raise NotInitialized(f"{call}: this agent has shut down; call shoal.init() first")
            if clock.monotonic() >= limit:
                with self.lock:
                    missing = self.agreement.missing
                raise DeadlineExceeded(
                    f"{call} waited {seconds:g} s for ranks {missing}: they have not acknowledged the loss of an agent",
                    missing,
                )

    def survive_losses(self, stops_as_minority: bool = False) -> None:
        """Let operations survive losses; with ``stops_as_minority``, not in a minority. Call it before the start."""
        self.agreement.activate(stops_as_minority)
        self.services.add(WORD, self.agreement)
        self.services.add(HAD, self.result_cache)
        self.services.add(RESULT, self.result_transfer)
        self.services.add(ENTRY, self.rejoin)
        self.services.add(TOGETHER, self.partition_resolver)
        self.partition_resolver.activate()

    def begin_without(self, ranks: tuple[int, ...]) -> None:
        """Begin without agents that have not started and may join later. Call it before the exchange starts."""
        self.membership.begin_without(ranks)
        self.agreement.begin_without(ranks)

    def finish(self, handle: Handle[T], result: T | None, error: BaseException | None) -> None:
        """Set the outcome of a handle whose work a thread of this agent did by itself."""
        with deferred, self.lock:
            self.lifecycle.finish(handle, result, error)
            # finish() notifies the waiting threads only. The thread that drives may itself wait for this handle, in
            # poll().
            self.poller.wake()

    def wait_for(self, handle: Handle[Any], timeout: float | None = None) -> bool:
        """Wait until an operation has ended, and drive if no other thread does. False if ``timeout`` passes first."""
        if self.abandoned:
            raise NotInitialized(
                f"waiting for {handle.operation}: this process was forked from that of rank {self.rank}, which goes on "
                "with it; wait there"
            )
        if self.progress.mine:
            raise RuntimeError(
                f"waiting for {handle.operation} inside a callback or listener of Shoal would never end: start "
                "operations there, and wait for them elsewhere"
            )
        started = clock.perf_counter_ns() if self.events.active else 0
        limit = clock.monotonic() + timeout if timeout is not None else float("inf")
        with span(handle.operation.op, handle.operation.name, "wait"):
            while not (done := self.progress.drive_until(handle.poll, limit)) and clock.monotonic() < limit:
                deferred.checkpoint()  # a signal arrived: its handler raises, or the wait continues
                if self.progress.stopped:
                    break
        if started:
            operation = handle.operation
            key, thread = (operation.op, operation.name, operation.round), threading.current_thread().name
            self.events.emit("waited", *key, started, -1, 0, thread)
        return done

    def give_up(self, handle: Handle[Any], error: BaseException) -> None:
        """End an operation of this agent that no thread waits for any more. Other agents learn it when they probe."""
        with deferred, self.lock:
            self.lifecycle.fail(handle.operation, error)
            # The failure may have queued answers to other agents, and the driving thread may be in poll().
            self.poller.wake()

    def abort(self, error: ShoalError) -> None:
        """End all current and later operations with ``error``. The other agents are not notified."""
        with deferred, self.lock:
            self.failures.abort(error)
            self.poller.wake()

    # The interface of a driven object, for the progress engine

    def advance(self) -> None:
        lifecycle, sender, backend = self.lifecycle, self.sender, self.lifecycle.backend_stages.backend
        try:
            while True:
                if lifecycle.unbegun:
                    self.fusion.begin()
                if backend is not None and backend.due:
                    backend.begin()
                if lifecycle.ready:
                    lifecycle.resume_ready()
                if sender.dirty or self.arena.retired:
                    with self.lock:
                        sender.flush()
                # Work that a flush or a resumed operation has made ready would otherwise wait for the next message.
                if not lifecycle.ready and not (backend is not None and backend.due):
                    return
        except Exception as error:  # an internal error, which no caller would see in the progress thread
            with self.lock:
                self.break_off(error)

    def handle(self, due: list[tuple[Callable[[int], None], int]]) -> None:
        try:
            for callback, events in due:
                callback(events)
            if self.router.inbox.messages:
                self.router.inbox.drain(self.dispatch)
            for returns in (self.pool, self.arena):
                if returns.returned or returns.ended:
                    returns.tidy()
            self.progress.check_by(self.router.next_check)
        except MemoryError as error:  # this agent's failure, not the sender's
            self.failures.break_off(str(error) or "there is no memory for what others send")
        except Exception as error:  # an internal error: this agent reads no messages any more
            self.break_off(error)
        except BaseException:
            # The rest of the received messages is lost. This agent could take their senders for the cause of what
            # follows.
            self.failures.break_off("it was interrupted while it handled messages")
            raise

    def check(self, now: float) -> float:
        try:
            self.router.check(now)
            # Losses before deadlines: if both are due, the error has to name the lost agent and not only a timeout.
            return min(
                self.failures.check(now),
                self.fusion.check(now),
                *(service.check(now) for service in self.services.all()),
                self.watchdog.check(now),
                self.stalls.check(now),
                self.router.next_check,
            )
        except Exception as error:
            self.break_off(error)
            return float("inf")

    def after(self) -> None:
        if self.callbacks.due and not self.lifecycle.gate.paused:  # operations of callbacks would have to wait
            self.callbacks.run()

    def break_off(self, error: Exception) -> None:
        log.error("rank %d: the exchange failed", self.rank, exc_info=error)
        cause = f"an internal error ended the exchange ({type(error).__name__}: {error}); its log says where"
        self.failures.break_off(cause)

    # Shutdown

    def check_may_close(self) -> None:
        """Raise RuntimeError in a callback, because its thread drives the exchange that is to be closed."""
        if self.progress.mine:
            raise RuntimeError("shoal.shutdown() cannot be called from a callback of Shoal")

    def close(self, deadline: float, why: str = "", died: bool = False) -> None:
        """Send the shutdown message, deliver the messages that other agents still wait for, and free all resources.

        Called by one thread. An exception of a signal handler shortens the shutdown: the remaining resources are freed
        without waiting, and it is raised at the end. All resources are freed, whichever step fails.
        """
        # Called from the last to the first: links are closed before the memory that they read. The poller is closed
        # last, because all of them use it.
        free = (self.poller.close, self.pool.clear, self.devices.close, self.arena.close, self.router.close, self.after)
        self._shutdown.run(deadline, why, died, free)

    def abandon_in_child(self) -> None:
        """Refuse all calls in a forked child, and close descriptors that would hide this agent's end from others.

        The threads that held the locks do not exist in the child and cannot release them.
        """
        self.lock._at_fork_reinit()  # type: ignore[attr-defined]
        self.abandoned = True
        self.lifecycle.gate.refuse_all()
        parts = (self.router.descriptors, self.arena.descriptors, self.devices.descriptors, self.poller.descriptors)
        for descriptors in (*parts, *(service.descriptors for service in self.services.all())):
            for fd in descriptors():
                with suppress(OSError):
                    os.close(fd)


def _planned(operation: Operation) -> Generating[Plan]:
    return operation.plan
    yield  # makes it a generator, without an exchange
