"""Traces are read as they were written, complete or truncated; traces of different runs are distinguished."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import shoal
from shoal.observability import traces
from shoal.observability.traces import MessageKey, TracedLoss
from support.written_traces import BEGAN, MS, Written


def ms(nanoseconds: int) -> float:
    return (nanoseconds - BEGAN) / MS


def test_written_traces_are_read_equally(tmp_path: Path) -> None:
    agent = Written(1, size=3, host="node7")
    agent.call(1.0, 5.0, "x", 4, sums=[(3.0, 4.0)], prepare=(1.0, 1.5))
    agent.message("to", 2, 1.5, "x", 4, 4000)
    agent.message("from", 0, 2.0, "x", 4, 4000)
    agent.message("all from", 0, 3.0, "x", 4, 4000)
    agent.wait(1.25, 5.0, "x", 4)
    agent.step(9, 0.0, 6.0)
    agent.lost(2, 7.0, "its process ended")
    agent.call(8.0, None, "y", 0)
    agent.call(8.0, 9.0, "z", 0, error="Mismatch: no")
    trace = traces.read_one(agent.into(tmp_path))
    assert (trace.rank, trace.size, trace.host, trace.run, trace.torn) == (1, 3, "node7", "this", False)
    first, unended, failed = trace.calls
    assert (first.operation, first.name, first.round) == ("neighbor_allreduce", "x", 4)
    assert (ms(first.start), first.end and ms(first.end)) == (1.0, 5.0)
    assert [(what, ms(start), ms(end)) for what, start, end in first.inside] == [
        ("sum", 3.0, 4.0),
        ("prepare", 1.0, 1.5),
    ]
    assert unended.end is None and failed.error == "Mismatch: no"
    (sent,), (received,) = trace.sent, trace.received
    assert (sent.peer, sent.key, sent.nbytes, ms(sent.at)) == (2, MessageKey("x", 4, 0, 1), 4000, 1.5)
    assert (received.peer, ms(received.at), ms(received.arrived)) == (0, 2.0, 3.0)
    (wait,), (step,) = trace.waits, trace.steps
    assert (wait.thread, wait.name, wait.round, ms(wait.start), ms(wait.end)) == ("MainThread", "x", 4, 1.25, 5.0)
    assert (step.optimizer, step.number, ms(step.start), ms(step.end)) == ("optimizer", 9, 0.0, 6.0)
    assert trace.losses == [TracedLoss(2, "died", "its process ended", trace.losses[0].at)]
    assert (ms(trace.start), ms(trace.end)) == (0.0, 9.0)


def work() -> int:
    """Calls of all kinds, and steps of an optimizer."""
    shoal.barrier()  # its messages may come before a trace has begun
    model = torch.nn.Linear(300, 300)
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(300)).sum().backward()
        optimizer.step()
    handles = [shoal.nonblocking.neighbor_allreduce(torch.ones(5), f"call {k}") for k in range(20)]
    for handle in handles:
        handle.wait()
    shoal.neighbor_allreduce(torch.ones(5), 0.5, dst_weights={(shoal.rank() + 1) % shoal.size(): 0.5})
    shoal.barrier()
    return shoal.observability.bytes_sent()


def is_first(key: MessageKey) -> bool:
    return (key.name, key.round) == ("~barrier", 0)


@pytest.mark.parametrize("transport", ["threads", "shared_memory", "network"])
def test_real_traces_have_every_message_on_both_sides_and_every_step(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TIMELINE", str(tmp_path))
    sent = shoal.Fleet(3, transport=transport).run(work)
    result = traces.read(tmp_path)
    assert [trace.rank for trace in result.traces] == [0, 1, 2] and not result.missing and not result.others
    assert len({trace.run for trace in result.traces}) == 1 and {trace.size for trace in result.traces} == {3}
    for trace in result.traces:
        assert [step.number for step in trace.steps] == [1, 2, 3, 4]
        assert all(call.end is not None for call in trace.calls)
        named = [call for call in trace.calls if call.name.startswith("call ")]
        assert len(named) == 20 and all(any(what == "sum" for what, *_ in call.inside) for call in named)
        # init's own messages went before the trace began
        assert sum(one.nbytes for one in trace.sent) <= sent[trace.rank]
        for other in result.traces:
            received_keys = sorted(one.key for one in trace.sent if one.peer == other.rank and not is_first(one.key))
            assert received_keys == sorted(
                one.key for one in other.received if one.peer == trace.rank and not is_first(one.key)
            )
        coordinating = [one for one in trace.sent if one.coordinates]
        assert coordinating and all(one.nbytes < 100 for one in coordinating)
        assert any(one.nbytes > 300_000 and not one.coordinates for one in trace.sent)
        large = [one for one in trace.received if one.nbytes > 300_000]
        assert all((one.arrived > one.at) == (transport == "network") for one in large)


def test_a_step_starts_at_the_end_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TIMELINE", str(tmp_path))
    shoal.Fleet(2).run(work)
    for trace in traces.read(tmp_path).traces:
        first, *others = trace.steps
        assert first.start < first.end
        for before, step in zip(trace.steps, others, strict=False):
            assert step.start == before.end < step.end


@pytest.mark.parametrize("torn", ['{"ph":"B","pid":0,"ti', "{", '{"ph":"i","name":"'])
def test_a_truncated_last_line_is_skipped(tmp_path: Path, torn: str) -> None:
    agent = Written(0)
    agent.call(0.0, 1.0)
    trace = traces.read_one(agent.into(tmp_path, closed=False, torn=torn))
    assert trace.torn and len(trace.calls) == 1
    full = traces.read_one(agent.into(tmp_path, closed=False))
    assert full.torn and len(full.calls) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "no json",
        "[\n3\n]",
        '[\n{"a": 1}\n]',
        '[\n{"ph":"B","pid":0,"tid":1,"ts":1,"name":"x"}\n]',
        '{"traceEvents": []}',
    ],
)
def test_an_invalid_trace_is_skipped_with_a_warning(tmp_path: Path, text: str) -> None:
    (tmp_path / "shoal-rank7.json").write_text(text)
    with pytest.raises(ValueError, match="shoal-rank7"):
        traces.read(tmp_path)
    Written(0, size=1).into(tmp_path)
    result = traces.read(tmp_path)
    assert [trace.rank for trace in result.traces] == [0]
    (word,) = result.skipped
    assert word.startswith("shoal-rank7.json is no trace of an agent")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"rank":0', '"rank":"0"'),
        ('"size":1', '"size":1e400'),
        ('"size":1', '"size":1000000000000'),
        ('"dur":', '"dur":1e400,"was":'),
        ('"ts":', '"ts":NaN,"was":'),
        ('"round":0', '"round":[0]'),
        ('"name":"neighbor_allreduce"', '"name":[]'),
    ],
)
def test_a_trace_with_a_value_of_another_type_or_size_is_skipped(tmp_path: Path, old: str, new: str) -> None:
    agent = Written(0, size=1)
    agent.call(0.0, 1.0)
    agent.wait(0.0, 1.0)
    path = agent.into(tmp_path)
    text = path.read_text().replace('": ', '":')
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match="is no trace of an agent"):
        traces.read(tmp_path)


def test_an_unreadable_line_in_the_middle_is_not_a_truncated_end(tmp_path: Path) -> None:
    agent = Written(0)
    agent.call(0.0, 1.0)
    path = agent.into(tmp_path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], '{"ph":"B"', *lines[3:]]))
    with pytest.raises(ValueError, match="cannot be read"):
        traces.read_one(path)


def test_an_empty_folder_names_the_option_that_writes_traces(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="SHOAL_TIMELINE="):
        traces.read(tmp_path)


def test_a_rank_without_a_trace_is_reported_missing(tmp_path: Path) -> None:
    for rank in (0, 3):
        Written(rank, size=5).into(tmp_path)
    assert traces.read(tmp_path).missing == [1, 2, 4]


def test_the_run_with_most_traces_is_reported_and_of_equals_the_last(tmp_path: Path) -> None:
    for rank in range(3):
        agent = Written(rank, size=3, run="first")
        agent.call(0.0, 1.0)
        agent.into(tmp_path)
    for rank in range(2):
        agent = Written(rank, size=2, run="second")
        agent.call(5.0, 6.0)
        agent.into(tmp_path, "-2")
    result = traces.read(tmp_path)
    assert {trace.run for trace in result.traces} == {"first"}
    assert {one.path.name for one in result.others} == {"shoal-rank0-2.json", "shoal-rank1-2.json"}
    (tmp_path / "shoal-rank2.json").unlink()
    assert {trace.run for trace in traces.read(tmp_path).traces} == {"second"}


def test_a_restarted_agent_belongs_to_its_run(tmp_path: Path) -> None:
    """Also if rank 0 was restarted before, so that the run has another name in its trace."""
    for rank in range(2):
        agent = Written(rank, run="before")
        agent.call(0.0, 50.0)
        agent.into(tmp_path)
    again = Written(1, run="after", incarnation=1)
    again.call(20.0, 40.0)
    again.into(tmp_path, "-again1")
    result = traces.read(tmp_path)
    assert [(trace.rank, trace.incarnation) for trace in result.traces] == [
        (0, 0),
        (1, 0),
        (1, 1),
    ] and not result.others


def test_a_trace_with_an_older_header_is_read(tmp_path: Path) -> None:
    agent = Written(0)
    agent.call(0.0, 1.0)
    path = agent.into(tmp_path)
    lines = path.read_text().splitlines()
    head = agent.head()
    for name in ("run", "size", "boot", "incarnation"):
        del head["args"][name]
    path.write_text("\n".join([*lines[:2], json.dumps(head) + ",", *lines[3:]]))
    (trace,) = traces.read(tmp_path).traces
    assert (trace.size, trace.boot, len(trace.calls)) == (0, "here", 1)
