"""Steps of training, simulated on networks so small that every time can be derived exactly."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.netmodel import Link, Messages, Network, Timeline, rounds_of, simulate
from shoal.topology import Circulant, OnePeerExponential, RingGraph, StarGraph

NIC = Link(latency=0.5, bandwidth=100.0)


def round_of(*messages: tuple[int, int, float]) -> list[Messages]:
    source, destination, nbytes = zip(*messages, strict=True)
    return [Messages.of(source, destination, nbytes)]


def seconds(network: Network, *steps: list[Messages], **options: object) -> float:
    return simulate(network, steps, **options).seconds


@given(
    nbytes=st.floats(0, 1e9),
    latency=st.floats(0, 1),
    bandwidth=st.floats(1e3, 1e9),
    overhead=st.floats(0, 0.1),
)
@settings(max_examples=60)
def test_one_message_takes_overhead_bytes_and_latency(
    nbytes: float, latency: float, bandwidth: float, overhead: float
) -> None:
    link = Link(latency, bandwidth, overhead)
    result = seconds(Network(2, link), round_of((0, 1, nbytes)))
    assert result == pytest.approx(overhead + nbytes / bandwidth + latency, rel=1e-9, abs=1e-15)
    assert result == pytest.approx(link.seconds(nbytes), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("degree", [1, 2, 3, 7])
def test_d_messages_of_one_nic_take_d_times_the_bytes_and_one_latency(degree: int) -> None:
    link = Link(0.5, 100.0, 0.125)
    (step,) = rounds_of(Circulant(8, range(1, degree + 1)), 50.0, 1)
    assert seconds(Network(8, link), step) == pytest.approx(degree * (0.125 + 0.5) + 0.5)


def test_received_messages_share_the_nic_too() -> None:
    assert seconds(Network(4, NIC), round_of((1, 0, 100.0), (2, 0, 100.0), (3, 0, 100.0))) == pytest.approx(3.5)


def test_both_directions_have_the_full_rate() -> None:
    assert seconds(Network(2, NIC), round_of((0, 1, 100.0), (1, 0, 100.0))) == pytest.approx(1.5)


def test_two_agents_on_one_machine_share_its_nic() -> None:
    step = round_of((0, 2, 100.0), (1, 3, 100.0))
    assert seconds(Network(4, NIC, agents_per_machine=2), step) == pytest.approx(2.5)
    assert seconds(Network(4, NIC, agents_per_machine=1), step) == pytest.approx(1.5)


def test_messages_within_a_machine_use_ports_and_not_the_nic() -> None:
    network = Network(4, NIC, agents_per_machine=2, inside=Link(0.25, 1000.0))
    assert seconds(network, round_of((0, 1, 100.0))) == pytest.approx(0.35)
    # The NIC is shared by the two that leave, and not by the one that stays.
    both = simulate(network, [round_of((0, 1, 100.0), (0, 2, 100.0), (1, 3, 100.0))])
    assert both.ended[0] == pytest.approx([0.0, 0.35, 2.5, 2.5], abs=0.01)


@pytest.mark.parametrize("slower", [{}, {"inside": Link(bandwidth=1)}, {"flow": Link(bandwidth=0.5)}], ids=str)
def test_overheads_take_turns_on_a_nic_also_where_ports_or_flows_are_slower(slower: dict[str, Link]) -> None:
    """Four messages take the NIC 1 + 1/10 s each, and each port or flow less than that in all."""
    network = Network(8, Link(0, 10, overhead=1), 4, **slower)
    assert simulate(network, [[Messages.of([0, 1, 2, 3], [4, 5, 6, 7], 1.0)]]).seconds == pytest.approx(4.4)


def test_a_finished_message_leaves_its_rate_to_the_others() -> None:
    """Two share 100 B/s until the short one has sent 50 B after a second. The long one then has 100 of 150 B left."""
    timeline = simulate(Network(3, Link(0.0, 100.0)), [round_of((0, 1, 50.0), (0, 2, 150.0))])
    assert timeline.ended[0] == pytest.approx([0.0, 1.0, 2.0])


def test_a_message_limited_elsewhere_leaves_its_rate_to_the_others() -> None:
    """Agent 2 receives at most 20 B/s, so agent 1 gets the other 80 of the sender's NIC."""
    network = Network(3, Link(0.0, 100.0), nics={2: Link(0.0, 20.0)})
    timeline = simulate(network, [round_of((0, 1, 80.0), (0, 2, 100.0))])
    assert timeline.ended[0] == pytest.approx([0.0, 1.0, 5.0])


def test_latency_is_that_of_the_slowest_part_and_of_each_machine_or_link() -> None:
    network = Network(4, NIC, nics={3: Link(2.0, 100.0)}, links={(0, 1): Link(5.0, 50.0)})
    timeline = simulate(network, [round_of((0, 1, 100.0), (2, 3, 100.0), (1, 0, 100.0))])
    assert timeline.ended[0] == pytest.approx([1.5, 7.0, 0.0, 3.0])


def test_one_flow_is_limited_and_two_fill_the_nic() -> None:
    network = Network(3, Link(0.0, 100.0), flow=Link(bandwidth=50.0))
    assert seconds(network, round_of((0, 1, 100.0))) == pytest.approx(2.0)
    assert seconds(network, round_of((0, 1, 100.0), (0, 2, 100.0))) == pytest.approx(2.0)


def test_messages_on_a_path_without_limit_take_the_latency_only() -> None:
    assert seconds(Network(2, Link(0.25)), round_of((0, 1, 1e12))) == pytest.approx(0.25)
    assert seconds(Network(2, Link(0.25, overhead=0.5)), round_of((0, 1, 1e12))) == pytest.approx(0.75)


def test_an_agent_continues_when_its_own_messages_have_arrived() -> None:
    timeline = simulate(Network(3, NIC), [round_of((0, 1, 100.0)), round_of((0, 1, 100.0))])
    assert timeline.ended[:, 0].tolist() == [0.0, 0.0]
    assert timeline.ended[:, 1] == pytest.approx([2.5, 2.5], abs=1e-9)
    assert timeline.ended[:, 2].tolist() == [0.0, 0.0]


def test_exchanges_of_a_step_follow_each_other() -> None:
    there_and_back = [*round_of((0, 1, 100.0)), *round_of((1, 0, 100.0))]
    assert simulate(Network(2, NIC), [there_and_back]).ended[0] == pytest.approx([3.0, 1.5])


def test_computation_comes_before_messages() -> None:
    timeline = simulate(Network(2, NIC), [round_of((0, 1, 100.0), (1, 0, 100.0))] * 2, compute=2.0)
    assert timeline.started[:, 0] == pytest.approx([0.0, 3.5])
    assert timeline.computed[:, 0] == pytest.approx([2.0, 5.5])
    assert timeline.ended[:, 0] == pytest.approx([3.5, 7.0])


def test_a_straggler_delays_its_neighbours_and_then_theirs() -> None:
    """Agent 0 takes 9 s for its first step, in a ring in which each receives from the agent behind it."""
    compute = np.ones((3, 5))
    compute[0, 0] = 9.0
    steps = list(rounds_of(Circulant(5, [1]), 0.0, 3))
    timeline = simulate(Network(5, Link(0.0, 1.0)), steps, compute=compute)
    assert timeline.ended.tolist() == [[9, 9, 1, 1, 1], [10, 10, 10, 2, 2], [11, 11, 11, 11, 3]]


def test_the_slowest_agent_sets_the_pace_of_all_connected_agents() -> None:
    steps = list(rounds_of(RingGraph(4), 0.0, 40))
    timeline = simulate(Network(4, Link(0.0, 1.0)), steps, compute=[3.0, 1.0, 1.0, 1.0])
    assert timeline.seconds_per_step(skip=4) == pytest.approx(3.0)


def test_lag_hides_messages_that_are_shorter_than_the_computation() -> None:
    steps = list(rounds_of(RingGraph(2), 100.0, 20))
    network = Network(2, NIC)
    assert simulate(network, steps, 2.0).seconds_per_step() == pytest.approx(2.0 + 1.5)
    # Only the messages of the last step are waited for.
    assert seconds(network, *steps, compute=2.0, lag=1) == pytest.approx(20 * 2.0 + 1.5)


def test_lag_does_not_hide_messages_longer_than_the_computation() -> None:
    steps = list(rounds_of(RingGraph(2), 100.0, 40))
    lagged = simulate(Network(2, NIC), steps, 0.5, lag=1)
    assert lagged.seconds_per_step(skip=10) == pytest.approx(1.5)


def test_lag_lets_agents_be_apart_by_that_many_steps() -> None:
    compute = np.ones((6, 2))
    compute[0, 0] = 100.0
    timeline = simulate(Network(2, Link(0.0, 1.0)), list(rounds_of(RingGraph(2), 0.0, 6)), compute, lag=2)
    # The other one computes steps 0, 1 and 2, and then waits for the result of step 0.
    assert timeline.started[:, 1] == pytest.approx([0, 1, 2, 100, 101, 102])


def test_lag_keeps_the_messages_of_a_step_behind_those_of_the_one_before() -> None:
    """Messages of step 1 are ready when those of step 0 are half sent, and wait for them."""
    timeline = simulate(Network(2, Link(0.0, 100.0)), [round_of((0, 1, 400.0), (1, 0, 400.0))] * 3, 1.0, lag=1)
    assert timeline.ended[:, 0] == pytest.approx([5.0, 9.0, 13.0])


def test_overlap_sends_during_the_end_of_the_computation() -> None:
    step = round_of((0, 1, 100.0), (1, 0, 100.0))
    network = Network(2, NIC)
    assert seconds(network, step, compute=4.0, overlap=0.0) == pytest.approx(5.5)
    assert seconds(network, step, compute=4.0, overlap=0.25) == pytest.approx(4.5)
    assert seconds(network, step, compute=4.0, overlap=1.0) == pytest.approx(4.0)


def test_a_step_without_messages_takes_its_computation() -> None:
    assert seconds(Network(3, NIC), [], [], compute=2.0) == pytest.approx(4.0)
    assert seconds(Network(3, NIC)) == 0.0


def test_the_mean_of_a_step_may_leave_out_the_first() -> None:
    ended = np.array([[10.0, 9.0], [12.0, 11.0], [14.0, 13.0]])
    timeline = Timeline(ended, ended, ended)
    assert timeline.seconds == 14.0
    assert timeline.seconds_per_step() == pytest.approx(14 / 3)
    assert timeline.seconds_per_step(skip=1) == 2.0
    with pytest.raises(ValueError, match=r"3 steps are to be left out of 3\. Leave at least one"):
        timeline.seconds_per_step(skip=3)


@settings(max_examples=25)
@given(
    degree=st.integers(1, 4),
    local=st.sampled_from([1, 2, 4]),
    nbytes=st.floats(1.0, 1e6),
    latency=st.floats(0, 1e-2),
    rounds=st.integers(1, 4),
)
def test_equal_agents_take_the_time_of_the_alpha_beta_model(
    degree: int, local: int, nbytes: float, latency: float, rounds: int
) -> None:
    """Hops of whole machines, so that all NICs carry the same: local x degree messages each."""
    schedule = Circulant(8 * local, [hop * local for hop in range(1, degree + 1)])
    link = Link(latency, 1e6)
    result = seconds(Network(8 * local, link, local), *rounds_of(schedule, nbytes, rounds))
    assert result == pytest.approx(rounds * link.seconds(nbytes, degree * local), rel=1e-6)


@settings(max_examples=25)
@given(st.integers(2, 9), st.floats(1.0, 1e4), st.floats(0.1, 10.0))
def test_twice_the_bandwidth_and_half_the_latency_take_half_the_time(size: int, nbytes: float, unit: float) -> None:
    steps = [*rounds_of(StarGraph(size), nbytes, 2), *rounds_of(OnePeerExponential(size), nbytes, 3)]
    slow, fast = Link(unit, 100.0, 0.1 * unit), Link(unit / 2, 200.0, 0.05 * unit)
    one = simulate(Network(size, slow, 2, nics={0: Link(unit, 50.0)}), steps, compute=unit)
    other = simulate(Network(size, fast, 2, nics={0: Link(unit / 2, 100.0)}), steps, compute=unit / 2)
    np.testing.assert_allclose(other.ended * 2, one.ended, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lag": -1}, "lag is -1"),
        ({"lag": math.nan}, "lag is nan"),
        ({"overlap": 1.5}, "overlap is 1.5"),
        ({"compute": -1.0}, "compute has a time"),
        ({"compute": [1.0, math.nan]}, "compute has a time"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        simulate(Network(2, NIC), [round_of((0, 1, 1.0))], **options)


def test_messages_without_end_are_refused() -> None:
    with pytest.raises(ValueError, match="take longer than a number can be"):
        simulate(Network(2, Link(bandwidth=1e-300)), [round_of((0, 1, 1e10))])


def test_an_agent_beyond_the_network_is_refused() -> None:
    with pytest.raises(ValueError, match="an agent beyond the 2 of the network"):
        simulate(Network(2, NIC), [round_of((0, 2, 1.0))])
