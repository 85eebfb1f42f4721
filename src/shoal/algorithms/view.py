"""The rounds of a topology as one agent sees them."""

from __future__ import annotations

from typing import NamedTuple

import networkx as nx
import numpy as np

from ..topology.schedule import Schedule
from .weights import Form, Ranks, ScheduleWeights, Weights

_KEPT = 256
"""Rounds that are remembered; of a schedule without a period they never come again."""


class Part(NamedTuple):
    """What one agent does in a round: its own weight, its sources with theirs, and its destinations."""

    own: float
    sources: dict[int, float]
    destinations: list[int]


class View:
    """An agent's part in each round of a topology.

    Args:
        topology: A graph with its weights, or a schedule.
        rank: Whose part.
    """

    def __init__(self, topology: nx.Graph | Schedule, rank: int) -> None:
        self._rounds, self._rank = ScheduleWeights(topology), rank
        self._parts: dict[tuple[int, str], Part] = {}
        self._neighbours: dict[int, list[int]] = {}

    @property
    def size(self) -> int:
        """How many agents the topology is for."""
        return self._rounds.size

    def part(self, round_: int, form: Form = "mix") -> Part:
        """With the weights W, or those of its row-stochastic (``"pull"``) or column-stochastic (``"push"``) form."""
        key = self._rounds.schedule.in_period(round_), form
        if key not in self._parts:
            weights = self._rounds[round_]
            used: Weights = getattr(weights, form)
            mine: Ranks = np.flatnonzero(weights.destination == self._rank)
            sources = dict(zip(weights.source[mine].tolist(), used[mine].tolist(), strict=True))
            theirs = weights.destination[weights.source == self._rank]
            own = sources.pop(self._rank, 0.0)
            if len(self._parts) >= _KEPT:
                self._parts.clear()
            self._parts[key] = Part(own, sources, [one for one in theirs.tolist() if one != self._rank])
        return self._parts[key]

    def neighbours(self, round_: int) -> list[int]:
        """The agents that this one has links with, both ways."""
        index = self._rounds.schedule.in_period(round_)
        if index not in self._neighbours:
            here, there = self._rounds[round_].neighbours
            if len(self._neighbours) >= _KEPT:
                self._neighbours.clear()
            self._neighbours[index] = there[here == self._rank].tolist()
        return self._neighbours[index]
