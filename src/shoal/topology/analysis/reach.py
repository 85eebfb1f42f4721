"""The spread of information along edges, without weights: which agents it reaches, and after how many rounds.

An agent keeps all information that it has received, and sends all of it in each message. An edge whose weight is zero
carries a message without effect, so it is no edge here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .._edges import Ranks
from .._neighbours import Neighbours
from .span import RoundMap, Span

Bits: TypeAlias = NDArray[np.uint64]


def union(span: Span) -> tuple[Ranks, Ranks]:
    """Sources and destinations of all edges of all rounds, each once."""
    if len(span) == 1:
        return span[0].weighty.source, span[0].weighty.destination
    # Not np.unique, which hashes, and takes many times as long on keys that are as regular as these.
    keys = np.sort(np.concatenate([round.weighty.source * span.size + round.weighty.destination for round in span]))
    keys = keys[np.r_[True, keys[1:] != keys[:-1]]]
    return keys // span.size, keys % span.size


def is_connected(span: Span) -> bool:
    """Whether, as the rounds repeat, every agent's information reaches every other."""
    source, destination = union(span)
    forth = Neighbours(span.size, source, destination)
    if (forth.hops_from(0) < 0).any():
        return False
    if span.stochasticity.doubly and span.stochasticity.nonnegative:
        # The flow into a set of agents then equals the flow out of it, so a path to it implies a path back.
        return True
    return bool((Neighbours(span.size, destination, source).hops_from(0) >= 0).all())


def spread(span: Span, first: int, sources: Ranks) -> Iterator[Bits]:
    """The agents that information from each source has reached before round `first`, before the next one, and so on
    without end.

    Yields:
        bits, uint64 [n, words], bit ``k % 64`` of word ``k // 64`` for ``sources[k]``; one array, changed in place.
    """
    numbers = np.arange(len(sources))
    received = np.zeros((span.size, (len(sources) + 63) // 64), dtype=np.dtype("<u8"))
    np.bitwise_or.at(received, (sources, numbers // 64), np.uint64(1) << (numbers % 64).astype(np.uint64))
    for round in count(first):
        yield received
        _pass_on(received, span[round])


def unpack(received: Bits, sources: int) -> NDArray[np.uint8]:
    """The bits of :func:`spread` as zeros and ones, uint8 [n, sources]."""
    return np.unpackbits(received.view(np.uint8), axis=1, count=sources, bitorder="little")


def _pass_on(received: Bits, round: RoundMap) -> None:
    destination, source, _ = round.weighty
    if not len(source):
        return
    starts = np.flatnonzero(np.r_[True, destination[1:] != destination[:-1]])
    received[destination[starts]] |= np.bitwise_or.reduceat(received[source], starts, axis=0)
