"""Weighted sums, with one read and one write of each number."""

from typing import Any

import triton
import triton.language as tl

from .arithmetic import divided, loaded, rounded
from .types import fp64, i64


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
