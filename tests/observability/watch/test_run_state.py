"""The display of a run, from the messages of its agents and launchers."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.observability.watch import run_state
from shoal.observability.watch.replay import row_of
from shoal.observability.watch.run_state import MOST_POINTS, MOST_SERIES, History, RunState, Series
from support.status_messages import summary


def shown(state: RunState) -> list[dict[str, Any]]:
    text = json.dumps(state.as_json(), allow_nan=False)
    agents: list[dict[str, Any]] = json.loads(text)["agents"]
    return agents


def states(state: RunState) -> list[str]:
    return [one["state"] for one in shown(state)]


def texts(state: RunState) -> list[str]:
    return [text for _, text, _ in state.as_json()["events"]]


WAITS = [{"call": "neighbor_allreduce 'x' round 7", "ranks": [3, 1], "seconds": 1.5, "gives_up": 9.0}]


def test_each_agent_has_the_state_given_by_its_status_and_its_process() -> None:
    state = RunState(7, "seven")
    for rank in range(1, 7):
        state.process(rank, 1000 + rank, "here", "S")
    state.take(summary(2, 7))
    state.take(summary(3, 7, waiting=WAITS, stands_still=True))
    state.take(summary(4, 7, waiting=WAITS))  # under way, while its script runs
    state.process(4, 1004, "here", "R")
    state.take(summary(5, 7))
    state.process(5, 1005, "here", "T")
    state.take(summary(6, 7, leaves=True))
    assert states(state) == ["not there", "starting", "computing", "waiting", "computing", "stopped", "left"]
    waits = shown(state)[3]
    assert waits["waits_for"] == [3, 1] and "for 3, 1, since 1.5 s, in neighbor_allreduce 'x' round 7" in waits["words"]
    assert shown(state)[0] == row_of(0)  # dashes: nothing is known of it


def test_a_killed_agent_is_lost_at_once_and_then_rejoins() -> None:
    state = RunState(2, "two")
    state.process(1, 1001, "here", "S")
    state.take(summary(1, 2))
    state.ended(1, "rank 1 (pid 1001) was killed by SIGKILL after 3.0 s", False)
    state.take(summary(1, 2, pid=1001))  # its last message, read late
    state.take(summary(0, 2, lost=[1]))
    state.take(summary(0, 2, lost=[1]))
    assert states(state)[1] == "lost" and "SIGKILL" in shown(state)[1]["words"]
    assert [text for text in texts(state) if "rank 1" in text] == [
        "rank 1 (pid 1001) was killed by SIGKILL after 3.0 s",
        "rank 1 is lost, as rank 0 knows",
    ]
    state.process(1, 2001, "here", "S")
    assert states(state)[1] == "rejoining"  # the others have not admitted it
    state.take(summary(1, 2, pid=2001, incarnation=1, rejoins=True))
    state.take(summary(0, 2, lost=[1]))
    assert states(state)[1] == "rejoining" and shown(state)[1]["again"] == 1
    assert len([text for text in texts(state) if "is lost" in text]) == 1
    state.take(summary(1, 2, pid=2001, incarnation=1))
    assert states(state)[1] == "rejoining"
    state.take(summary(0, 2))
    assert states(state)[1] == "computing"
    state.take(summary(1, 2, incarnation=0, over="of the one that is gone"))
    assert states(state)[1] == "computing"


def test_a_joined_agent_is_not_marked_restarted_before_its_restart() -> None:
    state = RunState(3, "two, and room for one", begins=2)
    state.take(summary(2, 3, incarnation=1))
    state.take(summary(2, 3, incarnation=1))
    assert texts(state) == ["rank 2 has joined"] and shown(state)[2]["again"] == 0
    state.take(summary(2, 3, incarnation=2))
    state.take(summary(1, 3, incarnation=1))
    assert texts(state)[1:] == [f"rank {rank} is there, started for the second time" for rank in (2, 1)]
    assert [one["again"] for one in shown(state)] == [0, 1, 1]


def test_an_agent_without_status_messages_for_long_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    state = RunState(1, "one")
    state.take(summary(0, 1))
    monkeypatch.setattr(run_state, "SILENT_SECONDS", -1.0)
    assert states(state) == ["silent"]


def test_an_edge_has_the_bytes_that_its_source_sent_and_its_destination_receives_them() -> None:
    state = RunState(3, "three")
    state.take(summary(0, 3, sent=[[1, 100], [2, 7]], edges=[1], bytes_sent=107))
    state.take(summary(0, 3, sent=[[1, 1100], [2, 7]], edges=[1], bytes_sent=1107))
    state.take(summary(1, 3))
    (first, second) = state.as_json()["edges"]
    assert first[:3] == (0, 1, 1100) and first[4] and first[3] > 0
    assert second == (0, 2, 7, 0, False)
    agents = shown(state)
    assert agents[0]["sent"] == 1107 and agents[1]["received"] == 1100
    assert agents[0]["out"] == first[3] and agents[1]["in"] == first[3]


@pytest.mark.parametrize("ends", [False, True], ids=["silent", "ended"])
def test_an_agent_without_new_status_messages_has_no_rate(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes stay: on its edges, in its own row, in its neighbours' and in the series."""
    state = RunState(2, "two")
    for sent in (100, 1100):
        state.take(summary(0, 2, sent=[[1, sent]], edges=[1], bytes_sent=sent))
        state.take(summary(1, 2))
    assert shown(state)[0]["out"] > 0
    if ends:
        state.ended(0, "rank 0 (pid 1000) ended well after 3.0 s", True)
    else:
        monkeypatch.setattr(run_state, "SILENT_SECONDS", -1.0)
    state.draw()
    assert state.as_json()["edges"] == [(0, 1, 1100, 0, not ends)]
    agents = shown(state)
    assert (agents[0]["out"], agents[0]["sent"]) == (None if ends else 0, 1100)
    assert (agents[1]["in"], agents[1]["received"]) == (0, 1100)
    (series,) = (one for one in state.as_json()["series"] if one["unit"] == "B/s")
    assert [point[1:] for point in series["points"]] == [(0, 0)]


def test_metrics_of_all_agents_are_one_point_and_non_numbers_a_text() -> None:
    state = RunState(2, "two")
    for times, mean in ((1, 4.0), (2, "nan")):
        for rank in range(2):
            one = {"times": times, "own": float(rank), "mean": mean, "worst": mean, "worst_rank": 0}
            state.take(summary(rank, 2, measured={"train loss": one}))
    (series,) = state.as_json()["series"]
    assert [point[1:] for point in series["points"]] == [(4.0, 4.0), ("nan", "nan")]
    assert [one["loss"] for one in shown(state)] == [0.0, 1.0]


def test_a_restarted_job_starts_without_earlier_state() -> None:
    state = RunState(1, "one")
    one = {"times": 5, "own": 1.0, "mean": 1.0, "worst": 1.0, "worst_rank": 0}
    state.take(summary(0, 1, measured={"loss": one}, step=9))
    state.ended(0, "rank 0 exited with code 1", False)
    state.begin_again(1)
    state.take(summary(0, 1, step=10))  # of the one before
    assert shown(state)[0]["step"] is None
    state.take(summary(0, 1, attempt=1, step=1, measured={"loss": one | {"times": 1}}))
    assert shown(state)[0]["step"] == 1
    assert len(state.as_json()["series"][0]["points"]) == 2


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300)
@given(st.sampled_from([*summary(0), "none"]), PLAIN)
def test_invalid_messages_are_ignored_and_the_state_stays_json(name: str, value: Any) -> None:
    state = RunState(4, "four")
    full = copy.deepcopy(summary(1, waiting=WAITS, measured={"loss": {"times": 1}}))
    state.take({**full, name: value})
    state.take({name: value})
    state.draw()
    json.dumps(state.as_json(), allow_nan=False)


def test_a_long_run_has_a_bounded_history_from_its_start_to_its_end() -> None:
    series = Series()
    for k in range(10_000):
        series.add((float(k), float(k), float(k)))
    points = series.points
    assert MOST_POINTS // 2 <= len(points) <= MOST_POINTS + 2
    assert points[0][0] == 0.0 and points[-1][0] == 9999.0
    assert points == sorted(points)
    history = History()
    for k in range(100):
        history.add(f"name {k}", (0.0, 0.0, 0.0))
    assert len(history.as_json()) == MOST_SERIES
