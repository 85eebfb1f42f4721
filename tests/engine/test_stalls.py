"""An agent that waits for long logs it: for which ranks, since when, and with the status of those ranks."""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from shoal.coordination.ordering import CollectiveOrdering
from shoal.engine import agent_status, watchdog
from shoal.execution.matching import Matcher
from shoal.execution.membership import Membership
from shoal.execution.operation import needed_by
from shoal.execution.shared_parts import SharedParts
from shoal.runtime.agent import current
from shoal.transport.messages import Kind, Message
from support import PROCESS_GROUP, TRANSPORTS
from support.fault_points import over_both
from support.leftovers import nothing_is_left, wait_until
from support.world import World

Fleets = Callable[..., shoal.Fleet]
AFTER = 0.4
"""Seconds; an agent that waits is reported after them, and others that it asks answer at once."""


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.transport(name)) for name in (*TRANSPORTS, PROCESS_GROUP)])
def anywhere(request: pytest.FixtureRequest) -> Iterator[Fleets]:
    """Makes fleets over each of the four transports."""
    with nothing_is_left():
        yield partial(shoal.Fleet, transport=request.param, timeout=20.0)


def log_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "shoal"]


def test_a_report_names_the_missing_ranks_and_their_status(
    anywhere: Fleets, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 2 computes, rank 1 waits for it, and rank 0 waits for rank 1."""
    monkeypatch.setenv("SHOAL_STALL_SECONDS", str(AFTER))
    caplog.set_level(logging.WARNING, "shoal")

    def run() -> None:
        rank = shoal.rank()
        shoal.allreduce(torch.ones(1), name="before")
        if rank == 2:
            time.sleep(4 * AFTER)
        if rank:
            shoal.pair_gossip(torch.ones(1), 3 - rank)
        if rank < 2:
            shoal.pair_gossip(torch.ones(1), 1 - rank)
        shoal.barrier()

    anywhere(3).run(run)
    logged = log_lines(caplog)
    waits = [
        one
        for one in logged
        if re.match(r"pair_gossip of ranks 0 and 1 round 0 on rank 0 has waited [\d.]+ s for ranks \[1\]", one)
    ]
    assert len(waits) == 1 and waits[0].endswith("; it gives up after 20 s"), logged
    log_text = (
        r"rank 1, for which rank 0 waits: it waits in pair_gossip of ranks 1 and 2 round 0 for ranks \[2\], "
        r"since [\d.]+ s; "
    )
    assert any(re.match(log_text, one) for one in logged), logged
    log_text = (
        r"rank 2, for which rank 1 waits: it waits in no call of Shoal's, so its script does something else; "
        r"the last that ended was allreduce \(average\) 'before' round 0, [\d.]+ s ago"
    )
    assert any(re.match(log_text, one) for one in logged), logged
    assert not any("does not answer" in one for one in logged)


@pytest.mark.transport(PROCESS_GROUP)
def test_a_call_that_all_have_requested_waits_for_no_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No order is agreed on for a while, which may happen to a process without CPU time."""
    monkeypatch.setenv("SHOAL_STALL_SECONDS", str(2 * AFTER))
    monkeypatch.setattr(watchdog, "ASK_ALL_AFTER", AFTER / 2)  # after which agents know who has come
    caplog.set_level(logging.WARNING, "shoal")
    holds, output = Event(), list[str]()
    due = CollectiveOrdering.due.fget  # type: ignore[attr-defined]
    assert due is not None
    monkeypatch.setattr(CollectiveOrdering, "due", property(lambda order: not holds.is_set() and due(order)))

    def run() -> None:
        shoal.barrier()
        holds.set()
        handle = shoal.nonblocking.neighbor_allreduce(torch.ones(100_000), name="x")
        with pytest.raises(shoal.DeadlineExceeded, match="to which all have come"):
            handle.wait(3 * AFTER)
        if shoal.rank() == 0:
            with current().engine.lock:
                output.append(str(current().engine.status_reporter.doing))
        while_held.wait()
        holds.clear()
        assert torch.equal(handle.wait(), torch.ones(100_000))

    while_held = Barrier(2)
    shoal.Fleet(2, transport=PROCESS_GROUP, timeout=20.0).run(run)
    waits = [one for one in log_lines(caplog) if "on rank 0 has waited" in one]
    until = ", to which all have come, until its tensors are moved"
    assert len(waits) == 1 and f" s{until}; it gives up" in waits[0], waits
    assert f"neighbor_allreduce 'x' round 0{until}, since " in output[0], output


def test_only_backend_operations_are_reported_as_requested_by_all() -> None:
    """A computing operation, or an operation that has not started, waits for no rank either."""
    assert (needed_by([3], True), needed_by([], False)) == (" for ranks [3]", "")
    assert "all have come" in needed_by([], True)


@pytest.mark.parametrize("late", [0, 3])
def test_a_collective_operation_names_the_absent_ranks(
    anywhere: Fleets, late: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With any algorithm, and also while the others wait for each other."""
    monkeypatch.setenv("SHOAL_STALL_SECONDS", str(2 * AFTER))
    caplog.set_level(logging.WARNING, "shoal")

    def run() -> None:
        shoal.barrier()
        if shoal.rank() == late:
            time.sleep(4 * AFTER)
        shoal.allreduce(torch.ones(1000), name="all")

    anywhere(4).run(run)
    results = [one for one in log_lines(caplog) if "has waited" in one]
    assert len(results) == 3, results
    for one in results:
        assert one.startswith("allreduce (average) 'all' round 0 on rank ") and f" for ranks [{late}];" in one, results


def test_a_call_on_a_window_is_reported_as_well_and_once(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHOAL_STALL_SECONDS", str(AFTER))
    caplog.set_level(logging.WARNING, "shoal")

    def run() -> None:
        shoal.bluefog.win_create(torch.ones(3), "weights")
        if shoal.rank() == 0:
            with shoal.bluefog.win_mutex("weights", for_self=True):
                shoal.barrier()
                time.sleep(4 * AFTER)
        else:
            shoal.barrier()
            shoal.bluefog.win_put(torch.ones(3), "weights", require_mutex=True)
        shoal.barrier()
        shoal.bluefog.win_free("weights")

    fleet(2).run(run)
    results = [one for one in log_lines(caplog) if "on rank 1 has waited" in one]
    log_text = r"win_\w+ 'weights'( round 0)? on rank 1 has waited [\d.]+ s for ranks \[0\]"
    assert len(results) == 1 and re.match(log_text, results[0]), results
    assert any("rank 0, for which rank 1 waits: it waits in no call" in one for one in log_lines(caplog))


def test_a_call_on_a_window_is_checked_in_time_and_reported_once_beside_other_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = [("win_put 'a'", [1], 0.0)]
    looks: list[float] = []
    stub: Any = SimpleNamespace(in_flight=list, view=SimpleNamespace(alive=()))
    services: Any = SimpleNamespace(all=lambda: [SimpleNamespace(calls_that_wait=lambda: list(calls))])
    progress: Any = SimpleNamespace(lock=nullcontext(), check_by=looks.append)
    result = watchdog.Stalls(SharedParts(0, 2, stub, stub, stub, stub, progress, stub), stub, services)
    result.check_after_wait(0.0)
    assert looks == [30.0] and result.check(29.0) == 30.0 and log_lines(caplog) == []
    assert result.check(30.0) == float("inf")
    calls.append(("win_get 'b'", [1], 10.0))
    result.check_after_wait(10.0)
    assert looks == [30.0, 40.0] and result.check(40.0) == float("inf")
    assert [one.split(" on rank")[0] for one in log_lines(caplog)] == ["win_put 'a'", "win_get 'b'"]


def test_many_waiting_calls_are_one_report_and_each_is_reported_once(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHOAL_STALL_SECONDS", str(AFTER))
    caplog.set_level(logging.WARNING, "shoal")

    def run() -> None:
        if shoal.rank() == 0:
            handles = [shoal.nonblocking.allreduce(torch.ones(1), name=f"call {i}") for i in range(20)]
            time.sleep(0.01)
        else:
            time.sleep(AFTER + 1.5)
            handles = [shoal.nonblocking.allreduce(torch.ones(1), name=f"call {i}") for i in range(20)]
        for handle in handles:
            handle.wait()

    fleet(2).run(run)
    reports = [one for one in log_lines(caplog) if "on rank 0 has waited" in one]
    assert 1 <= len(reports) <= 3, reports  # the first due report, and the one due a second later
    assert "'call 0' round 0" in reports[0] and re.search(r" and 1?\d more on rank 0", " ".join(reports)), reports
    assert len([one for one in log_lines(caplog) if "rank 1, for which rank 0 waits" in one]) <= len(reports)


def test_shorter_waits_are_not_reported(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHOAL_STALL_SECONDS", "inf")
    caplog.set_level(logging.WARNING, "shoal")

    def run() -> None:
        if shoal.rank():
            time.sleep(2 * AFTER)
        shoal.barrier()

    fleet(2).run(run)
    assert [one for one in log_lines(caplog) if "has waited" in one] == []


def report_a_barrier(path: Path) -> None:
    """Into a file: what this agent says in the log while it waits in a barrier."""
    handler = logging.FileHandler(path)
    logging.getLogger("shoal").addHandler(handler)
    try:
        shoal.barrier()
    finally:
        logging.getLogger("shoal").removeHandler(handler)
        handler.close()


@over_both
def test_a_stopped_agent_does_not_reply(environment: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "reports"
    with World(2, environment=environment | {"SHOAL_STALL_SECONDS": str(AFTER)}) as world:
        world.results(shoal.barrier)
        world.kill(1, signal.SIGSTOP)
        waiting = world.run_on(0, report_a_barrier, path)
        expected_texts = "has waited", "does not answer"
        assert wait_until(lambda: path.exists() and all(one in path.read_text() for one in expected_texts), 15.0)
        world.kill(1, signal.SIGCONT)
        world.results(shoal.barrier, on=[1])
        assert not waiting.outcome().error
    results = path.read_text().splitlines()
    assert any("barrier round 1 on rank 0 has waited" in one and "for ranks [1]" in one for one in results), results
    assert "rank 1 does not answer rank 0: it is stopped, hung, or cut off" in results


@pytest.mark.parametrize(
    ("seconds", "readable"), [(0.3012, "0.301 s"), (31.24, "31.2 s"), (300.0, "300 s"), (3600, "3600 s")]
)
def test_times_have_a_readable_form(seconds: float, readable: str) -> None:
    assert agent_status.format_seconds(seconds) == readable


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_an_invalid_time_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SHOAL_STALL_SECONDS", text)
    with pytest.raises(ValueError, match=r"SHOAL_STALL_SECONDS=.*must be a positive number of seconds"):
        shoal.Fleet(2).run(shoal.barrier)


@pytest.mark.parametrize("computes", [0.0, 4 * AFTER])
def test_an_error_at_the_deadline_repeats_the_last_report(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch, computes: float
) -> None:
    """If the agent that is waited for waits itself, and if it computes."""
    monkeypatch.setenv("SHOAL_STALL_SECONDS", str(AFTER))
    together = Barrier(2)

    def run() -> str:
        rank = shoal.rank()
        if rank and computes:
            together.wait(20)
            return ""
        with pytest.raises(shoal.DeadlineExceeded) as caught:
            shoal.allreduce(torch.ones(1), name=f"only {rank}", timeout=(3 + rank) * AFTER)
        together.wait(20)
        return str(caught.value)

    results = fleet(2).run(run)
    does = "it waits in no call of Shoal's" if computes else r"it waits in allreduce \(average\) 'only 1' round 0"
    assert re.search(
        rf"or pass timeout=\. Make the same calls .*\. [\d.]+ s ago rank 1 did this: {does}", results[0]
    ), results[0]


def test_an_agent_is_queried_again_only_after_its_reply_or_its_failure(caplog: pytest.LogCaptureFixture) -> None:
    matcher, output = Matcher(), list[tuple[int, str]]()
    sender: Any = SimpleNamespace(send_message=lambda rank, message: output.append((rank, message.op)))
    about: Any = SimpleNamespace(waited_for=lambda operation: [0, 1])
    stub: Any = SimpleNamespace(all=list)
    parts = SharedParts(0, 2, stub, stub, Membership(2), matcher, stub, sender)
    reports = watchdog.Stalls(parts, about, stub)
    reports.after = 30.0

    def asks(now: float) -> int:
        """How many questions there were, after another call has waited for long enough."""
        matcher.begin("average", f"x{now}", 100.0, True).started = now - reports.after
        reports.check(now)
        return len(output)

    assert [asks(now) for now in (100.0, 101.5)] == [1, 1]
    reports.on_answer(1, Message(Kind.NOTICE, text="it computes"))
    assert [asks(now) for now in (103.0, 104.5)] == [2, 2]
    assert reports.check(104.9) == 103.0 + watchdog.ANSWER_WITHIN
    reports.check(105.0)  # it does not answer
    assert [one for one in log_lines(caplog) if "does not answer" in one] == [
        "rank 1 does not answer rank 0: it is stopped, hung, or cut off"
    ]
    assert asks(106.5) == 3 and set(output) == {(1, watchdog.DOING)}
