"""Optimizers that do not wait for their neighbours: through windows, or with one neighbour at a time (AD-PSGD)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..algorithms.gradient_descent import GradientDescent
from ..compression import Compressor
from ..ops.arguments import Internal
from ..ops.collective import barrier
from .exchanges.pairwise_exchange import PairwiseExchange
from .exchanges.window_exchange import GetExchange, PushSumExchange, PutExchange
from .optimizer import DecentralizedOptimizer

Models = torch.nn.Module | Sequence[torch.nn.Module]

_ATC, _AWC = GradientDescent(1.0), GradientDescent(1.0, atc=False)


class WindowOptimizer(DecentralizedOptimizer):
    """An optimizer that exchanges through windows, with the additional methods of BlueFog's optimizers.

    Attributes:
        force_barrier: All agents meet at the beginning of each step; False by default.
    """

    force_barrier = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "force_barrier":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if self.force_barrier:
            barrier(Internal("optimizer.force_barrier"))
        return super().step(closure)

    def unregister_window(self) -> None:
        """Free the windows. All agents call it together, as they made them together.

        Pending transfers arrive first; their data in the windows is discarded. The next exchange creates windows again,
        in the topology that is set at that time.
        """
        self._strategy.changed()


def DistributedWinPutOptimizer(
    optimizer: torch.optim.Optimizer,
    model: Models,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
    **options: Any,
) -> WindowOptimizer:
    """Asynchronous adapt with combine: put the parameters into the neighbours' windows while the model computes, then
    average with the parameters that neighbours have put at any time, and take the local step.

    Read at each exchange: ``dst_weights``. ``close()`` frees the windows, and so does ``unregister_window()``.
    """
    options = _windows(num_steps_per_communication, window_prefix, options)
    return WindowOptimizer(optimizer, model, _AWC, bucket_exchange=PutExchange, **options)


def DistributedPullGetOptimizer(
    optimizer: torch.optim.Optimizer,
    model: Models,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
    **options: Any,
) -> WindowOptimizer:
    """As :func:`DistributedWinPutOptimizer`, but by fetching the neighbours' parameters while the model computes.

    Read at each exchange: ``src_weights``.
    """
    options = _windows(num_steps_per_communication, window_prefix, options)
    return WindowOptimizer(optimizer, model, _AWC, bucket_exchange=GetExchange, **options)


def DistributedPushSumOptimizer(
    optimizer: torch.optim.Optimizer,
    model: Models,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
    **options: Any,
) -> WindowOptimizer:
    """Asynchronous stochastic gradient push, for directed graphs: no mass is lost, even if agents are slow.

    Read at each exchange: ``self_weight`` and ``dst_weights``, which must sum to 1; equal shares if they are not set.
    """
    options = _windows(num_steps_per_communication, window_prefix, options)
    return WindowOptimizer(optimizer, model, _ATC, bucket_exchange=PushSumExchange, **options)


def DistributedADPSGDOptimizer(
    optimizer: torch.optim.Optimizer,
    model: Models,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
    *,
    compression: Compressor | None = None,
    staleness: int | None = None,
    seed: int = 0,
    **options: Any,
) -> WindowOptimizer:
    """Asynchronous averages of two agents at a time (AD-PSGD: Lian et al. 2018, arXiv:1710.06952), over any undirected
    graph.

    In each step an agent averages with a random neighbour, and a thread of that neighbour replies, so a slow agent does
    not slow the others. The parameters are sent while the model computes the gradient at them. The local step is then
    added to the averaged parameters. Averaging keeps the mean of all agents, to rounding.

    Args:
        compression: Messages are compressed differences from the last values that the two agents exchanged. Use a fine
            compressor, such as ``MinMaxUInt8()``. Each agent then keeps two copies of the parameters for each
            neighbour.
        staleness: How many averages others may begin with an agent between two of its forward passes. The agent refuses
            more, and the requesting agents continue alone. None: any number.
        seed: The seed of the choice of neighbours.
    """
    options = _windows(num_steps_per_communication, window_prefix, options)
    return WindowOptimizer(
        optimizer, model, _AWC, bucket_exchange=PairwiseExchange.of(compression, staleness, seed), **options
    )


def _windows(steps: int, prefix: str | None, options: dict[str, Any]) -> dict[str, Any]:
    return {"name": prefix, "num_steps_per_communication": steps, **options}
