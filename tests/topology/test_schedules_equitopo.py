"""EquiTopo: the basis matrices, connected draws, and pairs that are as many as can be."""

from math import gcd

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.topology import DEquiStatic, ODEquiDyn, OUEquiDyn, UEquiStatic, _random, spectral_gap

few = settings(max_examples=40)
sizes = st.integers(2, 30)
seeds = st.integers(0, 2**32)


def basis(size, shift):
    """A(u): everybody takes 1/n of itself and the rest of the one u behind."""
    return np.eye(size) / size + (size - 1) / size * np.roll(np.eye(size), shift, axis=0)


def test_the_mean_of_all_basis_matrices_is_the_exact_average():
    mean = np.mean([basis(9, shift) for shift in range(1, 9)], axis=0)
    np.testing.assert_allclose(mean, 1 / 9, atol=1e-16)


@few
@given(sizes, st.integers(1, 6), seeds)
def test_the_static_graphs_are_means_of_basis_matrices(size, degree, seed):
    directed, undirected = DEquiStatic(size, degree, seed), UEquiStatic(size, degree, seed)
    assert len(directed.shifts) == degree
    assert directed.shifts == undirected.shifts
    mean = np.mean([basis(size, shift) for shift in directed.shifts], axis=0)
    np.testing.assert_allclose(directed.matrix(0), mean, atol=1e-15)
    np.testing.assert_allclose(undirected.matrix(0), (mean + mean.T) / 2, atol=1e-15)


@few
@given(st.integers(1, 40), st.integers(1, 3), seeds)
def test_static_draws_are_connected_with_any_number_of_shifts(size, degree, seed):
    for family in (DEquiStatic, UEquiStatic):
        schedule = family(size, degree, seed)
        assert nx.is_strongly_connected(schedule.graph(0))
        assert spectral_gap(schedule.matrix(0)).value > 1e-6 or size == 1


def test_a_draw_that_is_not_connected_is_repeated():
    size, degree = 16, 2
    first = {seed: (1 + _random.below(size - 1, seed, 0, degree)).tolist() for seed in range(50)}
    apart = [seed for seed, shifts in first.items() if gcd(size, *shifts) > 1]
    assert len(apart) > 5
    for seed, shifts in first.items():
        assert (list(DEquiStatic(size, degree, seed).shifts) == shifts) == (seed not in apart)


def test_the_degree_is_the_logarithm_by_default():
    assert [DEquiStatic(size).degree for size in (1, 2, 3, 16, 17)] == [1, 1, 2, 4, 5]


@few
@given(sizes, st.floats(0.01, 1), seeds, st.integers(0, 10**6))
def test_the_directed_one_peer_graph_is_a_damped_basis_matrix(size, eta, seed, round):
    matrix = ODEquiDyn(size, eta, seed).matrix(round)
    shift = int(np.argmax(np.where(np.arange(size) > 0, matrix[:, 0], -1)))
    expected = (1 - eta) * np.eye(size) + eta * basis(size, shift)
    np.testing.assert_allclose(matrix, expected, atol=1e-15)


def test_every_shift_is_drawn_equally_often():
    schedule, rounds = ODEquiDyn(8, seed=4), 1400
    shifts = [int(schedule.mixing(round, 0).source_ranks[0]) for round in range(rounds)]
    assert sorted(set(shifts)) == list(range(1, 8))
    for shift in range(1, 8):
        assert abs(shifts.count(shift) - rounds / 7) < 5 * np.sqrt(rounds / 7)


def paired_as_the_paper_does(size, shift, first):
    matrix, used = np.eye(size), set()
    for rank in [*range(first, size), *range(first)]:
        ahead = (rank + shift) % size
        if rank not in used and ahead not in used:
            used |= {rank, ahead}
            matrix[[rank, ahead, rank, ahead], [rank, ahead, ahead, rank]] = [0, 0, 1, 1]
    return np.eye(size) / size + (size - 1) / size * matrix


@few
@given(sizes, st.floats(0.01, 1), seeds, st.integers(0, 10**6))
def test_the_undirected_one_peer_graph_pairs_as_the_paper_does(size, eta, seed, round):
    matrix = OUEquiDyn(size, eta, seed).matrix(round)
    possible = (
        (1 - eta) * np.eye(size) + eta * paired_as_the_paper_does(size, shift, first)
        for shift in range(1, size)
        for first in range(size)
    )
    assert any(np.allclose(matrix, candidate, rtol=0, atol=1e-15) for candidate in possible)


@few
@given(st.integers(2, 60), seeds, st.integers(0, 10**6))
def test_a_matching_is_maximal(size, seed, round):
    views = [OUEquiDyn(size, seed=seed).mixing(round, rank) for rank in range(size)]
    apart = {(view.source_ranks[0] - view.rank) % size for view in views if view.source_ranks}
    assert apart in ({hop, size - hop} for hop in range(1, size))
    out = {view.rank for view in views if not view.source_ranks}
    assert not any((rank + hop) % size in out for rank in out for hop in apart)


@pytest.mark.parametrize("eta", [0, -0.5, 1.5])
@pytest.mark.parametrize("family", [ODEquiDyn, OUEquiDyn])
def test_eta_out_of_range_is_refused(family, eta):
    with pytest.raises(ValueError, match="eta is"):
        family(8, eta)
