"""The kernels for CPUs, compiled when Shoal is installed: one pass over memory instead of torch's one for each term.

:func:`library` loads them, once. They are called through ctypes, which releases the interpreter lock and needs no
headers of Python to compile: one build serves all versions of Python. :mod:`~shoal.kernels.native.build` compiles them.

They are refused if their results would differ from the bits of torch's operations. The two are compared at
loading, on a few numbers of each kind. Agents with and without the kernels must compute the same bits. Whether torch
fuses a multiply-add depends on its build and on the CPU, so this module compares results instead of assuming it.

Sums, reductions and copies are called for tensors that :func:`fits` or :func:`copies`. The functions for compressors
return whether they did the work: False or None if the kernels are not loaded or do not support these tensors. The
caller then computes the same bits by torch. Their tensors are flat, contiguous CPU tensors.
"""

from __future__ import annotations

import ctypes
import functools
import math
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from ... import config

LIBRARY = Path(__file__).with_name("_native.so")
_FUSES = ("AVX2", "AVX512")
"""torch's names of x86 CPU capabilities with which its operations, like the kernels, use fused multiply-adds."""


def why_not_native() -> str | None:
    """The reason why this process does not use the compiled kernels, for messages; None if it does."""
    return _loaded()[1]


def library() -> ctypes.CDLL | None:
    """The compiled kernels; None if torch's operations are used instead, with the same results."""
    return _loaded()[0]


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    if not config.read().native:
        return None, f"{config.NATIVE} is 0"
    if not LIBRARY.exists():
        return None, "they were not compiled when Shoal was installed, for which a C++ compiler is needed"
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() == "x86_64" and capability not in _FUSES:
        return None, f"this CPU or ATEN_CPU_CAPABILITY lacks AVX2 (torch uses {capability})"
    try:
        kernels = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return None, f"they cannot be loaded: {error}"
    declare(kernels)
    found = differing(kernels)
    if found is not None:
        return None, f"they and this torch ({torch.__version__}) round {found} differently"
    return kernels, None


_NUMBERS = 96 + 5
"""A length with full tiles and a remainder; for torch, with full vectors and a remainder."""


def differing(kernels: ctypes.CDLL) -> str | None:
    """The first operation whose bits differ from torch's, for messages; None if there is none."""
    chance = torch.Generator().manual_seed(5)
    drawn = [torch.randn(_NUMBERS, generator=chance, dtype=torch.float64, device="cpu") for _ in range(3)]
    for dtype, code in DTYPES.items():
        inputs = [tensor.to(dtype) for tensor in drawn]
        pointers = (ctypes.c_void_p * 3)(*[tensor.data_ptr() for tensor in inputs])
        out = torch.empty(_NUMBERS, dtype=dtype, device="cpu")
        for scale in (NO_SCALE, MULTIPLY, DIVIDE):
            weights = (ctypes.c_double * 3)(0.3, 0.1, 0.7)
            kernels.shoal_weigh(code, out.data_ptr(), None, pointers, 3, weights, scale, 3.0, _NUMBERS, 0)
            if not torch.equal(out, _weighed(inputs, list(weights), scale)):
                return f"weighted sums of {dtype}"
        for how, number in REDUCTIONS.items():
            kernels.shoal_reduce(code, out.data_ptr(), pointers, 3, number, 0, _NUMBERS, 0)
            if not torch.equal(out, _reduced(inputs, how)):
                return f"reductions ({how}) of {dtype}"
    return None


def _weighed(inputs: list[torch.Tensor], weights: list[float], scale: int) -> torch.Tensor:
    wide = torch.promote_types(inputs[0].dtype, torch.float32)
    first, *others = [tensor.to(wide) for tensor in inputs]
    if scale == NO_SCALE:
        total = first * weights[0]
        for tensor, weight in zip(others, weights[1:], strict=True):
            total.add_(tensor, alpha=weight)
    else:
        total = first + others[0] + others[1]
        total = total * 3.0 if scale == MULTIPLY else total / 3.0
    return total.to(inputs[0].dtype)


def _reduced(inputs: list[torch.Tensor], how: str) -> torch.Tensor:
    wide = torch.promote_types(inputs[0].dtype, torch.float32)
    steps = {"product": torch.mul, "min": torch.minimum, "max": torch.maximum}
    first, *others = [tensor.to(wide) for tensor in inputs]
    for tensor in others:
        first = steps.get(how, torch.add)(first, tensor)
    return (first / 3.0 if how == "average" else first).to(inputs[0].dtype)


DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
REDUCTIONS = {"sum": 0, "average": 1, "product": 2, "min": 3, "max": 4}
NO_SCALE, MULTIPLY, DIVIDE = range(3)


def declare(kernels: ctypes.CDLL) -> None:
    """Declare the types of each function, so that ctypes checks and converts its arguments."""
    pointer, integer, size, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_double
    key = ctypes.c_uint64
    signatures: dict[str, list[type]] = {
        "shoal_weigh": [integer, pointer, pointer, pointer, integer, pointer, integer, number, size, integer],
        "shoal_copy": [pointer, pointer, size],
        "shoal_reduce": [integer, pointer, pointer, integer, integer, key, size, integer],
        "shoal_multiply_words": [integer],
        "shoal_uniform": [integer, pointer, key, size],
        "shoal_quantise": [integer, pointer, size, key, pointer, size, size, number, ctypes.c_uint, pointer],
        "shoal_maxima": [integer, pointer, size, size, pointer],
        "shoal_multiples": [integer, pointer, size, pointer, size, size, pointer],
        "shoal_grid_codes": [pointer, size, size, size, pointer, pointer, pointer],
        "shoal_grid_numbers": [pointer, size, size, size, pointer, pointer, pointer],
        "shoal_signs": [pointer, size, pointer],
        "shoal_pack": [ctypes.c_uint, pointer, size, pointer],
        "shoal_unpack": [ctypes.c_uint, pointer, size, pointer],
        "shoal_largest": [pointer, size, size, pointer, pointer],
        "shoal_drawn_largest": [integer, key, size, size, key, key, pointer, size, pointer, size],
        "shoal_write_places": [pointer, size, size, ctypes.c_uint, integer, pointer],
        "shoal_read_places": [pointer, size, size, ctypes.c_uint, integer, pointer],
    }
    for name, arguments in signatures.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = arguments, integer


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
        and not out.is_neg()
        and all(tensor.is_contiguous() and tensor.dtype == out.dtype and not tensor.is_neg() for tensor in inputs)
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


def by_value(tensor: torch.Tensor) -> bool:
    """Whether it is a conjugate or negative view: its memory holds other numbers than its values."""
    return tensor.is_conj() or tensor.is_neg()


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
        and not (by_value(out) or by_value(tensor))
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


_WIDE = {torch.float32: 0, torch.float64: 1}
_MASK, _53_BITS = (1 << 64) - 1, 1 << 53
_DEVIATIONS = 6
"""Standard deviations between the expected number of draws above a bound and the number that is needed."""


def _takes(*tensors: torch.Tensor) -> bool:
    return all(tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() for tensor in tensors)


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
    plain = first.is_cpu and second.is_cpu and not first.is_neg()
    return plain and first.stride() == second.stride() and first.stride(1) == 1


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
    room = torch.empty(x.numel() + 8, dtype=torch.int32, device="cpu")
    places = torch.empty(count, dtype=torch.int64, device="cpu")
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
    places = torch.empty(min(d, count + 2 * margin), dtype=torch.int64, device="cpu")
    room = torch.empty(3, min(d, 4 * margin), dtype=torch.int64, device="cpu")
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
    places = torch.empty(count, dtype=torch.int64, device="cpu")
    wrong = kernels.shoal_read_places(data.data_ptr(), count, d, low or 0, low is None, places.data_ptr())
    return None if wrong else places
