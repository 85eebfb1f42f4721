"""The gradients of a loss: of one agent's on its own data, or of a whole stacked fleet's at once, by one function.

The loss is written for one agent, ``loss(x, *data)`` with ``x`` ``[d]``, and gives a number. ``torch.func``
makes the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.func import grad, vmap

from ..algorithm import Gradient
from ..mix import Mix
from .batches import Augment, Batches, augmented

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
    draw, sample = _sampler([one.unsqueeze(0) for one in data], batch, epochs, augment)
    return Gradient(
        lambda x: gradient(x, *(one[0] for one in sample)),
        lambda x: gradient(x, *data),
        draw,
        lambda x: loss(x, *(one[0] for one in sample)),
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
        sample[:] = [one[rows, chosen] for one in data]
        inputs = augmented(augment, sample[0].flatten(0, 1), mix, agents)
        sample[0] = inputs.reshape(agents, batch, *inputs.shape[1:])

    return draw, sample


def _check(data: tuple[torch.Tensor, ...], dimension: int, batch: int | None) -> None:
    lengths = {tuple(one.shape[: dimension + 1]) for one in data}
    if len(lengths) > 1:
        raise ValueError(f"the data have {sorted(lengths)} samples; they must agree")
    if batch is not None and not data:
        raise ValueError(f"batch={batch}: pass a number of samples, and the data that they are drawn from")
