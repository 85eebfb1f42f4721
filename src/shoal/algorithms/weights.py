"""What a round of a topology means to an algorithm: W as it is, its row- and column-stochastic forms, and its edges.

The stacked fleet and the real exchange both read their weights from here, so that they cannot disagree.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from ..topology.schedule import Edges, Schedule, as_schedule

Ranks = NDArray[np.int64]
Weights = NDArray[np.float64]
TOLERANCE = 1e-9
_KEPT_ROUNDS = 64


class RoundWeights:
    """One round, sparse. Arrays are [edges], ascending by destination and then by source, self weights among them.

    Attributes:
        size: number of agents.
        destination, source: int64.
        own: bool, the edge goes from an agent to itself.
        mix: W, as the topology has it.
    """

    def __init__(self, size: int, edges: Edges) -> None:
        self.size = size
        self.destination, self.source, self.mix = edges
        self.own = self.destination == self.source

    @cached_property
    def pull(self) -> Weights:
        """Row-stochastic: W where its rows sum to one; else each agent weighs itself and its sources equally."""
        rows = np.bincount(self.destination, weights=self.mix, minlength=self.size)
        if np.abs(rows - 1).max() < TOLERANCE:
            return self.mix
        return (1.0 / np.bincount(self.destination, minlength=self.size))[self.destination]

    @cached_property
    def push(self) -> Weights:
        """Column-stochastic: W where its columns sum to one; else each agent shares equally with its destinations."""
        columns = np.bincount(self.source, weights=self.mix, minlength=self.size)
        if np.abs(columns - 1).max() < TOLERANCE:
            return self.mix
        return (1.0 / np.bincount(self.source, minlength=self.size))[self.source]

    @cached_property
    def neighbours(self) -> tuple[Ranks, Ranks]:
        """Each agent (first) with each of its neighbours (second), ascending: int64 [2 links] each.

        Raises:
            ValueError: Some edge has no counterpart, so that there is no answer on it.
        """
        here, there = self.destination[~self.own], self.source[~self.own]
        if not np.array_equal(np.sort(here * self.size + there), np.sort(there * self.size + here)):
            raise ValueError(
                "an algorithm that sends each neighbour a message of its own needs links both ways, and this topology "
                "has one-way edges. Take an undirected graph, or a schedule of pairs."
            )
        return here, there

    @cached_property
    def reverse(self) -> Ranks:
        """For each row (agent, neighbour) of :attr:`neighbours`, the number of the row (neighbour, agent)."""
        here, there = self.neighbours
        return np.searchsorted(here * self.size + there, there * self.size + here)


class Rounds:
    """The rounds of a topology as algorithms read them; the last ones are kept."""

    def __init__(self, topology: nx.Graph | Schedule) -> None:
        self.schedule = as_schedule(topology)
        self.size = self.schedule.size
        self._of = lru_cache(maxsize=_KEPT_ROUNDS)(lambda turn: RoundWeights(self.size, self.schedule.edges(turn)))

    def __getitem__(self, round_: int) -> RoundWeights:
        return self._of(self.turn(round_))

    def turn(self, round_: int) -> int:
        """The round below the period that it equals, if there is a period."""
        return round_ if self.schedule.period is None else round_ % self.schedule.period
