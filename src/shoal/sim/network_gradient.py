"""The gradients of a fleet's networks on batches of a dataset, with weight decay and running statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.func import grad, vmap

from ..algorithms.algorithm import Gradient
from ..algorithms.mix import Mix
from ..algorithms.runs.gradients import Augment, Batches, augmented

Statistics = dict[str, torch.Tensor]
"""Running statistics by the name of their buffer, ``[n, ...]``."""
Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes outputs and targets, gives a tensor of one number."""


class NetworkFunction(Protocol):
    """A network's output, from its parameters ``[d]``, inputs, and the running statistics, which it updates."""

    def __call__(self, x: torch.Tensor, inputs: torch.Tensor, statistics: Statistics | None = None) -> torch.Tensor: ...


@dataclass(frozen=True)
class Networks:
    """The networks of all agents.

    Attributes:
        call: The output of one of them.
        statistics: Their running statistics, which a call updates.
        begin: Sets the statistics to those of the module, before the first gradient of a run.
    """

    call: NetworkFunction
    statistics: Statistics
    begin: Callable[[], None]


@dataclass(frozen=True)
class Samples:
    """A dataset, and each agent's part of it.

    Attributes:
        inputs: ``[m, ...]``.
        targets: ``[m, ...]``.
        parts: The indices of each agent's samples, int64 ``[m_i]``.
        batches: Draws the positions within a part.
        augment: Changes the inputs of a batch.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    parts: list[torch.Tensor]
    batches: Batches
    augment: Augment | None


class NetworkGradient(Gradient):
    """What :meth:`shoal.sim.StackedModel.gradient` returns.

    Attributes:
        epoch_steps: How many gradients each agent takes in a pass over its part, int64 ``[n]``.
    """

    def __init__(
        self, networks: Networks, samples: Samples, criterion: Criterion, decay: float | torch.Tensor, vectorize: bool
    ) -> None:
        self._networks, self._samples, self._criterion = networks, samples, criterion
        self._padded = torch.nn.utils.rnn.pad_sequence(samples.parts, batch_first=True)
        self._decay, self._vectorize = decay, vectorize
        self._sample: tuple[torch.Tensor, torch.Tensor] | None = None
        self.epoch_steps = samples.batches.per_epoch
        super().__init__(self._of_sample, self._of_all, self._choose, self._losses)

    def _choose(self, mix: Mix) -> None:
        if mix.gradients == 0:
            self._networks.begin()
        samples = self._samples
        agents, size = len(samples.parts), samples.batches.size
        chosen = self._padded.gather(1, samples.batches(mix)).flatten()
        inputs = samples.inputs[chosen.to(samples.inputs.device)]
        inputs = augmented(samples.augment, inputs, mix, agents)
        targets = samples.targets[chosen.to(samples.targets.device)]
        of_agents = (one.reshape(agents, size, *one.shape[1:]) for one in (inputs, targets))
        self._sample = next(of_agents), next(of_agents)

    def _of_sample(self, x: torch.Tensor) -> torch.Tensor:
        return self._decayed(x, self._gradients(x, *self._drawn(), self._networks.statistics))

    def _gradients(
        self, x: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, statistics: Statistics
    ) -> torch.Tensor:
        """The gradients on samples ``[n, batch, ...]``, which enter the statistics."""
        if not self._vectorize:
            rows = zip(x, inputs, targets, strict=True)
            return torch.stack([self._alone(*row, _row(statistics, rank)) for rank, row in enumerate(rows)])

        def loss(
            x: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, mine: Statistics
        ) -> tuple[torch.Tensor, Statistics]:
            return self._criterion(self._networks.call(x, inputs, mine), targets), mine

        # The transforms may not change their arguments in place, so they get copies and return them.
        found, after = vmap(grad(loss, has_aux=True))(x, inputs, targets, _copied(statistics))
        for name, one in after.items():
            statistics[name].copy_(one)
        gradients: torch.Tensor = found
        return gradients

    def _alone(
        self, x: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, statistics: Statistics
    ) -> torch.Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            loss = self._criterion(self._networks.call(at, inputs, statistics), targets)
        return torch.autograd.grad(loss, at)[0]

    def _of_all(self, x: torch.Tensor) -> torch.Tensor:
        """On each agent's whole part as one batch, which enters no statistics."""
        found = []
        for rank, (row, part) in enumerate(zip(x, self._samples.parts, strict=True)):
            inputs, targets = (data[part.to(data.device)] for data in (self._samples.inputs, self._samples.targets))
            found.append(self._alone(row, inputs, targets, _copied(_row(self._networks.statistics, rank))))
        return self._decayed(x, torch.stack(found))

    def _losses(self, x: torch.Tensor) -> torch.Tensor:
        """Without the term of weight decay; the samples enter no statistics."""

        def loss(x: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, mine: Statistics) -> torch.Tensor:
            return self._criterion(self._networks.call(x, inputs, mine), targets)

        found = each_row(loss, self._vectorize)(x, *self._drawn(), _copied(self._networks.statistics))
        return found.detach()

    def _decayed(self, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(self._decay, torch.Tensor):
            return gradient + self._decay * x
        return gradient.add(x, alpha=self._decay) if self._decay else gradient

    def _drawn(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._sample is None:
            raise ValueError("no batch has been drawn: pass this gradient to StackedFleet.run")
        return self._sample


def each_row(function: Callable[..., torch.Tensor], vectorize: bool) -> Callable[..., torch.Tensor]:
    """The function of one agent's tensors, and of a dict of them, on all agents' at once or one after the other."""
    if vectorize:
        found: Callable[..., torch.Tensor] = vmap(function)
        return found

    def one_by_one(*arguments: torch.Tensor | Statistics) -> torch.Tensor:
        def of(rank: int) -> list[torch.Tensor | Statistics]:
            return [_row(one, rank) if isinstance(one, Mapping) else one[rank] for one in arguments]

        return torch.stack([function(*of(rank)) for rank in range(len(arguments[0]))])

    return one_by_one


def _row(statistics: Statistics, rank: int) -> Statistics:
    return {name: one[rank] for name, one in statistics.items()}


def _copied(statistics: Statistics) -> Statistics:
    return {name: one.clone() for name, one in statistics.items()}
