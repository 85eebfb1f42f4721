"""The timeline: valid traces whose bars nest, that tell the truth, and that survive what kills an agent."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

import shoal
from shoal.observability import timeline, timeline_context, timeline_end_activity, timeline_start_activity, trace_writer
from support.leftovers import wait_until
from support.limits import scaled
from support.world import World


@pytest.fixture
def traces(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_TIMELINE", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def fresh_complaint(monkeypatch):
    monkeypatch.setattr(timeline, "_complained", False)


def load(directory, rank, suffix=""):
    return json.loads((Path(directory) / f"shoal-rank{rank}{suffix}.json").read_text())


def rows(events):
    return {e["tid"]: e["args"]["name"] for e in events if e["name" if "name" in e else "ph"] == "thread_name"}


def on_row(events, title):
    names = rows(events)
    return [e for e in events if e["ph"] != "M" and names[e["tid"]] == title]


def bars(events):
    """(row, name, start, end) of every bar, after checking that those of a row nest; the way a viewer reads them."""
    titles, result = rows(events), []
    by_row = defaultdict(list)
    for e in events:
        if e["ph"] in "BEX":
            by_row[e["tid"]].append(e)
    for tid, entries in by_row.items():
        stack = []
        for e in sorted(entries, key=lambda e: e["ts"]):
            while stack and stack[-1][2] <= e["ts"]:
                stack.pop()
            if e["ph"] == "E":
                assert stack and stack[-1][2] == float("inf"), f"{titles[tid]}: an end without a beginning, or inside"
                name, start, _ = stack.pop()
                result.append((titles[tid], name, start, e["ts"]))
            else:
                end = e["ts"] + e["dur"] if e["ph"] == "X" else float("inf")
                assert not stack or end == float("inf") or end <= stack[-1][2], f"{titles[tid]}: bars overlap"
                stack.append((e["name"], e["ts"], end))
                if e["ph"] == "X":
                    result.append((titles[tid], e["name"], e["ts"], end))
        assert not [one for one in stack if one[2] == float("inf")], f"{titles[tid]}: a bar never ends"
    return result


def average(rounds=3, name="weights", numel=50_000):
    for _ in range(rounds):
        shoal.neighbor_allreduce(torch.ones(numel), name=name)
    return shoal.observability.bytes_sent()


def test_every_agent_writes_valid_json_whose_bars_nest(traces, fleet):
    fleet(3).run(average)
    for rank in range(3):
        events = load(traces, rank)
        assert {e["pid"] for e in events} == {rank}
        assert any(e["ph"] == "M" and e["args"].get("name", "").startswith(f"agent {rank} on ") for e in events)
        names = Counter(name for row, name, _, _ in bars(events) if row == "exchange: weights")
        assert names["neighbor_allreduce"] == 3
        assert names["sum"] >= 3


def test_bars_of_process_group_transfers_nest_too(traces):
    def run():
        for _ in range(3):
            shoal.allreduce(torch.ones(1000), name="all")
            shoal.neighbor_allreduce(torch.ones(1000), name="some")

    shoal.Fleet(3, transport="process-group").run(run)
    for rank in range(3):
        names = Counter((row, name) for row, name, _, _ in bars(load(traces, rank)))
        for row in ("all", "some"):
            assert names[f"exchange: {row}", "ordering"] == names[f"exchange: {row}", "moving"] == 3


def test_messages_have_the_bytes_that_were_sent(traces):
    sent = shoal.Fleet(4).run(average)
    for rank in range(4):
        events = load(traces, rank)
        messages = [e for e in events if e["ph"] == "i" and e["name"].startswith("to ")]
        assert sum(e["args"]["bytes"] for e in messages) == sent[rank] == 3 * 2 * 50_000 * 4
        assert {e["args"]["peer"] for e in on_row(events, "exchange: weights") if e["ph"] == "i"} == set(range(4)) - {
            rank
        }


def test_an_agent_receives_nothing_before_the_sender_has_called(traces):
    shoal.Fleet(2, transport="shared_memory").run(average)
    events = [load(traces, rank) for rank in range(2)]
    for rank in range(2):
        calls = {e["args"]["round"]: e["ts"] for e in on_row(events[1 - rank], "exchange: weights") if e["ph"] == "B"}
        received = {
            e["args"]["round"]: e["ts"]
            for e in on_row(events[rank], "exchange: weights")
            if e["name" if "name" in e else "ph"] == f"from {1 - rank}"
        }
        assert len(received) == 3
        assert all(ts > calls[round_] for round_, ts in received.items())


def test_overlapping_calls_get_separate_rows(traces):
    def overlap():
        if shoal.rank() == 0:
            shoal.barrier()
        handles = [shoal.nonblocking.neighbor_allreduce(torch.ones(10)) for _ in range(3)]
        if shoal.rank() == 1:  # its calls are all in flight until rank 0 comes out of the barrier
            shoal.barrier()
        for handle in handles:
            handle.wait()
        shoal.barrier()

    shoal.Fleet(2).run(overlap)
    calls = [row for row, name, *_ in bars(load(traces, 1)) if name == "neighbor_allreduce" and "exchange" in row]
    assert sorted(calls) == [f"exchange: neighbor_allreduce{n}" for n in ("", " (2)", " (3)")]


def test_waits_are_on_the_row_of_the_thread_that_waited(traces):
    def slow():
        if shoal.rank() == 0:
            time.sleep(0.1)
        shoal.neighbor_allreduce(torch.ones(10), name="x")

    shoal.Fleet(2).run(slow)
    waits = [bar for bar in bars(load(traces, 1)) if bar[0] == "waits: agent-1" and bar[1] == "x"]
    assert [end - start > 50_000 for _, _, start, end in waits] == [True]


def test_activities_nest_on_the_row_of_their_tensor(traces):
    def work():
        assert timeline_start_activity('lay"er', "outer") is True
        with timeline_context('lay"er', "inner"):
            pass
        assert timeline_end_activity('lay"er') is True
        assert timeline_end_activity('lay"er') is False

    shoal.Fleet(1).run(work)
    result = {name: (start, end) for row, name, start, end in bars(load(traces, 0)) if row == 'activities: lay"er'}
    assert set(result) == {"outer", "inner"}
    assert result["outer"][0] <= result["inner"][0] <= result["inner"][1] <= result["outer"][1]


def test_an_activity_ends_when_its_block_raises(traces):
    def work():
        with pytest.raises(KeyError), timeline_context("x", "forward"):
            raise KeyError

    shoal.Fleet(1).run(work)
    assert [name for row, name, *_ in bars(load(traces, 0)) if row == "activities: x"] == ["forward"]


def test_an_activity_that_is_no_string_is_refused(traces):
    def work():
        with pytest.raises(TypeError, match="two strings"):
            timeline_start_activity(torch.ones(1), "forward")

    shoal.Fleet(1).run(work)
    bars(load(traces, 0))


def test_if_disabled_it_warns_once_and_has_no_listener(monkeypatch, caplog):
    monkeypatch.delenv("SHOAL_TIMELINE", raising=False)

    def work():
        assert not shoal.observability.events().active
        assert timeline_start_activity("x", "forward") is False
        assert timeline_end_activity("x") is False
        with timeline_context("x", "forward"):
            pass

    with caplog.at_level(logging.ERROR, "shoal"):
        shoal.Fleet(1).run(work)
    assert [record.message for record in caplog.records if "timeline is off" in record.message] == [
        caplog.records[0].message
    ]


def test_a_failed_operation_shows_its_error(traces):
    def clash():
        with pytest.raises(shoal.Mismatch):
            shoal.neighbor_allreduce(torch.ones(3 + shoal.rank()), name="x")

    shoal.Fleet(2).run(clash)
    for rank in range(2):
        events = load(traces, rank)
        assert [bar[1] for bar in bars(events) if bar[0] == "exchange: x"][-1] == "neighbor_allreduce"
        (failure,) = [e for e in on_row(events, "exchange: x") if e.get("name") == "failed"]
        assert failure["args"]["error"].startswith("Mismatch: ")


def test_a_failed_agent_is_marked_across_all_rows(traces):
    shoal.Fleet(2).run(
        lambda: shoal.observability.events().emit("lost", "died", "", 0, peer=1 - shoal.rank(), detail="killed")
    )
    (mark,) = [e for e in load(traces, 0) if e.get("name") == "agent 1 died"]
    assert mark["s"] == "p"
    assert mark["args"] == {"rank": 1, "cause": "killed"}


def test_a_second_init_does_not_overwrite_the_first_trace(traces):
    shoal.Fleet(1).run(average, name="first")
    shoal.Fleet(1).run(average, name="second")
    assert on_row(load(traces, 0), "exchange: first")
    assert on_row(load(traces, 0, "-2"), "exchange: second")


def test_a_full_queue_is_written_by_the_thread_that_adds_to_it(traces, monkeypatch):
    monkeypatch.setattr(timeline, "WRITE_SECONDS", 1000.0)
    monkeypatch.setattr(timeline, "QUEUE_LIMIT", 10)

    def work():
        for _ in range(100):
            timeline_start_activity("x", "step")
            timeline_end_activity("x")
        return (traces / "shoal-rank0.json").read_text().count('"ph":"B"')

    (started,) = shoal.Fleet(1).run(work)
    assert started >= 90
    assert len(bars(load(traces, 0))) == 100


def test_names_beyond_the_limit_share_a_row_and_still_nest(traces, monkeypatch):
    monkeypatch.setattr(trace_writer, "ROW_LIMIT", 4)

    def work():
        handles = [shoal.nonblocking.neighbor_allreduce(torch.ones(3), name=f"step {i}") for i in range(10)]
        for handle in handles:
            handle.wait()

    shoal.Fleet(2).run(work)
    events = load(traces, 0)
    assert sum(name == "neighbor_allreduce" for _, name, *_ in bars(events)) == 10
    assert {"exchange: other names"} <= set(rows(events).values())
    assert "exchange: step 9" not in rows(events).values()


def test_a_directory_that_cannot_be_created_does_not_end_the_training(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOAL_TIMELINE", str(tmp_path / "file" / "traces"))
    with caplog.at_level(logging.ERROR, "shoal"):
        shoal.Fleet(2).run(average)
    assert sum("continues without a timeline" in record.message for record in caplog.records) == 2


def test_a_full_disk_ends_only_the_timeline(traces, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    def work():
        monkeypatch.setattr(os, "write", full)
        average()
        return True

    with caplog.at_level(logging.ERROR, "shoal"):
        assert shoal.Fleet(1).run(work) == [True]
    (output,) = [record.message for record in caplog.records if "ends here" in record.message]
    assert "No space left" in output


def busy_for_ever():
    shoal.neighbor_allreduce(torch.ones(10), name="weights")
    timeline_start_activity("weights", "forward")
    time.sleep(60)


def test_a_killed_process_leaves_a_valid_trace(tmp_path):
    path = tmp_path / "shoal-rank0.json"
    with World(1, environment={"SHOAL_TIMELINE": str(tmp_path)}) as world:
        call = world.run_on(0, busy_for_ever)
        assert wait_until(lambda: path.exists() and "forward" in path.read_text(), 40.0)
        world.kill(0)
        assert call.outcome().message == f"exit code {-signal.SIGKILL}"
    events = json.loads(path.read_text() + "]")
    assert [e["name"] for e in on_row(events, "activities: weights")] == ["forward"]
    call = [e for e in on_row(events, "exchange: weights") if e.get("name") != "prepare"]  # where that took long
    assert [e["ph"] for e in call] == ["B", "X", "E"]  # type: ignore[attr-defined]


FORKED = """
import os, torch, shoal
from shoal.observability import timeline_context
shoal.init()
with timeline_context("x", "parent"):
    child = os.fork()
    if not child:
        raise SystemExit
    os.waitpid(child, 0)
"""


def test_a_forked_child_does_not_write_into_the_trace_and_an_exit_completes_it(tmp_path):
    subprocess.run(
        [sys.executable, "-c", FORKED], env={"SHOAL_TIMELINE": str(tmp_path)}, check=True, timeout=scaled(50)
    )
    assert [name for row, name, *_ in bars(load(tmp_path, 0)) if row == "activities: x"] == ["parent"]
