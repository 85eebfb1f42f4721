"""One order of operations on all agents, for collective backends: requested, decided once, cached.

The problem. Agents reach their operations in different orders, and a process group of ``torch.distributed`` pairs the
next call on both sides. Shoal's own transports need no order, because each message names its call; they do not use this
package.

The method. An operation whose messages have been compared requests the transfer of its tensors (``request.py``). Agents
with requests take part in a round (``round.py``). At its end all have the same list of the requests common to all, and
run them in that order. An earlier decision costs one bit in later rounds (``response_cache.py``, ``round.py``). New
requests are decided by the first agent, which keeps no state (``round.py``).

The start of a round. There is no timer, and an agent without requests takes part in nothing. An agent with requests
begins a round and waits in it for the others; its new requests go into the next round. After a round without a result,
because agents requested different operations, no agent begins another before a new request, whose agent then calls the
others. It calls all agents, including those without requests, if a request involves only some of them, and when it
leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from .. import clock
from ..engine.discovery import submit_to_all
from ..engine.engine import Engine
from ..errors import Mismatch, NotInitialized, PeerLost, ShoalError
from ..execution.control_messages import Service
from ..execution.membership import Plan, Ranks
from ..execution.operation import Operation
from ..execution.stage import Stage, Steps
from ..transport.link import Lease
from ..transport.messages import Kind, Message, Payload, Where
from ..transport.process_group import ABANDON_AFTER, CollectivePlan, ProcessGroups, Step
from .request import ALL, CallSignature, PendingRequest, PendingRequests, RequestKey, TransferRequest
from .response_cache import ResponseCache
from .round import Refusal, Response, RoundOutcome, Vector, coordinate

ROUND = "~coordination"
"""The name of the rounds."""
CALL = "~call"
CAPACITY = 1024
FOREVER = float("inf")
_BEGINS, _BEGINS_FOR_SOME, _ALL_MOVED = range(3)
"""The announcements of an agent under :data:`CALL`: a round begins; it begins also for agents without requests; all
transfers of a leaving agent have ended."""
BREAK_AFTER = 2.0
"""Seconds after a failure of the backend in which the loss of an agent may be detected as its cause."""


@dataclass(slots=True)
class OrderingCounters:
    """Counters of one agent since its start.

    Attributes:
        rounds: Rounds in which it took part.
        negotiations: Rounds that needed a decision.
        moved: Stages of operations whose tensors were moved.
    """

    rounds: int = 0
    negotiations: int = 0
    moved: int = 0


class CollectiveOrdering(Service):
    """The :class:`~shoal.execution.backend_stages.CollectiveBackend` of one agent that moves tensors by process
    groups."""

    def __init__(self, engine: Engine, capacity: int = CAPACITY) -> None:
        self.counts = OrderingCounters()
        self.left = False
        self._engine = engine
        self._make_groups: Callable[[Plan], ProcessGroups]
        self._groups: ProcessGroups
        self._before: list[ProcessGroups] = []  # process groups from before a loss
        self._cache = ResponseCache(engine.rank, capacity)
        self._pending = PendingRequests(engine.matcher)
        self._moving: dict[CollectivePlan, PendingRequest] = {}
        self._gone: set[int] = set()  # agents that take part no more, which all learned in a round
        self._group: Ranks = ()  # of the last round
        self._losses = 0  # the number of lost agents when the last round began
        self._under_way = False
        self._changed = False  # there are requests since the last round began
        self._productive = True  # the last round had a result
        self._until: int | None = None  # while it is quiesced: how many rounds are to have begun
        self._leaving = False
        self._awaited: set[int] | None = None  # ranks whose _ALL_MOVED is missing, if this agent leaves
        self._have_moved_all: set[int] = set()  # perhaps before this agent learns that it may leave
        self._call = -1, False  # the last round to which this agent was called, and whether also without requests
        self._broken: tuple[float, BaseException] | None = None
        self._stopped = False

    def move_by(self, make_groups: Callable[[Plan], ProcessGroups]) -> None:
        """Set the function that makes the process groups for a membership. Called before the first request."""
        self._make_groups = make_groups
        self._groups = make_groups(self._engine.current_plan)

    # As a backend

    def ask(self, operation: Operation, stage: Stage) -> None:
        """See :meth:`~shoal.execution.backend_stages.CollectiveBackend.ask`."""
        carried = stage.exchange.carried
        assert carried is not None
        engine, among = self._engine, carried.among
        collective = carried.collective
        gathers = collective is not None and collective.kind == "gather"
        movement, leases = CollectivePlan((), [], [], None if gathers else collective), list[Lease]()
        if collective is not None and gathers:
            movement.sends += [(rank, collective.data) for rank in collective.into]
            movement.receives += collective.into.items()
        for send in stage.exchange.sends:
            if send.stop > send.start:
                movement.sends.append((send.destination, send.published.part(send.start, send.stop)))
                if send.published.lease is not None:
                    # The operation may end before the transfer, and would free memory that the backend still reads.
                    send.published.lease.hold()
                    leases.append(send.published.lease)
        if collective is not None:
            engine.count_sent(collective.nbytes(engine.rank))
        for source, message in stage.arrived.items():
            if message.where is Where.CARRIED:
                data = engine.result_memory((message.nbytes // message.dtype.itemsize,), message.dtype)
                message.payload = Payload(data, 0)
                movement.receives.append((source, data))
        key = RequestKey(operation.name, stage.number, among or ALL)
        peers = tuple(sorted(stage.needs | stage.arrived.keys())) if among is None else None
        kind = movement.collective.kind if movement.collective is not None else ""
        request = TransferRequest(CallSignature(key, operation.op, carried.properties, kind), operation.round, peers)
        self._pending.add(PendingRequest(request, operation, stage, movement, leases))
        others = peers if peers is not None else (among or self._taking_part(operation))
        stage.absent = set(others) - {engine.rank}
        stage.probed_at = 0.0  # the wait for these members begins; earlier probes were for their messages
        self._changed = True
        engine.check_by(stage.started)
        within = among if among is not None else peers
        self._emit("asked", operation, stage, " ".join(map(str, within or ())))

    def reset(self) -> None:
        """See :meth:`~shoal.execution.backend_stages.CollectiveBackend.reset`."""
        self._forget_all()
        # The loss explains a failure of the backend, for which check() would end this agent's operations.
        self._broken = None
        self._renew_groups()

    def _forget_all(self) -> None:
        for pending in [*self._moving.values(), *self._pending.all()]:
            pending.release()
        self._moving, self._pending = {}, PendingRequests(self._engine.matcher)

    def _renew_groups(self) -> None:
        if self._stopped:  # a loss may still be agreed on while this agent closes: no code would end the new thread
            return
        self._groups.stop()
        # Their thread may still wait in the backend; stop() awaits its end.
        self._before.append(self._groups)
        self._groups = self._make_groups(self._engine.current_plan)

    def quiesce(self, until: int = 0) -> int:
        """See :meth:`~shoal.execution.backend_stages.CollectiveBackend.quiesce`."""
        self._until = max(until, self._engine.rounds_begun(ROUND))
        self._engine.wake()
        return self._until

    @property
    def is_quiescent(self) -> bool:
        """See :attr:`~shoal.execution.backend_stages.CollectiveBackend.is_quiescent`."""
        return not (self._under_way or self._moving) and self._engine.rounds_begun(ROUND) == self._until

    def resume(self) -> None:
        """See :meth:`~shoal.execution.backend_stages.CollectiveBackend.resume`."""
        self._until = None
        self._engine.wake()

    def on_admission(self) -> None:
        """Agents were admitted, possibly this one, while rounds were paused: start without a cache, as a new agent has
        none.
        """
        self._group, self._changed, self._productive = (), True, False
        # A rejoined agent moves tensors again: this agent may not leave before that one has announced its exit again.
        self._have_moved_all.clear()
        self._renew_groups()

    def withdraw(self, stage: Stage) -> bool:
        """See :meth:`~shoal.execution.backend_stages.CollectiveBackend.withdraw`."""
        if any(moving.stage is stage for moving in self._moving.values()):
            return False
        for pending in self._pending.all():
            if pending.stage is stage:
                pending.withdrawn = True
                # The others may already count on this request, so it stays until the round has ended.
                if pending.committed:
                    return False
                self._pending.drop(pending)
                break
        return True

    @property
    def due(self) -> bool:
        """See :meth:`~shoal.execution.backend_stages.CollectiveBackend.due`."""
        over = self.left or self._awaited is not None or self._engine.ended is not None
        # No round can begin while the agent shuts down. A due one would be tried again without end.
        if self._under_way or over or self._engine.is_agreeing or self._engine.is_closing:
            return False
        if self._until is not None:
            return self._engine.rounds_begun(ROUND) < self._until
        round_, also_without_requests = self._call
        asks = bool(self._pending)
        called = round_ >= self._engine.rounds_begun(ROUND) and (asks or also_without_requests)
        return called or self._leaving or (asks and (self._changed or self._productive or self._pending.has_released()))

    def begin(self) -> None:
        """Begin a round."""
        engine = self._engine
        with engine.lock:
            if not self.due:
                return
            # Under the lock: another driving thread would otherwise begin the same round again.
            self._under_way = True
            self._call_others(engine.rounds_begun(ROUND))
        try:
            submit_to_all(engine, "coordination", ROUND, self._steps, FOREVER, alone=False, background=True)
        except ShoalError:  # the engine has ended, and so have all requesting operations
            with engine.lock:
                self._under_way = False

    def leave(self) -> None:
        """See :meth:`~shoal.execution.backend_stages.CollectiveBackend.leave`."""
        self._leaving = True
        if not self._others:
            self.left = True
        self._engine.wake()

    def stop(self) -> None:
        """See :meth:`~shoal.execution.backend_stages.CollectiveBackend.stop`."""
        with self._engine.lock:
            self.left = self._stopped = True
        limit = clock.monotonic() + ABANDON_AFTER
        # Without the lock: the threads of the groups take it when transfers end, and are awaited here.
        self._groups.stop()  # the earlier ones are stopped
        for groups in (*self._before, self._groups):
            groups.end(limit)
        with self._engine.lock:
            # Last: it releases memory that the threads may have read until now.
            self._forget_all()

    # A round

    def _taking_part(self, operation: Operation) -> Ranks:
        """The ranks that take part in a round, ascending."""
        return tuple(rank for rank in operation.left_of(range(self._engine.size)) if rank not in self._gone)

    @property
    def _others(self) -> list[int]:
        alive = self._engine.alive
        return [rank for rank in alive if rank != self._engine.rank and rank not in self._gone]

    def _call_others(self, round_: int) -> None:
        """Notify the others that a round begins, if they might not begin it by themselves."""
        called, also_without_requests = self._call if self._call[0] >= round_ else (-1, False)
        some_only = self._leaving or bool(self._pending.concerned) or any(key.members for key in self._pending.known)
        if (some_only and not also_without_requests) or (not self._productive and called < 0):
            self._call = round_, some_only
            for rank in self._others:
                self._announce(rank, _BEGINS_FOR_SOME if some_only else _BEGINS, round_)

    def _announce(self, rank: int, kind: int, round_: int) -> None:
        message = Message(Kind.CONTROL, CALL, CALL, round_, digest=kind, shape=(0,))
        self._engine.send_bytes([rank], message, b"", background=True)

    def serve(self, source: int, message: Message) -> None:
        """An agent announces the begin of a round, or the end of its transfers; see
        :class:`~shoal.execution.control_messages.Service`.
        """
        round_, also_without_requests = message.round, message.digest == _BEGINS_FOR_SOME
        if message.digest == _ALL_MOVED:
            self._await_no_more(source)
        elif round_ == self._call[0]:
            self._call = round_, also_without_requests or self._call[1]
        elif round_ > self._call[0]:
            self._call = round_, also_without_requests

    def _steps(self, operation: Operation) -> Steps[RoundOutcome]:
        engine, cache = self._engine, self._cache
        with engine.lock:
            operation.on_outcome = partial(self._ended, operation.plan.losses)
            if operation.plan.losses != self._losses:  # agents that left before are gone for all since then
                self._losses, self._group = operation.plan.losses, ()
                self._gone.clear()
            group = self._taking_part(operation)
            # All agents of the round clear together, so their caches stay equal. An entry for all agents would mean
            # other members than when it was cached.
            if group != self._group:
                cache.clear()
                self._group = group
            # In one hold of the lock with the choice of requests: a later request sets it again, for the next round.
            self._changed = False
            self._name_members(group)
            self._pending.commit(group)
            first = [several[0].request for several in self._pending.known.values() if several[0].committed]
            bits = cache.vector(first)
            news = bool(self._pending.concerned) or not all(map(cache.knows, first))
            own = Vector(cache.digest, bits, news, 1 << engine.rank if self._leaving else 0)
        return coordinate(engine, operation, group, own, cache, self._unready)

    def _name_members(self, group: Ranks) -> None:
        """Set the members of requests that were planned for all agents, because agents may have been admitted since."""
        if not self._engine.survives_losses:
            return
        known = self._pending.known
        for key in [key for key in known if not key.members]:
            for pending in known.pop(key):
                there = self._taking_part(pending.operation)
                if there != group:
                    pending.request = replace(pending.request, entry=pending.request.entry.of(there))
                self._pending.add(pending)

    def _unready(self, ready: Sequence[CallSignature]) -> dict[TransferRequest, list[int]]:
        """The requests of this round, without the ready ones."""
        with self._engine.lock:
            known = self._pending.known
            found = [pending for pending in self._pending.all() if pending.committed]
            first = {id(known[entry.key][0]) for entry in ready if entry.key in known}
            return {pending.request: [self._engine.rank] for pending in found if id(pending) not in first}

    def _ended(self, losses: int, outcome: RoundOutcome | None, error: BaseException | None) -> None:
        """A round has ended, equally on all agents. Under the lock."""
        self._under_way = False
        if outcome is None:
            # The others may have the result of this round. Without it, this agent would move tensors in another order.
            if error is not None and not isinstance(error, (PeerLost, NotInitialized)):
                self._engine.cut_off(f"the order of operations is lost: {error}")
            return
        plan = self._engine.current_plan
        if losses != plan.losses:  # it ends after a loss
            self._gone.update(outcome.leaving)
            return
        self.counts.rounds += 1
        self.counts.negotiations += outcome.negotiated
        self._productive = outcome.productive
        self._gone.update(outcome.leaving)
        if outcome.differs >= 0:
            self._break(outcome.differs)
            # Nothing is moved. An agent that leaves must still learn it: another round would be without itself.
            if outcome.leaving:
                self._release_leaving(outcome)
            return
        # First the cached calls, then the decision, on all agents: the backend pairs transfers by their order alone.
        steps = [*self._known_steps(outcome), *self._decided_steps(outcome)]
        # After the choice of the steps: a withdrawn request that is among them moves nevertheless. Any other withdrawal
        # is sent now, or the peers would wait until their deadline.
        for pending in self._pending.all():
            pending.committed = False
            if pending.withdrawn:
                self._pending.drop(pending)
                self._engine.send_withdrawal(pending.operation, pending.stage)
        if steps:
            self._groups.move(outcome.group, steps)
        if outcome.leaving:
            self._release_leaving(outcome)

    def _release_leaving(self, outcome: RoundOutcome) -> None:
        """Agents leave: report to them when all transfers before their departure have ended."""
        here, leaving = self._engine.rank, set(outcome.leaving)
        if here in leaving:
            self._awaited = set(outcome.group) & set(self._engine.alive)
            self._awaited -= self._have_moved_all
        self._groups.then(partial(self._all_moved, sorted(leaving - {here})))

    def _all_moved(self, leaving: list[int]) -> None:
        """All transfers before the departure of agents have ended. Called by the thread that moves tensors."""
        engine = self._engine
        with engine.lock:
            for rank in leaving:
                self._announce(rank, _ALL_MOVED, 0)
            self._await_no_more(engine.rank)
            engine.wake()

    def _await_no_more(self, rank: int) -> None:
        self._have_moved_all.add(rank)
        if self._awaited is not None:
            self._awaited.discard(rank)
            if not self._awaited:
                self.left = True
                self._engine.notify()

    def _known_steps(self, outcome: RoundOutcome) -> Iterator[tuple[bool, Step]]:
        rounds = self._cache.used(outcome.ready)
        for entry, round_ in zip(outcome.ready, rounds, strict=True):
            yield self._step(TransferRequest(entry, round_), entry.key.members or outcome.group)

    def _decided_steps(self, outcome: RoundOutcome) -> Iterator[tuple[bool, Step]]:
        for verdict in outcome.decision:
            if isinstance(verdict, Response):
                # Also without a part in the call, because all caches have to change alike. The members of a call with
                # peers are known for this round only.
                if verdict.request.peers is None:
                    self._cache.put(verdict.request)
                yield self._step(verdict.request, verdict.members)
            elif self._engine.rank in verdict.ranks:
                self._refuse(verdict)

    def _step(self, request: TransferRequest, members: Ranks) -> tuple[bool, Step]:
        """This agent's part in the next transfer, if it has one."""
        is_collective = bool(request.entry.kind)
        if self._engine.rank not in members:
            # A placeholder: it divides the steps into the same runs as on the members.
            return is_collective, None
        pending = self._pending.find(request)
        self._pending.take_out(pending)
        pending.movement.members = members
        pending.stage.absent, pending.stage.transferred_with = set(), pending.movement.others - {self._engine.rank}
        self._emit("ordered", pending.operation, pending.stage)
        self._moving[pending.movement] = pending
        return is_collective, pending.movement

    def _refuse(self, refusal: Refusal) -> None:
        place = refusal.name, refusal.stage, refusal.round
        for pending in self._pending.all():
            request = pending.request
            if (request.key.name, request.key.stage, request.round) == place:
                self._fail(pending, Mismatch(refusal.text, refusal.concerned))

    def _break(self, rank: int) -> None:
        """Two agents have different caches. The requests of this round fail, and all agents clear their caches."""
        # The bits of different caches name different calls; the next round begins with equal, empty ones.
        self._cache.clear()
        here = self._engine.rank
        for pending in [request for request in self._pending.all() if request.committed]:
            problem = f"{pending.request} on rank {here}: rank {rank} remembers other operations than others do"
            error = Mismatch(f"{problem}; all have forgotten theirs, and the next call begins anew", (rank,))
            self._fail(pending, error)

    def _fail(self, pending: PendingRequest, error: Mismatch) -> None:
        """Fail a request. All agents learn of it in this round, so no message is needed: the request is still
        committed.
        """
        self._engine.fail(pending.operation, error)
        self._pending.drop(pending)

    def _emit(self, kind: str, operation: Operation, stage: Stage, among: str = "") -> None:
        events = self._engine.events
        if events.active:
            of = operation.op, operation.name, operation.round
            events.emit(kind, *of, detail=among, stage=stage.number)

    # Ended transfers

    def moved(self, movements: list[CollectivePlan]) -> None:
        """Called by the thread that has moved the tensors."""
        engine = self._engine
        with engine.lock:
            for movement in movements:
                pending = self._moving.pop(movement, None)
                # It is None after reset(), which has released the memory.
                if pending is not None:
                    self.counts.moved += 1
                    self._emit("moved", pending.operation, pending.stage)
                    pending.release()
                    engine.transferred(pending.operation, pending.stage)
            engine.wake()

    def failed(self, groups: ProcessGroups, error: BaseException) -> None:
        """The process groups have failed. Called by the thread that moves tensors."""
        engine = self._engine
        with engine.lock:
            # Earlier groups fail because of the loss for which they were replaced, or because they were aborted.
            if groups is not self._groups:
                return
            self._broken = clock.monotonic() + BREAK_AFTER, error
            engine.check_by(self._broken[0])
            engine.wake()

    # As a service

    def on_departure(self, rank: int, because: int | None) -> None:
        """An agent that is gone sends no more messages; see :class:`~shoal.execution.control_messages.Service`."""
        self._await_no_more(rank)

    def check(self, now: float) -> float:
        """End the job if a backend has failed and no loss of an agent explains it; see :class:`.Service`."""
        if self._broken is None or self._engine.ended is not None:
            return FOREVER
        due, error = self._broken
        if self._engine.is_agreeing:  # agents agree on a loss, which may be the cause
            return now + BREAK_AFTER
        if now >= due:
            self._engine.cut_off(f"the process group that moves tensors has failed: {error}")
        return due if now < due else FOREVER
