"""The findings of the report: it names the agent that was made slow, and no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.observability import findings
from shoal.observability.findings import Finding
from shoal.observability.run_report import RunReport
from support.written_traces import Written, exchange

Work = Callable[[int, int], float]
"""Milliseconds that an agent computes in a step."""


def run_of(
    folder: Path, work: Work, *, size: int = 4, steps: int = 30, hosts: bool = False, took: Work | None = None,
    nbytes: int = 100_000, network: bool = False,
) -> RunReport:  # fmt: skip
    """Steps in which everybody computes, sends to everybody, and waits for all. ``took``: by source and destination,
    how long a message does, 0.1 ms if not given."""
    agents = [Written(rank, size, f"node{rank}" if hosts else "node") for rank in range(size)]
    began = [0.0] * size
    for number in range(steps):
        sent = [begin + work(rank, number) for rank, begin in enumerate(began)]
        for rank in range(size):
            arrived = {j: sent[j] + (took(j, rank) if took else 0.1) for j in range(size) if j != rank}
            end = max(sent[rank], *arrived.values())
            agents[rank].call(sent[rank], end, "x", number)
            agents[rank].wait(sent[rank], end, "x", number)
            for source, at in arrived.items():
                first = min(at, sent[source] + 0.05)
                exchange(
                    agents, source, rank, sent[source], first, at if network else 0.0, round_=number, nbytes=nbytes
                )
            agents[rank].step(number + 1, began[rank], end)
            began[rank] = end
    for agent in agents:
        agent.into(folder)
    return RunReport.of(folder)


def first(report: RunReport) -> Finding:
    return report.findings[0]


@pytest.mark.parametrize("straggler", [0, 3])
def test_a_slow_agent_is_named_with_its_cost_for_the_others(tmp_path: Path, straggler: int) -> None:
    report = run_of(tmp_path, lambda rank, _: 14.0 if rank == straggler else 10.0)
    result = first(report)
    assert result.what.startswith(
        f"rank {straggler} (node) computes 40% longer than the others: 14 ms in a step, where they take 10 ms"
    )
    assert "They wait for it 3.9 ms of each step, 28%" in result.what and "a batch of 71%" in result.advice
    assert not any(f"rank {rank} " in one.what for one in report.findings for rank in range(4) if rank != straggler)


def test_an_agent_that_waits_for_the_straggler_is_no_straggler(tmp_path: Path) -> None:
    """In a ring, agents wait for neighbours that wait themselves."""
    agents = [Written(rank, 4) for rank in range(4)]
    for number in range(20):
        at = 20.0 * number
        sent = [at + (8.0 if rank == 0 else 2.0) for rank in range(4)]
        for rank in range(4):
            source = (rank - 1) % 4
            arrived = max(sent[source], at + 8.0 + 0.5 * ((source - 0) % 4)) if rank != 0 else sent[source] + 0.1
            exchange(agents, source, rank, sent[source] if source == 0 else arrived - 0.1, arrived, round_=number)
            end = max(arrived, sent[rank])
            agents[rank].call(sent[rank], end, "x", number)
            agents[rank].wait(sent[rank], end, "x", number)
            agents[rank].step(number + 1, at, at + 20.0)
    for agent in agents:
        agent.into(tmp_path)
    named = [one.what for one in RunReport.of(tmp_path).findings if "computes" in one.what and "longer" in one.what]
    assert all(what.startswith("rank 0 ") for what in named)


def test_no_agent_is_named_if_all_are_equal(tmp_path: Path) -> None:
    report = run_of(tmp_path, lambda rank, number: 10.0 + 0.01 * ((rank + number) % 4))
    (result,) = report.findings
    assert "nobody is slow" in result.what and "99% of a step is computing" in result.what


def test_alternating_slow_agents_are_reported(tmp_path: Path) -> None:
    report = run_of(tmp_path, lambda rank, number: 16.0 if number % 4 == rank else 10.0)
    assert "nobody is slower than the rest as a rule" in first(report).what
    assert "own pace" in first(report).advice


def test_an_intermittently_slow_agent_is_named_with_its_steps(tmp_path: Path) -> None:
    report = run_of(tmp_path, lambda rank, number: 80.0 if rank == 2 and number % 10 == 9 else 10.0)
    result = first(report)
    assert result.what.startswith("rank 2 (node) computes more than 2 times as long as usual in 3 of 29 steps")
    assert "(steps 10, 20, 30)" in result.what


def slow_edge(source: int, destination: int) -> float:
    """Ten megabytes a second from 1 to 2, and a hundred elsewhere, for 100 kB."""
    return 10.0 if (source, destination) == (1, 2) else 1.0


def test_a_slow_link_is_named_with_its_traffic(tmp_path: Path) -> None:
    report = run_of(tmp_path, lambda *_: 10.0, size=3, hosts=True, took=slow_edge, network=True)
    result = first(report)
    assert result.what.startswith("the link 1 -> 2 (node1 to node2) carries 10 MB/s, where others carry 100 MB/s")
    assert "without the edge 1 -> 2" in result.advice and "compression=" in result.advice
    assert sum("the link" in one.what for one in report.findings) == 1


@pytest.mark.parametrize(
    ("is_slow", "what"),
    [
        (lambda source, destination: 3 in (source, destination), "sends or receives"),
        (lambda source, destination: source == 3, "sends"),
        (lambda source, destination: destination == 3, "receives"),
    ],
)
@pytest.mark.parametrize("hosts", [True, False])
def test_an_agent_with_only_slow_links_is_named_instead_of_them(
    is_slow: Callable[[int, int], bool], what: str, hosts: bool, tmp_path: Path
) -> None:
    def took(source: int, destination: int) -> float:
        return 10.0 if is_slow(source, destination) else 1.0

    report = run_of(tmp_path, lambda *_: 10.0, hosts=hosts, took=took, network=True)
    rank = "node3" if hosts else "rank 3 (node)"
    assert first(report).what.startswith(f"all that {rank} {what} is slow: 10 MB/s, where other links carry 100 MB/s")
    assert not any("the link" in one.what for one in report.findings)


def test_equal_links_are_not_named(tmp_path: Path) -> None:
    report = run_of(tmp_path, lambda *_: 10.0, size=3, hosts=True, took=lambda *_: 1.0, network=True)
    assert len(report.links) == 6
    assert not any("slow" in one.what and "nobody" not in one.what for one in report.findings)


def test_long_waits_for_data_have_their_advice(tmp_path: Path) -> None:
    report = run_of(tmp_path, lambda *_: 10.0, size=3, hosts=True, took=lambda *_: 5.0, network=True)
    result = first(report)
    assert result.what.startswith("33% of a step is waiting for data that are under way")
    assert "overlap" in result.advice and "compression=" in result.advice and "sparser topology" in result.advice


def test_much_process_group_coordination_has_its_advice(tmp_path: Path) -> None:
    agents = [Written(0), Written(1)]
    for number in range(6):
        at = 10.0 * number
        for agent in agents:
            agent.call(at + 5.0, at + 10.0, "x", number, moves=[(at + 5.0, at + 9.0, at + 10.0)])
            agent.wait(at + 5.0, at + 10.0, "x", number)
            agent.step(number + 1, at, at + 10.0)
    for agent in agents:
        agent.into(tmp_path)
    result = first(RunReport.of(tmp_path))
    assert result.what.startswith("40% of a step is coordination: agreeing on one order of operations")
    assert "fewer operations" in result.advice and "SHOAL_TRANSPORT" in result.advice


def test_a_run_without_steps_is_not_described_in_steps(tmp_path: Path) -> None:
    agent = Written(0)
    agent.message("from", 1, 9.0)
    agent.call(1.0, 9.0)
    agent.wait(1.0, 9.0)
    agent.into(tmp_path)
    assert "of the run is waiting for others" in first(RunReport.of(tmp_path)).what


def test_coordination_messages_are_not_counted_among_sizes(tmp_path: Path) -> None:
    agents = [Written(0), Written(1)]
    exchange(agents, 0, 1, 1.0, 2.0, nbytes=100)
    agents[0].message("to", 1, 2.0, round_=1, nbytes=8, **{"for": "coordination"})
    agents[1].message("from", 0, 3.0, round_=1, nbytes=8)
    for agent in agents:
        agent.into(tmp_path)
    assert findings.sizes(RunReport.of(tmp_path).flows) == {256: (1, 100)}


def test_sizes_count_messages_and_bytes(tmp_path: Path) -> None:
    report = run_of(tmp_path, lambda *_: 10.0, size=2, steps=10, nbytes=5000)
    assert findings.sizes(report.flows) == {16384: (20, 100_000)}
    assert [findings.size_of(limit) for limit in (4, 1024, 4096, 1 << 20, 1 << 32)] == [
        "4 B",
        "1 KiB",
        "4 KiB",
        "1 MiB",
        "4 GiB",
    ]


@pytest.mark.parametrize(("nbytes", "limit"), [(0, 1), (1, 4), (3, 4), (4, 16), (15, 16), (16, 64), (65_536, 262_144)])
def test_a_size_class_contains_messages_below_its_limit_and_not_below_a_fourth_of_it(
    tmp_path: Path, nbytes: int, limit: int
) -> None:
    report = run_of(tmp_path, lambda *_: 10.0, size=2, steps=4, nbytes=nbytes)
    assert list(findings.sizes(report.flows)) == [limit]


def test_many_small_messages_cause_advice_to_fuse(tmp_path: Path) -> None:
    report = run_of(tmp_path, lambda *_: 10.0, size=2, steps=10, nbytes=500)
    assert findings.small_messages(report.flows, 10) == ""
    assert "sends 30 messages of less than 16 KiB" in findings.small_messages(report.flows * 30, 10)


def test_the_first_step_of_many_is_excluded(tmp_path: Path) -> None:
    report = run_of(tmp_path, lambda _, number: 500.0 if not number else 10.0, steps=5)
    assert {share.number for share in report.shares} == {2, 3, 4, 5}
    few = run_of(tmp_path, lambda *_: 10.0, steps=3)
    assert {share.number for share in few.shares} == {1, 2, 3}
