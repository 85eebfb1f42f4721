"""What compressors' messages are made of, in one pass over the numbers: the bytes of :mod:`shoal.compression`.

Programs only: where there is no Triton, a compressor's own operations of torch make the same message on any device.
A message made here is decoded there, and the other way round, so they are equal byte for byte. Three parts have no
program, and are torch's on the device as well: how large Sign's magnitude is (a sum, whose order is torch's own there,
so that it may be the next power of two where a CPU's mean is within rounding of halfway), which numbers are the largest
(``torch.topk``), and the checks of a message that has come.
"""

from __future__ import annotations

import torch

from .choice import on_device_of
from .weighted_sum import FLOATS, check_weight, divide, wide_of

GROUPS = 128
"""Of eight numbers, which an instance of a program has."""
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def steps_of(x: torch.Tensor, levels: int, chunk: int | None = None) -> torch.Tensor:
    """QSGD's steps with the max norm: of each chunk the least power of two that is no smaller than ``norm / levels``.

    Args:
        x: ``[d]``, without gaps, with numbers.
        chunk: The whole vector if not given.

    Returns:
        ``[chunks]`` in the dtype of ``x``: 1 where all numbers are zero; infinite or NaN where one is.
    """
    from .programs.codecs import greatest

    _check(x)
    length = min(chunk or len(x), len(x))
    chunks = -(-len(x) // length)
    width = min(8 * GROUPS, 1 << (length - 1).bit_length())
    segments, rows = -(-length // width), 8 * GROUPS // width
    whole = _WHOLE[x.itemsize]
    found = torch.empty(chunks, segments, dtype=whole, device=x.device)
    with on_device_of(x):
        greatest[(-(-chunks // rows) * segments,)](
            x.view(whole),
            found,
            len(x),
            length,
            segments,
            SIGNLESS=torch.iinfo(whole).max,
            ROWS=rows,
            WIDTH=width,
        )
    norm = found.amax(-1).view(x.dtype).to(wide_of(x.dtype), copy=True)
    divide(norm, levels, norm)
    least = norm.to(x.dtype).to(norm.dtype)
    mantissa, _ = torch.frexp(least)
    below = torch.where((least > 0) & least.isfinite(), least / (2 * mantissa), least)
    step = torch.where(below < least, 2 * below, below)
    return torch.where(step == 0, 1.0, step).to(x.dtype)


def quantise(
    x: torch.Tensor, steps: torch.Tensor, key: torch.Tensor, out: torch.Tensor, levels: int, chunk: int | None = None
) -> None:
    """QSGD's codes of 8 bits or fewer, with the random numbers of :class:`shoal.compression.draws.HashStream`.

    Args:
        x: ``[d]``, without gaps.
        steps: :func:`steps_of` of it.
        key: int64 ``[1]``, of the row, on the device of ``x``.
        out: uint8, the message's bytes behind the steps.
        levels: At most 127.

    Raises:
        ValueError: ``levels`` is larger, or ``out`` has another length.
    """
    from .programs import language_dtype
    from .programs.codecs import quantise as program

    _check(x)
    bits = _bits_of(levels)
    _check_out(out, -(-len(x) * bits // 8))
    if not len(x):
        return
    info = torch.finfo(x.dtype)
    with on_device_of(x):
        program[_grid(x)](
            x,
            steps,
            key,
            out,
            len(x),
            chunk or len(x),
            float(levels),
            CHUNKED=len(steps) > 1,
            BITS=bits,
            BELOW_ONE=1 - info.eps / 2,
            WIDE=language_dtype(wide_of(x.dtype)),
            GROUPS=GROUPS,
            enable_fp_fusion=False,
        )


def signs(x: torch.Tensor, out: torch.Tensor) -> None:
    """Sign's bits: set where a number of ``x`` ``[d]`` is below zero; ``out`` is the message behind the magnitude."""
    from .programs import language_dtype
    from .programs.codecs import signs as program

    _check(x)
    _check_out(out, -(-len(x) // 8))
    if len(x):
        with on_device_of(x):
            program[_grid(x)](x, out, len(x), WIDE=language_dtype(wide_of(x.dtype)), GROUPS=GROUPS)


def pack(codes: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Codes of a few bits each without a gap, as :class:`shoal.compression.bits.Packed` has them: of positions, of any.

    Args:
        codes: Whole numbers ``[d]``, without gaps, not negative.
        bits: 1 to 63.
        out: uint8 ``[ceil(d bits / 8)]``.
    """
    from .programs.codecs import pack as program

    _check_out(out, -(-len(codes) * bits // 8))
    if codes.dim() != 1 or not codes.is_contiguous() or not 1 <= bits <= 63:
        raise ValueError(f"{bits} bits of codes of shape {list(codes.shape)}: pass a flat tensor, and 1 to 63 bits")
    if len(codes):
        with on_device_of(codes):
            program[_grid(codes)](codes, out, len(codes), BITS=bits, GROUPS=GROUPS)


def add_quantised(
    total: torch.Tensor,
    codes: torch.Tensor,
    steps: torch.Tensor,
    weight: float,
    levels: int,
    chunk: int | None = None,
) -> None:
    """``total`` becomes ``total + weight decoded``, of QSGD's codes of 8 bits or fewer, as ``add_decoded`` has it.

    Args:
        total: ``[d]``, without gaps, in the dtype of the numbers that were sent.
        codes: uint8, the message's bytes behind the steps; checked by who calls.
        steps: The message's, ``[chunks]``.

    Raises:
        ValueError: ``levels`` is larger than 127, or ``codes`` has another length.
    """
    _add(total, codes, steps, weight, _bits_of(levels), chunk)


def add_signs(total: torch.Tensor, codes: torch.Tensor, magnitude: torch.Tensor, weight: float) -> None:
    """``total`` becomes ``total + weight decoded``, of Sign's bits; ``magnitude`` is ``[1]``, in the dtype of both."""
    _add(total, codes, magnitude, weight, 1, None)


def _add(
    total: torch.Tensor, codes: torch.Tensor, steps: torch.Tensor, weight: float, bits: int, chunk: int | None
) -> None:
    from .programs import language_dtype
    from .programs.codecs import add_codes as program

    _check(total)
    _check_out(codes, -(-len(total) * bits // 8))
    if not len(total):
        return
    check_weight(weight, wide_of(total.dtype))
    with on_device_of(total):
        program[_grid(total)](
            total,
            codes,
            steps,
            len(total),
            chunk or len(total),
            float(weight),
            CHUNKED=len(steps) > 1,
            BITS=bits,
            WIDE=language_dtype(wide_of(total.dtype)),
            GROUPS=GROUPS,
            enable_fp_fusion=False,
        )


def _grid(x: torch.Tensor) -> tuple[int]:
    return (-(-len(x) // (8 * GROUPS)),)


def _bits_of(levels: int) -> int:
    if not 1 <= levels <= 127:
        raise ValueError(f"levels={levels}: codes of 8 bits or fewer are of 1 to 127 levels")
    return (2 * levels).bit_length()


def _check(x: torch.Tensor) -> None:
    if x.dim() != 1 or not x.is_contiguous() or x.dtype not in FLOATS:
        raise ValueError(f"numbers of shape {list(x.shape)} in {x.dtype}: pass a flat tensor of floating point")


def _check_out(out: torch.Tensor, nbytes: int) -> None:
    if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous() or len(out) != nbytes:
        raise ValueError(f"bytes of shape {list(out.shape)} in {out.dtype}: pass a flat tensor of {nbytes} of uint8")
