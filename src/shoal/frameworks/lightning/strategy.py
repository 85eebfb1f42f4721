"""The strategy: the functions that Lightning's Trainer needs of several processes, by agents of Shoal.

The functions ``check_...`` refuse features of a Trainer that agents with separate models cannot support, with the
reasons.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from ...errors import ShoalError
from ...optim.asynchronous import WindowOptimizer
from ...optim.checkpoints.states import RandomState
from ...optim.optimizer import DecentralizedOptimizer
from ...runtime.agent import current
from ...runtime.bootstrap import init
from ...runtime.queries import is_initialized, machine_size
from .. import check_agent
from . import checkpoints
from .base_strategy import (
    BaseStrategy,
    ShoalEnvironment,
    Wrapper,
    broadcast_weights,
    evaluate_first,
    gather_all,
    one_peer_at_a_time,
    reduced,
    release,
    synchronise,
)
from .callbacks import MeanModel, SameNumbers

T = TypeVar("T")
_ALONE = (
    "an agent that fails would save alone, and wait for the others. Leave it out, and resume from a checkpoint of an "
    "epoch's end"
)
_OVER_TIME = (
    "it keeps an average of one agent's weights, which is not the mean over the agents. Leave it out, or average "
    "checkpoints, which have the mean"
)
_CALLBACKS: dict[type[Any], str] = {
    OnExceptionCheckpoint: _ALONE,
    StochasticWeightAveraging: _OVER_TIME,
    WeightAveraging: _OVER_TIME,
    BatchSizeFinder: "each agent would find a batch size of its own, and an average counts agents alike. Set one",
    LearningRateFinder: "it tries rates from one start again and again, each agent for itself. Start a job for each",
}
_PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)


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
        check_nodes(count)

    @property
    def _layer_sync(self) -> Any:
        return None

    @_layer_sync.setter
    def _layer_sync(self, sync: Any) -> None:
        check_layer_sync(sync)

    @property
    def precision_plugin(self) -> Any:
        return ParallelStrategy.precision_plugin.fget(self)

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        check_precision(plugin)
        ParallelStrategy.precision_plugin.fset(self, plugin)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # From the script to the first step

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer

    def setup_environment(self) -> None:
        check_callbacks(self._trainer)
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
            synchronise(self.lightning_module)
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
        check_optimizer(decentralized, trainer)
        counts = trainer.accumulate_grad_batches != 1 or decentralized.num_steps_per_communication > 1
        if counts or decentralized.overlaps_backward:
            evaluate_first(decentralized)
        return decentralized

    def process_dataloader(self, dataloader: T) -> T:
        """The loader; its order is rank 0's, and the next epoch's, even if its workers start before Lightning sets the
        epoch.
        """
        dataloader = super().process_dataloader(dataloader)
        _set_sampler_epoch(dataloader, self._trainer.fit_loop.epoch_progress.current.processed)
        return dataloader

    def teardown(self) -> None:
        """Give the model and its metrics back. The agent stays one until its process ends, or ``shoal.shutdown()``."""
        self._put_back()
        if self.lightning_module is not None:
            release(self.lightning_module)
        decentralized, self._decentralized = self._decentralized, []
        interrupted = self.lightning_module is not None and self._trainer.state.status == TrainerStatus.INTERRUPTED
        if not interrupted and any(isinstance(optimizer, WindowOptimizer) for optimizer in decentralized):
            self.barrier()  # slower agents still train, and put into the windows that close() frees
        for optimizer in decentralized:
            # A pending exchange fails again if an agent is lost, which the Trainer already knows.
            with contextlib.suppress(ShoalError) if interrupted else contextlib.nullcontext():
                optimizer.close()
        super().teardown()

    # What all agents do together

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean, sum, maximum, minimum or product over the agents; the same bits on all."""
        return reduced(tensor, reduce_op, group)

    def on_train_start(self) -> None:
        batches = torch.tensor(float(self._trainer.num_training_batches), device="cpu")
        check_batches([int(count) if count.isfinite() else None for count in gather_all(batches)])
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


def check_nodes(count: int) -> None:
    """Raise ValueError unless the number of machines is left to the launcher."""
    if count != 1:
        raise ValueError(
            f"Trainer(num_nodes={count}): with ShoalStrategy the launcher sets the number of machines. "
            "Leave num_nodes out"
        )


def check_layer_sync(sync: Any) -> None:
    """Raise ValueError if batch norms are to be synchronised."""
    if sync is not None:
        raise ValueError(
            "Trainer(sync_batchnorm=True) needs a process group, and makes all agents wait for all in every layer. "
            "Leave it out: running statistics are averaged for validation; or take GroupNorm, which has none"
        )


def check_precision(plugin: Any) -> None:
    """Raise ValueError for precisions that shard, quantize, or need an accelerator."""
    if plugin is not None and type(plugin) not in _PRECISIONS:
        raise ValueError(
            f"ShoalStrategy: the precision plugin {type(plugin).__name__} shards or quantizes the model, or is for "
            "accelerators, and agents average whole models on the CPU. Take precision='32-true', '64-true', "
            "'bf16-true' or 'bf16-mixed'"
        )


def check_callbacks(trainer: Any) -> None:
    """Raise ValueError for callbacks that act on one agent alone."""
    for callback in trainer.callbacks:
        name, why = type(callback).__name__, next((_CALLBACKS[k] for k in _CALLBACKS if isinstance(callback, k)), "")
        if getattr(callback, "save_on_exception", False):
            name, why = f"{name}(save_on_exception=True)", _ALONE
        if why:
            trainer.callbacks.remove(callback)  # it would save now, since this is an exception, too
            raise ValueError(f"ShoalStrategy: {name}: {why}")


def check_batches(counts: list[int | None]) -> None:
    """Raise ValueError, on all agents, where they have different numbers of batches, by rank; None: not known."""
    if len(set(counts)) > 1:
        listed = ", ".join("unknown" if count is None else str(count) for count in counts)
        raise ValueError(
            f"ShoalStrategy: the agents have {listed} batches in an epoch, and agents that average take equally many "
            "steps. Leave use_distributed_sampler on, or take a shoal.data.AgentSampler(shard=), or set "
            "limit_train_batches"
        )


def check_optimizer(optimizer: DecentralizedOptimizer, trainer: Any) -> None:
    """Raise ValueError for options that a decentralized optimizer cannot support in Lightning's loop."""
    several = trainer.accumulate_grad_batches != 1
    if optimizer.overlaps_backward and several:
        raise ValueError(
            f'overlap="backward" steps in every backward pass, and accumulate_grad_batches='
            f"{trainer.accumulate_grad_batches} means one step for several. Leave one of the two out"
        )
    if optimizer.overlaps_backward and trainer.gradient_clip_val:
        raise ValueError(
            'overlap="backward" steps during the backward pass, and gradient_clip_val would clip after it. Leave one '
            "of the two out"
        )
    if several and not getattr(optimizer.algorithm, "one_gradient", True):
        raise ValueError(
            f"{type(optimizer.algorithm).__name__} takes its gradient at points that it chooses, and "
            "accumulate_grad_batches adds up gradients at others. Leave one of the two out"
        )
