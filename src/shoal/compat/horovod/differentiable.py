"""Horovod's synchronous, differentiable operations. The gradient of an operation is an operation of all agents, too: if
this agent's tensor requires a gradient, so must the others', or it would wait for them.

The factors are Horovod's. With n agents the gradients of ``allgather`` and ``broadcast`` are 1/n of the derivative of
the sum of all agents' losses. Those of ``reducescatter`` are n times it. ``allreduce`` and ``alltoall`` have the
derivative itself. :class:`SyncBatchNorm` is made of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from ...autograd import Linear, apply_linear, gradient_name
from ...ops.arguments import check_dense
from ...ops.collective import barrier as _barrier
from ...runtime.agent import agent_context, current
from .agents import ProcessSet, global_process_set, group_of
from .async_ops import (
    Average,
    ScaledReduction,
    Sum,
    Tensors,
    exchange,
    gather_many,
    gather_one,
    listed,
    parse_reduction,
    reduce_in_place,
    reduce_many,
    reduce_many_in_place,
    reduce_one,
    scattered,
    share_of,
    spread_in_place,
    spread_one,
)
from .compression import Compression


def _through(tensors: Tensors, forward: Linear, back: Linear) -> list[torch.Tensor]:
    """Run the operation, with a backward pass if a tensor requires gradients."""
    if not torch.is_grad_enabled() or not any(getattr(tensor, "requires_grad", False) for tensor in tensors):
        return forward(list(tensors))
    return apply_linear(list(tensors), forward, back)


def _through_compressed(
    called: str, tensors: Tensors, compression: Any, forward: Linear, back: Linear
) -> list[torch.Tensor]:
    """The same for tensors that are sent in another form."""
    sent = [compression.compress(check_dense(called, tensor)) for tensor in tensors]
    found = _through([message for message, _ in sent], forward, back)
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(found, sent, strict=True)]


def _linear(called: str, how: ScaledReduction) -> None:
    if how.op not in (Average, Sum):
        raise ValueError(
            f"{called}: gradients go through hvd.Average and hvd.Sum, and not through {how.op_name}; give "
            "tensor.detach()"
        )


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The average of all agents' tensors, or the reduction ``op``; a new tensor.

    Args:
        tensor: The same shape and dtype on all. An average of integers loses its fractional part.
        average: False for the sum; ``op`` has more choices.
        name: Matches the calls of different agents; unnamed calls match by their order.
        compression: The form in which the tensor is sent.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor, postscale_factor: The factors of the tensors before the reduction, and of the result.
        process_set: The agents, all of which call it.

    The gradient is the all-reduce of the gradients with the same ``op`` and factors, of an average or a sum.
    """
    how = parse_reduction("allreduce", average, op, prescale_factor, postscale_factor)

    def forward(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [reduce_one("allreduce", tensors[0], how, name, process_set).wait()]

    def back(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        _linear("allreduce", how)
        return [reduce_one("allreduce", gradients[0], how, gradient_name(name), process_set).wait()]

    return _through_compressed("allreduce", [tensor], compression, forward, back)[0]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """:func:`allreduce` in place, without gradients."""
    how = parse_reduction("allreduce_", average, op, prescale_factor, postscale_factor)
    return reduce_in_place("allreduce_", tensor, how, name, process_set).wait()


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """:func:`allreduce` of several tensors at once: those of a dtype are one message."""
    called = "grouped_allreduce"
    how = parse_reduction(called, average, op, prescale_factor, postscale_factor)

    def forward(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return reduce_many(called, tensors, how, name, process_set).wait()

    def back(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        _linear(called, how)
        return reduce_many(called, gradients, how, gradient_name(name), process_set).wait()

    return _through_compressed(called, listed(called, tensors), compression, forward, back)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """:func:`grouped_allreduce` in place, without gradients."""
    how = parse_reduction("grouped_allreduce_", average, op, prescale_factor, postscale_factor)
    return reduce_many_in_place("grouped_allreduce_", tensors, how, name, process_set).wait()


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all agents, joined along dimension 0 in rank order; how many rows each has may differ.

    The gradient is this agent's rows of the average of all agents' gradients, as in Horovod.
    """

    def forward(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [gather_one("allgather", tensors[0], name, process_set).wait()]

    return _through([tensor], forward, lambda found: _own_parts("allgather", found, [tensor], name, process_set))[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """:func:`allgather` of several tensors at once, with its gradients."""
    called = "grouped_allgather"
    tensors = listed(called, tensors)

    def forward(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return gather_many(called, tensors, name, process_set).wait()

    return _through(tensors, forward, lambda found: _own_parts(called, found, tensors, name, process_set))


def _own_parts(
    called: str, gradients: list[torch.Tensor], tensors: Tensors, name: str | None, process_set: ProcessSet
) -> list[torch.Tensor]:
    """This agent's rows of the averages of some gradients."""
    mine = torch.tensor([[current(called).rank, *map(len, tensors)]], device="cpu")
    # An all-gather like the script's: agents in join() take part in it, with no rows.
    each = gather_one(called, mine, f"{gradient_name(name) or f'{called}.gradient'} (rows)", process_set).wait()
    before, rows = each[each[:, 0] < mine[0, 0], 1:].sum(0), mine[0, 1:]
    means = reduce_many(called, gradients, ScaledReduction(Average), gradient_name(name), process_set).wait()
    return [
        gradient.narrow(0, int(first), int(count)) for gradient, first, count in zip(means, before, rows, strict=True)
    ]


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensor of ``root_rank``, a rank of all agents', on every agent; a new tensor.

    The gradient is the average of all agents' gradients at the root, and zero elsewhere, as in Horovod.
    """

    def forward(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [spread_one("broadcast", tensors[0], root_rank, name, process_set).wait()]

    def back(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        mean = reduce_one("broadcast", gradients[0], ScaledReduction(Average), gradient_name(name), process_set).wait()
        return [mean if current("broadcast").rank == root_rank else torch.zeros_like(mean)]

    return _through([tensor], forward, back)[0]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """:func:`broadcast` in place, without gradients."""
    return spread_in_place("broadcast_", tensor, root_rank, name, process_set).wait()


def alltoall(
    tensor: torch.Tensor,
    splits: Iterable[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each agent, and receive the rows that all have sent this one, in rank order.

    Args:
        tensor: Its rows go to the agents in the order of ranks.
        splits: The number of rows for each; equally many if not given.
        name, process_set: As of :func:`allreduce`.

    Returns:
        The received rows; if ``splits`` are given, also a tensor with the number of rows from each.

    The gradient of each row is sent back to its sender.
    """
    came: list[int] = []

    def forward(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        found, rows = exchange("alltoall", tensors[0], splits, name, process_set).wait()
        came.extend(rows)
        return [found]

    def back(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        return [exchange("alltoall", gradients[0], came, gradient_name(name), process_set).wait()[0]]

    (found,) = _through([tensor], forward, back)
    return found if splits is None else (found, torch.tensor(came, dtype=torch.int32, device="cpu"))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This agent's rows of what :func:`allreduce` gives: equally many for each, the first have one more if need be.

    The gradient is the gradients of all agents' rows, with the factors; with ``Sum`` times the number of agents, as in
    Horovod.
    """
    how = scattered("reducescatter", [tensor], op, prescale_factor, postscale_factor)
    return _scattered("reducescatter", [tensor], how, name, compression, process_set)[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """:func:`reducescatter` of several tensors at once, with its gradients."""
    called = "grouped_reducescatter"
    tensors = listed(called, tensors)
    how = scattered(called, tensors, op, prescale_factor, postscale_factor)
    return _scattered(called, tensors, how, name, compression, process_set)


def _scattered(
    called: str,
    tensors: list[torch.Tensor],
    how: ScaledReduction,
    name: str | None,
    compression: Any,
    process_set: ProcessSet,
) -> list[torch.Tensor]:
    def forward(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [share_of(result, process_set) for result in reduce_many(called, tensors, how, name, process_set).wait()]

    def back(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        _linear(called, how)
        factor = how.before * how.after * (process_set.size() if how.op is Sum else 1)
        return [
            gradient * factor for gradient in gather_many(called, gradients, gradient_name(name), process_set).wait()
        ]

    return _through_compressed(called, tensors, compression, forward, back)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all agents have called it, or all of ``process_set``."""
    _barrier(group=group_of("barrier", process_set))


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
        found = apart * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            found = found * self.weight.view(shape) + self.bias.view(shape)
        return found.to(input.dtype)

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
