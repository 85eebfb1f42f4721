"""Mixing: what it accepts, what it refuses, and that it cannot change."""

import copy
import dataclasses
import pickle
from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.topology import ExponentialTwoGraph, MeshGrid2DGraph, Mixing, RingGraph, StarGraph, mixing_matrix

few = settings(max_examples=60)
finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def mixing_arguments(draw):
    size = draw(st.integers(1, 12))
    rank = draw(st.integers(0, size - 1))
    others = [peer for peer in range(size) if peer != rank]
    weights = st.dictionaries(st.sampled_from(others), finite) if others else st.just({})
    return size, rank, draw(finite), draw(weights), draw(weights)


@few
@given(arguments=mixing_arguments())
def test_sources_and_destinations_are_kept_in_ascending_order(arguments):
    size, rank, self_weight, sources, destinations = arguments
    mixing = Mixing(rank, self_weight, sources, destinations, size=size)
    assert (mixing.rank, mixing.self_weight) == (rank, self_weight)
    assert list(mixing.sources.items()) == sorted(sources.items())
    assert list(mixing.destinations.items()) == sorted(destinations.items())
    assert mixing.source_ranks == tuple(mixing.sources)
    assert mixing.source_weights == tuple(mixing.sources.values())
    assert mixing.destination_ranks == tuple(mixing.destinations)
    assert mixing.destination_weights == tuple(mixing.destinations.values())


@few
@given(arguments=mixing_arguments())
def test_equal_arguments_in_any_order_give_equal_mixings_with_equal_hashes(arguments):
    size, rank, self_weight, sources, destinations = arguments
    mixing = Mixing(rank, self_weight, sources, destinations, size=size)
    other = Mixing(rank, self_weight, dict(reversed(sources.items())), dict(reversed(destinations.items())))
    assert mixing == other
    assert hash(mixing) == hash(other)


@few
@given(arguments=mixing_arguments())
def test_copying_and_pickling_give_an_equal_mixing(arguments):
    mixing = Mixing(*arguments[1:])
    assert pickle.loads(pickle.dumps(mixing)) == mixing
    assert copy.deepcopy(mixing) == mixing
    assert copy.copy(mixing) == mixing


@few
@given(arguments=mixing_arguments())
def test_rotated_destinations_start_with_the_next_rank(arguments):
    size, rank = arguments[:2]
    mixing = Mixing(*arguments[1:], size=size)
    walk = [(rank + step) % size for step in range(1, size)]
    assert list(mixing.rotated_destinations(size)) == [peer for peer in walk if peer in mixing.destinations]


def test_mixings_that_differ_in_any_field_are_unequal():
    mixing = Mixing(0, 0.5, {1: 0.5}, {2: 1.0})
    different = [
        Mixing(3, 0.5, {1: 0.5}, {2: 1.0}),
        Mixing(0, 0.25, {1: 0.5}, {2: 1.0}),
        Mixing(0, 0.5, {1: 0.25}, {2: 1.0}),
        Mixing(0, 0.5, {3: 0.5}, {2: 1.0}),
        Mixing(0, 0.5, {1: 0.5}, {2: 0.5}),
        Mixing(0, 0.5, {1: 0.5}, {3: 1.0}),
        Mixing(0, 0.5, {1: 0.5}),
    ]
    assert all(mixing != other for other in different)
    assert len({mixing, *different}) == 8


def test_no_attribute_can_be_set_or_deleted():
    mixing = Mixing(0, 0.5, {1: 0.5}, [2])
    for name in [field.name for field in dataclasses.fields(mixing)]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(mixing, name, getattr(mixing, name))
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(mixing, name)


def test_mappings_are_read_only():
    mixing = Mixing(0, 0.5, {1: 0.5}, {2: 1.0})
    for mapping in (mixing.sources, mixing.destinations):
        with pytest.raises(TypeError):
            mapping[1] = 0.0
        with pytest.raises(AttributeError):
            mapping.clear()  # type: ignore[attr-defined]


def test_later_changes_of_the_arguments_have_no_effect():
    sources, destinations = {1: 0.5}, {2: 1.0}
    mixing = Mixing(0, 0.5, sources, destinations)
    sources[1], destinations[3] = 7.0, 1.0
    assert mixing == Mixing(0, 0.5, {1: 0.5}, {2: 1.0})


def test_replacing_a_field_validates_again():
    mixing = Mixing(0, 0.5, {1: 0.5}, {2: 1.0})
    assert dataclasses.replace(mixing, self_weight=0.25).self_weight == 0.25
    assert dataclasses.replace(mixing, sources={3: 0.5}).source_ranks == (3,)
    with pytest.raises(ValueError, match="the agent itself"):
        dataclasses.replace(mixing, rank=1)


def test_a_list_of_ranks_means_weight_one():
    assert Mixing(0, 0.5, [2, 1], (3,)) == Mixing(0, 0.5, {1: 1.0, 2: 1.0}, {3: 1.0})


@pytest.mark.parametrize("weight", [1, np.float32(0.5), np.float64(0.5), np.int64(2), np.float16(0.5), Fraction(1, 4)])
def test_any_real_number_is_a_weight_and_becomes_a_float(weight):
    mixing = Mixing(0, weight, {1: weight}, {1: weight})
    for kept in (mixing.self_weight, mixing.sources[1], mixing.destination_weights[0]):
        assert type(kept) is float
        assert kept == weight


def test_numpy_ranks_become_ints():
    mixing = Mixing(np.int64(0), 0.5, {np.int32(1): 0.5}, [np.uint8(2)], size=np.int64(3))
    assert mixing == Mixing(0, 0.5, {1: 0.5}, [2])
    assert {type(rank) for rank in (mixing.rank, *mixing.source_ranks, *mixing.destination_ranks)} == {int}


def test_negative_weights_and_weights_above_one_are_kept_as_they_are():
    mixing = Mixing(0, 1.5, {1: -0.5}, {1: -2.0})
    assert (mixing.self_weight, mixing.sources[1], mixing.destinations[1]) == (1.5, -0.5, -2.0)


@pytest.mark.parametrize("rank", [True, 1.0, "1", None])
def test_a_rank_that_is_no_int_is_refused(rank):
    with pytest.raises(TypeError, match="rank must be an int"):
        Mixing(rank, 0.5)
    with pytest.raises(TypeError, match="source must be an int"):
        Mixing(0, 0.5, {rank: 0.5})
    with pytest.raises(TypeError, match="destination must be an int"):
        Mixing(0, 0.5, {}, [rank])


@pytest.mark.parametrize("weight", [True, "0.5", None, 0.5j, np.bool_(True), np.array([0.5])])
def test_a_weight_that_is_no_real_number_is_refused(weight):
    with pytest.raises(TypeError, match="weight of self_weight must be a real number"):
        Mixing(0, weight)
    with pytest.raises(TypeError, match="weight of source 1 must be a real number"):
        Mixing(0, 0.5, {1: weight})
    with pytest.raises(TypeError, match="weight of destination 1 must be a real number"):
        Mixing(0, 0.5, {}, {1: weight})


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -float("inf"), np.float32("nan"), 10**400])
def test_a_weight_that_is_not_finite_is_refused(weight):
    with pytest.raises(ValueError, match="weight of self_weight is"):
        Mixing(0, weight)
    with pytest.raises(ValueError, match="weight of source 1 is"):
        Mixing(0, 0.5, {1: weight})
    with pytest.raises(ValueError, match="weight of destination 1 is"):
        Mixing(0, 0.5, {}, {1: weight})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Mixing(-1, 0.5), "rank -1 is negative"),
        (lambda: Mixing(4, 0.5, size=4), "rank 4 is out of range. With 4 agents, pass one of 0 to 3"),
        (lambda: Mixing(0, 0.5, {-1: 0.5}), "source -1 is negative"),
        (lambda: Mixing(0, 0.5, {4: 0.5}, size=4), "source 4 is out of range"),
        (lambda: Mixing(0, 0.5, {}, [-2]), "destination -2 is negative"),
        (lambda: Mixing(0, 0.5, {}, [4], size=4), "destination 4 is out of range"),
        (lambda: Mixing(1, 0.5, {1: 0.5}), "source 1 is the agent itself. Leave it out"),
        (lambda: Mixing(1, 0.5, {}, [1]), "destination 1 is the agent itself"),
        (lambda: Mixing(1, 0.5, {}, [2, 0, 2]), "destination 2 of agent 1 is named twice"),
        (lambda: Mixing(1, 0.5, [3, 3]), "source 3 of agent 1 is named twice"),
        (lambda: Mixing(1, 0.5, {}, [3]).rotated_destinations(3), "names rank 3, but size is 3"),
        (lambda: Mixing(5, 0.5, {}, [3]).rotated_destinations(4), "names rank 5, but size is 4"),
    ],
)
def test_an_impossible_rank_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@few
@given(
    graph=st.builds(
        lambda make, size: make(size),
        st.sampled_from([ExponentialTwoGraph, MeshGrid2DGraph, StarGraph, RingGraph]),
        st.integers(1, 17),
    )
)
def test_the_views_of_a_graph_are_those_of_its_matrix_and_rebuild_the_matrix(graph):
    matrix = mixing_matrix(graph)
    rebuilt = np.zeros_like(matrix)
    for rank in range(len(graph)):
        mixing = Mixing.from_graph(graph, rank)
        assert mixing == Mixing.from_matrix(matrix, rank)
        rebuilt[rank, rank] = mixing.self_weight
        rebuilt[rank, list(mixing.source_ranks)] = mixing.source_weights
        assert set(mixing.destinations.values()) <= {1.0}
        for destination in mixing.destinations:
            assert rank in Mixing.from_graph(graph, destination).sources
    assert np.array_equal(rebuilt, matrix)


def test_an_unweighted_view_averages_itself_and_its_sources_equally():
    assert Mixing.from_graph(StarGraph(4), 0, weighted=False) == Mixing(
        0, 0.25, dict.fromkeys([1, 2, 3], 0.25), [1, 2, 3]
    )
    assert Mixing.from_graph(StarGraph(4), 2, weighted=False) == Mixing(2, 0.5, {0: 0.5}, [0])


def test_an_edge_of_weight_zero_is_still_a_source_in_the_view_of_a_graph():
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(0, 0, 1.0), (1, 1, 1.0), (1, 0, 0.0)])
    assert Mixing.from_graph(graph, 0).sources == {1: 0.0}
    assert Mixing.from_graph(graph, 1).destinations == {0: 1.0}


def test_a_graph_without_self_loop_gives_self_weight_zero():
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(1, 0, 1.0), (0, 1, 1.0)])
    assert Mixing.from_graph(graph, 0) == Mixing(0, 0.0, {1: 1.0}, [1])


def test_the_view_of_a_matrix_reads_sources_from_the_row_and_destinations_from_the_column():
    matrix = [[0.5, 0.0, 0.5], [0.25, 0.75, 0.0], [0.0, 0.0, 1.0]]
    assert Mixing.from_matrix(matrix, 0) == Mixing(0, 0.5, {2: 0.5}, [1])


@pytest.mark.parametrize(
    "make", [Mixing.from_graph, lambda graph, rank: Mixing.from_matrix(mixing_matrix(graph), rank)]
)
def test_the_view_of_a_rank_outside_is_refused(make):
    with pytest.raises(ValueError, match="rank 5 is out of range"):
        make(RingGraph(5), 5)


def test_repr_is_the_call_that_creates_it():
    mixing = Mixing(4, 0.5, {2: 0.25, 1: 0.25}, {0: 1.0})
    assert repr(mixing) == "Mixing(rank=4, self_weight=0.5, sources={1: 0.25, 2: 0.25}, destinations={0: 1.0})"
    assert eval(repr(mixing)) == mixing
