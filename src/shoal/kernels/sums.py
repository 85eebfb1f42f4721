"""Weighted sums and reductions in one fixed order: of one block by torch, of whole tensors by any implementation.

The order of a weighted sum is: the agent's own term, then the other terms as given. Every weighted term is one fused
multiply-add, in float32 for 16-bit tensors, whose sum is rounded once at the end. Complex numbers are pairs of real
ones. Equal weights are not multiplied with each term: the terms are summed, and the sum is scaled once
(:func:`common_factor`).

All implementations give the same bits, except inside a NaN: a CPU propagates the bits of one operand, an NVIDIA device
has its own. A program has a limited number of terms. More terms take several passes, between which the partial sum is
stored, in float32 for 16-bit tensors.

Reductions are over all agents in rank order. 16-bit numbers are reduced in float32 and rounded once. Minimum and
maximum are NaN if one of the numbers is NaN. The sign of a zero result is undefined if zeros of both signs occur, as in
torch.

:func:`copy`, :func:`scale` and :func:`add_scaled` have the bits of the torch operation that they name, in one pass over
memory. Results that are too large for the caches are written around them by the compiled kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from . import Implementation, implementation_of, native, on_device_of

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64, *HALF)
TERMS_OF_A_PASS = 16
BLOCK = 1024
"""The number of elements that one instance of a program sums."""
_MOST_PARTS = 1 << 24
"""The largest divisor: float32 may not represent larger integers."""


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the computation: float32 for 16-bit tensors, otherwise the tensor's own."""
    return torch.float32 if dtype in HALF else dtype


def real(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor with its complex numbers as pairs of real ones, summed separately because weights are real."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


class Factor(NamedTuple):
    """The common factor of a sum, and whether it divides."""

    number: float
    divides: bool


def common_factor(weights: Sequence[float]) -> Factor | None:
    """The factor of a sum of terms whose weights are all equal; None if each term is multiplied by its weight.

    If the weight is one over an integer, the sum is divided by that integer. So the mean of numbers whose sum is exact
    is the quotient, rounded once, and an integer if the quotient is. The mean of n equal values differs from the value
    by the rounding of their sum: by 0 for two values, by at most one unit in the last place for three, by at most n / 2
    units in general. It is infinite if the sum is. Weights that are powers of two are multiplied with the terms. They
    round nothing, so that gives the same bits (except for subnormal numbers), and the mean of finite numbers stays
    finite.
    """
    weight = weights[0]
    for other in weights:
        if other != weight:
            return None
    if abs(math.frexp(weight)[0]) == 0.5 or not weight:
        return None
    whole = round(1 / weight) if abs(weight) * _MOST_PARTS >= 1 else 0
    return Factor(float(whole), True) if whole and 1 / whole == weight else Factor(weight, False)


def weigh(
    weights: Sequence[float],
    factor: Factor | None,
    out: torch.Tensor,
    own: torch.Tensor,
    blocks: Sequence[torch.Tensor],
    also: torch.Tensor | None = None,
) -> None:
    """The sum of one block on the CPU: of each term times its weight, or of all terms, then times the factor.

    ``out`` may be ``own``, and none of ``blocks``. ``also`` receives the same result. The compiled kernels do it in one
    pass, if they are available.
    """
    inputs = [own, *blocks]
    if native.fits(out, inputs):
        _weigh_native(weights, factor, out, inputs, also)
        return
    _weigh_torch(weights, factor, out, own, blocks)
    if also is not None:
        also.copy_(out)


def _weigh_native(
    weights: Sequence[float],
    factor: Factor | None,
    out: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    also: torch.Tensor | None = None,
) -> None:
    if factor is not None:
        native.weigh(out, inputs, weights, factor.number, factor.divides, also)
        return
    for weight in weights[1:]:
        check_weight(weight, wide_of(out.dtype))
    native.weigh(out, inputs, weights, also=also)


def _weigh_torch(
    weights: Sequence[float],
    factor: Factor | None,
    out: torch.Tensor,
    own: torch.Tensor,
    blocks: Sequence[torch.Tensor],
) -> None:
    wide = out.dtype in HALF
    total = own.float() if wide else out
    if factor is None:
        torch.mul(total if wide else own, weights[0], out=total)
        for block, weight in zip(blocks, weights[1:], strict=True):
            total.add_(block.float() if wide else block, alpha=weight)
    else:
        first = total if wide else own
        for block in blocks:
            torch.add(first, block.float() if wide else block, out=total)
            first = total
        if factor.divides:
            divide(first, factor.number, total)
        else:
            torch.mul(first, factor.number, out=total)
    if wide:
        out.copy_(total)


def divide(x: torch.Tensor, number: float, out: torch.Tensor) -> None:
    """Divide with one rounding on all devices: torch on a device multiplies by the reciprocal of a plain number."""
    torch.div(x, number if x.is_cpu else x.new_full((), number), out=out)


def weighted_sum(
    out: torch.Tensor,
    own: torch.Tensor,
    own_weight: float,
    terms: Sequence[torch.Tensor | None],
    weights: Sequence[float],
    *,
    implementation: Implementation | None = None,
) -> None:
    """``out = own_weight * own + sum of weight * term``, with one read and one write of each number.

    None is a term of zeros without memory: it is not added, and its weight counts like the others.

    Args:
        out: Flat, without gaps; it may be ``own`` or a term.
        own, terms: Tensors of the dtype, length and device of ``out``, with any alignment.
        weights: One for each term. float32 sums round them to float32.
        implementation: :func:`~shoal.kernels.implementation_of` of ``out`` if not given.

    Raises:
        ValueError: The tensors differ in kind, have gaps, are conjugate or negative views, or not of floating point.
        RuntimeError: A term's weight is finite, and too large for the dtype of the sum (torch's error).
    """
    factor = common_factor([own_weight, *weights])
    here = [(term, float(weight)) for term, weight in zip(terms, weights, strict=True) if term is not None]
    check_alike(out, [own, *(term for term, _ in here)])
    target, mine, theirs = real(out), real(own), [real(term) for term, _ in here]
    if target.dtype not in FLOATS:
        raise ValueError(f"a weighted sum of {out.dtype}: pass floating point or complex numbers")
    if not target.numel():
        return
    kept = [float(own_weight), *(weight for _, weight in here)]
    implementation = implementation or implementation_of(out)
    if implementation == "triton":
        _in_passes(target, mine, theirs, kept, factor)
    elif any(overlap(target, term) for term in theirs) or (
        overlap(target, mine) and target.data_ptr() != mine.data_ptr()
    ):
        total = torch.empty_like(target)
        _weigh_by(implementation, kept, factor, total, mine, theirs)
        target.copy_(total)
    else:
        _weigh_by(implementation, kept, factor, target, mine, theirs)


def _weigh_by(
    implementation: Implementation,
    weights: Sequence[float],
    factor: Factor | None,
    out: torch.Tensor,
    own: torch.Tensor,
    terms: Sequence[torch.Tensor],
) -> None:
    if implementation == "native" and native.fits(out, [own, *terms], least=0):
        _weigh_native(weights, factor, out, [own, *terms])
    else:
        _weigh_torch(weights, factor, out, own, terms)


def check_alike(out: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if these are not flat tensors, with their values in memory, that are like ``out``."""
    for number, tensor in enumerate((out, *others)):
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"tensor {number} has shape {list(tensor.shape)} and strides {tensor.stride()}: pass flat ones"
            )
        if native.by_value(tensor):
            raise ValueError(
                f"tensor {number} is a conjugate or negative view, whose memory holds other numbers than its values: "
                "pass its .resolve_conj().resolve_neg()"
            )
        if (tensor.dtype, tensor.device, len(tensor)) != (out.dtype, out.device, len(out)):
            raise ValueError(
                f"tensor {number} has {len(tensor)} numbers in {tensor.dtype} on {tensor.device}, and the result "
                f"{len(out)} in {out.dtype} on {out.device}: pass tensors that are alike"
            )


def overlap(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the tensors share memory."""
    first, second = tensor.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + tensor.nbytes


def _in_passes(
    out: torch.Tensor,
    own: torch.Tensor,
    terms: Sequence[torch.Tensor],
    weights: Sequence[float],
    factor: Factor | None,
) -> None:
    wide = wide_of(out.dtype)
    if factor is None:
        for weight in weights[1:]:
            check_weight(weight, wide)
    groups = [range(at, min(at + TERMS_OF_A_PASS, len(terms))) for at in range(0, len(terms), TERMS_OF_A_PASS)]
    groups = groups or [range(0)]
    # An instance reads its elements before it writes to them. A shifted overlap or a later pass would read overwritten
    # elements.
    spoils = any(overlap(out, tensor) and tensor.data_ptr() != out.data_ptr() for tensor in (own, *terms))
    spoils |= any(overlap(out, term) for term in terms[TERMS_OF_A_PASS:])
    total = torch.empty_like(out, dtype=wide) if spoils or (wide != out.dtype and len(groups) > 1) else out
    for number, group in enumerate(groups):
        last = number == len(groups) - 1
        target = out if last and not spoils else total
        given = [terms[place] for place in group], [weights[0], *(weights[place + 1] for place in group)]
        _pass(target, total if number else own, *given, factor, bool(number), last)
    if spoils:
        out.copy_(total)


def check_weight(weight: float, dtype: torch.dtype) -> None:
    """Raise RuntimeError, as torch does, if a finite weight overflows ``dtype``."""
    if math.isfinite(weight) and abs(weight) > torch.finfo(dtype).max:
        raise RuntimeError(f"weight {weight} cannot be converted to {dtype} without overflow")


def _pass(
    out: torch.Tensor,
    own: torch.Tensor,
    terms: Sequence[torch.Tensor],
    weights: Sequence[float],
    factor: Factor | None,
    goes_on: bool,
    last: bool,
) -> None:
    from .programs import language_dtype
    from .programs import weighted_sum as program

    more = TERMS_OF_A_PASS - len(terms)
    scale = "no" if factor is None or not last else "divide" if factor.divides else "multiply"
    with on_device_of(out):
        program[(-(-len(out) // BLOCK),)](
            out,
            own,
            *terms,
            *[own] * more,
            len(out),
            factor.number if factor else 1.0,
            *weights,
            *[0.0] * more,
            TERMS=len(terms),
            GOES_ON=goes_on,
            TOGETHER=factor is not None,
            SCALE=scale,
            ACC=language_dtype(wide_of(out.dtype)),
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )


def copy(out: torch.Tensor, tensor: torch.Tensor) -> None:
    """``out.copy_(tensor)``, for tensors of one shape."""
    if native.copies(out, tensor):
        native.copy(out, tensor)
    else:
        out.copy_(tensor)


def scale(out: torch.Tensor, tensor: torch.Tensor, weight: float) -> None:
    """``torch.mul(tensor, weight, out=out)``, for tensors of one shape and dtype."""
    if native.fits(out, [tensor]):
        native.weigh(out, [tensor], [weight])
    else:
        torch.mul(tensor, weight, out=out)


def add_scaled(out: torch.Tensor, tensor: torch.Tensor, other: torch.Tensor, weight: float) -> None:
    """``torch.add(tensor, other, alpha=weight, out=out)``, for tensors of one shape and dtype.

    16-bit types are added in float32 and rounded once; torch itself would round the weight to 16 bits, too.
    """
    if native.fits(out, [tensor, other]) and abs(weight) <= torch.finfo(torch.float32).max:
        native.weigh(out, [tensor, other], [1.0, weight])
    elif tensor.dtype in (torch.float16, torch.bfloat16):
        out.copy_(tensor.float().add_(other.float(), alpha=weight))
    else:
        torch.add(tensor, other, alpha=weight, out=out)


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
        ValueError: The tensors differ in kind, have gaps, or are conjugate or negative views; there are none; or there
            is no such reduction.
    """
    if how not in REDUCTIONS:
        raise ValueError(f"reduction {how!r}: pass one of {', '.join(REDUCTIONS)}")
    if not inputs:
        raise ValueError(f"reduction {how!r} of no tensors: pass one or more")
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
