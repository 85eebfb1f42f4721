"""The number of hops from one agent to the others along edges."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ._edges import Ranks


class Neighbours:
    """Edges by the agent that they start from, as plain lists, which a walk from agent to agent reads fastest.

    Args:
        size: number of agents.
        source, destination: ranks, int64 [edges].
    """

    def __init__(self, size: int, source: Ranks, destination: Ranks) -> None:
        order = np.argsort(source, kind="stable")
        self.size = size
        self._heads: list[int] = destination[order].tolist()
        self._starts: list[int] = np.searchsorted(source[order], np.arange(size + 1)).tolist()

    def hops_from(self, source: int) -> NDArray[np.int64]:
        """The fewest edges from `source` to each agent, int64 [n]; -1 for those out of reach."""
        hops = [-1] * self.size
        hops[source] = 0
        frontier, distance = [source], 0
        heads, starts = self._heads, self._starts
        while frontier:
            distance += 1
            ahead = []
            for rank in frontier:
                for head in heads[starts[rank] : starts[rank + 1]]:
                    if hops[head] < 0:
                        hops[head] = distance
                        ahead.append(head)
            frontier = ahead
        return np.array(hops, dtype=np.int64)
