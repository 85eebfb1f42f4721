"""Messages: numbers become bytes, and bytes are added to numbers. An instance has so many groups of eight numbers."""

from typing import Any

import triton
import triton.language as tl

from .arithmetic import divided, loaded, rounded
from .types import fp64, i64

_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def greatest(
    bits: "Any",
    out: "Any",
    n: "i64",
    chunk: "i64",
    segments: "i64",
    SIGNLESS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """The greatest magnitude in each segment of each chunk.

    Numbers are whole ones here, of their bits without the sign: ordered alike, with NaN above all. ``out`` is
    ``[chunks, segments]``; an instance has ``ROWS`` chunks and a segment, of ``WIDTH`` numbers.
    """
    instance = tl.program_id(0).to(tl.int64)
    row = instance // segments * ROWS + tl.arange(0, ROWS)
    column = instance % segments * WIDTH + tl.arange(0, WIDTH)
    at = row[:, None] * chunk + column[None, :]
    inside = (column[None, :] < chunk) & (at < n)
    found = tl.max(tl.load(bits + at, mask=inside, other=0) & SIGNLESS, axis=1)
    tl.store(out + row * segments + instance % segments, found, mask=row * chunk < n)


@triton.jit
def quantise(
    x: "Any",
    steps: "Any",
    keys: "Any",
    out: "Any",
    n: "i64",
    chunk: "i64",
    most: "fp64",
    CHUNKED: tl.constexpr,
    BITS: tl.constexpr,
    BELOW_ONE: tl.constexpr,
    WIDE: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Multiples of a step, rounded up or down at random, in two's complement of ``BITS`` bits, 8 or fewer.

    Each result is rounded to the dtype of the numbers, as if computed in that.

    Args:
        keys: One int64, of the row.
        BELOW_ONE: The greatest number below 1 in the dtype of the numbers.
        WIDE: What is computed in: float64 or float32.
    """
    T: tl.constexpr = x.dtype.element_ty
    group, at = _groups(GROUPS)
    inside = at < n
    which = at // chunk if CHUNKED else at * 0
    step = loaded(steps, which, inside, WIDE)
    exact = rounded(divided(loaded(x, at, inside, WIDE), step), T)
    drawn = rounded(_between_0_and_1(tl.load(keys), at, BELOW_ONE, WIDE), T)
    exact, drawn = _widened(exact, WIDE), _widened(drawn, WIDE)
    # Where a number is not finite its step says so, and nothing else counts.
    exact = tl.where(exact == exact, exact, 0.0)
    cut = exact.to(tl.int32).to(WIDE)
    low = tl.where(cut > exact, cut - 1.0, cut)
    up = drawn < _widened(rounded(exact - low, T), WIDE)
    limit = tl.full([GROUPS, 8], most, WIDE)
    found = low + up.to(WIDE)
    found = tl.where(found > limit, limit, found)
    found = tl.where(found < -limit, -limit, found)
    codes = found.to(tl.int32) & ((1 << BITS) - 1)
    _store(out, tl.where(inside, codes, 0), group, at, n, BITS, GROUPS)


@triton.jit
def signs(x: "Any", out: "Any", n: "i64", WIDE: tl.constexpr, GROUPS: tl.constexpr) -> None:
    """A bit for each number, set where it is below zero."""
    group, at = _groups(GROUPS)
    inside = at < n
    below = loaded(x, at, inside, WIDE) < 0
    _store(out, tl.where(inside & below, 1, 0), group, at, n, 1, GROUPS)


@triton.jit
def pack(codes: "Any", out: "Any", n: "i64", BITS: tl.constexpr, GROUPS: tl.constexpr) -> None:
    """``BITS`` bits of each whole number: its whole bytes, the lowest of all first; then what is left of each."""
    group, at = _groups(GROUPS)
    inside = at < n
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int64)
    for plane in tl.static_range(BITS // 8):
        tl.store(out + plane * n + at, ((code >> (8 * plane)) & 255).to(tl.uint8), mask=inside)
    if BITS % 8:
        code = (code >> (BITS // 8 * 8)) & ((1 << (BITS % 8)) - 1)
        _store(out + BITS // 8 * n, tl.where(inside, code, 0), group, at, n, BITS % 8, GROUPS)


@triton.jit
def add_codes(
    total: "Any",
    codes: "Any",
    steps: "Any",
    n: "i64",
    chunk: "i64",
    weight: "fp64",
    CHUNKED: tl.constexpr,
    BITS: tl.constexpr,
    WIDE: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """``total`` becomes ``total + weight decoded``, one fused multiply-add.

    Of one bit, 0 is the step and 1 is minus the step; more are a multiple of it in two's complement.
    """
    T: tl.constexpr = total.dtype.element_ty
    group, at = _groups(GROUPS)
    inside = at < n
    which = at // chunk if CHUNKED else at * 0
    bit = at % 8 * BITS
    first = group[:, None] * BITS + bit // 8
    last = (n * BITS + 7) // 8
    byte = tl.load(codes + first, mask=inside, other=0).to(tl.int32)
    behind = tl.load(codes + (first + 1), mask=inside & (first + 1 < last) & (bit % 8 + BITS > 8), other=0).to(tl.int32)
    code = ((byte | (behind << 8)) >> (bit % 8).to(tl.int32)) & ((1 << BITS) - 1)
    if BITS == 1:
        multiple = 1 - 2 * code
    else:
        multiple = (code ^ (1 << (BITS - 1))) - (1 << (BITS - 1))
    decoded = rounded(multiple.to(WIDE) * loaded(steps, which, inside, WIDE), T)
    found = tl.fma(_widened(decoded, WIDE), tl.full([GROUPS, 8], weight, WIDE), loaded(total, at, inside, WIDE))
    tl.store(total + at, rounded(found, T), mask=inside)


@triton.jit
def _groups(GROUPS: tl.constexpr) -> "Any":
    """int64 ``[GROUPS]``, and the places of their numbers, ``[GROUPS, 8]``."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    return group, group[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _store(
    out: "Any", codes: "Any", group: "Any", at: "Any", n: "i64", BITS: tl.constexpr, GROUPS: tl.constexpr
) -> None:
    """Eight codes in ``BITS`` bytes, the first in the lowest bits; ``BITS`` is 8 or fewer."""
    if BITS == 8:
        tl.store(out + at, codes.to(tl.uint8), mask=at < n)
    else:
        lane = tl.arange(0, 8).to(tl.int64)[None, :]
        together = tl.sum(codes.to(tl.int64) << (lane * BITS), axis=1)
        byte = (together[:, None] >> (lane * 8)) & 255
        place = group[:, None] * BITS + lane
        tl.store(out + place, byte.to(tl.uint8), mask=(lane < BITS) & (place < (n * BITS + 7) // 8))


@triton.jit
def _widened(x: "Any", WIDE: tl.constexpr) -> "Any":
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        x = x.to(WIDE)
    return x


@triton.jit
def _between_0_and_1(key: "Any", at: "Any", BELOW_ONE: tl.constexpr, WIDE: tl.constexpr) -> "Any":
    """``shoal.compression.draws``: a hash of the key and the place, over 2^64, to 53 bits."""
    z = (key + at).to(tl.uint64, bitcast=True) + _STEP
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    z = (z ^ (z >> 31)) >> 11
    drawn = z.to(tl.int64, bitcast=True).to(WIDE) * 1.1102230246251565e-16
    return tl.where(drawn > BELOW_ONE, tl.zeros_like(drawn) + BELOW_ONE, drawn)
