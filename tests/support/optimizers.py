"""A small model, its batches, and an explicit SGD with momentum, for tests of the optimizers."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

import shoal
from shoal.algorithms import Algorithm, GradientDescent, ParallelGradientDescent

ATC, AWC, PARALLEL = GradientDescent(1.0), GradientDescent(1.0, atc=False), ParallelGradientDescent(1.0)
SIZE, STEPS, LR, MOMENTUM = 4, 5, 0.1, 0.9


MODEL = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
"""Where all agents begin. Torch's generator is shared by the threads of a fleet, so they cannot make equal ones."""


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.float64)


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def gradient(model: nn.Module, x: Tensor, rank: int, step: int) -> Tensor:
    """Of one agent's loss at given parameters."""
    nn.utils.vector_to_parameters(x.clone(), model.parameters())
    model.zero_grad()
    model(batch(rank, step)).square().mean().backward()
    return torch.cat([parameter.grad.view(-1) for parameter in model.parameters() if parameter.grad is not None])


def by_hand(way: Algorithm, W: Tensor) -> Tensor:
    """SGD with momentum of all agents, as rows."""
    model = deepcopy(MODEL)
    x = flat(model).repeat(SIZE, 1)
    momentum = torch.zeros_like(x)
    for step in range(STEPS):
        g = torch.stack([gradient(model, x[rank], rank, step) for rank in range(SIZE)])
        if way == PARALLEL:
            g = W @ g
        momentum = MOMENTUM * momentum + g
        if way == ATC:
            x = W @ (x - LR * momentum)
        elif way == AWC:
            x = W @ x - LR * momentum
        else:
            x = x - LR * momentum
    return x


RING = torch.from_numpy(shoal.topology.mixing_matrix(shoal.topology.RingGraph(SIZE)))
MEAN = torch.full((SIZE, SIZE), 1 / SIZE, dtype=torch.float64)
