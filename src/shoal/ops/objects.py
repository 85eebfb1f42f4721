"""Whole models, optimizer states and plain objects: brought to one state on all agents, exactly."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch

from ..errors import Mismatch
from ..runtime.agent import current
from ..runtime.operation import Operation, Steps
from .arguments import as_ranks, channel_name
from .collective import allgather, allreduce_nonblocking_, broadcast_nonblocking_, check_root, spread

T = TypeVar("T")
Parameters = Mapping[str, torch.Tensor] | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def broadcast_object(value: T, root_rank: int = 0, name: str | None = None, *, timeout: float | None = None) -> T:
    """The root's object on every agent: numbers, strings, None, tensors, and lists, tuples, dicts and sets of these.

    It is written by ``torch.save`` and read by its weights-only loader, so nothing is unpickled that could run code;
    an object of another class is refused at the root.

    Args:
        value: The object; what the other agents pass is ignored.
        root_rank: Whose object; the same on all agents.
        name: What calls are matched by.
        timeout: Seconds until the deadline.
    """
    agent = current("broadcast_object")
    check_root("broadcast_object", root_rank, agent.size)
    tensor = None
    if agent.rank == root_rank:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        try:
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception as error:
            raise TypeError(
                "broadcast_object sends plain data and tensors; this object holds something else, which the receivers "
                f"would refuse to load: {str(error).splitlines()[0]}"
            ) from None
        tensor = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    def steps(operation: Operation) -> Steps[torch.Tensor]:
        data = yield from spread(agent, operation, tensor, root_rank, torch.uint8)
        return data.clone()

    op = "broadcast_object"
    data = agent.engine.submit(op, channel_name(op, name), steps, timeout, name is not None).wait()
    if agent.rank == root_rank:
        return value
    loaded: T = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    return loaded


def _named(op: str, params: Parameters) -> list[tuple[str, torch.Tensor]]:
    """The tensors with a name each: given, or their position."""
    items: Iterable[Any] = sorted(params.items()) if isinstance(params, Mapping) else params
    named = []
    for position, item in enumerate(items):
        name, tensor = item if isinstance(item, tuple) else (str(position), item)
        if isinstance(tensor, torch.Tensor):
            named.append((str(name), tensor))
        elif tensor is not None:
            raise TypeError(f"{op}: {name!r} is a {type(tensor).__name__}, not a tensor")
    if len({name for name, _ in named}) != len(named):
        raise ValueError(f"{op}: two tensors have the same name")
    return named


def broadcast_parameters(params: Parameters, root_rank: int = 0, *, timeout: float | None = None) -> None:
    """Give every agent the root's values, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, ``model.parameters()``, or a dict or list of
            tensors; the same names on all agents.
        root_rank: Whose values.
        timeout: Seconds until the deadline.
    """
    handles = [
        broadcast_nonblocking_(tensor.detach(), root_rank, f"broadcast_parameters.{name}", timeout=timeout)
        for name, tensor in _named("broadcast_parameters", params)
    ]
    for handle in handles:
        handle.wait()


def allreduce_parameters(params: Parameters, *, timeout: float | None = None) -> None:
    """Give every agent the average over all agents, in place. Integer tensors are left alone: they have no average.

    Args:
        params: As for :func:`broadcast_parameters`.
        timeout: Seconds until the deadline.
    """
    handles = [
        allreduce_nonblocking_(tensor.detach(), name=f"allreduce_parameters.{name}", timeout=timeout)
        for name, tensor in _named("allreduce_parameters", params)
        if tensor.is_floating_point() or tensor.is_complex()
    ]
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, *, timeout: float | None = None
) -> None:
    """Give every agent the root's optimizer state and options, exactly: no step is taken, no number is converted.

    Args:
        optimizer: An optimizer over the same parameters on all agents. State that it has and the root lacks is dropped.
        root_rank: Whose state.
        timeout: Seconds until the deadline.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("broadcast_optimizer_state: the state of LBFGS belongs to one agent's own line search")
    state = broadcast_object(optimizer.state_dict(), root_rank, timeout=timeout)
    if current().rank != root_rank:
        optimizer.load_state_dict(state)


def InferSourceFromDestinationRanks(
    dst_ranks: Iterable[int], construct_adjacency_matrix: bool = False
) -> list[int] | tuple[list[int], torch.Tensor]:
    """The ranks that send to this agent, given those that it sends to. All agents call it.

    Args:
        dst_ranks: Distinct ranks of other agents.
        construct_adjacency_matrix: Return the mixing weights too: ``A[i, j]``, the weight of the edge from i to j,
            float32 ``[n, n]``, each agent weighing itself and its sources equally. BlueFog means the same, and
            normalises the rows instead of the columns, which is wrong wherever in- and out-degrees differ.

    Returns:
        The sorted sources, or ``(sources, A)``.

    Raises:
        TypeError, ValueError: A rank is no int, out of range, this agent itself, or named twice.
    """
    return _infer("InferSourceFromDestinationRanks", "dst_ranks", dst_ranks, construct_adjacency_matrix)


def InferDestinationFromSourceRanks(
    src_ranks: Iterable[int], construct_adjacency_matrix: bool = False
) -> list[int] | tuple[list[int], torch.Tensor]:
    """The ranks that this agent sends to, given those that send to it. See :func:`InferSourceFromDestinationRanks`."""
    return _infer("InferDestinationFromSourceRanks", "src_ranks", src_ranks, construct_adjacency_matrix)


def _infer(op: str, argument: str, ranks: Iterable[int], construct: bool) -> list[int] | tuple[list[int], torch.Tensor]:
    agent = current(op)
    given = as_ranks(op, argument, ranks, agent.rank, agent.size)
    row = torch.zeros(1, agent.size)
    row[0, list(given)] = 1.0
    rows = allgather(row)
    if rows.shape != (agent.size, agent.size):
        raise Mismatch(f"{op}: the agents are not as many as they were")
    sends = rows if argument == "dst_ranks" else rows.T  # sends[i, j]: i sends to j
    other = sends[:, agent.rank] if argument == "dst_ranks" else sends[agent.rank]
    found = [int(rank) for rank in other.nonzero().view(-1)]
    if not construct:
        return found
    sends = sends + torch.eye(agent.size)
    return found, sends / sends.sum(dim=0, keepdim=True)
