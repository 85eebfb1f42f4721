"""Clocks that are wrong are put right by the messages themselves."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.observability import clock_alignment, traces
from shoal.observability.clock_alignment import ClockFit
from shoal.observability.traces import Trace
from support.written_traces import MS, Written, exchange

HOUR = 3_600_000.0


def run_of(
    folder: Path, ahead: list[float], delays: dict[tuple[int, int], float], *, drift: float = 0.0, seconds: float = 1.0
) -> list[Trace]:
    """Machines of one agent each, that send to each other again and again; a message takes so many ms, or longer."""
    agents = [Written(rank, len(ahead), f"node{rank}", ahead=off, drift=drift * rank) for rank, off in enumerate(ahead)]
    chance = random.Random(0)
    for round_ in range(100):
        at = 1000 * seconds * round_ / 100
        for (source, destination), delay in delays.items():
            sent = at + chance.uniform(0.0, 1.0)
            arrived = sent + delay * chance.choice((1.0, 1.1, 3.0))
            exchange(agents, source, destination, sent, arrived, round_=round_)
    for agent in agents:
        agent.into(folder)
    return traces.read(folder).traces


def aligned(read_traces: list[Trace]) -> tuple[list[ClockFit], list[Trace]]:
    known = clock_alignment.align(read_traces, traces.match(read_traces))
    return known, [clock_alignment.on_one_clock(trace, clock) for trace, clock in zip(read_traces, known, strict=True)]


@given(
    ahead=st.floats(-HOUR, HOUR),
    forth=st.floats(0.01, 50.0),
    back=st.floats(0.01, 50.0),
)
def test_the_offset_error_is_at_most_half_of_the_fastest_round_trip(
    ahead: float, forth: float, back: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    result = run_of(tmp_path_factory.mktemp("traces"), [0.0, ahead], {(0, 1): forth, (1, 0): back})
    first, second = clock_alignment.align(result, traces.match(result))
    assert (first.ahead, first.uncertain) == (0.0, 0.0)
    assert second.uncertain is not None and second.uncertain <= (forth + back) / 2 * MS + 100
    assert abs(second.ahead - ahead * MS) <= second.uncertain + 100
    assert abs(second.ahead - (ahead + (forth - back) / 2) * MS) <= 0.1 * max(forth, back) * MS + 100


def test_no_message_arrives_before_it_was_sent(tmp_path: Path) -> None:
    delays = {(k, j): 0.2 + 0.1 * k for k in range(4) for j in range(4) if k != j}
    _, laid = aligned(run_of(tmp_path, [0.0, 500.0, -70.0, 3.0], delays))
    matched = traces.match(laid)
    assert len(matched) == 100 * len(delays)
    assert all(one.received.at > one.sent.at for one in matched)


def test_machines_without_messages_are_aligned_through_others(tmp_path: Path) -> None:
    delays = {(0, 1): 1.0, (1, 0): 1.0, (1, 2): 1.0, (2, 1): 1.0}
    known, _ = aligned(run_of(tmp_path, [0.0, 100.0, -200.0], delays))
    assert [round(one.ahead / MS) for one in known] == [0, 100, -200]
    assert known[2].uncertain == pytest.approx(2 * MS, rel=0.2)


def test_a_clock_is_aligned_by_the_most_accurate_path_not_the_shortest(tmp_path: Path) -> None:
    delays = {(0, 2): 1.0, (2, 0): 41.0, (0, 1): 1.0, (1, 0): 1.0, (1, 2): 2.0, (2, 1): 2.0}
    known, _ = aligned(run_of(tmp_path, [0.0, 100.0, -200.0], delays))
    assert [round(one.ahead / MS) for one in known] == [0, 100, -200]
    assert [one.uncertain for one in known] == pytest.approx([0.0, 1 * MS, 3 * MS], rel=0.2)


def test_drifting_clocks_are_aligned_linearly(tmp_path: Path) -> None:
    """20 microseconds a second, ten minutes: 12 ms, and messages that take 0.1 ms."""
    result = run_of(tmp_path, [0.0, 40.0], {(0, 1): 0.1, (1, 0): 0.1}, drift=0.02, seconds=600.0)
    known, laid = aligned(result)
    assert known[1].drift == pytest.approx(20_000, rel=0.02)
    late = [one.received.at - one.sent.at for one in traces.match(laid)]
    assert max(map(abs, late)) < 1 * MS


def test_with_messages_in_one_direction_only_the_time_of_day_is_used(tmp_path: Path) -> None:
    known, _ = aligned(run_of(tmp_path, [0.0, 100.0], {(0, 1): 1.0}))
    assert known[1] == ClockFit("node1", 0.0, 0.0, None, 0, known[1].middle)


def test_agents_of_one_machine_share_its_clock(tmp_path: Path) -> None:
    agents = [Written(0, host="node"), Written(1, host="node", ahead=0.0)]
    exchange(agents, 0, 1, 1.0, 2.0)
    exchange(agents, 1, 0, 1.0, 9.0)
    for agent in agents:
        agent.into(tmp_path)
    known, _ = aligned(traces.read(tmp_path).traces)
    assert [(one.ahead, one.uncertain) for one in known] == [(0.0, 0.0)] * 2


def test_all_times_of_a_trace_are_converted_to_one_clock(tmp_path: Path) -> None:
    agent = Written(1, host="node1", ahead=100.0)
    agent.call(1.0, 5.0, sums=[(2.0, 3.0)])
    agent.call(6.0, None)
    agent.message("to", 0, 1.5)
    agent.message("from", 0, 2.0)
    agent.message("all from", 0, 2.5)
    agent.wait(1.0, 5.0)
    agent.step(1, 0.0, 6.0)
    agent.lost(0, 7.0, "gone")
    trace = traces.read_one(agent.into(tmp_path))
    right = traces.read_one(Written(1, host="node1", lines=agent.lines, rows=agent.rows).into(tmp_path))
    laid = clock_alignment.on_one_clock(trace, ClockFit("node1", 100.0 * MS, 0.0, 0.0, 1, 0))
    assert laid.shift == trace.shift and (laid.start, laid.end) == (right.start, right.end)
    for name in ("calls", "waits", "steps", "sent", "received", "losses"):
        assert getattr(laid, name) == getattr(right, name), name
