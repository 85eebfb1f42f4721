"""Steps of training whose cost is watched while something goes on beside them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import shoal
from shoal import topology


def mlp(width: int, depth: int, batch: int) -> Callable[[], None]:
    """A training step of an MLP: forward, backward, local step, average with a neighbour."""
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    inner = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    one_peer = topology.OnePeerExponential(shoal.size())
    optimizer = shoal.DecentralizedOptimizer(inner, model, topology=one_peer)
    x, y = torch.randn(batch, width), torch.randint(0, 10, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step
