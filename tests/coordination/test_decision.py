"""The decision from all agents' requests: which operations are ready, in which order, and which cannot run."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.coordination.request import ALL, CallSignature, RequestKey, TransferRequest
from shoal.coordination.round import (
    Refusal,
    Response,
    decide,
    decision_as_data,
    decision_of,
    merged,
    requests_as_data,
    requests_of,
)


def request(
    name: str, round_: int = 0, members: tuple[int, ...] = ALL, what: str = "", op: str = "sum"
) -> TransferRequest:
    return TransferRequest(CallSignature(RequestKey(name, 0, members), op, what), round_)


def edges(*peers: int, round_: int = 0) -> TransferRequest:
    return TransferRequest(CallSignature(RequestKey("x", 0, ALL), "push-pull"), round_, peers)


def responses(decision: list[Response | Refusal]) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(one.request.key.name, one.request.round, one.members) for one in decision if isinstance(one, Response)]


def refusals(decision: list[Response | Refusal]) -> list[Refusal]:
    return [one for one in decision if isinstance(one, Refusal)]


def test_requests_of_several_agents_are_merged() -> None:
    several = [{request("x"): [0, 1], request("y"): [1]}, {request("x"): [2]}]
    assert merged(several) == {request("x"): [0, 1, 2], request("y"): [1]}


def test_a_request_is_ready_when_every_member_has_requested_it() -> None:
    requested = {request("a"): [0, 1, 2], request("b"): [0, 2], request("c", members=(0, 2)): [0, 2]}
    assert responses(decide(requested, [0, 1, 2])) == [("a", 0, (0, 1, 2)), ("c", 0, (0, 2))]


def test_the_order_is_that_of_the_requests() -> None:
    names = ["z", "a", "m"]
    result = responses(decide({request(name): [0, 1] for name in names}, [0, 1]))
    assert [name for name, _, _ in result] == names


def test_several_rounds_of_a_name_run_in_sequence() -> None:
    requested = {request("a", 2): [0, 1], request("a", 1): [0, 1], request("a", 3): [0]}
    assert responses(decide(requested, [0, 1])) == [("a", 1, (0, 1)), ("a", 2, (0, 1))]


@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 2]])
def test_a_mismatch_is_reported_with_both_sides(ranks: list[int]) -> None:
    requested = {
        request("a", what="sum of float32, shape [3]"): ranks[:-1],
        request("a", what="sum of float64"): ranks[-1:],
    }
    (one,) = refusals(decide(requested, [0, 1, 2]))
    assert one.ranks == tuple(ranks)
    assert set(one.concerned) == {0, ranks[-1]}
    assert "sum 'a' round 0" in one.text
    assert "shape [3]" in one.text
    assert "float64" in one.text
    assert f"rank {ranks[-1]} " in one.text


def test_one_name_for_two_operations_is_a_mismatch() -> None:
    requested = {request("a", op="allreduce"): [0], request("a", op="broadcast"): [1]}
    (one,) = refusals(decide(requested, [0, 1]))
    assert "called allreduce" in one.text
    assert "called broadcast" in one.text


def test_an_agent_in_a_later_round_will_not_join_an_earlier_one() -> None:
    requested = {request("a", 3): [0, 2], request("a", 4): [1]}
    (one,) = refusals(decide(requested, [0, 1, 2]))
    assert (one.round, one.ranks, one.concerned) == (3, (0, 2), (1,))
    assert "rank 1 passed that round" in one.text


def test_a_connected_component_is_ready_when_all_its_members_have_requested() -> None:
    requested = {edges(1): [0], edges(0): [1], edges(3): [2], edges(2, 4): [3]}
    assert responses(decide(requested, range(5))) == [("x", 0, (0, 1))]
    requested[edges(3)] = [2, 4]
    assert responses(decide(requested, range(5))) == [("x", 0, (0, 1)), ("x", 0, (2, 3, 4))]


def test_requests_of_other_rounds_are_separate() -> None:
    requested = {edges(1): [0], edges(0, round_=1): [1]}
    assert decide(requested, [0, 1]) == []


REQUESTS = st.dictionaries(
    st.builds(
        TransferRequest,
        st.builds(
            CallSignature,
            st.builds(RequestKey, st.text(max_size=5), st.integers(0, 9), st.sampled_from([ALL, (0, 3), (1, 2, 3)])),
            st.text(max_size=5),
            st.text(max_size=5),
            st.sampled_from(["", "allreduce"]),
        ),
        st.integers(0, 9),
        st.sampled_from([None, (), (1,), (0, 2)]),
    ),
    st.lists(st.integers(0, 3), unique=True, min_size=1).map(sorted),
    max_size=6,
)


@given(REQUESTS)
@settings(max_examples=200)
def test_encoded_requests_are_decoded_equally(requests: dict[TransferRequest, list[int]]) -> None:
    assert requests_of(json.loads(json.dumps(requests_as_data(requests))), 4) == requests
    decision = decide(requests, range(4))
    assert decision_of(json.loads(json.dumps(decision_as_data(decision))), 4) == decision


@given(st.lists(REQUESTS, min_size=1, max_size=4))
@settings(max_examples=100)
def test_the_result_is_independent_of_where_requests_are_merged(
    several: list[dict[TransferRequest, list[int]]],
) -> None:
    apart = [{request: [rank] for request in requested} for rank, requested in enumerate(several)]
    at_once = merged(apart)
    by_tree = merged([merged(apart[:2]), merged(apart[2:])])
    group = range(len(several))
    assert decide(at_once, group) == decide(by_tree, group)


@pytest.mark.parametrize(
    "message",
    [
        [],
        ["x"],
        [["x", 0, [0, 9], "op", "", "", 0, None], [0]],
        [["x", 0, [1, 0], "op", "", "", 0, None], [0]],
        [["x", -1, [], "op", "", "", 0, None], [0]],
        [["x", 0, [], "op", "", "", True, None], [0]],
        [["x", 0, [], "op", "", "", 0, None], [4]],
        [["x", 0, [], "op", "", "", 0, "peers"], [0]],
    ],
)
def test_invalid_messages_are_refused(message: list) -> None:
    with pytest.raises((ValueError, TypeError)):
        requests_of([message] if message else [[]], 4)
