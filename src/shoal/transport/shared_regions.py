"""Memory that other processes can read in place, and memory that is reused.

An :class:`Arena` hands out :class:`Region` objects from memory files (``memfd_create``). A memory file has no name, so
nothing is left behind when its owner is killed, and only processes with its descriptor can open it. It is sealed
against shrinking (a reader would get SIGBUS) and its pages are reserved when it is made, so running out of memory is an
exception here rather than a signal there.

A :class:`ResultPool` hands out tensors over private memory and takes the memory back when the last tensor over it is
gone: fresh pages cost more than the sum that is written to them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import logging
import math
import mmap
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

from .. import clock
from .._signals import deferred
from ..device import Memory, Unshareable, map_memory
from ..errors import ProtocolError
from . import quotas

log = logging.getLogger("shoal")
T = TypeVar("T")
ALIGNMENT = 64
SMALL = 1 << 18
"""Regions up to this many bytes share a memory file with others of their size; larger ones have one each."""
SLAB = 1 << 22
HUGE_PAGE = 1 << 21
MOST_OF_DEVICE = 1 << 44
"""Bytes of one piece of a device's memory: more than any has."""
LATELY = 2.0
"""Seconds: a size requested within them is in use."""
MADV_POPULATE_WRITE = 23
F_ADD_SEALS, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 1, 2, 4


def size_class(nbytes: int) -> int:
    """The size that a request is rounded up to: at most a quarter more, so that near sizes share memory."""
    if nbytes <= ALIGNMENT:
        return ALIGNMENT
    step = max(ALIGNMENT, 1 << ((nbytes - 1).bit_length() - 3))
    return -(-nbytes // step) * step


_libc = ctypes.CDLL(None, use_errno=True)


def _populate(area: mmap.mmap, size: int) -> None:
    """Back the whole area with pages now, huge ones where the kernel gives them."""
    if size >= HUGE_PAGE:
        area.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.ENOMEM, errno.EFAULT):
        raise _no_memory(size)
    # A kernel before 5.14 lacks the call; its pages are allocated when they are touched.


def _no_memory(size: int) -> MemoryError:
    return MemoryError(f"the system cannot give {size:,} bytes of memory to Shoal's exchange buffers")


def _as_bytes(area: mmap.mmap) -> torch.Tensor:
    # Made in a caller's inference mode, it could not be written to by any thread outside of that mode.
    with torch.inference_mode(False):
        return torch.frombuffer(area, dtype=torch.uint8)


class Segment:
    """One memory file of this agent, mapped."""

    def __init__(self, ident: int, size: int) -> None:
        self.ident = ident
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create("shoal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size)
            fcntl.fcntl(self.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
            self.area = mmap.mmap(self.fd, self.size)
            _populate(self.area, self.size)
        except BaseException as error:
            os.close(self.fd)
            if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise _no_memory(self.size) from error
            raise
        self.data = _as_bytes(self.area)

    def close(self) -> None:
        """Close the descriptor; the pages are freed when the last tensor over them is gone, here and at the readers."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Region:
    """A part of an arena. It is not reused until every reader has released it."""

    __slots__ = ("data", "nbytes", "offset", "segment", "size")

    def __init__(self, segment: Memory, offset: int, size: int) -> None:
        self.segment = segment
        self.offset = offset
        self.size = size
        self.nbytes = size
        self.data = segment.data[offset : offset + size]

    def as_tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first ``numel`` elements of the region as a flat tensor."""
        self.nbytes = numel * dtype.itemsize
        return self.data[: self.nbytes].view(dtype)


class _HandedOut(weakref.ref[Any]):
    """Remembers what is handed out for as long as an object lives."""

    __slots__ = ("item",)
    item: Any


class _Returns(ABC, Generic[T]):
    """Items that are returned for reuse, from any place: also from the garbage collector, which may run during a
    hand-out, while the lock is held. So a return never waits for the lock; the next hand-out sorts the returned items
    in first.

    Attributes:
        returned, ended: Items, and owners of items, that were returned and not made available. If both are empty,
            :meth:`tidy` has nothing to do.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.returned: deque[T] = deque()
        self._handed_out: dict[int, _HandedOut] = {}
        self.ended: deque[_HandedOut] = deque()

    def release(self, item: T) -> None:
        """Give something back. May be called from any thread."""
        self.returned.append(item)
        self.tidy()

    def tidy(self) -> None:
        """Make returned items available, unless another thread does."""
        with deferred:
            if self._lock.acquire(blocking=False):
                try:
                    self._sort_in()
                finally:
                    self._lock.release()

    def _hand_out(self, owner: object, item: T) -> None:
        """The item returns when ``owner`` is gone. No Python code may run at that time: an interrupt in it would be
        lost, and the interrupted work undone. So the callback is a C function, which only records the ended owner.
        """
        owned = _HandedOut(owner, self.ended.append)
        owned.item = item
        self._handed_out[id(owned)] = owned

    def _sort_in(self) -> None:
        """Make returned items available; under the lock."""
        while self.ended:
            owned = self.ended.popleft()
            del self._handed_out[id(owned)]
            self._take_in(owned.item)
        while self.returned:
            self._take_in(self.returned.popleft())

    @abstractmethod
    def _take_in(self, item: T) -> None: ...


class Arena(_Returns[Region]):
    """This agent's memory that others read. ``allocate`` and ``release`` may be called from any thread.

    Args:
        keep: The bytes of unused large regions that are kept.
        make: Makes its memory from a number and a size; memory files if not given.
        beside: Another arena of this agent, with which it shares the numbering of memory.
    """

    def __init__(
        self,
        keep: int = 1 << 28,
        make: Callable[[int, int], Memory] = Segment,
        beside: Arena | None = None,
    ) -> None:
        super().__init__()
        self._make = make
        self._free: dict[int, list[Region]] = defaultdict(list)
        self._segments: dict[int, Memory] = {}
        self._keep = keep
        self._free_large = 0
        self._idents: Iterator[int] = itertools.count(1) if beside is None else beside._idents
        self._slabs: dict[
            int, tuple[Memory, int]
        ] = {}  # by size: the memory being cut into regions, and the offset so far
        self._of_tensors: dict[int, Region] = {}
        # Memory that readers may unmap; the router notifies them.
        self.retired: list[int] = [] if beside is None else beside.retired
        self.closed = False

    def allocate(self, nbytes: int) -> Region:
        size = size_class(nbytes)
        with deferred, self._lock:
            self._sort_in()
            free = self._free[size]
            if free:
                region = free.pop()
                if size > SMALL:
                    self._free_large -= size
                return region
            if self.closed:
                raise RuntimeError("the arena is closed")
            if size > SMALL:
                self._trim(size)
                return Region(self._new_segment(size), 0, size)
            slab, offset = self._slabs.get(size) or (self._new_segment(SLAB), 0)
            following = offset + size
            if following + size <= SLAB:
                self._slabs[size] = slab, following
            else:
                self._slabs.pop(size, None)
            return Region(slab, offset, size)

    def _new_segment(self, size: int) -> Memory:
        segment = self._make(next(self._idents), size)
        self._segments[segment.ident] = segment
        return segment

    def _take_in(self, region: Region) -> None:
        address = region.data.data_ptr()
        if self._of_tensors.get(address) is region:
            del self._of_tensors[address]
        if self.closed:
            return
        self._free[region.size].append(region)
        if region.size > SMALL:
            self._free_large += region.size

    def next_ident(self) -> int:
        """A number for a memory file that is none of the arena's."""
        return next(self._idents)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor in a region of its own, which returns when the tensor is gone."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        # An interrupt between the two lines would lose the region: nobody would own it, and nobody return it.
        with deferred:
            region = self.allocate(nbytes)
            # torch keeps the object that exports the buffer for as long as any tensor lies over the storage.
            assert isinstance(region.segment, Segment)
            lease = (ctypes.c_char * nbytes).from_buffer(region.segment.area, region.offset)
            tensor = torch.frombuffer(lease, dtype=dtype).view(shape)
            self._of_tensors[tensor.data_ptr()] = region
            self._hand_out(lease, region)
        return tensor

    def find(self, tensor: torch.Tensor) -> Region | None:
        """The region of a tensor that :meth:`empty` made."""
        return self._of_tensors.get(tensor.data_ptr())

    def _trim(self, wanted: int) -> None:
        """Free large unused regions before taking more, so that regions of changing sizes do not pile up."""
        for size, regions in list(self._free.items()):
            if size <= SMALL:
                continue
            while regions and self._free_large + wanted > self._keep:
                region = regions.pop()
                self._free_large -= size
                self.retired.append(region.segment.ident)
                self._segments.pop(region.segment.ident).close()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the arena holds, used or not."""
        with self._lock:
            return sum(segment.size for segment in self._segments.values())

    def descriptors(self) -> list[int]:
        return [segment.fd for segment in self._segments.values() if segment.fd >= 0]

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._free.clear()
            self._slabs.clear()
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()


class PeerMemory:
    """The memory files of one peer, and memory of its devices, mapped as their descriptors come."""

    def __init__(self) -> None:
        self._segments: dict[int, torch.Tensor] = {}
        self._descriptors: dict[int, int] = {}

    def add(self, ident: int, fd: int, lockable: bool = False) -> None:
        """Map a descriptor that was received with a message, and close it, unless its file is to be locked."""
        try:
            self._check_number(ident)
            if lockable and len(self._descriptors) >= quotas.descriptor_limit():
                raise ProtocolError(f"it has exceeded its quota of {quotas.descriptor_limit():,} windows")
            # Reading a page that the owner has cut off ends this process with SIGBUS.
            seals = fcntl.fcntl(fd, 1034)  # F_GET_SEALS
            if not seals & F_SEAL_SHRINK:
                raise ProtocolError("shared memory that its owner could shrink")
            size = os.fstat(fd).st_size
            area = mmap.mmap(fd, size)
            if lockable:
                self._descriptors[ident] = os.dup(fd)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise MemoryError("there is no room to map shared memory") from None
            raise ProtocolError(f"shared memory that cannot be mapped: {error}") from None
        finally:
            os.close(fd)
        if size >= HUGE_PAGE:
            area.madvise(mmap.MADV_HUGEPAGE)
        self._segments[ident] = _as_bytes(area)

    def _check_number(self, ident: int) -> None:
        if ident in self._segments:
            raise ProtocolError(f"memory {ident} shared twice")
        if len(self._segments) >= quotas.SEGMENTS:
            raise ProtocolError(f"it has exceeded its quota of {quotas.SEGMENTS:,} memory files that are shared")

    def add_of_device(self, ident: int, fd: int, size: int) -> None:
        """Map memory of a device, and close its descriptor. If that fails, its tensors are meta tensors, and using them
        raises.
        """
        try:
            self._check_number(ident)
            if size > MOST_OF_DEVICE:
                raise ProtocolError(f"{size:,} bytes of a device's memory")
            try:
                data = map_memory(fd, size)
            except (Unshareable, MemoryError, RuntimeError) as error:
                why = str(error)  # a record of the error itself would keep its frames, and they memory
                log.warning("memory of another agent's device cannot be mapped: %s", why)
                data = torch.empty(size, dtype=torch.uint8, device="meta")
        finally:
            os.close(fd)
        self._segments[ident] = data

    def forget(self, ident: int) -> None:
        self._segments.pop(ident, None)
        fd = self._descriptors.pop(ident, -1)
        if fd >= 0:
            os.close(fd)

    def segment(self, ident: int) -> tuple[torch.Tensor, int] | None:
        """A whole memory file, and its descriptor (-1 where it was not sent to be locked)."""
        data = self._segments.get(ident)
        return None if data is None else (data, self._descriptors.get(ident, -1))

    def descriptors(self) -> list[int]:
        return list(self._descriptors.values())

    def close(self) -> None:
        for ident in list(self._segments):
            self.forget(ident)

    def view(self, ident: int, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        segment = self._segments.get(ident)
        if segment is None:
            raise ProtocolError(f"a reference to memory {ident}, which was never shared")
        # The peer has chosen these numbers; a view beyond the end would read or end this process.
        if offset % dtype.itemsize or offset + nbytes > segment.numel():
            raise ProtocolError(f"bytes {offset} to {offset + nbytes} of a memory file of {segment.numel()}")
        return segment[offset : offset + nbytes].view(dtype)


class ResultPool(_Returns[tuple[mmap.mmap, int]]):
    """Tensors over memory that is reused once the last tensor over it is gone.

    Free memory beyond ``keep`` bytes is returned to the system, first memory of sizes not requested lately. No size in
    use is evicted for another: with alternating sizes, each would always evict the other.
    """

    def __init__(self, keep: int = 1 << 28) -> None:
        super().__init__()
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)
        self._asked_for: dict[int, float] = {}  # sizes and times, the least recent first
        self._free_bytes = 0
        self._keep = keep

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor. Small ones come from torch, whose allocator is good at them."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALL:
            return torch.empty(shape, dtype=dtype, device="cpu")
        with deferred:
            return self._over(self._block(size_class(nbytes)), nbytes, dtype).view(shape)

    def _block(self, size: int) -> mmap.mmap:
        with self._lock:
            self._sort_in()
            self._asked_for.pop(size, None)
            self._asked_for[size] = clock.monotonic()
            if self._free[size]:
                self._free_bytes -= size
                return self._free[size].pop()
        block = mmap.mmap(-1, size)
        if size >= HUGE_PAGE:
            block.madvise(mmap.MADV_HUGEPAGE)
        return block

    def _over(self, block: mmap.mmap, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        # torch keeps the object that exports the buffer for as long as any tensor lies over the storage.
        lease = (ctypes.c_char * nbytes).from_buffer(block)
        self._hand_out(lease, (block, len(block)))
        return torch.frombuffer(lease, dtype=dtype)

    def _take_in(self, sized_block: tuple[mmap.mmap, int]) -> None:
        block, size = sized_block
        if self._free_bytes + size > self._keep:
            self._trim(self._keep - size)
        if self._free_bytes + size <= self._keep:
            self._free[size].append(block)
            self._free_bytes += size

    def _trim(self, room: int) -> None:
        """Free memory of sizes that are no longer requested, until ``room`` bytes are left."""
        until = clock.monotonic() - LATELY
        for size, when in list(self._asked_for.items()):
            if when > until or self._free_bytes <= room:
                return
            blocks = self._free[size]
            while blocks and self._free_bytes > room:
                blocks.pop()
                self._free_bytes -= size

    def clear(self) -> None:
        with self._lock:
            self._free.clear()
            self._asked_for.clear()
            self._free_bytes = 0
