"""Conversion of Lightning's optimizers to Shoal's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from ...optim.bluefog import DistributedAdaptThenCombineOptimizer
from ...optim.optimizer import DecentralizedOptimizer

Wrapper: TypeAlias = Callable[[torch.optim.Optimizer, torch.nn.Module], DecentralizedOptimizer]
"""Makes an optimizer decentralized: ``shoal.DecentralizedOptimizer``, or a function around it."""


def one_peer_at_a_time(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, dealt_out: bool
) -> DecentralizedOptimizer:
    """Adapt, then combine, on the default topology of Shoal's optimizers: one neighbour of the exponential graph at a
    time, or what ``shoal.set_topology`` has set.

    Args:
        optimizer: Lightning's.
        module: The module whose parameters it has.
        dealt_out: Lightning deals the samples out, so agents' data do not differ: Adam's moments need not be averaged,
            and nothing is to warn of that.
    """
    return DistributedAdaptThenCombineOptimizer(optimizer, module, mix_state=() if dealt_out else None)


def evaluate_first(optimizer: DecentralizedOptimizer) -> None:
    """Call the closure that Lightning passes to ``step()``, which contains the forward and backward pass, before the
    step: for optimizers that count backward passes, or exchange during them.
    """
    step = optimizer.step

    def stepped(closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step()
        return loss

    optimizer.step = stepped  # type: ignore[method-assign]
