"""What the forms of Adam are tried on: three tasks, each for several runs of n agents at once, as rows."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy

from shoal.data import dirichlet_shards
from shoal.sim.networks import StackedModel, loss_of

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


@dataclass
class Task:
    """A model, and of each run the samples of each agent.

    Attributes:
        inputs, targets: What is trained on, ``[samples, ...]``, for each run.
        tests: Inputs and targets that nobody trains on, for each run.
        shards: Of each run the numbers of each agent's samples.
        model: Where all agents begin.
        batch: Samples of an agent in a step.
        seeds: Of the draws of each run.
    """

    unit: ClassVar[str] = "%"
    better: ClassVar[int] = 1

    inputs: list[Tensor]
    targets: list[Tensor]
    tests: list[tuple[Tensor, Tensor]]
    shards: list[list[Tensor]]
    model: nn.Module
    batch: int
    seeds: list[int]

    def __post_init__(self) -> None:
        self.runs, self.agents = len(self.shards), len(self.shards[0])
        self._stacked = StackedModel(self.model, self.runs * self.agents)
        loss = loss_of(self.model, self.criterion)
        self._gradient = vmap(grad(loss))
        # The mean over agents of their losses is then the mean over all samples (AgentSampler.weight).
        held = torch.tensor([[float(len(one)) for one in shards] for shards in self.shards])
        self._weights = (held / held.mean(1, keepdim=True)).unsqueeze(-1)

    @staticmethod
    def criterion(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets)

    def start(self) -> Tensor:
        """``[runs, n, d]``; the draws of samples begin anew, so that they are the same for every method."""
        self._chance = [torch.Generator().manual_seed(seed) for seed in self.seeds]
        return self._stacked.start.view(self.runs, self.agents, -1).clone()

    def gradient(self, x: Tensor) -> Tensor:
        """Each agent's at its own row, on samples drawn anew."""
        chosen = [
            shard[torch.randint(len(shard), (self.batch,), generator=chance)]
            for shards, chance in zip(self.shards, self._chance, strict=True)
            for shard in shards
        ]
        of_run = [run for run in range(self.runs) for _ in range(self.agents)]
        inputs = torch.stack([self.inputs[run][some] for run, some in zip(of_run, chosen, strict=True)])
        targets = torch.stack([self.targets[run][some] for run, some in zip(of_run, chosen, strict=True)])
        found: Tensor = self._gradient(x.flatten(0, 1), inputs, targets).view_as(x)
        return found * self._weights

    def score(self, x: Tensor) -> list[float]:
        """Of each run, the mean over its agents' own models."""
        found = []
        for run, (inputs, targets) in enumerate(self.tests):
            each = [self._score_of(one, inputs, targets) for one in x[run]]
            found.append(sum(each) / len(each))
        return found

    @torch.no_grad()
    def _score_of(self, x: Tensor, inputs: Tensor, targets: Tensor) -> float:
        outputs = self._stacked.module(x)(inputs)
        return 100 * (outputs.argmax(-1) == targets).double().mean().item()


def digits(agents: int, seeds: list[int], alpha: float) -> Task:
    """Scikit-learn's 1797 digits, a quarter for the test, and a perceptron."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(found.target)
    inputs, targets, tests, shards = [], [], [], []
    for seed in seeds:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        train, test = order[449:], order[:449]
        inputs.append(images[train])
        targets.append(labels[train])
        tests.append((images[test], labels[test]))
        shards.append(dirichlet_shards(labels[train], agents, alpha=alpha, seed=seed))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return Task(inputs, targets, tests, shards, model, 16, seeds)


def cifar10(agents: int, seeds: list[int], alpha: float, folder: str) -> Task:
    """CIFAR-10, 2000 images of the test, and a small convolutional network with group normalisation."""
    from _cifar10 import load  # type: ignore[import-not-found]

    train, test = load(folder)
    pixels, labels = train.pixels.float().sub_(120).div_(64), train.labels
    held = (test.pixels[:2000].float().sub_(120).div_(64), test.labels[:2000])
    shards = [dirichlet_shards(labels, agents, alpha=alpha, seed=seed) for seed in seeds]
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4 * 4, 10))
    return Task([pixels] * len(seeds), [labels] * len(seeds), [held] * len(seeds), shards, model, 32, seeds)


class Text(Task):
    """Each agent has a part of a text of its own; in bits for each character."""

    unit, better = "bits", -1

    @staticmethod
    def criterion(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def _score_of(self, x: Tensor, inputs: Tensor, targets: Tensor) -> float:
        return self.criterion(self._stacked.module(x)(inputs), targets).item() / log(2)


def text(agents: int, seeds: list[int], file: str) -> Task:
    """A text, which follows itself from agent to agent, and the GPT of examples/train_gpt.py, smaller."""
    from train_gpt import GPT  # type: ignore[import-not-found]

    context = 64
    content = Path(file).read_text()
    number_of = {character: number for number, character in enumerate(sorted(set(content)))}
    numbers = torch.tensor([number_of[character] for character in content])
    train, test = numbers[: len(numbers) * 9 // 10], numbers[len(numbers) * 9 // 10 :]
    windows, following = train.unfold(0, context, 1)[:-1], train.unfold(0, context, 1)[1:]
    length = len(windows) // agents
    shards = [torch.arange(agent * length, (agent + 1) * length - context) for agent in range(agents)]
    tiles = test[: 128 * context + 1]
    held = (tiles[:-1].view(-1, context), tiles[1:].view(-1, context))
    model = GPT(len(number_of), context, width=64, layers=2, heads=4, seed=0)
    many = len(seeds)
    return Text([windows] * many, [following] * many, [held] * many, [shards] * many, model, 8, seeds)
