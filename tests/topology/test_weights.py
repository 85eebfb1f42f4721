"""Mixing matrices and weights: the convention, the classification, and the paper's figure 2."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.topology import (
    ExponentialTwoGraph,
    FullyConnectedGraph,
    IsTopologyEquivalent,
    MeshGrid2DGraph,
    Mixing,
    RingGraph,
    StarGraph,
    Stochasticity,
    classify,
    mixing_matrix,
    spectral_gap,
    with_metropolis_hastings_weights,
    with_uniform_weights,
    with_weights,
)

few = settings(max_examples=60)

# The BlueFog paper's figure 2: node 5 there, rank 4 here, has N = {1, 2, 3, 4} and M = {1, 3}. The rest is ours.
FIGURE_TWO = nx.DiGraph([(0, 4), (1, 4), (2, 4), (3, 4), (4, 0), (4, 2), (0, 1), (2, 1), (2, 3)])


@st.composite
def digraphs(draw):
    size = draw(st.integers(1, 9))
    possible = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1))
    graph = nx.DiGraph()
    graph.add_nodes_from(draw(st.permutations(range(size))))
    graph.add_edges_from(draw(st.sets(possible)))
    return graph


def undirected(graph):
    return graph.to_undirected()


def push_weights(graph):
    """Every agent hands out equal shares: column j of W is 1 / (out-degree of j + 1)."""
    return mixing_matrix(with_uniform_weights(graph.reverse())).T


def test_entry_i_j_is_the_weight_of_the_edge_from_j_to_i():
    graph = nx.DiGraph()
    graph.add_nodes_from([1, 0])
    graph.add_edge(0, 1, weight=0.25)
    assert mixing_matrix(graph).tolist() == [[0.0, 0.0], [0.25, 0.0]]


@few
@given(graph=digraphs())
def test_matrix_is_the_transpose_of_networkxs_adjacency_matrix_in_rank_order(graph):
    assert np.array_equal(mixing_matrix(graph), nx.to_numpy_array(graph, nodelist=range(len(graph))).T)


@few
@given(graph=digraphs())
def test_uniform_weights_are_row_stochastic_and_alike_within_a_row(graph):
    weighted = with_uniform_weights(graph)
    kind = classify(weighted)
    assert kind.row
    assert kind.nonnegative
    for rank in graph:
        sources = {*graph.predecessors(rank), rank}
        assert {source: weighted.edges[source, rank]["weight"] for source in weighted.predecessors(rank)} == (
            dict.fromkeys(sources, 1.0 / len(sources))
        )


@few
@given(graph=digraphs().map(undirected))
def test_metropolis_hastings_weights_are_symmetric_and_doubly_stochastic_on_any_undirected_graph(graph):
    weighted = with_metropolis_hastings_weights(graph)
    matrix = mixing_matrix(weighted)
    assert np.array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0, rtol=0, atol=1e-15)
    assert (np.diag(matrix) > 0).all()
    degree = [len(set(graph[rank]) - {rank}) for rank in range(len(graph))]
    for i, j in graph.edges:
        if i != j:
            assert matrix[i, j] == 1.0 / (1 + max(degree[i], degree[j]))


def test_metropolis_hastings_weights_need_undirected_edges():
    with pytest.raises(ValueError, match=r"edge \(0, 1\) has no edge back. Add .* or use with_uniform_weights"):
        with_metropolis_hastings_weights(RingGraph(4, connect_style=2))


def test_weighting_does_not_change_the_input_graph():
    graph = nx.DiGraph([(0, 1), (1, 0)])
    with_uniform_weights(graph)
    with_metropolis_hastings_weights(graph)
    with_weights(graph, np.eye(2))
    assert list(graph.edges(data=True)) == [(0, 1, {}), (1, 0, {})]


@few
@given(graph=digraphs(), seed=st.integers(0, 2**32 - 1))
def test_explicit_weights_are_returned_as_the_mixing_matrix(graph, seed):
    support = nx.to_numpy_array(graph, nodelist=range(len(graph))).T + np.eye(len(graph)) > 0
    matrix = np.random.default_rng(seed).normal(size=support.shape) * support
    for described in (graph, support, support.astype(int)):
        weighted = with_weights(described, matrix)
        assert np.array_equal(mixing_matrix(weighted), matrix)
        assert set(weighted.edges) == {(int(j), int(i)) for i, j in np.argwhere(support)}


def test_an_edge_given_weight_zero_remains_an_edge():
    weighted = with_weights(RingGraph(3, connect_style=2), np.eye(3))
    assert set(weighted.edges) == set(RingGraph(3, connect_style=2).edges)


def test_a_matrix_is_its_own_support():
    ring = RingGraph(5)
    assert IsTopologyEquivalent(with_weights(mixing_matrix(ring), mixing_matrix(ring)), ring)


def test_a_weight_where_there_is_no_edge_is_refused():
    matrix = mixing_matrix(RingGraph(4, connect_style=2)).T
    with pytest.raises(ValueError, match=r"W\[0, 1\] = 0.5, but there is no edge \(1, 0\).*Is W transposed\?"):
        with_weights(RingGraph(4, connect_style=2), matrix)


def test_weights_of_another_size_are_refused():
    with pytest.raises(ValueError, match="W has 3 rows and the graph 4 nodes"):
        with_weights(RingGraph(4), np.eye(3))


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        ([[0.5, 0.5], [0.25, 0.75]], Stochasticity(row=True, column=False, symmetric=False, nonnegative=True)),
        ([[0.5, 0.25], [0.5, 0.75]], Stochasticity(row=False, column=True, symmetric=False, nonnegative=True)),
        ([[0.5, 0.5], [0.5, 0.5]], Stochasticity(row=True, column=True, symmetric=True, nonnegative=True)),
        ([[1.5, -0.5], [-0.5, 1.5]], Stochasticity(row=True, column=True, symmetric=True, nonnegative=False)),
        ([[1.0, 2.0], [2.0, 1.0]], Stochasticity(row=False, column=False, symmetric=True, nonnegative=True)),
        ([[0, 1, 0], [0, 0, 1], [1, 0, 0]], Stochasticity(row=True, column=True, symmetric=False, nonnegative=True)),
    ],
)
def test_classification_of_small_matrices(matrix, expected):
    assert classify(matrix) == expected
    assert classify(np.array(matrix)).doubly == (expected.row and expected.column)


def test_doubly_means_rows_and_columns():
    both, rows = classify(RingGraph(5)), classify(with_uniform_weights(StarGraph(5)))
    assert both.doubly
    assert rows.row
    assert not rows.doubly


def test_weights_rounded_to_float32_pass_the_default_tolerance_and_three_digits_do_not():
    rounded = mixing_matrix(RingGraph(7)).astype(np.float32)
    assert classify(rounded).doubly
    assert not classify(rounded, tolerance=1e-9).row
    assert not classify(np.full((3, 3), 0.333)).row
    assert classify(np.full((3, 3), 0.333), tolerance=0.01).doubly


@pytest.mark.parametrize("function", [classify, spectral_gap, lambda W: Mixing.from_matrix(W, 0)])
def test_invalid_weight_matrices_are_refused(function):
    with pytest.raises(ValueError, match=r"square, one row for each agent, got shape \(2, 3\)"):
        function(np.ones((2, 3)))
    with pytest.raises(ValueError, match="got shape"):
        function(np.ones((0, 0)))
    with pytest.raises(ValueError, match="got shape"):
        function(np.ones(4))
    with pytest.raises(ValueError, match=r"W\[1, 0\] is nan"):
        function([[1.0, 0.0], [float("nan"), 1.0]])
    with pytest.raises(TypeError, match="real entries, got dtype complex128"):
        function(np.eye(2) * 1j)


@pytest.mark.parametrize("weight", [None, "heavy", 0.5j, True])
def test_an_edge_whose_weight_is_no_real_number_is_refused(weight):
    graph = nx.DiGraph()
    graph.add_edge(0, 1, weight=weight)
    with pytest.raises(TypeError, match=r"the weight of edge \(0, 1\) must be a real number"):
        mixing_matrix(graph)


def test_an_edge_whose_weight_is_not_finite_is_refused():
    graph = nx.DiGraph()
    graph.add_edge(0, 1, weight=float("inf"))
    with pytest.raises(ValueError, match=r"the weight of edge \(0, 1\) is inf"):
        mixing_matrix(graph)


@pytest.mark.parametrize(
    ("constructor", "size", "gap"),
    [
        (RingGraph, 4, 0.667),
        (RingGraph, 16, 0.0507),
        (RingGraph, 64, 0.0032),
        (StarGraph, 8, 0.125),
        (StarGraph, 25, 0.0400),
        (ExponentialTwoGraph, 8, 0.500),
        (ExponentialTwoGraph, 16, 0.400),
        (ExponentialTwoGraph, 25, 0.489),
        (ExponentialTwoGraph, 64, 0.286),
    ],
)
def test_spectral_gap_equals_the_measured_one(constructor, size, gap):
    assert spectral_gap(constructor(size)).value == pytest.approx(gap, abs=5.1e-4 if gap > 0.1 else 5.1e-5)


@few
@given(size=st.integers(3, 60))
def test_spectral_gap_of_a_ring_is_its_closed_form(size):
    eigenvalues = [1 / 3 + 2 / 3 * np.cos(2 * np.pi * k / size) for k in range(1, size)]
    assert spectral_gap(RingGraph(size)).value == pytest.approx(1 - max(abs(value) for value in eigenvalues), abs=1e-12)


@few
@given(size=st.integers(2, 80))
def test_spectral_gap_of_the_exponential_graph_is_at_least_its_bound_with_equality_for_even_sizes(size):
    bound = 2 / (1 + (size - 1).bit_length())
    gap = spectral_gap(ExponentialTwoGraph(size)).value
    assert gap >= bound - 1e-12
    if size % 2 == 0:
        assert gap == pytest.approx(bound, abs=1e-12)


def test_full_averaging_has_gap_one_and_no_averaging_gap_zero():
    assert spectral_gap(FullyConnectedGraph(6)).value == pytest.approx(1.0, abs=1e-12)
    assert spectral_gap(np.eye(6)).value == pytest.approx(0.0, abs=1e-12)
    assert spectral_gap([[1.0]]).value == pytest.approx(1.0, abs=1e-12)


@few
@given(size=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
def test_one_round_shrinks_disagreement_by_the_spectral_gap(size, seed):
    matrix = mixing_matrix(MeshGrid2DGraph(size))
    x = np.random.default_rng(seed).normal(size=(size, 3))
    before, after = np.linalg.norm(x - x.mean(0)), np.linalg.norm(matrix @ x - x.mean(0))
    assert after <= (1 - spectral_gap(matrix).value) * before + 1e-12


def test_figure_two_has_the_neighbours_that_the_paper_names():
    mixing = Mixing.from_graph(FIGURE_TWO, 4, weighted=False)
    assert {rank + 1 for rank in mixing.source_ranks} == {1, 2, 3, 4}
    assert {rank + 1 for rank in mixing.destination_ranks} == {1, 3}


def test_figure_two_pull_and_push_matrices_are_of_their_kind_and_not_transposes():
    pull, push = mixing_matrix(with_uniform_weights(FIGURE_TWO)), push_weights(FIGURE_TWO)
    assert classify(pull) == Stochasticity(row=True, column=False, symmetric=False, nonnegative=True)
    assert classify(push) == Stochasticity(row=False, column=True, symmetric=False, nonnegative=True)
    assert np.array_equal(pull != 0, push != 0)
    assert not np.allclose(push, pull.T)


def test_figure_two_pull_preserves_consensus_and_push_preserves_the_sum():
    pull, push = mixing_matrix(with_uniform_weights(FIGURE_TWO)), push_weights(FIGURE_TWO)
    x = np.arange(5.0)
    np.testing.assert_allclose(pull @ np.ones(5), np.ones(5), rtol=0, atol=1e-15)
    assert (push @ x).sum() == pytest.approx(x.sum(), abs=1e-14)
    assert (pull @ x).sum() != pytest.approx(x.sum(), abs=1e-3)


def test_figure_two_mixes_by_edges_as_by_the_matrix():
    for matrix in (mixing_matrix(with_uniform_weights(FIGURE_TWO)), push_weights(FIGURE_TWO)):
        x = np.array([3.0, -1.0, 4.0, 1.0, -5.0])
        views = [Mixing.from_matrix(matrix, rank) for rank in range(5)]
        mixed = [
            view.self_weight * x[view.rank] + sum(weight * x[source] for source, weight in view.sources.items())
            for view in views
        ]
        np.testing.assert_allclose(mixed, matrix @ x, rtol=0, atol=1e-15)
