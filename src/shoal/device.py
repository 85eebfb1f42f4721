"""Devices whose memory the CPU does not read: the interface of a device, and its implementation for NVIDIA GPUs.

Work on a device is queued in streams: a call returns before its work is done. An agent that sends a tensor has to know
that it is written. So a thread without other work can wait for a position in a stream (:class:`Mark`).

:class:`Cuda` has torch's streams, and memory that processes share by CUDA's driver, which torch lacks. The driver's
functions use the virtual memory interface: memory is made by ``cuMemCreate``, which counts references, and passed on as
a descriptor, like a memory file. So it has no name, only processes with the descriptor can map it, and it stays mapped
when its owner is killed. Memory of ``cudaMalloc`` lacks these properties: its handles (CUDA IPC) are bytes that any
process of the user could pass on, and the state of a mapping after its owner has ended is undefined.

This module imports torch and no other part of Shoal.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from contextlib import AbstractContextManager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A place in a stream."""

    def wait(self) -> None:
        """Wait until all work queued before it is done. Other threads run in the meantime."""


class Stream(Protocol):
    """A queue of a device's work, which is done in its order."""

    def after(self, other: Any) -> None:
        """Make later work of this stream wait for the work queued in another stream of the device so far."""

    def working(self) -> AbstractContextManager[object]:
        """A context in which calls of this thread queue their work here."""

    def mark(self) -> Mark:
        """The position after all queued work."""

    def uses(self, tensor: torch.Tensor) -> None:
        """Do not reuse the memory of a tensor before the work queued here is done, even if all references are gone."""


class Memory(Protocol):
    """Memory of a device that other processes of the machine can map.

    Attributes:
        ident: Its number among the memory of its agent.
        size: In bytes.
        fd: The descriptor that others map it by.
        data: All of it, ``[size]`` in uint8, on the device.
    """

    ident: int
    size: int
    fd: int
    data: torch.Tensor

    def close(self) -> None:
        """Close the descriptor; the memory is freed when the last tensor over it is gone, here and at the readers."""


class Device(Protocol):
    """One device of this machine."""

    def current(self) -> Stream:
        """The stream of the calling thread."""

    def stream(self) -> Stream:
        """A new stream."""

    def share(self, ident: int, size: int) -> Memory:
        """New memory.

        Raises:
            MemoryError: There is none.
        """

    def staging(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the CPU that the device copies to and from while others work, uninitialised, ``[numel]``."""


class Unshareable(Exception):
    """Memory of a device cannot be shared, or not be mapped; it says why."""


LIBRARY = "libcuda.so.1"
_OUT_OF_MEMORY = 2
_PINNED, _ON_DEVICE, _DESCRIPTOR, _READ_AND_WRITE = 1, 1, 1, 3
_HAS_VIRTUAL_MEMORY, _HAS_DESCRIPTORS = 102, 103  # attributes of a device


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _Flags(ctypes.Structure):
    _fields_ = [
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [
        ("type", c_int),
        ("handles", c_int),
        ("location", _Location),
        ("windows", c_void_p),
        ("flags", _Flags),
    ]


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = [("location", _Location), ("flags", c_int)]


_PARAMETERS: dict[str, list[Any]] = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuDeviceCanAccessPeer": [POINTER(c_int), c_int, c_int],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
    "cuMemGetAllocationGranularity": [POINTER(c_size_t), POINTER(_Properties), c_int],
    "cuMemCreate": [POINTER(c_uint64), c_size_t, POINTER(_Properties), c_uint64],
    "cuMemRelease": [c_uint64],
    "cuMemExportToShareableHandle": [c_void_p, c_uint64, c_int, c_uint64],
    "cuMemImportFromShareableHandle": [POINTER(c_uint64), c_void_p, c_int],
    "cuMemGetAllocationPropertiesFromHandle": [POINTER(_Properties), c_uint64],
    "cuMemAddressReserve": [POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemAddressFree": [c_uint64, c_size_t],
    "cuMemMap": [c_uint64, c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemUnmap": [c_uint64, c_size_t],
    "cuMemSetAccess": [c_uint64, c_size_t, POINTER(_Access), c_size_t],
}


class Driver:
    """The driver, initialised.

    Raises:
        Unshareable: There is none.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._functions = ctypes.CDLL(library)
            for name, parameters in _PARAMETERS.items():
                getattr(self._functions, name).argtypes = parameters
        except (OSError, AttributeError) as error:
            raise Unshareable(f"CUDA's driver cannot be used: {error}") from None
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._functions, name)(*arguments)
        if code == _OUT_OF_MEMORY:
            raise MemoryError(f"{name}: the device has no memory left")
        if code:
            text = c_char_p()
            self._functions.cuGetErrorString(code, byref(text))
            why = text.value.decode(errors="replace") if text.value else "an error that the driver does not know"
            raise Unshareable(f"{name}: {why} ({code})")

    def why_not(self, device: int) -> str | None:
        """Why memory of a device cannot be shared; None if it can."""
        has = c_int()
        for attribute, what in ((_HAS_VIRTUAL_MEMORY, "virtual memory"), (_HAS_DESCRIPTORS, "descriptors of memory")):
            self._call("cuDeviceGetAttribute", byref(has), attribute, device)
            if not has.value:
                return f"device {device} has no {what}"
        return None

    def make(self, device: int, size: int) -> tuple[int, int, int]:
        """Memory of a device, mapped: its address, its size, which is rounded up, and a descriptor of it.

        Raises:
            MemoryError, Unshareable: There is none.
        """
        properties = _Properties(type=_PINNED, handles=_DESCRIPTOR, location=_Location(_ON_DEVICE, device))
        step = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(step), byref(properties), 0)
        size = -(-size // step.value) * step.value
        handle, fd = c_uint64(), c_int(-1)
        self._call("cuMemCreate", byref(handle), size, byref(properties), 0)
        try:
            address = self._map(handle, size, device)
            try:
                self._call("cuMemExportToShareableHandle", byref(fd), handle, _DESCRIPTOR, 0)
            except BaseException:
                self.unmap(address, size)
                raise
        finally:
            self._call("cuMemRelease", handle)  # it stays as long as it is mapped, or has a descriptor
        return address, size, fd.value

    def map(self, fd: int, size: int) -> tuple[int, int]:
        """Memory that another process has made, mapped: its address, and the device where it is.

        Raises:
            MemoryError, Unshareable: The memory cannot be mapped, for example because no device here reaches it.
        """
        handle, properties = c_uint64(), _Properties()
        self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), _DESCRIPTOR)
        try:
            self._call("cuMemGetAllocationPropertiesFromHandle", byref(properties), handle)
            device = properties.location.id
            return self._map(handle, size, device), device
        finally:
            self._call("cuMemRelease", handle)

    def _map(self, handle: c_uint64, size: int, device: int) -> int:
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
        except BaseException:
            self._call("cuMemAddressFree", address, size)
            raise
        try:
            allowed = self._reaching(device)
            access = [_Access(_Location(_ON_DEVICE, ordinal), _READ_AND_WRITE) for ordinal in allowed]
            self._call("cuMemSetAccess", address, size, (_Access * len(access))(*access), len(access))
        except BaseException:
            self.unmap(address.value, size)
            raise
        return address.value

    @functools.cache  # noqa: B019 - there is one driver in a process
    def _reaching(self, device: int) -> list[int]:
        """The device, and those others that read its memory."""
        count, can = c_int(), c_int()
        self._call("cuDeviceGetCount", byref(count))
        found = [device]
        for other in range(count.value):
            if other != device:
                self._call("cuDeviceCanAccessPeer", byref(can), other, device)
                found += [other] if can.value else []
        return found

    def unmap(self, address: int, size: int) -> None:
        """Unmap memory that is no longer in use."""
        self._call("cuMemUnmap", address, size)
        self._call("cuMemAddressFree", address, size)


@functools.cache
def driver() -> Driver:
    """The driver of this machine.

    Raises:
        Unshareable: There is none.
    """
    return Driver()


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
                "an exchange with other agents cannot be captured into a CUDA graph: their messages, and whether they "
                "arrive, are known only while it runs. Capture what is before and after it, and call it in between"
            )
        return CudaStream(stream)

    def stream(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def share(self, ident: int, size: int) -> CudaMemory:
        return CudaMemory(ident, size, self._index)

    def staging(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True, device="cpu")


def map_memory(fd: int, size: int) -> torch.Tensor:
    """Memory that another process shares, ``[size]`` in uint8, on the device where it is. ``fd`` stays the caller's.

    Raises:
        MemoryError, Unshareable: The memory cannot be mapped here.
    """
    address, device = driver().map(fd, size)
    return _as_tensor(address, size, device)


@functools.cache
def open_device(device: torch.device) -> Device:
    """The device that tensors are on, one for all threads of this process.

    Raises:
        Unshareable: Other processes could not map its memory.
    """
    if device.type != "cuda" or device.index is None:
        raise Unshareable(f"Shoal shares memory of CUDA devices, and not of {device}")
    return Cuda(device)
