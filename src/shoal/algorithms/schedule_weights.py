"""The weights of a round of a topology, of all agents and of one: W, and its row- and column-stochastic forms.

The stacked fleet and the real exchange both read their weights from here, so they cannot differ. If all agents have the
same hops and weights, as on a ring, a round is stored as these few shares, and the arrays of its edges are made only on
request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Literal

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from ..topology.healing import Without, separates
from ..topology.mixing import Mixing
from ..topology.schedule import AnyTopology, Edges, Schedule, as_schedule

log = logging.getLogger("shoal")

Ranks = NDArray[np.int64]
Weights = NDArray[np.float64]
Shares = dict[int, float]
"""``{hop: weight}`` of the agent `hop` ranks behind."""
Form = Literal["mix", "pull", "push"]
TOLERANCE = 1e-6
"""As in :mod:`shoal.topology`: weights may have been rounded to float32."""
_KEPT_ROUNDS = 64
_KEPT_WITHOUT_PERIOD = 2
_KEPT_MIXINGS = 256
"""Rounds of one agent that are cached; without a period they never repeat."""


class RoundWeights:
    """One round, sparse. Arrays are [edges], ascending by destination and then by source, self weights among them.

    Args:
        size: number of agents.
        edges: makes the arrays, at their first use.
        shares: {hop: weight} of all hops, and 0 among them, if all agents do alike.
    """

    def __init__(self, size: int, edges: Callable[[], Edges], shares: Shares | None = None) -> None:
        self.size, self.shares = size, shares
        self._make = edges

    @cached_property
    def _edges(self) -> Edges:
        return self._make()

    @property
    def destination(self) -> Ranks:
        """The rank that each edge leads to, int64 [edges]."""
        return self._edges.destination

    @property
    def source(self) -> Ranks:
        """The rank that each edge comes from, int64 [edges]."""
        return self._edges.source

    @property
    def mix(self) -> Weights:
        """The weights W as the topology has them, float64 [edges]."""
        return self._edges.weight

    @cached_property
    def own(self) -> NDArray[np.bool_]:
        """The edges from an agent to itself, bool [edges]."""
        own: NDArray[np.bool_] = self.destination == self.source
        return own

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

    def shares_of(self, form: Form) -> Shares | None:
        """The shares of W, or of its row- or column-stochastic form, if all agents do alike; else None."""
        if self.shares is None or form == "mix" or abs(sum(self.shares.values()) - 1) < TOLERANCE:
            return self.shares
        return dict.fromkeys(self.shares, 1.0 / len(self.shares))

    @cached_property
    def sends(self) -> int | Ranks:
        """Messages of an agent to others: one number where all do alike, else int64 [n]."""
        if self.shares is not None:
            return len(self.shares) - 1
        return np.bincount(self.source[~self.own], minlength=self.size)

    @cached_property
    def messages(self) -> int:
        """How many messages all agents send to others."""
        return self.sends * self.size if isinstance(self.sends, int) else int(self.sends.sum())

    def too_few_sources(self, needed: int) -> tuple[int, int] | None:
        """The first agent that has sources, but fewer than are needed, and their number; None if there is none."""
        received = np.bincount(self.destination[~self.own], minlength=self.size)
        few = np.flatnonzero((received > 0) & (received < needed))
        return (int(few[0]), int(received[few[0]])) if len(few) else None

    @cached_property
    def neighbours(self) -> tuple[Ranks, Ranks]:
        """Each agent (first) with each of its neighbours (second), ascending: int64 [2 links] each.

        Raises:
            ValueError: Some edge has no opposite edge.
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


class ScheduleWeights:
    """The rounds of a topology as algorithms read them; the last ones are kept, where they come again."""

    def __init__(self, topology: nx.Graph | Schedule) -> None:
        schedule = self.schedule = as_schedule(topology)
        size = self.size = schedule.size

        # A closure over self would be a cycle, and its arrays would stay until the garbage collector runs.
        def make(index: int) -> RoundWeights:
            return RoundWeights(size, lambda: schedule.edges(index), schedule.hop_shares(index))

        self._of = lru_cache(_KEPT_WITHOUT_PERIOD if schedule.period is None else _KEPT_ROUNDS)(make)

    def __getitem__(self, round_: int) -> RoundWeights:
        return self._of(self.schedule.in_period(round_))


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
        healed = self._healed_without(gone)
        key = healed.schedule.in_period(round_), form, gone
        found = self._mixings.get(key)
        if found is None:
            weights = healed[round_]
            used: Weights = getattr(weights, form)
            mine: Ranks = np.flatnonzero(weights.destination == self._rank)
            sources = dict(zip(weights.source[mine].tolist(), used[mine].tolist(), strict=True))
            theirs = weights.destination[weights.source == self._rank]
            own = sources.pop(self._rank, 0.0)
            if len(self._mixings) >= _KEPT_MIXINGS:
                self._mixings.clear()
            destinations = [other for other in theirs.tolist() if other != self._rank]
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
            found = self._weights[round_].too_few_sources(needed)
            if found is not None:
                return round_, *found
        return None

    def neighbours(self, round_: int, gone: tuple[int, ...] = ()) -> list[int]:
        """The agents that this one has links with, both ways."""
        healed = self._healed_without(gone)
        key = healed.schedule.in_period(round_), gone
        found = self._neighbours.get(key)
        if found is None:
            here, there = healed[round_].neighbours
            if len(self._neighbours) >= _KEPT_MIXINGS:
                self._neighbours.clear()
            self._neighbours[key] = found = there[here == self._rank].tolist()
        return found

    def _healed_without(self, gone: tuple[int, ...]) -> ScheduleWeights:
        if gone not in self._left:
            whole = self._weights.schedule
            self._left[gone] = healed = ScheduleWeights(self._healed(whole, gone))
            if separates(whole, healed.schedule, gone):
                log.error(
                    "rank %d: without ranks %s the agents of %s that are left are not connected, so that they will not "
                    "agree. Load a checkpoint and begin again with a topology of these agents",
                    self._rank,
                    list(gone),
                    whole.describe(),
                )
        return self._left[gone]
