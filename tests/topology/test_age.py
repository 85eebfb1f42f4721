"""Average age against shortest paths on static graphs, and against contributions that are followed one by one."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.topology import (
    Alternating,
    Idle,
    OnePeerExponential,
    RandomMatchings,
    RingGraph,
    RingStar,
    Schedule,
    Static,
    age_matrix,
    average_age,
    find,
    with_metropolis_hastings_weights,
    with_uniform_weights,
)

few = settings(max_examples=40)


def followed(schedule: Schedule, starts: int) -> np.ndarray:
    """Rounds until u's contribution is with v, at [v, u], by passing on sets of names; averaged over starts."""
    size = schedule.size
    total = np.zeros((size, size))
    for start in range(starts):
        arrived = np.where(np.eye(size, dtype=bool), 0.0, np.inf)
        received = [{rank} for rank in range(size)]
        for round in range(start, start + 40 * size):
            views = [schedule.mixing(round, rank) for rank in range(size)]
            received = [
                received[rank].union(*(received[peer] for peer in views[rank].source_ranks)) for rank in range(size)
            ]
            for rank in range(size):
                for name in received[rank]:
                    arrived[rank, name] = min(arrived[rank, name], round - start + 1)
        total += arrived
    return total / starts


@st.composite
def digraphs(draw) -> nx.DiGraph:
    size = draw(st.integers(2, 12))
    return nx.gnp_random_graph(size, draw(st.floats(0.1, 0.9)), seed=draw(st.integers(0, 10_000)), directed=True)


@few
@given(graph=digraphs())
def test_the_age_on_a_static_graph_is_the_number_of_hops(graph: nx.DiGraph) -> None:
    hops = dict(nx.all_pairs_shortest_path_length(graph))
    expected = [[hops[u].get(v, np.inf) for u in graph] for v in graph]
    np.testing.assert_array_equal(age_matrix(with_uniform_weights(graph)), expected)


@pytest.mark.parametrize(
    "schedule",
    [
        OnePeerExponential(7),
        Alternating([Static(RingGraph(6)), Idle(6), OnePeerExponential(6)]),
        find("base-2").schedule(6),
        find("inner-outer-ring").schedule(12, agents_per_machine=4),
    ],
    ids=lambda schedule: schedule.describe(),
)
def test_the_age_in_a_schedule_is_the_expected_round_of_first_arrival(schedule: Schedule) -> None:
    np.testing.assert_allclose(age_matrix(schedule), followed(schedule, schedule.period), rtol=0, atol=1e-12)


def test_the_age_in_a_nonperiodic_schedule_is_averaged_over_its_first_64_starts() -> None:
    schedule = RandomMatchings(5, seed=3)
    np.testing.assert_allclose(age_matrix(schedule), followed(schedule, 64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["ring", "star", "one-peer-exponential", "base-3", "ring-star-delegates"])
@pytest.mark.parametrize("size", [2, 6, 12])
def test_the_average_excludes_the_diagonal(name: str, size: int) -> None:
    schedule = find(name).schedule(size)
    ages = age_matrix(schedule)
    assert (np.diag(ages) == 0).all()
    assert average_age(schedule).mean == pytest.approx(ages.sum() / (size * (size - 1)))
    assert average_age(schedule).error == 0.0


def test_the_worst_age_of_a_static_graph_is_its_diameter() -> None:
    graph = with_metropolis_hastings_weights(nx.lollipop_graph(5, 6))
    assert average_age(graph).worst == nx.diameter(nx.lollipop_graph(5, 6))


@pytest.mark.parametrize(("groups", "local"), [(4, 4), (6, 2), (8, 3)])
def test_a_ring_of_groups_has_the_age_of_the_ring_between_groups_and_one_inside(groups: int, local: int) -> None:
    """These are the ages that the Ring-Star paper calls O(G)."""
    ring = age_matrix(RingGraph(groups))
    expected = np.kron(ring, np.ones((local, local))) + np.kron(np.eye(groups), 1 - np.eye(local))
    np.testing.assert_array_equal(age_matrix(RingStar(groups * local, local)), expected)


def test_an_edge_of_weight_zero_transfers_nothing() -> None:
    graph = nx.DiGraph()
    graph.add_weighted_edges_from(
        [(0, 1, 0.5), (1, 2, 0.5), (2, 0, 0.5), (0, 2, 0.0), *((k, k, 0.5) for k in range(3))]
    )
    assert age_matrix(graph)[2, 0] == 2


def test_values_that_never_arrive_have_infinite_age() -> None:
    one_way = with_uniform_weights(nx.DiGraph([(0, 1), (1, 2)]))
    np.testing.assert_array_equal(age_matrix(one_way), [[0, np.inf, np.inf], [1, 0, np.inf], [2, 1, 0]])
    assert average_age(one_way).mean == np.inf
    assert str(average_age(one_way)) == "never"


def test_one_agent_has_no_pair_and_no_age() -> None:
    assert average_age(Idle(1)).mean == 0.0


@pytest.mark.parametrize("name", ["small-world", "binary-tree", "random-matchings"])
def test_a_sampled_age_is_within_its_stated_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = find(name).schedule(90)
    truth = age_matrix(schedule).sum() / (90 * 89)
    monkeypatch.setattr("shoal.topology.analysis.age.ALL_SOURCES", 10)
    monkeypatch.setattr("shoal.topology.analysis.age.find_invariance", lambda span: None)
    result = average_age(schedule)
    assert 0 < result.error < 0.1 * truth
    assert result.mean == pytest.approx(truth, abs=4 * result.error)
    assert "±" in str(result) or result.error <= 5e-3 * result.mean


def test_the_matrix_of_too_many_agents_is_refused_with_an_alternative() -> None:
    with pytest.raises(ValueError, match=r"2000 x 2000 entries, and the limit is 1024 agents\. average_age"):
        age_matrix(find("ring").schedule(2000))
