"""The display of a finished run, from files in which every time is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.observability.watch.replay import read, row_of
from support.written_traces import Written, exchange


def a_run(folder: Path) -> list[Written]:
    """Two agents, a second: 0 sends 1000 bytes at 100 ms, 1 waits for them until 200 ms, and is killed."""
    zero, one = Written(0), Written(1)
    agents = [zero, one]
    for agent in agents:
        agent.call(0, 300)
        agent.step(1, 0, 300)
    exchange(agents, 0, 1, 100, 200)
    one.wait(0, 200)
    one.call(500, None, "y")
    zero.lost(1, 600, "its process ended")
    zero.call(900, 1000, "y")
    zero.into(folder)
    one.into(folder, closed=False)
    return agents


def moment(message: dict[str, Any], at: float) -> dict[str, Any]:
    """The first of its moments that is not before."""
    frame: dict[str, Any] = next(one for one in message["frames"] if one["at"] >= at)
    return frame


def test_each_moment_has_waits_with_their_peers_and_sent_bytes(tmp_path: Path) -> None:
    a_run(tmp_path)
    status = json.loads(json.dumps(read(tmp_path), allow_nan=False))
    waiting = moment(status, 0.05)["agents"][1]
    assert waiting["state"] == "waiting" and waiting["waits_for"] == [0]
    assert moment(status, 0.05)["edges"] == []
    (edge,) = moment(status, 0.12)["edges"]
    assert edge[:3] == [0, 1, 1000] and edge[4]
    assert moment(status, 0.22)["agents"][1]["state"] == "computing"
    later = moment(status, 0.35)["agents"]
    assert [one["step"] for one in later] == [1, 1] and later[0]["step_seconds"] == pytest.approx(0.3)
    assert later[1]["received"] == 1000
    assert [one["state"] for one in moment(status, 0.6)["agents"]] == ["computing", "lost"]
    assert any("rank 1 died" in text for _, text, _ in status["events"])
    assert set(later[0]) == set(row_of(0))


def test_a_joined_agent_is_not_marked_restarted_before_its_restart(tmp_path: Path) -> None:
    zero, joined, again = Written(0), Written(1, incarnation=1), Written(1, incarnation=2)
    zero.call(0, 900)
    joined.call(300, 500, "y")
    again.call(700, 900, "z")
    zero.into(tmp_path)
    joined.into(tmp_path, "-again1")
    output = read(tmp_path)
    assert [text for _, text, _ in output["events"]] == ["rank 1 has joined"]
    assert output["agents"][1]["again"] == 0
    again.into(tmp_path, "-again2")
    output = read(tmp_path)
    assert [text for _, text, _ in output["events"]] == ["rank 1 has joined", "rank 1 is there, started again"]
    assert output["agents"][1]["again"] == 1


def test_a_membership_log_of_a_joined_agent_has_it_too(tmp_path: Path) -> None:
    base = {"rank": 1, "lost": [], "entered": [], "alive": [0, 1], "what": "came"}
    first = base | {"rank": 0, "incarnation": 0, "at": 100.0}
    (tmp_path / "agent0.jsonl").write_text(json.dumps(first) + "\n")
    (tmp_path / "agent1.1.jsonl").write_text(json.dumps(base | {"incarnation": 1, "at": 101.0}) + "\n")
    assert [one["again"] for one in read(tmp_path)["agents"]] == [0, 0]
    (tmp_path / "agent1.2.jsonl").write_text(json.dumps(base | {"incarnation": 2, "at": 102.0}) + "\n")
    assert [one["again"] for one in read(tmp_path)["agents"]] == [0, 1]


def test_a_membership_log_alone_shows_the_members(tmp_path: Path) -> None:
    base = {"rank": 0, "incarnation": 0, "lost": [], "entered": [], "alive": [0, 1]}
    lines = [
        base | {"at": 100.0, "what": "came"},
        base | {"at": 105.0, "what": "changed", "lost": [1], "alive": [0]},
        base | {"at": 110.0, "what": "left", "alive": []},
    ]
    (tmp_path / "agent0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "agent1.jsonl").write_text(json.dumps(base | {"rank": 1, "at": 100.0, "what": "came"}) + "\n")
    status = json.loads(json.dumps(read(tmp_path), allow_nan=False))
    states = [[one["state"] for one in frame["agents"]] for frame in status["frames"]]
    assert states[0] == ["computing", "computing"] and states[-1] == ["left", "lost"]
    assert status["agents"][0]["step"] is None  # a dash
    assert any("lost: 1" in text for _, text, _ in status["events"])


def test_a_folder_without_either_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a trace nor a record"):
        read(tmp_path)
