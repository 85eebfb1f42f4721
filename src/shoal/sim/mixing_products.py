"""``W x`` of a whole fleet: the fastest way to multiply ``[n, d]`` by the mixing matrix of a round.

There are three methods. If all agents act alike (rings, exponential graphs, one peer at a time), the product is a few
shifted slices of x with one weight each. If each agent averages with one other, with the same weights everywhere
(pairs, hypercubes), it is x and its rows in another order. All other cases use a sparse product, which is several times
slower. Products of more than one pass run block by block on a CPU, so that a block stays in the cache from the first
term to the last. Terms with a common weight of one over a whole number are summed, and the sum is divided, as between
agents (:mod:`shoal.arithmetic`); but not in 16 bits, which cannot hold the sum.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from ..algorithms.schedule_weights import Form, Ranks, RoundWeights, Shares, Weights
from ..kernels.sums import common_factor

Product = Callable[[torch.Tensor, torch.Tensor], None]
"""Writes ``W x`` to its first argument; both are ``[n, ...]`` and contiguous."""

Term = tuple[int, float]
"""A hop, and the share that an agent takes of the one so far behind it."""

_BLOCK_BYTES = 1 << 22
"""Little enough for a cache, and so much that the threads of a pass do not wait for each other too often."""
_ONE_THREAD = 1 << 21
"""Multiplications of a sparse product, about half a millisecond, below which it runs in one thread.

The threads of torch's sparse product wait for each other actively. On a busy machine a wait lasts until the scheduler
runs the last of them.
"""
_MOST_HOPS = 64
_LITTLE = (torch.float16, torch.bfloat16)


def product(weights: RoundWeights, form: Form, dtype: torch.dtype, device: torch.device) -> Product:
    """A function that multiplies tensors of this kind by W of a round, or by its row- or column-stochastic form."""
    shares = weights.shares_of(form) or _find_shares(weights, getattr(weights, form))
    if shares is not None and len(shares) <= _MOST_HOPS:
        terms = [(hop, share) for hop, share in shares.items() if share] or [(0, 0.0)]
        parts = _parts([share for _, share in terms])
        if parts != 1 and dtype not in _LITTLE:
            # As a tensor: by a number, a GPU would multiply with the reciprocal.
            divisor = torch.tensor(parts, dtype=dtype.to_real(), device=device)
            return lambda out, x: _divide_shifted(_real(out), _real(x), [hop for hop, _ in terms], divisor)
        averages = _as_averages(terms)
        if averages is not None:
            return lambda out, x: _average_shifted(out, x, averages)
        return lambda out, x: _shift(out, x, terms)
    values: Weights = getattr(weights, form)
    found = _find_partners(weights, values)
    if found is not None:
        partners, share = torch.from_numpy(found[0]).to(device), found[1]
        return lambda out, x: _average(out, x, partners, share)
    return _sparse(weights, values, dtype, device)


def _find_shares(weights: RoundWeights, values: Weights) -> Shares | None:
    """The shares of a round that did not say that all agents do alike in it, and in which they do."""
    hops = (weights.destination - weights.source) % weights.size
    distinct, first, counts = np.unique(hops, return_index=True, return_counts=True)
    if len(distinct) > _MOST_HOPS or (counts != weights.size).any():
        return None
    found = values[first]
    if not np.array_equal(values, found[np.searchsorted(distinct, hops)]):
        return None
    return dict(zip(distinct.tolist(), found.tolist(), strict=True))


def _find_partners(weights: RoundWeights, values: Weights) -> tuple[Ranks, float] | None:
    """The partner of each agent (itself, if it has none), and the share, if that is the same everywhere."""
    others = ~weights.own
    here, shares = weights.destination[others], values[others]
    if not len(here) or (np.diff(here) == 0).any() or np.ptp(shares):
        return None
    share = float(shares[0])
    kept = np.ones(weights.size)
    kept[here] = 1 - share
    if not np.array_equal(values[weights.own], kept):
        return None
    partners = np.arange(weights.size)
    partners[here] = weights.source[others]
    return partners, share


def _parts(shares: Sequence[float]) -> float:
    """By what to divide the sum of terms of these shares; 1 where each takes its share by itself."""
    factor = common_factor(shares)
    return factor.number if factor is not None and factor.divides else 1.0


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _divide_shifted(out: torch.Tensor, x: torch.Tensor, hops: list[int], divisor: torch.Tensor) -> None:
    """``out[i] = (sum over hops of x[i - hop]) / divisor``."""
    for here, (first, *others) in _pieces(out, x, hops):
        for source in others:
            first = torch.add(first, source, out=here)
        torch.div(first, divisor, out=here)


def _as_averages(terms: list[Term]) -> list[Term] | None:
    """Two or three terms as successive averages of the result so far and one more term, which saves a pass.

    Three only if two of them have the same weight: then numbers that are exact in binary stay exact.
    """
    if len(terms) not in (2, 3) or abs(sum(share for _, share in terms) - 1) > 1e-15:
        return None
    if len(terms) == 2:
        return terms
    first, second, third = sorted(terms, key=lambda term: term[1])
    if first[1] == second[1]:
        return [first, (second[0], 0.5), third]
    return [second, (third[0], 0.5), first] if second[1] == third[1] else None


def _average_shifted(out: torch.Tensor, x: torch.Tensor, averages: list[Term]) -> None:
    """As :func:`_shift`; a share is what a term gets of the average of it and those before."""
    for here, (first, second, *others) in _pieces(out, x, [hop for hop, _ in averages], in_blocks=len(averages) > 2):
        torch.lerp(first, second, averages[1][1], out=here)
        for source, (_, share) in zip(others, averages[2:], strict=True):
            torch.lerp(here, source, share, out=here)


def _shift(out: torch.Tensor, x: torch.Tensor, terms: list[Term]) -> None:
    """``out[i] = sum over terms of share x[i - hop]``."""
    for here, (first, *others) in _pieces(out, x, [hop for hop, _ in terms]):
        torch.mul(first, terms[0][1], out=here)
        for source, (_, share) in zip(others, terms[1:], strict=True):
            here.add_(source, alpha=share)


def _pieces(
    out: torch.Tensor, x: torch.Tensor, hops: list[int], in_blocks: bool = True
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Rows of ``out``, and for each hop the rows of x that belong to them."""
    size = len(x)
    # Between two of these no term wraps around the end of x.
    breaks = sorted({0, size, *hops})
    for first, last in pairwise(breaks):
        for begin, end in _blocks(x, first, last) if in_blocks else [(first, last)]:
            starts = [(begin - hop) % size for hop in hops]
            yield out[begin:end], [x[start : start + end - begin] for start in starts]


def _average(out: torch.Tensor, x: torch.Tensor, partners: torch.Tensor, share: float) -> None:
    """``out[i] = (1 - share) x[i] + share x[partners[i]]``."""
    for begin, end in _blocks(x, 0, len(x)):
        here = out[begin:end]
        torch.index_select(x, 0, partners[begin:end], out=here)
        torch.lerp(x[begin:end], here, share, out=here)


def _blocks(x: torch.Tensor, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Rows ``first`` to ``last`` of x in pieces; on a GPU all of them at once."""
    rows = max(1, _BLOCK_BYTES // max(1, x[0].nbytes)) if x.is_cpu else len(x)
    for begin in range(first, last, rows):
        yield begin, min(begin + rows, last)


def _sparse(weights: RoundWeights, values: Weights, dtype: torch.dtype, device: torch.device) -> Product:
    # On a CPU there is no sparse product of 16 bits.
    inner = torch.float32 if device.type == "cpu" and dtype in _LITTLE else dtype
    rows = np.concatenate([[0], np.cumsum(np.bincount(weights.destination, minlength=weights.size))])
    parts = np.ones(weights.size) if inner in _LITTLE else _parts_of_rows(rows, values)
    divides = parts[weights.destination] != 1
    values = np.where(divides, 1.0, values)
    divide = bool(divides.any())
    divisors = torch.from_numpy(parts).to(device, inner.to_real()).unsqueeze(1)
    # The product would turn wider indices into these each time.
    index = np.int32 if rows[-1] < 1 << 31 else np.int64
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls its sparse layouts a beta
        matrix = torch.sparse_csr_tensor(
            torch.from_numpy(rows.astype(index)),
            torch.from_numpy(weights.source.astype(index)),
            torch.from_numpy(values).to(inner),
            (weights.size, weights.size),
            device=device,
        )

    def multiply(out: torch.Tensor, x: torch.Tensor) -> None:
        flat, into = x.view(len(x), -1), out.view(len(x), -1)
        threads = torch.get_num_threads()
        # A row is summed by one thread in either case, so that the bits are the same.
        alone = threads > 1 and device.type == "cpu" and len(values) * flat.shape[1] < _ONE_THREAD
        if alone:
            torch.set_num_threads(1)
        try:
            total = torch.mm(matrix, flat, out=into) if inner == dtype else matrix @ flat.to(inner)
        finally:
            if alone:
                torch.set_num_threads(threads)
        if divide:
            _real(total).view(len(x), -1).div_(divisors)
        if total is not into:
            into.copy_(total)

    return multiply


def _parts_of_rows(rows: Ranks, values: Weights) -> Weights:
    """For each row, given where it begins in ``values``, by what to divide the sum of its terms; see :func:`_parts`."""
    parts = np.ones(len(rows) - 1)
    filled = np.flatnonzero(np.diff(rows))
    if len(filled):
        least, most = (take.reduceat(values, rows[filled]) for take in (np.minimum, np.maximum))
        shares, which = np.unique(least, return_inverse=True)
        found = np.array([_parts([share]) for share in shares.tolist()])[which]
        parts[filled] = np.where(least == most, found, 1.0)
    return parts
