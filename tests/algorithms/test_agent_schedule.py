"""A topology as one agent sees it: what neighbour operations take, made once for each round of the period."""

from __future__ import annotations

import logging

import networkx as nx
import pytest
from networkx import DiGraph

from shoal.algorithms.schedule_weights import AgentSchedule
from shoal.topology import CecaPairs, Mixing, OnePeerExponential, RandomMatchings, RingGraph, Schedule, Static


def test_a_round_is_the_mixing_of_its_graph() -> None:
    graph = RingGraph(5)
    for rank in range(5):
        assert AgentSchedule(graph, rank).mixing(3) == Mixing.from_graph(graph, rank)


def test_rounds_of_one_period_are_one_object() -> None:
    schedule = AgentSchedule(OnePeerExponential(8), 2)
    first = [schedule.mixing(round_) for round_ in range(3)]
    assert len({id(one) for one in first}) == 3
    assert all(schedule.mixing(round_) is first[round_ % 3] for round_ in range(9))


def test_rounds_that_do_not_repeat_are_not_cached_for_ever() -> None:
    schedule = AgentSchedule(RandomMatchings(4), 0)
    for round_ in range(600):
        schedule.mixing(round_)
    assert len(schedule._mixings) <= 256


def test_row_and_column_stochastic_forms_equal_those_of_the_stacked_fleet() -> None:
    """Directed edges: 0 to 1, 0 to 2 and 1 to 2. Neither rows nor columns sum to one."""
    graph = DiGraph([(0, 1), (0, 2), (1, 2)])
    graph.add_nodes_from(range(3))
    nx.set_edge_attributes(graph, 0.7, "weight")
    schedule = AgentSchedule(graph, 1)
    assert schedule.mixing(0, "pull") == Mixing(1, 1 / 2, {0: 1 / 2}, [2])
    assert schedule.mixing(0, "push") == Mixing(1, 1 / 2, {0: 1 / 3}, [2])


def without_edges(topology: Schedule, departed: tuple[int, ...]) -> Schedule:
    """A view of the topology that an algorithm could build, and that cannot keep the survivors connected."""
    return Static(nx.DiGraph([(rank, rank) for rank in range(topology.size)]))


def test_every_survivor_logs_an_error_if_the_survivors_are_not_connected(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "shoal"):
        for rank in (1, 3):
            for round_ in range(3):
                AgentSchedule(CecaPairs(8), rank).mixing(round_, gone=(0, 2, 4))
        assert not caplog.records
        for rank in (1, 3):
            schedule = AgentSchedule(CecaPairs(8), rank, without_edges)
            for round_ in range(3):
                schedule.mixing(round_, gone=(0, 2))
    logged = [record.message for record in caplog.records]
    assert [one.split(":")[0] for one in logged] == ["rank 1", "rank 3"]
    assert all("without ranks [0, 2]" in one and "are not connected" in one for one in logged)


def test_agents_that_were_never_connected_are_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "shoal"):
        AgentSchedule(nx.DiGraph([(0, 1), (1, 0), (2, 2), (3, 3)]), 0).mixing(0, gone=(3,))
    assert not caplog.records
