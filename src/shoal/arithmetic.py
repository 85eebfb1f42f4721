"""Sums over tensors of several agents, always in one order, so that every transport gives the same bits.

The order is: this agent's own term, then the sources by ascending rank. Reductions over all agents go by ascending
rank, or by rank on each machine and then by machine (:func:`machines_among`). The order decides the last bits. So it
depends only on the participants and their machines: not on the size of a tensor, on the tensors fused with it, or on
the transport.

Every weighted term is one fused multiply-add (``torch.add(alpha=)``), in float32 for 16-bit tensors, whose sum is
rounded once at the end. Equal weights are no factors of the terms: the terms are summed, and the sum is scaled once
(:func:`common_factor`). :mod:`shoal.kernels` computes one block: the compiled kernels in one pass over any length, and
torch's operations on so many bytes that the running sum stays in the cache. A block is summed as soon as all agents'
numbers of it are here, so that summing overlaps receiving.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial

import torch

from .execution.stage import MORE, Arrived
from .kernels.native import fits as native_fits
from .kernels.sums import HALF, common_factor, real
from .kernels.sums import combine as _combine
from .kernels.sums import weigh as _weigh
from .runtime.agent import Agent
from .transport.messages import Payload

BLOCK_BYTES = 1 << 20
"""Large enough that calls into torch cost little beside their bytes, small enough that a few blocks fit the cache."""
Waiting = Generator[str, Arrived, None]


def weighted_sum(
    out: torch.Tensor, own: torch.Tensor, weights: Sequence[float], payloads: Sequence[Payload]
) -> Waiting:
    """``out = weights[0] * own + sum of weight * payload``, all flat and of one dtype.

    Yields :data:`MORE` when it has summed all received numbers and some are missing.
    """
    factor = common_factor(weights)
    blocks = _complete_blocks(out, payloads)
    if blocks is None:
        if out.is_complex():
            out, own = real(out), real(own)
        yield from _in_blocks(out, own, payloads, partial(_weigh, weights, factor))
    elif out.is_complex():
        _weigh(weights, factor, real(out), real(own), [real(block) for block in blocks])
    else:
        _weigh(weights, factor, out, own, blocks)


def _complete_blocks(out: torch.Tensor, payloads: Sequence[Payload]) -> list[torch.Tensor] | None:
    """The numbers of the payloads, if all have arrived and fit one block; otherwise None."""
    if out.nbytes > BLOCK_BYTES:
        return None
    blocks = []
    for payload in payloads:
        if not payload.complete:
            return None
        blocks.append(payload.data)
    return blocks


def weigh_in_blocks(
    out: torch.Tensor,
    own: torch.Tensor,
    own_weight: float,
    terms: Sequence[torch.Tensor | None],
    weights: Sequence[float],
    also: torch.Tensor | None = None,
) -> None:
    """``out = own_weight * own + sum of weight * term`` of complete tensors, flat and of one dtype.

    None is a term of zeros without memory: it is not added, and its weight counts like the others. ``also`` becomes the
    same as ``out``.
    """
    factor = common_factor([own_weight, *weights])
    kept, tensors = [own_weight], [out, own]
    for term, weight in zip(terms, weights, strict=True):
        if term is not None:
            kept.append(weight)
            tensors.append(term)
    if out.is_complex():
        tensors = [real(tensor) for tensor in tensors]
        out, also = tensors[0], None if also is None else real(also)
    if out.nbytes <= BLOCK_BYTES or native_fits(out, tensors[1:]):
        _weigh(kept, factor, out, tensors[1], tensors[2:], also)
        return
    block = max(1, BLOCK_BYTES // out.element_size())
    for target, mine, *theirs in zip(*(torch.split(tensor, block) for tensor in tensors), strict=True):
        _weigh(kept, factor, target, mine, theirs)
    if also is not None:
        also.copy_(out)


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
    blocks = _complete_blocks(out, payloads)
    if out.is_complex() and how in ("sum", "average"):
        out, own = real(out), real(own)
        blocks = None if blocks is None else [real(block) for block in blocks]
    if blocks is not None:
        _combine(how, position, parts, out, own, blocks)
    else:
        yield from _in_blocks(out, own, payloads, partial(_combine, how, position, parts))


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
    one_pass = native_fits(out, [own, *views])
    at = 0
    while True:
        here = min((p.available * k for p, k in zip(payloads, parts, strict=True)), default=total)
        end = total if here >= total else here - here % block
        if end > at:
            pieces = [torch.split(tensor[at:end], end - at if one_pass else block) for tensor in (out, own, *views)]
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


def machines_among(agent: Agent, group: Sequence[int], dtype: torch.dtype) -> Sequence[Sequence[int]]:
    """The ranks of a group by machine, if the numbers of each machine are reduced separately first; else empty.

    Never for 16-bit numbers: sending a machine's sum would round them a second time.
    """
    return agent.grouping.equal_parts(group) if agent.grouping is not None and dtype not in HALF else ()


def places_by_machine(agent: Agent, group: Sequence[int], dtype: torch.dtype) -> Sequence[Sequence[int]]:
    """The result of :func:`machines_among`, as indices of the group."""
    return [[group.index(rank) for rank in ranks] for ranks in machines_among(agent, group, dtype)]
