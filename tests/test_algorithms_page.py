"""The page about algorithms: its table is the catalog, its code runs, and the algorithm it adds passes every test."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import shoal
from shoal import topology
from shoal.algorithms import CATALOG, Entry, Run
from shoal.sim.stacked import StackedMix

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
sys.path += [str(DOCS), str(TESTS / "algorithms")]

import algorithms_table  # noqa: E402
import test_every_algorithm as suite  # noqa: E402

STACKED, REAL, TWICE, SWEEP, AGENTS, SADDLE, MESSAGES, MACHINES, NEW, COMPRESSOR = (
    code
    for page in ("algorithms.md", "compressors.md", "howto/extend.md")
    for code in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
)


@pytest.fixture
def added() -> Iterator[Entry]:
    """The page's new algorithm, in the catalog for one test."""
    before = dict(CATALOG)
    exec(compile(NEW, "docs/howto/extend.md", "exec", dont_inherit=True), {"__name__": "page"})
    [name] = CATALOG.keys() - before.keys()
    try:
        yield CATALOG[name]
    finally:
        CATALOG.clear()
        CATALOG.update(before)


def test_the_table_is_the_catalog() -> None:
    assert algorithms_table.PAGE.read_text() == algorithms_table.page(), "run python docs/algorithms_table.py"


def test_the_examples_run_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(STACKED, names)
    exec(REAL, names)
    exec(SADDLE, names)
    exec(MESSAGES, names)
    exec(MACHINES, names)
    first, second = capsys.readouterr().out.split("\n", 1)
    assert first.startswith("torch.Size([1000, 10]) {'step': 300, ") and "'bytes': " in first and "'spread': " in first
    assert names["run"].records[-1]["spread"] < names["run"].records[1]["spread"]
    assert second.count("tensor(") == 5
    assert names["data"].shape == (1000, 10 + 8)
    ended = names["fleet"].run(names["algorithm"], torch.zeros(10), lambda x: x - 1, 100).x
    assert (ended - 1).abs().max() < 0.05
    saddle = names["saddle"]
    assert names["signs"].mul(names["slopes"](saddle)).mean(0).abs().max() < 1e-4 < saddle.abs().max()
    assert (saddle - saddle[0]).abs().max() < 1e-4


def test_the_pages_count_the_algorithms() -> None:
    assert "lists the thirty-five of the catalog" in (DOCS / "algorithms.md").read_text()
    assert len({type(entry.example()) for entry in CATALOG.values()}) == 35


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_compressor_has_a_wire_format(dtype: torch.dtype) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    sys.modules["page"] = ModuleType("page")  # where dataclasses look for types
    exec(compile(COMPRESSOR, "docs/howto/extend.md", "exec", dont_inherit=True), names)
    compressor = names["LargestBlock"](4)
    x, draws = torch.randn(3, 10, dtype=dtype), StackedMix(topology.RingGraph(3))
    x[1, 9] = torch.nan
    reconstructed = compressor(x, draws)
    torch.testing.assert_close(
        compressor.decode(compressor.encode(x, draws), 10, dtype, draws), reconstructed, rtol=0, atol=0, equal_nan=True
    )
    assert reconstructed[1, 9].isnan() and (reconstructed[0] != 0).sum() in (2, 4)
    kept = reconstructed[0].double().square().sum() / x[0].double().square().sum()
    assert kept >= compressor.delta(10)
    with pytest.raises(ValueError, match="the block begins at 12, and there are 10 numbers"):
        compressor.decode(
            torch.tensor([3]).view(torch.uint8).new_tensor([3] + [0] * (7 + 4 * dtype.itemsize)), 10, dtype, draws
        )


def test_a_fleet_averages_with_a_new_compressor() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(COMPRESSOR, "docs/howto/extend.md", "exec", dont_inherit=True), names)

    def agent() -> float:
        x = torch.full((10,), float(shoal.rank()))
        return float(shoal.neighbor_allreduce(x, compression=names["LargestBlock"](10))[0])

    assert shoal.Fleet(3).run(agent) == [1.0] * 3


def test_an_equation_becomes_an_algorithm_on_real_agents(tmp_path: Path) -> None:
    """An algorithm in ten lines, a sweep, a plot, the same algorithm in threads, and its file."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    assert len(TWICE[TWICE.index("@dataclass") :].strip().splitlines()) <= 11
    names: dict[str, Any] = {"shoal": shoal, "__name__": "page"}
    exec(STACKED[: STACKED.index("def measure")], names)
    for block in (TWICE, SWEEP, AGENTS):
        exec(compile(block, "docs/algorithms.md", "exec", dont_inherit=True), names)
    result, runs = names["found"], names["runs"]
    assert [(row["algorithm"], row["topology"], row["runs"]) for row in result.summary()] == [
        (algorithm, graph, 3) for algorithm in ("D-PSGD", "twice") for graph in ("ring", "one-peer")
    ]
    plain, twice = result.summary()[0], result.summary()[2]
    assert twice["consensus"] < plain["consensus"] and twice["bytes"] == 2 * plain["bytes"]
    names["axes"].figure.savefig(tmp_path / "sweep.png")
    assert len(names["axes"].lines) == 4 and names["axes"].get_xlabel() == "bytes"
    cell = {"algorithm": "twice", "topology": "ring", "seed": 0}
    simulated = [record for record in result.records if cell.items() <= record.items()]
    assert len(simulated) == 101
    for run in runs:
        assert [{**cell, **record} for record in run.records] == [pytest.approx(one, abs=1e-5) for one in simulated]
    runs[0].save(tmp_path / "run")
    assert Run.load(tmp_path / "run").records == runs[0].records


def test_a_new_algorithm_takes_less_than_40_lines() -> None:
    assert len(NEW.splitlines()) < 40


def test_a_new_algorithm_has_its_tests(added: Entry) -> None:
    suite.test_a_fleet_agrees_with_the_stacked_fleet(added, shoal.Fleet)
    suite.test_a_resumed_run_equals_an_uninterrupted_one(added)
    suite.test_sent_bytes_are_those_of_the_catalog(added)
    suite.test_neither_the_start_nor_the_state_is_changed(added)
    suite.test_agents_that_are_never_connected_are_refused(added)
    assert added.name in algorithms_table.table()
