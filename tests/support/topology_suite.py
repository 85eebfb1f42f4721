"""What every topology must have, as checks of one topology, one number of agents and one round each.

``test_property_suite.py`` runs all of them over the catalog, so a topology has its tests as soon as it is registered.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import cache

import networkx as nx
import numpy as np
import pytest

from shoal.topology import Clock, RandomMatchings, Schedule, Topology

LARGEST = 32


def sizes(topology: Topology) -> list[int]:
    """The numbers of agents that the checks run for."""
    return [size for size in range(1, LARGEST + 1) if not topology.refuses(size)]


@cache
def schedule_of(topology: Topology, size: int) -> Schedule:
    return topology.schedule(size)


def smallest(topology: Topology) -> Schedule:
    """The cheapest one: a schedule of each topology is made while tests are collected."""
    return schedule_of(topology, sizes(topology)[0])


def its_weight_sums_are_as_declared(topology: Topology, size: int, round: int) -> None:
    matrix = schedule_of(topology, size).matrix(round)
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0, rtol=0, atol=1e-12)
    if topology.doubly:
        np.testing.assert_allclose(matrix.sum(axis=0), 1.0, rtol=0, atol=1e-12)


def it_is_symmetric_as_declared(topology: Topology, size: int, round: int) -> None:
    matrix = schedule_of(topology, size).matrix(round)
    np.testing.assert_array_equal(matrix != 0, matrix.T != 0)
    np.testing.assert_allclose(matrix, matrix.T, rtol=0, atol=1e-15)


def its_senders_match_its_receivers(topology: Topology, size: int, round: int) -> None:
    views = [schedule_of(topology, size).mixing(round, rank) for rank in range(size)]
    assert [view.rank for view in views] == list(range(size))
    sent = {(view.rank, peer) for view in views for peer in view.destination_ranks}
    expected = {(peer, view.rank) for view in views for peer in view.source_ranks}
    assert sent == expected
    assert {weight for view in views for weight in view.destination_weights} <= {1.0}


def its_edges_match_its_mixings(topology: Topology, size: int, round: int) -> None:
    schedule = schedule_of(topology, size)
    edges, from_mixings = schedule.edges(round), Schedule.edges(schedule, round)
    assert [array.dtype for array in edges] == [np.int64, np.int64, np.float64]
    for array, expected in zip(edges, from_mixings, strict=True):
        np.testing.assert_array_equal(array, expected)


def it_repeats_after_its_period(topology: Topology, size: int, round: int) -> None:
    schedule = schedule_of(topology, size)
    assert schedule.period is not None
    assert_same_edges(schedule, round, schedule, round + schedule.period)
    assert 0 <= schedule.in_period(round) < schedule.period
    assert_same_edges(schedule, round, schedule, schedule.in_period(round))


def it_does_not_repeat_if_it_has_no_period(topology: Topology, size: int, round: int) -> None:
    # With few agents there may be but one thing to draw.
    schedule = schedule_of(topology, sizes(topology)[-1])
    assert schedule.in_period(round) == round
    matrices = [schedule.matrix(round + later) for later in range(48)]
    for lag in range(1, 9):
        assert any((now != then).any() for now, then in zip(matrices, matrices[lag:], strict=False)), lag


def it_is_stateless(topology: Topology, size: int, round: int) -> None:
    used, fresh = schedule_of(topology, size), topology.schedule(size)
    for earlier in range(round % 7):
        used.edges(earlier)
    assert_same_edges(used, round, fresh, round)
    assert used.describe() == fresh.describe()


def it_survives_pickling(topology: Topology, size: int, round: int) -> None:
    schedule = schedule_of(topology, size)
    schedule.mixing(round, 0)
    copy = pickle.loads(pickle.dumps(schedule))
    assert_same_edges(schedule, round, copy, round)


def its_clock_resumes(topology: Topology, size: int, round: int) -> None:
    rank = round % size
    saved = Clock(schedule_of(topology, size), rank, round)
    next(saved)
    restored = Clock(topology.schedule(size), rank)
    restored.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert restored.round == round + 1
    assert [next(restored) for _ in range(3)] == [next(saved) for _ in range(3)]


def its_clock_refuses_another_schedule(topology: Topology, size: int, round: int) -> None:
    foreign = Clock(RandomMatchings(size, seed=987654321), 0, round)
    clock = Clock(schedule_of(topology, size), 0, round=5)
    with pytest.raises(ValueError, match="seed 987654321"):
        clock.load_state_dict(foreign.state_dict())
    assert clock.round == 5


def it_is_connected(topology: Topology, size: int, round: int) -> None:
    schedule = schedule_of(topology, size)
    received = nx.DiGraph()
    received.add_nodes_from(range(size))
    for later in range(round, round + (schedule.period or 64)):
        edges = schedule.edges(later)
        received.add_edges_from(zip(edges.source.tolist(), edges.destination.tolist(), strict=True))
    assert nx.is_strongly_connected(received)


def it_is_exact_as_declared(topology: Topology, size: int, round: int) -> None:
    schedule = schedule_of(topology, size)
    assert schedule.period is not None
    np.testing.assert_allclose(product(schedule), 1.0 / size, rtol=0, atol=1e-14)


def it_names_its_number_of_agents(topology: Topology, size: int, round: int) -> None:
    schedule = schedule_of(topology, size)
    assert schedule.size == size
    assert schedule.describe() != topology.schedule(other(topology, size)).describe()


CHECKS: list[Callable[[Topology, int, int], None]] = [
    its_weight_sums_are_as_declared,
    it_is_symmetric_as_declared,
    its_senders_match_its_receivers,
    its_edges_match_its_mixings,
    it_repeats_after_its_period,
    it_does_not_repeat_if_it_has_no_period,
    it_is_stateless,
    it_survives_pickling,
    its_clock_resumes,
    its_clock_refuses_another_schedule,
    it_is_connected,
    it_is_exact_as_declared,
    it_names_its_number_of_agents,
]

APPLIES: dict[Callable[[Topology, int, int], None], Callable[[Topology, int], bool]] = {
    it_is_symmetric_as_declared: lambda topology, size: topology.symmetric,
    it_repeats_after_its_period: lambda topology, size: smallest(topology).period is not None,
    it_does_not_repeat_if_it_has_no_period: lambda topology, size: smallest(topology).period is None,
    it_is_exact_as_declared: lambda topology, size: topology.exact,
}
"""The checks that are not of every topology and size."""


def sizes_for(check: Callable[[Topology, int, int], None], topology: Topology) -> list[int]:
    """The numbers of agents for which a check says something of a topology."""
    applies = APPLIES.get(check, lambda topology, size: True)
    return [size for size in sizes(topology) if applies(topology, size)]


def product(schedule: Schedule, rounds: int | None = None) -> np.ndarray:
    """What some rounds together do, by default those of a period: the matrix of the last is leftmost."""
    total = np.eye(schedule.size)
    for round in range(schedule.period if rounds is None else rounds):
        total = schedule.matrix(round) @ total
    return total


def assert_same_edges(one: Schedule, round: int, other: Schedule, other_round: int) -> None:
    for array, expected in zip(one.edges(round), other.edges(other_round), strict=True):
        np.testing.assert_array_equal(array, expected)


def other(topology: Topology, size: int) -> int:
    return next(result for result in sizes(topology) if result != size)


def run_all(topology: Topology) -> None:
    """Run every check with a few numbers of agents."""
    for check in CHECKS:
        for size in sizes_for(check, topology)[:12]:
            check(topology, size, 3 * size)
