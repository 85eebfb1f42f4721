"""The engine of one agent: composes the parts that advance its operations, drives them, and shuts them down.

The problem: several threads submit many operations in any order, and these are matched with other agents' operations
without a coordinator. No thread may spin, a call of four bytes must not pay for a thread switch, and every wait has a
deadline.

How it works. ``lifecycle.py`` resumes an operation when the messages of its stage have arrived and posts its sends. A
message that no operation here will ever expect is refused, and both sides raise. An agent that has waited briefly for a
message probes its sender (ASK). A sender that will not send the message denies it (DENY). So disagreements are detected
in milliseconds instead of at the deadline, and a round without disagreement costs no extra message. ``progress.py``
decides which thread drives, ``dispatch.py`` handles messages by kind, ``failure_detector.py`` lost agents,
``fusion.py`` fused operations, ``watchdog.py`` deadlines. Imports have one direction, in the order in which the parts
are created below. A part that needs a later one receives a function.

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
from ..clock import parse_timeout
from ..config import Config
from ..errors import DeadlineExceeded, NotInitialized, ShoalError
from ..execution.backend_stages import CollectiveBackend
from ..execution.control_messages import Services
from ..execution.deadlock import DEADLOCK, Deadlocks
from ..execution.devices import Devices
from ..execution.events import NO_SPAN, Events, deferred_span, profiler, span
from ..execution.fusion import Fusion
from ..execution.layout_mismatch import TENSORS, LayoutExchange
from ..execution.lifecycle import Lifecycle
from ..execution.matching import Matcher
from ..execution.membership import WHOLE, Plan, View
from ..execution.operation import FailurePolicy, FusionSpec, Handle, Operation
from ..execution.progress import Callbacks, Progress
from ..execution.publishing import Publisher
from ..execution.sender import Sender, send_alone
from ..execution.shared_parts import SharedParts
from ..execution.stage import Steps as Generating
from ..fault_tolerance.agreement import AGREEMENT, Agreement
from ..fault_tolerance.failure_detector import Failures
from ..fault_tolerance.membership_states import MembershipTable
from ..fault_tolerance.partition import PARTITION, PartitionResolver
from ..fault_tolerance.recovery import HAD, RESULT, ResultCache, ResultTransfer
from ..fault_tolerance.rejoin import Rejoin
from ..transport.acceptor import ENTRY
from ..transport.poller import Poller
from ..transport.router import Router
from ..transport.shared_regions import Arena, ResultPool
from ..transport.tls import Certificates
from .agent_status import StatusReporter, StepCounter, TrainingMetrics
from .dispatch import Dispatch, Probe
from .shutdown import Shutdown
from .watchdog import ALIVE, DOING, Stalls, Watchdog

log = logging.getLogger("shoal")
T = TypeVar("T")
PLAN = "plan"
"""The operation of :meth:`Engine.plan`."""


class Engine:
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
            lambda operation: self.fusion.unpack_for(operation),
            lambda name, round_, on_loss: self.agreement.plan_of(name, round_, on_loss),
            callbacks,
            result_cache.ended,
        )
        self.fusion = fusion = Fusion(parts, lifecycle, lambda source, message: self.dispatch.take(source, message))
        self.result_transfer = results = ResultTransfer(parts, lifecycle, result_cache)
        self.agreement = agreement = Agreement(parts, membership, lifecycle, fusion, results)
        self.failures = failures = Failures(parts, membership, lifecycle, fusion, services, agreement)
        self.rejoin = Rejoin(parts, membership, agreement, failures, lifecycle.gate)
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
        router.describe_by(about.describe)
        router.send_by(sender.send_message)
        router.deliver_to(self.dispatch)
        self._shutdown = partial(Shutdown, parts, lifecycle, fusion, services, result_cache)
        # The interface of the engine, with the properties below. Modules outside of the engine use no part by itself.
        publisher, arena, gate, place = self.publisher, self.arena, lifecycle.gate, router.place
        # For operations and backends:
        self.publish, self.publish_joined = publisher.publish, publisher.publish_joined
        self.keep_unpublished, self.reserve = publisher.keep_unpublished, publisher.reserve
        self.problem, self.result_memory = publisher.problem, self.pool.empty
        self.send_control, self.send_bytes = sender.send_control, sender.send_bytes
        self.send_tensor = partial(send_alone, publisher, sender)
        self.acknowledge, self.refuse, self.flush = sender.acknowledge, sender.refuse, sender.flush
        self.count_sent, self.transport_to = sender.count_sent, router.transport_to
        self.rounds_begun, self.fail = matcher.rounds_begun, lifecycle.fail
        self.active_operation, self.in_flight = matcher.active_operation, matcher.in_flight
        stages = lifecycle.backend_stages
        self.transferred, self.send_withdrawal = stages.transferred, stages.send_withdrawal
        self.check_by, self.wake, self.notify = progress.check_by, self.poller.wake, progress.notify
        self.drive_until, self.check_after_wait = progress.drive_until, stalls.check_after_wait
        self.check_joined, self.joining_peers = self.rejoin.check_joined, self.rejoin.joining_peers
        self.add_service, self.service, self.holds_topology = services.add, services.get, services.holds_topology
        self.cut_off, self.reason_against = failures.cut_off, gate.reason_against
        # For optimizers:
        self.step_ended, self.note_metric = self.step_counter.ended, self.training_metrics.note
        # For windows and buckets: memory that neighbours map.
        self.find_shared, self.next_region, self.shared_memory = arena.find, arena.next_ident, arena.empty
        self.retire_region, self.share_region = arena.retired.append, sender.share
        self.describe_member, self.inbox_address = membership.describe, router.inbox.address
        # For the start, and for monitoring:
        self.listen, self.meet, self.begin_waiting = router.listen, router.meet, self.rejoin.begin_waiting
        self.describe, self.record_events = router.describe, events.record
        self.edge_counters, self.is_waited_for = sender.edge_counters, matcher.is_waited_for
        self.watch_membership, self.on_membership_change = membership.watch, agreement.listeners.append
        self.expect_no_calls_of = deadlocks.bystanders.update
        self.place, self.host, self.incarnation = place, place.host, place.incarnation
        self.lock = progress.lock  # guards all of the exchange
        self.abandoned = False  # whether this is a forked child's copy
        self.backend: CollectiveBackend | None = None  # moves tensors instead of links, after attach_backend()
        self.compresses_locally = False  # compressors encode messages within this machine, too

    def configure(self, config: Config, certificates: Certificates | None) -> None:
        """Set what the environment variables say. Call it before the start."""
        self.rejoin.set_timeout(config.entry_timeout)
        self.publisher.require_finite(config.check_finite)
        self.compresses_locally = config.compress_locally
        self.devices.use_device_memory(config.device_memory)
        self.watchdog.drop_silent_after(config.drop_after)
        self.stalls.report_after(config.stall_seconds)
        self.router.encrypt_with(certificates)

    def attach_backend(self, backend: CollectiveBackend, on_admission: Callable[[], None]) -> None:
        """Let a backend move tensors. ``on_admission`` is called when agents are admitted. Call it before the start."""
        if self.agreement.active:
            self.sender.keep_backend_tensors()
        self.rejoin.notify_of_admission(on_admission)
        self.backend = backend
        self.lifecycle.backend_stages.carry_with(backend)

    def start(self) -> None:
        self.progress.start()

    @property
    def view(self) -> View:
        """The members, and how each of the others was lost. Under the engine's lock, or an immutable copy of it."""
        return self.membership.view

    @property
    def alive(self) -> tuple[int, ...]:
        """The members as this agent knows them, ascending."""
        return self.membership.view.alive

    @property
    def agreed_members(self) -> tuple[int, ...]:
        """The members on which all have agreed, ascending; without agreements those that this agent knows."""
        return self.agreement.alive if self.agreement.active else self.membership.view.alive

    @property
    def is_joining(self) -> bool:
        """Whether this agent was started again or later, and has not been admitted yet."""
        return self.membership.view.is_joining

    @property
    def survives_losses(self) -> bool:
        """Whether operations continue without lost agents (``on_loss="continue"``)."""
        return self.agreement.active

    @property
    def is_agreeing(self) -> bool:
        """Whether the survivors are agreeing on a loss, so that no operation begins."""
        return self.lifecycle.gate.paused

    @property
    def is_closing(self) -> bool:
        """Whether this agent has shut down, or is about to, so that no operation begins any more."""
        return self.lifecycle.gate.closing

    @property
    def current_plan(self) -> Plan:
        """The plan of operations that begin now."""
        return self.lifecycle.gate.plan

    @property
    def ended(self) -> ShoalError | None:
        """The error of collective operations, which are not possible any more; None while they are."""
        return self.lifecycle.gate.ended

    @property
    def stall_seconds(self) -> float:
        """Seconds without progress after which a waiting call is logged."""
        return self.stalls.after

    def is_far(self, rank: int) -> bool:
        """Whether messages to an agent use the network, or are to be compressed as if they did."""
        return self.compresses_locally or self.backend is not None or self.router.transport_to(rank) == "network"

    @property
    def can_fuse(self) -> bool:
        """Whether operations that begin now may be fused: all of them use links, among all agents.

        After a loss, rounds in progress may have different plans.
        """
        return self.backend is None and not self.lifecycle.gate.plan.gone

    @property
    def can_fuse_multistage(self) -> bool:
        """Whether operations that restart after a loss may be fused too: only if losses are not survived.

        Otherwise agents that fuse and agents that do not would restart at different stages.
        """
        return self.can_fuse and not self.agreement.active

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensors that this agent has sent so far."""
        return self.sender.bytes_sent

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
            try:
                self._await_gate(op, limit, seconds)
            except BaseException as error:
                # The other agents begin this round later. Not counted here, it would match this agent's next call.
                with suppress(ShoalError), deferred:
                    self.lifecycle.submit(
                        self, op, name, steps, seconds, alone, one_sided, on_loss, background, among, error
                    )
                raise
        if self.callbacks.due:
            self.after()
        return handle

    def plan(self, name: str) -> Plan:
        """The plan of the next round of a name. For a call of several operations."""
        if not self.agreement.active:
            return WHOLE
        return self.submit(PLAN, name, _planned, on_loss=FailurePolicy.SKIP_MISSING, background=True).wait()

    def _await_gate(self, op: str, limit: float, seconds: float) -> None:
        """Wait until operations may begin: the survivors have agreed on a loss, or all have admitted an agent."""
        gate, progress = self.lifecycle.gate, self.progress
        call = f"{op} on rank {self.rank}"
        # This thread would have to receive the messages for which it waits.
        if progress.is_driving:
            raise RuntimeError(
                f"{call}: an agent is being removed or admitted. Until then no operation can begin in a callback"
            )
        # An ended gate may stay shut: this agent takes part in no agreement any more.
        while not progress.drive_until(lambda: not gate.shut or gate.ended is not None, limit):
            deferred.checkpoint()
            if progress.stopped:
                raise NotInitialized(f"{call}: this agent has shut down; call shoal.init() first")
            if clock.monotonic() >= limit:
                with self.lock:
                    missing, problem = self.agreement.missing, "they have not acknowledged the loss of an agent"
                    if not gate.paused:
                        missing, problem = self.rejoin.awaited, "they have not taken part in the admission of an agent"
                raise DeadlineExceeded(f"{call} waited {seconds:g} s for ranks {missing}: {problem}", missing)

    def survive_losses(self, stops_as_minority: bool = False) -> None:
        """Let operations survive losses; with ``stops_as_minority``, not in a minority. Call it before the start."""
        self.agreement.activate(stops_as_minority)
        self.services.add(AGREEMENT, self.agreement)
        self.services.add(HAD, self.result_cache)
        self.services.add(RESULT, self.result_transfer)
        self.services.add(ENTRY, self.rejoin)
        self.services.add(PARTITION, self.partition_resolver)
        self.partition_resolver.activate()

    def begin_without(self, ranks: tuple[int, ...]) -> None:
        """Begin without agents that have not started and may join later. Call it before the exchange starts."""
        self.membership.begin_without(ranks)
        self.agreement.begin_without(ranks)

    def finish(self, handle: Handle[T], result: T | None, error: BaseException | None) -> None:
        """Set the outcome of a handle whose work a thread of this agent did by itself."""
        with deferred, self.lock:
            self.lifecycle.finish(handle, result, error)
            # finish() notifies only waiting threads. The driving thread may itself wait for this handle, in poll().
            self.poller.wake()

    def wait_for(self, handle: Handle[Any], timeout: float | None = None) -> bool:
        """Wait until an operation has ended, and drive if no other thread does. False if ``timeout`` passes first."""
        if self.abandoned:
            raise NotInitialized(
                f"waiting for {handle.operation}: this process was forked from that of rank {self.rank}, which goes on "
                "with it; wait there"
            )
        if self.progress.is_driving:
            raise RuntimeError(
                f"waiting for {handle.operation} inside a callback or listener of Shoal would never end: start "
                "operations there, and wait for them elsewhere"
            )
        started = clock.perf_counter_ns() if self.events.active else 0
        limit = clock.monotonic() + timeout if timeout is not None else float("inf")
        operation = handle.operation
        with span(operation.op, operation.name, "wait") if profiler._is_profiler_enabled else NO_SPAN:
            while not (done := self.progress.drive_until(handle.poll, limit)) and clock.monotonic() < limit:
                deferred.checkpoint()  # a signal arrived: its handler raises, or the wait continues
                if self.progress.stopped:
                    break
        if started:
            key, thread = (operation.op, operation.name, operation.round), threading.current_thread().name
            self.events.emit("waited", *key, started, -1, 0, thread)
        return done

    def abort(self, error: ShoalError) -> None:
        """End all current and later operations with ``error``. The other agents are not notified."""
        with deferred, self.lock:
            self.failures.abort(error)
            self.poller.wake()

    # The interface of a driven object, for the progress engine

    def advance(self) -> None:
        lifecycle, sender, backend = self.lifecycle, self.sender, self.backend
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
            self.failures.cut_off(str(error) or "there is no memory for what others send")
        except Exception as error:  # an internal error: this agent reads no messages any more
            self.break_off(error)
        except BaseException:
            # The rest of the received messages is lost. This agent could take their senders for the cause of what
            # follows.
            self.failures.cut_off("it was interrupted while it handled messages")
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
        gate = self.lifecycle.gate
        if self.callbacks.due and (not gate.shut or gate.ended is not None):  # their operations would have to wait
            self.callbacks.run()

    def break_off(self, error: Exception) -> None:
        log.error("rank %d: the exchange failed", self.rank, exc_info=error)
        cause = f"an internal error ended the exchange ({type(error).__name__}: {error}); its log says where"
        self.failures.cut_off(cause)

    # Shutdown

    def check_may_close(self) -> None:
        """Raise RuntimeError in a callback, because its thread drives the exchange that is to be closed."""
        if self.progress.is_driving:
            raise RuntimeError("shoal.shutdown() cannot be called from a callback of Shoal")

    def close(self, deadline: float, why: str = "", died: bool = False) -> None:
        """Send the shutdown message, deliver the messages that other agents still wait for, and free all resources.

        Called by one thread. An exception of a signal handler shortens the shutdown: the remaining resources are freed
        without waiting, and it is raised at the end. All resources are freed, whichever step fails.
        """
        # Called from the last to the first: links are closed before the memory that they read. The poller is closed
        # last, because all of them use it.
        free = (self.poller.close, self.pool.clear, self.devices.close, self.arena.close, self.router.close, self.after)
        self._shutdown().run(deadline, why, died, free)

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
