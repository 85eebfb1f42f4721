"""An agent's work on a device: copies to memory that other agents can read, and sums, each in a separate stream.

The host synchronizes the agents: it sends a message when the tensor is written, and frees memory when it has been read,
as on the CPU. So a killed agent leaves no stream that waits for its signal, and no sum reads a half-written tensor. The
host does not block: one thread for each stream waits for its events (:class:`DeviceLane`), while callers continue.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Generator

import torch

from .._signals import deferred
from ..device import Device, Mark, Stream, Unshareable, open_device
from ..transport.link import Lease, Published
from ..transport.shared_regions import Arena, Region
from .operation import Operation
from .stage import Arrived, Future, await_future

log = logging.getLogger("shoal")

FEWEST_BYTES = 1 << 14
"""Bytes of a tensor up to which it is sent inside the message, through the CPU."""
STOP_SECONDS = 5.0
"""Seconds that :meth:`DeviceLane.close` waits for a device that does not finish its work."""
DoneCallback = Callable[[BaseException | None], None]


class DeviceFuture:
    """The work that is queued in a lane. Operations wait for it: it is a :class:`~.stage.Future`."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark
        self._lock = threading.Lock()
        self._ended = False
        self._error: BaseException | None = None
        self._waiting: list[DoneCallback] = []

    @property
    def done(self) -> bool:
        """Whether the work is done. Raises the device's error."""
        if self._error is not None:
            raise self._error
        return self._ended

    def add_done_callback(self, then: DoneCallback) -> None:
        """Call ``then`` with the error, if any, when the work is done, or now if it is done already."""
        with self._lock:
            if not self._ended:
                self._waiting.append(then)
                return
        then(self._error)

    def wait(self) -> None:
        """Block until the work is done. Only the lane's thread calls it."""
        error = None
        try:
            self._mark.wait()
        except Exception as caught:  # an error of any work queued on the device
            error = caught
        with self._lock:
            self._error, self._ended = error, True
            waiting, self._waiting = self._waiting, []
        # Without the lock: a callback takes the engine's lock, whose holder may wait for this lock in
        # add_done_callback().
        for then in waiting:
            then(error)


class DeviceLane:
    """A stream of this agent, and a thread that waits for work queued there or in a caller's stream."""

    def __init__(self, stream: Stream, name: str) -> None:
        self.stream = stream
        self._waiting: queue.SimpleQueue[DeviceFuture | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name=name, daemon=True)
        self._thread.start()

    def queued(self, stream: Stream | None = None) -> DeviceFuture:
        """A future of all work queued so far in ``stream``, by default in the lane's own stream."""
        future = DeviceFuture((stream or self.stream).mark())
        self._waiting.put(future)
        return future

    def _wait(self) -> None:
        while (future := self._waiting.get()) is not None:
            future.wait()

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join(STOP_SECONDS)


class DeviceContext:
    """The resources of one agent on one device: shared memory, and lanes for copies and sums."""

    def __init__(self, device: Device, rank: int, beside: Arena, staged: Callable[[], bool]) -> None:
        self.device = device
        self._staged = staged
        self.arena = Arena(make=device.share, beside=beside)
        self.copies = DeviceLane(device.stream(), f"shoal-{rank}-copies")
        self.sums = DeviceLane(device.stream(), f"shoal-{rank}-sums")

    def publish(self, operation: Operation, tensor: torch.Tensor) -> PublishedOnDevice:
        """Queue a copy of a tensor to memory that others can read, in the caller's stream: work that the caller queues
        afterwards may change the tensor. Agents of other machines need a second copy, in CPU memory.
        """
        caller = self.device.current()
        region = self.arena.allocate(tensor.nbytes)
        lease = Lease(self.arena, region)
        # Before the copy is queued: if that raises, the failed operation releases the region.
        operation.leases.append(lease)
        data = region.as_tensor(tensor.dtype, tensor.numel())
        data.view(tensor.shape).copy_(tensor.detach())
        if not self._staged():
            return PublishedOnDevice(data, region, lease, self, caller)
        staging = self.device.staging(tensor.numel(), tensor.dtype)
        self.copies.stream.after(caller)  # the copy takes long, and the caller need not wait for it
        with self.copies.stream.working():
            staging.copy_(data, non_blocking=True)
        return PublishedOnDevice(data, region, lease, self, caller, staging)

    def close(self) -> None:
        self.copies.close()
        self.sums.close()
        self.arena.close()


class PublishedOnDevice(Published):
    """A tensor in device memory. It is written some time after :meth:`DeviceContext.publish` has returned.

    Attributes:
        place: The device of the tensor.
        caller: The caller's stream, in which the tensor was produced and which also receives the average.
        staging: The copy in CPU memory, which the device's lane of copies makes; without one, the caller's stream
            makes the only copy.
    """

    __slots__ = ("_copied", "_staging", "caller", "place")

    def __init__(
        self,
        data: torch.Tensor,
        region: Region,
        lease: Lease,
        place: DeviceContext,
        caller: Stream,
        staging: torch.Tensor | None = None,
    ) -> None:
        super().__init__(data, region, lease)
        self.place, self.caller = place, caller
        self._copied = place.copies.queued(caller if staging is None else None)
        self._staging = staging

    @property
    def on_cpu(self) -> torch.Tensor:
        if self._staging is None:
            raise RuntimeError("a tensor on a device is to travel over the network, and was not copied to the CPU")
        return self._staging

    def written(self) -> Generator[Future, Arrived, None]:
        """Wait until other agents can read the tensor."""
        yield from await_future(self._copied)


class Devices:
    """The devices of an agent's tensors.

    Args:
        rank: The agent's rank.
        arena: The agent's shared memory on the CPU.
        staged: Returns whether the job has agents on other machines.

    Attributes:
        wanted: Tensors are exchanged on their device, instead of through the CPU.
    """

    def __init__(self, rank: int, arena: Arena, staged: Callable[[], bool]) -> None:
        self.wanted = False
        self._rank, self._arena, self._staged = rank, arena, staged
        self._lock = threading.Lock()
        self._places: dict[torch.device, DeviceContext | None] = {}

    def use_device_memory(self, wanted: bool) -> None:
        """Exchange tensors on their device, if ``wanted``."""
        self.wanted = wanted

    def place_of(self, tensor: torch.Tensor) -> DeviceContext | None:
        """The device on which a tensor is exchanged; None if it is exchanged through the CPU."""
        if not self.wanted or tensor.device.type == "cpu" or tensor.nbytes <= FEWEST_BYTES:
            return None
        with deferred, self._lock:
            # Under the lock: two threads would otherwise open one device twice, each with threads and streams of its
            # own.
            if tensor.device not in self._places:
                self._places[tensor.device] = self._open(tensor.device)
            return self._places[tensor.device]

    def _open(self, device: torch.device) -> DeviceContext | None:
        try:
            return DeviceContext(open_device(device), self._rank, self._arena, self._staged)
        except Unshareable as error:
            log.warning("rank %d: tensors on %s go through the CPU: %s", self._rank, device, str(error))
            return None

    def descriptors(self) -> list[int]:
        return [fd for place in self._places.values() if place is not None for fd in place.arena.descriptors()]

    def close(self) -> None:
        for place in self._places.values():
            if place is not None:
                place.close()
