"""The static graphs: equal to BlueFog's where it is right, doubly stochastic, and clear about bad input."""

import json
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.topology import (
    ExponentialGraph,
    ExponentialTwoGraph,
    FullyConnectedGraph,
    GetRecvWeights,
    GetSendWeights,
    IsRegularGraph,
    IsTopologyEquivalent,
    MeshGrid2DGraph,
    RingGraph,
    StarGraph,
    SymmetricExponentialGraph,
    classify,
    mixing_matrix,
    with_uniform_weights,
)

BLUEFOG = json.loads((Path(__file__).parent / "data" / "bluefog_topologies.json").read_text())["static"]

CONSTRUCTORS = {
    "ExponentialTwoGraph": ExponentialTwoGraph,
    "ExponentialGraph_base2": ExponentialGraph,
    "ExponentialGraph_base4": lambda size: ExponentialGraph(size, base=4),
    "SymmetricExponentialGraph_base4": SymmetricExponentialGraph,
    "MeshGrid2DGraph": MeshGrid2DGraph,
    "StarGraph_center0": StarGraph,
    "RingGraph_style0": RingGraph,
    "RingGraph_style1": lambda size: RingGraph(size, connect_style=1),
    "RingGraph_style2": lambda size: RingGraph(size, connect_style=2),
    "FullyConnectedGraph": FullyConnectedGraph,
}

CIRCULANT = sorted(CONSTRUCTORS.keys() - {"MeshGrid2DGraph", "StarGraph_center0"})
SYMMETRIC = ["SymmetricExponentialGraph_base4", "MeshGrid2DGraph", "StarGraph_center0", "RingGraph_style0"]

few = settings(max_examples=40)
sizes = st.integers(1, 40)


def edges_of(graph):
    return sorted((source, destination) for source, destination in graph.edges)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_graph_equals_bluefogs_for_every_recorded_size(name):
    assert len(BLUEFOG[name]) == 19
    for size, expected in BLUEFOG[name].items():
        graph = CONSTRUCTORS[name](int(size))
        actual = sorted([source, destination, weight] for source, destination, weight in graph.edges(data="weight"))
        assert [edge[:2] for edge in actual] == [edge[:2] for edge in expected]
        np.testing.assert_allclose([edge[2] for edge in actual], [edge[2] for edge in expected], rtol=0, atol=4e-16)


@few
@given(name=st.sampled_from(sorted(CONSTRUCTORS)), size=sizes)
def test_graph_is_doubly_stochastic_with_positive_weights_for_all(name, size):
    matrix = mixing_matrix(CONSTRUCTORS[name](size))
    np.testing.assert_allclose(matrix.sum(axis=0), 1.0, rtol=0, atol=1e-14)
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0, rtol=0, atol=1e-14)
    assert (matrix >= 0).all()
    assert (np.diag(matrix) > 0).all()


@few
@given(name=st.sampled_from(CIRCULANT), size=sizes)
def test_circulant_graph_looks_the_same_from_every_agent(name, size):
    matrix = mixing_matrix(CONSTRUCTORS[name](size))
    assert np.array_equal(matrix, np.roll(matrix, (1, 1), axis=(0, 1)))


@few
@given(name=st.sampled_from(SYMMETRIC), size=sizes)
def test_undirected_graph_has_a_symmetric_matrix(name, size):
    assert np.array_equal(mixing_matrix(CONSTRUCTORS[name](size)), mixing_matrix(CONSTRUCTORS[name](size)).T)


@few
@given(name=st.sampled_from(sorted(CONSTRUCTORS)), size=sizes)
def test_graph_is_strongly_connected(name, size):
    assert nx.is_strongly_connected(CONSTRUCTORS[name](size))


@few
@given(size=st.integers(1, 400), base=st.integers(2, 11))
def test_exponential_graph_sends_exactly_to_the_powers_ahead(size, base):
    powers = {base**exponent for exponent in range(10) if base**exponent < size}
    assert set(ExponentialGraph(size, base).successors(size - 1)) == {(size - 1 + hop) % size for hop in {0, *powers}}


@pytest.mark.parametrize(("base", "power"), [(3, 243), (10, 1000)])
def test_powers_that_a_floating_point_logarithm_misses_are_edges(base, power):
    assert ExponentialGraph(power + 1, base).has_edge(0, power)
    assert SymmetricExponentialGraph(2 * power, base).has_edge(0, power)


def test_left_and_right_ring_send_in_their_named_direction():
    assert set(RingGraph(5, connect_style=1).successors(0)) == {0, 4}
    assert set(RingGraph(5, connect_style=2).successors(0)) == {0, 1}


@few
@given(size=sizes, data=st.data())
def test_star_has_the_requested_centre(size, data):
    center = data.draw(st.integers(0, size - 1))
    graph = StarGraph(size, center_rank=center)
    assert set(graph.successors(center)) == set(range(size))
    assert all(set(graph.successors(leaf)) == {leaf, center} for leaf in range(size) if leaf != center)


@few
@given(rows=st.integers(1, 6), columns=st.integers(1, 6))
def test_grid_of_a_given_shape_is_networkxs_grid_numbered_by_rows(rows, columns):
    graph = MeshGrid2DGraph(rows * columns, shape=(rows, columns))
    grid = nx.grid_2d_graph(rows, columns)
    expected = {
        frozenset({first[0] * columns + first[1], second[0] * columns + second[1]}) for first, second in grid.edges
    }
    assert {frozenset(edge) for edge in graph.edges if edge[0] != edge[1]} == expected


@pytest.mark.parametrize("name", ["MeshGrid2DGraph", "StarGraph_center0"])
def test_uniform_weights_on_an_irregular_graph_are_not_column_stochastic(name):
    assert not classify(with_uniform_weights(CONSTRUCTORS[name](6))).column


@pytest.mark.parametrize("constructor", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
@pytest.mark.parametrize("size", [0, -3])
def test_size_below_one_is_refused(constructor, size):
    with pytest.raises(ValueError, match=f"size must be at least 1, got {size}"):
        constructor(size)


@pytest.mark.parametrize("constructor", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
@pytest.mark.parametrize("size", [4.0, True, "4", None])
def test_size_that_is_no_int_is_refused(constructor, size):
    with pytest.raises(TypeError, match="size must be an int"):
        constructor(size)


def test_numpy_integers_are_sizes():
    assert IsTopologyEquivalent(RingGraph(np.int64(5)), RingGraph(5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RingGraph(4, connect_style=3), "connect_style is 3. Pass 0"),
        (lambda: RingGraph(4, connect_style=-1), "connect_style is -1"),
        (lambda: StarGraph(4, center_rank=4), "center_rank 4 is out of range. With 4 agents, pass one of 0 to 3"),
        (lambda: StarGraph(4, center_rank=-1), "center_rank -1 is out of range"),
        (lambda: ExponentialGraph(4, base=1), "base is 1. Pass a whole number of at least 2"),
        (lambda: SymmetricExponentialGraph(4, base=0), "base is 0"),
        (lambda: MeshGrid2DGraph(6, shape=(2, 4)), r"2 x 4 has 8 places for 6 agents. Pass .* such as \(2, 3\)"),
        (lambda: MeshGrid2DGraph(6, shape=(-2, -3)), r"shape\[0\] must be at least 1"),
        (lambda: MeshGrid2DGraph(6, shape=(1, 2, 3)), r"Pass two numbers, \(rows, columns\)"),
    ],
)
def test_bad_argument_is_refused_with_the_valid_ones(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_equivalence_does_not_depend_on_the_order_of_insertion():
    graph = MeshGrid2DGraph(6)
    shuffled = nx.DiGraph()
    shuffled.add_nodes_from([5, 2, 0, 1, 4, 3])
    shuffled.add_edges_from(reversed(list(graph.edges(data=True))))
    assert IsTopologyEquivalent(graph, shuffled)


def test_equivalence_sees_weights_edges_and_sizes():
    ring = RingGraph(4)
    assert not IsTopologyEquivalent(ring, with_reweighted_edge(ring, (0, 1), 0.25))
    assert not IsTopologyEquivalent(ring, RingGraph(5))
    assert not IsTopologyEquivalent(RingGraph(4, 1), RingGraph(4, 2))
    assert IsTopologyEquivalent(ring, with_uniform_weights(ring))


def test_an_agent_without_edges_makes_a_difference():
    alone = RingGraph(4)
    alone.add_node(4)
    assert not IsTopologyEquivalent(RingGraph(4), alone)


def test_an_edge_of_weight_zero_is_not_the_same_as_no_edge():
    ring = RingGraph(4)
    wider = ring.copy()
    wider.add_edge(0, 2, weight=0.0)
    assert not IsTopologyEquivalent(ring, wider)


def test_none_is_equivalent_to_nothing():
    assert not IsTopologyEquivalent(None, RingGraph(3))
    assert not IsTopologyEquivalent(RingGraph(3), None)
    assert not IsTopologyEquivalent(None, None)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_exactly_the_circulant_graphs_are_regular(name):
    assert IsRegularGraph(CONSTRUCTORS[name](7)) == (name in CIRCULANT)


def test_a_directed_pair_is_not_regular_although_its_total_degrees_are_equal():
    assert not IsRegularGraph(nx.DiGraph([(0, 1)]))


def test_self_loops_do_not_decide_regularity():
    graph = RingGraph(4)
    graph.remove_edge(2, 2)
    assert IsRegularGraph(graph)


@few
@given(name=st.sampled_from(sorted(CONSTRUCTORS)), size=sizes, data=st.data())
def test_receive_and_send_weights_are_a_row_and_a_column_of_the_mixing_matrix(name, size, data):
    graph = CONSTRUCTORS[name](size)
    rank = data.draw(st.integers(0, size - 1))
    matrix = mixing_matrix(graph)
    for (self_weight, weights), line in (
        (GetRecvWeights(graph, rank), matrix[rank]),
        (GetSendWeights(graph, rank), matrix[:, rank]),
    ):
        assert list(weights) == sorted(weights)
        assert {rank: self_weight, **weights} == {int(peer): line[peer] for peer in np.flatnonzero(line)}


def test_receive_weights_do_not_depend_on_the_order_of_insertion():
    graph = nx.DiGraph()
    graph.add_nodes_from([2, 0, 1])
    graph.add_weighted_edges_from([(2, 0, 0.5), (1, 0, 0.25), (0, 0, 0.25), (2, 1, 1.0)])
    self_weight, received = GetRecvWeights(graph, 0)
    assert (self_weight, list(received.items())) == (0.25, [(1, 0.25), (2, 0.5)])
    self_weight, sent = GetSendWeights(graph, 2)
    assert (self_weight, list(sent.items())) == (0.0, [(0, 0.5), (1, 1.0)])


def test_an_edge_without_a_weight_counts_one():
    assert GetRecvWeights(nx.DiGraph([(1, 0), (0, 0)]), 0) == (1.0, {1: 1.0})


@pytest.mark.parametrize("function", [GetRecvWeights, GetSendWeights])
def test_weights_of_a_rank_outside_the_graph_are_refused(function):
    with pytest.raises(ValueError, match="rank 4 is out of range"):
        function(RingGraph(4), 4)


@pytest.mark.parametrize("function", [IsRegularGraph, lambda graph: IsTopologyEquivalent(graph, graph), mixing_matrix])
def test_invalid_graphs_are_refused(function):
    with pytest.raises(TypeError, match=r"must be a networkx.DiGraph, got ndarray"):
        function(np.eye(3))
    with pytest.raises(TypeError, match="MultiDiGraph"):
        function(nx.MultiDiGraph([(0, 1)]))
    with pytest.raises(ValueError, match="nodes must be the ranks 0 to 1"):
        function(nx.DiGraph([(1, 2)]))
    with pytest.raises(ValueError, match="nodes must be the ranks 0 to 1"):
        function(nx.DiGraph([("a", "b")]))
    with pytest.raises(ValueError, match="no nodes"):
        function(nx.DiGraph())


def with_reweighted_edge(graph, edge, weight):
    changed = graph.copy()
    changed.edges[edge]["weight"] = weight
    return changed
