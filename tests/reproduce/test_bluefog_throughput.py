"""Figure 12 and the times of table II of the BlueFog paper: its verdict, and measurements that are read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "reproduce"))

import bluefog_throughput as experiment
from _common import verdict
from papers.clusters import FIGURE_12, Figure12, Workload

PRINTED = {"ResNet-50": 0.97, "VGG-16": 0.6, "BERT-large": 0.55}


def one(workload: Workload, size: int, speedups: dict[str, float]) -> Figure12:
    """BlueFog's share as the paper has it of 128 GPUs, and Horovod's so that the speed-ups are these."""
    share = 1.0 if size == 8 else PRINTED[workload.name] * (1 + 0.001 * (128 - size))
    slow = share / max(speedups.values())
    return Figure12(workload, size, {experiment.HOROVOD: slow, **{way: slow * s for way, s in speedups.items()}})


def as_printed(change: float = 0.0) -> experiment.Modelled:
    result: experiment.Modelled = {}
    for size in experiment.SIZES:
        faster = {way: value + change + 0.05 * (size == 128) for way, value in experiment.TABLE_2.items()}
        result[size] = {workload.name: one(workload, size, faster) for workload in FIGURE_12}
    return result


def test_the_command_ends_with_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = as_printed()
    monkeypatch.setattr(experiment, "figure_12", lambda size, flow=None: list(table[size].values()))
    measured = tmp_path / "table2.json"
    steps = {"DDP": [2.0, 2.1], "ATC": [1.0, 1.1]}
    measured.write_text(json.dumps({"figures": [{"kind": "table2", "values": steps}]}))
    assert experiment.main(["--quick", "--measured", str(measured)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Seconds of a step, measured" in printed and "1.26 to 1.43 times Horovod" in printed


def test_results_that_differ_are_named() -> None:
    fine = as_printed()
    printed = verdict(experiment.claims(fine, fine))
    assert "1.2 to 1.8" not in printed and "table II" not in printed and "always faster" not in printed
    printed = verdict(experiment.claims(fine, as_printed(1.0)))
    assert "table II), 10 Gbit/s" in printed and "table II), 25 Gbit/s" not in printed
    printed = verdict(experiment.claims(as_printed(-0.4), fine))
    assert "always faster" in printed and "1.2 to 1.8" in printed


def test_measured_steps_are_judged() -> None:
    steps = {"DDP": [1.0, 1.01, 0.99], "ATC": [0.5, 0.51, 0.49], "AWC": [2.0, 2.01, 1.99]}
    atc, awc = experiment.claims_of_measurement(steps)
    assert atc.holds and not awc.holds


def test_a_file_without_the_steps_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"figures": []}))
    with pytest.raises(SystemExit, match="no steps of table2"):
        experiment.read(path)
