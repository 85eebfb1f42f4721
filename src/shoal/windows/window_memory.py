"""The memory of one window: the layout that its owner and its neighbours see, and the only ways to change it.

Each in-neighbour has two slots and a number of writes, whose last bit selects the valid slot. A writer fills the other
slot, with the counts, the associated weight and the time beside it, and then increments the number of writes, all under
the lock of the edge. So a reader sees either the complete write or the previous one, even if the writer is killed
halfway; the kernel then frees the lock. A slot may be marked as empty: zeros that need not be written.

The order of locks is: mutexes (by rank), then the owner's tensor, then edges (ascending). A thread that holds an edge
waits for no other window, so no cycle of waits can arise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from .. import clock
from ..arithmetic import weigh_in_blocks
from ..kernels.sums import add_scaled, copy, scale
from .locks import Busy, ByteLocks, Freed

MUTEX, OWN, EDGES = 0, 1, 2
"""The bytes that are locked: the users' mutex, the owner's tensor, and from EDGES on one for each in-neighbour."""
_OWNER = -1
"""Stands for the owner of the memory instead of a rank."""
_PAGE = 4096
_EDGE_BYTES = 256
_META_BYTES = 64
_FREED, _KEEPERS = 0, 1
_WRITES = 0
_P, _PUTS, _GETS, _ACCUMULATES, _EMPTY, _WHEN = range(6)


class WriteKind(Enum):
    """The effect of a write on a slot."""

    PUT = "win_put"
    ACCUMULATE = "win_accumulate"
    GET = "win_get"


@dataclass(frozen=True)
class SlotState:
    """The history of the slot of one in-neighbour.

    Attributes:
        puts, gets, accumulates: their numbers since the window was made.
        age: seconds since the last of them; since the window was made if there was none.
        p: the associated weight in the slot.
    """

    puts: int
    gets: int
    accumulates: int
    age: float
    p: float


@dataclass(frozen=True)
class WindowLayout:
    """The layout of the memory of a window.

    Attributes:
        shape, dtype: of the tensor.
        sources: the in-neighbours, ascending.
        own: whether the owner's tensor is in this memory too (else it is shared where it lies).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[int, ...]
    own: bool

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def tensor_bytes(self) -> int:
        return -(-self.numel * self.dtype.itemsize // 64) * 64

    @property
    def nbytes(self) -> int:
        return self.slot(len(self.sources), 0) + (self.tensor_bytes if self.own else 0)

    def meta(self, edge: int) -> int:
        return _PAGE + edge * _EDGE_BYTES

    def slot(self, edge: int, which: int) -> int:
        start = -(-self.meta(len(self.sources)) // _PAGE) * _PAGE
        return start + (2 * edge + which) * self.tensor_bytes


class WindowMemory:
    """The memory of a window, as mapped by its owner or by a neighbour.

    Args:
        data: uint8, at least ``layout.nbytes``; zeros when it is new.
        own: the owner's tensor, flat, if it is not in ``data``.
    """

    def __init__(
        self, layout: WindowLayout, data: torch.Tensor, locks: ByteLocks, own: torch.Tensor | None = None
    ) -> None:
        self.layout = layout
        self.locks = locks
        self._order = threading.Lock()
        # The order of the edges is the same at the owner and at each writer: both sort the in-neighbours. Else a writer
        # would fill another agent's slot.
        self._edge = {source: edge for edge, source in enumerate(layout.sources)}
        self._flags = self._words(data, 0, 8)
        self._index = [self._words(data, layout.meta(edge), 1) for edge in range(len(layout.sources))]
        self._meta = [
            [self._words(data, layout.meta(edge) + (1 + which) * _META_BYTES, 8) for which in range(2)]
            for edge in range(len(layout.sources))
        ]
        self._slots = [
            [self._tensor(data, layout.slot(edge, which)) for which in range(2)] for edge in range(len(layout.sources))
        ]
        self.own = self._tensor(data, layout.slot(len(layout.sources), 0)) if own is None else own

    @staticmethod
    def _words(data: torch.Tensor, offset: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        words: np.ndarray[tuple[int], np.dtype[np.int64]] = data[offset : offset + 8 * count].numpy().view(np.int64)
        return words

    def _tensor(self, data: torch.Tensor, offset: int) -> torch.Tensor:
        nbytes = self.layout.numel * self.layout.dtype.itemsize
        # A view of another dtype is a tensor of the caller's inference mode, to which no other thread could write.
        with torch.inference_mode(False):
            return data[offset : offset + nbytes].view(self.layout.dtype)

    # The owner

    def begin(self, value: torch.Tensor | None) -> None:
        """Give all slots their first content: a flat tensor, or nothing for zeros."""
        for edge in range(len(self.layout.sources)):
            if value is not None:
                self._slots[edge][0].copy_(value)
            self._describe(edge, 0, 0.0, (0, 0, 0), value is None)

    def free(self, cause: int | None) -> None:
        """Mark the window as freed, and record the rank whose loss is the cause, if any. Neighbours' later accesses
        fail.
        """
        # One number has both. On a CPU that reorders stores a neighbour could otherwise see the window freed, but not
        # the cause, and report Mismatch instead of the lost rank.
        self._flags[_FREED] = 1 if cause is None else cause + 2

    @property
    def freed(self) -> bool:
        return bool(self._flags[_FREED])

    @property
    def cause(self) -> int | None:
        """The rank for whose loss, or end, the window was freed."""
        cause = int(self._flags[_FREED]) - 2
        return cause if cause >= 0 else None

    # Locks

    def try_acquire(self, byte: int, rank: int) -> bool:
        """Take a lock for an agent if it is free.

        Raises:
            Freed: The window is gone.
        """
        # The owner's engine calls this while it drives, so it must not wait: a wait for a stopped holder would stop all
        # operations of this agent.
        if not self.locks.try_acquire(byte):
            return False
        self._record_holder(byte, rank)
        return True

    def acquire(self, byte: int, rank: int, deadline: float, check: Callable[[], None] = lambda: None) -> None:
        """Take a lock for an agent, waiting until ``deadline``; ``check`` is called between attempts.

        Raises:
            Busy: Another agent or thread had it all the time.
            Freed: The window is gone.
        """

        def look() -> None:
            # The owner may free the window while this agent waits. Without this check a neighbour would wait until its
            # deadline: free() closes only the owner's own locks.
            if self.freed:
                raise Freed
            check()

        try:
            self.locks.acquire(byte, deadline, look)
        except Busy:
            raise Busy(self._keeper(byte, rank)) from None
        self._record_holder(byte, rank)

    def _record_holder(self, byte: int, rank: int) -> None:
        """Record the holder of a lock that was just taken, or release it if the window has been freed."""
        # The owner may have freed the window between the last check and the lock. A write then would succeed although
        # nobody reads it, and the caller would get no error.
        if self.freed:
            self.locks.release(byte)
            raise Freed
        # Only for errors: the name stays after a release, and is read when a wait for this byte ends in Busy. An edge
        # needs none, as only its two ends lock it.
        if byte < EDGES:
            self._flags[_KEEPERS + byte] = rank

    @contextmanager
    def hold(
        self, bytes_: list[int], rank: int, deadline: float, check: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Hold several locks, taken in ascending order."""
        held: list[int] = []
        try:
            # Two threads that take the same two locks in different orders would wait for each other until the deadline.
            for byte in sorted(bytes_):
                self.acquire(byte, rank, deadline, check)
                held.append(byte)
            yield
        finally:
            # Only the locks that were taken: after Busy at the third byte, a release of all would free locks that other
            # holders have.
            for byte in reversed(held):
                self.locks.release(byte)

    def _keeper(self, byte: int, rank: int) -> int | None:
        """The other holder of a lock: the last agent that took it, or for an edge the agent at its other end. None: the
        owner.
        """
        if byte < EDGES:
            return int(self._flags[_KEEPERS + byte])
        source = self.layout.sources[byte - EDGES]
        return None if rank == source else source

    # Writing to a slot

    def write(
        self,
        how: WriteKind,
        source: int,
        tensor: torch.Tensor,
        weight: float,
        p: float | None,
        deadline: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Put ``weight * tensor`` into the slot of an in-neighbour, or add it, with the associated weight ``p``.

        ``p=None`` leaves the associated weight as it is.

        Raises:
            Busy: The slot was locked until the deadline.
            Freed: The window is gone.
        """
        byte = EDGES + self._edge[source]
        self.acquire(byte, _OWNER if how is WriteKind.GET else source, deadline, check)
        try:
            self._write(how, self._edge[source], tensor, weight, p)
        finally:
            self.locks.release(byte)

    def try_write(self, how: WriteKind, source: int, tensor: torch.Tensor, weight: float, p: float | None) -> bool:
        """As :meth:`write`, if the slot is not locked right now. Returns whether it was written."""
        byte = EDGES + self._edge[source]
        if not self.try_acquire(byte, source):
            return False
        try:
            self._write(how, self._edge[source], tensor, weight, p)
        finally:
            self.locks.release(byte)
        return True

    def _write(self, how: WriteKind, edge: int, tensor: torch.Tensor, weight: float, p: float | None) -> None:
        # The last bit selects the valid slot. All below writes to the other one, so that a reader, or the next writer
        # after a kill, still finds the previous write complete.
        writes = int(self._index[edge][_WRITES])
        now = writes & 1
        meta = self._meta[edge][now]
        slots = self._slots[edge]
        current, idle = slots[now].view(tensor.shape), slots[1 - now].view(tensor.shape)
        puts, gets, accumulates = int(meta[_PUTS]), int(meta[_GETS]), int(meta[_ACCUMULATES])
        before = float(meta[_P : _P + 1].view(np.float64)[0])
        if how is WriteKind.ACCUMULATE:
            accumulates += 1
            # p moves in the same step as the values: a collect between the two would take values without their p, and
            # push-sum would divide by a wrong weight.
            after = before + (p or 0.0)
        elif how is WriteKind.PUT:
            puts += 1
            after = before if p is None else p
        else:
            gets += 1
            after = before  # a get moves no associated weight
        # A slot that its owner has reset still has numbers of an earlier write. Adding to them would count these a
        # second time.
        if how is WriteKind.ACCUMULATE and not meta[_EMPTY]:
            add_scaled(idle, current, tensor, weight)
        elif weight == 1:
            copy(idle, tensor)
        else:
            scale(idle, tensor, weight)
        # The metadata is complete before the index switches. In the other order a reader without the lock would see the
        # counts of the write before last.
        self._describe(edge, 1 - now, after, (puts, gets, accumulates), False)
        self._fence()
        # This one store makes the write valid. A writer that is killed before it has changed nothing, and the kernel
        # frees its lock.
        self._index[edge][_WRITES] = writes + 1

    def _describe(self, edge: int, which: int, p: float, counts: tuple[int, int, int], empty: bool) -> None:
        meta = self._meta[edge][which]
        meta[_P : _P + 1].view(np.float64)[0] = p
        meta[_PUTS], meta[_GETS], meta[_ACCUMULATES] = counts
        meta[_EMPTY] = empty
        meta[_WHEN] = clock.monotonic_ns()

    # Reading

    def combine(
        self,
        out: torch.Tensor,
        own: torch.Tensor,
        own_weight: float,
        weights: Mapping[int, float],
        reset: list[int],
        deadline: float,
        check: Callable[[], None] = lambda: None,
        *,
        publish: bool = False,
    ) -> tuple[float, dict[int, SlotState]]:
        """``out = own_weight * own + sum of weight * slot``, all flat, and empty the slots of ``reset``.

        With ``publish`` the owner's tensor in this memory becomes the same as ``out``. Each slot is read and emptied
        atomically with respect to writes. Returns the sum of the associated weights, each times its weight, and the
        states of the slots at that time.
        """
        # One edge lock per slot for the whole sum: an accumulate between the reading of a slot and its reset would be
        # lost.
        edges = sorted({self._edge[source] for source in (*weights, *reset)})
        with self.hold([EDGES + edge for edge in edges], _OWNER, deadline, check):
            blocks: list[torch.Tensor | None] = []
            p, scales = 0.0, list[float]()
            # Taken under the locks: the caller counts versions from these states. A state from after the locks could
            # include a put that this sum does not contain.
            seen = {source: self.state(source) for source in self.layout.sources}
            for source, weight in sorted(weights.items()):
                edge = self._edge[source]
                now = int(self._index[edge][_WRITES]) & 1
                # None stands for zeros: the numbers in an empty slot are of an earlier write, and must not be summed.
                blocks.append(None if self._meta[edge][now][_EMPTY] else self._slots[edge][now])
                scales.append(weight)
                p += weight * seen[source].p
            weigh_in_blocks(out, own, own_weight, blocks, scales, self.own if publish else None)
            for source in reset:
                edge = self._edge[source]
                writes = int(self._index[edge][_WRITES])
                now = writes & 1
                meta = self._meta[edge][now]
                counts = (int(meta[_PUTS]), int(meta[_GETS]), int(meta[_ACCUMULATES]))
                when = int(meta[_WHEN])
                # A reset is a write like any other: it describes the other slot and then switches. An owner that is
                # killed in between leaves the slot as it was.
                self._describe(edge, 1 - now, 0.0, counts, True)
                # A reset is no write of the neighbour: with a new time, a neighbour that is silent would look recent to
                # age checks.
                self._meta[edge][1 - now][_WHEN] = when
                self._fence()
                self._index[edge][_WRITES] = writes + 1
            return p, seen

    def state(self, source: int) -> SlotState:
        """The state of a slot. Read without its lock: for monitoring, or for the holder of the lock."""
        edge = self._edge[source]
        writes = -1
        while writes != int(self._index[edge][_WRITES]):  # while it is copied, two writes may pass
            writes = int(self._index[edge][_WRITES])
            self._fence()
            meta = self._meta[edge][writes & 1].copy()
            self._fence()
        age = (clock.monotonic_ns() - int(meta[_WHEN])) / 1e9
        p = float(meta[_P : _P + 1].view(np.float64)[0])
        return SlotState(int(meta[_PUTS]), int(meta[_GETS]), int(meta[_ACCUMULATES]), age, p)

    def _fence(self) -> None:
        """Order all earlier accesses to memory before all later ones, for readers without the lock of an edge.

        Python has no fence. x86 needs none here, but aarch64 reorders stores, and loads: a reader could see the index
        of a write and still the counts of the write before last. Accesses before the release of a lock come before it,
        and those after its next acquisition after that (C11, release and acquire), so the two together are a fence.
        Holders of an edge's lock do not depend on it: they take and release that lock by system calls.
        """
        with self._order:
            pass
        with self._order:
            pass
