"""One trace of all agents: on one clock, with an arrow from each message's sending to its coming."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.observability.run_report import RunReport, ident
from shoal.observability.trace_writer import FUSED
from shoal.observability.traces import MessageKey
from support import PROCESS_GROUP, TRANSPORTS
from support.written_traces import Written, exchange

Line = dict[str, Any]


def merged(folder: Path) -> list[Line]:
    path = folder / "merged.json"
    RunReport.of(folder).merge(path)
    lines: list[Line] = json.loads(path.read_text())
    return lines


def arrows(lines: list[Line]) -> dict[int, tuple[Line, Line]]:
    """Beginning and end of each, by its number."""
    result: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        if line["ph"] in "sf":
            result[line["id"]].append(line)
    return {number: (ends[0], ends[1]) for number, ends in result.items()}


def test_an_arrow_connects_the_bars_of_sender_and_receiver(tmp_path: Path) -> None:
    agents = [Written(0, host="node0"), Written(1, host="node1", ahead=500.0)]
    for round_ in range(3):
        at = 10.0 * round_
        for agent in agents:
            agent.call(at, at + 9.0, "x", round_)
        exchange(agents, 0, 1, at + 1.0, at + 3.0, round_=round_)
        exchange(agents, 1, 0, at + 2.0, at + 4.0, round_=round_)
    for agent in agents:
        agent.into(tmp_path)
    lines = merged(tmp_path)
    result = arrows(lines)
    assert set(result) == {ident(k, 1 - k, MessageKey("x", round_, 0, 1)) for k in range(2) for round_ in range(3)}
    bars: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for line in lines:
        if line["ph"] == "B":
            bars[line["pid"]].append((line["ts"], float("inf")))
        elif line["ph"] == "E":
            bars[line["pid"]][-1] = bars[line["pid"]][-1][0], line["ts"]
    for begins, ends in result.values():
        assert (begins["ph"], ends["ph"], ends["bp"]) == ("s", "f", "e") and begins["pid"] != ends["pid"]
        assert ends["ts"] - begins["ts"] == pytest.approx(2000, abs=1), "2 ms, on one clock"
        for line in (begins, ends):
            assert any(start <= line["ts"] <= end for start, end in bars[line["pid"]])
    assert min(one["ts"] for one in lines if "ts" in one) == pytest.approx(0.0, abs=1000)


def test_message_ids_depend_on_edge_name_round_and_stage_and_fit_a_viewer() -> None:
    keys = [
        (0, 1, MessageKey("x", 0, 0, 1)),
        (1, 0, MessageKey("x", 0, 0, 1)),
        (0, 1, MessageKey("y", 0, 0, 1)),
        (0, 1, MessageKey("x", 1, 0, 1)),
    ]
    keys += [(0, 1, MessageKey("x", 0, 1, 1)), (0, 1, MessageKey("x", 0, 0, 2))]
    numbers = {ident(*key) for key in keys}
    assert len(numbers) == len(keys) and all(0 <= number < 1 << 53 for number in numbers)
    assert ident(*keys[0]) == ident(*keys[0])


def test_a_restarted_rank_is_a_separate_process(tmp_path: Path) -> None:
    first, other = Written(1), Written(0)
    first.call(0.0, 1.0)
    other.call(0.0, 9.0)
    again = Written(1, incarnation=1)
    again.call(5.0, 6.0)
    first.into(tmp_path, closed=False, torn='{"ph":"')
    other.into(tmp_path)
    again.into(tmp_path, "-again1")
    lines = merged(tmp_path)
    names = {line["pid"]: line["args"]["name"] for line in lines if line.get("name") == "process_name"}
    assert names == {0: "agent 0 on here", 1: "agent 1 on here", 2: "agent 1 (start 2) on here"}
    assert {line["pid"] for line in lines if line["ph"] == "B"} == {0, 1, 2}


def test_an_arrow_for_an_early_message_ends_at_the_start_of_its_call(tmp_path: Path) -> None:
    """The receiver is a round behind: a bar of the same name exists, and is another round's."""
    agents = [Written(0), Written(1)]
    agents[0].call(0.0, 2.0)
    agents[0].call(3.0, 9.0, round_=1)
    agents[1].call(1.0, 6.0)
    exchange(agents, 0, 1, 3.5, 4.0, round_=1)
    agents[1].call(7.0, 9.0, round_=1)
    for agent in agents:
        agent.into(tmp_path)
    ((begins, ends),) = arrows(merged(tmp_path)).values()
    assert begins["ts"] == pytest.approx(3500) and ends["ts"] == pytest.approx(7000)


def test_an_arrow_for_a_message_fused_only_by_its_sender_ends_at_the_first_call(tmp_path: Path) -> None:
    agents = [Written(0), Written(1)]
    together = agents[0]._row(f"exchange: {FUSED}")
    index = {"calls": 2, "of": [["a", 0, 1], ["b", 0, 1]]}
    agents[0]._line("B", together, ts=agents[0]._at(0.0), name="neighbor_allreduce x 2", args=index)
    exchange(agents, 0, 1, 1.0, 2.0, name=FUSED, calls=2)
    for agent in agents:
        agent.lines[-1]["args"]["name"] = "a"
    agents[0]._line("E", together, ts=agents[0]._at(5.0))
    agents[1].call(0.0, 5.0, "b")
    agents[1].call(0.0, 5.0, "a")
    for agent in agents:
        agent.into(tmp_path)
    ((begins, ends),) = arrows(merged(tmp_path)).values()
    assert (begins["tid"], ends["tid"]) == (together, agents[1].rows["exchange: a"])


@pytest.mark.parametrize("ended", [None, 1.5])
def test_messages_without_a_bar_have_no_arrow(tmp_path: Path, ended: float | None) -> None:
    """A control message, or a message that arrives after its call has failed."""
    agents = [Written(0), Written(1)]
    exchange(agents, 0, 1, 1.0, 2.0, name="word")
    if ended:
        agents[0].call(0.5, 2.5, "word")
        agents[1].call(0.5, ended, "word", error="Mismatch")
    for agent in agents:
        agent.into(tmp_path)
    report = RunReport.of(tmp_path)
    assert len(report.flows) == 1 and report.merge(tmp_path / "merged.json") == 0


def is_by_the_format(lines: list[Line]) -> int:
    """Check a trace by the rules that viewers go by (Chrome's Trace Event Format), and count its arrows."""
    slices, ends, named = defaultdict(list), defaultdict(list), set[tuple[int, int]]()
    of_rows = defaultdict(list)
    for line in lines:
        phase, row = line["ph"], (line["pid"], line["tid"])
        assert phase in "MBEXisf" and isinstance(line["pid"], int) and isinstance(line["tid"], int), line
        assert isinstance(line.get("args", {}), dict) and (phase == "E" or isinstance(line["name"], str)), line
        if phase == "M":
            if line["name"] == "thread_name":
                named.add(row)
            continue
        assert isinstance(line["ts"], (int, float)) and line["ts"] >= 0, line
        assert phase != "i" or line["s"] in "gpt", line
        if phase in "sf":
            assert type(line["id"]) is int and 0 <= line["id"] < 1 << 53, line
            ends[line["cat"], line["name"], line["id"]].append(line)
        elif phase in "BEX":
            of_rows[row].append(line)
    for row, events in of_rows.items():
        assert row in named, f"a row without a name: {row}"
        open_: list[list[float]] = []
        for line in sorted(events, key=lambda event: event["ts"]):  # as a viewer does
            if line["ph"] == "E":
                started = [bar for bar in open_ if bar[1] == float("inf")]
                assert started and all(bar[1] <= line["ts"] for bar in open_ if bar[1] != float("inf")), line
                started[-1][1] = line["ts"]
                open_ = open_[: open_.index(started[-1])]
            else:
                open_ = [bar for bar in open_ if bar[1] > line["ts"]]
                bar = [line["ts"], line["ts"] + line["dur"] if line["ph"] == "X" else float("inf")]
                assert bar[1] >= bar[0] and all(bar[1] <= outer[1] for outer in open_), line
                open_.append(bar)
                slices[row].append(bar)
    for key, both in ends.items():
        assert [one["ph"] for one in both] == ["s", "f"] and both[0]["ts"] <= both[1]["ts"], (key, both)
        assert both[1]["bp"] == "e" and both[0]["pid"] != both[1]["pid"], both
        for line in both:
            bars = slices[line["pid"], line["tid"]]
            assert any(start <= line["ts"] < end for start, end in bars), f"an arrow in no bar: {line}"
    return len(ends)


def average() -> None:
    for _ in range(3):
        shoal.neighbor_allreduce(torch.ones(50_000), name="weights")
    handles = [shoal.nonblocking.neighbor_allreduce(torch.ones(3)) for _ in range(10)]
    for handle in handles:
        handle.wait()
    shoal.allreduce(torch.ones(100))
    with pytest.raises(shoal.Mismatch):
        shoal.neighbor_allreduce(torch.ones(3 + shoal.rank()), name="differs")
    shoal.barrier()


@pytest.mark.parametrize("transport", [*TRANSPORTS, PROCESS_GROUP])
def test_every_message_of_a_real_run_is_an_arrow_valid_in_the_format(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TIMELINE", str(tmp_path))
    shoal.Fleet(3, transport=transport).run(average)
    report = RunReport.of(tmp_path)
    lines = merged(tmp_path)
    names = [flow.key.name for flow in report.flows if flow.key.name not in ("~group", "~call")]
    assert 18 < len(names) - names.count("differs") <= is_by_the_format(lines) <= len(names)


@pytest.mark.parametrize(
    "broken",
    [
        {"ph": "f", "id": 7, "cat": "message", "name": "message", "bp": "e", "ts": 1.0},
        {"ph": "E", "ts": 0.0},
        {"ph": "X", "ts": 1.0, "dur": -1.0, "name": "x"},
        {"ph": "B", "ts": -1.0, "name": "x"},
    ],
)
def test_violations_of_the_format_are_detected(tmp_path: Path, broken: Line) -> None:
    agent = Written(0, 1)
    agent.call(0.0, 1.0)
    agent.into(tmp_path)
    lines = merged(tmp_path)
    assert is_by_the_format(lines) == 0
    with pytest.raises(AssertionError):
        is_by_the_format([*lines, {"pid": 0, "tid": 1, **broken}])


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    Written(0, 1, lines=[], rows={}).into(tmp_path)
    agent = Written(0, 1)
    agent.call(0.0, 1.0)
    agent.into(tmp_path)
    precious = tmp_path / "precious"
    precious.write_text("all that I have")
    (tmp_path / "merged.json").symlink_to(precious)
    with pytest.raises(OSError):
        RunReport.of(tmp_path).merge(tmp_path / "merged.json")
    assert precious.read_text() == "all that I have"
