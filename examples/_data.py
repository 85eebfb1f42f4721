"""Scikit-learn's handwritten digits, dealt out unevenly: each agent has its own number of images and its own labels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit(
        "the digits come with scikit-learn, which is not installed. Run: pip install 'shoal[demo]'"
    ) from None

LABELS = 10
T = TypeVar("T")
_one_at_a_time = threading.Lock()


def seeded(seed: int, make: Callable[[], T]) -> T:
    """What `make` makes of the random numbers of a seed. Agents that are threads draw from one generator, in turn."""
    with _one_at_a_time:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed warns in threads, which take no turns elsewhere
        return make()


@dataclass(frozen=True)
class Images:
    """Images float32 [m, 1, 8, 8] with values in 0 to 1, and what they show, int64 [m]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of `size` without end: shuffled, and shuffled again when all images have been seen."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.empty(0, dtype=torch.int64)
        while True:
            while len(order) < size:
                order = torch.cat([order, torch.randperm(len(self), generator=generator)])
            chosen, order = order[:size], order[size:]
            yield self.images[chosen], self.labels[chosen]


@dataclass(frozen=True)
class Digits:
    """The same on every agent: who has which images, and the test images, which nobody trains on."""

    shards: list[Images]
    test: Images

    @property
    def total(self) -> int:
        return sum(len(shard) for shard in self.shards)

    def weight(self, rank: int) -> float:
        """What an agent multiplies its loss by, so that the mean over agents is the mean over all images.

        Agents count alike in an average, so without it an image in a small shard would count more than one in a large.
        """
        return len(self.shards) * len(self.shards[rank]) / self.total

    def counts(self) -> list[list[int]]:
        """Images of each label, [agents][labels]."""
        return [torch.bincount(shard.labels, minlength=LABELS).tolist() for shard in self.shards]


def load(agents: int, alpha: float, seed: int) -> Digits:
    """Deal three quarters of the digits out to `agents`, and keep a quarter for the test.

    Each label is divided in proportions drawn from a Dirichlet distribution (Hsu, Qi, Brown 2019, arXiv:1909.06335):
    small `alpha` gives an agent few labels, large `alpha` about the same share of all.
    """
    digits = load_digits()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(digits.target))
    images = torch.from_numpy(digits.images[order]).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(digits.target[order]).long()
    held_out = len(order) // 4
    train = np.arange(held_out, len(order))

    parts: list[list[int]] = [[] for _ in range(agents)]
    for label in range(LABELS):
        of_label = train[labels[held_out:].numpy() == label]
        cuts = np.cumsum(rng.dirichlet([alpha] * agents))[:-1] * len(of_label)
        for part, dealt in zip(parts, np.split(of_label, cuts.astype(int)), strict=True):
            part.extend(dealt.tolist())
    for part in parts:
        if not part:  # an agent must have something to learn from
            part.append(max(parts, key=len).pop())
    return Digits([Images(images[part], labels[part]) for part in parts], Images(images[:held_out], labels[:held_out]))
