"""Lightning's modules and Trainers for its tests. Only agents import this."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch.nn.functional import cross_entropy

import shoal
from shoal.algorithms import ExactDiffusion, GradientTracking
from shoal.frameworks.lightning import ConsensusDistance, ShoalStrategy
from support.agent_main import die
from support.lightning_agents import TRAIN, VALID, network, params_of

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(pl.LightningModule):
    """A perceptron that writes down what it sees."""

    def __init__(
        self,
        optimizer: str = "sgd",
        lr: float = 0.2,
        dropout: float = 0.0,
        norm: bool = False,
        sync: bool = True,
        dies: int = -1,
        delay: float = 0.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = network(dropout, norm)
        self.metrics = torch.nn.ModuleDict({"accuracy": torchmetrics.MeanMetric(), "labels": torchmetrics.CatMetric()})
        self.automatic_optimization = optimizer != "two"
        self.seen: list[list[int]] = []
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.first: dict[str, Any] = {}
        self.dtypes: set[str] = set()

    def on_train_start(self) -> None:
        self.first = params_of(self.net)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.net(inputs)
        return result

    def training_step(self, batch: Any, number: int) -> torch.Tensor | None:
        inputs, labels, indices = batch
        if self.hparams["dies"] == shoal.rank() and self.global_step == 5:
            die()
        time.sleep(self.hparams["delay"] * shoal.rank())
        self.seen.append(indices.tolist())
        out = self(inputs)
        self.dtypes.add(str(out.dtype))
        loss = cross_entropy(out, labels)
        self.losses.append(loss.item())
        self.log("train_loss", loss, sync_dist=self.hparams["sync"])
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(cross_entropy(self(inputs), labels))
            optimizer.step()
        return None

    def validation_step(self, batch: Any, number: int) -> None:
        inputs, labels, _ = batch
        out = self(inputs)
        self.log("val_loss", cross_entropy(out, labels), sync_dist=self.hparams["sync"])
        self.metrics["accuracy"](out.argmax(-1) == labels)
        self.log("accuracy", self.metrics["accuracy"])
        self.metrics["labels"].update(labels)

    def on_validation_epoch_end(self) -> None:
        labels = self.metrics["labels"].compute()
        self.log("labels", labels.float().sum())
        self.metrics["labels"].reset()

    def test_step(self, batch: Any, number: int) -> None:
        self.validation_step(batch, number)

    def on_test_epoch_end(self) -> None:
        self.metrics["labels"].reset()

    def predict_step(self, batch: Any, number: int) -> torch.Tensor:
        result: torch.Tensor = self(batch[0])
        return result

    def configure_optimizers(self) -> Any:
        kind, lr = self.hparams["optimizer"], self.hparams["lr"]
        if kind == "sgd":
            return torch.optim.SGD(self.parameters(), lr=lr, momentum=0.5)
        if kind == "two":
            first, last = self.net[0].parameters(), self.net[-1].parameters()
            return [torch.optim.SGD(first, lr=lr), torch.optim.Adam(last, lr=lr / 10)]
        if kind == "lbfgs":
            return torch.optim.LBFGS(self.parameters())
        if kind == "plateau of steps":
            sgd = torch.optim.SGD(self.parameters(), lr=lr)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=0)
            config = {"scheduler": schedule, "monitor": "train_loss", "interval": "step", "frequency": 2}
            return {"optimizer": sgd, "lr_scheduler": config}
        adam = torch.optim.AdamW(self.parameters(), lr=lr / 10)
        if kind == "plateau":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=0, threshold=10.0)
            return {"optimizer": adam, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=40)
        return {"optimizer": adam, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


class Resumable(torch.utils.data.DataLoader[Any]):
    """A loader that can resume in the middle of an epoch."""

    _done = _skip = 0

    def __iter__(self) -> Any:
        batches, self._done, self._skip = super().__iter__(), self._skip, 0
        for _ in range(self._done):
            next(batches)
        return self._counted(batches)

    def _counted(self, batches: Any) -> Iterator[Any]:
        for batch in batches:
            self._done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self._done % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._skip = state["done"]


class Samples(pl.LightningDataModule):
    """The loaders, as LightningCLI asks for them."""

    def train_dataloader(self) -> Any:
        return loaders()[0]

    def val_dataloader(self) -> Any:
        return loaders()[1]


def loaders(
    batch: int = 2, workers: int = 0, resumable: bool = False, uneven: bool = False, dealt_out: bool = False
) -> tuple[Any, Any]:
    kind = Resumable if resumable else torch.utils.data.DataLoader
    samples = torch.utils.data.Subset(TRAIN, range(8 + 2 * shoal.rank())) if uneven else TRAIN
    sampler = shoal.data.AgentSampler(samples) if dealt_out else None
    train = kind(samples, batch_size=batch, sampler=sampler, shuffle=not dealt_out, num_workers=workers)
    return train, torch.utils.data.DataLoader(VALID, batch_size=3)


def _ring(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> shoal.DecentralizedOptimizer:
    ring = shoal.topology.RingGraph(shoal.size())
    return shoal.DecentralizedOptimizer(optimizer, module, ExactDiffusion(1.0, lazy=True), topology=ring)


def _overlapping(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> shoal.DecentralizedOptimizer:
    return shoal.DecentralizedOptimizer(
        optimizer, module, topology=shoal.topology.OnePeerExponential(shoal.size()), overlap="backward"
    )


def _tracking(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> shoal.DecentralizedOptimizer:
    return shoal.DecentralizedOptimizer(
        optimizer, module, GradientTracking(1.0), topology=shoal.topology.RingGraph(shoal.size())
    )


def _every_second(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> shoal.DecentralizedOptimizer:
    return shoal.DecentralizedOptimizer(optimizer, module, num_steps_per_communication=4)


WRAPPERS: dict[str, Any] = {
    "": None,
    "gradients": shoal.bluefog.DistributedGradientAllreduceOptimizer,
    "ring": _ring,
    "overlapping": _overlapping,
    "tracking": _tracking,
    "every second": _every_second,
    "with combine": shoal.bluefog.DistributedAdaptWithCombineOptimizer,
    "push-sum": shoal.optim.DistributedPushSumOptimizer,
    "mixed": lambda adam, module: shoal.DecentralizedOptimizer(adam, module, mix_state=("exp_avg_sq",)),
}


def strategy(wrapper: str = "") -> ShoalStrategy:
    return ShoalStrategy(WRAPPERS[wrapper])


def csv_logger(folder: str) -> CSVLogger:
    return CSVLogger(folder, name="logs", version="")


def trainer(
    folder: str,
    wrapper: str = "",
    checkpoint: dict[str, Any] | None = None,
    stop: dict[str, Any] | None = None,
    **options: Any,
) -> pl.Trainer:
    callbacks: list[Any] = [ConsensusDistance()]
    if checkpoint is not None:
        callbacks.append(ModelCheckpoint(dirpath=folder, **checkpoint))
    if stop is not None:
        callbacks.append(EarlyStopping(**stop))
    defaults: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": checkpoint is not None,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 1,
    }
    options = defaults | options
    callbacks += options.pop("callbacks", [])
    return pl.Trainer(
        strategy=strategy(wrapper), accelerator="cpu", default_root_dir=folder, callbacks=callbacks, **options
    )


def _fit(wrapper: str = "", optimizer: str = "sgd", **options: Any) -> Callable[[], None]:
    def run() -> None:
        trainer("/nowhere", wrapper, **options).fit(Net(optimizer=optimizer), *loaders())

    return run


CASES: dict[str, Callable[[], Any]] = {
    "devices": lambda: trainer("/nowhere", devices=2),
    "num_nodes": lambda: trainer("/nowhere", num_nodes=2),
    "sync_batchnorm": lambda: trainer("/nowhere", sync_batchnorm=True),
    "transformer-engine": lambda: strategy().__class__(precision_plugin=object()),
    "on exception": _fit(checkpoint={}, callbacks=[OnExceptionCheckpoint("/nowhere")]),
    "save_on_exception": _fit(checkpoint={"save_on_exception": True}),
    "weight averaging": _fit(callbacks=[StochasticWeightAveraging(0.1)]),
    "batch size": _fit(callbacks=[BatchSizeFinder()]),
    "lbfgs": _fit(optimizer="lbfgs"),
    "overlap and accumulation": _fit("overlapping", accumulate_grad_batches=2),
    "overlap and clipping": _fit("overlapping", gradient_clip_val=1.0),
    "closure and accumulation": _fit("tracking", accumulate_grad_batches=2),
}
