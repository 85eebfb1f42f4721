"""Small calls travel together while a trace is written, too, and the trace shows each of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.execution.events import Event
from shoal.execution.fused_operation import MOST_OPERATIONS, PREFIX
from shoal.observability.trace_writer import FUSED
from shoal.runtime.agent import current

Fleets = Callable[..., shoal.Fleet]
Line = dict[str, Any]
COUNT = 50


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_TIMELINE", str(tmp_path))
    return tmp_path


def burst(name: str | None = None, count: int = COUNT) -> list[float]:
    """So many small calls, which begin together."""
    shoal.barrier()
    with current().engine.lock:  # nobody drives meanwhile
        handles = [shoal.nonblocking.neighbor_allreduce(torch.ones(5), name and f"{name} {i}") for i in range(count)]
    return [handle.wait().sum().item() for handle in handles]


def lines_of(traces: Path, rank: int) -> list[Line]:
    text: list[Line] = json.loads((traces / f"shoal-rank{rank}.json").read_text())
    return text


def on_rows(lines: list[Line], title: str) -> list[Line]:
    rows = {line["tid"]: line["args"]["name"] for line in lines if line.get("name") == "thread_name"}
    return [line for line in lines if line["ph"] != "M" and rows[line["tid"]].startswith(title)]


def test_a_trace_shows_each_call_with_its_sum_and_the_one_fused_message(traces: Path, fleet: Fleets) -> None:
    fleet(2).run(burst, "call")
    for rank in range(2):
        lines = lines_of(traces, rank)
        for i in range(COUNT):
            call = on_rows(lines, f"exchange: call {i}")
            assert {"B", "X", "E"} <= {one["ph"] for one in call}, f"call {i}"
        together = on_rows(lines, f"exchange: {FUSED}")
        (started,) = [one for one in together if one["ph"] == "B"]
        assert (started["name"], started["args"]["calls"]) == (f"neighbor_allreduce x {COUNT}", COUNT)
        assert started["args"]["of"] == [[name, 0, 1] for name in sorted(f"call {i}" for i in range(COUNT))]
        assert sum(one["ph"] == "E" for one in together) == 1
        for way in ("to", "from"):
            (message,) = [one for one in together if one.get("name") == f"{way} {1 - rank}"]
            arguments = {"peer": 1 - rank, "bytes": COUNT * 5 * 4, "round": 0, "calls": COUNT, "name": "call 0"}
            assert message["args"] == arguments


def test_sent_bytes_are_the_same_with_and_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sent() -> Counter[str]:
        posted: Counter[str] = Counter()
        sender = current().engine.sender
        post = sender.post

        def counted(channel: Any, operation: Any, stage: Any) -> None:
            posted[operation.name] += 1
            post(channel, operation, stage)

        sender.post = counted  # type: ignore[method-assign]
        burst()
        burst("named")
        return posted

    monkeypatch.delenv("SHOAL_TIMELINE", raising=False)
    without = shoal.Fleet(2).run(sent)
    monkeypatch.setenv("SHOAL_TIMELINE", str(tmp_path))
    assert shoal.Fleet(2).run(sent) == without
    assert any(name.startswith(PREFIX) for name in without[0])


def test_a_split_message_is_received_once(fleet: Fleets) -> None:
    """Agents fuse differently: a message for several calls is not reported again for each."""

    def run() -> tuple[int, int]:
        received: list[Event] = []
        stop = shoal.observability.events().subscribe(received.append)
        shoal.barrier()
        if shoal.rank():
            burst()
        else:
            shoal.barrier()
            for _ in range(COUNT):
                shoal.neighbor_allreduce(torch.ones(5))
        shoal.barrier()
        stop()
        ours = [one for one in received if one.operation == "neighbor_allreduce"]
        return tuple(sum(one.nbytes for one in ours if one.kind == kind) for kind in ("sent", "received"))  # type: ignore[return-value]

    assert fleet(2).run(run) == [(COUNT * 20, COUNT * 20)] * 2


def test_listeners_get_a_submission_and_an_end_for_each_call_of_a_burst(fleet: Fleets) -> None:
    def run() -> list[Counter[str]]:
        received: list[Event] = []
        stop = shoal.observability.events().subscribe(received.append)
        burst()
        stop()
        ours = [one for one in received if one.operation == "neighbor_allreduce"]
        (together,) = [one for one in ours if one.kind == "summed"]
        assert [tuple(run[:3]) for run in together.calls] == [("~neighbor_allreduce", 0, COUNT)]
        assert all(one.calls == [(one.name, one.round, 1, ())] for one in ours if one.kind == "submitted")
        return [Counter(one.kind for one in ours if one.kind in ("submitted", "finished", "fused", "parted"))]

    expected = [Counter(submitted=COUNT, finished=COUNT, fused=1, parted=1)]
    assert fleet(2).run(run) == [expected] * 2


def test_one_failed_call_of_a_burst_is_shown_as_failed_and_the_others_as_ended(traces: Path, fleet: Fleets) -> None:
    def run() -> None:
        shoal.barrier()
        with current().engine.lock:
            handles = [
                shoal.nonblocking.neighbor_allreduce(torch.ones(2 + shoal.rank() if i == 3 else 5), f"call {i}")
                for i in range(6)
            ]
        for i, handle in enumerate(handles):
            if i == 3:
                with pytest.raises(shoal.Mismatch):
                    handle.wait()
            else:
                handle.wait()

    fleet(2).run(run)
    for rank in range(2):
        lines = lines_of(traces, rank)
        for i in range(6):
            call = on_rows(lines, f"exchange: call {i}")
            assert [one["ph"] for one in call].count("B") == [one["ph"] for one in call].count("E") == 1
            assert any(one.get("name") == "failed" for one in call) == (i == 3)


def test_an_invalid_fused_name_is_ignored(traces: Path) -> None:
    """It may come from another agent. Neither the trace nor a listener raises, or iterates to the count it states."""
    names = [PREFIX + "[", PREFIX + f'[["x",0,{1 << 62},[]]]', PREFIX + f'[["x",0,{MOST_OPERATIONS},[]],["y",0,1,[]]]']

    def run() -> list[list[Any]]:
        results: list[list[Any]] = []
        stop = shoal.observability.events().subscribe(lambda event: results.append(event.calls))
        for name in names:
            shoal.observability.events().emit("received", "neighbor_allreduce", name, 0, peer=0, nbytes=1)
        stop()
        return results

    assert shoal.Fleet(1).run(run) == [[[], [], []]]
    messages = [one for one in lines_of(traces, 0) if one.get("name") == "from 0"]
    assert [message["args"]["calls"] for message in messages] == [0, 0, 0]


@pytest.mark.parametrize("transport", ["threads", "shared_memory", "network"])
def test_chunks_of_a_tensor_between_machines_are_followed_by_an_end_message(transport: str) -> None:
    def run() -> list[tuple[str, int, int]]:
        received: list[Event] = []
        stop = shoal.observability.events().subscribe(received.append)
        shoal.barrier()
        shoal.neighbor_allreduce(torch.ones(100_000), name="large")
        shoal.barrier()
        stop()
        arrived = [one for one in received if one.name == "large" and one.kind in ("received", "arrived")]
        return [(one.kind, one.peer, one.nbytes) for one in arrived]

    kinds = ("received", "arrived") if transport == "network" else ("received",)
    expected = [[(kind, 1 - rank, 400_000) for kind in kinds] for rank in range(2)]
    assert shoal.Fleet(2, transport=transport).run(run) == expected
