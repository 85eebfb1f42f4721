"""The programs in Triton: weighted sums and reductions, with one read and one write of each number.

They import triton, so only functions that run a program import this module. It does not postpone the evaluation of
annotations: Triton reads the types of a program's parameters as text.

The instruction of each operation on an NVIDIA device was read in the PTX that Triton 3.9 writes for sm_90, and
``tests/kernels/test_ptx.py`` checks it: ``tl.fma`` is ``fma.rn``, ``+`` and ``*`` are ``add.rn`` and ``mul.rn`` (not
fused, because every start passes ``enable_fp_fusion=False``), ``tl.div_rn`` is ``div.rn`` (``/`` of float32 would be
``div.full``, which is not rounded), a conversion is ``cvt.rn``. None has ``.ftz``, so subnormal numbers are kept.
``tl.floor`` has ``.ftz`` and treats small negative numbers as zeros, so no program here uses it.
"""

from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

fp64: TypeAlias = Any
"""A float with all its bits; without this type Triton passes a float in 32 bits. Its value is never compiled in."""
i64: TypeAlias = Any

_DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def language_dtype(dtype: torch.dtype) -> tl.dtype:
    """Triton's type for a dtype of torch."""
    return _DTYPES[dtype]


@triton.jit
def divided(x: "Any", y: "Any") -> "Any":
    """The quotient ``x / y`` in float32 or float64."""
    if x.dtype == tl.float64:
        x = x / y
    else:
        x = tl.div_rn(x, y)
    return x


@triton.jit
def loaded(pointer: "Any", at: "Any", inside: "Any", ACC: tl.constexpr) -> "Any":
    """Numbers, converted to a dtype that represents all of them exactly."""
    number = tl.load(pointer + at, mask=inside, other=0.0)
    if number.dtype == tl.bfloat16:
        bits = number.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        number = bits.to(tl.float32, bitcast=True)
    return number.to(ACC)


@triton.jit
def rounded(x: "Any", dtype: tl.constexpr) -> "Any":
    """Numbers in ``dtype``, rounded to the nearest, ties to even.

    bfloat16 is computed with integers: Triton's interpreter, in which these programs are tested, truncates where a
    device rounds.
    """
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        upper = tl.where(x != x, 0x7FC0, upper)
        x = upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        x = x.to(dtype)
    return x


@triton.jit
def weighted_sum(
    out: "Any",
    own: "Any",
    x1: "Any",
    x2: "Any",
    x3: "Any",
    x4: "Any",
    x5: "Any",
    x6: "Any",
    x7: "Any",
    x8: "Any",
    x9: "Any",
    x10: "Any",
    x11: "Any",
    x12: "Any",
    x13: "Any",
    x14: "Any",
    x15: "Any",
    x16: "Any",
    n: "i64",
    factor: "fp64",
    w0: "fp64",
    w1: "fp64",
    w2: "fp64",
    w3: "fp64",
    w4: "fp64",
    w5: "fp64",
    w6: "fp64",
    w7: "fp64",
    w8: "fp64",
    w9: "fp64",
    w10: "fp64",
    w11: "fp64",
    w12: "fp64",
    w13: "fp64",
    w14: "fp64",
    w15: "fp64",
    w16: "fp64",
    TERMS: tl.constexpr,
    GOES_ON: tl.constexpr,
    TOGETHER: tl.constexpr,
    SCALE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One pass: ``out = w0 own + w1 x1 + ...``, of the first ``TERMS`` terms; later pointers are not read.

    Args:
        GOES_ON: Whether ``own`` is the sum of the previous pass, which has no weight.
        TOGETHER: Whether terms have no weights.
        SCALE: ``"divide"`` or ``"multiply"`` the sum by ``factor``, or ``"no"``.
        ACC: The dtype of the computation, and of the sum between passes.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = loaded(own, at, inside, ACC)
    if not TOGETHER and not GOES_ON:
        total = total * tl.full([BLOCK], w0, ACC)
    if TERMS > 0:
        total = _plus(total, x1, w1, at, inside, TOGETHER, ACC, BLOCK)
    if TERMS > 1:
        total = _plus(total, x2, w2, at, inside, TOGETHER, ACC, BLOCK)
    if TERMS > 2:
        total = _plus(total, x3, w3, at, inside, TOGETHER, ACC, BLOCK)
    if TERMS > 3:
        total = _plus(total, x4, w4, at, inside, TOGETHER, ACC, BLOCK)
    if TERMS > 4:
        total = _plus(total, x5, w5, at, inside, TOGETHER, ACC, BLOCK)
    if TERMS > 5:
        total = _plus(total, x6, w6, at, inside, TOGETHER, ACC, BLOCK)
    if TERMS > 6:
        total = _plus(total, x7, w7, at, inside, TOGETHER, ACC, BLOCK)
    if TERMS > 7:
        total = _plus(total, x8, w8, at, inside, TOGETHER, ACC, BLOCK)
    if TERMS > 8:
        total = _plus(total, x9, w9, at, inside, TOGETHER, ACC, BLOCK)
    if TERMS > 9:
        total = _plus(total, x10, w10, at, inside, TOGETHER, ACC, BLOCK)
    if TERMS > 10:
        total = _plus(total, x11, w11, at, inside, TOGETHER, ACC, BLOCK)
    if TERMS > 11:
        total = _plus(total, x12, w12, at, inside, TOGETHER, ACC, BLOCK)
    if TERMS > 12:
        total = _plus(total, x13, w13, at, inside, TOGETHER, ACC, BLOCK)
    if TERMS > 13:
        total = _plus(total, x14, w14, at, inside, TOGETHER, ACC, BLOCK)
    if TERMS > 14:
        total = _plus(total, x15, w15, at, inside, TOGETHER, ACC, BLOCK)
    if TERMS > 15:
        total = _plus(total, x16, w16, at, inside, TOGETHER, ACC, BLOCK)
    if SCALE == "divide":
        total = divided(total, tl.full([BLOCK], factor, ACC))
    elif SCALE == "multiply":
        total = total * tl.full([BLOCK], factor, ACC)
    tl.store(out + at, rounded(total, out.dtype.element_ty), mask=inside)


@triton.jit
def _plus(
    total: "Any",
    x: "Any",
    weight: "fp64",
    at: "Any",
    inside: "Any",
    TOGETHER: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
) -> "Any":
    number = loaded(x, at, inside, ACC)
    if TOGETHER:
        total = total + number
    else:
        total = tl.fma(number, tl.full([BLOCK], weight, ACC), total)
    return total


@triton.jit
def reduction(
    out: "Any",
    x0: "Any",
    x1: "Any",
    x2: "Any",
    x3: "Any",
    x4: "Any",
    x5: "Any",
    x6: "Any",
    x7: "Any",
    x8: "Any",
    x9: "Any",
    x10: "Any",
    x11: "Any",
    x12: "Any",
    x13: "Any",
    x14: "Any",
    x15: "Any",
    n: "i64",
    count: "fp64",
    INPUTS: tl.constexpr,
    STARTS: tl.constexpr,
    HOW: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Set ``out`` to the reduction of the first ``INPUTS`` of ``x0`` to ``x15``, in that order, part by part.

    Args:
        count: The divisor of an average.
        STARTS: A bit mask of the inputs that begin a part, without the first input.
        HOW: ``"sum"``, ``"average"``, ``"product"``, ``"min"`` or ``"max"``.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    part = loaded(x0, at, inside, ACC)
    total = part
    if INPUTS > 1:
        total, part = _next(total, part, x1, at, inside, 1, STARTS, HOW, ACC)
    if INPUTS > 2:
        total, part = _next(total, part, x2, at, inside, 2, STARTS, HOW, ACC)
    if INPUTS > 3:
        total, part = _next(total, part, x3, at, inside, 3, STARTS, HOW, ACC)
    if INPUTS > 4:
        total, part = _next(total, part, x4, at, inside, 4, STARTS, HOW, ACC)
    if INPUTS > 5:
        total, part = _next(total, part, x5, at, inside, 5, STARTS, HOW, ACC)
    if INPUTS > 6:
        total, part = _next(total, part, x6, at, inside, 6, STARTS, HOW, ACC)
    if INPUTS > 7:
        total, part = _next(total, part, x7, at, inside, 7, STARTS, HOW, ACC)
    if INPUTS > 8:
        total, part = _next(total, part, x8, at, inside, 8, STARTS, HOW, ACC)
    if INPUTS > 9:
        total, part = _next(total, part, x9, at, inside, 9, STARTS, HOW, ACC)
    if INPUTS > 10:
        total, part = _next(total, part, x10, at, inside, 10, STARTS, HOW, ACC)
    if INPUTS > 11:
        total, part = _next(total, part, x11, at, inside, 11, STARTS, HOW, ACC)
    if INPUTS > 12:
        total, part = _next(total, part, x12, at, inside, 12, STARTS, HOW, ACC)
    if INPUTS > 13:
        total, part = _next(total, part, x13, at, inside, 13, STARTS, HOW, ACC)
    if INPUTS > 14:
        total, part = _next(total, part, x14, at, inside, 14, STARTS, HOW, ACC)
    if INPUTS > 15:
        total, part = _next(total, part, x15, at, inside, 15, STARTS, HOW, ACC)
    if STARTS:
        part = _step(total, part, HOW)
    if HOW == "average":
        part = divided(part, tl.full([BLOCK], count, ACC))
    tl.store(out + at, rounded(part, out.dtype.element_ty), mask=inside)


@triton.jit
def _next(
    total: "Any",
    part: "Any",
    x: "Any",
    at: "Any",
    inside: "Any",
    PLACE: tl.constexpr,
    STARTS: tl.constexpr,
    HOW: tl.constexpr,
    ACC: tl.constexpr,
) -> "Any":
    """The reduction of the earlier parts, and that of the current part so far."""
    number = loaded(x, at, inside, ACC)
    if (STARTS >> PLACE) & 1:
        if STARTS & ((1 << PLACE) - 1):
            total = _step(total, part, HOW)
        else:
            total = part
        part = number
    else:
        part = _step(part, number, HOW)
    return total, part


@triton.jit
def _step(first: "Any", second: "Any", HOW: tl.constexpr) -> "Any":
    if HOW == "product":
        first = first * second
    elif HOW == "min":
        first = tl.where((first < second) | (first != first), first, second)
    elif HOW == "max":
        first = tl.where((first > second) | (first != first), first, second)
    else:
        first = first + second
    return first
