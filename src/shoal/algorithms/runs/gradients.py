"""The gradients of a loss on all of an agent's samples, or on batches that are drawn from one seed.

The loss is written for one agent, ``loss(x, *data)`` with ``x`` ``[d]``, and gives a number. ``torch.func`` makes the
gradients of one agent, and those of a stacked fleet at once. The samples of a batch depend on the seed, the agent and
the number of the batch, and on nothing else. So a simulated and a real agent take the same samples, and a resumed run
continues the pass that it had begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import torch
from torch.func import grad, vmap

from ..algorithm import Gradient
from ..mix import Mix

Augment = Callable[[torch.Tensor, Callable[[int], torch.Tensor]], torch.Tensor]
"""``augment(inputs, uniform)``: ``inputs`` are samples ``[m, ...]``, and the result has their shape or another.

``uniform(k)`` gives new random numbers in [0, 1) for each sample, float32 ``[m, k]``. The samples of all simulated
agents come in one call and those of a real agent in a call of its own, so the function must treat each by itself.
"""
_SAMPLES, _ORDERS, _AUGMENT = 0, 1, 2
"""The uses of random numbers."""


class Batches:
    """Chooses the samples of each batch.

    Args:
        lengths: How many samples each agent has: of all agents in a stacked fleet, of one in a real agent.
        size: Samples of a batch.
        epochs: Take all samples of a part once, in a random order, before any comes again. Samples at the end that
            do not fill a batch are left out of that pass. If False, samples are drawn with replacement.

    Attributes:
        per_epoch: Batches of a pass, for each agent, int64 ``[n]``.

    Raises:
        ValueError: ``size`` is no count, or an agent has no sample, or in passes fewer than a batch.
    """

    def __init__(self, lengths: Sequence[int], size: int, epochs: bool) -> None:
        fewest = min(lengths, default=0)
        if size < 1 or fewest < (size if epochs else 1):
            raise ValueError(
                f"batch={size}: pass a number of samples, and the data that they are drawn from; the smallest part "
                f"has {fewest}" + (", and a pass over it needs a batch at least" if epochs else "")
            )
        self.size, self._epochs = size, epochs
        self._lengths = torch.tensor(lengths, device="cpu").unsqueeze(1)
        self.per_epoch = (self._lengths // size).squeeze(1)
        self._orders = torch.empty(len(lengths), max(lengths), dtype=torch.int64, device="cpu")
        self._epoch_of_orders: list[tuple[int, int] | None] = [None] * len(lengths)

    def __call__(self, mix: Mix) -> torch.Tensor:
        """The places of the samples of the next batch in each agent's part, int64 ``[n, size]``, on the CPU."""
        number = mix.gradients
        if not self._epochs:
            like = torch.empty(len(self._lengths), self.size, dtype=torch.float64, device="cpu")
            return (_numbers(mix, number, _SAMPLES, like) * self._lengths).long()
        epochs, begins = number // self.per_epoch, number % self.per_epoch * self.size
        wanted = [(mix.seed, epoch) for epoch in epochs.tolist()]
        for key in dict.fromkeys(wanted):
            rows = [row for row, other in enumerate(wanted) if other == key != self._epoch_of_orders[row]]
            if rows:
                self._orders[rows] = self._shuffled(mix, key[1])[rows]
                for row in rows:
                    self._epoch_of_orders[row] = key
        return self._orders.gather(1, begins.unsqueeze(1) + torch.arange(self.size, device="cpu"))

    def _shuffled(self, mix: Mix, epoch: int) -> torch.Tensor:
        """A random order of each part, first in its row, int64 ``[n, longest]``."""
        like = torch.empty(self._orders.shape, dtype=torch.float64, device="cpu")
        numbers = _numbers(mix, epoch, _ORDERS, like)
        beyond = torch.arange(like.shape[1], device="cpu") >= self._lengths
        return numbers.masked_fill(beyond, 2.0).argsort(dim=1, stable=True)


def augmented(augment: Augment | None, inputs: torch.Tensor, mix: Mix, agents: int) -> torch.Tensor:
    """The inputs of the next batch after augmentation.

    Args:
        augment: As :data:`Augment`; None leaves the inputs as they are.
        inputs: ``[agents * batch, ...]``, the agents' samples one after the other.
        mix: It has the number of the batch and the seed.
        agents: How many agents the samples belong to.
    """
    if augment is None:
        return inputs
    uses, number = count(_AUGMENT), mix.gradients

    def uniform(k: int) -> torch.Tensor:
        like = torch.empty(agents, len(inputs) // agents * k, device=inputs.device)
        return _numbers(mix, number, next(uses), like).view(len(inputs), k)

    return augment(inputs, uniform)


def _numbers(mix: Mix, number: int, use: int, like: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1), ``[n, d]``, for one use in a batch or an epoch; a real agent has one row."""
    if not mix.stacked:
        return mix.of_batch(number, use, like[0]).unsqueeze(0)
    return mix.of_batch(number, use, like)


def flipped_and_shifted(pad: int = 4) -> Augment:
    """The augmentation of CIFAR images in He et al. 2016 (arXiv:1512.03385), section 4.2, and much work since.

    An image gets ``pad`` black pixels on each side, and a crop of the first size is taken at a random place; half of
    the images are mirrored.

    Returns:
        A function for ``augment``: images ``[m, channels, height, width]``, floating or integer, in and out.
    """

    def augment(images: torch.Tensor, uniform: Callable[[int], torch.Tensor]) -> torch.Tensor:
        m, _, height, width = images.shape
        chance = uniform(3)
        places = (chance[:, :2] * (2 * pad + 1)).long()
        rows = places[:, :1] + torch.arange(height, device=images.device)
        columns = torch.arange(width, device=images.device).expand(m, width)
        columns = places[:, 1:] + torch.where(chance[:, 2:] < 0.5, columns.flip(1), columns)
        padded = torch.nn.functional.pad(images, (pad, pad, pad, pad)).permute(0, 2, 3, 1)
        of_image = torch.arange(m, device=images.device)[:, None, None]
        return padded[of_image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

    return augment


Loss = Callable[..., torch.Tensor]


def own(
    loss: Loss, *data: torch.Tensor, batch: int | None = None, epochs: bool = False, augment: Augment | None = None
) -> Gradient:
    """The gradient of one real agent.

    Args:
        loss: ``loss(x, *data)``: ``x`` is ``[d]``, each of ``data`` ``[samples, ...]``; a tensor of one number.
        data: This agent's.
        batch: Samples for each gradient, the same ones in a stacked run of the same seed; all of the data if not given.
            Every gradient in a step gets a batch of its own.
        epochs: Take batches in passes over the data, each pass in a new random order of the agent's own; samples that
            do not fill the last batch of a pass are left out of it. If False, samples are drawn with replacement.
        augment: Changes the first of the data of each batch, such as :func:`shoal.sim.flipped_and_shifted`; ``full``
            does without it.

    Raises:
        ValueError: Data of different lengths, or a batch that is no count or that the data do not fill.
    """
    _check(data, 0, batch)
    gradient = grad(loss)
    draw, sample = _sampler([tensor.unsqueeze(0) for tensor in data], batch, epochs, augment)
    return Gradient(
        lambda x: gradient(x, *(tensor[0] for tensor in sample)),
        lambda x: gradient(x, *data),
        draw,
        lambda x: loss(x, *(tensor[0] for tensor in sample)),
    )


def per_agent(
    loss: Loss, *data: torch.Tensor, batch: int | None = None, epochs: bool = False, augment: Augment | None = None
) -> Gradient:
    """The gradients of a stacked fleet: row i is agent i's, at row i of ``x``, on row i of the data.

    Args:
        loss: As for :func:`own`.
        data: Each ``[n, samples, ...]``.
        batch: As for :func:`own`, and so ``epochs`` and ``augment``.
    """
    _check(data, 1, batch)
    gradient, losses = vmap(grad(loss)), vmap(loss)
    draw, sample = _sampler(list(data), batch, epochs, augment)
    return Gradient(lambda x: gradient(x, *sample), lambda x: gradient(x, *data), draw, lambda x: losses(x, *sample))


def _sampler(
    data: list[torch.Tensor], batch: int | None, epochs: bool, augment: Augment | None
) -> tuple[Callable[[Mix], None] | None, list[torch.Tensor]]:
    """A function that draws a batch, and the list that it puts it in; data and batches are ``[n, samples, ...]``."""
    sample = list(data)
    if batch is None:
        if epochs or augment is not None:
            raise ValueError("epochs and augment are for batches: pass batch, a number of samples")
        return None, sample
    agents, device = len(data[0]), data[0].device
    batches = Batches([data[0].shape[1]] * agents, batch, epochs)
    rows = torch.arange(agents, device=device).unsqueeze(1)

    def draw(mix: Mix) -> None:
        chosen = batches(mix).to(device)
        sample[:] = [tensor[rows, chosen] for tensor in data]
        inputs = augmented(augment, sample[0].flatten(0, 1), mix, agents)
        sample[0] = inputs.reshape(agents, batch, *inputs.shape[1:])

    return draw, sample


def _check(data: tuple[torch.Tensor, ...], dimension: int, batch: int | None) -> None:
    lengths = {tuple(tensor.shape[: dimension + 1]) for tensor in data}
    if len(lengths) > 1:
        raise ValueError(f"the data have {sorted(lengths)} samples; they must agree")
    if batch is not None and not data:
        raise ValueError(f"batch={batch}: pass a number of samples, and the data that they are drawn from")
