"""Adam with eight bits for each number after a warm-up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ....algorithms.gradient_descent import ParallelGradientDescent
from ....compression import MinMaxUInt8
from ....optim.adam import OneBitAdam
from ....optim.optimizer import DecentralizedOptimizer
from .base import Algorithm

__all__ = ["QAdamAlgorithm", "QAdamOptimizer"]


class QAdamOptimizer(OneBitAdam):
    """:class:`shoal.optim.OneBitAdam` with BAGUA's arguments.

    Args:
        params: As of any optimizer of torch.
        lr: The step.
        warmup_steps: The number of Adam's steps on uncompressed gradients; then the second moment is fixed, and momenta
            are averaged instead of gradients.
        betas: The parts of the first and of the second moment that remain after one step.
        eps: Added to the root of the second moment.
        weight_decay: Times the parameter is added to its gradient.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, warmup=warmup_steps, betas=betas, eps=eps, weight_decay=weight_decay)


class QAdamAlgorithm(Algorithm):
    """Averaged gradients, and after the warm-up averaged momenta in eight bits (Gan et al. 2021, arXiv:2107.01499).

    Args:
        q_adam_optimizer: The optimizer given to ``with_bagua``.
        hierarchical: Ignored: all agents exchange with each other.
    """

    def __init__(self, q_adam_optimizer: QAdamOptimizer, hierarchical: bool = True) -> None:
        self._adam = q_adam_optimizer

    def around(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> DecentralizedOptimizer:
        if optimizer is not self._adam:
            raise ValueError(
                "QAdamAlgorithm: with_bagua has been given another optimizer: both take the same QAdamOptimizer, alone"
            )
        return DecentralizedOptimizer(optimizer, model, ParallelGradientDescent(1.0), compression=MinMaxUInt8())
