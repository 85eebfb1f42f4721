"""The code on the page about BAGUA runs, on real agents, and its names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import shoal
import shoal.compat.bagua as bagua

PAGE = (Path(__file__).parent.parent / "docs" / "bagua.md").read_text()


@pytest.mark.filterwarnings("ignore:torch.manual_seed")  # the page runs it in processes
def test_the_pages_script_trains() -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

    def run() -> torch.Tensor:
        names: dict[str, object] = {}
        exec(code, names)
        model = names["model"]
        assert isinstance(model, torch.nn.Linear)
        bagua.without_bagua(model)
        return model.weight.detach()

    weights = torch.stack(shoal.Fleet(3, timeout=20.0).run(run))
    assert weights.isfinite().all()
    assert (weights - weights.mean(0)).abs().max() < weights.abs().max() / 2  # of one beginning


ROWS = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]


def test_names_listed_as_missing_are_missing() -> None:
    listed = " ".join(names for names, shoals_name, *_ in ROWS if shoals_name.startswith("not there"))
    missing = re.findall(r"`([a-zA-Z_]+)", listed)
    assert {"allreduce", "broadcast", "barrier", "ReduceOp", "new_group", "contrib", "data_parallel"} <= set(missing)
    assert [name for name in missing if hasattr(bagua, name)] == []


def test_names_listed_as_available_exist() -> None:
    for names, shoals_name, *_ in ROWS:
        if shoals_name.startswith("not there"):
            continue
        for name in re.findall(r"`([\w.]+)[(`]", names):
            where: object = bagua
            if name.startswith("async_"):
                continue
            for part in ["algorithms", *name.split(".")] if "Algorithm" in name else name.split("."):
                where = torch.nn.Module if part == "model" else getattr(where, part)
