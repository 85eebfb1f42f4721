"""The BlueFog paper's figure 12 and table II in small: speed and accuracy on four hosts of two agents. An agent's part.

The model learns scikit-learn's handwritten digits. Its first linear layer is wide, so that communication matters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from _models import Batch, digits_net, nbytes_of
from _ways import (
    HIERARCHICAL_ATC,
    HIERARCHICAL_AWC,
    LOCAL,
    ONE_PEER,
    DataParallel,
    Trainer,
    alone,
    decentralized,
    synchronous,
)
from shoal.bench.measurement import Case, Figures, Reporter, compare

BATCH, LR = 16, 0.05
TARGET = 0.97
"""Accuracy of the average model, the time to which is told."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    width: int
    seeds: int
    epochs: int
    repetitions: int
    calls: int


FULL, QUICK = Size(2048, 3, 15, 7, 6), Size(16, 1, 1, 2, 1)


def ways() -> dict[str, Callable[[nn.Module], Trainer]]:
    """What is compared, by name."""
    found: dict[str, Callable[[nn.Module], Trainer]] = {"DDP": partial(DataParallel(static_graph=True), lr=LR)}
    return found | {
        way: partial(decentralized, way, lr=LR) for way in (*synchronous(), HIERARCHICAL_ATC, HIERARCHICAL_AWC)
    }


def one_agent(reporter: Reporter, quick: bool) -> list[Figures]:
    """A step of one agent that has the machine to itself."""
    size = QUICK if quick else FULL
    trainer = alone(digits_net(size.width), lr=LR)
    batch = next(Digits(0).batches(0, 1))
    cases: dict[str, Case] = {LOCAL: lambda: trainer.step(batch)}
    seconds = compare(reporter, "one agent", cases, size.repetitions, size.calls)
    return [Figures("table2: one agent", nbytes_of(trainer.model), 1, seconds)]


def table2(reporter: Reporter, quick: bool) -> list[Figures]:
    """Steps of each way in turn, and then whole trainings, from several first weights."""
    size = QUICK if quick else FULL
    return [_speed(reporter, size), *(_learning(reporter, size, seed) for seed in range(size.seeds))]


def _speed(reporter: Reporter, size: Size) -> Figures:
    batch = next(Digits(0).batches(shoal.rank(), shoal.size()))
    trainers = {LOCAL: alone(digits_net(size.width), lr=LR)}
    trainers |= {way: make(digits_net(size.width)) for way, make in ways().items()}
    cases = {way: partial(_step, way, trainer, batch) for way, trainer in trainers.items()}
    seconds = compare(reporter, "four hosts of two agents", cases, size.repetitions, size.calls)
    nbytes = nbytes_of(trainers[LOCAL].model)
    for trainer in trainers.values():
        trainer.close()
    return Figures("table2", nbytes, shoal.size(), seconds)


def _learning(reporter: Reporter, size: Size, seed: int) -> Figures:
    """Accuracy after each epoch, and the seconds of training until then; the same batches for all ways."""
    digits = Digits(seed)
    steps = digits.steps(shoal.size())
    values: dict[str, list[float]] = {}
    for way, make in ways().items():
        trainer = make(digits_net(size.width, seed))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, size.epochs * steps)
        batches = digits.batches(shoal.rank(), shoal.size())
        total, taken, accuracy, worst = 0.0, [], [], []
        for epoch in range(size.epochs):
            reporter.progress(f"{way}, seed {seed}", epoch, size.epochs)
            dist.barrier()
            began = time.monotonic()
            for _ in range(steps):
                _step(way, trainer, next(batches))
                scheduler.step()
            total += _most(time.monotonic() - began)
            taken.append(total)
            worst.append(-_most(-digits.accuracy(trainer.model)))
            with shoal.consensus(trainer.model):
                accuracy.append(digits.accuracy(trainer.model))
        trainer.close()
        values |= {f"{way}: seconds": taken, f"{way}: accuracy": accuracy, f"{way}: worst agent": worst}
    return Figures(f"table2: seed {seed}", nbytes_of(digits_net(size.width)), shoal.size(), values)


def _step(way: str, trainer: Trainer, batch: Batch) -> None:
    if way in (HIERARCHICAL_ATC, HIERARCHICAL_AWC):
        trainer.round(ONE_PEER, between_machines=True)
        trainer.step(batch)
    else:
        trainer.step(batch, ONE_PEER if way in synchronous() else "")


def _most(value: float) -> float:
    most = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


class Digits:
    """Images [m, 1, 8, 8] of 0 to 1 and what they show; three quarters to learn from, a quarter to test.

    Args:
        seed: of the batches. Which images are for the test does not depend on it.
    """

    def __init__(self, seed: int) -> None:
        from sklearn.datasets import load_digits

        found = load_digits()
        order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
        images = torch.from_numpy(found.images).float().div(16).unsqueeze(1)[order]
        labels = torch.from_numpy(found.target).long()[order]
        held_out = len(order) // 4
        self._test, self._train = (images[:held_out], labels[:held_out]), (images[held_out:], labels[held_out:])
        self._seed = seed

    def steps(self, agents: int) -> int:
        """Of an epoch, in which all agents together see each image once."""
        return len(self._train[1]) // (agents * BATCH)

    def batches(self, rank: int, agents: int) -> Iterator[Batch]:
        """This agent's, without end: in each epoch all images are dealt out anew."""
        images, labels = self._train
        generator = torch.Generator().manual_seed(self._seed)
        while True:
            order = torch.randperm(len(labels), generator=generator)
            for step in range(self.steps(agents)):
                first = (step * agents + rank) * BATCH
                chosen = order[first : first + BATCH]
                yield images[chosen], labels[chosen]

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """The part of the test images that a model reads right."""
        images, labels = self._test
        answers: Tensor = model(images)
        return (answers.argmax(dim=1) == labels).double().mean().item()
