"""torchmetrics over agents: its metrics query torch.distributed, which reports a single process."""

from __future__ import annotations

import torch
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

from .collectives import gather_all


def several() -> bool:
    """Reports several processes to a metric before it synchronises."""
    return True


def synchronise(module: torch.nn.Module) -> None:
    """Make the metrics of a module compute over all agents, unless they have a synchronisation of their own."""
    for one in module.modules():
        if isinstance(one, Metric) and one.dist_sync_fn is None:
            one.dist_sync_fn = gather_all
            if one.distributed_available_fn is jit_distributed_available:
                one.distributed_available_fn = several


def release(module: torch.nn.Module) -> None:
    """Make them ask torch.distributed again."""
    for one in module.modules():
        if isinstance(one, Metric) and one.dist_sync_fn is gather_all:
            one.dist_sync_fn = None
            if one.distributed_available_fn is several:
                one.distributed_available_fn = jit_distributed_available
