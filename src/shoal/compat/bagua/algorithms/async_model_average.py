"""Asynchronous averages of models: no agent waits for a slow one."""

from __future__ import annotations

from typing import Literal

import torch

from ....compression import Compressor
from ....ops.collective import barrier
from ....optim.asynchronous import DistributedADPSGDOptimizer
from ....optim.optimizer import DecentralizedOptimizer
from ....runtime.agent import current
from ....runtime.queries import set_topology
from ....topology.families.graphs import FullyConnectedGraph
from .base import Algorithm

__all__ = ["AsyncModelAverageAlgorithm"]


class AsyncModelAverageAlgorithm(Algorithm):
    """In each step an agent averages with a random other agent, asynchronously
    (:class:`shoal.optim.DistributedADPSGDOptimizer`). The topology becomes the fully connected one.

    Args:
        peer_selection_mode: ``"all"``.
        sync_interval_ms: Ignored: an average runs during each step's passes.
        warmup_steps: The first steps average gradients instead, as ``GradientAllReduceAlgorithm`` does: in these steps
            agents wait for each other, and models stay equal.
        compression: A fine compressor for the messages; BAGUA has none here.

    Raises:
        ValueError: The mode is unknown, or ``warmup_steps`` is no whole number of at least 0.
    """

    def __init__(
        self,
        peer_selection_mode: Literal["all"] = "all",
        sync_interval_ms: int = 500,
        warmup_steps: int = 0,
        *,
        compression: Compressor | None = None,
    ) -> None:
        if peer_selection_mode != "all":
            raise ValueError(f"peer_selection_mode={peer_selection_mode!r}: there is 'all'")
        if not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps!r} must be a whole number of steps, 0 or more")
        self.warmup_steps = warmup_steps
        self._compression = compression

    def around(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> DecentralizedOptimizer:
        set_topology(FullyConnectedGraph(current("with_bagua").size))
        return DistributedADPSGDOptimizer(optimizer, model, compression=self._compression)

    def abort(self, model: torch.nn.Module) -> None:
        """Wait until all agents have called this, and answer the others in the meantime; call it before an agent
        leaves.

        Args:
            model: The model given to ``with_bagua``.
        """
        barrier()

    def resume(self, model: torch.nn.Module) -> None:
        """Does nothing: the next step averages again.

        Args:
            model: The model given to ``with_bagua``.
        """
