"""The agents' functions in the tests of Transformers' Trainer: train a language model of a few thousand numbers."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.trainer_callback import TrainerCallback

import shoal
from shoal.frameworks.transformers import ShoalTrainer, ShoalTrainingArguments

VOCABULARY, LENGTH = 40, 8
EVALUATED = 32
"""A batch of eight for each of four agents, so that the mean over batches is that over examples."""
Params = dict[str, np.ndarray[Any, Any]]
"""As arrays, since a tensor would go to the test through memory that both share."""


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count on from a first number, by a stride of their own."""

    def __init__(self, count: int) -> None:
        self.seen: list[int] = []
        first = torch.arange(count)[:, None]
        self._rows = (first + (1 + first % 5) * torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.seen.append(int(index))
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def small_model(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # which GPT-2 does not say itself, with a warning
    return model


class Recorder(TrainerCallback):  # type: ignore[misc]
    """The events that a Trainer sends to its callbacks."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.logs: list[dict[str, float]] = []
        self.evaluated: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        self.norms.append(torch.cat([one.flatten() for one in grads]).norm().item())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


class Recorded(ShoalTrainer):
    """A Trainer that keeps this agent's own losses."""

    own_losses: list[float]

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **options)
        self.own_losses.append(loss.item())
        return loss


@dataclass
class Trained:
    """What became of one agent."""

    seen: list[int]
    own_losses: list[float]
    logs: list[dict[str, float]]
    norms: list[float]
    params: Params
    moments: list[np.ndarray[Any, Any]]
    rounds: int
    steps: int
    wrapped: str
    optimizer: str
    has_group: bool
    drawn: float
    dtypes: set[str] = field(default_factory=set)


def params_of(model: torch.nn.Module) -> Params:
    return {name: param.detach().numpy().copy() for name, param in model.named_parameters()}


def trainer(folder: str, examples: int = 64, *, dropout: float = 0.0, wrapper: str = "", **options: Any) -> Recorded:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]  # as torchrun and shoal run set it
    defaults: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    made = Recorded(
        small_model(dropout),
        ShoalTrainingArguments(output_dir=folder, **(defaults | options)),
        train_dataset=Sequences(examples),
        eval_dataset=Sequences(EVALUATED),
        wrapper=getattr(shoal.bluefog, wrapper) if wrapper else None,
        callbacks=[Recorder()],
    )
    made.own_losses = []
    return made


def recorder_of(made: ShoalTrainer) -> Recorder:
    result: Recorder = next(one for one in made.callback_handler.callbacks if isinstance(one, Recorder))
    return result


def train(folder: str, resume: bool | str | None = None, **options: Any) -> Trained:
    """Train, where warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = trainer(folder, **options)
        dtypes: set[str] = set()
        made.model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda _m, _i, out: dtypes.add(str(out.dtype)))
        made.train(resume_from_checkpoint=resume)
    decentralized = made.optimizer.optimizer
    recorder = recorder_of(made)
    states = decentralized.state.values()
    return Trained(
        seen=made.train_dataset.seen,
        own_losses=made.own_losses,
        logs=recorder.logs,
        norms=recorder.norms,
        params=params_of(made.model),
        moments=[
            one.numpy().copy() for state in states for _, one in sorted(state.items()) if isinstance(one, torch.Tensor)
        ],
        rounds=decentralized.rounds,
        steps=made.state.global_step,
        wrapped=type(made.model_wrapped).__name__,
        optimizer=type(decentralized.optimizer).__name__,
        has_group=dist.is_initialized(),
        drawn=torch.rand(()).item(),
        dtypes=dtypes,
    )


def train_and_evaluate(folder: str, **options: Any) -> dict[str, Any]:
    """Train, evaluate and save; what was found, beside what it must be."""
    made = trainer(folder, **options)
    made.train()
    before = params_of(made.model)
    result = made.evaluate()
    after = params_of(made.model)
    made.save_model(f"{folder}/final")
    saved = GPT2LMHeadModel.from_pretrained(f"{folder}/final")
    best = made.state.best_model_checkpoint
    return {
        "loss": result["eval_loss"],
        "own": before,
        "unchanged": all(np.array_equal(before[name], after[name]) for name in before),
        "saved": params_of(saved),
        "best": best,
        "best_params": params_of(GPT2LMHeadModel.from_pretrained(best)) if best else {},
        "files": sorted(path.name for path in Path(folder).iterdir()),
        "first": made.is_world_process_zero(),
    }


def fails(options: dict[str, Any]) -> str:
    """With which error arguments are refused."""
    try:
        ShoalTrainingArguments(output_dir="out", **options)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"
