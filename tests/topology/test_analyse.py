"""The whole analysis at once: its parts say the same, its notes are true, and 100,000 agents are not too many."""

import sys
from dataclasses import fields

import networkx as nx
import numpy as np
import pytest

from shoal.topology import (
    CATALOG,
    AllReduce,
    Alternating,
    Analysis,
    ChainGraph,
    Circulant,
    Idle,
    OnePeerExponential,
    RandomMatchings,
    RingGraph,
    Stochasticity,
    analyse,
    average_age,
    classify,
    exact_length,
    find,
    gap_over_period,
    mixing_matrix,
    round_seconds,
    rounds_to,
    smallest_eigenvalue,
    spectral_gap,
    traffic,
    with_metropolis_hastings_weights,
    with_uniform_weights,
)

NETWORK = {"nbytes": 1e6, "latency": 1e-3, "bandwidth": 1e8}
MANY = 100_000


@pytest.mark.parametrize(
    ("name", "size"),
    [(name, size) for size in (1, 2, 7, 12) for name, topology in CATALOG.items() if not topology.refuses(size)],
)
def test_the_analysis_equals_its_parts_for_every_topology(name: str, size: int) -> None:
    schedule = CATALOG[name].schedule(size)
    result = analyse(schedule, **NETWORK)
    assert result.weights == classify(schedule)
    assert result.gap == gap_over_period(schedule, result.gap_rounds)
    assert result.rounds == rounds_to(schedule)
    assert result.exact_length == exact_length(schedule)
    assert result.age == average_age(schedule)
    assert result.traffic == traffic(schedule, nbytes=NETWORK["nbytes"])
    assert result.round_seconds == round_seconds(schedule, **NETWORK)
    assert result.connected
    assert (result.name, result.size, result.period) == (schedule.describe(), size, schedule.period)


def test_a_graph_its_matrix_and_its_schedule_have_equal_analyses() -> None:
    ring = RingGraph(10)
    of_graph, of_matrix = analyse(ring, **NETWORK), analyse(mixing_matrix(ring), **NETWORK)
    of_schedule = analyse(find("ring").schedule(10), **NETWORK)
    for field in fields(Analysis):
        if field.name != "name":
            one, other, third = (getattr(result, field.name) for result in (of_graph, of_matrix, of_schedule))
            assert one == other == third, field.name
    assert of_graph.smallest_eigenvalue == smallest_eigenvalue(ring)
    assert of_graph.gap == spectral_gap(ring)


def test_seconds_to_the_error_are_rounds_times_seconds() -> None:
    result = analyse(RingGraph(8), **NETWORK)
    assert result.round_seconds == pytest.approx(2 * (1e-3 + 1e-2))
    assert result.consensus_seconds == pytest.approx(result.rounds.value * result.round_seconds)
    assert analyse(Idle(3), **NETWORK).consensus_seconds == float("inf")


def test_the_gap_per_round_to_the_power_of_the_period_is_the_gap_of_the_period() -> None:
    result = analyse(Alternating([find("ring").schedule(8), Idle(8)]), **NETWORK)
    assert result.gap_rounds == 2
    assert 1 - (1 - result.gap_per_round) ** 2 == pytest.approx(result.gap.value)


def test_the_gap_of_a_nonperiodic_schedule_spans_the_rounds_that_remove_most_disagreement() -> None:
    schedule = RandomMatchings(16)
    result = analyse(schedule, **NETWORK)
    assert result.sampled_rounds == 64
    assert result.gap_rounds == rounds_to(schedule, 1e-2).value
    assert result.smallest_eigenvalue is None


def notes(topology: object, **network: float) -> str:
    return " ".join(analyse(topology, **{**NETWORK, **network}).notes)


@pytest.mark.parametrize(
    ("topology", "note"),
    [
        (Idle(1), "One agent has nobody"),
        (with_metropolis_hastings_weights(nx.Graph([(0, 1), (2, 3)])), "Not all agents hear of all others"),
        (0.9 * np.ones((2, 2)) / 2, "weights of an agent do not sum to one"),
        (with_uniform_weights(nx.path_graph(4)), "agents agree on a weighted average"),
        (np.array([[1.2, -0.2], [-0.2, 1.2]]), "Some weights are negative. Disagreement grows with them"),
        (np.eye(4)[[1, 0, 3, 2]] / 2 + np.eye(4)[[3, 2, 1, 0]] / 2, "the eigenvalue -1"),
        (RingGraph(8), "(I + W) / 2"),
        (find("ceca").schedule(6), "second buffer"),
        (AllReduce(4), "6 messages of 1/4 of the bytes each"),
        (RandomMatchings(8), "from the first 64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_note_states_limitations(topology: object, note: str) -> None:
    assert note in notes(topology)


def test_a_topology_without_limitations_has_no_notes() -> None:
    assert notes(Circulant(9, {0: 0.5, 1: 0.25, -1: 0.25})) == ""
    assert notes(find("one-peer-hypercube").schedule(8)) == ""


def test_unequal_weights_without_zeros_do_not_give_the_average() -> None:
    matrix = np.array([[0.75, 0.5, -0.25], [-0.25, 0.75, 0.5], [0.5, -0.25, 0.75]])
    assert notes(matrix) == "Some weights are negative."


def test_agents_that_share_a_nic_are_counted_in_a_note() -> None:
    assert "Up to 4 agents of one machine" in notes(OnePeerExponential(8), agents_per_machine=4)
    assert "agents of one machine" not in notes(OnePeerExponential(8), agents_per_machine=1)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"error": 0.0}, "error is 0"), ({"bandwidth": -1.0}, "bandwidth is -1"), ({"agents_per_machine": 5}, "of 5")],
)
def test_an_invalid_query_is_refused(options: dict[str, float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        analyse(RingGraph(8), **options)


@pytest.mark.parametrize(
    ("topology", "kept"),
    [
        (find("one-peer-exponential").schedule(6), Stochasticity(True, True, False, True)),
        (find("random-matchings").schedule(6), Stochasticity(True, True, True, True)),
        (find("ring-star-delegates").schedule(6), Stochasticity(True, False, False, True)),
        (
            Alternating([AllReduce(3), find("ring").schedule(3, connect_style=1)]),
            Stochasticity(True, True, False, True),
        ),
        (np.array([[1.5, -0.5], [0.0, 1.0]]), Stochasticity(True, False, False, False)),
    ],
)
def test_a_schedule_preserves_what_all_of_its_rounds_preserve(topology: object, kept: Stochasticity) -> None:
    assert classify(topology) == kept


def test_a_dense_topology_is_refused_with_its_size_before_it_is_built() -> None:
    with pytest.raises(ValueError, match=r"100000 agents with 10,000,000,000 edges in a round, 240.0 GB"):
        analyse(AllReduce(MANY))
    with pytest.raises(ValueError, match=r"100000 agents with 2,500,000,000 edges in a round, 60.0 GB"):
        analyse(find("hierarchical").schedule(MANY, agents_per_machine=25_000))


def test_a_dense_matrix_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.topology.analysis.span.EDGE_LIMIT", 99)
    with pytest.raises(ValueError, match="10 agents with 100 edges in a round"):
        spectral_gap(np.full((10, 10), 0.1))
    with pytest.raises(ValueError, match="10 agents with 100 edges in a round"):
        classify(find("fully-connected").schedule(10))


def peak_megabytes() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 1024**2)


@pytest.mark.parametrize(
    ("name", "gap"),
    [
        ("ring", 4 / 3 * np.sin(np.pi / MANY) ** 2),
        ("exponential", 2 / 18),
        ("one-peer-exponential", None),
    ],
)
def test_100_000_agents_of_a_circulant_have_exact_figures(name: str, gap: float | None) -> None:
    before = peak_megabytes()
    result = analyse(find(name).schedule(MANY))
    assert result.size == MANY and result.connected and result.gap.method == "fourier"
    assert peak_megabytes() - before < 2000, "a dense matrix would have 80 GB"
    if gap is not None:
        assert result.gap.value == pytest.approx(gap, abs=result.gap.error)
        assert result.age.error == 0.0


@pytest.mark.soak
@pytest.mark.parametrize("name", ["star", "binary-tree", "chain", "torus", "random-matchings", "d-equi-static"])
def test_100_000_agents_of_the_catalog_have_figures_without_a_dense_matrix(name: str) -> None:
    before = peak_megabytes()
    result = analyse(find(name).schedule(MANY))
    assert result.size == MANY and result.connected and result.weights.doubly
    assert 0 <= result.gap.value <= 1 and 0 < result.gap.error < 0.1
    assert 1 < result.age.mean < MANY
    assert peak_megabytes() - before < 4000, "a dense matrix would have 80 GB"


@pytest.mark.soak
def test_100_000_agents_of_an_irregular_graph_have_figures_without_a_dense_matrix() -> None:
    """Of a random graph of degree four the second eigenvalue is known: at least 2 sqrt(3) / 4, and hardly above."""
    before = peak_megabytes()
    graph = with_metropolis_hastings_weights(nx.random_regular_graph(4, MANY, seed=1))
    result = analyse(graph)
    assert result.gap.method == "iterative"
    # W = (I + A) / 5, and the largest other eigenvalue of A is close to 2 sqrt(3) (Alon, Friedman).
    assert result.gap.value == pytest.approx(1 - (1 + 2 * np.sqrt(3)) / 5, abs=2e-3)
    assert result.rounds.value is not None
    assert 9 < result.age.mean < 11
    assert peak_megabytes() - before < 3000


def test_a_thousand_agents_of_an_irregular_graph_are_analysed_by_iteration() -> None:
    result = analyse(ChainGraph(1000))
    assert result.gap.method == "iterative"
    assert result.age.mean == pytest.approx((1000 + 1) / 3)
