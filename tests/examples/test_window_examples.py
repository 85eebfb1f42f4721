"""The asynchronous examples: each runs under ``shoal run`` and in a fleet, and its figures are what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch

import shoal
from support.scripts import in_processes

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

import _asynchrony  # noqa: E402
import ad_psgd_digits  # noqa: E402
import async_gradient_tracking  # noqa: E402
import push_sum_async  # noqa: E402
from support.limits import scaled  # noqa: E402

FAST = ("--interval", "0.0005")
LAUNCHES = pytest.mark.timeout(150)  # each agent imports torch, which takes long where others want the cores too


def launched(script: str, agents: int, picture: Path, *options: str) -> str:
    """The output of a script under ``shoal run``."""
    command = [sys.executable, "-m", "shoal", "run", "--no-prefix", "-n", str(agents), str(EXAMPLES / script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--picture", str(picture), *options],
        capture_output=True,
        text=True,
        timeout=scaled(120),
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert f"Picture: {picture}" in done.stdout
    return done.stdout


def in_fleet(example: Any, agents: int, picture: Path, *options: str) -> Any:
    """The results of its agents, after checking that all are equal and that a picture exists."""
    results = shoal.Fleet(agents, timeout=50.0).run(example.main, example.parse(["--picture", str(picture), *options]))
    assert all(one == results[0] for one in results)
    assert is_png(picture)
    return results[0]


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# Push-sum


@pytest.mark.parametrize("agents", [1, 3, 4])
def test_push_sum_brings_every_agent_to_the_mean_and_conserves_mass(tmp_path: Path, agents: int) -> None:
    figures = in_fleet(push_sum_async, agents, tmp_path / "p.png", "--steps", "100", *FAST)
    assert max(figures.errors) < 1e-12
    assert min(figures.steps) >= 100
    assert figures.lost < 1e-12


def test_push_sum_runs_in_processes(tmp_path: Path) -> None:
    picture = tmp_path / "not yet there" / "p.png"
    options = ("--picture", str(picture), "--steps", "100", *FAST)
    printed, other = in_processes(2, EXAMPLES / "push_sum_async.py", *options)
    assert_push_sum_reports_success(printed, picture)
    assert other == ""


@pytest.mark.soak
@LAUNCHES
def test_push_sum_runs_under_shoal_run(tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    assert_push_sum_reports_success(launched("push_sum_async.py", 2, picture, "--steps", "100", *FAST), picture)


def assert_push_sum_reports_success(printed: str, picture: Path) -> None:
    errors = [float(error) for error in re.findall(r"agent \d: +\d+ steps in .*, error (\S+)", printed)]
    assert len(errors) == 2
    assert max(errors) < 1e-12
    assert f"Picture: {picture}" in printed and is_png(picture)


@pytest.mark.parametrize("agents", [4, 5, 9])
def test_the_graph_is_irregular_and_strongly_connected(agents: int) -> None:
    graph = push_sum_async.irregular(agents)
    assert nx.is_strongly_connected(graph)
    assert len({degree for _, degree in graph.out_degree}) > 1
    assert any(not graph.has_edge(j, i) for i, j in graph.edges)


# Gradient tracking


@pytest.mark.parametrize("agents", [2, 4])
def test_gradient_tracking_reaches_the_exact_solution_at_any_pace(tmp_path: Path, agents: int) -> None:
    figures = in_fleet(async_gradient_tracking, agents, tmp_path / "g.png", "--steps", "300", *FAST)
    assert max(figures.errors) < 1e-8
    assert min(figures.alone) > 0.1, "an agent's own rows have another solution"
    assert figures.untracked < 1e-12


@pytest.mark.soak
@LAUNCHES
def test_gradient_tracking_runs_under_shoal_run(tmp_path: Path) -> None:
    printed = launched("async_gradient_tracking.py", 2, tmp_path / "g.png", "--steps", "300", *FAST)
    errors = [float(error) for error in re.findall(r"agent \d: +\d+ steps, (\S+) from the solution", printed)]
    assert len(errors) == 2
    assert max(errors) < 1e-8


# AD-PSGD


@pytest.mark.parametrize("agents", [3])
def test_ad_psgd_learns_and_its_averages_preserve_the_mean_of_the_models(tmp_path: Path, agents: int) -> None:
    runs = in_fleet(ad_psgd_digits, agents, tmp_path / "a.png", "--steps", "200", "--interval", "0.001")
    assert len(runs) == 2
    for run in runs:
        assert min(run.accuracy) > 0.8
        assert run.of_mean > 0.8
        assert run.moved < 1e-4, "a gradient step or an average that was written over would be ten times as much"


@pytest.mark.soak
@LAUNCHES
def test_ad_psgd_runs_under_shoal_run(tmp_path: Path) -> None:
    printed = launched("ad_psgd_digits.py", 2, tmp_path / "a.png", "--steps", "200", "--interval", "0.001")
    accuracy = [float(one) for line in re.findall(r"accuracy (.*)%;", printed) for one in re.findall(r"[\d.]+", line)]
    assert len(accuracy) == 6  # two agents and the mean of both, twice
    assert min(accuracy) > 80
    assert "the others beside the slow one: " in printed


def test_pairs_need_two_agents() -> None:
    with pytest.raises(SystemExit, match="two agents"):
        shoal.Fleet(1).run(ad_psgd_digits.main, ad_psgd_digits.parse([]))


# What they share


def test_no_agent_stops_before_all_have_made_their_steps() -> None:
    made = [0] * 4

    def run() -> tuple[int, list[int]]:
        shoal.set_topology(shoal.topology.RingGraph(4, connect_style=1))  # news takes three hops
        own = 3 if shoal.rank() else 40
        for step in _asynchrony.until_all_have(own, 0.0005):
            made[shoal.rank()] = step
        seen = list(made)
        shoal.barrier()
        return own, seen

    for _, seen in shoal.Fleet(4, timeout=20.0).run(run):
        assert seen[0] >= 40
        assert min(seen) >= 3


def test_curves_of_different_lengths_are_sent_to_all() -> None:
    def run() -> list[list[tuple[float, float]]]:
        return _asynchrony.gather([(float(step), 10.0 * shoal.rank()) for step in range(1 + 2 * shoal.rank())])

    expected = [[(0.0, 0.0)], [(float(step), 10.0) for step in range(3)]]
    assert shoal.Fleet(2).run(run) == [expected, expected]


def test_intervals_differ_tenfold() -> None:
    results = shoal.Fleet(4).run(lambda: _asynchrony.interval(0.5))
    assert results[0] == 0.5
    assert results[-1] == pytest.approx(5.0)
    assert torch.tensor(results).diff().min() > 0
