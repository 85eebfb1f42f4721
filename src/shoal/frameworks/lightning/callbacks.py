"""Callbacks for a Trainer with agents: the distance between agents, and a check that they monitor the same number.

``MeanModel`` replaces this agent's model by the mean of all agents' models while Lightning evaluates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from ...optim.mean_model import averaged, consensus_distance, means
from ...runtime.queries import rank
from .collectives import gather_all


class ConsensusDistance(Callback):
    """Logs how far the agents' models are from their mean, at each validation, to the Trainer's loggers.

    It is ``sqrt(mean over agents of |x_i - mean x|^2)`` over all parameters (:func:`shoal.consensus_distance`), and may
    be monitored like any other metric.

    Args:
        name: The name in the log.
    """

    def __init__(self, name: str = "consensus_distance") -> None:
        super().__init__()
        self.name = name

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """The models are the agents' own here: the strategy puts the mean in place after this."""
        if trainer.state.fn == "fit":
            distance = consensus_distance(pl_module)
            if not trainer.sanity_checking:
                pl_module.log(self.name, distance, batch_size=1)


class SameNumbers(Callback):
    """Refuses to stop, to save or to change rates by numbers that each agent has for itself."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._check(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the numbers that a module logged at the end of an epoch, after this callback had run there."""
        self._check(trainer)

    def _check(self, trainer: Any) -> None:
        monitored = _monitored(trainer)
        if not monitored or trainer.state.fn != "fit" or trainer.world_size == 1:
            return
        metrics = trainer.callback_metrics
        names = [name for name in monitored if name in metrics]
        mine = torch.tensor([float(metrics[name]) for name in names], dtype=torch.float64)
        every = [theirs.view(torch.int64) for theirs in gather_all(mine)]
        for number, name in enumerate(names):
            if any(len(theirs) != len(names) for theirs in every):
                raise ValueError(f"agents have logged other metrics than rank {rank()}, which has {', '.join(names)}")
            if len({theirs[number].item() for theirs in every}) > 1:
                values = ", ".join(f"{theirs.view(torch.float64)[number].item():.6g}" for theirs in every)
                raise ValueError(
                    f"{name!r} is monitored, and is not the same on all agents, who would stop, save or change rates "
                    f"each for itself. It is {values}. Log the mean: self.log({name!r}, ..., sync_dist=True)"
                )


def _monitored(trainer: Any) -> list[str]:
    """The names that callbacks and learning rates' schedules look at."""
    found = [getattr(owner, "monitor", None) for owner in (*trainer.callbacks, *trainer.lr_scheduler_configs)]
    return sorted({monitor for monitor in found if isinstance(monitor, str)})


class MeanModel:
    """A module whose tensors hold the mean or this agent's own values; :func:`shoal.consensus` in two halves.

    Of both there is one copy in memory: what is not in place is kept beside it.

    Args:
        module: This agent's.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._tensors: list[torch.Tensor] = []
        self._others: list[torch.Tensor] = []

    @property
    def is_in_place(self) -> bool:
        return bool(self._tensors)

    def put_in_place(self) -> None:
        """Average, and put the mean in place. All agents call it."""
        if self.is_in_place:
            return
        # Lightning evaluates in inference mode, and tensors made in it could not be written to afterwards.
        with torch.inference_mode(False), torch.no_grad():
            tensors = averaged(self._module)
            self._others = means(tensors, "lightning.mean")
            self._tensors = tensors
            self._exchange()

    def put_back(self) -> None:
        """Put this agent's own values back; nothing, if they are there. No agent waits for another."""
        if self.is_in_place:
            self._exchange()
            self._tensors, self._others = [], []

    @contextmanager
    def own(self) -> Iterator[None]:
        """A context in which the module holds this agent's own values, even while the mean is otherwise in place."""
        if self.is_in_place:
            self._exchange()
        try:
            yield
        finally:
            if self.is_in_place:
                self._exchange()

    @contextmanager
    def mean(self) -> Iterator[None]:
        """Inside, the module holds the mean. All agents enter it."""
        was = self.is_in_place
        self.put_in_place()
        try:
            yield
        finally:
            if not was:
                self.put_back()

    def _exchange(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for tensor, other in zip(self._tensors, self._others, strict=True):
                kept = tensor.clone()
                tensor.copy_(other)
                other.copy_(kept)
