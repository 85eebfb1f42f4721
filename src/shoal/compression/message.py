"""Common functions for the messages of all compressors: checks of received bytes, rows, blocks, and views as bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

BLOCK = 1 << 17
"""Numbers that are encoded or decoded at a time: a multiple of 8, and few enough that they stay in the cache."""
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALF = (torch.float16, torch.bfloat16)


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"numbers in {dtype}: messages are made of {', '.join(str(one) for one in DTYPES)}")


def check_message(data: torch.Tensor, nbytes: int, what: str) -> None:
    """Raise ValueError if these are not the bytes of ``what``, which has ``nbytes``."""
    if data.dtype != torch.uint8:
        raise ValueError(f"a message in {data.dtype}, not in bytes (torch.uint8): it should be {what}")
    if not data.dim() or data.shape[-1] != nbytes:
        raise ValueError(f"a message of shape {list(data.shape)}, not of {nbytes} bytes: it should be {what}")


def rows(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The rows ``[d]`` of ``[..., d]``, as views."""
    return (x[index] for index in np.ndindex(*x.shape[:-1]))


def blocks(d: int, size: int = BLOCK) -> Iterator[slice]:
    return (slice(start, min(start + size, d)) for start in range(0, d, size))


def as_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """uint8, one after the other."""
    return numbers.contiguous().view(-1).view(torch.uint8)


def as_numbers(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[n]`` from bytes of any alignment."""
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def as_drawn(x: torch.Tensor) -> torch.Tensor:
    """A tensor with the shape and the device of ``x``, and the dtype in which random numbers are drawn for it."""
    return torch.empty((), dtype=torch.float32, device=x.device).expand(x.shape) if x.dtype in HALF else x
