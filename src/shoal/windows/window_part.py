"""One agent's part in a window: its own memory, and the way to the memory of each neighbour.

On one machine a neighbour's memory is mapped and written to directly, so its owner need not do anything, not even run.
Between machines the owner's exchange performs on request the steps of a direct writer, under the same locks.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from .. import clock
from .._signals import acquire_with_deadline
from ..engine.engine import Engine
from ..errors import DeadlineExceeded, Mismatch, NotInitialized, PeerLost, ShoalError
from ..execution.membership import LEFT, UNEVEN
from ..execution.operation import Handle
from ..kernels.native import by_value
from ..kernels.sums import copy
from ..ops.arguments import on_device_of, writable
from ..topology import Mixing
from .locks import Busy, Freed
from .owner_requests import LOCK, UNLOCK, Request, ask
from .window_memory import MUTEX, OWN, SlotState, WindowMemory, WriteKind


class WindowOwner(Protocol):
    """The interface to an agent's windows that one window, and the requests of other agents, need."""

    @property
    def engine(self) -> Engine:
        """The engine of the agent."""

    @property
    def with_p(self) -> bool:
        """Calls carry the associated weight."""

    @property
    def cause(self) -> int | None:
        """The rank whose loss makes this agent free a window now; its own rank if it shuts down with windows open."""

    def find(self, channel: str) -> WindowPart | None:
        """The window that a message is for."""

    def waiting(self, ranks: Callable[[], Sequence[int]], *call: str) -> AbstractContextManager[None]:
        """Note that the calling thread may have to wait for these ranks; ``call`` names the call, unless an operation
        of the engine does.
        """

    def missed(self, error: PeerLost | None) -> None:
        """Record the loss with which this thread's last call that moved a tensor ended; None if there was none."""

    def cause_of(self, rank: int) -> int | None:
        """The rank whose loss made an agent leave, if that agent named one."""


@dataclass(slots=True)
class _HeldLock:
    """A mutex that this agent holds: its thread, its count, and the memory it is in (None: on another machine)."""

    thread: int
    times: int
    memory: WindowMemory | None


class WindowPart:
    """A window of this agent.

    Args:
        tensor: The registered tensor.
        memory: This agent's memory of it.
        in_place: Neighbours read ``tensor`` in place; else they read a copy, which each call renews.
        mixing: The topology when it was made: default weights, and the agents that may write and read.

    Attributes:
        number: Distinguishes this window from freed ones of the same name; equal on all agents.
        always_with_p: Its associated weight moves also while the agent's switch is off.
    """

    def __init__(
        self,
        owner: WindowOwner,
        name: str,
        tensor: torch.Tensor,
        memory: WindowMemory,
        in_place: bool,
        mixing: Mixing,
    ) -> None:
        self.name = name
        self.tensor = tensor
        self.memory = memory
        self.in_place = in_place
        self.mixing = mixing
        self.number, self.always_with_p = -1, False
        self.p = 1.0
        self.direct: dict[int, WindowMemory] = {}
        self.seen: dict[int, SlotState] = {}
        self._owner = owner
        self._engine = owner.engine
        self._turn = threading.RLock()
        self._gates: dict[int, threading.Lock] = defaultdict(threading.Lock)  # to mutexes on other machines
        self._held: dict[int, _HeldLock] = {}
        self._mapped: list[WindowMemory] = []  # of processes of this machine
        self._closed = False
        self._gone: set[int] = set()  # since it was made; a rejoined agent has no part in it
        self._order = mixing.rotated_destinations(self._engine.size)

    def lose(self, rank: int) -> None:
        """An agent is gone."""
        self._gone.add(rank)

    def there(self, ranks: Iterable[int]) -> list[int]:
        """The given ranks, without lost agents whose loss is survived; a rejoined agent has no part in this window."""
        return [rank for rank in ranks if not self._survives_loss_of(rank)] if self._gone else list(ranks)

    def need(self, op: str, ranks: Iterable[int]) -> None:
        """Raise if one of the ranks, which the caller has named, is lost, even if its loss would be survived."""
        if self._gone:
            for rank in filter(self._survives_loss_of, ranks):
                self._check(op, rank)

    def _survives_loss_of(self, rank: int) -> bool:
        return rank in self._gone and self._engine.survives_losses

    @property
    def sources(self) -> tuple[int, ...]:
        return self.mixing.source_ranks

    @property
    def destinations(self) -> tuple[int, ...]:
        return self.mixing.destination_ranks

    # Moving tensors

    def send(
        self,
        how: WriteKind,
        tensor: torch.Tensor,
        self_weight: float | None,
        weights: Mapping[int, float],
        require_mutex: bool,
        deadline: float,
    ) -> bool:
        """Put or accumulate ``tensor``, times a weight for each, into the slots that neighbours have for this agent.

        If losses are survived, a neighbour that is lost during the call may have received the tensor or not, without an
        error.
        """
        with self._my_turn(deadline, how.value):
            self._publish_own(deadline, how.value)
            share = self.p if self.always_with_p or self._owner.with_p else None
        order = [rank for rank in self._order if rank in weights]
        source = writable(tensor)
        outgoing = source.cpu().resolve_conj().resolve_neg()
        for ranks in [[rank] for rank in order] if require_mutex else [order]:
            with self.mutex(ranks if require_mutex else [], deadline, how.value):
                self._send(how, outgoing, {rank: weights[rank] for rank in ranks}, share, deadline)
        self._owner.missed(None)
        if self_weight is None:
            return True
        with self._my_turn(deadline, how.value):
            with self._own(deadline, how.value) if self._is_own(tensor) else ExitStack():
                # Only with the lock, which may come too late: p without its tensor would make all estimates wrong.
                self.p *= 1.0 if share is None else self_weight
                source.mul_(self_weight)
            self._publish_own(deadline, how.value)
        return True

    def _send(
        self, how: WriteKind, tensor: torch.Tensor, weights: Mapping[int, float], share: float | None, deadline: float
    ) -> None:
        direct = self.direct  # close() replaces it, and the ranks that it had must not be taken for those of machines
        far = {rank: weight for rank, weight in weights.items() if rank not in direct}
        # Where losses are survived, each owner is asked by itself: the loss of one ends an operation, which would then
        # not wait until the other owners have the tensor.
        alone = self._engine.survives_losses
        requests = [{rank: weight} for rank, weight in far.items()] if alone else [far] if far else []
        asked = []
        for request in requests:
            with self._ignoring_survived_loss(*request):
                asked.append((request, self._ask(Request(how.value, request, tensor, share), deadline)))
        for rank, weight in weights.items():
            if rank in far:
                continue
            with self._ignoring_survived_loss(rank), self._explained(how.value, rank):
                self._check(how.value, rank)
                p = None if share is None else share * weight
                check = partial(self._check, how.value, rank)
                direct[rank].write(how, self._engine.rank, tensor, weight, p, deadline, check)
        for request, handle in asked:
            with self._ignoring_survived_loss(*request):
                self._answers(handle, request)

    @contextmanager
    def _ignoring_survived_loss(self, *ranks: int) -> Iterator[None]:
        """Ignore the loss of one of the ranks within the block, if losses are survived."""
        try:
            yield
        except PeerLost:
            if not any(map(self._survives_loss_of, ranks)):
                raise

    def get(self, weights: Mapping[int, float], require_mutex: bool, deadline: float) -> bool:
        """Fetch the registered tensors of in-neighbours, times a weight, into this agent's slots for them."""
        op = WriteKind.GET.value
        for rank, weight in weights.items():
            with self._ignoring_survived_loss(rank), ExitStack() as held:
                held.enter_context(self.mutex([rank] if require_mutex else [], deadline, op))
                memory = self.direct.get(rank)
                if memory is None:
                    found = self._answers(self._ask(Request(op, {rank: 1.0}), deadline), [rank])[rank]
                else:
                    self._check(op, rank)
                    with self._explained(op, rank):
                        memory.acquire(OWN, self._engine.rank, deadline, partial(self._check, op, rank))
                        held.callback(memory.locks.release, OWN)
                    found = memory.own
                me = self._engine.rank
                with self._explained(op, me):
                    self.memory.write(WriteKind.GET, rank, found, weight, None, deadline, partial(self._check, op, me))
        self._owner.missed(None)
        return True

    def update(
        self,
        self_weight: float,
        weights: Mapping[int, float],
        reset: list[int],
        clone: bool,
        require_mutex: bool,
        deadline: float,
        op: str,
    ) -> torch.Tensor:
        """The weighted sum of the registered tensor and the slots, in place or as a new tensor."""
        me = self._engine.rank
        with ExitStack() as held:
            held.enter_context(self.mutex([me] if require_mutex else [], deadline, op))
            held.enter_context(self._my_turn(deadline, op))
            held.enter_context(self._own(deadline, op))
            self._check_registered(op)  # the slots must not be emptied into another tensor
            tensor = writable(self.tensor)
            is_flat = tensor.is_contiguous() and tensor.is_cpu and not by_value(tensor)
            flat = tensor.view(-1) if is_flat else self.memory.own
            if flat is self.memory.own:
                copy(flat.view(tensor.shape), tensor)
            out = torch.empty(flat.shape, dtype=flat.dtype, device="cpu") if clone else flat
            check = partial(self._check, op, me)
            publish = not clone and flat is not self.memory.own and not self.in_place
            p, self.seen = self.memory.combine(out, flat, self_weight, weights, reset, deadline, check, publish=publish)
            if self.always_with_p or self._owner.with_p:
                self.p = self_weight * self.p + p
            if clone:
                return on_device_of(tensor, out.view(tensor.shape))
            if flat is self.memory.own:
                copy(tensor, flat.view(tensor.shape))
            return self.tensor

    def check_layout(self, op: str, tensor: torch.Tensor) -> None:
        """ValueError if the tensor has another shape or dtype than the window."""
        layout = self.memory.layout
        if tensor.shape != layout.shape or tensor.dtype != layout.dtype:
            raise ValueError(
                f"{op}: the window {self.name!r} holds a tensor of shape {list(layout.shape)} and {layout.dtype}, not "
                f"one of shape {list(tensor.shape)} and {tensor.dtype}"
            )

    def check_neighbours(self, op: str) -> None:
        """Raise if a neighbour is gone, or has freed this window, without moving anything.

        A lost neighbour raises no error if losses are survived.
        """
        deadline = clock.monotonic() + self._engine.timeout
        for rank in self.there(sorted({*self.sources, *self.destinations})):
            with self._ignoring_survived_loss(rank):  # it may be lost during the check
                self._check(op, rank)
                memory = self.direct.get(rank)
                if memory is None:  # a request for its mutex fails if the window is freed
                    with self.mutex([rank], deadline, op):
                        pass
                elif memory.freed:
                    raise self.freed_by(op, rank)

    def version(self, source: int) -> int:
        """Puts and gets into a slot since the last update."""
        now, seen = self.memory.state(source), self.seen.get(source)
        return now.puts + now.gets - (seen.puts + seen.gets if seen is not None else 0)

    # The registered tensor

    def _is_own(self, tensor: torch.Tensor) -> bool:
        return self.in_place and tensor.untyped_storage().data_ptr() == self.tensor.untyped_storage().data_ptr()

    @contextmanager
    def _my_turn(self, deadline: float, op: str) -> Iterator[None]:
        """Exclude other threads of this agent from the registered tensor and its associated weight."""
        if not self._turn.acquire(blocking=False):
            me = self._engine.rank
            with self._explained(op, me, "the registered tensor"):
                if not acquire_with_deadline(self._turn, deadline):
                    raise Busy(me)
        try:
            yield
        finally:
            self._turn.release()

    @contextmanager
    def _own(self, deadline: float, op: str) -> Iterator[None]:
        """Lock the registered tensor against gets. Errors of locks within the block name the call, too."""
        me = self._engine.rank
        with self._explained(op, me), self.memory.hold([OWN], me, deadline, partial(self._check, op, me)):
            yield

    def _check_registered(self, op: str) -> None:
        """ValueError if the script has resized the registered tensor, or given other memory to one that is in place."""
        tensor = self.tensor
        self.check_layout(op, tensor)
        # Neighbours have mapped the memory of the time of create(). Copying into it is no remedy: another tensor of the
        # script may have it now.
        if self.in_place and not (tensor.is_contiguous() and tensor.data_ptr() == self.memory.own.data_ptr()):
            raise ValueError(
                f"{op}: the tensor of the window {self.name!r} on rank {self._engine.rank} has other memory now, and "
                "neighbours read that of create(). Change it with tensor.copy_(), or free the window and create another"
            )

    def _publish_own(self, deadline: float, op: str) -> None:
        self._check_registered(op)
        if not self.in_place:
            with self._own(deadline, op):
                copy(self.memory.own.view(self.tensor.shape), self.tensor.detach())

    # Mutexes

    @contextmanager
    def mutex(self, ranks: list[int], deadline: float, op: str) -> Iterator[None]:
        """Hold the mutexes of these agents, taken in ascending order, except of lost ones whose loss is survived. A
        thread may hold one several times.
        """
        with ExitStack() as held:
            for rank in sorted(ranks):
                with self._ignoring_survived_loss(rank):
                    self._lock(rank, deadline, op)
                    held.callback(self._unlock, rank)
            yield

    def _lock(self, rank: int, deadline: float, op: str) -> None:
        me = threading.get_ident()
        held = self._held.get(rank)
        if held is not None and held.thread == me:
            held.times += 1
            return
        memory = self.memory if rank == self._engine.rank else self.direct.get(rank)
        with self._explained(op, rank, "the mutex"):
            if memory is not None:
                if rank != self._engine.rank:
                    self._check(op, rank)  # the memory of a lost agent is still mapped
                memory.acquire(MUTEX, self._engine.rank, deadline, partial(self._check, op, rank))
            elif not acquire_with_deadline(self._gates[rank], deadline):
                raise Busy(self._engine.rank)
        if memory is None:
            try:
                self._answers(self._ask(Request(LOCK, {rank: 1.0}), deadline), [rank])
            except BaseException:
                self._give_up_far(rank)  # it may be granted after we have given up
                raise
        self._held[rank] = _HeldLock(me, 1, memory)

    def _unlock(self, rank: int) -> None:
        held = self._held[rank]
        held.times -= 1
        if held.times:
            return
        del self._held[rank]
        if held.memory is None:
            self._give_up_far(rank)
        else:
            held.memory.locks.release(MUTEX)

    def _give_up_far(self, rank: int) -> None:
        try:
            if rank in self._engine.alive and self._engine.reason_against(one_sided=True) is None:
                self._ask(Request(UNLOCK, {rank: 1.0}), clock.monotonic() + self._engine.timeout)
        finally:
            self._gates[rank].release()

    # Requests to an owner on another machine

    def _ask(self, request: Request, deadline: float) -> Handle[dict[int, torch.Tensor]]:
        for rank in request.weights:
            self._check(request.op, rank)
        return ask(self._engine, self.name, self.number, self.memory.layout, request, deadline)

    def _answers(self, handle: Handle[dict[int, torch.Tensor]], owners: Iterable[int]) -> dict[int, torch.Tensor]:
        """Wait for the replies of the owners."""
        with self._owner.waiting(lambda: handle.operation.waiting_for):
            try:
                return handle.wait()
            except (Mismatch, PeerLost) as error:
                # Where losses are survived, of the owners only: another lost agent is no reason for the error.
                for rank in sorted(set(error.ranks) - {self._engine.rank}):
                    if self._engine.survives_losses and rank not in owners:
                        continue
                    self._check(handle.operation.op, rank)  # it may know the first lost agent
                if isinstance(error, PeerLost):
                    self._owner.missed(error)
                raise

    # Errors

    def _check(self, op: str, rank: int) -> None:
        """Raise if a call cannot, or can no longer, use the memory of an agent."""
        engine = self._engine
        ended = engine.reason_against(one_sided=True)
        if ended is not None:
            raise type(ended)(f"{op} {self.name!r} on rank {engine.rank}: {ended}", ended.ranks)
        if self._closed and op != UNLOCK:
            raise self.freed_by(op, engine.rank)
        if rank in self._gone and rank in engine.alive:
            problem = f"needs rank {rank}, which was lost and has come back without it: free it, and create another"
            raise self._lost(op, problem, rank)
        if rank != engine.rank and rank not in engine.alive:
            state = engine.describe_member(rank)
            problem = f"needs rank {rank}, which is gone: {state}"
            cause = self._cause_of(rank, rank)
            if cause != rank:
                problem += f", since rank {cause} is gone"
            elif state.endswith(LEFT):
                problem += f". {UNEVEN}"
            raise self._lost(op, problem, cause)

    def _cause_of(self, rank: int, otherwise: int | None) -> int | None:
        """The first rank whose loss made another agent leave or free its window; ``otherwise`` if unknown."""
        memory = self.memory if rank == self._engine.rank else self.direct.get(rank)
        cause = memory.cause if memory is not None else None
        if cause is None or cause == rank:
            known = self._owner.cause_of(rank)
            cause = cause if known is None else known
        return otherwise if cause is None else cause

    def _lost(self, op: str, problem: str, cause: int | None) -> PeerLost:
        engine, view = self._engine, self._engine.view
        reason = "" if cause is None else view.died.get(cause, "")
        if reason and reason not in problem:
            problem += f" ({reason})"
        ranks = () if cause is None else (cause,)
        lost = PeerLost(f"{op} {self.name!r} on rank {engine.rank} {problem}", ranks)
        self._owner.missed(lost)
        return lost

    @contextmanager
    def _explained(self, op: str, rank: int, awaited: str = "") -> Iterator[None]:
        """Convert errors of the locks to errors that name the call, the window and the rank."""
        try:
            with self._owner.waiting(lambda: (rank,), op, self.name):
                yield
        except Busy as busy:
            me = self._engine.rank
            keeper = rank if busy.keeper is None else busy.keeper
            awaited = awaited or ("its own memory" if rank == me else "the memory")
            by = f"another thread of rank {me}" if keeper == me else f"rank {keeper}"
            raise DeadlineExceeded(
                f"{op} {self.name!r} on rank {me} waited for {awaited} of this window at rank {rank}, which {by} kept "
                "locked. If it is only slow, pass timeout= or raise SHOAL_TIMEOUT",
                (keeper,),
            ) from None
        except Freed:
            raise self.freed_by(op, self._engine.rank if self._closed else rank) from None

    def freed_by(self, op: str, rank: int) -> ShoalError:
        """The error for a freed window: its owner freed it, did not continue without a lost agent, or shuts down."""
        me, ended = self._engine.rank, self._engine.ended
        cause = self._cause_of(rank, ended.ranks[0] if ended is not None and ended.ranks else None)
        if cause == me == rank:
            return NotInitialized(f"{op} {self.name!r}: this agent has shut down while the call was under way")
        if cause == rank:
            return self._lost(op, f"needs rank {rank}, which has ended with its windows open", rank)
        if cause is not None:
            return self._lost(op, f"needs rank {rank}, which has freed this window since rank {cause} is gone", cause)
        return Mismatch(f"{op} {self.name!r} on rank {me}: rank {rank} has freed this window", (rank, me))

    # The memory

    def map(self, rank: int, memory: WindowMemory) -> None:
        """Use a neighbour's memory directly, from another process."""
        self._mapped.append(memory)
        self.direct[rank] = memory

    def close(self, cause: int | None = None) -> None:
        """Free the memory; later calls of neighbours fail, and name ``cause`` as the lost rank if it is given."""
        self.memory.free(cause)
        self._closed = True
        for memory in (self.memory, *self._mapped):
            memory.locks.close()
        self.direct, self._mapped = {}, []  # or a Window that a script keeps would keep the neighbours' memory mapped
