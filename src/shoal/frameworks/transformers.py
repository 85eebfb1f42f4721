"""The Trainer of Transformers, decentralized: two names are imported from here, and the script stays as it is.

    from shoal.frameworks.transformers import ShoalTrainer as Trainer, ShoalTrainingArguments as TrainingArguments

Each agent trains a model of its own on its part of the samples, and averages with a neighbour in every step of the
optimizer. Evaluation, checkpoints and the choice of the best model use the mean of all agents' models.

The arguments are those of Transformers, without the options that share one model.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from . import not_installed

try:  # before the modules below, which import accelerate, too
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import TrainerState
    from transformers.trainer_utils import get_last_checkpoint
    from transformers.training_args import ParallelMode
except ModuleNotFoundError as error:
    raise not_installed(error, "transformers") from None

from ..ops.arguments import Internal
from ..ops.collective import allreduce
from ..ops.objects import broadcast_object
from ..optim.adam import AccumAdamW
from ..optim.checkpoints.checkpoint import Checkpoint
from ..optim.checkpoints.checkpoint_files import find
from ..optim.checkpoints.states import RandomState
from ..optim.evaluation import consensus
from ..runtime.queries import size
from .accelerate import ShoalAccelerator, Wrapper, one_peer_at_a_time
from .process_state import NO_DISPATCH, process_state, wait_for_everyone

__all__ = ["ShoalTrainer", "ShoalTrainingArguments"]

AGENTS = "agents"
"""The folder of a checkpoint that has each agent's own state."""
_STATE = "trainer_state.json"


class ShoalTrainer(Trainer):
    """``transformers.Trainer`` for agents of Shoal. All agents call its methods, as all processes do under torchrun.

    Args:
        model: As of ``Trainer``; or ``model_init``.
        args: :class:`ShoalTrainingArguments`.
        wrapper: Makes the optimizer decentralized, of it and the models: any of Shoal's wrappers, such as
            ``shoal.bluefog.DistributedGradientAllreduceOptimizer``, or a function around one. If none is given, adapt,
            then combine, with one neighbour at a time, and AdamW of ``args`` is :class:`shoal.optim.AccumAdamW`.
        options: The options of ``Trainer``, by name. An optimizer in ``optimizers`` is wrapped on each agent.

    Raises:
        TypeError: ``args`` are those of Transformers.
        ValueError: The model is quantized, sharded, or wrapped for a process group.
    """

    optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None
    current_flos: float

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        args: ShoalTrainingArguments | None = None,
        *,
        wrapper: Wrapper | None = None,
        **options: Any,
    ) -> None:
        if args is None:
            args = ShoalTrainingArguments("tmp_trainer")
        if not isinstance(args, ShoalTrainingArguments):
            raise TypeError(
                f"ShoalTrainer: args is a {type(args).__name__}, which may open a process group. Make it a "
                "shoal.frameworks.transformers.ShoalTrainingArguments, which takes the same arguments"
            )
        if model is not None:
            _check_model(model)
        self._wrapper = wrapper
        self._agents_random: RandomState | None = None
        super().__init__(model, args, **options)

    # Components of the Trainer

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        options: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        self._accelerator_options = options
        return options

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's, with an accelerator of Shoal's."""
        super().create_accelerator_and_postprocess()
        options = self._accelerator_options
        self.accelerator = ShoalAccelerator(wrapper=self._wrapper or one_peer_at_a_time, **options)
        self.gather_function = self.accelerator.gather_for_metrics
        if "use_gather_object" in inspect.signature(self.gather_function).parameters:
            self.gather_function = functools.partial(
                self.gather_function, use_gather_object=self.args.eval_use_gather_object
            )

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """As the Trainer's; AdamW's moments are those of the gradients of as many steps as there are agents."""
        accumulate = self.args.adam_accumulate or (size() if self._wrapper is None else 1)
        given = self.optimizer_cls_and_kwargs
        if self.optimizer is None and given is None and accumulate > 1:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model if model is None else model)
            if kind is torch.optim.AdamW:
                options.pop("fused", None)
                self.optimizer_cls_and_kwargs = AccumAdamW, options | {"accumulate": accumulate}
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        self.optimizer_cls_and_kwargs = given
        return optimizer

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Refused: each agent would draw trials of its own."""
        raise ValueError(
            "ShoalTrainer.hyperparameter_search: each agent would try other parameters than its neighbours. Start a "
            "job for each trial"
        )

    # The mean over the agents

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """As the Trainer's, of the mean model; each agent reads a part of the samples, and has the result of all."""
        with consensus(self.model):
            return super().evaluation_loop(*args, **options)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Rank 0 saves the mean model, for ``from_pretrained``. All agents call it, and return when it is there."""
        with consensus(self.model):
            super().save_model(output_dir, _internal_call)
        wait_for_everyone()

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, grad_norm: Any, *args: Any, **options: Any) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            norm = torch.as_tensor(0.0 if grad_norm is None else grad_norm, device="cpu")
            both = torch.stack([tr_loss.double().cpu(), norm.detach().double()])
            loss, norm = _mean(both)
            tr_loss.copy_(loss)
            grad_norm = None if grad_norm is None else norm.item()
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **options)

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        self._tr_loss.copy_(_mean(self._tr_loss.double().cpu()))
        return super()._finalize_training(*args, **options)

    def store_flos(self) -> None:
        """As the Trainer's, over all agents."""
        mine = torch.tensor(float(self.current_flos), dtype=torch.float64, device="cpu")
        self.current_flos = allreduce(mine, op="sum", name=Internal("frameworks.flos")).item()
        super().store_flos()

    # Checkpoints: the mean model's files, and a folder with each agent's own state

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """As the Trainer's. ``resume_from_checkpoint=True`` resumes from the last complete checkpoint."""
        if resume_from_checkpoint is True:
            found = broadcast_object(
                _last_complete(Path(self.args.output_dir)), 0, Internal("frameworks.last_checkpoint")
            )
            if found is None:
                raise ValueError(f"there is no complete checkpoint in {self.args.output_dir}, as rank 0 sees it")
            resume_from_checkpoint = found
        return super().train(resume_from_checkpoint, *args, **options)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._checkpoint().save(Path(output_dir) / AGENTS, self.state.global_step, keep=1)

    def _save_scaler(self, output_dir: str) -> None:
        """Does nothing: the scaler is in each agent's own state."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Does nothing: the generators are in each agent's own state."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if not self._has_agents(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self._has_agents(checkpoint):
            self._checkpoint().load(Path(checkpoint) / AGENTS, start=self.args.resume_from)
            if self.args.resume_from == "consensus":
                self._agents_random = None  # all would draw as agent 0

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Does nothing: the scaler is in each agent's own state."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # After everything else, because skipping batches draws from the generators, too.
        if self._agents_random is not None:
            self._agents_random.restore()

    def _has_agents(self, checkpoint: str) -> bool:
        """Whether there are agents' states and not a model only, as rank 0 sees it."""
        there: bool = broadcast_object((Path(checkpoint) / AGENTS).is_dir(), 0, Internal("frameworks.has_agents"))
        return there

    def _checkpoint(self) -> Checkpoint:
        self._agents_random = RandomState()
        parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer.optimizer,
            "scheduler": self.lr_scheduler,
            "random": self._agents_random,
        }
        if self.accelerator.scaler is not None:
            parts["scaler"] = self.accelerator.scaler
        return Checkpoint(**parts)


def _mean(values: torch.Tensor) -> torch.Tensor:
    """The mean over the agents. It cannot be averaged as bits, so NaN is refused if SHOAL_CHECK_FINITE is set."""
    return allreduce(values, name=Internal("frameworks.mean"))


def _last_complete(output_dir: Path) -> str | None:
    """The last checkpoint whose Trainer's state, which is written last, is there, and of agents' states all."""
    last = get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None
    if last is None:
        return None
    steps = sorted(
        (int(path.name.rpartition("-")[2]), path) for path in output_dir.glob("checkpoint-*") if path.is_dir()
    )
    for _, folder in reversed(steps):
        agents = folder / AGENTS
        if _reads(folder / _STATE) and (not agents.is_dir() or find(agents, None)["found"]):
            return str(folder)
    return None


def _reads(state: Path) -> bool:
    try:
        TrainerState.load_from_json(str(state))
    except (OSError, ValueError):
        return False
    return True


def _check_model(model: torch.nn.Module) -> None:
    why = None
    if isinstance(model, DistributedDataParallel):
        why = "is in DistributedDataParallel, which averages gradients over a process group; give the one inside it"
    elif getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None):
        why = "is quantized, and the mean of quantized weights is no model; load it without quantization_config"
    elif getattr(model, "is_distributed_loading_by_transformers", False) or (getattr(model, "_tp_size", None) or 1) > 1:
        why = "is sharded over processes (distributed_config, tp_plan), and Shoal's agents have a whole model each"
    if why:
        raise ValueError(f"ShoalTrainer: the model {why}")


_STEPS_ELSEWHERE = {
    "lomo": "steps during the backward pass, without an optimizer's step() in which agents could average",
    "layerwise": "steps during the backward pass, without an optimizer's step() in which agents could average",
    "schedule_free": "keeps the model that is evaluated and the model that is trained in one place, in turn, and the "
    "agents would average whichever is there",
}


@dataclass
class ShoalTrainingArguments(TrainingArguments):
    """``transformers.TrainingArguments`` of an agent: its rank and the number of agents are Shoal's.

    It makes this process an agent (:func:`shoal.init`), if it is none yet, and opens no process group, for any
    launcher's variables. ``output_dir`` must be on a disk that all machines share. Another default:
    ``average_tokens_across_devices`` is off, since it makes all agents wait for all in every step.

    Raises:
        ValueError: An argument asks for something that agents with a model each cannot do; it says why.
    """

    average_tokens_across_devices: bool = field(
        default=False, metadata={"help": "Weigh each agent's loss by its tokens; all agents wait for all in each step."}
    )
    adam_accumulate: int = field(
        default=0,
        metadata={
            "help": "How many gradients AdamW's moments take in at a time (shoal.optim.AccumAdamW); 0: as many "
            "as there are agents, 1: plain AdamW."
        },
    )
    resume_from: str = field(
        default="own",
        metadata={
            "help": "What a checkpoint is resumed with: each agent's own state ('own'), or, with another number of "
            "agents, the mean of all that were saved ('consensus')."
        },
    )

    def __post_init__(self) -> None:
        self._refuse()
        super().__post_init__()
        if getattr(self.accelerator_config, "dispatch_batches", None):
            raise ValueError(f"accelerator_config: {NO_DISPATCH}")

    def _refuse(self) -> None:
        shared = [name for name in ("deepspeed", "fsdp", "parallelism_config") if getattr(self, name, None)]
        if shared:
            raise ValueError(
                f"ShoalTrainingArguments: {shared[0]}={getattr(self, shared[0])!r} shares one model between processes, "
                "and Shoal's agents have a model each. Leave it out"
            )
        for name, why in (
            ("auto_find_batch_size", "one agent would begin anew with smaller batches, and the others wait for it"),
            ("enable_jit_checkpoint", "an agent with a signal to end would save alone, and wait for the others"),
        ):
            if getattr(self, name, False):
                raise ValueError(f"ShoalTrainingArguments: {name}=True: {why}. Leave it out")
        if self.train_sampling_strategy == "batch_rebalance":
            raise ValueError(
                "ShoalTrainingArguments: train_sampling_strategy='batch_rebalance' gives agents batches of different "
                "sizes, and an average counts agents alike. Take 'random' or 'group_by_length'"
            )
        optim = str(getattr(self.optim, "value", self.optim))
        for part, why in _STEPS_ELSEWHERE.items():
            if part in optim:
                raise ValueError(f"ShoalTrainingArguments: optim={optim!r} {why}. Take another, such as 'adamw_torch'")
        if self.adam_accumulate < 0:
            raise ValueError(f"ShoalTrainingArguments: adam_accumulate={self.adam_accumulate} must be 0 or more")
        if self.resume_from not in ("own", "consensus"):
            raise ValueError(f"ShoalTrainingArguments: resume_from={self.resume_from!r} may be 'own' or 'consensus'")

    @cached_property
    def _setup_devices(self) -> torch.device:
        AcceleratorState._reset_state(reset_partial_state=True)  # one of other arguments may stand for another device
        self.distributed_state = process_state(cpu=self.use_cpu)
        device: torch.device = self.distributed_state.device
        self._n_gpu = 1 if device.type == "cuda" else 0
        return device

    @property
    def parallel_mode(self) -> Any:
        """One process with one device, as far as the Trainer wraps and reduces by itself, which it need not."""
        return ParallelMode.NOT_PARALLEL

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """The first agent (of each machine, if ``local``) runs the block before the others, as to prepare a dataset."""
        first = (self.local_process_index if local else self.process_index) == 0
        if not first:
            wait_for_everyone()
        try:
            yield
        finally:
            if first:
                wait_for_everyone()
