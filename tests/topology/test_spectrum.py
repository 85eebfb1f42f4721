"""Gaps and eigenvalues: the ways to find them agree, stated errors are honest, and the text says what is known."""

from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.topology import (
    Alternating,
    ChainGraph,
    Circulant,
    Estimate,
    Idle,
    OnePeerExponential,
    RandomMatchings,
    RingGraph,
    Schedule,
    Static,
    Torus,
    find,
    gap_over_period,
    mixing_matrix,
    smallest_eigenvalue,
    spectral_gap,
    with_metropolis_hastings_weights,
    with_uniform_weights,
)
from support.topology_suite import product

few = settings(max_examples=40)


def dense_gap(matrix: np.ndarray) -> float:
    return float(1 - np.linalg.norm(matrix - 1 / len(matrix), 2))


@st.composite
def undirected(draw, largest: int = 24) -> nx.Graph:
    size = draw(st.integers(2, largest))
    return nx.gnp_random_graph(size, draw(st.floats(0.1, 0.9)), seed=draw(st.integers(0, 10_000)))


@st.composite
def directed(draw) -> nx.DiGraph:
    size = draw(st.integers(2, 14))
    return nx.gnp_random_graph(size, draw(st.floats(0.1, 0.9)), seed=draw(st.integers(0, 10_000)), directed=True)


@pytest.fixture
def by_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decomposed: neither by a Fourier transform nor as a matrix."""
    monkeypatch.setattr("shoal.topology.analysis.spectrum.DENSE_LIMIT", 0)
    monkeypatch.setattr("shoal.topology.analysis.spectrum.find_invariance", lambda span: None)


@few
@given(graph=st.one_of(undirected(), directed()))
def test_matrix_graph_and_schedule_have_one_gap(graph: nx.Graph) -> None:
    weighted = with_uniform_weights(graph)
    expected = dense_gap(mixing_matrix(weighted))
    for topology in (weighted, mixing_matrix(weighted), mixing_matrix(weighted).tolist(), Static(weighted)):
        assert spectral_gap(topology).value == pytest.approx(expected, abs=1e-12)


@few
@given(st.integers(1, 40), st.dictionaries(st.integers(-20, 20), st.floats(-1, 1), min_size=1, max_size=5))
def test_the_fourier_transform_finds_the_gap_of_every_circulant(size: int, shares: dict[int, float]) -> None:
    result = spectral_gap(Circulant(size, shares))
    assert result.method == "fourier"
    assert result.value == pytest.approx(dense_gap(Circulant(size, shares).matrix(0)), abs=1e-11)


@pytest.mark.parametrize("shape", [(3, 4), (2, 7), (5, 5)])
def test_a_torus_is_transformed_in_two_dimensions(shape: tuple[int, int]) -> None:
    torus = Torus(shape[0] * shape[1], shape)
    result = smallest_eigenvalue(torus)
    assert result.method == "fourier"
    assert result.value == pytest.approx(np.linalg.eigvalsh(torus.matrix(0))[0], abs=1e-12)


def test_the_torus_shape_that_matches_the_weights_is_transformed() -> None:
    """All agents are connected, so the edges fit every shape. The weights depend on the bits in which ranks differ."""
    ranks, weights = np.arange(32), np.random.default_rng(0).dirichlet(np.ones(32))
    matrix = weights[ranks[:, None] ^ ranks]
    result = spectral_gap(matrix)
    assert result.method == "fourier"
    assert result.value == pytest.approx(dense_gap(matrix), abs=1e-12)


@pytest.mark.usefixtures("by_iteration")
def test_an_iteration_is_within_its_stated_error() -> None:
    @settings(max_examples=80)
    @given(graph=undirected(), share=st.sampled_from([1.0, 1.6]))
    # The start has almost nothing of the largest eigenvalue; or the two largest are 7e-5 apart.
    @example(graph=nx.gnp_random_graph(19, 0.9, seed=6626), share=1.0)
    @example(graph=nx.gnp_random_graph(16, 0.9, seed=3796), share=1.0)
    def holds(graph: nx.Graph, share: float) -> None:
        # More than all of a step makes negative eigenvalues the largest.
        matrix = (1 - share) * np.eye(len(graph)) + share * mixing_matrix(with_metropolis_hastings_weights(graph))
        gap, smallest = spectral_gap(matrix), smallest_eigenvalue(matrix)
        assert gap.method == smallest.method == "iterative"
        assert dense_gap(matrix) == pytest.approx(gap.value, abs=gap.error + 1e-12)
        assert np.linalg.eigvalsh(matrix)[0] == pytest.approx(smallest.value, abs=smallest.error + 1e-12)
        # Both come from a vector in hand, which no better one can contradict but from one side.
        assert dense_gap(matrix) <= gap.value + 1e-12
        assert np.linalg.eigvalsh(matrix)[0] <= smallest.value + 1e-12

    holds()


@pytest.mark.usefixtures("by_iteration")
def test_an_iteration_over_a_directed_graph_or_many_rounds_is_within_its_stated_error() -> None:
    @settings(max_examples=40)
    @given(graph=directed())
    def holds(graph: nx.DiGraph) -> None:
        weighted = with_uniform_weights(graph)
        turns = Alternating([Static(weighted), OnePeerExponential(len(graph))])
        for gap, matrix in (
            (spectral_gap(weighted), mixing_matrix(weighted)),
            (gap_over_period(turns), product(turns)),
        ):
            assert gap.method == "iterative"
            assert dense_gap(matrix) == pytest.approx(gap.value, abs=gap.error + 1e-9)
            assert dense_gap(matrix) <= gap.value + 1e-9

    holds()


@pytest.mark.parametrize("size", [600, 3000])
def test_a_gap_near_a_millionth_is_bounded_and_not_guessed(size: int) -> None:
    """Of a ring without one edge, whose eigenvalues are (1 + 2 cos(pi k / n)) / 3."""
    truth = 2 / 3 * (1 - np.cos(np.pi / size))
    result = spectral_gap(ChainGraph(size))
    assert result.method == "iterative"
    assert truth <= result.value + 1e-12
    assert result.value - truth <= result.error < 0.01 * truth


def test_the_gap_of_a_large_ring_is_exact_by_its_transform() -> None:
    size = 100_000
    result = spectral_gap(find("ring").schedule(size))
    assert result.value == pytest.approx(4 / 3 * np.sin(np.pi / size) ** 2, abs=result.error)
    assert result.error < 1e-12


@few
@given(rounds=st.integers(1, 6), size=st.integers(2, 12), seed=st.integers(0, 99))
def test_the_gap_over_rounds_is_that_of_their_product(rounds: int, size: int, seed: int) -> None:
    schedule = RandomMatchings(size, seed)
    expected = dense_gap(product(schedule, rounds))
    assert gap_over_period(schedule, rounds).value == pytest.approx(expected, abs=1e-12)


def test_rounds_with_small_gaps_have_a_joint_gap_of_one_if_they_average_exactly() -> None:
    schedule = OnePeerExponential(16)
    assert gap_over_period(schedule).value == pytest.approx(1.0, abs=1e-12)
    assert spectral_gap(schedule, round=0).value == pytest.approx(1 - np.cos(np.pi / 16), abs=1e-12)


def test_the_gap_of_a_later_round_is_of_that_round() -> None:
    turns = Alternating([Idle(6), Static(RingGraph(6))])
    assert spectral_gap(turns, round=0).value == pytest.approx(0.0, abs=1e-12)
    assert spectral_gap(turns, round=1).value == pytest.approx(dense_gap(mixing_matrix(RingGraph(6))), abs=1e-12)


def test_a_nonperiodic_schedule_has_no_gap_over_a_period() -> None:
    with pytest.raises(
        ValueError, match=r"random matchings of 8 agents.* never repeats\. Pass the number of rounds of the gap"
    ):
        gap_over_period(RandomMatchings(8))


class LongPeriod(Idle):
    """Repeats after more rounds than anybody looks at."""

    period = 100_000


def test_a_period_too_long_for_memory_has_no_gap() -> None:
    with pytest.raises(ValueError, match="repeats after 100000 rounds, which are too many"):
        gap_over_period(LongPeriod(4))
    with pytest.raises(ValueError, match="of 5000 rounds of 4 agents only 4096 can be held"):
        gap_over_period(LongPeriod(4), 5000)


@pytest.mark.parametrize("ask", [spectral_gap, smallest_eigenvalue])
def test_a_round_before_the_first_is_refused(ask) -> None:
    with pytest.raises(ValueError, match="round -1 is negative"):
        ask(RingGraph(4), round=-1)


def test_weights_that_are_not_symmetric_have_no_smallest_eigenvalue() -> None:
    with pytest.raises(ValueError, match="weights that are not symmetric"):
        smallest_eigenvalue(OnePeerExponential(8))


@pytest.mark.parametrize("given", ["ring", None, 3])
def test_invalid_topologies_are_refused(given: object) -> None:
    with pytest.raises(TypeError, match=r"must be a networkx\.DiGraph"):
        spectral_gap(given)


def test_alternating_agents_have_the_eigenvalue_minus_one() -> None:
    swap = np.array([[0.0, 1.0], [1.0, 0.0]])
    assert smallest_eigenvalue(swap).value == pytest.approx(-1.0, abs=1e-12)
    assert spectral_gap(swap).value == pytest.approx(0.0, abs=1e-12)


def test_a_matrix_of_zeros_has_no_gap() -> None:
    assert spectral_gap(np.zeros((3, 3))).value == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("estimate", "text"),
    [
        (Estimate(0.05074, 1e-14, "fourier"), "0.0507"),
        (Estimate(3e-17, 1e-14, "dense"), "0"),
        (Estimate(-1 / 3, 1e-15, "dense"), "-0.333"),
        (Estimate(2.761e-6, 9.6e-7, "iterative"), "2.76e-06 ± 1e-06"),
        (Estimate(7e-7, 8e-7, "iterative"), "below 1e-6"),
        (Estimate(2e-4, 1.0, "iterative"), "below 1e-3"),
        (Estimate(-0.25, 1e-3, "iterative"), "-0.25 ± 0.001"),
        (Estimate(-0.25, 0.5, "iterative"), "-0.25 ± 0.5"),
    ],
)
def test_an_estimate_states_what_is_known(estimate: Estimate, text: str) -> None:
    assert str(estimate) == text
    assert float(estimate) == estimate.value


def test_an_interrupted_iteration_gives_an_upper_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.topology.analysis.spectrum._MOST_STEPS", 60)
    result = spectral_gap(ChainGraph(5_000))
    assert 0 < 2 / 3 * (1 - np.cos(np.pi / 5_000)) < result.value < result.error
    assert str(result) in ("below 1e-3", "below 1e-4")


def test_every_schedule_of_the_catalog_has_the_gap_of_its_matrices() -> None:
    for name in ("hierarchical", "gossip-pga", "base-3", "inner-outer-ring", "d-equi-static", "matcha"):
        schedule: Schedule = find(name).schedule(24)
        rounds = schedule.period or 3
        expected = dense_gap(product(schedule, rounds))
        assert gap_over_period(schedule, rounds).value == pytest.approx(expected, abs=1e-11), name


@pytest.mark.usefixtures("by_iteration")
def test_an_iteration_does_not_stop_while_one_direction_is_not_averaged() -> None:
    size = 40
    u, v = np.zeros(size), np.zeros(size)
    u[[0, 1]], v[[2, 3]] = (1, -1), (1, -1)
    result = spectral_gap(np.full((size, size), 1 / size) + 0.015 * np.outer(u, v))
    assert result.method == "iterative"
    assert result.value == pytest.approx(0.97, abs=result.error + 1e-12)
    assert result.error < 1e-3


def test_weights_may_be_fractions() -> None:
    """As mixing_matrix takes them."""
    graph = nx.DiGraph([(0, 1), (1, 0), (0, 0), (1, 1)])
    nx.set_edge_attributes(graph, Fraction(1, 2), "weight")
    assert spectral_gap(graph).value == 1
