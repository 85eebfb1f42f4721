"""What is said of a topology in which all agents do alike, without its edges, is what its edges say."""

from __future__ import annotations

import networkx as nx
import pytest

from shoal.algorithms.needs import CONNECTED, DOUBLY_STOCHASTIC, LINKS, ROW_STOCHASTIC, SYMMETRIC, TREE, Facts, Need
from shoal.topology.families.circulant import Circulant, exponential, ring
from shoal.topology.families.one_peer import OnePeerExponential, RandomMatchings
from shoal.topology.schedule import Edges, EdgeSchedule, Schedule


class Told(EdgeSchedule):
    """The edges of another schedule, of which it is not said that all agents do alike."""

    def __init__(self, other: Schedule) -> None:
        self._other, self.size, self.period = other, other.size, other.period

    def _edges(self, round: int) -> Edges:
        return Edges(*(one.copy() for one in self._other.edges(round)))

    def describe(self) -> str:
        return self._other.describe()


SCHEDULES = [
    ring(2),
    ring(9),
    ring(9, connect_style=1),
    exponential(12),
    OnePeerExponential(6),
    OnePeerExponential(8),
    Circulant(9, {0: 0.5, 3: 0.5}),
    Circulant(12, {0: 0.5, 4: 0.25, 6: 0.25}),
    Circulant(12, {0: 0.5, 4: 0.25, 8: 0.25}),
    Circulant(10, {3: 0.3, 7: 0.7}),
    Circulant(10, {3: 0.5, 7: 0.5}),
    Circulant(10, {0: 0.5, 3: 0.3, 7: 0.3}),
    Circulant(8, {0: 0.5, 4: 0.5}),
]


@pytest.mark.parametrize(
    "need", [CONNECTED, DOUBLY_STOCHASTIC, ROW_STOCHASTIC, SYMMETRIC, LINKS, TREE], ids=lambda o: o.name
)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: one.describe())
def test_shares_and_edges_say_the_same(need: Need, schedule: Schedule) -> None:
    assert Facts(schedule).rounds[0].shares is not None
    assert Facts(Told(schedule)).rounds[0].shares is None
    assert need.problem(Facts(schedule)) == need.problem(Facts(Told(schedule)))


@pytest.mark.parametrize("ends", [[(0, 1), (1, 2)], [(1, 0), (2, 1)], [(0, 1), (1, 0), (1, 2)]])
def test_a_way_there_and_none_back_is_not_connected(ends: list[tuple[int, int]]) -> None:
    graph = nx.DiGraph([*ends, (2, 2)])
    parts = nx.number_strongly_connected_components(graph)
    assert f"into {parts} parts" in CONNECTED.problem(Facts(Told(Facts(graph).schedule)))


def test_rounds_that_connect_the_agents_together_are_enough() -> None:
    schedule = RandomMatchings(20, seed=1)
    assert CONNECTED.problem(Facts(schedule)) == ""
    assert nx.number_strongly_connected_components(schedule.graph(0)) == 10
