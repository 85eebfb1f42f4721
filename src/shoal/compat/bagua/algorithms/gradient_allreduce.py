"""Averaged gradients, as in data-parallel training."""

from __future__ import annotations

import torch

from ....algorithms.gradient_descent import ParallelGradientDescent
from ....optim.optimizer import DecentralizedOptimizer
from .base import Algorithm

__all__ = ["GradientAllReduceAlgorithm"]


class GradientAllReduceAlgorithm(Algorithm):
    """The mean of all agents' gradients, and then the local step.

    Args:
        hierarchical: Ignored: the path of gradients depends on the machines, but the result does not.
        average: True; for their sum multiply the learning rate by the number of agents.
    """

    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        if not average:
            raise ValueError(
                "average=False: gradients are averaged; for their sum multiply the learning rate by the number of "
                "agents"
            )

    def around(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> DecentralizedOptimizer:
        return DecentralizedOptimizer(optimizer, model, ParallelGradientDescent(1.0))
