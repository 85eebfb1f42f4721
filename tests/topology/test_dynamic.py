"""The time-varying schedules: equal to BlueFog's where it is right, and always matched."""

import json
from functools import reduce
from itertools import islice
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.topology import (
    ExponentialTwoGraph,
    GetDynamicOnePeerSendRecvRanks,
    GetExp2DynamicSendRecvMachineRanks,
    GetInnerOuterExpo2DynamicSendRecvRanks,
    GetInnerOuterRingDynamicSendRecvRanks,
    MeshGrid2DGraph,
    RingGraph,
    collect_rounds,
)

BLUEFOG = json.loads((Path(__file__).parent / "data" / "bluefog_topologies.json").read_text())["dynamic"]

GENERATORS = {
    "OnePeer(ExponentialTwoGraph)": lambda n, rank: GetDynamicOnePeerSendRecvRanks(ExponentialTwoGraph(n), rank),
    "OnePeer(MeshGrid2DGraph)": lambda n, rank: GetDynamicOnePeerSendRecvRanks(MeshGrid2DGraph(n), rank),
    "Exp2DynamicMachine(local_size=2)": lambda n, rank: GetExp2DynamicSendRecvMachineRanks(n, 2, rank, rank % 2),
    "InnerOuterRing(local_size=4)": lambda n, rank: GetInnerOuterRingDynamicSendRecvRanks(n, 4, rank),
    "InnerOuterExpo2(local_size=4)": lambda n, rank: GetInnerOuterExpo2DynamicSendRecvRanks(n, 4, rank),
}

INNER_OUTER = [GetInnerOuterRingDynamicSendRecvRanks, GetInnerOuterExpo2DynamicSendRecvRanks]

few = settings(max_examples=40)


def fleet(function, world_size, local_size):
    return [function(world_size, local_size, rank) for rank in range(world_size)]


def one_peer_fleet(graph):
    return [GetDynamicOnePeerSendRecvRanks(graph, rank) for rank in range(len(graph))]


def round_matrix(edges, size):
    """All agents average their own and the received values, equally."""
    matrix = np.eye(size)
    for source, destination in edges:
        matrix[destination, source] = 1.0
    return matrix / matrix.sum(axis=1, keepdims=True)


@st.composite
def machines(draw):
    local_size = draw(st.integers(1, 9))
    count = draw(st.integers(1, 9))
    assume(local_size != 2 or count == 1)
    return count * local_size, local_size


@st.composite
def digraphs(draw):
    size = draw(st.integers(1, 9))
    possible = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1))
    graph = nx.DiGraph()
    graph.add_nodes_from(draw(st.permutations(range(size))))
    graph.add_edges_from(draw(st.sets(possible)))
    return graph


@pytest.mark.parametrize("name", GENERATORS)
def test_sequence_equals_bluefogs_for_every_recorded_size(name):
    assert len(BLUEFOG[name]) >= 3
    for size, expected in BLUEFOG[name].items():
        assert len(expected) == int(size)
        for rank, rounds in enumerate(expected):
            actual = [list(pair) for pair in islice(GENERATORS[name](int(size), rank), len(rounds))]
            assert actual == rounds


@few
@given(graph=digraphs())
def test_one_peer_sends_and_receives_match_on_any_graph(graph):
    for edges in collect_rounds(one_peer_fleet(graph), 12):
        assert {source for source, _ in edges} == {
            rank for rank in graph if any(peer != rank for peer in graph.successors(rank))
        }
        assert all(graph.has_edge(*edge) and edge[0] != edge[1] for edge in edges)


@few
@given(graph=digraphs())
def test_one_peer_uses_every_edge_of_an_agent_once_before_it_repeats(graph):
    for rank, generator in enumerate(one_peer_fleet(graph)):
        out = sorted(set(graph.successors(rank)) - {rank}, key=lambda peer: (peer - rank) % len(graph))
        sent = [send for send, _ in islice(generator, 2 * len(out))]
        assert sent == [[peer] for peer in out] * 2


@few
@given(world=machines(), function=st.sampled_from(INNER_OUTER))
def test_inner_outer_rounds_match_and_are_permutations(world, function):
    world_size, local_size = world
    for edges in collect_rounds(fleet(function, *world), 3 * local_size):
        assert all(source != destination for source, destination in edges)
        all_ranks = list(range(world_size)) if world_size > 1 else []
        assert sorted(source for source, _ in edges) == all_ranks
        assert sorted(destination for _, destination in edges) == all_ranks


@few
@given(world=machines(), function=st.sampled_from(INNER_OUTER))
def test_inner_outer_sends_one_agent_of_each_machine_outside(world, function):
    world_size, local_size = world
    for t, edges in enumerate(collect_rounds(fleet(function, *world), 2 * local_size)):
        outside = [(a, b) for a, b in edges if a // local_size != b // local_size]
        travellers = [] if world_size == local_size else list(range(t % local_size, world_size, local_size))
        assert [a for a, _ in outside] == travellers
        assert all(a % local_size == b % local_size for a, b in outside)


@few
@given(world=machines(), function=st.sampled_from(INNER_OUTER))
def test_inner_outer_connects_all_agents_over_its_rounds(world, function):
    world_size, local_size = world
    union = nx.DiGraph()
    union.add_nodes_from(range(world_size))
    for edges in collect_rounds(fleet(function, *world), 4 * local_size):
        union.add_edges_from(edges)
    assert nx.is_strongly_connected(union)


@pytest.mark.parametrize("function", INNER_OUTER)
def test_one_machine_has_only_inner_rounds(function):
    ring = collect_rounds(fleet(function, 5, 5), 1)[0]
    assert ring == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]


def test_one_machine_of_the_inner_outer_exponential_graph_is_the_one_peer_exponential_graph():
    alone = collect_rounds(fleet(GetInnerOuterExpo2DynamicSendRecvRanks, 8, 8), 6)
    assert alone == collect_rounds(one_peer_fleet(ExponentialTwoGraph(8)), 6)


def test_one_agent_a_machine_has_only_outer_rounds():
    alone = collect_rounds(fleet(GetInnerOuterExpo2DynamicSendRecvRanks, 8, 1), 6)
    assert alone == collect_rounds(one_peer_fleet(ExponentialTwoGraph(8)), 6)
    assert collect_rounds(fleet(GetInnerOuterRingDynamicSendRecvRanks, 3, 1), 1) == [[(0, 1), (1, 2), (2, 0)]]


@few
@given(machine_count=st.integers(1, 20), local_size=st.integers(1, 4))
def test_machine_schedule_is_the_one_peer_exponential_graph_over_machines(machine_count, local_size):
    def agent(rank):
        return GetExp2DynamicSendRecvMachineRanks(machine_count * local_size, local_size, rank, rank % local_size)

    expected = collect_rounds(one_peer_fleet(ExponentialTwoGraph(machine_count)), 12)
    for local_rank in range(local_size):
        machines_view = [agent(machine * local_size + local_rank) for machine in range(machine_count)]
        assert collect_rounds(machines_view, 12) == expected


@pytest.mark.parametrize("exponent", [1, 2, 3, 4, 5])
def test_one_peer_exponential_rounds_average_exactly_when_the_size_is_a_power_of_two(exponent):
    size = 2**exponent
    rounds = collect_rounds(one_peer_fleet(ExponentialTwoGraph(size)), exponent)
    product = reduce(lambda done, edges: round_matrix(edges, size) @ done, rounds, np.eye(size))
    assert np.array_equal(product, np.full((size, size), 1.0 / size))


def test_a_single_agent_has_no_peers():
    for generator in (
        GetDynamicOnePeerSendRecvRanks(RingGraph(1), 0),
        GetExp2DynamicSendRecvMachineRanks(1, 1, 0, 0),
        GetInnerOuterRingDynamicSendRecvRanks(1, 1, 0),
        GetInnerOuterExpo2DynamicSendRecvRanks(1, 1, 0),
    ):
        assert list(islice(generator, 3)) == [([], [])] * 3


def test_an_agent_without_destinations_still_receives():
    graph = nx.DiGraph([(0, 1), (2, 1), (2, 0)])
    listener = GetDynamicOnePeerSendRecvRanks(graph, 1)
    assert list(islice(listener, 3)) == [([], [0]), ([], [0, 2]), ([], [0])]


def test_yielded_lists_may_be_changed_by_the_caller():
    generator = GetDynamicOnePeerSendRecvRanks(RingGraph(3, 2), 0)
    send, receive = next(generator)
    send.clear()
    receive.clear()
    assert next(generator) == ([1], [2])


@pytest.mark.parametrize("function", INNER_OUTER)
def test_two_agents_on_each_of_several_machines_are_refused_when_called(function):
    with pytest.raises(ValueError, match=r"never average\. Use GetDynamicOnePeerSendRecvRanks"):
        function(4, 2, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GetDynamicOnePeerSendRecvRanks(RingGraph(3), 3), "self_rank 3 is out of range. With 3 agents"),
        (lambda: GetDynamicOnePeerSendRecvRanks(nx.DiGraph([(1, 2)]), 1), "nodes must be the ranks 0 to 1"),
        (lambda: GetInnerOuterRingDynamicSendRecvRanks(7, 3, 0), "7 agents do not fill machines of 3"),
        (lambda: GetInnerOuterExpo2DynamicSendRecvRanks(3, 4, 0), "3 agents do not fill machines of 4"),
        (lambda: GetInnerOuterExpo2DynamicSendRecvRanks(6, 0, 0), "local_size must be at least 1"),
        (lambda: GetInnerOuterRingDynamicSendRecvRanks(0, 1, 0), "world_size must be at least 1"),
        (lambda: GetInnerOuterRingDynamicSendRecvRanks(6, 3, 6), "self_rank 6 is out of range"),
        (lambda: GetExp2DynamicSendRecvMachineRanks(5, 2, 0, 0), "5 agents do not fill machines of 2"),
        (lambda: GetExp2DynamicSendRecvMachineRanks(8, 4, 5, 2), "rank 5 has local rank 1, not 2"),
        (lambda: GetExp2DynamicSendRecvMachineRanks(8, 4, 5, 5), "local_rank 5 is out of range"),
    ],
)
def test_bad_argument_is_refused_when_called_and_not_at_the_first_round(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_collecting_finds_an_agent_that_is_a_round_ahead():
    generators = one_peer_fleet(ExponentialTwoGraph(4))
    next(generators[2])
    with pytest.raises(ValueError, match=r"in round 0 edge \(\d, \d\) has no (send|receive)"):
        collect_rounds(generators, 1)


def test_collecting_resumes_at_the_round_where_it_stopped():
    generators = one_peer_fleet(ExponentialTwoGraph(8))
    in_pieces = collect_rounds(generators, 2) + collect_rounds(generators, 3)
    assert in_pieces == collect_rounds(one_peer_fleet(ExponentialTwoGraph(8)), 5)
