"""One message a round: what each of these schedules promises by its own construction."""

from itertools import permutations
from math import log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.algorithms.schedule_weights import ScheduleWeights
from shoal.topology import (
    ExponentialTwoGraph,
    GetDynamicOnePeerSendRecvRanks,
    GetInnerOuterExpo2DynamicSendRecvRanks,
    GetInnerOuterRingDynamicSendRecvRanks,
    InnerOuterExponential,
    InnerOuterRing,
    MeshGrid2DGraph,
    OnePeerExponential,
    OnePeerGrid,
    OnePeerHypercube,
    RandomMatchings,
    RingRandom,
    ShiftOne,
    collect_rounds,
)
from support.topology_suite import product

few = settings(max_examples=30)
evens = st.integers(1, 20).map(lambda half: 2 * half)
seeds = st.integers(0, 2**64 - 1)


def pairs(schedule, round):
    """{agent: its sender}; idle agents have none."""
    views = [schedule.mixing(round, rank) for rank in range(schedule.size)]
    return {view.rank: view.source_ranks[0] for view in views if view.source_ranks}


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("family", [OnePeerExponential, OnePeerHypercube])
def test_powers_of_two_are_exact_after_log2_rounds(family, size):
    schedule = family(size)
    assert schedule.period == max(1, round(log2(size)))
    np.testing.assert_array_equal(product(schedule), np.full((size, size), 1 / size))


def test_one_peer_exponential_graphs_are_exact_in_any_order():
    schedule = OnePeerExponential(16)
    for order in permutations(range(4)):
        total = np.linalg.multi_dot([schedule.matrix(round) for round in order])
        np.testing.assert_array_equal(total, np.full((16, 16), 1 / 16))


def test_the_one_peer_exponential_graph_of_25_is_never_exact():
    total = product(OnePeerExponential(25))
    assert np.linalg.norm(total - 1 / 25, 2) == pytest.approx(0.19, abs=0.005)
    assert np.linalg.norm(np.linalg.matrix_power(total, 7) - 1 / 25, 2) > 1e-6


@pytest.mark.parametrize(("size", "shape"), [*((size, None) for size in range(1, 20)), (12, (2, 6)), (6, (6, 1))])
def test_the_one_peer_grid_is_bluefogs(size, shape):
    """Listing 7 of the BlueFog paper: its edges, and as sender shares one half for each of the two."""
    schedule, grid = OnePeerGrid(size, shape), MeshGrid2DGraph(size, shape)
    remote = [GetDynamicOnePeerSendRecvRanks(grid, rank) for rank in range(size)]
    weights = ScheduleWeights(schedule)
    for round, edges in enumerate(collect_rounds(remote, 2 * schedule.period)):
        result = weights[round]
        ours = zip(result.source[~result.own].tolist(), result.destination[~result.own].tolist(), strict=True)
        assert sorted(ours) == edges
        assert result.push.tolist() == [0.5 if size > 1 else 1.0] * len(result.push)
    with pytest.raises(ValueError, match="has 4 places for 5 agents"):
        OnePeerGrid(5, (2, 2))


@pytest.mark.parametrize("size", range(1, 20))
def test_the_one_peer_exponential_graph_is_bluefogs(size):
    fleet = [GetDynamicOnePeerSendRecvRanks(ExponentialTwoGraph(size), rank) for rank in range(size)]
    schedule = OnePeerExponential(size)
    for round, edges in enumerate(collect_rounds(fleet, 12)):
        assert {destination: source for source, destination in edges} == pairs(schedule, round)


@pytest.mark.parametrize(
    ("family", "generator"),
    [
        (InnerOuterRing, GetInnerOuterRingDynamicSendRecvRanks),
        (InnerOuterExponential, GetInnerOuterExpo2DynamicSendRecvRanks),
    ],
)
@pytest.mark.parametrize(("size", "local"), [(1, 1), (5, 1), (2, 2), (6, 6), (6, 3), (12, 4), (15, 5), (40, 8), (9, 3)])
def test_inner_outer_schedules_are_bluefogs(family, generator, size, local):
    schedule = family(size, local)
    fleet = [generator(size, local, rank) for rank in range(size)]
    for round, edges in enumerate(collect_rounds(fleet, 2 * schedule.period + 3)):
        assert {destination: source for source, destination in edges} == pairs(schedule, round)


@pytest.mark.parametrize("family", [InnerOuterRing, InnerOuterExponential])
def test_two_agents_on_several_machines_are_refused(family):
    with pytest.raises(ValueError, match="2 agents on each of 3 machines"):
        family(6, 2)


@few
@given(evens, st.integers(0, 1000))
def test_shift_one_is_baguas(size, step):
    expected = {}
    for rank in range(size):
        if rank < size // 2:
            expected[rank] = (step + rank) % ((size + 1) // 2) + size // 2
        else:
            expected[rank] = (rank - size // 2 - step) % (size // 2)
    assert pairs(ShiftOne(size), step) == expected


@given(evens)
def test_shift_one_pairs_each_agent_with_all_of_the_other_half_once_a_period(size):
    schedule = ShiftOne(size)
    met = [pairs(schedule, round)[0] for round in range(schedule.period)]
    assert sorted(met) == list(range(size // 2, size))


@few
@given(st.integers(1, 30), seeds, st.integers(0, 10**6))
def test_random_matchings_pair_all_but_one_of_an_odd_number(size, seed, round):
    result = pairs(RandomMatchings(size, seed), round)
    assert len(result) == size // 2 * 2
    assert all(result[result[rank]] == rank != result[rank] for rank in result)


@few
@given(st.integers(1, 24), seeds, st.integers(0, 10**6))
def test_a_matching_is_a_projection(size, seed, round):
    matrix = RandomMatchings(size, seed).matrix(round)
    np.testing.assert_array_equal(matrix @ matrix, matrix)


def test_every_matching_is_as_likely_as_any_other():
    rounds = 2000
    schedule = RandomMatchings(4, seed=5)
    drawn = [schedule.mixing(round, 0).source_ranks for round in range(rounds)]
    counts = [drawn.count(matching) for matching in set(drawn)]
    assert len(counts) == 3
    assert max(abs(count - rounds / 3) for count in counts) < 5 * np.sqrt(rounds * 2 / 9)


@pytest.mark.parametrize("size", [16, 64])
def test_random_matchings_contract_as_the_formula_says(size):
    # E[W] = I / 2 + (J n - I) / (2 (n - 1)), and W^T W = W, so the rate is an eigenvalue of a mean of matrices.
    schedule = RandomMatchings(size)
    mean = np.mean([schedule.matrix(round) for round in range(4000)], axis=0)
    off_diagonal = mean[~np.eye(size, dtype=bool)]
    expected = 0.5 / (size - 1)
    assert np.diag(mean) == pytest.approx(0.5)
    assert off_diagonal.mean() == pytest.approx(expected)
    assert np.abs(off_diagonal - expected).max() < 6 * np.sqrt(0.5 * expected / 4000)
    assert 0.5 - expected == pytest.approx({16: 0.467, 64: 0.492}[size], abs=5e-4)


@given(evens)
def test_ring_random_hops_are_one_and_powers_of_two_and_one(size):
    expected = [1] + [2**i + 1 for i in range(1, 12) if 2**i + 1 < size]
    assert list(RingRandom(size).hops) == expected


def test_ring_random_of_16_has_the_four_hops_of_the_paper():
    assert RingRandom(16).hops == (1, 3, 5, 9)


@few
@given(evens, seeds, st.integers(0, 10**6))
def test_ring_random_pairs_each_even_rank_with_an_odd_one_by_one_hop_for_all(size, seed, round):
    schedule = RingRandom(size, seed)
    result = pairs(schedule, round)
    assert sorted(result) == list(range(size))
    ahead = {(result[rank] - rank) % size for rank in range(0, size, 2)}
    assert len(ahead) == 1
    assert ahead <= {way * hop % size for hop in schedule.hops for way in (1, -1)}
    assert all(result[result[rank]] == rank for rank in range(size))


def test_ring_random_draws_every_hop_both_ways_equally_often():
    schedule, rounds = RingRandom(32, seed=3), 2000
    ahead = [schedule.mixing(round, 0).source_ranks[0] for round in range(rounds)]
    possible = sorted({way * hop % 32 for hop in schedule.hops for way in (1, -1)})
    assert sorted(set(ahead)) == possible
    share = 1 / len(possible)
    for hop in possible:
        assert abs(ahead.count(hop) - rounds * share) < 5 * np.sqrt(rounds * share)


@pytest.mark.parametrize("family", [RandomMatchings, RingRandom])
def test_another_seed_draws_other_rounds(family):
    one, other = family(32, seed=1), family(32, seed=2)
    assert any(pairs(one, round) != pairs(other, round) for round in range(8))


@pytest.mark.parametrize("size", [3, 5, 31])
@pytest.mark.parametrize("family", [ShiftOne, RingRandom])
def test_an_odd_number_cannot_all_be_paired(family, size):
    with pytest.raises(ValueError, match=f"even number of agents, and {size} is odd"):
        family(size)


@pytest.mark.parametrize("size", [3, 6, 24, 100])
def test_a_hypercube_has_a_power_of_two(size):
    with pytest.raises(ValueError, match=f"power of two, and {size} is none"):
        OnePeerHypercube(size)


@pytest.mark.parametrize(
    "family", [OnePeerExponential, OnePeerHypercube, ShiftOne, RandomMatchings, RingRandom, InnerOuterRing]
)
def test_a_single_agent_keeps_its_value(family):
    view = family(1).mixing(7, 0)
    assert (view.self_weight, view.source_ranks, view.destination_ranks) == (1.0, (), ())
