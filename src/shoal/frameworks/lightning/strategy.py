"""The strategy: the functions that Lightning's Trainer needs of several processes, by agents of Shoal."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from ...errors import ShoalError
from ...optim.checkpoints.states import RandomState
from ...optim.optimizer import DecentralizedOptimizer
from ...runtime.agent import current
from ...runtime.bootstrap import init
from ...runtime.queries import is_initialized, machine_size
from ..requirements import check_agent
from . import checkpoints, collectives, validation
from .base_strategy import (
    BaseStrategy,
    ShoalEnvironment,
    Wrapper,
    broadcast_weights,
    evaluate_first,
    one_peer_at_a_time,
)
from .callbacks import MeanModel, SameNumbers

T = TypeVar("T")


class ShoalStrategy(BaseStrategy, ParallelStrategy):
    """Each process is an agent with a model of its own, which averages with a neighbour in every optimizer step.

    It makes this process an agent (:func:`shoal.init`) if it is none yet, and opens no process group. All agents begin
    with rank 0's weights. Validation, tests, predictions and checkpoints use the mean of all agents' models; after
    ``fit`` the module holds this agent's own (``with shoal.consensus(module)`` has the mean).

    Args:
        wrapper: Makes a decentralized optimizer from an optimizer and the module: any of Shoal's wrappers, or a
            function around one. The default is adapt, then combine, with one neighbour of the exponential graph at a
            time. Decentralized optimizers from ``configure_optimizers`` are not wrapped again.
        checkpoint_io: Lightning's plugin that writes the checkpoint's file, at rank 0.
        precision_plugin: Lightning's plugin for precision; usually set by ``Trainer(precision=)``.

    Raises:
        ValueError: The agents are threads, or survive losses (``on_loss="continue"``). The Trainer raises it for the
            features that ``docs/lightning.md`` lists as refused.
    """

    strategy_name = "shoal"
    optimizers: list[torch.optim.Optimizer]
    is_distributed = True
    """Lightning deals out the samples, and has ``sync_dist=True`` reduce."""

    def __init__(
        self, wrapper: Wrapper | None = None, *, checkpoint_io: Any = None, precision_plugin: Any = None
    ) -> None:
        if not is_initialized():
            init()
        check_agent(current("ShoalStrategy"), "ShoalStrategy")
        self._wrapper = wrapper
        self._machines = machine_size()
        self._decentralized: list[DecentralizedOptimizer] = []
        self._mean: MeanModel | None = None
        self._own_loaded = False
        self._random: Mapping[str, Any] | None = None
        super().__init__(
            cluster_environment=ShoalEnvironment(), checkpoint_io=checkpoint_io, precision_plugin=precision_plugin
        )
        rank_zero_only.rank = self.global_rank

    # Settings of the Trainer

    @property
    def num_nodes(self) -> int:
        """On how many machines there are agents."""
        return self._machines

    @num_nodes.setter
    def num_nodes(self, count: int) -> None:
        validation.check_nodes(count)

    @property
    def _layer_sync(self) -> Any:
        return None

    @_layer_sync.setter
    def _layer_sync(self, sync: Any) -> None:
        validation.check_layer_sync(sync)

    @property
    def precision_plugin(self) -> Any:
        return ParallelStrategy.precision_plugin.fget(self)

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        validation.check_precision(plugin)
        ParallelStrategy.precision_plugin.fset(self, plugin)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # From the script to the first step

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer

    def setup_environment(self) -> None:
        validation.check_callbacks(self._trainer)
        self._trainer.callbacks[:] = [
            callback for callback in self._trainer.callbacks if not isinstance(callback, _Hooks)
        ]
        self._trainer.callbacks.insert(0, _Hooks(self))
        self._mean, self._own_loaded, self._random = MeanModel(self.lightning_module), False, None
        super().setup_environment()

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def setup(self, trainer: Any) -> None:
        if self.world_size > 1:
            collectives.synchronise(self.lightning_module)
        super().setup(trainer)

    def setup_optimizers(self, trainer: Any) -> None:
        """As Lightning's, decentralized; schedulers keep working because both optimizers share ``param_groups``."""
        if not self._own_loaded:
            broadcast_weights(self.lightning_module)
        super().setup_optimizers(trainer)
        self.optimizers = [self._made_decentralized(optimizer, trainer) for optimizer in self.optimizers]

    def _made_decentralized(self, optimizer: torch.optim.Optimizer, trainer: Any) -> torch.optim.Optimizer:
        if not any(group["params"] for group in optimizer.param_groups):  # where configure_optimizers returns None
            return optimizer
        if isinstance(optimizer, DecentralizedOptimizer):
            decentralized = optimizer
        elif self._wrapper is None:
            dealt_out = trainer._accelerator_connector.use_distributed_sampler
            decentralized = one_peer_at_a_time(optimizer, self.lightning_module, dealt_out)
        else:
            decentralized = self._wrapper(optimizer, self.lightning_module)
        self._decentralized.append(decentralized)
        validation.check_optimizer(decentralized, trainer)
        counts = trainer.accumulate_grad_batches != 1 or decentralized.num_steps_per_communication > 1
        if counts or decentralized.overlaps_backward:
            evaluate_first(decentralized)
        return decentralized

    def process_dataloader(self, dataloader: T) -> T:
        """The unchanged loader; its order is the next epoch's, even if its workers start before Lightning sets the
        epoch.
        """
        _set_sampler_epoch(dataloader, self._trainer.fit_loop.epoch_progress.current.processed)
        return dataloader

    def teardown(self) -> None:
        """Give the model and its metrics back. The agent stays one until its process ends, or ``shoal.shutdown()``."""
        self._put_back()
        if self.lightning_module is not None:
            collectives.release(self.lightning_module)
        decentralized, self._decentralized = self._decentralized, []
        interrupted = self.lightning_module is not None and self._trainer.state.status == TrainerStatus.INTERRUPTED
        for optimizer in decentralized:
            # A pending exchange fails again if an agent is lost, which the Trainer already knows.
            with contextlib.suppress(ShoalError) if interrupted else contextlib.nullcontext():
                optimizer.close()
        super().teardown()

    # What all agents do together

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean, sum, maximum, minimum or product over the agents; the same bits on all."""
        return collectives.reduced(tensor, reduce_op, group)

    def on_train_start(self) -> None:
        batches = torch.tensor(float(self._trainer.num_training_batches))
        validation.check_batches(
            [int(count) if count.isfinite() else None for count in collectives.gather_all(batches)]
        )
        if self._trainer.fit_loop.restarted_mid_epoch:
            self._restore_random()  # Lightning has begun to iterate, where a run that never stopped is in the middle

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._random = None

    # The mean model, for evaluation and for checkpoints' files

    def _put_in_place(self) -> None:
        assert self._mean is not None
        self._mean.put_in_place()

    def _put_back(self) -> None:
        if self._mean is not None:
            self._mean.put_back()

    on_validation_start = on_test_start = on_predict_start = _put_in_place
    on_validation_end = on_test_end = on_predict_end = _put_back

    def on_exception(self, exception: BaseException) -> None:
        self._put_back()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The mean model's. All agents call it, as they save."""
        assert self._mean is not None
        with self._mean.mean():
            state = self.lightning_module.state_dict()
            mean: dict[str, Any] = copy.copy(state)  # with the versions that it has beside its items
            mean.update({name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)})
        return mean

    # Checkpoints

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """This agent's own."""
        assert self._mean is not None
        with self._mean.own():
            state: dict[str, Any] = super().optimizer_state(optimizer)
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Rank 0 writes the file, which has the mean model; and each agent its own state, in a folder beside it."""
        assert self._mean is not None
        checkpoints.check_one_path(filepath)
        if "optimizer_states" in checkpoint:
            precision = type(self.precision_plugin).__qualname__
            with self._mean.own():
                own = self.lightning_module.state_dict()
                checkpoint = checkpoints.save_own(
                    checkpoint, own, filepath, precision, int(checkpoint.get("global_step", 0))
                )
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.local_rank == 0:
            checkpoints.remove_own(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """To train on: each agent's own state, or, with another number of agents, the mean; for all else the mean."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        self._own_loaded, self._random = False, None
        if self._trainer.state.fn == TrainerFn.FITTING:
            checkpoint = checkpoints.load_own(checkpoint, checkpoint_path)
            self._random = checkpoint.pop(checkpoints.RANDOM, None)
            self._own_loaded = self._random is not None
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._restore_random()

    def _restore_random(self) -> None:
        if self._random is not None:
            state = RandomState()
            state.load_state_dict(self._random)
            state.restore()


class _Hooks(SameNumbers):
    """The hooks of a callback that the strategy needs."""

    def __init__(self, strategy: ShoalStrategy) -> None:
        super().__init__()
        self._strategy = strategy

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        loop = trainer.fit_loop
        if not loop.is_resuming and not loop.epoch_loop.restarting and trainer.current_epoch > 0:
            # Lightning has started to iterate over the rest of an epoch without batches, and will start again.
            self._strategy._restore_random()
