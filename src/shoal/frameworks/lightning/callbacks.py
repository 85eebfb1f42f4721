"""Callbacks for a Trainer with agents: the distance between agents, and a check that they monitor the same number.

``MeanModel`` replaces this agent's model by the mean of all agents' models while Lightning evaluates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from ...optim.evaluation import averaged, being_read, consensus_distance, means
from ...runtime.queries import rank
from .base_strategy import gather_all


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

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Check what is used at the end of this batch; nothing is sent if nothing is."""
        self._check(trainer, _users_after_batch(trainer))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._check(trainer, _users(trainer))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._check(trainer, _users(trainer))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the numbers that a module logged at the end of an epoch, after this callback had run there."""
        self._check(trainer, _users(trainer))

    def _check(self, trainer: Any, users: list[Any]) -> None:
        monitored = sorted({name for user in users if isinstance(name := getattr(user, "monitor", None), str)})
        if not monitored or trainer.state.fn != "fit" or trainer.world_size == 1:
            return
        metrics = trainer.callback_metrics
        names = [name for name in monitored if name in metrics]
        mine = torch.tensor([float(metrics[name]) for name in names], dtype=torch.float64, device="cpu")
        every = [theirs.view(torch.int64) for theirs in gather_all(mine)]
        for number, name in enumerate(names):
            if any(len(theirs) != len(names) for theirs in every):
                raise ValueError(f"agents have logged other metrics than rank {rank()}, which has {', '.join(names)}")
            if len({theirs[number].item() for theirs in every}) > 1:
                values = ", ".join(f"{theirs.view(torch.float64)[number].item():.6g}" for theirs in every)
                raise ValueError(
                    f"{name!r} is monitored and differs between agents, so that they would stop, save or change rates "
                    f"at different steps. It is {values}. Log the mean: self.log({name!r}, ..., sync_dist=True)"
                )


def _users(trainer: Any) -> list[Any]:
    """The callbacks and the learning rates' schedules, of which some look at a number."""
    return [*trainer.callbacks, *trainer.lr_scheduler_configs]


def _users_after_batch(trainer: Any) -> list[Any]:
    """Those that look at a number after this batch: plateaus by the step, and checkpoints by the step or by time."""
    batches, steps = trainer.fit_loop.epoch_loop.batch_idx + 1, trainer.global_step
    return [
        *(
            config
            for config in trainer.lr_scheduler_configs
            if config.reduce_on_plateau and config.interval == "step" and batches % config.frequency == 0
        ),
        *(
            callback
            for callback in trainer.callbacks
            if isinstance(callback, ModelCheckpoint)
            and (
                callback._train_time_interval is not None
                or (callback._every_n_train_steps and steps % callback._every_n_train_steps == 0)
            )
        ),
    ]


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
        self._being_read: dict[int, torch.nn.Parameter] = {}

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
            self._tensors, self._being_read = tensors, being_read(self._module)
            self._exchange()

    def put_back(self) -> None:
        """Put this agent's own values back; nothing, if they are there. No agent waits for another."""
        if self.is_in_place:
            self._exchange()
            self._tensors, self._others, self._being_read = [], [], {}

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
            for number, (tensor, other) in enumerate(zip(self._tensors, self._others, strict=True)):
                if number in self._being_read:
                    param = self._being_read[number]
                    self._others[number], param.data = param.data, other
                else:
                    kept = tensor.clone()
                    tensor.copy_(other)
                    other.copy_(kept)
