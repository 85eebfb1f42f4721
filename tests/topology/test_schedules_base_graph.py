"""Base-(k+1) graphs: the stated lengths, exactness for every number of agents, and never more peers than allowed."""

from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.topology import BaseGraph, HyperHypercube, OnePeerHypercube, SimpleBaseGraph
from support.topology_suite import product

FAMILIES = [BaseGraph, SimpleBaseGraph]

# Rounds of Base-2, Base-3, Base-4 and Base-5.
LENGTHS = {
    4: (2, 2, 1, 1),
    8: (3, 3, 2, 2),
    16: (4, 4, 2, 2),
    25: (9, 6, 5, 2),
    32: (5, 5, 3, 3),
    64: (6, 6, 3, 3),
}
BASE_2_LENGTHS = {3: 3, 5: 5, 6: 4, 7: 5, 9: 7, 12: 5, 24: 6, 100: 11}


def degrees(matrix):
    return ((matrix != 0) & ~np.eye(len(matrix), dtype=bool)).sum(axis=1)


@pytest.mark.parametrize("size", LENGTHS)
def test_base_graphs_have_the_lengths_of_the_authors(size):
    assert tuple(BaseGraph(size, peers).period for peers in (1, 2, 3, 4)) == LENGTHS[size]


@pytest.mark.parametrize("size", BASE_2_LENGTHS)
def test_base_2_graphs_have_the_lengths_of_the_authors(size):
    assert BaseGraph(size).period == BASE_2_LENGTHS[size]


@pytest.mark.parametrize("peers", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_base_graphs_are_exact_for_every_number_of_agents(family, peers):
    for size in range(1, 41):
        error = np.abs(product(family(size, peers)) - 1 / size).max()
        assert error < 2e-16, (size, error)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40)
@given(st.integers(1, 90), st.integers(1, 6))
def test_rounds_are_symmetric_averages_of_at_most_k_peers(family, size, peers):
    schedule = family(size, peers)
    for round in range(schedule.period):
        matrix = schedule.matrix(round)
        np.testing.assert_array_equal(matrix, matrix.T)
        assert matrix.min() >= 0
        assert np.diag(matrix).min() > 0
        assert degrees(matrix).max() <= peers


@given(st.integers(2, 3000), st.integers(1, 6))
@settings(max_examples=30)
def test_the_length_is_bounded_by_the_papers_theorem(size, peers):
    simple, base = SimpleBaseGraph(size, peers).period, BaseGraph(size, peers).period
    assert base <= simple <= 2 * log(size, peers + 1) + 2 + 1e-9


def test_one_round_less_is_not_exact():
    for size in (3, 5, 7, 12, 25):
        schedule = BaseGraph(size)
        assert np.abs(product(schedule, schedule.period - 1) - 1 / size).max() > 1e-3


def test_every_agent_takes_part_once_there_are_enough_peers():
    assert BaseGraph(7, peers=6).period == 1
    np.testing.assert_allclose(BaseGraph(7, peers=6).matrix(0), 1 / 7, atol=1e-16)


@pytest.mark.parametrize(
    ("size", "peers", "rounds"), [(12, 2, 3), (27, 2, 3), (36, 5, 2), (30, 4, 3), (1, 1, 1), (64, 7, 2)]
)
def test_a_hyper_hypercube_takes_as_many_rounds_as_there_are_factors(size, peers, rounds):
    schedule = HyperHypercube(size, peers)
    assert schedule.period == rounds
    np.testing.assert_allclose(product(schedule), 1 / size, atol=1e-16)


@pytest.mark.parametrize("size", [1, 2, 8, 32])
def test_a_hyper_hypercube_of_one_peer_is_the_one_peer_hypercube(size):
    results = {HyperHypercube(size, peers=1).matrix(round).tobytes() for round in range(6)}
    assert results == {OnePeerHypercube(size).matrix(round).tobytes() for round in range(6)}


@pytest.mark.parametrize(("size", "peers", "factor"), [(10, 2, 5), (7, 1, 7), (22, 4, 11), (35, 2, 35)])
def test_a_hyper_hypercube_refuses_large_prime_factors(size, peers, factor):
    with pytest.raises(ValueError, match=f"{size} has the factor {factor}"):
        HyperHypercube(size, peers)


@pytest.mark.parametrize("family", [*FAMILIES, HyperHypercube])
def test_at_least_one_peer_is_needed(family):
    with pytest.raises(ValueError, match="peers must be at least 1"):
        family(8, 0)
