"""The files that runs of the examples have saved, and their comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def saved(checkpoints: Path) -> dict[str, Any]:
    """The last save, without times and bytes: for each way of training, step and agent."""
    states = {}
    for algorithm in sorted(checkpoints.iterdir()):
        last = max(algorithm.iterdir())
        assert (last / "manifest.json").exists()
        for path in sorted(last.glob("*.pt")):
            state = torch.load(path, weights_only=True)
            for name in ("seconds", "megabytes", "milliseconds"):
                state["run"].pop(name, None)
            states[f"{algorithm.name}/{last.name.partition('-')[2]}/{path.stem}"] = state
    return states


def assert_same_bits(one: Any, other: Any, where: str = "") -> None:
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same_bits(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same_bits(*pair, f"{where}/{number}")
    else:
        assert one == other, where
