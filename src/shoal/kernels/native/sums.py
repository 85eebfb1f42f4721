"""Weighted sums and reductions by the compiled kernels, with one read and one write of each number."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from . import DIVIDE, DTYPES, MULTIPLY, NO_SCALE, REDUCTIONS, library

MOST_INPUTS = 64
LEAST_BYTES = 16 << 10
"""torch computes smaller results: its few operations take less time than a call through ctypes."""
STREAMED_BYTES = 8 << 20
"""Bytes of a result from which on it is written by non-temporal stores: caches would evict it before it is read."""
_VECTOR_BYTES = 32


def fits(out: torch.Tensor, inputs: Sequence[torch.Tensor], least: int = LEAST_BYTES) -> bool:
    """Whether the kernels are available and support these tensors: flat, without gaps, of one kind, in CPU memory."""
    return (
        out.nbytes >= least
        and out.dtype in DTYPES
        and out.is_cpu
        and len(inputs) <= MOST_INPUTS
        and library() is not None
        and out.is_contiguous()
        and all(tensor.is_contiguous() and tensor.dtype == out.dtype for tensor in inputs)
    )


def weigh(
    out: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[float],
    factor: float | None = None,
    divides: bool = False,
    also: torch.Tensor | None = None,
) -> None:
    """Set ``out`` to the sum of each input times its weight, or with a factor to the sum of the inputs, scaled once.

    Args:
        out: A tensor that :func:`fits`. It may be one of ``inputs``, and must not overlap one otherwise.
        inputs: The terms, in their order.
        weights: One for each input; not used with a factor.
        factor: Multiplies the sum of the inputs, or divides it if ``divides``.
        also: A second tensor for the result, like ``out``; no input.
    """
    kernels = library()
    assert kernels is not None
    count = len(inputs)
    scale = NO_SCALE if factor is None else DIVIDE if divides else MULTIPLY
    kernels.shoal_weigh(
        DTYPES[out.dtype],
        out.data_ptr(),
        None if also is None else also.data_ptr(),
        (ctypes.c_void_p * count)(*[tensor.data_ptr() for tensor in inputs]),
        count,
        (ctypes.c_double * count)(*weights),
        scale,
        factor or 0.0,
        out.numel(),
        _streams(out, also),
    )


def reduce(out: torch.Tensor, how: str, inputs: Sequence[torch.Tensor], parts: Sequence[int] = ()) -> None:
    """Set ``out`` to the reduction of ``inputs`` in their order; each part of them is reduced by itself first.

    Args:
        out: A tensor that :func:`fits`. It may be one of ``inputs``, and must not overlap one otherwise.
        how: One of :data:`REDUCTIONS`.
        inputs: The tensors to reduce, in their order.
        parts: The number of inputs of each part, from the first on; empty if all inputs are one part.
    """
    kernels = library()
    assert kernels is not None
    starts, at = 0, 0
    for length in parts[:-1]:
        at += length
        starts |= 1 << at
    count = len(inputs)
    pointers = (ctypes.c_void_p * count)(*[tensor.data_ptr() for tensor in inputs])
    kernels.shoal_reduce(
        DTYPES[out.dtype], out.data_ptr(), pointers, count, REDUCTIONS[how], starts, out.numel(), _streams(out)
    )


def copies(out: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether :func:`copy` is faster than torch's: for large tensors of one kind, without gaps, in CPU memory."""
    return (
        out.nbytes >= STREAMED_BYTES
        and out.dtype == tensor.dtype
        and out.is_cpu
        and tensor.is_cpu
        and library() is not None
        and out.is_contiguous()
        and tensor.is_contiguous()
    )


def copy(out: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor with non-temporal stores. Call it only if :func:`copies` returns True."""
    kernels = library()
    assert kernels is not None
    kernels.shoal_copy(out.data_ptr(), tensor.data_ptr(), out.nbytes)


def _streams(out: torch.Tensor, also: torch.Tensor | None = None) -> bool:
    if out.nbytes < STREAMED_BYTES or out.data_ptr() % out.element_size():
        return False
    return also is None or (also.data_ptr() - out.data_ptr()) % _VECTOR_BYTES == 0
