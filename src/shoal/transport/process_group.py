"""Tensors that are sent by ``torch.distributed``: process groups of Gloo, MPI, UCC or NCCL, used in one order.

Such a backend pairs the first send of one agent to another with the first receive there, for any operation, and a
collective with any collective that the others run. A message that is longer than the receiver's memory ends the
process. So all agents must agree on each transfer, and start the transfers in the same order: ``coordination/`` decides
that order (a :class:`CollectivePlan` for each step). This module only executes it: one thread of an agent takes each
transfer, starts it, waits for it, and reports its end.

Successive small tensors from one agent to another are joined, and so are small all-reduces: both sides have the same
list, so they join them in the same way.

Tags are not used, because not every backend has them. A process group has no call that stops it. But Gloo closes all
its connections when one receive times out, which is used here to stop it.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from .. import clock

Transfers = list[tuple[int, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Collective:
    """An operation of all members of a group, instead of sends on which each edge would have to agree.

    Attributes:
        kind: ``"allreduce"`` or ``"broadcast"``, which backends have; or ``"gather"``: each gets the data of all, by
            sends and receives.
        data: Flat; the result overwrites it.
        members: The members, ascending.
        into: Of a gather: the destination of each other member's data.
        how: The reduction of an all-reduce: ``"sum"``, ``"product"``, ``"min"`` or ``"max"``.
        root: The root of a broadcast.
    """

    kind: str
    data: torch.Tensor
    members: tuple[int, ...]
    how: str = ""
    root: int = -1
    into: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def nbytes(self, rank: int) -> int:
        """The least number of bytes that an agent sends: of an all-reduce by a reduce-scatter and an all-gather, of a
        broadcast along a tree.
        """
        others = len(self.members) - 1
        if self.kind == "allreduce":
            return 2 * self.data.nbytes * others // len(self.members)
        return self.data.nbytes * others if self.kind == "gather" or rank == self.root else 0

    def goes_with(self, other: Collective) -> bool:
        """Whether both may be fused, with their data concatenated, with the same result.

        Fusion depends on timing, and a backend's sum of a number may depend on the number's position.
        """
        exact = self.kind == "broadcast" or self.how in ("min", "max") or not self.data.is_floating_point()
        alike = (self.kind, self.how, self.root, self.data.dtype)
        return exact and alike == (other.kind, other.how, other.root, other.data.dtype)


@dataclass(eq=False, slots=True)
class CollectivePlan:
    """The sends and receives of one agent that run together.

    Attributes:
        members: The members, ascending.
        sends, receives: ``[(rank, flat tensor)]``, at most one for each rank. Until the end, sent tensors must not
            change, and received ones have no other user.
        collective: The collective that replaces them.
    """

    members: tuple[int, ...]
    sends: Transfers
    receives: Transfers
    collective: Collective | None = None

    @property
    def others(self) -> set[int]:
        """The ranks of its sends and receives."""
        if self.collective is not None:
            return set(self.members)
        return {rank for rank, _ in self.sends} | {rank for rank, _ in self.receives}


Step = CollectivePlan | None
"""A step of the common order: None if this agent has no part in it."""


def runs(steps: Sequence[tuple[bool, Step]]) -> list[list[CollectivePlan]]:
    """Groups of steps that may be moved together: successive sends and receives, and collectives that can be fused.

    A step in which this agent has no part ends a run as it does on its members, because the groups must be the same on
    both sides of an edge.

    Args:
        steps: Each with a flag whether it is a collective.
    """
    found: list[list[CollectivePlan]] = [[]]
    before: tuple[bool, Step] | None = None
    for step in steps:
        if before is not None and not _can_join(before, step):
            found.append([])
        if step[1] is not None:
            found[-1].append(step[1])
        before = step
    return [run for run in found if run]


def _can_join(before: tuple[bool, Step], step: tuple[bool, Step]) -> bool:
    if not before[0] and not step[0]:
        return True
    first, second = before[1], step[1]
    if first is None or second is None or first.collective is None or second.collective is None:
        return False
    return first.members == second.members and first.collective.goes_with(second.collective)


log = logging.getLogger("shoal")

BACKENDS = {
    "gloo": "",
    "mpi": "make a process group of MPI's in the script, and give it to shoal.init(process_group=)",
    "ucc": "",
    "nccl": "NCCL moves tensors of CUDA devices, and Shoal's go through the CPU",
}
"""Engines of ``torch.distributed``, and why Shoal cannot make process groups of some."""
MADE_HERE = ("gloo", "ucc")
SMALL_BYTES = 1 << 16
"""Tensors up to this size are joined with others."""
TOGETHER_BYTES = 1 << 22
"""The limit of joined bytes."""
CONNECT_SECONDS, MOST_DOUBLINGS = 2.0, 5
"""Seconds in which all members of a group must connect, once all are ready; else all try again, for twice as long.
An attempt cannot be ended earlier: an agent that shuts down waits for it."""
_OF_GLOO = 5
"""Gloo waits for so many times its time-out until a connection is open."""
PATIENCE = datetime.timedelta(hours=1)
"""The time-out of a backend: Shoal has its own deadlines, and a backend's would end all of its transfers."""
ABANDON_AFTER = 3.0
"""Seconds after which a stopping thread is abandoned. Gloo closes connections at once and fails all waits on
them, except for a message of which a part had arrived when its sender died: that thread waits for
as long as :data:`PATIENCE`, or until the process ends. It cannot be woken."""
_AT_ONCE = datetime.timedelta(milliseconds=1)
_TO_STOP = 0x5EA
"""The tag of the receive whose time-out stops a group."""
REDUCED = (torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8)
"""The dtypes whose reductions by a backend equal Shoal's; 16-bit numbers are summed in float32 here."""
_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
} if dist.is_available() else {}  # fmt: skip

Ranks = tuple[int, ...]
Group = Any
"""A process group or a backend of torch's: both have ``send``, ``recv``, ``allreduce`` and ``broadcast``."""
Store = Any
"""A store of torch's."""


def available() -> list[str]:
    """The engines that this build of torch has."""
    if not dist.is_available():
        return []
    has = {
        "gloo": dist.is_gloo_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
        "nccl": dist.is_nccl_available,
    }
    return [backend for backend in BACKENDS if has[backend]()]


@dataclass(frozen=True)
class GroupBackend:
    """A backend of ``torch.distributed``.

    Attributes:
        name: One of :data:`BACKENDS`.
        address: The address of Gloo's listener.
        given: A group of the script's own, and its ranks, used for transfers of these members.
    """

    name: str
    address: str
    given: tuple[Ranks, Group] | None = None


class ProcessGroups:
    """The process groups of one agent, and the thread that uses them.

    Args:
        rank: The rank of this agent.
        how: The backend of ``torch.distributed``.
        store: Makes the store by which the members of a group find each other.
        give_up: Ends the waits for other members.
        finished: Called by the thread with the ended transfers.
        failed: Called with the error that ended all transfers.
    """

    def __init__(
        self,
        rank: int,
        how: GroupBackend,
        store: Callable[[Ranks], Store],
        give_up: Callable[[], None],
        finished: Callable[[list[CollectivePlan]], None],
        failed: Callable[[ProcessGroups, BaseException], None],
    ) -> None:
        self._rank = rank
        self._backend = how.name
        self._address = how.address
        self._store = store
        self._give_up = give_up
        self._finished = finished
        self._failed = failed
        self._given = how.given
        self._groups: dict[Ranks, tuple[Group, Store]] = {}
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"shoal-{rank}-{how.name}", daemon=True)
        self._stopped = False
        self._lock = threading.Lock()
        self._running = threading.Event()
        threads = torch.get_num_threads()
        self._thread.start()  # now: once memory has run out, Python waits for ever for a thread to begin
        self._running.wait()
        torch.set_num_threads(threads)  # new threads take the last value that any thread has set

    def move(self, group: Ranks, steps: Sequence[tuple[bool, Step]]) -> None:
        """Queue these steps.

        Args:
            group: The present ranks; all of them queue the same steps.
            steps: In one order for all; each with a flag whether it is a collective.
        """
        self.then(partial(self._move, group, runs(steps)))

    def then(self, action: Callable[[], None]) -> None:
        """Call a function in the thread, after all earlier transfers."""
        self._queue.put(action)

    def stop(self) -> None:
        """Move nothing any more, whatever is under way."""
        # First the waits in the store: the thread may be connecting, where it has no group yet that could be aborted.
        self._give_up()
        with self._lock:
            self._stopped = True
            groups = list(self._groups.items())
        for ranks, (group, _) in groups:
            # A group of the script's own is not aborted: the script may still use it.
            if self._given is None or group is not self._given[1]:
                self._abort(ranks, group)
        self._queue.put(None)

    def end(self, limit: float) -> None:
        """Once it was stopped: wait for the thread until a time (``clock.monotonic()``), and forget the groups."""
        # A transfer's callback may end up here in the thread itself, which cannot wait for its own end.
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, limit - clock.monotonic()))
            if self._thread.is_alive():
                log.warning("rank %d leaves a thread behind, which waits in %s for ever", self._rank, self._backend)
                self._thread.name = f"abandoned to {self._backend}"
                return  # keep its group as well, whose end would block, too
        self._groups.clear()
        self._given = None

    def _abort(self, ranks: Ranks, group: Group) -> None:
        """Abort all waits in a group."""
        if self._backend != "gloo":
            group.abort()
            return
        for place, rank in enumerate(ranks):  # a connection that has ended fails at once, and closes no other
            if rank != self._rank:
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1, device="cpu")], place, _TO_STOP).wait(_AT_ONCE)

    # The thread

    def _run(self) -> None:
        torch.set_num_threads(1)
        self._running.set()
        while True:
            action = self._queue.get()
            if action is None:
                return
            try:
                action()
            except BaseException as error:
                # An error after stop() is its effect, and not the failure of a backend.
                if not self._stopped:
                    self._failed(self, error)
                return

    def _move(self, there: Ranks, several: list[list[CollectivePlan]]) -> None:
        if len(there) == 1:
            self._finished([movement for run in several for movement in run])
            return
        group = self._group(there)
        for run in several:
            if self._stopped:
                return
            # All transfers of a run are started before the first wait. Two agents that each wait for a send before
            # their receive would wait for each other.
            pending = list(self._start(there, group, run))
            for work, then in pending:
                work.wait(PATIENCE)
                then()
            self._finished(run)

    def _start(self, there: Ranks, group: Group, run: list[CollectivePlan]) -> Iterator[tuple[Any, Callable[[], None]]]:
        """Start what goes together; what to wait for, and what to do then."""
        collectives = [step.collective for step in run if step.collective is not None]
        if collectives:
            members = run[0].members
            group = group if members == there else self._group(members)
            yield from self._start_collectives(members, group, collectives)
            return
        place = {rank: at for at, rank in enumerate(there)}
        for rank in sorted({rank for step in run for rank, _ in step.receives}):
            # In the order of the run, which the sender has too. A backend pairs sends with receives by their order
            # alone.
            tensors = [tensor for step in run for source, tensor in step.receives if source == rank]
            for batch in flattened(tensors):
                nbytes = sum(tensor.nbytes for tensor in batch)
                whole = batch[0] if len(batch) == 1 else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                yield group.recv([_bytes(whole)], place[rank], 0), _split_flat(whole, batch)
        # The next higher rank first, so that not all agents send to the same one.
        for rank in sorted(
            {rank for step in run for rank, _ in step.sends}, key=lambda rank: (rank - self._rank) % 2**31
        ):
            tensors = [tensor for step in run for target, tensor in step.sends if target == rank]
            for batch in flattened(tensors):
                whole = batch[0] if len(batch) == 1 else torch.cat([_bytes(tensor) for tensor in batch])
                yield group.send([_bytes(whole)], place[rank], 0), _nothing

    def _start_collectives(
        self, members: Ranks, group: Group, several: list[Collective]
    ) -> Iterator[tuple[Any, Callable[[], None]]]:
        first = several[0]
        for batch in flattened([collective.data for collective in several]):
            whole = batch[0] if len(batch) == 1 else torch.cat(batch)
            if first.kind == "allreduce":
                options: Any = dist.AllreduceOptions()
                options.reduceOp = _REDUCTIONS[first.how]
                work = group.allreduce([whole], options)
            else:
                spread = dist.BroadcastOptions()
                # A backend counts the members of its group, and not the ranks of the job.
                spread.rootRank, spread.rootTensor = members.index(first.root), 0
                work = group.broadcast([_bytes(whole)], spread)
            yield work, _split_flat(whole, batch)

    def _group(self, ranks: Ranks) -> Group:
        """The process group of these ranks, made when they first move something together."""
        if self._given is not None and self._given[0] == ranks:
            return self._given[1]
        known = self._groups.get(ranks)
        if known is None:
            store = self._store(ranks)
            known = self._connect(ranks, store), store
            with self._lock:
                # Under the lock: either stop() finds this group and aborts it, or this thread finds that it was
                # stopped. Else it would wait in the group for an hour.
                if self._stopped:
                    raise RuntimeError("it was stopped")
                self._groups[ranks] = known
        return known[0]

    def _connect(self, ranks: Ranks, store: Store) -> Group:
        """Make a group, with all its members together: if one of them is stopped during that, all try again."""
        place, group = ranks.index(self._rank), None
        for again in count():
            # The time to connect runs for each member from its own call, so all begin the attempt together.
            store.all_agree(f"ready {again}", True)
            try:
                # Keys of its own for each attempt: a member would otherwise find the addresses of the attempt that
                # failed.
                prefixed = dist.PrefixStore(f"{again}", store)  # type: ignore[attr-defined]
                seconds = CONNECT_SECONDS * 2 ** min(again, MOST_DOUBLINGS)
                group = _make(self._backend, prefixed, place, len(ranks), self._address, seconds)
            except RuntimeError as error:
                # As text: a handler may keep the record, and an exception holds this frame, with the group of a later
                # attempt and its connections.
                log.warning("rank %d has not met ranks %s by %s: %s", self._rank, ranks, self._backend, str(error))
                group = None
            # All keep the group, or none: a member that alone has it would wait for the others in its first transfer.
            if store.all_agree(f"connected {again}", group is not None):
                break
        return group


def _make(backend: str, store: Store, place: int, size: int, address: str, seconds: float) -> Group:
    """A process group of torch's. Only that of Gloo was ever seen working."""
    if backend == "gloo":
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=seconds / _OF_GLOO)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        group: Any = dist.ProcessGroupGloo(store, place, size, options)
        group._set_default_timeout(PATIENCE)
        return group
    return dist.ProcessGroupUCC(store, place, size, PATIENCE)


def flattened(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut a list into what goes as one: by the sizes alone, so that both sides cut it alike."""
    batch: list[torch.Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if batch and (tensor.nbytes > SMALL_BYTES or nbytes + tensor.nbytes > TOGETHER_BYTES):
            yield batch
            batch, nbytes = [], 0
        if tensor.nbytes > SMALL_BYTES:
            yield [tensor]
            continue
        batch.append(tensor)
        nbytes += tensor.nbytes
    if batch:
        yield batch


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1).view(torch.uint8)


def _split_flat(whole: torch.Tensor, batch: list[torch.Tensor]) -> Callable[[], None]:
    """Puts what has come as one where it belongs."""

    def apart() -> None:
        flat = _bytes(whole)
        for tensor, part in zip(batch, torch.split(flat, [tensor.nbytes for tensor in batch]), strict=True):
            _bytes(tensor).copy_(part)

    return apart if len(batch) > 1 else _nothing


def _nothing() -> None: ...
