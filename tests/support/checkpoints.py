"""A training run with all stateful parts, for tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler

import shoal

SIZE = 3
DATA = torch.randn(42, 5, generator=torch.Generator().manual_seed(0))
MODEL = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


class Run:
    """A training run with all stateful parts, and a separate noise on every agent."""

    def __init__(self) -> None:
        self.model = deepcopy(MODEL)
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.optimizer = shoal.DecentralizedOptimizer(sgd, self.model)
        self.schedule = shoal.optim.Warmup(self.optimizer, 4)
        self.sampler = shoal.data.AgentSampler(DATA)
        self.noise = torch.Generator().manual_seed(shoal.rank())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self._batches = self._endless()
        self.checkpoint = shoal.Checkpoint(
            optimizer=self.optimizer,
            model=self.model,
            schedule=self.schedule,
            sampler=self.sampler,
            noise=self.noise,
            scaler=self.scaler,
        )

    def _endless(self) -> Iterator[list[int]]:
        while True:
            yield from BatchSampler(self.sampler, 3, False)

    def steps(self, count: int) -> Run:
        for _ in range(count):
            batch = DATA[next(self._batches)]
            batch = batch + 0.1 * torch.randn(batch.shape, generator=self.noise)
            self.optimizer.zero_grad()
            self.scaler.scale(self.model(batch).square().mean()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()
        return self

    def all(self) -> dict[str, Any]:
        """A copy of the whole state."""
        result = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "sampler": self.sampler.state_dict(),
            "noise": self.noise.get_state(),
            "scaler": self.scaler.state_dict(),
        }
        return deepcopy(result)


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, with the same keys and kinds."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def folders(of: Path) -> list[str]:
    return sorted(path.name for path in of.iterdir())


def weight(value: float) -> nn.Linear:
    """The smallest model."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model
