"""Operations that gradients flow through, for losses that depend on other agents' tensors.

The plain operations of :mod:`shoal` return tensors without a graph. The operations here return the same numbers, with a
graph for autograd. The gradient is the derivative of the *sum of all agents' losses*: where agent i computes
``loss_i``, agent j gets ``d(loss_0 + ... + loss_{n-1}) / d x_j``. Divide the loss by ``shoal.size()`` for the
derivative of their mean.

The backward pass of an operation is an operation of the same agents:

==================== ==================================================================================
operation            gradient on agent j
==================== ==================================================================================
`allreduce`          sum: the sum of all agents' gradients; average: their average
`allgather`          the sum over all agents of their gradients for the rows of agent j
`broadcast`          on the root the sum of all agents' gradients, zero on the others
`neighbor_allreduce` the transposed round: ``w_jj g_j`` and the sum over agents i of ``r_ij s_ij g_i``
==================== ==================================================================================

So all agents that called an operation must run its backward pass, in the same order where calls have no name. For
that the result requires grad on every agent while grad mode is on, also where its own tensor does not. An agent whose
loss does not depend on the result makes the others wait until their deadline. All operations are linear, so gradients
of gradients (``create_graph=True``) are right, too.

>>> import shoal, shoal.autograd
>>> def agent():
...     x = torch.tensor([float(shoal.rank())], requires_grad=True)
...     shoal.autograd.allgather(x).square().sum().backward()
...     return x.grad.item()
>>> shoal.Fleet(3).run(agent)  # each of three losses has the term x^2
[0.0, 6.0, 12.0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .ops import collective, neighbor
from .ops.arguments import Group, caller_group, on_device_of, split_name
from .ops.gathering import alltoall_nonblocking
from .runtime.agent import bind, current
from .topology import Mixing

__all__ = ["allgather", "allreduce", "broadcast", "neighbor_allreduce"]

Linear = Callable[[list[torch.Tensor]], list[torch.Tensor]]
_TRANSPOSED = {"static": "push-pull", "push-pull": "push-pull", "push": "pull", "pull": "push"}
"""Where the sender alone knows of an edge, the receiver alone knows of the transposed edge."""


def allreduce(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    *,
    op: str | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """:func:`shoal.allreduce` with a gradient.

    Args:
        tensor: Floating or complex; equal shape and dtype on all agents.
        average, name, group, timeout: As of :func:`shoal.allreduce`. The backward pass has the name ``name.gradient``.
        op: ``"average"`` or ``"sum"``; minimum, maximum and product are not linear.

    Raises:
        ValueError: Another ``op``.
    """
    how = op if op is not None else ("average" if average else "sum")
    if how not in ("average", "sum"):
        raise ValueError(f"allreduce: op={how!r} is not linear, so no gradient flows through it; take average or sum")

    def reduce(tensors: list[torch.Tensor], name: str | None = name) -> list[torch.Tensor]:
        return [collective.allreduce(tensors[0], name=name, op=how, group=group, timeout=timeout)]

    return _differentiable(tensor, reduce, lambda gradients: reduce(gradients, gradient_name(name)))


def allgather(
    tensor: torch.Tensor, name: str | None = None, *, group: Group | None = None, timeout: float | None = None
) -> torch.Tensor:
    """:func:`shoal.allgather` with a gradient.

    Args:
        tensor: Floating or complex, ``[rows, ...]``; the number of rows may differ between agents.
        name, group, timeout: As of :func:`shoal.allgather`. The backward pass has the name ``name.gradient``.
    """
    agent = current("allgather")
    ranks = caller_group("allgather", group, agent).ranks or tuple(range(agent.size))
    rows: dict[int, int] = {}

    def gather(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        parts = collective.gather_by_rank(tensors[0], name, group=group, timeout=timeout)
        rows.update({rank: len(part) for rank, part in parts.items()})
        return [on_device_of(tensor, torch.cat(list(parts.values())))]

    def scatter(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        splits = [rows.get(rank, 0) for rank in ranks]  # 0 for an agent that was lost before
        back = alltoall_nonblocking(gradients[0], splits, gradient_name(name), group=group, timeout=timeout)
        arrived, counts = back.wait()
        first, *others = torch.split(arrived, counts)
        total = first.to(torch.promote_types(first.dtype, torch.float32))  # 16-bit gradients are added up in float32
        for other in others:
            total = total + other
        return [total.to(arrived.dtype)]

    return _differentiable(tensor, gather, scatter)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    *,
    group: Group | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """:func:`shoal.broadcast` with a gradient.

    Args:
        tensor: Floating or complex. On the other agents it gives the shape and the dtype.
        root_rank, name, group, timeout: As of :func:`shoal.broadcast`. The backward pass has the name
            ``name.gradient``.
    """
    agent = current("broadcast")

    def spread(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [collective.broadcast(tensors[0], root_rank, name, group=group, timeout=timeout)]

    def collect(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        called = gradient_name(name)
        total = collective.allreduce(gradients[0], name=called, op="sum", group=group, timeout=timeout)
        return [total if agent.rank == root_rank else torch.zeros_like(total)]

    return _differentiable(tensor, spread, collect)


def neighbor_allreduce(
    tensor: torch.Tensor,
    self_weight: float | str | None = None,
    src_weights: neighbor.Weights | None = None,
    dst_weights: neighbor.Weights | Iterable[int] | None = None,
    *,
    enable_topo_check: bool = True,
    name: str | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """:func:`shoal.neighbor_allreduce` with a gradient, in all four forms.

    The weight that agent i multiplies ``x_j`` by in the forward pass is the weight of agent i's gradient on agent j in
    the backward pass. Pure push becomes pure pull and the other way round, so the backward pass discovers senders as
    the forward pass does. A static topology is that of the forward pass, also if another one is set before the
    backward pass.

    Args:
        tensor: Floating or complex, any shape.
        self_weight, src_weights, dst_weights, enable_topo_check, name, group, timeout: As of
            :func:`shoal.neighbor_allreduce`. The backward pass has the name ``name.gradient``.
    """
    called = neighbor.OP
    agent = current(called)
    self_weight, name = split_name(called, self_weight, name)
    given, form = neighbor.mixing_of(agent, self_weight, src_weights, dst_weights)
    members, topology = caller_group(called, group, agent), agent.topology
    rest = members.rest(agent.size)
    checked = enable_topo_check

    def forward_round(gone: tuple[int, ...] = ()) -> Mixing:
        if given is None:
            return topology.without(tuple(sorted({*gone, *rest}))).mixing
        return given.without(gone)

    def transposed_round(gone: tuple[int, ...] = ()) -> Mixing:
        mixing = forward_round(gone)
        return Mixing(mixing.rank, mixing.self_weight, mixing.destinations, mixing.sources)

    def exchange(
        tensor: torch.Tensor,
        mixing: Mixing | None,
        form: str,
        checked: bool,
        name: str | None,
        replan: Callable[[tuple[int, ...]], Mixing] | None = None,
    ) -> list[torch.Tensor]:
        handle = neighbor.submit(
            agent,
            tensor,
            mixing,
            form,
            name,
            checked=checked,
            timeout=timeout,
            fusible=False,
            replan=replan,
            everybody=False,
            members=members,
        )
        return [handle.wait()]

    def forward(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return exchange(tensors[0], given, form, checked, name)

    # The transposed edges need not be edges of the static topology, so pure push and pull discover them. Both ends
    # of an edge of the static topology know of it.
    confirms = checked if form == "push-pull" else form != "static"

    def transposed(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        mixing = transposed_round()
        return exchange(gradients[0], mixing, _TRANSPOSED[form], confirms, gradient_name(name), transposed_round)

    def forward_again(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        mixing, again = forward_round(), "push-pull" if form == "static" else form
        return exchange(tensors[0], mixing, again, confirms, gradient_name(gradient_name(name)), forward_round)

    return _differentiable(tensor, forward, transposed, forward_again)


def gradient_name(name: str | None) -> str | None:
    """The name of the backward pass of a call; unnamed calls match by their order."""
    return None if name is None else f"{name}.gradient"


def apply_linear(
    tensors: list[torch.Tensor],
    forward: Linear,
    transposed: Linear,
    forward_again: Linear | None = None,
    *,
    anchor: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """``forward(tensors)`` as one node of the graph, whose backward pass is ``transposed``.

    Args:
        forward: Gives the results; autograd does not look inside.
        transposed: Gives the gradients of ``tensors`` from those of the results.
        forward_again: ``forward`` as the backward pass of ``transposed``. Without it a second derivative is an error.
        anchor: A tensor that requires grad makes the results require it, whatever ``tensors`` do.
    """
    node: Any = _LinearOnce if forward_again is None else _LinearOperation
    return list(node.apply(forward, bind(transposed), forward_again and bind(forward_again), anchor, *tensors))


class _LinearOperation(torch.autograd.Function):
    """A linear operation; the backward pass of its backward pass is the operation."""

    @staticmethod
    def forward(
        ctx: Any, forward: Linear, transposed: Linear, again: Linear, anchor: object, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.transposed, ctx.again = transposed, again
        return tuple(forward(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = apply_linear(list(gradients), ctx.transposed, ctx.again, ctx.transposed)
        return (None, None, None, None, *found)


class _LinearOnce(_LinearOperation):
    """The base class with separate factors for the backward pass; it cannot be differentiated again."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, None, None, *ctx.transposed(list(gradients)))


def _differentiable(
    tensor: torch.Tensor, forward: Linear, transposed: Linear, forward_again: Linear | None = None
) -> torch.Tensor:
    """One tensor through a linear operation, as a node of the graph where there may be a gradient."""
    if not torch.is_grad_enabled() or not isinstance(tensor, torch.Tensor):
        return forward([tensor])[0]
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return forward([tensor])[0]
    # Other agents' tensors may require grad where this one does not, and their gradients need the backward pass here.
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    return apply_linear([tensor], forward, transposed, forward_again or forward, anchor=anchor)[0]
