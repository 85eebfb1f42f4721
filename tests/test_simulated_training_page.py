"""The pages about deep learning in a simulated fleet, and about adversaries: their code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def executed(page: str, some: slice = slice(None)) -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "page"}
    for code in blocks(page)[some]:
        exec(compile(code, f"docs/{page}", "exec", dont_inherit=True), names)
    return names


def test_the_recipe_trains_and_its_models_evaluate() -> None:
    names = executed("simulated-training.md")
    assert names["run"].steps == names["steps"] > 10
    assert 0 <= names["run"].records[-1]["accuracy"] <= 1
    outputs = names["mean_model"].eval()(names["images"])
    assert outputs.shape == (256, 10) and bool(outputs.isfinite().all())
    assert names["model"].statistics["1.num_batches_tracked"].tolist() == [3 * 2] * 8  # of the example of SAM


def test_honest_agents_agree_beside_the_adversary_of_the_page(capsys: Any) -> None:
    import shoal

    names: dict[str, Any] = {"__name__": "page", "torch": torch, "shoal": shoal}
    for code in blocks("byzantine.md")[1:]:
        exec(compile(code, "docs/byzantine.md", "exec", dont_inherit=True), names)
    honest = names["run"].x[names["liars"].honest(8)]
    assert honest.shape == (6, 3)
    assert (honest - 1).abs().max() < 0.05
