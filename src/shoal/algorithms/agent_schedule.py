"""The rounds of a topology as one agent sees them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import networkx as nx
import numpy as np

from ..topology.healing import Without
from ..topology.links import separates
from ..topology.mixing import Mixing
from ..topology.schedule import AnyTopology, Schedule
from .schedule_weights import Form, Ranks, RoundWeights, ScheduleWeights, Weights

log = logging.getLogger("shoal")
_KEPT = 256
"""Rounds that are cached; without a period they never repeat."""


class AgentSchedule:
    """The weights of one agent in each round of a topology. Thread-safe.

    Args:
        topology: A graph with its weights, or a schedule.
        rank: The rank of the agent.
        healed: Returns the topology without lost ranks.
    """

    def __init__(
        self,
        topology: nx.Graph | Schedule,
        rank: int,
        healed: Callable[[Schedule, tuple[int, ...]], AnyTopology] = Without,
    ) -> None:
        self._weights, self._rank, self._healed = ScheduleWeights(topology), rank, healed
        self._left: dict[tuple[int, ...], ScheduleWeights] = {(): self._weights}
        self._mixings: dict[tuple[int, str, tuple[int, ...]], Mixing] = {}
        self._neighbours: dict[tuple[int, tuple[int, ...]], list[int]] = {}

    @property
    def size(self) -> int:
        """How many agents the topology is for."""
        return self._weights.size

    def mixing(self, round_: int, form: Form = "mix", gone: tuple[int, ...] = ()) -> Mixing:
        """With the weights W, or those of its row-stochastic (``"pull"``) or column-stochastic (``"push"``) form.

        The receiver applies the whole weight. Made once for each round of the period, and cached. If agents are
        ``gone``, it belongs to the topology without them.

        Raises:
            ValueError: A weight is not finite.
        """
        left = self._healed_without(gone)
        key = left.schedule.in_period(round_), form, gone
        found = self._mixings.get(key)
        if found is None:
            weights = left[round_]
            used: Weights = getattr(weights, form)
            mine: Ranks = np.flatnonzero(weights.destination == self._rank)
            sources = dict(zip(weights.source[mine].tolist(), used[mine].tolist(), strict=True))
            theirs = weights.destination[weights.source == self._rank]
            own = sources.pop(self._rank, 0.0)
            if len(self._mixings) >= _KEPT:
                self._mixings.clear()
            destinations = [one for one in theirs.tolist() if one != self._rank]
            self._mixings[key] = found = Mixing(self._rank, own, sources, destinations, size=self.size)
        return found

    def round_weights(self, round_: int, gone: tuple[int, ...] = ()) -> RoundWeights:
        """The weights of all agents in a round."""
        return self._healed_without(gone)[round_]

    def too_few_sources(self, needed: int, rounds: int) -> tuple[int, int, int] | None:
        """The first agent that receives from others in a round, but from fewer than an operation needs.

        Args:
            needed: The fewest sources of an agent that has any.
            rounds: How many rounds to look at, if the period is not shorter.

        Returns:
            The round, the rank and its number of sources; None if there is no such agent.
        """
        schedule = self._weights.schedule
        for round_ in range(min(schedule.period or rounds, rounds)):
            weights = self._weights[round_]
            received = np.bincount(weights.destination[~weights.own], minlength=self.size)
            few = np.flatnonzero((received > 0) & (received < needed))
            if len(few):
                return round_, int(few[0]), int(received[few[0]])
        return None

    def neighbours(self, round_: int, gone: tuple[int, ...] = ()) -> list[int]:
        """The agents that this one has links with, both ways."""
        left = self._healed_without(gone)
        key = left.schedule.in_period(round_), gone
        found = self._neighbours.get(key)
        if found is None:
            here, there = left[round_].neighbours
            if len(self._neighbours) >= _KEPT:
                self._neighbours.clear()
            self._neighbours[key] = found = there[here == self._rank].tolist()
        return found

    def _healed_without(self, gone: tuple[int, ...]) -> ScheduleWeights:
        if gone not in self._left:
            whole = self._weights.schedule
            self._left[gone] = left = ScheduleWeights(self._healed(whole, gone))
            if separates(whole, left.schedule, gone):
                log.error(
                    "rank %d: without ranks %s the agents of %s that are left are not connected, so that they will not "
                    "agree. Load a checkpoint and begin again with a topology of these agents",
                    self._rank,
                    list(gone),
                    whole.describe(),
                )
        return self._left[gone]
