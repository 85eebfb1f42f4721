"""CECA: exact in ceil(log2 n) rounds of one message with two buffers, and an ordinary schedule without the second."""

from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.topology import Ceca, CecaPairs, OnePeerExponential, rounds_to
from support.topology_suite import product

FAMILIES = [pytest.param(Ceca, size) for size in range(1, 41)] + [
    pytest.param(CecaPairs, size) for size in (1, *range(2, 41, 2))
]


@pytest.mark.parametrize(("family", "size"), FAMILIES)
def test_the_average_is_exact_after_the_logarithm_of_rounds(family, size):
    values = np.random.default_rng(size).normal(size=(size, 3))
    schedule = family(size)
    assert len(schedule.steps) == (ceil(log2(size)) if size > 1 else 0)
    np.testing.assert_allclose(schedule.average(values), np.tile(values.mean(axis=0), (size, 1)), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("family", "size"), FAMILIES)
def test_the_matrices_of_both_buffers_have_the_exact_average_as_their_product(family, size):
    schedule = family(size)
    total = np.eye(2 * size)
    for round in range(schedule.period):
        total = schedule.buffered_matrix(round) @ total
    np.testing.assert_allclose(total[:size, :size], 1 / size, rtol=0, atol=1e-15)
    np.testing.assert_array_equal(total[:size, size:], 0)


@pytest.mark.parametrize(("family", "size"), FAMILIES)
def test_every_agent_sends_and_receives_one_message_a_round(family, size):
    schedule = family(size)
    for round in range(len(schedule.steps)):
        for rank in range(size):
            view = schedule.mixing(round, rank)
            assert len(view.source_ranks) == len(view.destination_ranks) == 1
            assert view.source_ranks == (schedule.sources(round)[rank],)
            if family is CecaPairs:
                assert view.source_ranks == view.destination_ranks


@given(st.integers(2, 10**6))
def test_windows_grow_from_none_to_all_other_agents(size):
    steps = Ceca(size).steps
    after = [2 * step.window + step.doubles_up for step in steps]
    assert [step.window for step in steps] == [0, *after[:-1]]
    assert after[-1] == size - 1


@pytest.mark.parametrize(("family", "size"), FAMILIES)
def test_before_each_round_agents_hold_the_means_of_their_windows(family, size):
    schedule = family(size)
    held = schedule.start(np.eye(size))
    own = np.eye(size, dtype=bool)
    for round, step in enumerate(schedule.steps):
        in_window = held.mean > 0
        assert in_window[own].all() and (in_window.sum(axis=1) == step.window + 1).all()
        np.testing.assert_allclose(held.mean[in_window], 1 / (step.window + 1), rtol=1e-12)
        if step.window:
            np.testing.assert_array_equal(held.others > 0, in_window & ~own)
            np.testing.assert_allclose(held.others[in_window & ~own], 1 / step.window, rtol=1e-12)
        held = step.update(held, step.message(held)[schedule.sources(round)])
    np.testing.assert_allclose(held.mean, 1 / size, rtol=1e-12)


def test_one_round_less_is_not_exact():
    for size in (3, 6, 7, 12):
        schedule = Ceca(size)
        held = schedule.start(np.eye(size))
        for round, step in enumerate(schedule.steps[:-1]):
            held = step.update(held, step.message(held)[schedule.sources(round)])
        assert np.abs(held.mean - 1 / size).max() > 0.05


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_powers_of_two_are_exact_without_the_second_buffer(size):
    np.testing.assert_array_equal(product(Ceca(size)), product(OnePeerExponential(size)))
    np.testing.assert_array_equal(product(CecaPairs(size)), np.full((size, size), 1 / size))


@pytest.mark.parametrize("size", [3, 6, 12, 25])
def test_other_numbers_need_the_second_buffer(size):
    assert np.abs(product(Ceca(size)) - 1 / size).max() > 0.01


@pytest.mark.parametrize("size", [6, 12, 24, 48])
def test_pairs_of_three_times_a_power_of_two_are_exact_without_the_second_buffer(size):
    np.testing.assert_allclose(product(CecaPairs(size)), 1 / size, rtol=0, atol=1e-15)
    assert CecaPairs(size).period == ceil(log2(size)) == rounds_to(CecaPairs(size), 1e-12, second_buffer=False).value


@pytest.mark.parametrize("family", [Ceca, CecaPairs])
def test_the_property_states_whether_the_second_buffer_is_needed(family):
    for size in range(2, 50, 1 if family is Ceca else 2):
        schedule = family(size)
        assert schedule.needs_second_buffer == (np.abs(product(schedule) - 1 / size).max() > 1e-12), size


def test_rounds_are_those_of_the_second_buffer_unless_used_in_training():
    assert [rounds_to(Ceca(6), 1e-3, second_buffer=buffered).value for buffered in (True, False)] == [3, 16]
    assert [rounds_to(CecaPairs(10), 1e-3, second_buffer=buffered).value for buffered in (True, False)] == [4, 10]


@pytest.mark.parametrize("size", [3, 25])
def test_an_odd_number_has_no_pairs_and_the_error_names_two_ports(size):
    with pytest.raises(ValueError, match="Ceca, with two ports"):
        CecaPairs(size)


@pytest.mark.parametrize("size", [5, 6])
def test_a_fleet_of_agents_has_the_exact_mean(size):
    schedule = Ceca(size)

    def agent():
        import torch

        held = schedule.start(torch.full((3,), float(shoal.rank())))
        for round, step in enumerate(schedule.steps):
            rank = schedule.mixing(round, shoal.rank())
            received = shoal.neighbor_allreduce(
                step.message(held),
                self_weight=0.0,
                src_weights=dict.fromkeys(rank.source_ranks, 1.0),
                dst_weights=dict.fromkeys(rank.destination_ranks, 1.0),
            )
            held = step.update(held, received)
        return held.mean.tolist()

    for mean in shoal.Fleet(size, timeout=20.0).run(agent):
        assert mean == pytest.approx([(size - 1) / 2] * 3)
