"""Sweeps over algorithms, topologies and seeds."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import pytest
import torch
from rich.console import Console

from shoal.algorithms import EXTRA, GradientDescent
from shoal.sim import StackedFleet, Sweep, per_agent, sweep
from shoal.sim.sweeps import interval, student_t
from shoal.topology import OnePeerExponential, RingGraph
from support.least_squares import DIMENSION, loss, problem

GRADIENT = per_agent(loss, *problem(4), batch=2)
PROBLEM = torch.zeros(DIMENSION, dtype=torch.float64), GRADIENT
TOPOLOGIES = {"ring": RingGraph(4), "one-peer": OnePeerExponential(4)}


def swept(**options: Any) -> Sweep:
    algorithms = {"D-PSGD": GradientDescent(0.05), "EXTRA": EXTRA(0.05)}
    return sweep(PROBLEM, algorithms, TOPOLOGIES, 6, seeds=(1, 2, 3), **options)


def test_the_summary_is_that_of_the_single_runs() -> None:
    row = swept().summary()[1]
    runs = [StackedFleet(TOPOLOGIES["one-peer"], seed=s).run(GradientDescent(0.05), *PROBLEM, 6) for s in (1, 2, 3)]
    losses = torch.tensor([run.records[-1]["loss"] for run in runs], dtype=torch.float64)
    half = 4.302653 * float(losses.std()) / 3**0.5
    assert (row["algorithm"], row["topology"], row["runs"], row["step"]) == ("D-PSGD", "one-peer", 3, 6)
    assert row["loss"] == pytest.approx(float(losses.mean()))
    assert row["loss_high"] - row["loss"] == pytest.approx(half, rel=1e-6)
    assert half > 0


def test_a_refused_pair_does_not_affect_the_others() -> None:
    result = swept()
    assert list(result.refused) == [("EXTRA", "one-peer")]
    assert "static" in result.refused["EXTRA", "one-peer"]
    assert len(result.records) == 3 * 3 * 7
    console = Console(width=200)
    with console.capture() as captured:
        console.print(result.table())
    assert "EXTRA on one-peer was refused: EXTRA needs W to be static" in " ".join(captured.get().split())
    with pytest.raises(ValueError, match=r"every pair is refused; the first because EXTRA.* needs"):
        sweep(PROBLEM, [EXTRA(0.05)], [OnePeerExponential(4)], 1)


def test_each_seed_may_have_its_own_problem() -> None:
    def problem_of(seed: int) -> Any:
        return torch.full((4, 2), float(seed)), lambda x: 0 * x

    result = sweep(
        problem_of, [GradientDescent(0.1)], [RingGraph(4)], 1, seeds=(1, 3), measure=lambda x: {"m": x.max()}
    )
    assert result.summary()[0]["m"] == 2
    assert result.summary()[0]["algorithm"] == repr(GradientDescent(0.1))


def test_a_plot_has_a_line_for_each_pair() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    axes = swept().plot("loss", against="rounds")
    assert [line.get_label() for line in axes.lines] == ["D-PSGD, ring", "D-PSGD, one-peer", "EXTRA, ring"]
    assert len(axes.collections) == 3
    with pytest.raises(KeyError, match="no column 'accuracy'"):
        swept().plot("accuracy")


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227)]
)
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_t(0.975, freedom) == pytest.approx(quantile, rel=1e-5)


def test_quantiles_approach_the_normal_distributions() -> None:
    quantiles = [student_t(0.975, freedom) for freedom in (1, 2, 3, 10, 100, 10_000)]
    assert quantiles == sorted(quantiles, reverse=True)
    assert quantiles[-1] == pytest.approx(NormalDist().inv_cdf(0.975), abs=1e-3)


def test_one_value_has_no_interval() -> None:
    mean, half = interval([2.0], 0.95)
    assert mean == 2 and math.isnan(half)


@pytest.mark.parametrize("options", [{"seeds": ()}, {"every": 0}, {"confidence": 1.0}])
def test_invalid_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="pass"):
        sweep(PROBLEM, [GradientDescent(0.1)], [RingGraph(4)], 1, **options)
