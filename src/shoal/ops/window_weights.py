"""The weights of calls on windows, as they are given, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..topology._validate import as_int, as_weight
from ..windows.window import Window
from ..world.agent import current
from .arguments import as_ranks


def window_weights(
    op: str, window: Window, given: Mapping[int, float] | Iterable[int] | None, neighbours: tuple[int, ...], what: str
) -> dict[int, float]:
    """The checked weights, ranks ascending. Only neighbours in the topology of the window may be named."""
    if given is None:
        return dict.fromkeys(neighbours, 1)
    agent = current(op)
    ranks = as_ranks(op, what, given, agent.rank, agent.size)
    strangers = sorted(set(ranks) - set(neighbours))
    if strangers:
        side = "out" if what == "dst_weights" else "in"
        raise ValueError(
            f"{op} {window.name!r} on rank {agent.rank}: {what} names ranks {strangers}, which are no "
            f"{side}-neighbours in the topology of this window; those are {list(neighbours)}"
        )
    weights = given.values() if isinstance(given, Mapping) else [1] * len(ranks)
    pairs = sorted(zip(ranks, weights, strict=True), key=lambda pair: pair[0])
    return {rank: window_weight(op, window, weight, f"{what}[{rank}]") for rank, weight in pairs}


def window_weight(op: str, window: Window, weight: float, what: str) -> float:
    """A finite number; a whole one for a window of whole numbers."""
    number = as_weight(weight, f"{op} {window.name!r}, {what},")
    dtype = window.tensor.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return number
    try:
        return int(number) if number == int(number) and abs(number) < 1 << 53 else as_int(weight, what)
    except TypeError:
        raise TypeError(
            f"{op} {window.name!r}: {what}={weight}, and the window holds {dtype}; give whole numbers"
        ) from None
