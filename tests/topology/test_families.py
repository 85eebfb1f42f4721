"""Static families besides BlueFog's: lattices, trees, small worlds, D-Cliques, and circulants without networkx."""

from math import ceil, log2

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.topology import (
    ChainGraph,
    Circulant,
    DCliquesGraph,
    ExponentialGraph,
    ExponentialTwoGraph,
    HypercubeGraph,
    IsTopologyEquivalent,
    RingGraph,
    SmallWorldGraph,
    SpanningTreeGraph,
    SymmetricExponentialGraph,
    TorusGraph,
    TreeGraph,
    classify,
    find,
    label_cliques,
    spectral_gap,
)

few = settings(max_examples=30)

# 1 - ||W - J||_2 of ring, star, torus, static exponential graph and hypercube.
GAPS = {
    4: (0.667, 0.250, 0.667, 0.667, 0.667),
    8: (0.195, 0.125, 0.500, 0.500, 0.500),
    16: (0.0507, 0.0625, 0.400, 0.400, 0.400),
    25: (0.0209, 0.0400, 0.276, 0.489, None),
    32: (0.0128, 0.0312, 0.117, 0.333, 0.333),
    64: (0.0032, 0.0156, 0.117, 0.286, 0.286),
}


@pytest.mark.parametrize("size", GAPS)
def test_the_static_graphs_have_the_measured_gaps(size):
    names = ("ring", "star", "torus", "exponential", "hypercube")
    for name, gap in zip(names, GAPS[size], strict=True):
        if gap is None:
            assert find(name).refuses(size)
        else:
            measured = spectral_gap(find(name).schedule(size).matrix(0)).value
            assert measured == pytest.approx(gap, abs=5e-4 if gap > 0.1 else 5e-5), name


@pytest.mark.parametrize("size", range(1, 28))
def test_circulants_are_the_graphs_of_the_same_name(size):
    same = {
        find("ring"): RingGraph(size),
        find("exponential"): ExponentialTwoGraph(size),
        find("symmetric-exponential"): SymmetricExponentialGraph(size),
    }
    for topology, graph in same.items():
        assert IsTopologyEquivalent(topology.schedule(size).graph(0), graph), topology.name
    for style in (0, 1, 2):
        assert IsTopologyEquivalent(find("ring").schedule(size, connect_style=style).graph(0), RingGraph(size, style))
    for base in (3, 5):
        assert IsTopologyEquivalent(
            find("exponential").schedule(size, base=base).graph(0), ExponentialGraph(size, base)
        )


@given(st.integers(1, 9), st.dictionaries(st.integers(-20, 20), st.floats(-2, 2), min_size=1, max_size=6))
def test_a_circulant_receives_from_the_ranks_behind(size, shares):
    expected = np.zeros((size, size))
    for rank in range(size):
        for hop, share in shares.items():
            expected[rank, (rank - hop) % size] += share
    np.testing.assert_allclose(Circulant(size, shares).matrix(0), expected, rtol=0, atol=1e-14)


def test_circulants_are_distinguished_by_their_shares():
    one, same, other = Circulant(5, {0: 0.5, 1: 0.5}), Circulant(5, {6: 0.5, 0: 0.5}), Circulant(5, {0: 0.4, 1: 0.6})
    assert one.describe() == same.describe() != other.describe()


@pytest.mark.parametrize(
    ("name", "option", "match"), [("ring", "connect_style", "connect_style is 7"), ("exponential", "base", "base is 1")]
)
def test_bad_options_of_circulants_are_refused(name, option, match):
    with pytest.raises(ValueError, match=match):
        find(name).schedule(8, **{option: int(match[-1])})


def test_a_torus_wraps_around():
    graph = TorusGraph(12, shape=(3, 4))
    assert sorted(graph.successors(0)) == [0, 1, 3, 4, 8]
    assert sorted(graph.successors(7)) == [3, 4, 6, 7, 11]
    assert {weight for *_, weight in graph.edges(data="weight")} == {1 / 5}


@given(st.integers(3, 6), st.integers(3, 6))
@few
def test_a_torus_has_the_eigenvalues_of_its_two_rings(rows, columns):
    matrix = find("torus").make(rows * columns, shape=(rows, columns)).matrix(0)
    expected = [
        (1 + 2 * np.cos(2 * np.pi * row / rows) + 2 * np.cos(2 * np.pi * column / columns)) / 5
        for row in range(rows)
        for column in range(columns)
    ]
    np.testing.assert_allclose(np.linalg.eigvalsh(matrix), sorted(expected), rtol=0, atol=1e-12)


def test_a_torus_with_a_side_of_two_or_one_has_fewer_neighbours():
    assert IsTopologyEquivalent(TorusGraph(7, shape=(1, 7)), RingGraph(7))
    assert sorted(TorusGraph(8, shape=(2, 4)).successors(0)) == [0, 1, 3, 4]


@pytest.mark.parametrize("size", [2, 3, 7, 31])
def test_a_prime_number_has_no_default_torus(size):
    with pytest.raises(ValueError, match=f"{size} is prime. ring is what would come of it"):
        find("torus").schedule(size)


@pytest.mark.parametrize("dimensions", range(2, 7))
def test_a_hypercube_equals_networkxs(dimensions):
    bits = {place: int("".join(map(str, place)), base=2) for place in nx.hypercube_graph(dimensions)}
    remote = nx.relabel_nodes(nx.hypercube_graph(dimensions), bits).to_directed()
    graph = HypercubeGraph(2**dimensions)
    assert {(source, destination) for source, destination in graph.edges if source != destination} == set(remote.edges)
    assert spectral_gap(graph).value == pytest.approx(2 / (dimensions + 1))


@given(st.integers(1, 40), st.integers(1, 5))
@few
def test_trees_have_one_edge_less_than_agents(size, arity):
    for graph in (ChainGraph(size), TreeGraph(size, arity), SpanningTreeGraph(ExponentialTwoGraph(size))):
        undirected = nx.Graph(graph)
        undirected.remove_edges_from(list(nx.selfloop_edges(undirected)))
        assert nx.is_tree(undirected)
        assert classify(graph).doubly


@given(st.integers(2, 40), st.integers(1, 5))
@few
def test_the_parent_in_a_tree_is_computed_by_a_division(size, arity):
    graph = TreeGraph(size, arity)
    upwards = {(source, destination) for source, destination in graph.edges if source > destination}
    assert upwards == {(rank, (rank - 1) // arity) for rank in range(1, size)}


@pytest.mark.parametrize("size", [2, 9, 16, 33])
def test_a_spanning_tree_keeps_the_distances_to_its_root(size):
    graph = ExponentialTwoGraph(size)
    tree = SpanningTreeGraph(graph, root=size // 2)
    assert set(tree.edges) <= {(a, b) for a, b in graph.edges} | {(b, a) for a, b in graph.edges}
    ways = nx.single_source_shortest_path_length(tree, size // 2)
    assert ways == nx.single_source_shortest_path_length(graph.to_undirected(), size // 2)
    assert max(ways.values()) <= ceil(log2(size))


def test_there_is_no_tree_over_a_disconnected_graph():
    with pytest.raises(ValueError, match="no way leads from 0 to 2"):
        SpanningTreeGraph(nx.Graph([(0, 1), (2, 3)]))


@pytest.mark.parametrize(("size", "gap"), [(16, 0.150), (32, 0.086), (64, 0.054)])
def test_small_worlds_have_the_measured_gaps(size, gap):
    assert spectral_gap(SmallWorldGraph(size)).value == pytest.approx(gap, abs=5e-4)


@given(st.integers(1, 40), st.sampled_from([2, 4, 6]), st.floats(0, 1), st.integers(0, 2**32))
@few
def test_small_worlds_are_connected_and_keep_their_number_of_edges(size, degree, rewired, seed):
    graph = SmallWorldGraph(size, degree, rewired, seed)
    edges = sum(source < destination for source, destination in graph.edges)
    assert edges == (size * degree // 2 if size > degree + 1 else size * (size - 1) // 2)
    assert nx.is_strongly_connected(graph)
    assert IsTopologyEquivalent(graph, SmallWorldGraph(size, degree, rewired, seed))


def test_small_worlds_that_are_never_connected_are_refused(monkeypatch):
    def disconnected(size, *_, **__):
        return nx.empty_graph(size)

    monkeypatch.setattr("shoal.topology.families.graphs._draw", disconnected)
    with pytest.raises(ValueError, match="none of 100 small worlds of 12 agents was connected"):
        SmallWorldGraph(12)


def test_small_worlds_are_drawn_again_until_one_is_connected():
    """With degree two, most draws are disconnected."""
    for seed in range(20):
        assert nx.is_strongly_connected(SmallWorldGraph(10, degree=2, rewired=0.5, seed=seed))


def test_a_small_world_is_independent_of_library_versions():
    edges = sorted((a, b) for a, b in SmallWorldGraph(9, seed=7).edges if a < b)
    assert edges == [
        (0, 1),
        (0, 2),
        (0, 3),
        (0, 7),
        (1, 3),
        (1, 4),
        (1, 5),
        (1, 6),
        (1, 8),
        (2, 3),
        (2, 5),
        (2, 6),
        (3, 4),
        (3, 8),
        (4, 6),
        (5, 6),
        (6, 8),
        (7, 8),
    ]


def test_another_seed_makes_another_small_world():
    assert not IsTopologyEquivalent(SmallWorldGraph(20, seed=1), SmallWorldGraph(20, seed=2))


def test_a_small_world_without_rewiring_is_a_ring_lattice():
    graph = SmallWorldGraph(12, rewired=0.0)
    assert sorted(graph.successors(0)) == [0, 1, 2, 10, 11]


@pytest.mark.parametrize(("options", "match"), [({"degree": 3}, "degree is 3"), ({"rewired": 1.5}, "rewired is 1.5")])
def test_bad_small_worlds_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        SmallWorldGraph(12, **options)


def cross(graph, clique_size):
    return [(a, b) for a, b in graph.edges if a < b and a // clique_size != b // clique_size]


@pytest.mark.parametrize("between", ["full", "small-world"])
def test_d_cliques_of_a_thousand_agents_have_98_percent_fewer_edges(between):
    edges = sum(a < b for a, b in DCliquesGraph(1000, between=between).edges)
    assert 1 - edges / (1000 * 999 / 2) > 0.98


@pytest.mark.parametrize(("between", "expected"), [("ring", 12), ("full", 66)])
def test_d_cliques_have_one_edge_between_two_of_them(between, expected):
    graph = DCliquesGraph(60, 5, between)
    met = [(a // 5, b // 5) for a, b in cross(graph, 5)]
    assert len(met) == len(set(met)) == expected
    assert all(
        graph.has_edge(a, b)
        for clique in range(12)
        for a in range(5 * clique, 5 * clique + 5)
        for b in range(5 * clique, 5 * clique + 5)
    )


def test_a_small_world_of_cliques_has_a_logarithmic_number_of_edges_a_clique():
    graph = DCliquesGraph(640, 10)
    hops = {(b // 10 - a // 10) % 64 for a, b in cross(graph, 10)}
    assert hops == {way * (2**i + k) % 64 for i in range(6) for k in (0, 1) for way in (1, -1)}
    assert len(cross(graph, 10)) <= 64 * 4 * 6


@pytest.mark.parametrize("between", ["ring", "small-world", "full"])
def test_edges_between_cliques_are_distributed_among_their_agents(between):
    graph = DCliquesGraph(200, 10, between)
    load = np.zeros(200, dtype=int)
    for a, b in cross(graph, 10):
        load[[a, b]] += 1
    # An edge that two agents have twice counts once, so loads may differ by a little more than one.
    assert np.ptp(load.reshape(20, 10), axis=1).max() <= 3


@given(st.integers(1, 60), st.integers(1, 12), st.sampled_from(["ring", "small-world", "full"]))
@few
def test_d_cliques_are_connected_and_doubly_stochastic(size, clique_size, between):
    graph = DCliquesGraph(size, clique_size, between)
    assert nx.is_strongly_connected(graph)
    assert classify(graph).doubly


def skew(labels, clique):
    shares = labels / labels.sum(axis=1, keepdims=True)
    return np.abs(shares[clique].mean(axis=0) - shares.mean(axis=0)).sum()


def test_label_cliques_have_all_labels_if_every_agent_has_one():
    labels = np.repeat(np.eye(10), 10, axis=0)
    consecutive = [list(range(10 * clique, 10 * clique + 10)) for clique in range(10)]
    assert all(skew(labels, clique) == pytest.approx(1.8) for clique in consecutive)
    result = label_cliques(labels, 10, seed=1)
    assert sorted(len(clique) for clique in result) == [10] * 10
    assert sorted(rank for clique in result for rank in clique) == list(range(100))
    assert max(skew(labels, clique) for clique in result) == pytest.approx(0, abs=1e-12)
    assert nx.is_strongly_connected(DCliquesGraph(100, cliques=result))


@given(st.integers(2, 30), st.integers(1, 8), st.integers(0, 2**32))
@few
def test_swaps_never_increase_the_skew(size, clique_size, seed):
    labels = np.random.default_rng(seed).dirichlet([0.3] * 5, size)
    before = sum(skew(labels, clique) for clique in label_cliques(labels, clique_size, seed, tries=0))
    after = sum(skew(labels, clique) for clique in label_cliques(labels, clique_size, seed, tries=40))
    assert after <= before + 1e-12


def test_cliques_must_contain_every_agent_once():
    with pytest.raises(ValueError, match="ranks 0 to 3 exactly once"):
        DCliquesGraph(4, cliques=[[0, 1], [1, 2]])
    with pytest.raises(ValueError, match="full, ring, small-world"):
        DCliquesGraph(4, between="fractal")


@pytest.mark.parametrize("labels", [[[1.0, -1.0]], [[0.0, 0.0]], [1.0, 2.0], [[np.nan, 1.0]]])
def test_labels_are_counts(labels):
    with pytest.raises(ValueError, match="labels"):
        label_cliques(labels)
