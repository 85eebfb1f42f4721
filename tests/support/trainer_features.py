"""The agents' functions in the tests of Transformers' Trainer with streams, checkpoints and common options."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_utils import EvalPrediction

from shoal.frameworks.transformers import ShoalTrainingArguments
from support.trainer_agents import VOCABULARY, Params, Recorded, Sequences, params_of, small_model

Row = dict[str, torch.Tensor]
DEFAULTS: dict[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "learning_rate": 1e-2,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "num_train_epochs": 1,
}


class Stream(torch.utils.data.IterableDataset[Row]):
    """Sequences without a length."""

    def __init__(self, count: int) -> None:
        self.rows = Sequences(count)
        self._count = count

    def __iter__(self) -> Iterator[Row]:
        for index in range(self._count):
            yield self.rows[index] | {"number": torch.tensor(index)}


class Ragged(torch.utils.data.Dataset[Row]):
    """Sequences of different lengths."""

    def __init__(self, count: int) -> None:
        self.seen: list[int] = []
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        if index >= self._count:
            raise IndexError(index)
        self.seen.append(int(index))
        row = (torch.arange(2 + index % 7) + index) % VOCABULARY
        return {"input_ids": row, "labels": row}


def padded(rows: list[Row]) -> Row:
    def together(name: str, value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], True, value)

    return {"input_ids": together("input_ids", 0), "labels": together("labels", -100)}


class Numbered(Recorded):
    """Keeps which samples of a stream this agent trained on."""

    numbers: list[int]

    def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> torch.Tensor:
        if "number" in inputs:
            self.numbers += inputs.pop("number").tolist()
        return super().training_step(model, inputs, *args, **options)


class Watching(TrainerCallback):  # type: ignore[misc]
    """Records its process index, and the state at the start of training."""

    def __init__(self) -> None:
        self.places: set[tuple[bool, bool]] = set()
        self.begun: dict[str, Any] = {}
        self.dies_after = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        decentralized = found["optimizer"].optimizer
        self.begun = {
            "step": state.global_step,
            "params": params_of(found["model"]),
            "moments": moments_of(decentralized),
            "rounds": decentralized.rounds,
            "lr": found["lr_scheduler"].get_last_lr()[0],
        }

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.places.add((state.is_world_process_zero, state.is_local_process_zero))
        if state.global_step == self.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)


def moments_of(optimizer: torch.optim.Optimizer) -> list[np.ndarray[Any, Any]]:
    states = optimizer.state.values()
    return [one.numpy().copy() for state in states for _, one in sorted(state.items()) if isinstance(one, torch.Tensor)]


def made(
    folder: str, train: Any = None, evaluate: Any = None, dropout: float = 0.0, given: Any = None, **options: Any
) -> tuple[Numbered, Watching]:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]  # as torchrun and shoal run set it
    torch.set_num_threads(1)
    watching = Watching()
    trainer = Numbered(
        small_model(dropout),
        ShoalTrainingArguments(folder, **(DEFAULTS | options)),
        train_dataset=Sequences(32) if train is None else train,
        eval_dataset=evaluate,
        callbacks=[watching],
        **(given or {}),
    )
    trainer.own_losses, trainer.numbers = [], []
    return trainer, watching


def stream(folder: str, count: int, resume: str | None = None, **options: Any) -> dict[str, Any]:
    """Train on a stream."""
    trainer, _ = made(folder, Stream(count), remove_unused_columns=False, **options)
    trainer.train(resume_from_checkpoint=resume)
    return {
        "numbers": trainer.numbers,
        "steps": trainer.state.global_step,
        "rounds": trainer.optimizer.optimizer.rounds,
        "losses": trainer.own_losses,
        "params": params_of(trainer.model),
    }


def accuracy(found: EvalPrediction) -> dict[str, Any]:
    right = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "labels": found.label_ids.tolist()}


def evaluations(folder: str) -> dict[str, Any]:
    """21 sequences evaluated in several ways; the last round of 8 is not full."""
    results: dict[str, Any] = {}
    given = {"compute_metrics": accuracy}
    for name, options in (("plain", {}), ("accumulated", {"eval_accumulation_steps": 1})):
        results[name] = made(folder, evaluate=Sequences(21), given=given, **options)[0].evaluate()
    trainer, _ = made(folder, given=given)
    for name, dataset in (("predicted", Sequences(21)), ("stream", Stream(21)), ("full stream", Stream(24))):
        result = trainer.predict(dataset)
        results[name] = result.predictions
        results[f"{name} metrics"] = result.metrics
    ragged, _ = made(folder, evaluate=Ragged(21), given={"data_collator": padded, "compute_metrics": _tokens})
    results["tokens"] = ragged.evaluate()["eval_tokens"]
    return results


def _tokens(found: EvalPrediction) -> dict[str, Any]:
    """The number of labels that are not padding, and their sum."""
    real = found.label_ids[found.label_ids >= 0]
    return {"tokens": (len(real), int(real.sum()))}


def conveniences(folder: str) -> dict[str, Any]:
    """Early stopping with the best model at the end, callbacks that ask where they are, TensorBoard."""
    os.environ["TENSORBOARD_LOGGING_DIR"] = f"{folder}/board"
    stops = EarlyStoppingCallback(1, early_stopping_threshold=100.0)
    trainer, watching = made(
        folder,
        evaluate=Sequences(20),
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=2,
        save_steps=2,
        logging_steps=1,
        load_best_model_at_end=True,
        num_train_epochs=5,
        report_to="tensorboard",
        torch_compile=False,
    )
    trainer.add_callback(stops)
    trainer.train()
    return {
        "steps": trainer.state.global_step,
        "best": trainer.state.best_model_checkpoint,
        "losses": [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log],
        "params": params_of(trainer.model),
        "places": watching.places,
        "boards": [path.name for path in Path(folder, "board").iterdir()],
    }


def recomputing(folder: str) -> list[list[float]]:
    """The losses without and with gradient checkpointing, of both kinds."""
    results = []
    for options in (
        {},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
    ):
        trainer, _ = made(folder, dropout=0.2, **options)
        trainer.train()
        results.append(trainer.own_losses)
    return results


def train(
    folder: str,
    resume: str | bool | None = None,
    by_length: bool = False,
    killed: tuple[int, int] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Two epochs of 32 sequences, saved every third step; what training began with, and what came of it.

    Args:
        folder: For checkpoints.
        resume: As of ``Trainer.train``.
        by_length: Take sequences of different lengths, and batches of similar ones.
        killed: The rank of an agent that kills itself, and after which step.
        options: Of the arguments.
    """
    sizes: dict[str, Any] = {"train_sampling_strategy": "group_by_length"} if by_length else {}
    data: Any = Ragged(32) if by_length else Sequences(32)
    given = {"data_collator": padded} if by_length else {}
    options = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3} | sizes | options
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer, watching = made(folder, data, dropout=0.2, given=given, **options)
        if killed is not None and os.environ["RANK"] == str(killed[0]):
            watching.dies_after = killed[1]
        trainer.train(resume_from_checkpoint=resume)
    return {
        "begun": watching.begun,
        "seen": data.seen,
        "losses": trainer.own_losses,
        "params": params_of(trainer.model),
        "moments": moments_of(trainer.optimizer.optimizer),
        "steps": trainer.state.global_step,
    }


def same(left: Params, right: Params) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)
