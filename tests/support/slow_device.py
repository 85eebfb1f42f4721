"""A device emulated on this machine's CPU, which works late: code that forgets to wait reads stale data.

Its tensors say that they are on ``cuda:0``. Operations on them are queued in the calling thread's stream, a thread that
takes its time, and new memory is full of NaN until something has been written. Its memory lies in memory files, so
other processes map it like a device's.
"""

from __future__ import annotations

import itertools
import os
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from shoal.device import Unshareable
from shoal.execution import devices
from shoal.transport import shared_regions
from shoal.transport.shared_regions import PeerMemory, Segment

CUDA = torch.device("cuda", 0)
_aten = torch.ops.aten
_local = threading.local()
_writes: Counter[int] = Counter()
"""Of each memory, by its address."""


class SlowStream:
    """A thread that does what is queued, in order, each a moment later than it could."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._chance = random.Random(1)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="slow-device", daemon=True)
        self._thread.start()
        self.error: Exception | None = None

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (work := self._work.get()) is not None:
            time.sleep(self._chance.random() * self._longest)
            try:
                work()
            except Exception as error:  # as on a device: the next wait raises it
                self.error = self.error or error

    def queue(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def after(self, other: SlowStream) -> None:
        mark = other.mark()

        def wait() -> None:
            mark.wait()  # with what went wrong there

        self.queue(wait)

    @contextmanager
    def working(self) -> Iterator[None]:
        before = getattr(_local, "stream", None)
        _local.stream = self
        try:
            yield
        finally:
            _local.stream = before

    def mark(self) -> SlowMark:
        return SlowMark(self)

    def uses(self, tensor: torch.Tensor) -> None:
        assert isinstance(tensor, Slow)

    def synchronize(self) -> None:
        self.mark().wait()

    def end(self) -> None:
        self._work.put(None)
        self._thread.join()


class SlowMark:
    def __init__(self, stream: SlowStream) -> None:
        self._stream = stream
        self.reached = threading.Event()
        stream.queue(self.reached.set)

    def wait(self) -> None:
        assert self.reached.wait(60.0), "the device has stopped"
        if self._stream.error is not None:
            raise self._stream.error


class Slow(torch.Tensor):
    """A tensor of the device; ``on_cpu`` is its memory."""

    on_cpu: torch.Tensor

    @staticmethod
    def __new__(cls, on_cpu: torch.Tensor) -> Slow:
        about = {"dtype": on_cpu.dtype, "strides": on_cpu.stride(), "storage_offset": on_cpu.storage_offset()}
        made: Slow = torch.Tensor._make_wrapper_subclass(cls, on_cpu.size(), device="meta", **about)  # type: ignore[attr-defined]
        made.on_cpu = on_cpu
        return made

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    @property
    def data(self) -> Slow:  # type: ignore[override]
        return Slow(self.on_cpu)

    @data.setter
    def data(self, other: Slow) -> None:
        self.on_cpu = other.on_cpu

    @property
    def _version(self) -> int:  # type: ignore[override]
        return _writes[self.on_cpu.untyped_storage().data_ptr()]

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    def __repr__(self, **_: Any) -> str:
        return f"Slow({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        stream: SlowStream = current_device().current()
        if func in (_aten.new_empty.default, _aten.empty_like.default):
            shape = args[1] if func is _aten.new_empty.default else args[0].shape
            return empty(tuple(shape), kwargs.get("dtype") or args[0].dtype)
        given, named = tree_map(_memory, args), tree_map(_memory, kwargs)
        if func.is_view or func is _aten.detach.default:
            return tree_map(_on_device, func(*given, **named))
        written = [
            (args[at] if at < len(args) else kwargs[one.name])
            for at, one in enumerate(func._schema.arguments)
            if one.is_write and (at < len(args) or one.name in kwargs)
        ]
        non_blocking = len(args) > 2 and bool(args[2])  # of a copy, which is at once done if it is from or to the CPU
        if written and (isinstance(written[0], Slow) or non_blocking):
            stream.queue(lambda: func(*given, **named))
            if isinstance(written[0], Slow):
                _writes[written[0].on_cpu.untyped_storage().data_ptr()] += 1
            if func is _aten.copy_.default and not isinstance(args[1], Slow) and not non_blocking:
                stream.synchronize()
            return written[0]
        stream.synchronize()
        named.pop("device", None)
        result = func(*given, **named)
        leaves = written or func in (_aten._to_copy.default, _aten._local_scalar_dense.default)
        return result if leaves else tree_map(_on_device, result)


Slow.__name__ = "Tensor"  # as those of a device call themselves


def _memory(one: Any) -> Any:
    return one.on_cpu if isinstance(one, Slow) else one


def _on_device(one: Any) -> Any:
    return Slow(one) if isinstance(one, torch.Tensor) else one


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Slow:
    made = torch.empty(shape, dtype=dtype)
    made.view(-1).view(torch.uint8).fill_(0xFF)
    return Slow(made)


def to_device(tensor: torch.Tensor) -> Slow:
    """A copy there, at once; what is queued to write it is done later."""
    made = empty(tuple(tensor.shape), tensor.dtype)
    given = tensor.detach().clone()
    current_device().current().queue(lambda: made.on_cpu.copy_(given))  # type: ignore[arg-type, func-returns-value]
    return made


class SlowMemory:
    """A memory file, as a device's memory."""

    def __init__(self, ident: int, size: int) -> None:
        self._file = Segment(ident, size)
        self.ident, self.size, self.fd = ident, self._file.size, self._file.fd
        self._file.data.fill_(0xFF)
        self.data = Slow(self._file.data)

    def close(self) -> None:
        self._file.close()
        self.fd = self._file.fd


class SlowDevice:
    """Of one process. ``longest``: seconds that each piece of work takes at most."""

    def __init__(self, longest: float = 0.0005) -> None:
        self.longest = longest
        self._streams: list[SlowStream] = []
        self._first = self.stream()

    def current(self) -> SlowStream:
        return getattr(_local, "stream", None) or self._first

    def stream(self) -> SlowStream:
        self._streams.append(SlowStream(self.longest))
        return self._streams[-1]

    def share(self, ident: int, size: int) -> SlowMemory:
        if getattr(_local, "full", False):
            raise MemoryError("the device has no memory left")
        return SlowMemory(ident, size)

    def staging(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return empty((numel,), dtype).on_cpu

    def end(self) -> None:
        for stream in self._streams:
            stream.end()


@contextmanager
def without_memory() -> Iterator[None]:
    """The calling thread gets no new memory that others can map."""
    _local.full = True
    try:
        yield
    finally:
        _local.full = False


_device: SlowDevice | None = None


def current_device() -> SlowDevice:
    """That of this process."""
    assert _device is not None, "no slow device is in use"
    return _device


@contextmanager
def in_use() -> Iterator[SlowDevice]:
    """Let agents made in the block find it, and leave tensors on it."""
    global _device
    _device = device = SlowDevice()
    memory, numbers = PeerMemory(), itertools.count()

    def opened(one: torch.device) -> SlowDevice:
        if one != CUDA:
            raise Unshareable(f"there is no {one}")
        return device

    def mapped(fd: int, size: int) -> Slow:
        ident = next(numbers)
        memory.add(ident, os.dup(fd))
        full = memory.segment(ident)
        assert full is not None and full[0].numel() >= size
        return Slow(full[0][:size])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "open_device", opened)
        patch.setattr(shared_regions, "map_memory", mapped)
        patch.setenv("SHOAL_DEVICE_MEMORY", "1")
        try:
            yield device
        finally:
            device.end()
            memory.close()
            _device = None
