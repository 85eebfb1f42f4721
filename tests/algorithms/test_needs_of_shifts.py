"""The requirements of a topology of shifts, computed without its edges, equal those computed from its edges."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from shoal.algorithms import DecentralizedADMM, GradientDescent, PushPull, PushSum, check
from shoal.algorithms.needs import (
    CONNECTED,
    CONNECTED_LINKS,
    DOUBLY_STOCHASTIC,
    LINKS,
    ROW_STOCHASTIC,
    SYMMETRIC,
    TREE,
    Facts,
    Need,
    connected,
)
from shoal.topology import with_weights
from shoal.topology.families.one_peer import OnePeerExponential, RandomMatchings
from shoal.topology.families.static import Circulant, exponential, ring
from shoal.topology.schedule import Edges, EdgeSchedule, Schedule


class UndeclaredShifts(EdgeSchedule):
    """The edges of another schedule, of which it is not said that all agents do alike."""

    def __init__(self, other: Schedule) -> None:
        self._other, self.size, self.period = other, other.size, other.period

    def _edges(self, round: int) -> Edges:
        return Edges(*(edge.copy() for edge in self._other.edges(round)))

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
    Circulant(8, {0: 0.5, 2: 0.5, 1: 0.0}),
]


@pytest.mark.parametrize(
    "need",
    [CONNECTED, CONNECTED_LINKS, connected("push"), DOUBLY_STOCHASTIC, ROW_STOCHASTIC, SYMMETRIC, LINKS, TREE],
    ids=lambda o: o.name,
)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: one.describe())
def test_shares_and_edges_agree(need: Need, schedule: Schedule) -> None:
    assert Facts(schedule).rounds[0].shares is not None
    assert Facts(UndeclaredShifts(schedule)).rounds[0].shares is None
    assert need.problem(Facts(schedule)) == need.problem(Facts(UndeclaredShifts(schedule)))


@pytest.mark.parametrize("ends", [[(0, 1), (1, 2)], [(1, 0), (2, 1)], [(0, 1), (1, 0), (1, 2)]])
def test_a_path_without_a_return_path_is_not_connected(ends: list[tuple[int, int]]) -> None:
    graph = nx.DiGraph([*ends, (2, 2)])
    parts = nx.number_strongly_connected_components(graph)
    assert f"into {parts} parts" in CONNECTED.problem(Facts(UndeclaredShifts(Facts(graph).schedule)))


def test_rounds_that_are_jointly_connected_suffice() -> None:
    schedule = RandomMatchings(20, seed=1)
    assert CONNECTED.problem(Facts(schedule)) == ""
    assert nx.number_strongly_connected_components(schedule.graph(0)) == 10


@pytest.mark.parametrize("as_edges", [False, True])
def test_an_edge_of_weight_zero_does_not_connect(as_edges: bool) -> None:
    schedule: Schedule = Circulant(8, {0: 0.5, 2: 0.5, 1: 0.0})
    if as_edges:
        schedule = UndeclaredShifts(schedule)
    assert "into 2 parts" in CONNECTED.problem(Facts(schedule))
    assert CONNECTED_LINKS.problem(Facts(schedule)) == ""
    with pytest.raises(ValueError, match="needs W to be connected"):
        check("GradientDescent", GradientDescent(0.1).needs, schedule)


def test_push_sum_and_push_pull_need_a_return_path_of_positive_weight() -> None:
    """Agent 0 keeps its whole mass and gives agent 1 a share of 0, so the weight of agent 1 goes to 0."""
    column = with_weights(np.ones((2, 2)), np.array([[1.0, 0.5], [0.0, 0.5]]))
    with pytest.raises(ValueError, match="needs W to be connected"):
        check("PushSum", PushSum().needs, column)
    row = with_weights(np.ones((2, 2)), np.array([[1.0, 0.0], [0.5, 0.5]]))
    with pytest.raises(ValueError, match="needs W to be connected"):
        check("PushPull", PushPull(0.1).needs, row)


def test_algorithms_without_weights_count_every_link() -> None:
    ring_of_two_weights = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    graph = with_weights(np.ones((3, 3)), ring_of_two_weights)
    check("DecentralizedADMM", DecentralizedADMM(1.0, 4.0).needs, graph)
    with pytest.raises(ValueError, match="into 2 parts"):
        check("GradientDescent", GradientDescent(0.1).needs, graph)
