"""Topologies without the agents that are gone: what is promised of them, for every topology that there is."""

from __future__ import annotations

import itertools
import pickle

import networkx as nx
import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.topology import (
    CATALOG,
    BaseGraph,
    Clock,
    MeshGrid2DGraph,
    OnePeerExponential,
    RandomMatchings,
    RingGraph,
    Schedule,
    StarGraph,
    Topology,
    Without,
)
from support.topology_suite import schedule_of, sizes


def losses(size: int) -> list[tuple[int, ...]]:
    """One agent, the first, two beside each other, three apart, and all but one."""
    results = [(0,), (size - 1,), (0, 1), tuple(range(0, size, 3)), tuple(range(1, size))]
    return [departed for departed in dict.fromkeys(results) if len(departed) < size]


CASES = [
    pytest.param(topology, size, departed, id=f"{name}-{size}-without-{'-'.join(map(str, departed))}")
    for name, topology in sorted(CATALOG.items())
    for size in [value for value in (5, 8) if value in sizes(topology)]
    for departed in losses(size)
]


def complement(matrix: NDArray[np.float64], departed_ranks: tuple[int, ...]) -> NDArray[np.float64] | None:
    """The stochastic complement by its definition; None where some departed agents receive only from each other."""
    left = [rank for rank in range(len(matrix)) if rank not in departed_ranks]
    inner = np.eye(len(departed_ranks)) - matrix[np.ix_(departed_ranks, departed_ranks)]
    if np.linalg.cond(inner) > 1e9:
        return None
    through = matrix[np.ix_(left, departed_ranks)] @ np.linalg.solve(inner, matrix[np.ix_(departed_ranks, left)])
    result = np.eye(len(matrix))
    result[np.ix_(left, left)] = matrix[np.ix_(left, left)] + through
    return result


@pytest.mark.parametrize(("topology", "size", "departed_ranks"), CASES)
def test_the_survivors_keep_the_topologys_properties(
    topology: Topology, size: int, departed_ranks: tuple[int, ...]
) -> None:
    full = schedule_of(topology, size)
    healed = Without(full, departed_ranks)
    planned = full.among([rank for rank in range(size) if rank not in departed_ranks]) is not None
    product = np.eye(size)
    for round in range(min(healed.period or 6, 12)):
        matrix = healed.matrix(round)
        product = matrix @ product
        expected = None if planned else complement(full.matrix(round), departed_ranks)
        if expected is not None:
            np.testing.assert_allclose(matrix, expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(matrix.sum(axis=1), 1.0, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(matrix[list(departed_ranks)], np.eye(size)[list(departed_ranks)])
        np.testing.assert_array_equal(matrix[:, list(departed_ranks)], np.eye(size)[:, list(departed_ranks)])
        if topology.doubly:
            np.testing.assert_allclose(matrix.sum(axis=0), 1.0, rtol=0, atol=1e-12)
        if topology.symmetric:
            np.testing.assert_array_equal(matrix, matrix.T)
    if planned:  # what it promises over a period
        left = [rank for rank in range(size) if rank not in departed_ranks]
        np.testing.assert_allclose(product.sum(axis=0), 1.0, rtol=0, atol=1e-12)
        if topology.exact:
            np.testing.assert_allclose(product[np.ix_(left, left)], 1 / len(left), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("topology", "size", "departed_ranks"), CASES)
def test_survivors_of_a_connected_topology_are_connected(
    topology: Topology, size: int, departed_ranks: tuple[int, ...]
) -> None:
    full = schedule_of(topology, size)
    healed = Without(full, departed_ranks)
    assert _connected(full, list(range(min(full.period or 40, 40))), ()), "the case shows nothing"
    assert _connected(healed, list(range(min(healed.period or 40, 40))), departed_ranks)


def _connected(schedule: Schedule, rounds: list[int], departed_ranks: tuple[int, ...]) -> bool:
    union = nx.compose_all([schedule.graph(round) for round in rounds])
    union.remove_nodes_from(departed_ranks)
    return bool(nx.is_strongly_connected(union))


@pytest.mark.parametrize("lost", [0, 3, 7])
def test_pairwise_and_one_peer_rounds_keep_their_property(lost: int) -> None:
    for schedule in (RandomMatchings(8, seed=3), OnePeerExponential(8)):
        healed = Without(schedule, [lost])
        for round, rank in itertools.product(range(6), range(8)):
            mixing = healed.mixing(round, rank)
            assert len(mixing.sources) <= 1
            assert len(mixing.destinations) <= 1


def test_a_star_without_its_centre_stays_connected() -> None:
    matrix = Without(StarGraph(5), [0]).matrix(0)
    assert (matrix[1:, 1:] > 0).all()
    np.testing.assert_allclose(matrix[1:, 1:].sum(axis=0), 1.0, rtol=0, atol=1e-15)


def test_the_order_of_the_failures_does_not_matter() -> None:
    graph = MeshGrid2DGraph(12)
    at_once = Without(graph, [1, 5, 6])
    one_by_one = Without(Without(Without(graph, [6]), [1]), [5])
    assert at_once.gone == one_by_one.gone == (1, 5, 6)
    assert at_once.describe() == one_by_one.describe()
    np.testing.assert_array_equal(at_once.matrix(0), one_by_one.matrix(0))


def test_the_mean_of_the_survivors_is_reached_and_preserved() -> None:
    schedule, departed = Without(OnePeerExponential(8), [2, 5]), [2, 5]
    left = [rank for rank in range(8) if rank not in departed]
    values = np.random.default_rng(0).normal(size=8)
    result = values.copy()
    for round in range(60):
        result = schedule.matrix(round) @ result
    np.testing.assert_allclose(result[left], values[left].mean(), rtol=0, atol=1e-9)
    np.testing.assert_array_equal(result[departed], values[departed])


def test_without_failures_it_is_the_topology_itself() -> None:
    for round in range(4):
        np.testing.assert_array_equal(Without(BaseGraph(6), []).matrix(round), BaseGraph(6).matrix(round))
    assert Without(RingGraph(4), []).describe().endswith("without nobody")


def test_an_agent_without_sources_needs_no_replacement_edges() -> None:
    """Each of its destinations adds the failed source's weight to its own, as there is no other source."""
    matrix = np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
    np.testing.assert_array_equal(Without(matrix, [0]).matrix(0), [[1, 0, 0], [0, 1, 0], [0, 0.5, 0.5]])


@pytest.mark.parametrize("topology", [OnePeerExponential(4), RingGraph(4), BaseGraph(6)])
def test_without_all_agents_nobody_speaks(topology: nx.DiGraph | Schedule) -> None:
    size = topology.size if isinstance(topology, Schedule) else len(topology)
    healed = Without(topology, range(size))
    assert all((healed.matrix(round) == np.eye(size)).all() for round in range(healed.period or 1))


def test_a_healed_topology_is_a_valid_schedule() -> None:
    healed = Without(OnePeerExponential(8), [1])
    assert healed.period == 3
    again = pickle.loads(pickle.dumps(healed))
    np.testing.assert_array_equal(again.matrix(1), healed.matrix(1))
    clock = Clock(healed, 0)
    next(clock)
    with pytest.raises(ValueError, match="without 1"):
        Clock(OnePeerExponential(8), 0).load_state_dict(clock.state_dict())


@pytest.mark.parametrize("departed_ranks", [[8], [-1], [1.5], ["1"], [True]])
def test_invalid_ranks_are_refused(departed_ranks: list[object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Without(OnePeerExponential(8), departed_ranks)  # type: ignore[arg-type]


def test_a_hundred_thousand_agents_with_a_thousand_failures() -> None:
    size = 100_000
    healed = Without(OnePeerExponential(size), range(0, size, 100))
    edges = healed.edges(3)
    sums = np.bincount(edges.destination, weights=edges.weight, minlength=size)
    np.testing.assert_allclose(sums, 1.0, rtol=0, atol=1e-12)
    assert len(edges.weight) < 2 * size
