"""Features of a Trainer that agents with separate models cannot support, with the reasons."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from ...optim.optimizer import DecentralizedOptimizer

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


def check_devices(devices: list[Any] | None) -> None:
    """Raise ValueError unless it is one, the CPU."""
    if devices is not None and len(devices) > 1:
        raise ValueError(
            f"devices={len(devices)}: with Shoal's strategies each process is one agent with one device, and the "
            f"launcher says how many there are. Take devices=1, and shoal run -n {len(devices)}"
        )
    elsewhere = [device for device in devices or () if getattr(device, "type", None) != "cpu"]
    if elsewhere:
        raise ValueError(
            f"Shoal trains on the CPU here for now, and Lightning has taken {elsewhere[0]}. Set accelerator='cpu'"
        )


def check_nodes(count: int) -> None:
    """Raise ValueError unless the number of machines is left to the launcher."""
    if count != 1:
        raise ValueError(
            f"Trainer(num_nodes={count}): with ShoalStrategy the launcher says on how many machines there are agents. "
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
            "steps. Leave use_distributed_sampler on, or take a shoal.AgentSampler(shard=), or set limit_train_batches"
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
