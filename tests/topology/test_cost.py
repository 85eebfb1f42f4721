"""The messages of a round on the network, against a count of each from every agent's own view."""

from collections import Counter

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.topology import (
    AllReduce,
    Alternating,
    Circulant,
    Idle,
    InnerOuterExponential,
    OnePeerExponential,
    RingGraph,
    Schedule,
    StarGraph,
    Static,
    alpha_beta,
    find,
    relative_gain,
    round_seconds,
    traffic,
    with_uniform_weights,
)

few = settings(max_examples=40)


@st.composite
def digraphs(draw) -> nx.DiGraph:
    size = draw(st.sampled_from([1, 2, 4, 6, 12]))
    return nx.gnp_random_graph(size, draw(st.floats(0, 0.9)), seed=draw(st.integers(0, 10_000)), directed=True)


def counted(schedule: Schedule, round: int, local: int) -> tuple[int, ...]:
    """Messages, handshakes, those of the busiest agent, its NIC's messages, and senders on one NIC."""
    sent = [(rank, peer) for rank in range(schedule.size) for peer in schedule.mixing(round, rank).destination_ranks]
    pairs = {frozenset(ends) for ends in sent}
    between_machines = [(a, b) for a, b in sent if a // local != b // local]

    def most(*columns: list[int]) -> int:
        return max((max(Counter(column).values(), default=0) for column in columns), default=0)

    return (
        len(sent),
        len(pairs),
        most([a for a, _ in sent], [b for _, b in sent]),
        most([rank for pair in pairs for rank in pair]),
        most([a // local for a, _ in between_machines], [b // local for _, b in between_machines]),
        most([a // local for a in {a for a, _ in between_machines}]),
    )


@few
@given(graph=digraphs(), local=st.sampled_from([1, 2, 3]))
def test_traffic_is_what_the_agents_send(graph: nx.DiGraph, local: int) -> None:
    if len(graph) % local:
        local = 1
    schedule = Static(with_uniform_weights(graph))
    result = traffic(schedule, nbytes=8.0, agents_per_machine=local)
    messages, handshakes, busiest, partners, nic, senders = counted(schedule, 0, local)
    assert (result.messages, result.bytes, result.handshakes) == (messages, 8.0 * messages, handshakes)
    assert (result.busiest_messages, result.busiest_bytes, result.busiest_handshakes) == (
        busiest,
        8.0 * busiest,
        partners,
    )
    assert (result.nic_messages, result.most_senders_on_a_nic, result.most_messages) == (nic, senders, busiest)


def test_traffic_of_a_schedule_is_the_mean_over_its_period_and_most_is_the_maximum() -> None:
    turns = Alternating([AllReduce(4), OnePeerExponential(4)])
    result = traffic(turns, nbytes=10.0)
    each = [counted(turns, round, 1) for round in range(turns.period)]
    assert result.messages == sum(one[0] for one in each) / 4 == (12 + 4) / 2
    assert result.busiest_bytes == 10.0 * sum(one[2] for one in each) / 4
    assert result.most_messages == 3


def test_inner_outer_schedules_use_the_nic_for_one_agent_only() -> None:
    alone = traffic(InnerOuterExponential(16, 4), nbytes=1.0, agents_per_machine=4)
    crowd = traffic(find("one-peer-exponential").schedule(16), nbytes=1.0, agents_per_machine=4)
    assert alone.most_senders_on_a_nic == 1
    assert crowd.most_senders_on_a_nic == 4


@pytest.mark.parametrize("degree", [1, 2, 5])
def test_d_messages_of_an_agent_cost_d_latencies_and_d_times_the_bytes(degree: int) -> None:
    schedule = Circulant(12, range(1, degree + 1))
    seconds = round_seconds(schedule, nbytes=1000.0, latency=0.25, bandwidth=500.0)
    assert seconds == pytest.approx(degree * (0.25 + 1000 / 500))


def test_agents_of_one_machine_wait_for_its_nic() -> None:
    network = {"nbytes": 1000.0, "latency": 0.25, "bandwidth": 500.0}
    assert round_seconds(OnePeerExponential(8), agents_per_machine=1, **network) == pytest.approx(2.25)
    # Hops of 1, 2 and 4 leave a machine of four with 1, 2 and 4 messages.
    shared = round_seconds(OnePeerExponential(8), agents_per_machine=4, **network)
    assert shared == pytest.approx((1 + 2 + 4) / 3 * 2.25)


def test_transfers_within_a_machine_cost_nothing() -> None:
    assert round_seconds(RingGraph(6), nbytes=1.0, latency=1.0, bandwidth=1.0, agents_per_machine=6) == 0.0


def test_the_centre_of_a_star_has_the_cost_of_all() -> None:
    result = traffic(StarGraph(9), nbytes=3.0)
    assert (result.busiest_messages, result.busiest_handshakes, result.busiest_bytes) == (8, 8, 24.0)


def test_a_round_without_messages_counts_nothing() -> None:
    result = traffic(Idle(4), nbytes=100.0)
    assert result.messages == result.bytes == result.handshakes == result.busiest_messages == result.most_messages == 0


def test_the_alpha_beta_model_adds_latencies_and_bytes() -> None:
    assert alpha_beta(3, 100.0, latency=0.5, bandwidth=50.0) == 3.5


@pytest.mark.parametrize(
    ("other", "this", "gain"),
    [(6.0, 2.0, 3.0), (1.0, 4.0, 0.25), (0.0, 0.0, 1.0), (2.0, 0.0, float("inf")), (float("inf"), float("inf"), 1.0)],
)
def test_relative_gain_is_the_other_cost_over_this_cost(other: float, this: float, gain: float) -> None:
    assert relative_gain(other, this) == gain


@pytest.mark.parametrize(("other", "this"), [(-1.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
def test_a_negative_cost_has_no_gain(other: float, this: float) -> None:
    with pytest.raises(ValueError, match="two numbers of at least 0"):
        relative_gain(other, this)


@pytest.mark.parametrize("handshakes", [-1, float("nan")])
def test_an_invalid_number_of_handshakes_is_refused(handshakes: float) -> None:
    with pytest.raises(ValueError, match=f"handshakes is {handshakes}"):
        alpha_beta(handshakes, 5, 1, 1)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"nbytes": -1.0}, "nbytes is -1"),
        ({"nbytes": float("inf")}, "nbytes is inf"),
        ({"latency": float("nan")}, "latency is nan"),
        ({"bandwidth": 0.0}, "bandwidth is 0"),
        ({"agents_per_machine": 3}, "8 agents do not fill machines of 3"),
        ({"agents_per_machine": 0}, "agents_per_machine must be at least 1"),
    ],
)
def test_an_invalid_network_is_refused(change: dict[str, float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        round_seconds(RingGraph(8), **{"nbytes": 1.0, "latency": 1.0, "bandwidth": 1.0, **change})
