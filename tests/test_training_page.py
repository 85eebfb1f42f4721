"""The code on the pages about training runs on real agents."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal

DOCS = Path(__file__).parent.parent / "docs"
NAMES = ("training", "overlap-compression", "training-details", "data-metrics", "howto/ddp", "howto/checkpoints")
PAGE = "\n".join((DOCS / f"{name}.md").read_text() for name in NAMES)
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EXTERNAL = "torch.distributed.checkpoint"
"""Needs a process group: tests/optim/test_checkpoint_distributed.py."""


class Scalars:
    """In the place of TensorBoard's: tests/frameworks/test_loggers.py has that."""

    def __init__(self, folder: str) -> None:
        assert folder == "runs/first"

    def add_scalar(self, name: str, number: float, step: int) -> None:
        assert name.startswith("loss/") and number == 0.5 and step == 3


def small_task() -> dict[str, Any]:
    """The names that the page takes for granted."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    inputs, labels = torch.randn(48, 4), torch.randint(0, 2, (48,))
    dataset = torch.utils.data.TensorDataset(inputs, labels)
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)
    return {
        "math": math,
        "torch": torch,
        "shoal": shoal,
        "model": model,
        "optimizer": optimizer,
        "criterion": torch.nn.CrossEntropyLoss(),
        "dataset": dataset,
        "loader": loader,
        "sampler": shoal.data.AgentSampler(dataset),
        "steps": 20,
        "step": 3,
        "SummaryWriter": Scalars,
        "rich": __import__("rich"),
        "loss": 0.5,
        "accuracy": 0.9,
    }


def run_block(number: int, folder: str) -> bool:
    names = small_task()
    code = BLOCKS[number].replace("    ...\n", "    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n")
    names["folder"] = folder
    if "scheduler=scheduler" in code:
        names["scheduler"] = torch.optim.lr_scheduler.StepLR(names["optimizer"], 5)
    names["checkpoint"] = shoal.Checkpoint(model=names["model"], optimizer=names["optimizer"])
    recorded = []
    names["train"] = recorded.append
    if "start=" in code:
        names["checkpoint"].save(folder, 3)
    if "DecentralizedOptimizer(sgd" in code or "Optimizer(adam" in code or "compression=" in code:
        names["optimizer"].close()
    exec(code, names)
    optimizer = names["optimizer"]
    for inputs, labels in list(names["loader"])[:3]:
        optimizer.zero_grad()
        names["criterion"](names["model"](inputs), labels).backward()
        optimizer.step()
    return optimizer.rounds > 0 and ("train(step)" not in code or recorded == list(range(20)))


@pytest.mark.parametrize("number", [n for n, block in enumerate(BLOCKS) if EXTERNAL not in block])
def test_the_pages_code_runs(number: int, tmp_path: Path) -> None:
    assert all(shoal.Fleet(4).run(run_block, number, str(tmp_path)))


def test_the_imports_of_the_page_about_migration_exist() -> None:
    imports = re.findall(r"`(import shoal[^`]*)`", (DOCS / "howto" / "migrate.md").read_text())
    assert len(imports) == 3
    for line in imports:
        exec(line, {})


def test_every_wrapper_is_on_the_page() -> None:
    wrappers = {name for name in dir(shoal.optim) if name.startswith("Distributed") and name.endswith("Optimizer")}
    assert len(wrappers) == 4
    assert all(name in PAGE for name in wrappers)
