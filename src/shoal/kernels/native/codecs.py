"""The element-wise work of compressors, by the compiled kernels.

Each function returns whether it did the work. It returns False if the kernels are not loaded or do not support these
tensors; the caller then computes the same bits by torch. Tensors are flat, contiguous CPU tensors.
"""

from __future__ import annotations

import math

import torch

from . import library

_WIDE = {torch.float32: 0, torch.float64: 1}
_MASK, _53_BITS = (1 << 64) - 1, 1 << 53
_DEVIATIONS = 6
"""Standard deviations between the expected number of draws above a bound and the number that is needed."""


def _takes(*tensors: torch.Tensor) -> bool:
    return all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors)


def uniform(out: torch.Tensor, key: int) -> bool:
    """Set ``out`` to the hashes of ``key + place`` as numbers in [0, 1); float32 or float64."""
    kernels = library()
    if kernels is None or out.dtype not in _WIDE or not _takes(out):
        return False
    kernels.shoal_uniform(_WIDE[out.dtype], out.data_ptr(), key & _MASK, out.numel())
    return True


def quantise(
    codes: torch.Tensor, x: torch.Tensor, key: int, steps: torch.Tensor, chunk: int, place: int, most: float, bits: int
) -> bool:
    """Set ``codes`` (uint8) to multiples of the steps, rounded up or down by :func:`uniform` numbers of ``key``.

    Args:
        codes: One code for each element of ``x``.
        x: A part of a row from ``place`` on, finite; float32 or float64.
        key: The key of the first of these elements.
        steps: Powers of two, finite, one for each chunk of the row.
        chunk: The number of elements with one step.
        place: The position of the first of these elements in the row.
        most: The largest multiple.
        bits: The bits of a code, at most 8, in two's complement.
    """
    kernels = library()
    if kernels is None or x.dtype not in _WIDE or steps.dtype != x.dtype or not _takes(codes, x, steps):
        return False
    given = x.data_ptr(), x.numel(), key & _MASK, steps.data_ptr(), chunk, place, most, (1 << bits) - 1
    kernels.shoal_quantise(_WIDE[x.dtype], *given, codes.data_ptr())
    return True


def maxima(out: torch.Tensor, x: torch.Tensor, chunk: int) -> bool:
    """Set ``out`` to the largest magnitude of each chunk of ``x``, NaN if the chunk has a NaN; float32 or float64."""
    kernels = library()
    if kernels is None or x.dtype not in _WIDE or out.dtype != x.dtype or not _takes(out, x):
        return False
    kernels.shoal_maxima(_WIDE[x.dtype], x.data_ptr(), x.numel(), chunk, out.data_ptr())
    return True


def multiples(out: torch.Tensor, codes: torch.Tensor, steps: torch.Tensor, chunk: int, place: int) -> bool:
    """Set ``out`` to each code (int8) times the step of its chunk, as in :func:`quantise`."""
    kernels = library()
    if kernels is None or out.dtype not in _WIDE or steps.dtype != out.dtype or codes.dtype != torch.int8:
        return False
    if not _takes(out, codes, steps):
        return False
    given = codes.data_ptr(), codes.numel(), steps.data_ptr(), chunk, place
    kernels.shoal_multiples(_WIDE[out.dtype], *given, out.data_ptr())
    return True


def grid_codes(codes: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, bottom: torch.Tensor) -> bool:
    """Set ``codes`` (uint8) to ``round(x scale) - bottom``, from 0 to 255.

    Args:
        codes, x: ``[rows, width]``, each row without gaps, with an equal distance of rows in both; ``x`` is float32.
        scale, bottom: ``[rows, 1]``, finite.
    """
    kernels = library()
    if kernels is None or x.dtype != torch.float32 or not _rows_alike(x, codes) or not _takes(scale, bottom):
        return False
    if scale.dtype != x.dtype or bottom.dtype != x.dtype:
        return False
    ends = scale.data_ptr(), bottom.data_ptr()
    kernels.shoal_grid_codes(x.data_ptr(), *x.shape, x.stride(0), *ends, codes.data_ptr())
    return True


def grid_numbers(out: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bottom: torch.Tensor) -> bool:
    """Set ``out`` (float32, without gaps) to ``(code + bottom) / scale``, row by row as in :func:`grid_codes`."""
    kernels = library()
    if kernels is None or out.dtype != torch.float32 or not _takes(out, scale, bottom):
        return False
    if scale.dtype != out.dtype or bottom.dtype != out.dtype or not codes.is_cpu or codes.stride(1) != 1:
        return False
    ends = scale.data_ptr(), bottom.data_ptr()
    kernels.shoal_grid_numbers(codes.data_ptr(), *codes.shape, codes.stride(0), *ends, out.data_ptr())
    return True


def _rows_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.is_cpu and second.is_cpu and first.stride() == second.stride() and first.stride(1) == 1


def signs(packed: torch.Tensor, x: torch.Tensor) -> bool:
    """Set ``packed`` (uint8) to sign bits, eight to a byte from the lowest on: 1 if a number is below zero; float32."""
    kernels = library()
    if kernels is None or x.dtype != torch.float32 or not _takes(packed, x):
        return False
    kernels.shoal_signs(x.data_ptr(), x.numel(), packed.data_ptr())
    return True


def pack(packed: torch.Tensor, codes: torch.Tensor, bits: int) -> bool:
    """Pack codes of b = 1 to 7 bits (uint8): eight codes take b bytes, with the first code in the lowest bits."""
    kernels = library()
    if kernels is None or not 1 <= bits <= 7 or codes.dtype != torch.uint8 or not _takes(packed, codes):
        return False
    kernels.shoal_pack(bits, codes.data_ptr(), codes.numel(), packed.data_ptr())
    return True


def unpack(codes: torch.Tensor, packed: torch.Tensor, bits: int) -> bool:
    """The reverse of :func:`pack`."""
    kernels = library()
    if kernels is None or not 1 <= bits <= 7 or not _takes(codes, packed):
        return False
    kernels.shoal_unpack(bits, packed.data_ptr(), codes.numel(), codes.data_ptr())
    return True


def largest(x: torch.Tensor, count: int) -> torch.Tensor | None:
    """The positions of the ``count`` largest magnitudes, ascending, as int64 ``[count]``; None if not computed.

    Of equal magnitudes the first counts. A NaN counts as infinite. ``x`` is float32 and has fewer than 2^32 elements.
    """
    kernels = library()
    if kernels is None or x.dtype != torch.float32 or not _takes(x) or not 0 < count <= x.numel() < 1 << 32:
        return None
    room, places = torch.empty(x.numel() + 8, dtype=torch.int32), torch.empty(count, dtype=torch.int64)
    kernels.shoal_largest(x.data_ptr(), x.numel(), count, room.data_ptr(), places.data_ptr())
    return places


def drawn_largest(key: int, d: int, count: int, dtype: torch.dtype) -> torch.Tensor | None:
    """:func:`largest` of the ``d`` :func:`uniform` numbers of ``key``, which are not stored; None if not computed.

    Hashes are uniform, so about ``d q`` of them are in the upper share q of their range. The kernel chooses among those
    above a bound that more than ``count`` exceed, with a margin of six standard deviations. If fewer do, or if numbers
    at a bound are equal, the result is None.
    """
    kernels = library()
    if kernels is None or dtype not in _WIDE or not 0 < count <= d:
        return None
    margin = int(_DEVIATIONS * math.sqrt(count)) + 16
    low, high = (min(_53_BITS, _53_BITS * max(0, d - most) // d) for most in (count + margin, max(0, count - margin)))
    places = torch.empty(min(d, count + 2 * margin), dtype=torch.int64)
    room = torch.empty(3, min(d, 4 * margin), dtype=torch.int64)
    given = key & _MASK, d, count, low, high, places.data_ptr(), len(places), room.data_ptr(), room.shape[1]
    return None if kernels.shoal_drawn_largest(_WIDE[dtype], *given) else places[:count]


def write_places(data: torch.Tensor, places: torch.Tensor, d: int, low: int | None) -> bool:
    """Set ``data`` (uint8) to ``places`` (int64, ascending, below ``d``) in Elias and Fano's form.

    Args:
        low: The number of low bits of a place that are stored apart; None for a form with one bit for each of ``d``.
    """
    kernels = library()
    if kernels is None or not _takes(data, places):
        return False
    kernels.shoal_write_places(places.data_ptr(), len(places), d, low or 0, low is None, data.data_ptr())
    return True


def read_places(data: torch.Tensor, count: int, d: int, low: int | None) -> torch.Tensor | None:
    """The reverse of :func:`write_places`; None if not computed, or if the bytes are not ``count`` ascending places."""
    kernels = library()
    if kernels is None or not _takes(data):
        return None
    places = torch.empty(count, dtype=torch.int64)
    wrong = kernels.shoal_read_places(data.data_ptr(), count, d, low or 0, low is None, places.data_ptr())
    return None if wrong else places
