"""BlueFog's names for the optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .optimizer import DecentralizedOptimizer, Way
from .rounds import CommunicationType

Models = torch.nn.Module | Sequence[torch.nn.Module]


def DistributedAdaptThenCombineOptimizer(
    optimizer: torch.optim.Optimizer,
    model: Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
    **options: Any,
) -> DecentralizedOptimizer:
    """Adapt, then combine: ``x+ = W (x - lr g(x))``, equation 23 of the BlueFog paper."""
    return DecentralizedOptimizer(
        optimizer,
        model,
        Way.adapt_then_combine,
        communication_type=communication_type,
        num_steps_per_communication=num_steps_per_communication,
        **options,
    )


def DistributedAdaptWithCombineOptimizer(
    optimizer: torch.optim.Optimizer,
    model: Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
    **options: Any,
) -> DecentralizedOptimizer:
    """Adapt with combine: ``x+ = W x - lr g(x)``, equation 22; the exchange goes on during forward and backward."""
    return DecentralizedOptimizer(
        optimizer,
        model,
        Way.adapt_with_combine,
        communication_type=communication_type,
        num_steps_per_communication=num_steps_per_communication,
        **options,
    )


def DistributedGradientAllreduceOptimizer(
    optimizer: torch.optim.Optimizer, model: Models, num_steps_per_communication: int = 1, **options: Any
) -> DecentralizedOptimizer:
    """The mean of all agents' gradients, and then the local step: what data-parallel training does."""
    return DecentralizedOptimizer(
        optimizer, model, Way.gradients, num_steps_per_communication=num_steps_per_communication, **options
    )


def DistributedNeighborAllreduceOptimizer(
    optimizer: torch.optim.Optimizer, model: Models, num_steps_per_communication: int = 1, **options: Any
) -> DecentralizedOptimizer:
    """Adapt with combine over the neighbours, under BlueFog's older name."""
    kind = CommunicationType.neighbor_allreduce
    return DistributedAdaptWithCombineOptimizer(optimizer, model, kind, num_steps_per_communication, **options)


def DistributedAllreduceOptimizer(
    optimizer: torch.optim.Optimizer, model: Models, num_steps_per_communication: int = 1, **options: Any
) -> DecentralizedOptimizer:
    """Adapt with combine over all agents, under BlueFog's older name."""
    kind = CommunicationType.allreduce
    return DistributedAdaptWithCombineOptimizer(optimizer, model, kind, num_steps_per_communication, **options)


def DistributedHierarchicalNeighborAllreduceOptimizer(
    optimizer: torch.optim.Optimizer, model: Models, num_steps_per_communication: int = 1, **options: Any
) -> DecentralizedOptimizer:
    """Adapt with combine between machines, under BlueFog's older name."""
    kind = CommunicationType.hierarchical_neighbor_allreduce
    return DistributedAdaptWithCombineOptimizer(optimizer, model, kind, num_steps_per_communication, **options)
