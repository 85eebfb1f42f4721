"""The mean of the agents' models: for evaluation, in a file, and how far the models are from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..dtensors import is_sharded, local, reshard, summed_as
from ..errors import PeerLost
from ..ops.arguments import Internal
from ..ops.collective import allreduce, allreduce_nonblocking
from ..ops.grouped import grouped_allreduce_nonblocking, in_batches
from ..runtime.agent import current
from .checkpoints.all_agents import from_one_agent, present_agents
from .checkpoints.checkpoint_files import save_tensors, write_atomically
from .checkpoints.states import in_own_memory

DISTANCE = "consensus distance"
"""The name of the distance for observers."""


def _check_module(op: str, model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{op} takes a model, a torch.nn.Module, not a {type(model).__name__}")


def averaged(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters, and buffers that hold numbers with fractions (running means); counters are each agent's own."""
    reshard(model)
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point() or buffer.is_complex()]
    return [local(tensor).detach() for tensor in (*model.parameters(), *buffers)]


def means(tensors: list[torch.Tensor], name: str, timeout: float | None = None) -> list[torch.Tensor]:
    """The average of each over all agents. Small tensors of one dtype are sent together."""

    def start(batch: list[int], name: Internal) -> Callable[[], list[torch.Tensor]]:
        if len(batch) > 1:
            return grouped_allreduce_nonblocking([tensors[at] for at in batch], name=name, timeout=timeout).wait
        alone = allreduce_nonblocking(tensors[batch[0]], name=name, timeout=timeout)  # a large one is not copied twice
        return lambda: [alone.wait()]

    batches = in_batches(tensors)
    waits = [start(batch, Internal(f"{name}.{number}")) for number, batch in enumerate(batches)]
    found = list(tensors)
    for batch, wait in zip(batches, waits, strict=True):
        for at, mean in zip(batch, wait(), strict=True):
            found[at] = mean
    return found


@contextmanager
def _put_back(model: torch.nn.Module) -> Iterator[None]:
    """Restore the memory of the model's tensors after the block, even if the model was converted within it."""
    params = [(param, param.data) for param in model.parameters() if not is_sharded(param)]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for param, data in params:
            param.data = data
        for module, of_it in buffers:
            module._buffers.update(of_it)


@contextmanager
def consensus(model: torch.nn.Module, *, timeout: float | None = None) -> Iterator[torch.nn.Module]:
    """The average of all agents' models, for as long as the block lasts; then each agent's own again. All call it.

    Of a model that is sharded (``fully_shard``, ``init(mesh=)``) each agent averages its part with its counterparts'.

    Parameters and floating-point buffers (such as a batch norm's running statistics) are averaged; integer buffers (its
    counter) are left as they are. Inside, the model may be converted, as by ``model.half()``, to be saved; not a
    sharded one.

    Args:
        model: This agent's; it holds the average inside the block.
        timeout: Seconds until :class:`~shoal.DeadlineExceeded`.
    """
    _check_module("consensus", model)
    tensors = averaged(model)
    averages = means(tensors, "consensus", timeout)
    own = [tensor.clone() for tensor in tensors]
    for tensor, mean in zip(tensors, averages, strict=True):
        tensor.copy_(mean)
    sharded = [(param, param.dtype) for param in model.parameters() if is_sharded(param)]
    try:
        with _put_back(model):
            yield model
        if any(param.dtype != dtype for param, dtype in sharded):
            raise RuntimeError("consensus: a sharded model was converted inside; convert what you save of it instead")
    finally:
        reshard(model)
        for tensor, mine in zip(tensors, own, strict=True):
            tensor.copy_(mine)


@torch.no_grad()
def consensus_distance(model: torch.nn.Module, *, timeout: float | None = None) -> float:
    """``sqrt(mean over agents of |x_i - mean x|^2)`` over all parameters, the same on every agent. All call it."""
    _check_module("consensus_distance", model)
    reshard(model)
    params = list(model.parameters())
    flat = torch.cat([_reals(local(param).detach()).reshape(-1).double() for param in params])
    mean = allreduce(flat, name=Internal("consensus_distance.mean"), timeout=timeout)
    squares = torch.split((flat - mean).square(), [_reals(local(param).detach()).numel() for param in params])
    square = torch.stack([summed_as(part, param) for part, param in zip(squares, params, strict=True)]).sum()
    found = allreduce(square, name=Internal("consensus_distance"), timeout=timeout).sqrt().item()
    current("consensus_distance").engine.note_metric(DISTANCE, square.sqrt().item(), found, found)
    return found


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def save(model: torch.nn.Module, path: str | os.PathLike[str], *, timeout: float | None = None) -> None:
    """Write the mean of all agents' models, as ``torch.save(model.state_dict(), path)`` would. All agents call it. ::

        shoal.save(model, "model.pt")  # not inside `if shoal.rank() == 0`
        model.load_state_dict(torch.load("model.pt"))  # later, in any process

    The current agent of the lowest rank writes the file, which appears as a whole or not at all. When the call returns,
    it is there. Floating-point parameters and buffers are the mean (:func:`consensus`); integer buffers are those of
    the agent that writes. To resume a run use :class:`Checkpoint`, which keeps each agent's own state.

    Args:
        model: This agent's; it is unchanged afterwards.
        path: The file, on the disk of the agent that writes.
        timeout: Seconds that each wait for the other agents may take.

    Raises:
        TypeError: The model is no module, such as a ``state_dict``.
        ShoalError: The file could not be written; all agents raise it.
        ValueError: The model is sharded: no process has all of it.
    """
    agent = current("save")
    _check_module("save", model)
    if agent.launch.beside or any(is_sharded(param) for param in model.parameters()):
        raise ValueError(
            "shoal.save: the model is sharded, so no process has all of it. Save it inside shoal.consensus(model) with "
            "torch.distributed.checkpoint (docs/sharded.md)"
        )

    def write() -> None:
        state: dict[str, Any] = in_own_memory(model.state_dict())
        write_atomically(Path(path), lambda partial: save_tensors(state, partial))

    with consensus(model, timeout=timeout):
        while True:
            first = present_agents(timeout)[0]
            try:
                return from_one_agent(first, "save", write, timeout)
            except PeerLost as lost:
                if first not in lost.ranks or not agent.engine.survives_losses:
                    raise
