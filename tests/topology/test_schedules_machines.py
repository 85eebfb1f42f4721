"""Topologies that know machines, and schedules made of schedules: their algebra, and Ring-Star's table."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.topology import (
    AllReduce,
    Alternating,
    BaseGraph,
    EveryH,
    GatewayRingGraph,
    Idle,
    Kronecker,
    OnePeerExponential,
    RandomMatchings,
    RingGraph,
    RingRandom,
    RingStar,
    RingStarDelegates,
    RingStarRandom,
    ShiftOne,
    Static,
    between_machines,
    find,
    inside_machines,
    mixing_matrix,
    spectral_gap,
)
from support.topology_suite import product

few = settings(max_examples=30)


@st.composite
def schedules(draw, size=None):
    size = draw(st.integers(1, 6)) if size is None else size
    kinds = [AllReduce, Idle, OnePeerExponential, BaseGraph, RandomMatchings, lambda n: Static(RingGraph(n))]
    return draw(st.sampled_from(kinds))(size)


@few
@given(schedules(), schedules(), st.integers(0, 100))
def test_between_and_inside_machines_is_the_kronecker_product(between, inside, round):
    both = Kronecker(between, inside)
    np.testing.assert_array_equal(both.matrix(round), np.kron(between.matrix(round), inside.matrix(round)))


@few
@given(schedules(), schedules(), st.integers(0, 100))
def test_a_round_between_machines_and_one_inside_are_a_round_of_both(between, inside, round):
    apart = between_machines(between, inside.size).matrix(round) @ inside_machines(inside, between.size).matrix(round)
    np.testing.assert_allclose(apart, Kronecker(between, inside).matrix(round), rtol=0, atol=1e-15)


def test_agents_are_numbered_machine_by_machine():
    matrix = between_machines(OnePeerExponential(4), 3).matrix(0)
    assert np.flatnonzero(matrix[7]).tolist() == [4, 7]
    matrix = inside_machines(AllReduce(3), 4).matrix(0)
    assert np.flatnonzero(matrix[7]).tolist() == [6, 7, 8]


@few
@given(st.lists(schedules(size=4), min_size=1, max_size=4), st.integers(0, 60))
def test_alternating_schedules_see_their_own_rounds_without_gaps(turns, round):
    owner, own = round % len(turns), round // len(turns)
    np.testing.assert_array_equal(Alternating(turns).matrix(round), turns[owner].matrix(own))


@few
@given(schedules(size=4), schedules(size=4), st.integers(1, 6), st.integers(1, 8))
def test_the_rare_schedule_runs_every_h_rounds(often, rarely, every, blocks):
    both = EveryH(often, rarely, every)
    output = [both.matrix(round) for round in range(every * blocks)]
    rare = output[every - 1 :: every]
    rest = [matrix for round, matrix in enumerate(output) if (round + 1) % every]
    assert len(rare) == blocks
    for turn, matrix in enumerate(rare):
        np.testing.assert_array_equal(matrix, rarely.matrix(turn))
    for turn, matrix in enumerate(rest):
        np.testing.assert_array_equal(matrix, often.matrix(turn))


@pytest.mark.parametrize(
    ("schedule", "period"),
    [
        (Kronecker(OnePeerExponential(8), BaseGraph(3)), 3),
        (Kronecker(OnePeerExponential(16), ShiftOne(12)), 12),
        (Kronecker(RandomMatchings(4), AllReduce(2)), None),
        (Alternating([OnePeerExponential(16), ShiftOne(16)]), 16),
        (Alternating([OnePeerExponential(16), Idle(16), AllReduce(16)]), 12),
        (Alternating([AllReduce(4), RandomMatchings(4)]), None),
        (EveryH(OnePeerExponential(16), AllReduce(16), 5), 5),
        (EveryH(OnePeerExponential(16), AllReduce(16), 4), 16),
        (EveryH(OnePeerExponential(16), ShiftOne(16), 3), 24),
        (EveryH(RandomMatchings(4), AllReduce(4), 2), None),
        (EveryH(AllReduce(4), RandomMatchings(4), 2), None),
        (EveryH(RandomMatchings(4), AllReduce(4), 1), 1),
    ],
)
def test_periods_of_composed_schedules_are_the_shortest(schedule, period):
    assert schedule.period == period
    if period is not None:
        output = [schedule.matrix(round) for round in range(2 * period)]
        repeats = [
            lag for lag in range(1, period + 1) if all((output[t] == output[t + lag]).all() for t in range(period))
        ]
        assert repeats == [period]


def test_composed_descriptions_list_their_components():
    base, all_reduce, shift = BaseGraph(8), AllReduce(8), ShiftOne(8)
    made = [
        EveryH(base, all_reduce, 4),
        EveryH(base, all_reduce, 5),
        EveryH(all_reduce, base, 4),
        Alternating([base, shift]),
        Alternating([shift, base]),
        Kronecker(base, shift),
        Kronecker(shift, base),
    ]
    assert len({schedule.describe() for schedule in made}) == len(made)


def test_an_all_reduce_every_h_rounds_is_exact_after_h():
    schedule = find("gossip-pga").schedule(12, every=3)
    np.testing.assert_allclose(product(schedule, 3), 1 / 12, rtol=0, atol=1e-16)
    assert np.abs(product(schedule, 2) - 1 / 12).max() > 0.1


@pytest.mark.parametrize(
    "make", [lambda a, b: Alternating([a, b]), lambda a, b: EveryH(a, b, 2)], ids=["by turns", "every H"]
)
def test_schedules_of_different_sizes_cannot_alternate(make):
    with pytest.raises(ValueError, match="4 and 8 agents do not go together"):
        make(AllReduce(8), AllReduce(4))


def test_alternation_needs_a_schedule_and_h_of_at_least_one():
    with pytest.raises(ValueError, match="at least one"):
        Alternating([])
    with pytest.raises(ValueError, match="every must be at least 1"):
        EveryH(AllReduce(4), AllReduce(4), 0)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_the_mixings_of_an_all_reduce_are_those_of_its_edges(size):
    schedule = AllReduce(size)
    np.testing.assert_array_equal(schedule.matrix(0), np.full((size, size), 1 / size))
    assert schedule.mixing(3, size - 1).destination_ranks == tuple(range(size - 1))


def test_hierarchical_averages_are_of_whole_machines():
    schedule = find("hierarchical").schedule(16, agents_per_machine=4)
    expected = np.kron(OnePeerExponential(4).matrix(1), np.full((4, 4), 1 / 4))
    np.testing.assert_array_equal(schedule.matrix(1), expected)
    np.testing.assert_allclose(product(schedule), 1 / 16, rtol=0, atol=1e-16)


def test_alternating_machine_schedules_are_exact_if_both_are():
    schedule = find("machines-by-turns").schedule(32, agents_per_machine=4)
    np.testing.assert_allclose(product(schedule), 1 / 32, rtol=0, atol=1e-16)
    inside = inside_machines(AllReduce(4), 8)
    np.testing.assert_array_equal(schedule.matrix(0), inside.matrix(0))


@pytest.mark.parametrize(
    ("size", "local", "dense_gap", "gateway_gap"),
    [(16, 4, 0.6667, 0.0590), (64, 4, 0.0507, 0.0062), (64, 8, 0.1953, None)],
)
def test_ring_star_has_the_measured_gaps(size, local, dense_gap, gateway_gap):
    assert spectral_gap(RingStar(size, local).matrix(0)).value == pytest.approx(dense_gap, abs=5e-5)
    if gateway_gap is not None:
        assert spectral_gap(GatewayRingGraph(size, local)).value == pytest.approx(gateway_gap, abs=5e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 16])
def test_ring_star_is_a_ring_with_groups_of_one_and_an_all_reduce_with_one_group(size):
    np.testing.assert_array_equal(RingStar(size, 1).matrix(0), mixing_matrix(RingGraph(size)))
    np.testing.assert_allclose(RingStar(size, size).matrix(0), 1 / size, rtol=0, atol=1e-16)


@pytest.mark.parametrize(("size", "local"), [(1, 1), (6, 1), (6, 6), (6, 3), (16, 4), (64, 4), (12, 4)])
def test_delegates_do_in_three_rounds_what_ring_star_does_in_one(size, local):
    by_delegates = product(RingStarDelegates(size, local))
    np.testing.assert_allclose(by_delegates, RingStar(size, local).matrix(0), rtol=0, atol=1e-16)


@pytest.mark.parametrize(("size", "local"), [(16, 4), (32, 4), (64, 4), (64, 16)])
def test_a_delegate_has_the_handshakes_of_the_papers_table(size, local):
    schedule = RingStarDelegates(size, local)
    busiest = [
        max(len({*view.source_ranks, *view.destination_ranks}) for view in views)
        for views in ([schedule.mixing(round, rank) for rank in range(size)] for round in range(3))
    ]
    assert busiest == [local - 1, 2, local - 1]
    assert sum(busiest) == 2 * (local - 1) + 2


@few
@given(st.sampled_from([(8, 2), (16, 4), (24, 3), (12, 1)]), st.integers(0, 2**20), st.integers(0, 1000))
def test_ring_star_over_ring_random_pairs_groups_as_ring_random_does(groups_of, seed, round):
    size, local = groups_of
    expected = np.kron(RingRandom(size // local, seed).matrix(round), np.full((local, local), 1 / local))
    np.testing.assert_array_equal(RingStarRandom(size, local, seed).matrix(round), expected)


def test_an_odd_number_of_groups_cannot_be_paired():
    with pytest.raises(ValueError, match="3 groups of 4 cannot be paired"):
        RingStarRandom(12, 4)
    with pytest.raises(ValueError, match="15 is odd"):
        RingStarRandom(15)
    np.testing.assert_allclose(RingStarRandom(15, 15).matrix(0), 1 / 15, rtol=0, atol=1e-16)


@pytest.mark.parametrize(("size", "groups"), [(16, 4), (64, 8), (12, 4), (7, 7), (1, 1), (32, 8)])
def test_groups_are_square_by_default(size, groups):
    assert RingStar(size).between.size == groups


@pytest.mark.parametrize("family", [RingStar, RingStarDelegates, RingStarRandom, GatewayRingGraph])
def test_groups_must_have_equal_sizes(family):
    with pytest.raises(ValueError, match="10 agents do not fill groups of 4"):
        family(10, 4)


def test_gateways_are_the_only_way_out_of_a_group():
    graph = GatewayRingGraph(20, 5)
    crossing = {(source, destination) for source, destination in graph.edges if source // 5 != destination // 5}
    assert crossing == {(0, 5), (5, 0), (5, 10), (10, 5), (10, 15), (15, 10), (15, 0), (0, 15)}
    assert all(
        graph.has_edge(*pair) for group in range(4) for pair in nx.complete_graph(range(5 * group, 5 * group + 5)).edges
    )
