"""The base of BAGUA's algorithms here: each makes the equivalent decentralized optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ....optim.optimizer import DecentralizedOptimizer

__all__ = ["Algorithm"]


class Algorithm(ABC):
    """One of BAGUA's algorithms.

    Attributes:
        communication_interval: k: the algorithm communicates in steps 1, k + 1, 2 k + 1, ...
        warmup_steps: How many steps average gradients before it begins.
    """

    communication_interval: int = 1
    warmup_steps: int = 0

    @abstractmethod
    def around(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> DecentralizedOptimizer:
        """The optimizer that steps so. All agents call it."""
