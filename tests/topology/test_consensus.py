"""Rounds to a consensus error and exact lengths, by every method, against simulated rounds."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.topology import (
    CATALOG,
    AllReduce,
    Alternating,
    ChainGraph,
    Circulant,
    Idle,
    OnePeerExponential,
    RandomMatchings,
    RingGraph,
    Rounds,
    Schedule,
    StarGraph,
    Static,
    Torus,
    exact_length,
    find,
    rounds_to,
    with_metropolis_hastings_weights,
    with_uniform_weights,
)
from shoal.topology.analysis import consensus
from shoal.topology.analysis.consensus import default_start
from support.topology_suite import product

few = settings(max_examples=30)
errors = st.sampled_from([0.47, 0.03, 1e-4])


def run(schedule: Schedule, error: float, start: np.ndarray, limit: int = 4000) -> int | None:
    """Rounds until the consensus error is reached, by running them with matrices."""
    target, x = start.mean(), start
    for rounds in range(limit):
        if np.linalg.norm(x - target) <= error * np.linalg.norm(start - target):
            return rounds
        x = schedule.matrix(rounds) @ x
    return None


@st.composite
def connected(draw) -> nx.Graph:
    tree = nx.random_labeled_tree(draw(st.integers(2, 12)), seed=draw(st.integers(0, 10_000)))
    extra = nx.gnp_random_graph(len(tree), draw(st.floats(0, 0.5)), seed=draw(st.integers(0, 10_000)))
    return nx.compose(tree, extra)


@few
@given(size=st.integers(2, 20), hops=st.sets(st.integers(1, 19), min_size=1, max_size=3), error=errors)
def test_eigenvalues_count_the_rounds_of_a_circulant(size: int, hops: set[int], error: float) -> None:
    schedule = Circulant(size, {1, *hops})
    assert rounds_to(schedule, error).value == run(schedule, error, default_start(size))


@few
@given(size=st.integers(2, 16), hops=st.lists(st.integers(1, 15), min_size=2, max_size=4), error=errors)
def test_eigenvalues_count_the_rounds_of_alternating_circulants(size: int, hops: list[int], error: float) -> None:
    turns = Alternating([Circulant(size, {0: 0.6, hop: 0.4 * (hop % size > 0)}) for hop in [1, *hops]])
    assert rounds_to(turns, error).value == run(turns, error, default_start(size))


@pytest.mark.parametrize("shape", [(3, 4), (2, 5), (4, 4)])
def test_eigenvalues_count_the_rounds_of_a_torus(shape: tuple[int, int]) -> None:
    torus = Torus(shape[0] * shape[1], shape)
    assert rounds_to(torus, 1e-5).value == run(torus, 1e-5, default_start(torus.size))


@few
@given(graph=connected(), error=errors)
def test_predicted_rounds_of_a_graph_are_the_rounds_that_it_takes(graph: nx.Graph, error: float) -> None:
    schedule = Static(with_metropolis_hastings_weights(graph))
    assert rounds_to(schedule, error).value == run(schedule, error, default_start(len(graph)))


def test_squaring_counts_the_same_rounds_as_running(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Alternating([Static(ChainGraph(9)), Static(StarGraph(9)), Idle(9)])
    expected = {error: run(schedule, error, default_start(9)) for error in (0.3, 1e-3, 1e-9)}
    assert len({count % 3 for count in expected.values()}) > 1
    monkeypatch.setattr("shoal.topology.analysis.consensus._QUICK_ROUNDS", 2)
    assert {error: rounds_to(schedule, error).value for error in expected} == expected


def test_an_estimate_is_between_the_simulated_rounds_and_the_bound_of_the_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = Static(ChainGraph(12))
    truth = run(schedule, 1e-6, default_start(12))
    monkeypatch.setattr("shoal.topology.analysis.consensus.DENSE_LIMIT", 0)
    monkeypatch.setattr("shoal.topology.analysis.consensus.WORK", 1000)
    result = rounds_to(schedule, 1e-6)
    assert result.value is None
    assert 20 < result.at_least <= truth <= result.at_most < 10 * truth


@few
@given(size=st.integers(2, 12), seed=st.integers(0, 99), error=errors)
def test_rounds_of_a_random_schedule_are_those_of_its_draws(size: int, seed: int, error: float) -> None:
    schedule = RandomMatchings(size, seed)
    assert rounds_to(schedule, error).value == run(schedule, error, default_start(size))


def test_an_explicit_start_is_used() -> None:
    start = np.array([1.0, 0, 0, 0, 0, 0, 0])
    schedule = Static(ChainGraph(7))
    assert rounds_to(schedule, 1e-3, start=start).value == run(schedule, 1e-3, start)
    assert rounds_to(schedule, 1e-3, start=start).value != rounds_to(schedule, 1e-3).value
    assert rounds_to(schedule, 1e-3, start=np.full(7, 3.0)).value == 0


def test_an_error_met_at_the_start_takes_no_round() -> None:
    assert rounds_to(RingGraph(8), 1.0).value == 0


@pytest.mark.parametrize(
    "topology",
    [
        Idle(4),
        np.array([[0.0, 1.0], [1.0, 0.0]]),
        with_metropolis_hastings_weights(nx.Graph([(0, 1), (2, 3)])),
        with_uniform_weights(nx.star_graph(4)),
        np.full((3, 3), 0.3),
        np.array([[1.2, -0.2], [-0.2, 1.2]]),
        np.array([[1.9, -0.9, 0.0], [-0.9, 1.4, 0.5], [0.0, 0.5, 0.5]]),
    ],
    ids=["nobody speaks", "turns without end", "two parts", "a mean with weights", "too small", "apart", "apart, of 3"],
)
def test_agents_that_never_reach_the_average_are_reported(topology: object) -> None:
    result = rounds_to(topology, 1e-3)
    assert result.never and result.value is None and str(result) == "never"
    assert exact_length(topology) is None


@pytest.mark.parametrize(
    ("topology", "error"),
    [
        (find("one-peer-grid").schedule(64), 0.1),
        *[(with_uniform_weights(nx.path_graph(100)), error) for error in (0.2, 0.15, 0.1)],
    ],
)
def test_a_weighted_mean_comes_within_a_large_error(topology: nx.Graph | Schedule, error: float) -> None:
    """Late: its values are at their limit, another mean, only after many periods."""
    schedule = topology if isinstance(topology, Schedule) else Static(topology)
    assert rounds_to(topology, error).value == run(schedule, error, default_start(schedule.size))
    assert rounds_to(topology, 1e-6).never


def test_slow_agents_that_may_still_agree_need_more_rounds_than_were_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consensus, "_MOST_ROUNDS", 1_000)
    assert str(rounds_to(with_uniform_weights(nx.path_graph(100)), 0.01)) == "more than 1000"


@pytest.mark.parametrize("size", [3, 6, 11, 16])
def test_ceca_runs_with_its_second_buffer(size: int) -> None:
    schedule = find("ceca").schedule(size)
    assert rounds_to(schedule, 1e-9).value == exact_length(schedule) == (size - 1).bit_length()


@pytest.mark.parametrize("name", [name for name, topology in CATALOG.items() if topology.exact])
def test_a_declared_exact_length_is_the_first_round_whose_product_is_the_average(name: str) -> None:
    for size in (2, 4, 6, 12, 16):
        if CATALOG[name].refuses(size):
            continue
        schedule = CATALOG[name].schedule(size)
        length = exact_length(schedule)
        assert 1 <= length <= schedule.period
        assert np.abs(product(schedule, length) - 1 / size).max() < 1e-12
        assert np.abs(product(schedule, length - 1) - 1 / size).max() > 1e-6


@pytest.mark.parametrize("topology", [RingGraph(9), StarGraph(6), find("exponential").schedule(24)])
def test_asymptotic_convergence_is_never_exact(topology: object) -> None:
    assert exact_length(topology, limit=3000) is None


def test_a_length_beyond_the_limit_is_not_searched() -> None:
    assert exact_length(OnePeerExponential(16), limit=3) is None
    assert exact_length(OnePeerExponential(16), limit=4) == 4


def test_one_agent_needs_no_round() -> None:
    assert rounds_to(AllReduce(1)).value == exact_length(AllReduce(1)) == 0


@pytest.mark.parametrize("error", [0.0, -1.0, float("nan"), float("inf")])
def test_an_unreachable_error_is_refused(error: float) -> None:
    with pytest.raises(ValueError, match="Pass a number above 0"):
        rounds_to(RingGraph(4), error)


@pytest.mark.parametrize("start", [[1.0, 2.0], [[1.0]] * 4, [1.0, 2.0, 3.0, float("nan")]])
def test_an_invalid_start_is_refused(start: object) -> None:
    with pytest.raises(ValueError, match="Pass 4 finite numbers, one for each agent"):
        rounds_to(RingGraph(4), start=start)


@pytest.mark.parametrize(
    ("rounds", "text"),
    [
        (Rounds(7, 7), "7"),
        (Rounds(7, 9), "7 to 9"),
        (Rounds(7, None), "more than 6"),
        (Rounds(1, None, never=True), "never"),
    ],
)
def test_estimates_state_what_is_known(rounds: Rounds, text: str) -> None:
    assert str(rounds) == text
