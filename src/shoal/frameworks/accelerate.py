"""Accelerate, decentralized: an Accelerator whose ``prepare()`` gives a decentralized optimizer and wraps no model.

    from shoal.frameworks.accelerate import ShoalAccelerator as Accelerator

The rest of a script stays as it is. ``shoal run``, ``torchrun`` and ``accelerate launch`` start it.

The number of samples of an ``IterableDataset`` is known only at its end. Accelerate makes every process read the whole
stream and take its part. If the last round of batches is not full, the stream's first samples fill it up, and an
evaluation has to remove them again.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, IterableDataset

from . import not_installed

try:  # before the modules below, which import it, too
    from accelerate import Accelerator
    from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import GradientState
    from accelerate.utils import DataLoaderConfiguration, recursively_apply
except ModuleNotFoundError as error:
    raise not_installed(error, "transformers") from None

from ..data import AgentSampler
from ..ops import safe_serialization
from ..ops.arguments import Internal, as_bits
from ..ops.collective import allreduce, gather_by_rank
from ..ops.grouped import grouped_allgather, grouped_allreduce
from ..ops.objects import broadcast_object, broadcast_parameters
from ..optim.checkpoints.checkpoint import Checkpoint
from ..optim.checkpoints.states import RandomState
from ..optim.evaluation import consensus
from ..optim.optimizer import DecentralizedOptimizer
from .process_state import NO_DISPATCH, process_state, wait_for_everyone

__all__ = ["ShoalAccelerator"]

Wrapper: TypeAlias = Callable[[torch.optim.Optimizer, list[torch.nn.Module]], DecentralizedOptimizer]
"""Makes an optimizer decentralized: ``shoal.DecentralizedOptimizer``, or a function around it."""
_REFUSED = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config")
_CHECKPOINTS = "checkpoints"


def one_peer_at_a_time(optimizer: torch.optim.Optimizer, models: list[torch.nn.Module]) -> DecentralizedOptimizer:
    """The default: adapt, then combine, on the default topology of Shoal's optimizers. That is one neighbour of the
    exponential graph at a time, or what ``shoal.set_topology`` has set."""
    return DecentralizedOptimizer(optimizer, models, mix_state=())


class ShoalAccelerator(Accelerator):
    """Accelerate's ``Accelerator`` for agents of Shoal.

    ``prepare()`` puts Shoal's optimizer around each optimizer, wraps no model, gives all agents rank 0's first weights,
    and distributes the samples. ``gather``, ``gather_for_metrics``, ``reduce``, ``pad_across_processes`` and
    ``wait_for_everyone`` are over all agents. ``save_state`` and ``load_state`` keep each agent's own state;
    ``save_model`` and ``get_state_dict`` give the mean model's. All agents call these.

    Args:
        wrapper: Makes a decentralized optimizer from an optimizer and the prepared models that have its parameters; by
            default :func:`one_peer_at_a_time`.
        options: The options of ``accelerate.Accelerator``, by name.

    Raises:
        ValueError: DeepSpeed, FSDP, Megatron-LM or a ``parallelism_config`` is requested, which share one model;
            ``dispatch_batches=True``, which would send each agent's samples from rank 0; or Accelerate has opened a
            process group already.
    """

    def __init__(self, *, wrapper: Wrapper = one_peer_at_a_time, **options: Any) -> None:
        for name in _REFUSED:
            if options.get(name) is not None:
                raise ValueError(
                    f"ShoalAccelerator: {name} shares one model between processes, and Shoal's agents have a model "
                    "each. Leave it out"
                )
        process_state(cpu=options.get("cpu", False))
        loading = copy.copy(options.get("dataloader_config")) or DataLoaderConfiguration(
            split_batches=options.get("split_batches") is True, use_seedable_sampler=True
        )
        if loading.dispatch_batches:
            raise ValueError(f"ShoalAccelerator: {NO_DISPATCH}")
        loading.dispatch_batches = False
        super().__init__(**options | {"dataloader_config": loading})
        self._wrapper = wrapper
        seed = torch.initial_seed() if loading.data_seed is None else loading.data_seed
        self._order: int = broadcast_object(seed, 0, Internal("frameworks.order"))
        loading.data_seed = self._order

    # Preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As Accelerate's; the returned optimizers are decentralized. Pass models before them, or with them.

        Raises:
            ValueError: An optimizer is passed before any model, or a model is wrapped for a process group.
        """
        models = [*self._models, *(arg for arg in args if isinstance(arg, torch.nn.Module))]
        return super().prepare(*(self._decentralized(arg, models) for arg in args), device_placement=device_placement)

    def _decentralized(self, arg: Any, models: list[torch.nn.Module]) -> Any:
        plain = isinstance(arg, torch.optim.Optimizer) and not isinstance(
            arg, AcceleratedOptimizer | DecentralizedOptimizer
        )
        if not plain:
            return arg
        params = {param for group in arg.param_groups for param in group["params"]}
        # Not all models: the exchange would begin with the forward pass of one that this optimizer does not train.
        inner = [self.unwrap_model(model) for model in dict.fromkeys(models)]
        holders = [model for model in inner if not params.isdisjoint(model.parameters())]
        if not holders:
            raise ValueError(
                "ShoalAccelerator.prepare: the optimizer comes before its model, whose parameters agents average. "
                "Prepare both together: model, optimizer = accelerator.prepare(model, optimizer)"
            )
        return self._wrapper(arg, holders)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """As Accelerate's, wrapped by nothing; all agents begin with rank 0's weights."""
        if isinstance(model, DistributedDataParallel):
            raise ValueError(
                "ShoalAccelerator: the model is in DistributedDataParallel already; pass the one inside it"
            )
        is_new = not getattr(model, "_is_accelerate_prepared", False)
        if is_new and not evaluation_mode:
            broadcast_parameters(model.state_dict(), 0)
        prepared: torch.nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **options: Any) -> Any:
        """As Accelerate's: each agent takes its part of the samples, whose order is the same on all. The samples of a
        :class:`shoal.data.AgentSampler` are left as they are.
        """
        sampler = sampler_of(data_loader)
        if hasattr(sampler, "generator") and not getattr(data_loader, "_is_accelerate_prepared", False):
            # Agents take parts of one order, so all must draw it alike, whatever they were seeded with.
            if sampler.generator is None:
                sampler.generator = torch.Generator()
                sampler.generator.manual_seed(self._order)
            state = broadcast_object(sampler.generator.get_state(), 0, Internal("frameworks.sampler"))
            sampler.generator.set_state(state)
        prepared = super().prepare_data_loader(data_loader, *args, **options)
        if isinstance(sampler, AgentSampler):  # its samples are this agent's already, and were dealt out again
            for batches in (prepared.sampler, prepared.batch_sampler):
                if isinstance(batches, BatchSamplerShard):
                    batches.num_processes, batches.process_index, batches.even_batches = 1, 0, False
        count_samples(prepared)
        return prepared

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Refused: agents that average take equally many steps."""
        raise ValueError(
            "join_uneven_inputs is for DistributedDataParallel. Leave even_batches on, which deals out equally many "
            "batches, or use the optimizer's own join() (docs/training-details.md)"
        )
        yield

    # All agents together

    def gather(self, tensor: Any) -> Any:
        """Tensors of all agents, joined along dimension 0 in the order of ranks; a single number counts as one row."""
        return _together(_gathered, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As :meth:`gather`, without the samples that are repeated at the end of an epoch; also for plain objects."""
        try:
            recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        data = gathered_objects(input_data) if use_gather_object else self.gather(input_data)
        count = samples_of_last_round(self.gradient_state)
        if count == 0:
            return data
        return data[:count] if use_gather_object else recursively_apply(lambda tensor: tensor[:count], data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, mean or maximum of all agents' tensors. ``scale`` is for TPUs, and does nothing."""
        return reduced(tensor, reduction)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Tensors as long in a dimension as the longest of all agents'."""
        return padded(tensor, dim, pad_index, pad_first)

    def wait_for_everyone(self) -> None:
        """All agents meet here."""
        wait_for_everyone()

    # The mean model, and each agent's own state

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The mean model's, over all agents, in memory of its own."""
        inner = self.unwrap_model(model) if unwrap else model
        with consensus(inner):
            return {
                name: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for name, value in inner.state_dict().items()
            }

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Refused: what such a hook saves would be one agent's."""
        raise ValueError(
            "ShoalAccelerator.save_state saves each agent's own state and calls no hooks, which would save one "
            "agent's. Call what the hook does before save_state, inside `with shoal.consensus(model):` if it saves "
            "the model"
        )

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Refused, as :meth:`register_save_state_pre_hook`."""
        return self.register_save_state_pre_hook(hook)

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, *_: Any, **__: Any) -> str:
        """Save each agent's own state: models, optimizers with their exchanges, schedulers, generators, registered
        objects. All agents call it between two steps, with a folder that all machines share.

        Returns:
            The folder.

        Raises:
            ShoalError: An agent could not save; then the last state that was saved there still counts.
        """
        settings = self.project_configuration
        if settings.automatic_checkpoint_naming:
            output_dir = Path(self.project_dir) / _CHECKPOINTS / f"checkpoint_{self.save_iteration}"
        elif output_dir is None:
            raise ValueError(
                "save_state: give it a folder, or a ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        folder = Path(output_dir)
        if settings.automatic_checkpoint_naming and broadcast_object(
            folder.exists(), 0, Internal("frameworks.save_state")
        ):
            raise ValueError(
                f"save_state: {folder} is there already. Set project_configuration.iteration to the number that comes "
                "next, or save elsewhere"
            )
        self._checkpoint().save(folder, self.save_iteration, keep=1)
        limit = settings.total_limit
        if settings.automatic_checkpoint_naming and limit is not None and self.is_main_process:
            for old in _by_number(folder.parent)[:-limit]:
                shutil.rmtree(old)
        settings.iteration += 1
        return str(folder)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        *_: Any,
        start: Literal["own", "consensus"] = "own",
        **__: Any,
    ) -> None:
        """Resume at the state of a :meth:`save_state`, bit for bit. All agents call it, after the same ``prepare()``.

        Args:
            input_dir: The folder; None for the last one of automatic names.
            start: ``"own"``, or with another number of agents ``"consensus"``: all begin at the mean of the saved
                states.

        Raises:
            FileNotFoundError: The folder has no complete state.
            ValueError: It is of another number of agents, or other objects were prepared.
        """
        if input_dir is None:
            if not self.project_configuration.automatic_checkpoint_naming:
                raise ValueError("load_state: give it the folder that save_state was given")
            there = [str(folder) for folder in _by_number(Path(self.project_dir) / _CHECKPOINTS)]
            input_dir = broadcast_object(there[-1] if there else "", 0, Internal("frameworks.load_state"))
            if not input_dir:
                raise FileNotFoundError(f"load_state: nothing was saved in {self.project_dir} yet")
        checkpoint = self._checkpoint()
        self.project_configuration.iteration = checkpoint.load(input_dir, start=start) + 1
        if start == "own":  # else all would draw as agent 0
            self._random.restore()

    def _checkpoint(self) -> Checkpoint:
        """A checkpoint of all prepared or registered objects."""
        self._random = RandomState()
        parts: dict[str, Any] = {"random": self._random, "progress": _Progress(self)}
        parts |= {f"model_{k}": self.unwrap_model(model) for k, model in enumerate(self._models)}
        parts |= {f"optimizer_{k}": optimizer.optimizer for k, optimizer in enumerate(self._optimizers)}
        parts |= {f"scheduler_{k}": scheduler for k, scheduler in enumerate(self._schedulers)}
        parts |= {f"custom_{k}": part for k, part in enumerate(self._custom_objects)}
        if self.scaler is not None:
            parts["scaler"] = self.scaler
        return Checkpoint(**parts)


class _HasProgress(Protocol):
    step: int
    _dataloaders: list[Any]


class _Progress:
    """How many batches an accelerator has counted, and in which epochs its loaders are."""

    def __init__(self, accelerator: _HasProgress) -> None:
        self._of = accelerator

    def state_dict(self) -> dict[str, Any]:
        loaders = self._of._dataloaders
        return {"step": self._of.step, "epochs": [getattr(loader, "iteration", 0) for loader in loaders]}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._of.step = state_dict["step"]
        for loader, epoch in zip(self._of._dataloaders, state_dict["epochs"], strict=False):
            if hasattr(loader, "iteration"):
                loader.iteration = epoch


def _by_number(folder: Path) -> list[Path]:
    """The automatically named checkpoints in a folder, the last one last."""
    found = [(int(name[1]), path) for path in folder.glob("checkpoint_*") if (name := re.search(r"_(\d+)$", path.name))]
    return [path for _, path in sorted(found)]


class Counted(IterableDataset[Any]):
    """A stream that counts its samples.

    Attributes:
        total: How many there were, once it has been read to its end in this process; None before.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.total: int | None = None

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for batch in self._stream:
            count += 1
            yield batch
        self.total = count

    def __len__(self) -> int:
        return len(self._stream)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of an object that is just being unpickled, too
            raise AttributeError(name)
        return getattr(self._stream, name)


def count_samples(loader: Any) -> None:
    """Count the samples of a prepared loader's stream, if it reads one."""
    shard = getattr(loader, "dataset", None)
    if isinstance(shard, IterableDatasetShard) and not isinstance(shard.dataset, Counted):
        shard.dataset = Counted(shard.dataset)


def sampler_of(loader: Any) -> Any:
    """The sampler of a loader, also of a prepared one, whose batches are in Accelerate's batch samplers."""
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return getattr(batches, "sampler", None)


def samples_of_last_round(state: GradientState) -> int:
    """How many samples of the batches that all agents have now are not there for a second time; 0 means all."""
    if not state.end_of_dataloader:
        return 0
    if isinstance(sampler_of(state.active_dataloader), AgentSampler):  # equally many on all, and none that is repeated
        return 0
    shard = getattr(state.active_dataloader, "dataset", None)
    if not isinstance(shard, IterableDatasetShard) or not isinstance(shard.dataset, Counted):
        return max(int(state.remainder), 0)
    if shard.drop_last or shard.dataset.total is None:
        return 0
    together: int = shard.batch_size * (1 if shard.split_batches else shard.num_processes)
    return shard.dataset.total % together


_OPERATIONS = {"sum": "sum", "mean": "average", "max": "max"}


def _together(call: Callable[[list[torch.Tensor]], list[torch.Tensor]], tensors: Any) -> Any:
    """The structure of tensors, with the results of one call of them all.

    With a call of each, an agent with one tensor more would be a round ahead for good.
    """
    given: list[torch.Tensor] = []
    recursively_apply(given.append, tensors, error_on_other_type=True)
    found = iter(call(given))
    return recursively_apply(lambda _: next(found), tensors, error_on_other_type=True)


def _gathered(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    rows = [as_bits(tensor.detach()[None] if tensor.ndim == 0 else tensor.detach()) for tensor in tensors]
    found = grouped_allgather(rows, Internal("frameworks.gather"))
    return [bits.view(tensor.dtype) for bits, tensor in zip(found, tensors, strict=True)]


def gathered_objects(objects: Any) -> list[Any]:
    """The objects of all agents, in the order of ranks: plain data, as :func:`~shoal.broadcast_object` sends it.

    Raises:
        TypeError: A part of the objects is not plain data.
    """
    found = gather_by_rank(safe_serialization.write(objects), Internal("frameworks.gather_objects"))
    return [item for data in found.values() for item in safe_serialization.read(data)]


def reduced(tensors: Any, reduction: str) -> Any:
    """Each tensor's sum, mean or maximum over the agents, or itself with ``"none"``."""
    if reduction == "none":
        return tensors
    if reduction not in _OPERATIONS:
        raise ValueError(f"reduction={reduction!r}: it may be {', '.join(map(repr, _OPERATIONS))} or 'none'")

    def of_all(given: list[torch.Tensor]) -> list[torch.Tensor]:
        detached = [tensor.detach() for tensor in given]
        return grouped_allreduce(detached, op=_OPERATIONS[reduction], name=Internal("frameworks.reduce"))

    return _together(of_all, tensors)


def padded(tensors: Any, dim: int, pad_index: float, pad_first: bool) -> Any:
    """Each tensor as long in a dimension as the longest of all agents'."""

    def length(tensor: torch.Tensor) -> int:
        return tensor.shape[dim] if -tensor.ndim <= dim < tensor.ndim else 0

    def of_one(tensor: torch.Tensor, longest: int) -> torch.Tensor:
        own = length(tensor)
        if longest == own:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = longest
        found = tensor.new_full(shape, pad_index)
        found.narrow(dim, longest - own if pad_first else 0, own).copy_(tensor)
        return found

    def of_all(given: list[torch.Tensor]) -> list[torch.Tensor]:
        lengths = torch.tensor([length(tensor) for tensor in given], dtype=torch.int64, device="cpu")
        longest = allreduce(lengths, op="max", name=Internal("frameworks.pad")).tolist()
        return list(map(of_one, given, longest))

    return _together(of_all, tensors)
