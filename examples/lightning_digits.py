"""Handwritten digits with Lightning: each agent trains a model of its own on its part of the images.

    shoal run --no-prefix -n 4 examples/lightning_digits.py --output out/lightning

Against a script for one process only the strategy differs. Each epoch the mean of all agents' models is validated, and
the best three are kept. ``--resume last`` goes on where it ended, bit for bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from shoal.frameworks.lightning import ConsensusDistance, ShoalStrategy


class Digits(L.LightningModule):
    """A perceptron that reads digits."""

    def __init__(self, lr: float = 0.1, steps: int = 1000) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
        self.accuracy = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("loss", loss)  # rank 0's own; sync_dist=True would wait for all agents in every step
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        images, labels = batch
        scores = self.net(images)  # of the mean model
        self.log("val_loss", cross_entropy(scores, labels), sync_dist=True, prog_bar=True)
        self.accuracy(scores.argmax(-1) == labels)
        self.log("accuracy", self.accuracy, prog_bar=True)  # a metric is of all agents by itself

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, self.hparams["steps"])
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


def main(args: argparse.Namespace) -> tuple[Digits, float]:
    L.seed_everything(args.seed, verbose=False)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    train, test = TensorDataset(images[:1344], labels[:1344]), TensorDataset(images[1344:], labels[1344:])
    kept = {"save_top_k": 3, "save_last": True, "enable_version_counter": False}
    best = ModelCheckpoint(args.output, "{epoch}", monitor="accuracy", mode="max", **kept)
    trainer = L.Trainer(
        strategy=ShoalStrategy(),
        accelerator="cpu",
        devices=1,
        max_epochs=args.epochs,
        logger=CSVLogger(args.output, name="logs"),
        callbacks=[best, EarlyStopping("val_loss", patience=5), ConsensusDistance()],
        enable_progress_bar=not args.quiet,
        enable_model_summary=False,
        log_every_n_steps=10,
    )
    model = Digits(steps=420)  # ten epochs of four agents
    resume = str(Path(args.output) / f"{args.resume}.ckpt") if args.resume else None
    trainer.fit(model, DataLoader(train, batch_size=8, shuffle=True), DataLoader(test, batch_size=64), ckpt_path=resume)
    accuracy = trainer.callback_metrics["accuracy"].item()
    if trainer.is_global_zero and not args.quiet:
        distance = trainer.callback_metrics["consensus_distance"].item()
        print(f"the mean model reads {accuracy:.2%} of the test images; agents are {distance:.2g} apart from it")
        print(f"the best is {best.best_model_path}")
    return model, accuracy


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", default="out/lightning", help="a folder that all machines share")
    parser.add_argument("--resume", default="", help="go on from this checkpoint of it: last, or epoch=3")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", action="store_true", help="no progress bar, and nothing at the end")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse())
