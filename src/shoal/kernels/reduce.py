"""Reductions over all agents in rank order: of one block by torch, and of whole tensors by any implementation.

16-bit numbers are reduced in float32 and rounded once. Minimum and maximum are NaN if one of the numbers is NaN. The
sign of a zero result is undefined if zeros of both signs occur, as in torch. Otherwise all implementations give the
same bits, as far as :mod:`~shoal.kernels.weighted_sum` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import Implementation, implementation_of, on_device_of
from .native import sums as native
from .weighted_sum import BLOCK, FLOATS, HALF, check_alike, divide, overlap, real, wide_of

INPUTS_OF_A_PROGRAM = 16
Step = Callable[..., object]
"""Reduces two tensors into ``out``."""


def _multiply(first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> None:
    """Multiply, with real operations for complex numbers.

    torch rounds a complex product differently in the vectorized part and in the tail of a tensor. Real operations give
    the same bits however a tensor is split.
    """
    if not out.is_complex():
        torch.mul(first, second, out=out)
        return
    a, b, c = torch.view_as_real(first), torch.view_as_real(second), torch.view_as_real(out)
    real_part = a[..., 0] * b[..., 0] - a[..., 1] * b[..., 1]
    c[..., 1] = a[..., 0] * b[..., 1] + a[..., 1] * b[..., 0]
    c[..., 0] = real_part


_REDUCE: dict[str, Step] = {
    "sum": torch.add,
    "average": torch.add,
    "product": _multiply,
    "min": torch.minimum,
    "max": torch.maximum,
}
REDUCTIONS = tuple(_REDUCE)


def combine(
    how: str,
    position: int,
    parts: Sequence[Sequence[int]],
    out: torch.Tensor,
    own: torch.Tensor,
    blocks: Sequence[torch.Tensor],
) -> None:
    """Reduce one block of all agents on the CPU, in rank order. ``out`` is none of the inputs.

    The compiled kernels do it in one pass, if they are available.
    """
    inputs = [*blocks[:position], own, *blocks[position:]]
    if native.fits(out, inputs):
        _combine_native(how, parts, out, inputs)
    else:
        _combine_torch(how, parts, out, inputs)


def _combine_native(
    how: str, parts: Sequence[Sequence[int]], out: torch.Tensor, inputs: Sequence[torch.Tensor]
) -> None:
    given = [inputs[place] for part in parts for place in part] or [*inputs]
    native.reduce(out, how, given, [len(part) for part in parts])


def _combine_torch(how: str, parts: Sequence[Sequence[int]], out: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
    step = _REDUCE[how]
    wide = out.dtype in HALF
    total = torch.empty_like(out, dtype=torch.float32) if wide else out
    first, *others = [[inputs[place] for place in part] for part in parts] or [[*inputs]]
    _fold(first, step, total)
    for part in others:
        reduction = torch.empty_like(total)
        _fold(part, step, reduction)
        step(total, reduction, out=total)
    if how == "average":
        if total.is_floating_point():
            divide(total, len(inputs), total)
        else:
            total.div_(len(inputs))
    if wide:
        out.copy_(total)


def _fold(terms: Sequence[torch.Tensor], step: Step, out: torch.Tensor) -> None:
    """Set ``out`` to the reduction of ``terms``, in their order. Its dtype is theirs or wider."""
    wide = terms[0].dtype != out.dtype
    if wide or len(terms) == 1:
        out.copy_(terms[0])
        rest = terms[1:]
    else:
        step(terms[0], terms[1], out=out)
        rest = terms[2:]
    for term in rest:
        step(out, term.float() if wide else term, out=out)


def reduce(
    out: torch.Tensor,
    how: str,
    inputs: Sequence[torch.Tensor],
    *,
    parts: Sequence[Sequence[int]] = (),
    implementation: Implementation | None = None,
) -> None:
    """Set ``out`` to the sum, average, product, minimum or maximum of ``inputs``, in their order.

    torch computes integers, complex products and more than 16 inputs, for any ``implementation``.

    Args:
        out: Flat, without gaps; it may be one of ``inputs``.
        inputs: Tensors like ``out``, one of each agent, in rank order.
        parts: The positions in that order that form a part: each part is reduced by itself first.
        implementation: :func:`~shoal.kernels.implementation_of` of ``out`` if not given.

    Raises:
        ValueError: The tensors differ in kind, or have gaps; or there is no such reduction.
    """
    if how not in REDUCTIONS:
        raise ValueError(f"reduction {how!r}: pass one of {', '.join(REDUCTIONS)}")
    check_alike(out, inputs)
    if how in ("sum", "average"):
        out, inputs = real(out), [real(tensor) for tensor in inputs]
    if not out.numel():
        return
    fits = out.dtype in FLOATS and len(inputs) <= INPUTS_OF_A_PROGRAM
    spoils = any(overlap(out, tensor) for tensor in inputs)
    implementation = implementation or implementation_of(out)
    if fits and implementation == "triton":
        spoils = any(overlap(out, tensor) and tensor.data_ptr() != out.data_ptr() for tensor in inputs)
        target = torch.empty_like(out) if spoils else out
        _by_program(target, how, inputs, parts or [range(len(inputs))])
    else:
        target = torch.empty_like(out) if spoils else out
        if implementation == "native" and native.fits(target, inputs, least=0):
            _combine_native(how, parts, target, inputs)
        else:
            _combine_torch(how, parts, target, inputs)
    if spoils:
        out.copy_(target)


def _by_program(out: torch.Tensor, how: str, inputs: Sequence[torch.Tensor], parts: Sequence[Sequence[int]]) -> None:
    from .programs import language_dtype
    from .programs import reduction as program

    given = [inputs[place] for part in parts for place in part]
    starts, at = 0, 0
    for part in parts[:-1]:
        at += len(part)
        starts |= 1 << at
    with on_device_of(out):
        program[(-(-len(out) // BLOCK),)](
            out,
            *given,
            *[given[0]] * (INPUTS_OF_A_PROGRAM - len(given)),
            len(out),
            float(len(inputs)),
            INPUTS=len(given),
            STARTS=starts,
            HOW=how,
            ACC=language_dtype(wide_of(out.dtype)),
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
