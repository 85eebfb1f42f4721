"""The interface of schedules: static graphs as schedules, rounds, the arrays of a round, clocks."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal.topology
from shoal.topology import (
    Clock,
    ExponentialTwoGraph,
    Mixing,
    OnePeerExponential,
    RandomMatchings,
    RingGraph,
    Schedule,
    StarGraph,
    Static,
    as_schedule,
    mixing_matrix,
)

few = settings(max_examples=40)


@st.composite
def weighted_digraphs(draw):
    size = draw(st.integers(1, 8))
    rank = st.integers(0, size - 1)
    edges = draw(st.dictionaries(st.tuples(rank, rank), st.floats(-2, 2), max_size=20))
    graph = nx.DiGraph()
    graph.add_nodes_from(draw(st.permutations(range(size))))
    graph.add_weighted_edges_from((source, destination, weight) for (source, destination), weight in edges.items())
    return graph


@few
@given(weighted_digraphs(), st.booleans(), st.integers(0, 5))
def test_a_static_schedule_equals_its_graph(graph, weighted, round):
    schedule = Static(graph, weighted=weighted)
    for rank in range(len(graph)):
        assert schedule.mixing(round, rank) == Mixing.from_graph(graph, rank, weighted=weighted)
    if weighted:
        np.testing.assert_array_equal(schedule.matrix(round), mixing_matrix(graph))


@few
@given(weighted_digraphs())
def test_the_edges_of_a_static_schedule_are_those_of_its_mixings(graph):
    schedule = Static(graph)
    for array, expected in zip(schedule.edges(3), Schedule.edges(schedule, 3), strict=True):
        np.testing.assert_array_equal(array, expected)


def test_an_undirected_graph_stands_for_both_directions():
    graph = nx.path_graph(3)
    np.testing.assert_array_equal(as_schedule(graph).matrix(0), [[0, 1, 0], [1, 0, 1], [0, 1, 0]])


def test_a_static_schedule_keeps_its_edges_when_the_graph_changes():
    graph = RingGraph(5)
    schedule = Static(graph)
    before = schedule.matrix(0)
    graph.remove_edge(0, 1)
    graph[0][4]["weight"] = 7.0
    np.testing.assert_array_equal(schedule.matrix(0), before)


def test_static_schedules_are_distinguished_by_their_edges_and_weights():
    ring = Static(RingGraph(8))
    assert ring.describe() == Static(RingGraph(8)).describe()
    heavier = RingGraph(8)
    heavier[0][1]["weight"] = 0.5
    others = [Static(StarGraph(8)), Static(RingGraph(9)), Static(heavier), Static(StarGraph(8), weighted=False)]
    assert len({schedule.describe() for schedule in [ring, *others]}) == 5
    assert Static(RingGraph(8), name="my ring").describe() == "my ring of 8 agents"
    assert repr(Static(RingGraph(8), name="my ring")) == "<my ring of 8 agents>"


@pytest.mark.parametrize(
    ("weight", "error"),
    [("a third", TypeError), (None, TypeError), (float("nan"), ValueError), (float("inf"), ValueError)],
)
def test_non_finite_weights_are_refused(weight, error):
    graph = nx.DiGraph()
    graph.add_edge(0, 1, weight=weight)
    with pytest.raises(error, match="the weights of a graph must be"):
        Static(graph)
    assert Static(graph, weighted=False).mixing(0, 1).sources == {0: 0.5}


def test_a_schedule_is_its_own_schedule():
    schedule = OnePeerExponential(8)
    assert as_schedule(schedule) is schedule


def test_the_graph_of_a_round_has_its_matrix():
    schedule = OnePeerExponential(8)
    np.testing.assert_array_equal(mixing_matrix(schedule.graph(1)), schedule.matrix(1))
    assert schedule.graph(1).has_edge(0, 2)
    assert not schedule.graph(1).has_edge(2, 0)


def test_the_arrays_of_a_round_are_shared_and_read_only():
    schedule = RandomMatchings(8)
    assert schedule.edges(3).weight is schedule.edges(3).weight
    with pytest.raises(ValueError, match="read-only"):
        schedule.edges(3).weight[0] = 1.0


def test_rounds_evicted_from_the_cache_are_computed_again_equally():
    schedule = RandomMatchings(8)
    first = schedule.edges(0).source.copy()
    for round in range(100):
        schedule.edges(round)
    np.testing.assert_array_equal(schedule.edges(0).source, first)


@pytest.mark.parametrize("schedule", [OnePeerExponential(4), Static(RingGraph(4)), RandomMatchings(4)])
def test_a_bad_round_or_rank_is_refused(schedule):
    with pytest.raises(ValueError, match="round -1 is negative"):
        schedule.mixing(-1, 0)
    with pytest.raises(ValueError, match="round -1 is negative"):
        schedule.edges(-1)
    with pytest.raises(TypeError, match="round must be an int"):
        schedule.edges(1.0)
    with pytest.raises(ValueError, match="rank 4 is out of range"):
        schedule.mixing(0, 4)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=r"0 to 2\*\*64 - 1"):
        RandomMatchings(4, seed)


def test_the_largest_seed_and_a_late_round_are_drawn():
    sources = RandomMatchings(16, seed=2**64 - 1).edges(2**40).source
    assert sorted(sources.tolist()) == sorted([*range(16), *range(16)])


def test_draws_are_the_numbers_that_all_agents_have_made_so_far():
    # Agents with another release of numpy or of this package must draw the same, so these never change.
    assert RandomMatchings(6, seed=1).edges(2).source.reshape(6, 2).sum(axis=1).tolist() == [1, 1, 6, 8, 6, 8]
    alone = RandomMatchings(7, seed=1)
    assert [rank for rank in range(7) if not alone.mixing(2, rank).source_ranks] == [3]


def test_a_clock_iterates_over_the_rounds():
    schedule = OnePeerExponential(8)
    clock = Clock(schedule, 3)
    assert [next(clock) for _ in range(5)] == [schedule.mixing(round, 3) for round in range(5)]
    assert clock.round == 5
    assert iter(clock) is clock


def test_a_clock_accepts_a_graph():
    clock = Clock(ExponentialTwoGraph(8), 0)
    assert next(clock) == next(clock) == Mixing.from_graph(ExponentialTwoGraph(8), 0)


def test_a_schedule_instead_of_a_graph_is_an_error_with_the_remedy():
    with pytest.raises(TypeError, match=r"not the schedule Circulant\. Pass the schedule itself"):
        Static(shoal.topology.Circulant(4, [1]))
