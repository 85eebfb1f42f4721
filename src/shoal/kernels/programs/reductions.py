"""Reductions over all agents, with one read and one write of each number."""

from typing import Any

import triton
import triton.language as tl

from .arithmetic import divided, loaded, rounded
from .types import fp64, i64


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
def _step(one: "Any", other: "Any", HOW: tl.constexpr) -> "Any":
    if HOW == "product":
        one = one * other
    elif HOW == "min":
        one = tl.where((one < other) | (one != one), one, other)
    elif HOW == "max":
        one = tl.where((one > other) | (one != one), one, other)
    else:
        one = one + other
    return one
