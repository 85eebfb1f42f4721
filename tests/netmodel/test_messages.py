"""Messages of an exchange, and the rounds of a topology as exchanges."""

import numpy as np
import pytest

from shoal.netmodel import Messages, parameter_server, rounds_of
from shoal.topology import Idle, OnePeerExponential, RandomMatchings, RingGraph, StarGraph


def pairs(messages: Messages) -> list[tuple[int, int]]:
    return sorted(zip(messages.source.tolist(), messages.destination.tolist(), strict=True))


def test_one_size_applies_to_all_messages() -> None:
    messages = Messages.of([0, 1], [1, 2], 8)
    assert messages.nbytes.tolist() == [8.0, 8.0]
    assert len(messages) == 2


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (([0, 1], [1], 8), "sources and .* destinations"),
        (([0, 2], [1, 2], 8), "agent 2 sends to itself"),
        (([0, -1], [1, 0], 8), "a rank is negative"),
        (([0], [1], -8), "a size that is negative or not finite"),
        (([0], [1], float("nan")), "a size that is negative or not finite"),
    ],
)
def test_impossible_messages_are_refused(given: tuple[object, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Messages.of(*given)


def test_a_server_is_one_of_the_agents() -> None:
    with pytest.raises(ValueError, match="server is 7, but agents count from 0 to 3"):
        parameter_server(4, 1.0, 7)


def test_a_round_has_a_message_on_every_edge_but_those_of_an_agent_to_itself() -> None:
    ((round_of_star,),) = rounds_of(StarGraph(4), 100.0, 1)
    assert pairs(round_of_star) == [(0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (3, 0)]
    assert (round_of_star.nbytes == 100.0).all()


def test_rounds_follow_from_the_requested_start() -> None:
    schedule = OnePeerExponential(8)
    hops = [int((one.destination[0] - one.source[0]) % 8) for (one,) in rounds_of(schedule, 1.0, 5, start=1)]
    assert hops == [2, 4, 1, 2, 4]


def test_rounds_of_one_period_are_the_same_objects() -> None:
    rounds = list(rounds_of(OnePeerExponential(8), 1.0, 7))
    assert rounds[0] is rounds[3] is rounds[6]
    assert rounds[0] is not rounds[1]


def test_rounds_of_a_nonperiodic_schedule_are_those_of_the_schedule() -> None:
    schedule = RandomMatchings(6, seed=2)
    for number, (one,) in enumerate(rounds_of(schedule, 1.0, 4)):
        edges = schedule.edges(number)
        others = edges.source != edges.destination
        np.testing.assert_array_equal(one.source, edges.source[others])


def test_an_empty_round_has_no_messages() -> None:
    ((silence,),) = rounds_of(Idle(3), 1.0, 1)
    assert len(silence) == 0


def test_a_graph_is_the_equal_static_schedule() -> None:
    first, second = rounds_of(RingGraph(3), 1.0, 2)
    assert first is second
