"""MATCHA and the matchings under it: proper decompositions, the optimal plan, and draws that follow it."""

from itertools import product as all_of

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.topology import Matcha, RingGraph
from shoal.topology.families.matcha import best_alpha, decompose


@st.composite
def graphs(draw):
    size = draw(st.integers(1, 12))
    rank = st.integers(0, size - 1)
    graph = nx.Graph()
    graph.add_nodes_from(range(size))
    graph.add_edges_from(draw(st.sets(st.tuples(rank, rank), max_size=60)))
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    return graph


def dense(matching, size):
    matrix = np.zeros((size, size))
    for first, second in matching:
        matrix[[first, second], [first, second]] += 1
        matrix[[first, second], [second, first]] -= 1
    return matrix


def connectivity(plan, probabilities):
    mean = sum(p * dense(matching, plan.size) for p, matching in zip(probabilities, plan.matchings, strict=True))
    return np.linalg.eigvalsh(mean)[1]


def kite():
    """A triangle with a tail: four matchings cannot be had with fewer, and the tail holds it together."""
    return nx.Graph([(0, 1), (1, 2), (2, 0), (2, 3), (3, 4)])


@settings(max_examples=150)
@given(graphs())
def test_every_edge_is_in_one_matching_and_every_agent_at_most_once_in_each(graph):
    matchings = decompose(graph)
    assert sorted(edge for matching in matchings for edge in matching) == sorted(map(tuple, map(sorted, graph.edges)))
    for matching in matchings:
        ends = [rank for edge in matching for rank in edge]
        assert len(ends) == len(set(ends))


@settings(max_examples=150)
@given(graphs())
def test_there_are_at_most_as_many_matchings_as_vizing_says(graph):
    assert len(decompose(graph)) <= max((degree for _, degree in graph.degree), default=0) + 1


@given(graphs(), st.randoms())
@settings(max_examples=30)
def test_matchings_do_not_depend_on_the_order_of_edges(graph, random):
    edges = [(second, first) for first, second in graph.edges]
    random.shuffle(edges)
    shuffled = nx.Graph()
    shuffled.add_nodes_from(range(len(graph)))
    shuffled.add_edges_from(edges)
    assert decompose(shuffled) == decompose(graph)


@pytest.mark.parametrize("budget", [0.25, 0.5, 0.8, 1.0])
def test_probabilities_meet_the_budget_and_are_optimal(budget):
    plan = Matcha(kite(), budget)
    count = len(plan.matchings)
    assert plan.probabilities.sum() <= budget * count + 1e-9
    assert plan.probabilities.min() >= 0
    assert plan.probabilities.max() <= 1
    grid = np.array(list(all_of(np.linspace(0, 1, 11), repeat=count)))
    allowed = grid[grid.sum(axis=1) <= budget * count + 1e-9]
    means = np.tensordot(allowed, [dense(matching, plan.size) for matching in plan.matchings], axes=1)
    assert connectivity(plan, plan.probabilities) >= np.linalg.eigvalsh(means)[:, 1].max() - 1e-3


def test_a_bridge_is_used_more_often():
    plan = Matcha(nx.barbell_graph(5, 0), 0.5)
    bridge = next(p for p, matching in zip(plan.probabilities, plan.matchings, strict=True) if (4, 5) in matching)
    assert bridge == pytest.approx(1.0)
    assert connectivity(plan, plan.probabilities) > 1.5 * connectivity(plan, np.full(len(plan.matchings), 0.5))


@pytest.mark.parametrize("graph", [kite(), nx.path_graph(4), nx.star_graph(4)])
def test_the_contraction_is_that_of_all_draws_weighted_by_their_probability(graph):
    plan = Matcha(graph, 0.6)
    size, expected = plan.size, 0.0
    for drawn in all_of([False, True], repeat=len(plan.matchings)):
        likely = np.prod(np.where(drawn, plan.probabilities, 1 - plan.probabilities))
        active = [dense(matching, size) for on, matching in zip(drawn, plan.matchings, strict=True) if on]
        matrix = np.eye(size) - plan.alpha * sum(active, np.zeros((size, size)))
        expected = expected + likely * matrix.T @ matrix
    assert plan.contraction == pytest.approx(np.linalg.norm(expected - 1 / size, 2), abs=1e-12)


def test_alpha_contracts_more_than_other_values():
    plan = Matcha(kite(), 0.5)
    scaled = []
    for factor in (0.5, 0.9, 0.99, 1.0, 1.01, 1.1, 1.5):
        alpha = factor * plan.alpha
        mean = sum(p * dense(m, 5) for p, m in zip(plan.probabilities, plan.matchings, strict=True))
        spread = sum(2 * p * (1 - p) * dense(m, 5) for p, m in zip(plan.probabilities, plan.matchings, strict=True))
        expected = (np.eye(5) - alpha * mean) @ (np.eye(5) - alpha * mean) + alpha**2 * spread
        scaled.append(np.linalg.norm(expected - 1 / 5, 2))
    assert np.argmin(scaled) == 3
    assert scaled[3] == pytest.approx(plan.contraction)


def test_two_always_active_agents_agree_at_once():
    plan = Matcha(nx.path_graph(2), 1.0)
    assert plan.alpha == pytest.approx(0.5, abs=1e-7)
    assert plan.contraction == pytest.approx(0, abs=1e-12)


def test_matchings_are_drawn_with_their_planned_frequencies():
    plan, rounds = Matcha(kite(), 0.5, seed=9), 2000
    for p, ((first, second), *_) in zip(plan.probabilities, plan.matchings, strict=True):
        spoke = sum(second in plan.mixing(round, first).source_ranks for round in range(rounds))
        assert abs(spoke - p * rounds) <= 5 * np.sqrt(rounds * p * (1 - p) + 1e-9)


def test_a_round_takes_alpha_times_the_laplacians_of_its_matchings():
    plan = Matcha(kite(), 0.5)
    possible = [
        np.eye(5)
        - plan.alpha * sum((dense(m, 5) for on, m in zip(drawn, plan.matchings, strict=True) if on), np.zeros((5, 5)))
        for drawn in all_of([False, True], repeat=len(plan.matchings))
    ]
    for round in range(30):
        assert any(np.allclose(plan.matrix(round), candidate, rtol=0, atol=1e-15) for candidate in possible)


def test_probabilities_can_be_passed():
    planned = Matcha(RingGraph(6), 0.5)
    given_ = Matcha(RingGraph(6), 0.5, probabilities=planned.probabilities.tolist())
    assert given_.describe() == planned.describe()
    assert given_.alpha == planned.alpha
    assert best_alpha(planned.matchings, planned.probabilities, 6) == (planned.alpha, planned.contraction)
    other = Matcha(RingGraph(6), 0.5, probabilities=[1.0] * len(planned.matchings))
    assert other.describe() != planned.describe()


@pytest.mark.parametrize(
    ("graph", "options", "match"),
    [
        (nx.Graph([(0, 1), (2, 3)]), {}, "not connected"),
        (nx.DiGraph([(0, 1), (1, 2), (2, 0)]), {}, "no edge back"),
        (nx.path_graph(300), {}, "at most of 256 agents"),
        (nx.path_graph(3), {"probabilities": [0.0, 1.0]}, "the graph falls apart"),
        (nx.path_graph(3), {"budget": 0}, "budget is 0"),
        (nx.path_graph(3), {"budget": 1.1}, "budget is 1.1"),
        (nx.path_graph(3), {"probabilities": [0.5]}, "must be 2 numbers"),
        (nx.path_graph(3), {"probabilities": [0.5, 1.5]}, "from 0 to 1"),
    ],
)
def test_invalid_plans_are_refused(graph, options, match):
    with pytest.raises(ValueError, match=match):
        Matcha(graph, **options)
