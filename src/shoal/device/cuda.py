"""A device of NVIDIA: torch's streams, and memory by the driver."""

from __future__ import annotations

import os
import weakref
from contextlib import AbstractContextManager

import torch

from .device import Unshareable
from .driver import driver


class CudaStream:
    """One of torch's."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def after(self, other: CudaStream) -> None:
        self._stream.wait_stream(other._stream)

    def working(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> CudaMark:
        return CudaMark(self._stream)

    def uses(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)


class CudaMark:
    """An event; a thread that waits for it sleeps."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


class _Mapping:
    """Memory of a device in this process, until the last tensor over it is gone: torch keeps the object it came
    from.
    """

    def __init__(self, address: int, size: int, device: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
        # Kernels of an operation that failed may be at it still.
        self._ends = weakref.finalize(self, _unmap, address, size, device)
        self._ends.atexit = False  # the process takes it all along


def _unmap(address: int, size: int, device: int) -> None:
    torch.cuda.synchronize(device)
    driver().unmap(address, size)


def _as_tensor(address: int, size: int, device: int) -> torch.Tensor:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.as_tensor(_Mapping(address, size, device), device=torch.device("cuda", device))


class CudaMemory:
    """Memory of a device that other processes can map."""

    def __init__(self, ident: int, size: int, device: int) -> None:
        self.ident = ident
        address, self.size, self.fd = driver().make(device, size)
        self.data = _as_tensor(address, self.size, device)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Cuda:
    """One device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._index = device, device.index
        why_not = driver().why_not(self._index)
        if why_not is not None:
            raise Unshareable(why_not)

    def current(self) -> CudaStream:
        stream = torch.cuda.current_stream(self._device)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "an exchange with other agents cannot be captured into a CUDA graph: what they send, and whether they "
                "come, is known only while it runs. Capture what is before and after it, and call it in between"
            )
        return CudaStream(stream)

    def stream(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def share(self, ident: int, size: int) -> CudaMemory:
        return CudaMemory(ident, size, self._index)

    def staging(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)


def map_memory(fd: int, size: int) -> torch.Tensor:
    """Memory that another process shares, ``[size]`` in uint8, on the device where it is. ``fd`` stays the caller's.

    Raises:
        MemoryError, Unshareable: The memory cannot be mapped here.
    """
    address, device = driver().map(fd, size)
    return _as_tensor(address, size, device)
