"""Checks of the weights of calls on windows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..kernels.sums import wide_of
from ..ops.arguments import as_ranks
from ..topology._validate import as_int, as_weight
from .registry import Windows
from .window_part import WindowPart


def weights_of(
    op: str,
    window: WindowPart,
    windows: Windows,
    given: Mapping[int, float] | Iterable[int] | None,
    neighbours: tuple[int, ...],
    argument: str,
) -> dict[int, float]:
    """The checked weights, ranks ascending. Only neighbours in the topology of the window may be named.

    Args:
        windows: The windows of the agent.
        given: ``{rank: weight}``, or ranks for weights of 1; all present neighbours if None.
        argument: The name of the argument, for errors.
    """
    if given is None:
        return dict.fromkeys(window.there(neighbours), 1)
    rank, size = windows.engine.rank, windows.engine.size
    ranks = as_ranks(op, argument, given, rank, size)
    not_neighbours = sorted(set(ranks) - set(neighbours))
    if not_neighbours:
        side = "out" if argument == "dst_weights" else "in"
        raise ValueError(
            f"{op} {window.name!r} on rank {rank}: {argument} names ranks {not_neighbours}, which are no "
            f"{side}-neighbours in the topology of this window; those are {list(neighbours)}"
        )
    weights = given.values() if isinstance(given, Mapping) else [1] * len(ranks)
    pairs = sorted(zip(ranks, weights, strict=True), key=lambda pair: pair[0])
    return {neighbour: weight_of(op, window, weight, f"{argument}[{neighbour}]") for neighbour, weight in pairs}


def update_weights(
    op: str,
    window: WindowPart,
    windows: Windows,
    self_weight: float | None,
    src_weights: Mapping[int, float] | None,
) -> tuple[float, dict[int, float]]:
    """The checked weights of an update: of the registered tensor, and of the slots by rank; by default the topology's.

    Raises:
        ValueError: Only one of the two is given.
        TypeError: The topology's weights are fractions, and the window holds whole numbers.
    """
    if (self_weight is None) != (src_weights is None):
        raise ValueError(
            f"{op} {window.name!r}: give both self_weight and the in-neighbours' weights, or neither (the topology's "
            "weights)"
        )
    if src_weights is not None and self_weight is not None:
        weights = weights_of(op, window, windows, src_weights, window.sources, "src_weights")
        return weight_of(op, window, self_weight, "self_weight"), weights
    if not _has_fractions(window):
        raise TypeError(
            f"{op} {window.name!r}: the topology's weights are fractions and the window holds "
            f"{window.tensor.dtype}; give whole numbers as self_weight and as the in-neighbours' weights"
        )
    mixing = window.mixing
    # The slots of lost agents keep their last values: an average with them would pull this agent to where the lost one
    # stopped.
    weights = {rank: mixing.sources[rank] for rank in window.there(window.sources)}
    # The weights of a row must still sum to 1: without the lost share every update after a loss would shrink the
    # tensor.
    lost = sum(weight for rank, weight in mixing.sources.items() if rank not in weights)
    return mixing.self_weight + lost, weights


def _has_fractions(window: WindowPart) -> bool:
    return window.tensor.dtype.is_floating_point or window.tensor.dtype.is_complex


def weight_of(op: str, window: WindowPart, weight: float, argument: str) -> float:
    """Check a weight: finite, whole for a window of whole numbers, and within the range of the sums of its dtype."""
    number, dtype = as_weight(weight, f"{op} {window.name!r}, {argument},"), window.tensor.dtype
    if _has_fractions(window):
        highest = torch.finfo(wide_of(dtype)).max
    else:
        highest = torch.iinfo(dtype).max
        try:
            # A float has all whole numbers up to 2^53 only. A larger weight is read again from the argument, or it
            # would be rounded.
            number = int(number) if number == int(number) and abs(number) < 1 << 53 else as_int(weight, argument)
        except TypeError:
            raise TypeError(
                f"{op} {window.name!r}: {argument}={weight}, and the window holds {dtype}; give whole numbers"
            ) from None
    # torch would refuse it within the sum, when the tensor has been multiplied by the weights before, or wrap it.
    if abs(number) > highest:
        raise ValueError(
            f"{op} {window.name!r}: {argument}={weight}, and the window holds {dtype}; give a weight from {-highest} "
            f"to {highest}"
        )
    return number
