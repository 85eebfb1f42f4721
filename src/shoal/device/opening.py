"""The available devices, and their memory."""

from __future__ import annotations

import functools

import torch

from .cuda import Cuda
from .cuda import map_memory as map_memory
from .device import Device, Unshareable


@functools.cache
def open_device(device: torch.device) -> Device:
    """The device that tensors are on, one for all threads of this process.

    Raises:
        Unshareable: Other processes could not map its memory.
    """
    if device.type != "cuda" or device.index is None:
        raise Unshareable(f"Shoal shares memory of CUDA devices, and not of {device}")
    return Cuda(device)
