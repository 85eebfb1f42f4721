"""Lightning's checkpoints, with a folder beside each: the file has the mean model, the folder each agent's own state.

``last.ckpt`` is a checkpoint like any of Lightning's, to be loaded anywhere. ``last.ckpt.agents`` has one file for each
agent, as :class:`shoal.Checkpoint` writes them. The folder is written first, and a file whose folder was overwritten
since finds the state of before there, so a run may be killed at any moment.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import Mismatch, ShoalError
from ...ops.arguments import Internal
from ...ops.collective import gather_by_rank
from ...ops.objects import broadcast_object
from ...optim.checkpoints.checkpoint import Checkpoint
from ...optim.checkpoints.states import RandomState
from ...runtime.queries import rank, size

log = logging.getLogger("shoal")
KEY = "shoal"
"""The entry of a checkpoint about its folder: the number of agents, and the identity of the save."""
RANDOM = "shoal_random_state"
"""The entry that is added to a loaded checkpoint: the state of this agent's generators."""
_OPTIMIZERS = "optimizer_states"
_OWN = ("lr_schedulers", "loops")
KEPT = 2
"""Where a file is written again and again (``last.ckpt``) the folder keeps the save before, until the file is there."""


class StateHolder:
    """A state that is there already, or has been loaded."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any, /) -> None:
        self.state = state


def folder_of(path: str | Path) -> Path:
    """The folder of the agents' states beside a checkpoint's file."""
    return Path(f"{path}.agents")


def save_own(
    checkpoint: dict[str, Any], model: Mapping[str, Any], path: str | Path, precision: str, step: int
) -> dict[str, Any]:
    """Write this agent's own state beside a checkpoint's file. All agents call it.

    Args:
        checkpoint: The checkpoint that Lightning saves, with this agent's own optimizers.
        model: This agent's own ``state_dict``.
        path: The checkpoint's file.
        precision: Under which name the precision plugin's state is in it.
        step: How many steps there were.

    Returns:
        The checkpoint for the file, whose optimizer states any torch optimizer loads.

    Raises:
        ValueError: The path is not one of a file system that this process has.
    """
    if "://" in str(path):
        raise ValueError(
            f"ShoalStrategy: {path} is no path of a disk, and each agent writes a file of its own state beside the "
            "checkpoint. Save to a disk that all machines share, or with save_weights_only=True"
        )
    token = broadcast_object(secrets.token_hex(8), 0, Internal("lightning.save"))
    optimizers = checkpoint[_OPTIMIZERS]
    keys = [key for key in (*_OWN, precision) if key in checkpoint]
    rest = {
        "token": token,
        "checkpoint": {key: checkpoint[key] for key in keys},
        "random": RandomState().state_dict(),
    }
    _parts(StateHolder(model), StateHolder(rest), [StateHolder(optimizer) for optimizer in optimizers]).save(
        folder_of(path), step, keep=KEPT
    )
    plain = [{key: value for key, value in state.items() if key != "shoal"} for state in optimizers]
    saved = {"agents": size(), "save": token, "step": step, "optimizers": len(optimizers)}
    return {**checkpoint, _OPTIMIZERS: plain, KEY: saved}


def load_own(checkpoint: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """The checkpoint to resume from: with this agent's own state if the number of agents is the same as at the save,
    else with the mean of all. All agents call it.

    Raises:
        ShoalError: The folder beside the file is of another save.
    """
    saved = checkpoint.get(KEY)
    if saved is None:
        log.info("%s is of one process; all agents begin with it", path)
        return checkpoint
    folder = folder_of(Path(path).resolve())
    there: bool = broadcast_object(folder.is_dir(), 0, Internal("lightning.has_agents"))
    if not there:
        warn(f"there is no {folder}, so all agents begin at the mean model, and with the optimizer state of agent 0")
        return checkpoint
    model, rest, optimizers = StateHolder(), StateHolder(), [StateHolder() for _ in range(saved["optimizers"])]
    as_many = saved["agents"] == size()
    if not as_many:
        warn(
            f"{path} was saved by {saved['agents']} agents, and there are {size()} now: all begin at the mean of "
            "those, with generators of their own"
        )
    start: Any = "own" if as_many else "consensus"
    _parts(model, rest, optimizers).load(folder, saved["step"], start=start)
    if rest.state["token"] != saved["save"]:
        raise ShoalError(
            f"{folder} is of another save than {path}, both of step {saved['step']}: a run was killed while it saved, "
            "or one of the two was copied. Take another checkpoint, or remove the folder to begin at the mean model"
        )
    found = {**checkpoint, **rest.state["checkpoint"], _OPTIMIZERS: [optimizer.state for optimizer in optimizers]}
    if as_many:
        found |= {"state_dict": model.state, RANDOM: rest.state["random"]}
    return found


def remove_own(path: str | Path) -> None:
    """Remove the folder beside a checkpoint's file, if there is one."""
    shutil.rmtree(folder_of(path), ignore_errors=True)


def check_one_path(path: str | Path) -> None:
    """Raise Mismatch, on all agents, unless they save to the same path."""
    saved = gather_by_rank(
        torch.frombuffer(bytearray(str(path).encode()), dtype=torch.uint8), Internal("lightning.path")
    )
    paths = {agent: bytes(text.tolist()).decode() for agent, text in saved.items()}
    others = [agent for agent, text in paths.items() if text != paths[rank()]]
    if others:
        raise Mismatch(
            f"checkpoint: rank {rank()} saves to {paths[rank()]}, and rank {others[0]} to {paths[others[0]]}. What is "
            "in the name of a checkpoint must be the same on all agents: log it with sync_dist=True",
            (rank(), *others),
        )


def _parts(model: StateHolder, rest: StateHolder, optimizers: list[StateHolder]) -> Checkpoint:
    named = {f"optimizer{number}": optimizer for number, optimizer in enumerate(optimizers)}
    return Checkpoint(model=model, rest=rest, **named)


def warn(text: str) -> None:
    """Warn, at rank 0."""
    if rank() == 0:
        warnings.warn(text, stacklevel=3)
