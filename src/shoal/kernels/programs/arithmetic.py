"""Operations that round once and keep subnormal numbers, also where Triton's own operations do not."""

from typing import Any

import triton
import triton.language as tl


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
