"""Calls on windows in the timeline: a bar for each, on the window's row, also if it fails; nothing while it is off."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.execution.events import Event, Events

Fleets = Callable[..., shoal.Fleet]
CALLS = ["win_create", "win_put", "win_accumulate", "win_get", "win_update", "win_update_then_collect", "win_put"]


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_TIMELINE", str(tmp_path))
    return tmp_path


def call_everything() -> None:
    """Each kind of call, in the order of CALLS, on a window that is called weights."""
    x = torch.ones(1000)
    shoal.bluefog.win_create(x, "weights")
    shoal.bluefog.win_put(x, "weights")
    shoal.bluefog.win_accumulate(x, "weights")
    shoal.bluefog.win_get("weights")
    shoal.bluefog.win_update("weights")
    shoal.bluefog.win_update_then_collect("weights")
    shoal.bluefog.win_wait(shoal.bluefog.win_put_nonblocking(x, "weights"))
    shoal.barrier()


def window_bars(path: Path) -> list[tuple[str, float, float]]:
    """(call, start, end) of the bars on the rows of the window called weights, by start."""
    events: list[dict[str, Any]] = json.loads(path.read_text())
    rows = {one["tid"]: one["args"]["name"] for one in events if one.get("name") == "thread_name"}
    result, started = [], {}
    for event in events:
        if not rows.get(event["tid"], "").startswith("exchange: window weights"):
            continue
        if event["ph"] == "B":
            started[event["tid"]] = event
        elif event["ph"] == "E":
            start = started.pop(event["tid"])
            if start["args"]["round"] < 0:  # the call, not one of its exchanges between machines
                result.append((start["name"], start["ts"], event["ts"]))
    assert not started, "a bar never ends"
    return sorted(result, key=lambda bar: bar[1])


def test_every_call_is_a_bar_on_the_row_of_its_window(traces: Path, fleet: Fleets) -> None:
    fleet(2).run(call_everything)
    for rank in range(2):
        bars = window_bars(traces / f"shoal-rank{rank}.json")
        assert [name for name, *_ in bars] == CALLS
        for (_, start, end), (_, following, _) in pairwise(bars):
            assert start < end <= following


def test_a_call_that_waits_for_a_mutex_lasts_as_long_as_the_wait(traces: Path) -> None:
    patience = 0.5

    def hold() -> None:
        shoal.bluefog.win_create(torch.ones(3), "weights")
        with shoal.bluefog.win_mutex("weights", for_self=True):
            shoal.barrier()
            with pytest.raises(shoal.DeadlineExceeded):
                shoal.bluefog.win_put(torch.ones(3), "weights", require_mutex=True, timeout=patience)
            shoal.barrier()

    shoal.Fleet(2).run(hold)
    (put,) = [bar for bar in window_bars(traces / "shoal-rank0.json") if bar[0] == "win_put"]
    # The deadline counts from the call, the bar begins a little later: on a busy machine some milliseconds.
    assert put[2] - put[1] >= 1e6 * patience / 2


def test_a_failed_call_shows_its_error(traces: Path) -> None:
    def run() -> None:
        shoal.bluefog.win_create(torch.ones(3), "weights")
        shoal.barrier()
        if shoal.rank() == 1:
            shoal.bluefog.win_free("weights")
        shoal.barrier()
        if shoal.rank() == 0:
            with pytest.raises(shoal.Mismatch):
                shoal.bluefog.win_put(torch.ones(3), "weights")
        shoal.barrier()

    shoal.Fleet(2).run(run)
    (failure,) = [one for one in json.loads((traces / "shoal-rank0.json").read_text()) if one.get("name") == "failed"]
    assert failure["args"]["error"].startswith("Mismatch: ")
    assert window_bars(traces / "shoal-rank0.json")[-1][0] == "win_put"


def test_a_listener_gets_start_and_end_of_each_call() -> None:
    def run() -> list[tuple[str, str]]:
        received: list[Event] = []
        stop = shoal.observability.events().subscribe(received.append)
        call_everything()
        stop()
        own = [one for one in received if one.name == "~window weights"]
        assert all(one.round < 0 for one in own), "no message between machines"
        rounds = [one.round for one in own]
        assert all(rounds.count(number) == 2 for number in rounds)
        return [(one.kind, one.operation) for one in own]

    expected = [(kind, call) for call in CALLS for kind in ("submitted", "finished")]
    assert shoal.Fleet(2).run(run) == [expected, expected]


def test_without_listeners_there_are_no_notifications(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_TIMELINE", raising=False)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an event was built for nobody")

    monkeypatch.setattr(Events, "emit", refuse)
    shoal.Fleet(2).run(call_everything)
