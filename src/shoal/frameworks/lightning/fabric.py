"""The strategy for Lightning's Fabric: the loop is the script's own, and ``setup`` gives decentralized optimizers."""

from __future__ import annotations

import secrets
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.rank_zero import rank_zero_only

from ...errors import ShoalError
from ...ops.arguments import Internal
from ...ops.objects import broadcast_object
from ...optim.checkpoints.checkpoint import Checkpoint
from ...optim.checkpoints.states import RandomState
from ...optim.evaluation import consensus
from ...optim.optimizer import DecentralizedOptimizer
from ...runtime.agent import current
from ...runtime.bootstrap import init
from ...runtime.queries import is_initialized, size
from .. import check_agent
from .base_strategy import BaseStrategy, ShoalEnvironment, Wrapper, broadcast_weights, one_peer_at_a_time, reduced
from .checkpoints import KEPT, KEY, StateHolder, check_one_path, folder_of, warn


class ShoalFabricStrategy(BaseStrategy, ParallelStrategy):
    """``Fabric(strategy=ShoalFabricStrategy(), accelerator="cpu", devices=1)``: each process is an agent with a model
    of its own, which averages with a neighbour in every optimizer step.

    It makes this process an agent (:func:`shoal.init`) if it is none yet, and opens no process group.
    ``fabric.setup(model, optimizer)`` gives all agents rank 0's weights, and a decentralized optimizer;
    ``setup_dataloaders`` distributes the samples. ``fabric.save`` writes the mean model, and each agent's own state
    beside it; ``fabric.load`` loads each agent's own state.

    Args:
        wrapper: Makes a decentralized optimizer from an optimizer and the module; as for :class:`ShoalStrategy`. If the
            optimizer has parameters of several modules, which were set up one by one, it gets the list of them.
        checkpoint_io: Lightning's plugin that writes the checkpoint's file, at rank 0.

    Raises:
        ValueError: The agents are threads, or survive losses (``on_loss="continue"``). Fabric raises it for another
            device than the CPU, and for an optimizer that is set up before its model.
    """

    def __init__(self, wrapper: Wrapper | None = None, *, checkpoint_io: Any = None) -> None:
        if not is_initialized():
            init()
        check_agent(current("ShoalFabricStrategy"), "ShoalFabricStrategy")
        self._wrapper = wrapper
        self._modules: list[torch.nn.Module] = []
        super().__init__(cluster_environment=ShoalEnvironment(), checkpoint_io=checkpoint_io)
        self._backward_sync_control = _NothingToHoldBack()
        rank_zero_only.rank = self.global_rank

    # From the script to the first step

    def module_to_device(self, module: torch.nn.Module) -> None:
        module.to(self.root_device)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """The unwrapped module, with rank 0's weights."""
        broadcast_weights(module)
        self._modules.append(module)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Decentralized.

        Raises:
            ValueError: The optimizer's model has not been set up.
        """
        if isinstance(optimizer, DecentralizedOptimizer):
            return optimizer
        mine = {id(param) for group in optimizer.param_groups for param in group["params"]}
        holders = [module for module in self._modules if any(id(param) in mine for param in module.parameters())]
        if not holders:
            raise ValueError(
                "ShoalFabricStrategy: the optimizer comes before its model, whose parameters agents average. Set up "
                "both together: model, optimizer = fabric.setup(model, optimizer)"
            )
        make = self._wrapper or (lambda optimizer, of: one_peer_at_a_time(optimizer, of, True))
        return make(optimizer, holders[0] if len(holders) == 1 else holders)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean, sum, maximum, minimum or product over the agents; the same bits on all."""
        return reduced(tensor, reduce_op, group)

    # Checkpoints: the mean model's file, and a folder beside it with each agent's own state

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """This agent's, as any optimizer of torch takes it."""
        return {key: value for key, value in super().get_optimizer_state(optimizer).items() if key != "shoal"}

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: dict[str, Any] | None = None
    ) -> None:
        """All agents call it, between two steps. A ``filter`` is for the file."""
        check_one_path(path)
        if KEY in state:
            raise ValueError(
                f"fabric.save: the state has an entry {KEY!r}, and the file has the identity of the save there. Give "
                "that entry another name"
            )
        token = broadcast_object(secrets.token_hex(8), 0, Internal("fabric.save"))
        parts = {name: part if _is_stateful(part) else StateHolder(part) for name, part in state.items()}
        _checkpoint(parts, StateHolder(token), RandomState()).save(folder_of(path), 0, keep=KEPT)
        with ExitStack() as means:
            for part in state.values():
                if isinstance(part, torch.nn.Module):
                    means.enter_context(consensus(part))
            saved = {"agents": size(), "save": token}
            super().save_checkpoint(path, state | {KEY: saved}, storage_options, filter)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Each agent's own state, or, with another number of agents, the mean. All agents call it.

        Raises:
            ShoalError: The folder beside the file is of another save.
        """
        folder = folder_of(Path(path).resolve())
        there = broadcast_object(folder.is_dir(), 0, Internal("fabric.has_agents"))
        if not there or not isinstance(state, dict) or not state:
            found: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            if state and isinstance(found, dict) and found.pop(KEY, None):
                warn(f"there is no {folder}, so all agents begin at the mean model, with agent 0's optimizer state")
            return found
        file = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        saved = file.pop(KEY)
        missing = [name for name in state if name not in file]
        if missing and strict:
            raise KeyError(f"{path} has no {missing[0]!r}; it has {', '.join(map(repr, file))}")
        token, random = StateHolder(), RandomState()
        parts = {name: part if _is_stateful(part) else StateHolder() for name, part in state.items() if name in file}
        as_many = saved["agents"] == size()
        if not as_many:
            warn(f"{path} was saved by {saved['agents']} agents, and there are {size()} now: all begin at their mean")
        _checkpoint(parts, token, random).load(folder, start="own" if as_many else "consensus")
        if token.state != saved["save"]:
            raise ShoalError(f"{folder} is of another save than {path}. Take another checkpoint, or remove the folder")
        if as_many:
            random.restore()
        state.update({name: part.state for name, part in parts.items() if isinstance(part, StateHolder)})
        return {name: value for name, value in file.items() if name not in state}


class _NothingToHoldBack(_BackwardSyncControl):
    """Gradients stay with their agent in any case."""

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()


def _is_stateful(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _checkpoint(parts: dict[str, Any], token: StateHolder, random: RandomState) -> Checkpoint:
    return Checkpoint(**{f"state_{name}": part for name, part in parts.items()}, token=token, random=random)
