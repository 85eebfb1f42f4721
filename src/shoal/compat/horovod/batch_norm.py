"""Batch normalisation over the batches of all agents."""

from __future__ import annotations

import torch
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from ...runtime.agent import agent_context
from .differentiable import allreduce, grouped_allreduce
from .reduce_options import Sum


class SyncBatchNorm(_BatchNorm):
    """:class:`torch.nn.BatchNorm1d` and its like, of any number of dimensions, with the mean and the variance of what
    all agents have; their batches may differ in size. While it evaluates it is the same.

    Args:
        num_features, eps, momentum, affine, track_running_stats: As of torch's.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm: an input of 2 dimensions or more is wanted, not {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        agent = agent_context().agent
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or not self.training or agent is None or agent.size == 1:
            return self._alone(input, uses_batch)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        rows = torch.full((1,), float(input.numel() // input.size(1)), dtype=wide.dtype, device=input.device)
        total, rows = grouped_allreduce([wide.sum(dims), rows], op=Sum)
        count = rows.detach().item()
        if count <= 1:
            raise ValueError(
                f"SyncBatchNorm: more than one value for each channel is wanted, over all {agent.size} agents"
            )
        mean = total / count
        apart = wide - mean.view(shape)
        variance = allreduce(apart.square().sum(dims), op=Sum) / count
        self._keep(mean.detach(), variance.detach(), count)
        found = (apart * torch.rsqrt(variance + self.eps).view(shape)).to(input.dtype)
        if self.affine:
            found = found * self.weight.view(shape) + self.bias.view(shape)
        return found

    def _share(self) -> float:
        """The share of the new batch in the running statistics."""
        if self.momentum is not None:
            return float(self.momentum)
        return 1.0 / float(self.num_batches_tracked or 1)

    def _alone(self, input: torch.Tensor, uses_batch: bool) -> torch.Tensor:
        share = 0.0
        if self.training and self.track_running_stats:
            self._count()
            share = self._share()
        return batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, uses_batch, share, self.eps
        )

    def _count(self) -> None:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)

    @torch.no_grad()
    def _keep(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        self._count()
        share = self._share()
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var.dtype), share)
