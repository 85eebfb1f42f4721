"""The benchmark of Adam's forms: its Adam is torch's, and every form runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import adam
from _adam_methods import METHODS, Local


def test_the_local_step_is_that_of_torch() -> None:
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, generator=chance, dtype=torch.float64)
    param = torch.nn.Parameter(x.clone())
    remote, ours = torch.optim.AdamW([param], lr=0.1, betas=(0.8, 0.9), weight_decay=0.1), Local(x, (0.8, 0.9), 0.1)
    for _ in range(5):
        param.grad = torch.randn(x.shape, generator=chance, dtype=torch.float64)
        x = ours.adapt(x, param.grad, 0.1)
        remote.step()
    assert (x - param.detach()).abs().max() < 1e-12


def test_every_form_on_equal_agents_is_the_form_on_one() -> None:
    """Averages of equal values change nothing, so forms that differ only in the averaged state are equal then."""
    x, W = torch.ones(1, 4, 3, dtype=torch.float64), torch.full((4, 4), 0.25, dtype=torch.float64)
    results = []
    for name in ("atc", "v", "m", "both", "allreduce"):
        form, now = METHODS[name](x, (0.9, 0.99), 0.0), x
        for step in range(4):
            now = form.step(now, torch.full_like(x, 1.0 + step), W, 0.1)
        results.append(now)
    assert all((one - results[0]).abs().max() < 1e-12 for one in results)


def test_every_form_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = [
        "--agents",
        "4",
        "--steps",
        "2",
        "--seeds",
        "2",
        "--tuned-on",
        "1",
        "--lr",
        "0.01",
        "0.1",
        "--alpha",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["adam.py", *options, "--json", str(tmp_path / "found.json")])
    assert adam.main() == 0
    printed = capsys.readouterr().out
    assert all(form.title.split(",")[0] in printed for form in METHODS.values())
    assert (tmp_path / "found.json").stat().st_size > 1000
