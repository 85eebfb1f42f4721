"""The arguments of a decentralized Trainer: the arguments of Transformers, without options that share one model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers import TrainingArguments
from transformers.training_args import ParallelMode

from .process_state import process_state, wait_for_everyone

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
            raise ValueError(
                "accelerator_config: dispatch_batches=True sends all samples from rank 0 over a process group, and "
                "there is none. Leave it out: each agent then takes its own part of the dataset"
            )

    def _refuse(self) -> None:
        shared = [name for name in ("deepspeed", "fsdp", "parallelism_config") if getattr(self, name, None)]
        if shared:
            raise ValueError(
                f"ShoalTrainingArguments: {shared[0]}={getattr(self, shared[0])!r} shares one model between processes, "
                "and Shoal's agents have a model each. Leave it out"
            )
        for name, why in (
            ("auto_find_batch_size", "one agent would begin anew with smaller batches, and the others wait for it"),
            ("enable_jit_checkpoint", "an agent that is told to end would save alone, and wait for the others"),
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
