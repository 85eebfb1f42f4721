"""The messages of one exchange with sources, destinations and bytes: from a round of a schedule, or given
explicitly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike

from ..topology.schedule import Schedule, as_schedule
from .network import Floats, Ints


@dataclass(frozen=True, eq=False)
class Messages:
    """The messages of one exchange: each agent sends all of its own at once, and continues when all for it have
    arrived.

    Attributes:
        source, destination: int64 [messages], agents. No agent sends to itself.
        nbytes: float64 [messages].
    """

    source: Ints
    destination: Ints
    nbytes: Floats

    @classmethod
    def of(cls, source: ArrayLike, destination: ArrayLike, nbytes: ArrayLike) -> Messages:
        """Checked; `nbytes` is broadcast, so that one number serves for all messages.

        Raises:
            ValueError: an agent sends to itself, a size is negative or not finite, or the lengths differ.
        """
        out, into = np.atleast_1d(np.asarray(source, np.int64)), np.atleast_1d(np.asarray(destination, np.int64))
        if out.shape != into.shape or out.ndim != 1:
            raise ValueError(f"{out.shape} sources and {into.shape} destinations. Name both ends of every message.")
        if (out == into).any():
            raise ValueError(f"agent {out[out == into][0]} sends to itself. Leave out what moves nowhere.")
        if len(out) and min(out.min(), into.min()) < 0:
            raise ValueError("a rank is negative. Ranks count from 0.")
        size = np.broadcast_to(np.asarray(nbytes, float), out.shape)
        if not (np.isfinite(size).all() and (size >= 0).all()):
            raise ValueError("a message has a size that is negative or not finite. Pass its bytes.")
        return cls(out, into, size)

    def __len__(self) -> int:
        return len(self.source)


Step = Sequence[Messages]
"""The exchanges that follow one computation: one for a round of averaging, several for an all-reduce."""


def rounds_of(topology: nx.Graph | Schedule, nbytes: float, rounds: int, start: int = 0) -> Iterator[Step]:
    """The rounds of a topology, `nbytes` on every edge. Rounds of one period are the same objects each time."""
    schedule = as_schedule(topology)
    known: dict[int, Step] = {}
    for number in range(start, start + rounds):
        if schedule.period is None:
            yield [messages_of_round(schedule, number, nbytes)]
            continue
        index = schedule.in_period(number)
        if index not in known:
            known[index] = [messages_of_round(schedule, index, nbytes)]
        yield known[index]


def messages_of_round(schedule: Schedule, round: int, nbytes: float) -> Messages:
    """One round of a schedule, `nbytes` on every edge between two agents."""
    edges = schedule.edges(round)
    others = edges.destination != edges.source
    return Messages.of(edges.source[others], edges.destination[others], nbytes)
