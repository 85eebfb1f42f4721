"""The gradients of a loss: of one agent's on its own data, or of a whole stacked fleet's at once, by one function.

The loss is written for one agent, ``loss(x, *data)`` with ``x`` ``[d]``, and gives a number. ``torch.func``
makes the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.func import grad, vmap

from .algorithm import Gradient
from .mix import Mix

Loss = Callable[..., torch.Tensor]


def own(loss: Loss, *data: torch.Tensor, batch: int | None = None) -> Gradient:
    """The gradient of one real agent.

    Args:
        loss: ``loss(x, *data)``: ``x`` is ``[d]``, each of ``data`` ``[samples, ...]``; a tensor of one number.
        data: This agent's.
        batch: Samples for each step, drawn with replacement, the same ones in a stacked run of the same seed; all of
            the data if not given.

    Raises:
        ValueError: Data of different lengths, or a batch that is no count.
    """
    _check(data, 0, batch)
    gradient = grad(loss)
    sample = list(data)

    def draw(mix: Mix) -> None:
        if batch is not None:
            chosen = _chosen(mix, torch.empty(batch, dtype=torch.float64), len(data[0]))
            sample[:] = [one[chosen] for one in data]

    return Gradient(lambda x: gradient(x, *sample), lambda x: gradient(x, *data), draw, lambda x: loss(x, *sample))


def per_agent(loss: Loss, *data: torch.Tensor, batch: int | None = None) -> Gradient:
    """The gradients of a stacked fleet: row i is agent i's, at row i of ``x``, on row i of the data.

    Args:
        loss: As for :func:`own`.
        data: Each ``[n, samples, ...]``.
        batch: As for :func:`own`.
    """
    _check(data, 1, batch)
    gradient, losses = vmap(grad(loss)), vmap(loss)
    sample = list(data)

    def draw(mix: Mix) -> None:
        if batch is not None:
            like = torch.empty(len(data[0]), batch, dtype=torch.float64, device=data[0].device)
            chosen = _chosen(mix, like, data[0].shape[1])
            rows = torch.arange(len(chosen), device=chosen.device).unsqueeze(1)
            sample[:] = [one[rows, chosen] for one in data]

    return Gradient(lambda x: gradient(x, *sample), lambda x: gradient(x, *data), draw, lambda x: losses(x, *sample))


def _chosen(mix: Mix, like: torch.Tensor, samples: int) -> torch.Tensor:
    return (mix.uniform(like) * samples).long()


def _check(data: tuple[torch.Tensor, ...], dimension: int, batch: int | None) -> None:
    lengths = {tuple(one.shape[: dimension + 1]) for one in data}
    if len(lengths) > 1:
        raise ValueError(f"the data have {sorted(lengths)} samples; they must agree")
    if batch is not None and (batch < 1 or not data):
        raise ValueError(f"batch={batch}: pass a number of samples, and the data that they are drawn from")
