"""Dual averaging: agents average the sums of their gradients, and compute the parameters from them."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import torch

from .algorithm import Algorithm, Gradient, State
from .catalog import Entry, register
from .mix import Mix
from .needs import CONNECTED, DOUBLY_STOCHASTIC, Need
from .stability.growth import Gossip, by_self_weights, dies_out


@dataclass(frozen=True)
class DualAveraging(Algorithm):
    """Distributed dual averaging, with ``|x|^2 / 2`` for the proximal function.

    ``z+ = W z + g(x)``, ``x+ = -alpha_t z+``, with ``z = 0`` at first and ``alpha_t = lr / sqrt(t)`` in step
    t = 1, 2, ...; the estimate is the mean of all ``x+`` so far (Duchi, Agarwal, Wainwright 2012, arXiv:1005.2012).

    Made for convex objectives that need not be smooth: the estimate's objective nears the optimum as ``1 / sqrt(t)``,
    however different the agents' are. Of where the agents begin, only the first gradient knows. The gradient is taken
    at ``x``, which is not the estimate, so around a wrapped optimizer it needs a closure. State: ``z`` and the mean, as
    ``x``.

    Args:
        lr: The first step.
    """

    lr: float
    source: ClassVar[str] = "Duchi, Agarwal, Wainwright 2012, arXiv:1005.2012"
    one_gradient: ClassVar[bool] = True
    from_x: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[Need, ...]:
        return DOUBLY_STOCHASTIC, CONNECTED, dies_out(self, by_self_weights())

    def at_rest(self) -> Algorithm:
        return Gossip()

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return torch.zeros_like(x), x

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        z, mean = state
        t = mix.round + 1
        z = mix(z) + grad(x)
        x = -self.lr / sqrt(t) * z
        return x, (z, mean + (x - mean) / t)

    def estimate(self, x: torch.Tensor, state: State) -> torch.Tensor:
        return state[1]


register(
    Entry(
        "dual averaging",
        lambda: DualAveraging(0.2),
        1,
        "Convex objectives that are not smooth, where a rough answer will do.",
    )
)
