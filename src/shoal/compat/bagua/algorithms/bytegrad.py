"""Averaged gradients in eight bits."""

from __future__ import annotations

import torch

from ....algorithms.gradient_descent import ParallelGradientDescent
from ....compression import MinMaxUInt8
from ....optim.optimizer import DecentralizedOptimizer
from .gradient_allreduce import GradientAllReduceAlgorithm

__all__ = ["ByteGradAlgorithm"]


class ByteGradAlgorithm(GradientAllReduceAlgorithm):
    """Averaged gradients with eight bits for each number, on the way to the mean and back (Gan et al. 2021,
    arXiv:2107.01499).

    Args:
        hierarchical: True or not, all agents exchange with each other.
        average: True; for the sum multiply the learning rate by the number of agents.
    """

    def __init__(self, hierarchical: bool = True, average: bool = True) -> None:
        super().__init__(hierarchical, average)

    def around(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> DecentralizedOptimizer:
        return DecentralizedOptimizer(optimizer, model, ParallelGradientDescent(1.0), compression=MinMaxUInt8())
