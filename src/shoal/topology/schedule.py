"""Topologies that change from round to round: the small interface that all of them share, and the clock that runs one.

A :class:`Schedule` answers one question: what does agent `rank` do in round `round`? It is a value without memory, so
that any agent can ask about any round and about any other agent; random ones draw from a seed and the number of the
round. A static graph is the schedule that always says the same. What moves is a :class:`Clock`, which each agent has
for itself and saves with its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from ._validate import as_digraph, as_int, check_rank, check_size
from .mixing import Mixing


class Edges(NamedTuple):
    """A whole round, sparse: agent ``destination[k]`` multiplies the value of ``source[k]`` by ``weight[k]``.

    Self weights are among them, as edges from an agent to itself. int64, int64 and float64, each [edges], ascending by
    destination and then by source.
    """

    destination: NDArray[np.int64]
    source: NDArray[np.int64]
    weight: NDArray[np.float64]


class Schedule(ABC):
    """A topology in time. Rounds count from 0 without end.

    A subclass defines :meth:`mixing` and `period`. One for many thousands of agents also overrides :meth:`edges`, which
    must say the same.

    Attributes:
        size: number of agents n.
        period: rounds after which it repeats; None when it never does, as a random one.
    """

    size: int
    period: int | None

    @abstractmethod
    def mixing(self, round: int, rank: int) -> Mixing:
        """What agent `rank` does in a round: pull form, ``r_ij = W[i, j]`` and s = 1, both sides of each edge known."""

    def edges(self, round: int) -> Edges:
        """The round of all agents at once."""
        views = [self.mixing(round, rank) for rank in range(self.size)]
        rows = [sorted({view.rank: view.self_weight, **view.sources}.items()) for view in views]
        destination = np.repeat(np.arange(self.size), [len(row) for row in rows])
        flat = [pair for row in rows for pair in row]
        source = np.array([source for source, _ in flat], dtype=np.int64)
        return Edges(destination, source, np.array([weight for _, weight in flat], dtype=np.float64))

    def matrix(self, round: int) -> NDArray[np.float64]:
        """The mixing matrix W of a round, float64 [n, n]."""
        edges = self.edges(round)
        dense = np.zeros((self.size, self.size))
        dense[edges.destination, edges.source] = edges.weight
        return dense

    def graph(self, round: int) -> nx.DiGraph:
        """A round as a graph: edge (j, i) carries ``W[i, j]``."""
        found = nx.DiGraph()
        found.add_nodes_from(range(self.size))
        edges = self.edges(round)
        found.add_weighted_edges_from(
            zip(edges.source.tolist(), edges.destination.tolist(), edges.weight.tolist(), strict=True)
        )
        return found

    @abstractmethod
    def describe(self) -> str:
        """One line that names it with all its parameters. Two schedules that say the same are the same."""

    def __repr__(self) -> str:
        return f"<{self.describe()}>"

    def _check(self, round: int, rank: int) -> tuple[int, int]:
        round = as_int(round, "round")
        if round < 0:
            raise ValueError(f"round {round} is negative. Rounds count from 0.")
        return round, check_rank(rank, self.size)


class Static(Schedule):
    """The same graph in every round, with its weights, or with uniform ones."""

    period = 1

    def __init__(self, graph: nx.Graph, *, weighted: bool = True, name: str = "static graph") -> None:
        self._graph = as_digraph(graph)
        self._weighted = weighted
        self._name = name
        self.size = check_size(self._graph.number_of_nodes())

    def mixing(self, round: int, rank: int) -> Mixing:
        _, rank = self._check(round, rank)
        return Mixing.from_graph(self._graph, rank, weighted=self._weighted)

    def describe(self) -> str:
        weights = "" if self._weighted else ", uniform weights"
        return f"{self._name} of {self.size} agents{weights}"


def as_schedule(topology: nx.Graph | Schedule) -> Schedule:
    """A schedule as it is; a graph as the schedule that never changes."""
    return topology if isinstance(topology, Schedule) else Static(topology)


class Clock:
    """One agent's way through a schedule: ``next(clock)`` is its :class:`Mixing` of the next round.

    Attributes:
        round: the round that comes next.
    """

    def __init__(self, schedule: nx.Graph | Schedule, rank: int, round: int = 0) -> None:
        self.schedule = as_schedule(schedule)
        self.rank = check_rank(rank, self.schedule.size)
        self.round = as_int(round, "round")

    def __iter__(self) -> Clock:
        return self

    def __next__(self) -> Mixing:
        mixing = self.schedule.mixing(self.round, self.rank)
        self.round += 1
        return mixing

    def state_dict(self) -> dict[str, int | str]:
        """What :meth:`load_state_dict` needs: the round, and which schedule it is a round of."""
        return {"round": self.round, "schedule": self.schedule.describe()}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Go on where another clock of the same schedule was saved.

        Raises:
            ValueError: it was a clock of another schedule.
        """
        if state["schedule"] != self.schedule.describe():
            raise ValueError(
                f"the saved clock runs {state['schedule']!r} and this one {self.schedule.describe()!r}. "
                "Make the schedule with the same arguments, or set clock.round yourself."
            )
        self.round = as_int(state["round"], "round")
