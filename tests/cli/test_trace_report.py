"""``shoal report`` of traces: what it prints, writes and draws, and that it names who is slow in real runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import shoal
from shoal.cli import main
from shoal.observability.breakdown import KINDS
from shoal.observability.run_report import RunReport, _draw_parts, _draw_sizes, _draw_steps
from support.fault_points import over_both
from support.namespaces import Namespace, network_namespaces
from support.world import World
from support.written_traces import Written, exchange


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The printed report, with single spaces."""
    assert main(["report", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def two_agents(folder: Path, *, steps: int = 6, ahead: float = 0.0) -> list[Written]:
    """The second computes twice as long."""
    agents = [Written(0, host="node0"), Written(1, host="node1", ahead=ahead)]
    for number in range(steps):
        at = 20.0 * number
        for k, agent in enumerate(agents):
            agent.call(at + 10.0 * (k + 1), at + 20.0, "x", number)
            agent.step(number + 1, at, at + 20.0)
        agents[0].wait(at + 10.0, at + 20.0, "x", number)
        exchange(agents, 1, 0, at + 20.0, at + 20.0, round_=number)
        exchange(agents, 0, 1, at + 10.0, at + 10.0, round_=number)
    for agent in agents:
        agent.into(folder)
    return agents


def test_the_report_names_the_slow_agent_and_writes_one_merged_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_agents(tmp_path)
    output = report(capsys, str(tmp_path))
    assert "traces of 2 of 2 agents, on 2 machines" in output
    assert "a step of 'optimizer', the mean of 5, the first left out" in output
    assert "0 node0 20.00 50.0% 0.0% 0.0% 0.0% 50.0% 0.0%" in output
    assert "1. rank 1 (node1) computes 100% longer than the others" in output
    assert f"written: {tmp_path}/merged.json, one trace with 12 arrows" in output
    assert len(json.loads((tmp_path / "merged.json").read_text())) > 50


def test_the_merged_trace_is_written_to_the_requested_place_or_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_agents(tmp_path)
    where = tmp_path / "out" / "all.json"
    assert str(where) in report(capsys, str(tmp_path), "-o", str(where)) and where.exists()
    assert "written" not in report(capsys, str(tmp_path), "-o", "")
    assert not (tmp_path / "merged.json").exists()


def test_a_merged_trace_is_not_read_as_an_agents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_agents(tmp_path)
    assert report(capsys, str(tmp_path)) == report(capsys, str(tmp_path))


def test_the_report_draws_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_agents(tmp_path)
    for name, steps in (("steps.png", True), ("whole.svg", False)):
        if not steps:
            for rank in range(2):
                agent = Written(rank)
                agent.call(0.0, 1.0)
                agent.into(tmp_path)
        picture = tmp_path / "out" / name
        assert f"drawn: {picture}" in report(capsys, str(tmp_path), "--picture", str(picture))
        assert picture.stat().st_size > 5000


def test_each_panel_of_the_picture_has_a_legend(tmp_path: Path) -> None:
    two_agents(tmp_path)
    result = RunReport.of(tmp_path)
    figure = Figure()
    parts, steps, messages = figure.subplots(1, 3)
    _draw_parts(parts, result)
    _draw_steps(figure, steps, result)
    _draw_sizes(messages, result)
    labels = [(axes.get_title("left"), axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes]
    assert labels[0] == ("Mean time of a step, by what the agent does", "milliseconds", "")
    assert labels[1] == ("Time that each agent computes in each step", "step", "")
    assert labels[2][1:] == ("size of a message", "share in %")
    assert labels[3] == ("", "", "milliseconds of computing")
    assert [text.get_text() for text in parts.get_legend().get_texts()] == list(KINDS)
    assert len({bar.get_facecolor() for bar in parts.patches}) == len(KINDS)
    assert [text.get_text() for text in messages.get_legend().get_texts()] == ["messages", "bytes"]
    heights = [f"{bar.get_height():.0f}%" for bar in messages.patches]
    assert heights == [text.get_text() for text in messages.texts] != []


def restarted(folder: Path) -> list[Written]:
    """Rank 1 is killed after step 5 of 20, and its second start takes part from step 11 on; its own first is 1."""
    lives = [Written(0), Written(1), Written(1, incarnation=1)]
    for number in range(1, 21):
        at = 20.0 * number
        parts = [(lives[0], number)]
        parts += [(lives[1], number)] if number <= 5 else []
        parts += [(lives[2], number - 10)] if number > 10 else []
        for agent, own in parts:
            agent.call(at + 10.0, at + 20.0, "x", number)
            agent.step(own, at, at + 20.0)
    for agent, suffix in zip(lives, ("", "", "-again1"), strict=True):
        agent.into(folder, suffix, closed=agent is not lives[1])
    return lives


def test_the_steps_of_a_restarted_agent_are_aligned_with_the_others(tmp_path: Path) -> None:
    restarted(tmp_path)
    result = RunReport.of(tmp_path)
    figure = Figure()
    axes = figure.add_subplot()
    _draw_steps(figure, axes, result)
    [image] = axes.images
    first, last = (round(image.get_extent()[k] + (0.5, -0.5)[k]) for k in (0, 1))
    steps = [[first + k for k, cell in enumerate(row) if cell == cell] for row in image.get_array().filled(np.nan)]
    # The first step of each life is left out.
    assert steps == [list(range(2, 21)), list(range(2, 6)), list(range(12, 21))]
    assert (first, last) == (2, 20)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 1 (restarted)"]


def test_a_restarted_agent_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    restarted(tmp_path)
    output = report(capsys, str(tmp_path), "--steps")
    assert "1 (restarted) here 20.00" in output and " 1 here 20.00" in output
    assert "1 (restarted) 10 20.000" in output
    assert "those of ranks 1 end in the middle" in output


def test_every_step_is_listed_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_agents(tmp_path)
    assert "1 6 20.000 20.000" in report(capsys, str(tmp_path), "--steps")


def test_clock_offsets_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_agents(tmp_path, ahead=300.0)
    assert "the clock of node1 is +300.0" in report(capsys, str(tmp_path))


def test_missing_truncated_and_foreign_traces_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agents = two_agents(tmp_path)
    agents[1].call(119.0, None, "y", 3)
    agents[1].lost(0, 119.5, "its process ended")
    agents[1].into(tmp_path, closed=False, torn='{"ph":"B","pi')
    Written(0, run="yesterday").into(tmp_path, "-2")
    (tmp_path / "shoal-rank9.json").write_text("no trace")
    for agent in agents:
        agent.size = 4
    agents[0].into(tmp_path)
    output = report(capsys, str(tmp_path))
    assert "traces of 2 of 4 agents" in output and "none of ranks 2, 3" in output
    assert "those of ranks 1 end in the middle" in output
    assert "of other runs, and left out: shoal-rank0-2.json" in output
    assert "left out: shoal-rank9.json is no trace of an agent" in output
    assert "rank 0 was lost at second 0.1: its process ended" in output
    assert "the trace of rank 1 ends in neighbor_allreduce 'y' round 3" in output


def test_without_an_optimizer_the_whole_run_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent = Written(0, 1)
    agent.call(0.0, 2000.0)
    agent.wait(500.0, 2000.0)
    agent.into(tmp_path)
    output = report(capsys, str(tmp_path))
    assert "no optimizer of Shoal's has marked steps: of the whole run" in output and "0 here 2.00 25.0%" in output


def test_a_folder_with_both_kinds_of_files_reports_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_agents(tmp_path)
    entry = {"rank": 0, "incarnation": 0, "lost": [], "entered": [], "alive": [0, 1]}
    lines = [json.dumps(entry | {"at": at, "what": what}) + "\n" for at, what in ((1.0, "came"), (9.0, "left"))]
    (tmp_path / "agent0.jsonl").write_text("".join(lines))
    picture = tmp_path / "run.png"
    output = report(capsys, str(tmp_path), "--picture", str(picture))
    assert "lost: 0; came back: 0" in output and "computes 100% longer" in output
    assert picture.exists() and (tmp_path / "run-members.png").exists()


@pytest.mark.parametrize("content", ["", "[\n"])
def test_an_empty_folder_names_the_option_that_writes_traces(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content:
        (tmp_path / "shoal-rank0.json").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("shoal report: error: there is") and ("SHOAL_TIMELINE=" in error or "rank0" in error)


def test_markup_in_names_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names come from the script: no markup in them is interpreted."""
    agent = Written(0, 1, host="[red]node")
    agent.call(0.0, None, "[bold]x")
    agent.into(tmp_path)
    output = report(capsys, str(tmp_path))
    assert "[red]node" in output and "[bold]x" in output


# Real runs


def train(straggler: int, steps: int, numel: int, pause: float) -> None:
    """Train a model of the given size for some steps; one agent does other work between them."""
    shoal.set_topology(shoal.topology.FullyConnectedGraph(shoal.size()))
    model = torch.nn.Linear(numel, 1, bias=False)
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(numel)).sum().backward()
        time.sleep(pause * (4 if shoal.rank() == straggler else 1))
        optimizer.step()


@over_both
def test_the_slowest_agent_is_named_first(environment: dict[str, str], tmp_path: Path) -> None:
    with World(3, environment=environment | {"SHOAL_TIMELINE": str(tmp_path)}) as world:
        world.results(train, 2, 12, 1000, 0.02)
    result = RunReport.of(tmp_path)
    assert len(result.traces) == 3 and not result.found.missing
    assert result.findings[0].what.startswith("rank 2 ("), [one.what for one in result.findings]


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Namespace]]:
    with network_namespaces(3) as result:
        yield result


@pytest.mark.transport("network")
def test_a_machine_with_a_slow_link_is_named_first(machines: list[Namespace], tmp_path: Path) -> None:
    """Of three machines, one sends and receives two megabytes a second."""
    machines[2].slow(16_000)
    try:
        with World(3, namespaces=machines, environment={"SHOAL_TIMELINE": str(tmp_path)}) as world:
            world.results(train, -1, 6, 50_000, 0.0)
    finally:
        machines[2].slow(0)
    result = RunReport.of(tmp_path)
    first = result.findings[0].what
    assert first.startswith("all that rank 2 (") and "sends or receives is slow" in first, [
        one.what for one in result.findings
    ]
