"""Agents with two optimizers around one model: Muon for matrices, AdamW for the rest, as docs/optimizers.md has it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import shoal

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
Arrays = list[np.ndarray[Any, Any]]
STEPS, MORE = 6, 4


def initial() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))
    draws = torch.Generator().manual_seed(1)
    for param in model.parameters():
        nn.init.normal_(param, std=0.5, generator=draws)
    return model


def gradients(model: nn.Module, rank: int, step: int) -> None:
    """Of data that differ between agents."""
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * rank + step)) + rank
    model.zero_grad()
    model(inputs).square().mean().backward()


def on_the_page() -> Callable[[nn.Module], list[shoal.DecentralizedOptimizer]]:
    """The function of docs/optimizers.md."""
    names: dict[str, Any] = {}
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(code, names)
    made: Callable[[nn.Module], list[shoal.DecentralizedOptimizer]] = names["optimizers"]
    return made


def plain(model: nn.Module) -> list[torch.optim.Optimizer]:
    """What it wraps."""
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def averaged_gradients(model: nn.Module) -> list[shoal.DecentralizedOptimizer]:
    return [shoal.bluefog.DistributedGradientAllreduceOptimizer(one, model) for one in plain(model)]


def train(model: nn.Module, optimizers: list[Any], begin: int, end: int) -> None:
    for step in range(begin, end):
        gradients(model, shoal.rank(), step)
        for optimizer in optimizers:
            optimizer.step()


def arrays(values: Any) -> Arrays:
    return [value.detach().numpy().copy() for value in values]


def moments(optimizers: list[Any]) -> Arrays:
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return arrays(value for state in states for _, value in sorted(state.items()) if isinstance(value, torch.Tensor))


def run(folder: str) -> dict[str, Any]:
    """Train, save and train on; then from the checkpoint: the same again, and from the mean of all."""
    make = on_the_page()

    def saved(model: nn.Module, optimizers: list[Any]) -> shoal.Checkpoint:
        return shoal.Checkpoint(model=model, muon=optimizers[0], adam=optimizers[1])

    model = initial()
    both = make(model)
    train(model, both, 0, STEPS)
    result: dict[str, Any] = {"own": arrays(model.parameters()), "moments": moments(both)}
    result["rounds"] = [one.rounds for one in both]
    with shoal.consensus(model):
        result["mean"] = arrays(model.parameters())
    saved(model, both).save(folder, STEPS)
    train(model, both, STEPS, STEPS + MORE)
    result["whole"] = arrays(model.parameters()) + moments(both)

    model = initial()
    both = make(model)
    assert saved(model, both).load(folder) == STEPS
    train(model, both, STEPS, STEPS + MORE)
    result["again"] = arrays(model.parameters()) + moments(both)

    model = initial()
    both = make(model)
    saved(model, both).load(folder, start="consensus")
    result["consensus"] = arrays(model.parameters())
    result["mean moments"] = moments(both)

    model = initial()
    train(model, averaged_gradients(model), 0, STEPS)
    result["gradients"] = arrays(model.parameters())
    return result
