"""The records of a run, in a simulation and on agents, and its file, plot and frame."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from shoal.algorithms import (
    CATALOG,
    Algorithm,
    GradientDescent,
    GradientTracking,
    LocalSteps,
    Run,
    own,
    run,
)
from shoal.algorithms.needs import CONNECTED
from shoal.algorithms.runs import run as run_module
from shoal.ops import safe_serialization
from shoal.sim import StackedFleet, per_agent
from shoal.topology.families.static import ring
from support.least_squares import DIMENSION, loss, problem

SIZE, STEPS = 4, 6
A, B = problem(SIZE)
START = torch.arange(SIZE * DIMENSION, dtype=torch.float64).reshape(SIZE, DIMENSION) / 10


def largest(x: torch.Tensor) -> dict[str, float]:
    assert x.shape == (SIZE, DIMENSION)
    return {"largest": float(x.max()), "last agent's": float(x[-1, 0])}


def stacked(algorithm: Algorithm, steps: int = STEPS, **options: Any) -> Run:
    return StackedFleet(ring(SIZE), seed=3).run(algorithm, START, per_agent(loss, A, B, batch=2), steps, **options)


def real(algorithm: Algorithm, **options: Any) -> Run:
    gradient = own(loss, A[shoal.rank()], B[shoal.rank()], batch=2)
    return run(algorithm, START[shoal.rank()], gradient, ring(SIZE), STEPS, seed=3, **options)


@pytest.mark.parametrize("measure", [None, largest])
def test_agents_record_the_values_of_the_simulation(measure: Any) -> None:
    algorithm = LocalSteps(GradientTracking(0.02), 2)
    expected = stacked(algorithm, measure=measure, every=2)
    for result in shoal.Fleet(SIZE, timeout=60.0).run(real, algorithm, measure=measure, every=2):
        assert [list(row) for row in result.records] == [list(row) for row in expected.records]
        assert result.records == [pytest.approx(row) for row in expected.records]
        assert result.sent * SIZE == expected.sent == expected.records[-1]["bytes"]


def test_consensus_and_loss_are_those_of_the_definitions() -> None:
    full = StackedFleet(ring(SIZE)).run(GradientDescent(0.02), START, per_agent(loss, A, B), STEPS)
    mean = full.x.mean(0)
    last = full.records[-1]
    assert last["consensus"] == pytest.approx(float((full.x - mean).square().sum(1).mean().sqrt()))
    assert last["loss"] == pytest.approx(sum(float(loss(mean, A[i], B[i])) for i in range(SIZE)) / SIZE)
    assert "loss" not in stacked_without_a_loss().records[0]


def stacked_without_a_loss() -> Run:
    return StackedFleet(ring(SIZE)).run(GradientDescent(0.1), START, lambda x: x, 1)


def test_a_round_is_a_step_with_an_exchange() -> None:
    result = stacked(LocalSteps(GradientTracking(0.01), 2), steps=5)
    assert [row["rounds"] for row in result.records] == [0, 0, 1, 1, 2, 2]
    assert [row["exchanges"] for row in result.records] == [0, 0, 2, 2, 4, 4]
    assert (result.steps, result.rounds, result.exchanges) == (5, 2, 4)


def test_a_long_run_has_a_hundred_records_and_every_sets_their_number() -> None:
    assert len(stacked(GradientDescent(0.01), steps=300).records) == 101
    assert stacked(GradientDescent(0.01), steps=300, every=0).records == []
    with pytest.raises(ValueError, match="every=-1"):
        stacked(GradientDescent(0.01), every=-1)


def test_records_send_nothing_if_every_is_zero() -> None:
    def sent(every: int) -> int:
        before = shoal.observability.bytes_sent()
        result = real(GradientDescent(0.02), every=every)
        return shoal.observability.bytes_sent() - before - result.sent

    fleet = shoal.Fleet(SIZE, timeout=60.0, transport="shared_memory")
    assert fleet.run(sent, 0) == [0] * SIZE
    assert all(more > 0 for more in fleet.run(sent, 1))


@dataclass(frozen=True)
class Bare(Algorithm):
    """Without declared needs."""

    def step(self, x: torch.Tensor, state: Any, grad: Any, mix: Any) -> Any:
        return mix(x), ()


def test_an_algorithm_without_declared_requirements_warns_once() -> None:
    class Mine(Bare):
        pass

    class Declared(Bare):
        needs = (CONNECTED,)

    class Anything(Bare):
        needs = ()

    fleet = StackedFleet(ring(SIZE))
    with pytest.warns(
        UserWarning, match=r"Mine declares no needs.*needs = \(DOUBLY_STOCHASTIC, CONNECTED\)"
    ) as warnings_seen:
        for _ in range(2):
            fleet.run(Mine(), START, lambda x: x, 1)
    assert len(warnings_seen) == 1
    for declared in (Declared(), Anything()):
        fleet.run(declared, START, lambda x: x, 1)


def test_every_algorithm_of_the_catalog_declares_its_requirements() -> None:
    assert [name for name, entry in CATALOG.items() if type(entry.example()).needs is Algorithm.needs] == []


def test_a_saved_run_continues_like_the_run(tmp_path: Path) -> None:
    algorithm = GradientTracking(0.02)
    half = stacked(algorithm, 3)
    half.save(tmp_path / "half.run")
    loaded = Run.load(tmp_path / "half.run")
    rest = [stacked(algorithm, 3, resume=one) for one in (half, loaded)]
    assert torch.equal(rest[0].x, rest[1].x) and rest[0].records == rest[1].records
    assert isinstance(loaded.state, tuple) and rest[1].exchanges == rest[0].exchanges == 12


def test_a_file_keeps_dtypes_and_nesting(tmp_path: Path) -> None:
    state = (torch.ones(2, 3, dtype=torch.bfloat16), [None, {"a": torch.tensor(3)}], torch.zeros(0, 4), 0.5, "s", True)
    made = replace(stacked(GradientDescent(0.1), 1), state=state)
    made.save(tmp_path / "run")
    result = Run.load(tmp_path / "run").state
    assert result[0].dtype == torch.bfloat16 and torch.equal(result[0], state[0])
    assert result[1][1]["a"].item() == 3 and result[1][1]["a"].shape == () and result[2].shape == (0, 4)
    assert result[3:] == state[3:]


def test_no_pickle_is_read_or_written(tmp_path: Path) -> None:
    made = stacked(GradientDescent(0.1), 1)
    with pytest.raises(TypeError, match=r"run\['state'\]\[0\] is a object, which cannot be saved without pickle"):
        replace(made, state=(object(),)).save(tmp_path / "bad")
    (tmp_path / "pickled").write_bytes(pickle.dumps(made.records))
    (tmp_path / "empty").touch()
    made.save(tmp_path / "cut")
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:-1])
    for name in ("pickled", "empty", "cut"):
        with pytest.raises(ValueError, match="is not a saved run"):
            Run.load(tmp_path / name)


def test_a_run_of_another_file_version_is_refused_with_both_versions(tmp_path: Path) -> None:
    """A file of version 1 may lack the count of gradients, without which a continued run would repeat batches."""
    made = stacked(GradientDescent(0.1), 1)
    content = {one.name: getattr(made, one.name) for one in fields(Run) if one.name != "gradients"}
    for kind, match in {
        "shoal run, version 1": r"run1 is a run of file version 1, and this version of Shoal reads version 2\. Load it",
        "shoal run, version 2": "run1 is not a saved run, or is damaged: its fields are x, estimate, ",
        "shoal walk": "run1 is not a saved run, or is damaged: its content is of another kind",
    }.items():
        data = safe_serialization.write({"kind": kind, **content}, "run")
        (tmp_path / "run1").write_bytes(data.numpy().tobytes())
        with pytest.raises(ValueError, match=match):
            Run.load(tmp_path / "run1")


def test_other_fields_of_a_run_need_another_file_version() -> None:
    known = {
        "2": "x estimate state steps sent rounds seconds records exchanges gradients",
    }
    assert known[run_module._VERSION] == " ".join(one.name for one in fields(Run))


def test_a_plot_has_one_figure_over_another() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    result = stacked(GradientDescent(0.02))
    axes = result.plot("consensus", against="bytes", label="ring")
    [line] = axes.lines
    assert line.get_xdata().tolist() == result.column("bytes").tolist()
    assert line.get_ydata().tolist() == result.column("consensus").tolist()
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_yscale()) == ("bytes", "consensus", "log")
    with pytest.raises(KeyError, match="no column 'accuracy'"):
        result.plot("accuracy", ax=axes)


def test_pandas_gets_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    result = stacked(GradientDescent(0.02))
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))  # it may not be installed
    assert result.to_pandas() == result.records
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        result.to_pandas()
