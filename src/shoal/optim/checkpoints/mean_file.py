"""Writes the mean of all agents' models to a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ...dtensors import is_sharded
from ...errors import PeerLost
from ...runtime.agent import current
from ..mean_model import consensus
from .all_agents import from_one_agent, present_agents
from .checkpoint_files import save_tensors, write_atomically
from .state_trees import in_own_memory


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
        ShoalError: The file could not be written; all agents raise it.
        ValueError: The model is sharded: no process has all of it.
    """
    agent = current("save")
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
