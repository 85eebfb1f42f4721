"""Sums over tensors of several agents, always in one order, so that every transport gives the same bits.

The order is: this agent's own term, then the sources by ascending rank (reductions over all agents: by ascending rank).
Every weighted term is one fused multiply-add (``torch.add(alpha=)``), in float32 for 16-bit tensors, whose sum is
rounded once at the end. Equal weights are no factors of the terms: the terms are summed, and the sum is scaled once
(:func:`common_factor`). The sum goes block by block so that the running sum stays in the cache: each input is read
once and the result written once. A block is summed as soon as it is there from everybody, so that summing overlaps
receiving.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from .engine.operation import MORE, Arrived
from .transport.wire import Payload

BLOCK_BYTES = 1 << 20
"""Large enough that calls into torch cost little beside their bytes, small enough that a few blocks fit the cache."""
HALF = (torch.float16, torch.bfloat16)
_MOST_PARTS = 1 << 24
"""A division by more may be of a number that float32 does not have."""
Waiting = Generator[str, Arrived, None]


def _multiply(one: torch.Tensor, other: torch.Tensor, out: torch.Tensor) -> None:
    """torch rounds a product of complex numbers by where it lies in what is multiplied at once; written out in real
    ones, it is the same however tensors are cut."""
    if not out.is_complex():
        torch.mul(one, other, out=out)
        return
    a, b, c = torch.view_as_real(one), torch.view_as_real(other), torch.view_as_real(out)
    first = a[..., 0] * b[..., 0] - a[..., 1] * b[..., 1]
    c[..., 1] = a[..., 0] * b[..., 1] + a[..., 1] * b[..., 0]
    c[..., 0] = first


def _add(one: torch.Tensor, other: torch.Tensor, out: torch.Tensor) -> None:
    torch.add(one, other, out=out)


def _minimum(one: torch.Tensor, other: torch.Tensor, out: torch.Tensor) -> None:
    torch.minimum(one, other, out=out)


def _maximum(one: torch.Tensor, other: torch.Tensor, out: torch.Tensor) -> None:
    torch.maximum(one, other, out=out)


_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]] = {
    "sum": _add,
    "average": _add,
    "product": _multiply,
    "min": _minimum,
    "max": _maximum,
}
REDUCTIONS = tuple(_REDUCE)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor with its complex numbers as pairs of real ones: weights are real, so each part sums by itself."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


class Factor(NamedTuple):
    """What a sum is divided or multiplied by."""

    number: float
    divides: bool


def common_factor(weights: Sequence[float]) -> Factor | None:
    """How to scale a sum of terms whose weights are all equal; None where each term takes its weight by itself.

    Where the weight is one over a whole number, the sum is divided by that number: the mean of numbers whose sum is
    exact is the quotient, rounded once, and whole if that is. The mean of n equal values differs from the value by the
    rounding of their sum: not at all if there are two, by a unit in the last place at most if there are three, by n / 2
    at most. It is infinite where the sum is. Powers of two stay with the terms. They round nothing, so that gives the
    same bits (short of subnormal numbers), and the mean of finite numbers stays finite.
    """
    weight = weights[0]
    if any(other != weight for other in weights) or abs(math.frexp(weight)[0]) == 0.5 or not weight:
        return None
    whole = round(1 / weight) if abs(weight) * _MOST_PARTS >= 1 else 0
    return Factor(float(whole), True) if whole and 1 / whole == weight else Factor(weight, False)


def weighted_sum(
    out: torch.Tensor, own: torch.Tensor, own_weight: float, terms: Sequence[tuple[Payload, float]]
) -> Waiting:
    """``out = own_weight * own + sum of weight * payload``, all flat and of one dtype.

    Yields :data:`MORE` whenever it has summed all that has come and not all has.
    """
    out, own = real(out), real(own)
    weights = [own_weight, *(weight for _, weight in terms)]
    weigh = partial(_weigh, weights, common_factor(weights))
    if out.numel() * out.element_size() <= BLOCK_BYTES and all(payload.complete for payload, _ in terms):
        weigh(out, own, [real(payload.data) for payload, _ in terms])
        return
    yield from _in_blocks(out, own, [payload for payload, _ in terms], weigh)


def weigh_in_blocks(
    out: torch.Tensor,
    own: torch.Tensor,
    own_weight: float,
    terms: Sequence[torch.Tensor | None],
    weights: Sequence[float],
) -> None:
    """``out = own_weight * own + sum of weight * term`` of tensors that are all here, flat and of one dtype.

    None is a term of zeros, which nobody had to write: it is not added, and its weight counts like the others.
    """
    factor = common_factor([own_weight, *weights])
    here = [(real(term), weight) for term, weight in zip(terms, weights, strict=True) if term is not None]
    left = [own_weight, *(weight for _, weight in here)]
    tensors = [real(out), real(own), *(term for term, _ in here)]
    block = max(1, BLOCK_BYTES // tensors[0].element_size())
    for target, mine, *theirs in zip(*(torch.split(tensor, block) for tensor in tensors), strict=True):
        _weigh(left, factor, target, mine, theirs)


def _weigh(
    weights: Sequence[float],
    factor: Factor | None,
    out: torch.Tensor,
    own: torch.Tensor,
    blocks: Sequence[torch.Tensor],
) -> None:
    """One block: each term times its weight, or all of them and then the sum times the factor."""
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
        scale = torch.div if factor.divides else torch.mul
        scale(first, factor.number, out=total)
    if wide:
        out.copy_(total)


def reduce(
    out: torch.Tensor,
    how: str,
    own: torch.Tensor,
    position: int,
    payloads: Sequence[Payload],
    parts: Sequence[Sequence[int]] = (),
) -> Waiting:
    """``out`` becomes the sum, average, minimum, maximum or product over all agents in rank order.

    ``own`` is this agent's tensor and comes after the first ``position`` payloads. 16-bit sums, averages and products
    are taken in float32. Where ``parts`` says which places in that order belong together, each part is reduced by
    itself first. Yields like :func:`weighted_sum`.
    """
    if how in ("sum", "average"):
        out, own = real(out), real(own)
    combine = partial(_combine, how, position, parts)
    if out.numel() * out.element_size() <= BLOCK_BYTES and all(payload.complete for payload in payloads):
        combine(out, own, [payload.data if out.is_complex() else real(payload.data) for payload in payloads])
        return
    yield from _in_blocks(out, own, payloads, combine)


def _combine(
    how: str,
    position: int,
    parts: Sequence[Sequence[int]],
    out: torch.Tensor,
    own: torch.Tensor,
    blocks: Sequence[torch.Tensor],
) -> None:
    """One block: all agents', in rank order."""
    inputs, step = [*blocks[:position], own, *blocks[position:]], _REDUCE[how]
    wide = out.dtype in HALF
    total = torch.empty_like(out, dtype=torch.float32) if wide else out
    first, *others = [[inputs[place] for place in part] for part in parts] or [inputs]
    _fold(first, step, total)
    for part in others:
        reduction = torch.empty_like(total)
        _fold(part, step, reduction)
        step(total, reduction, total)
    if how == "average":
        total.div_(len(inputs))
    if wide:
        out.copy_(total)


def _fold(
    terms: Sequence[torch.Tensor], step: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None], out: torch.Tensor
) -> None:
    """``out`` becomes the reduction of ``terms``, in their order; it is wider than they are, or like them."""
    wide = terms[0].dtype != out.dtype
    if wide or len(terms) == 1:
        out.copy_(terms[0])
        rest = terms[1:]
    else:
        step(terms[0], terms[1], out)
        rest = terms[2:]
    for term in rest:
        step(out, term.float() if wide else term, out)


def _in_blocks(
    out: torch.Tensor,
    own: torch.Tensor,
    payloads: Sequence[Payload],
    combine: Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], None],
) -> Waiting:
    """Combine block by block, as far as every payload has come, waiting for more in between."""
    total = out.numel()
    views = [real(p.data) if p.data.is_complex() and not out.is_complex() else p.data for p in payloads]
    parts = [view.numel() // p.data.numel() if p.data.numel() else 1 for view, p in zip(views, payloads, strict=True)]
    block = max(1, BLOCK_BYTES // out.element_size())
    at = 0
    while True:
        here = min((p.available * k for p, k in zip(payloads, parts, strict=True)), default=total)
        end = total if here >= total else here - here % block
        if end > at:
            pieces = [torch.split(tensor[at:end], block) for tensor in (out, own, *views)]
            for target, mine, *theirs in zip(*pieces, strict=True):
                combine(target, mine, theirs)
            at = end
        if at >= total:
            return
        yield MORE


def complete(payloads: Sequence[Payload]) -> Waiting:
    """Wait until all of every payload is here."""
    while not all(payload.complete for payload in payloads):
        yield MORE
