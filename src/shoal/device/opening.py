"""Which devices there are, and their memory."""

from __future__ import annotations

import functools

import torch

from . import cuda
from .device import Device, Unshareable


@functools.cache
def open_device(device: torch.device) -> Device:
    """The device that tensors are on, one for all threads of this process.

    Raises:
        Unshareable: Other processes could not map its memory.
    """
    if device.type != "cuda" or device.index is None:
        raise Unshareable(f"Shoal shares memory of CUDA devices, and not of {device}")
    return cuda.Cuda(device)


def map_memory(fd: int, size: int) -> torch.Tensor:
    """Memory that another process shares, ``[size]`` in uint8, on the device where it is. ``fd`` stays the caller's.

    Raises:
        Unshareable: It cannot be mapped here.
    """
    return cuda.map_memory(fd, size)
