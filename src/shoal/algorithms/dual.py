"""Dual methods: decentralized ADMM and dual averaging.

In ADMM each agent pays for disagreeing with its neighbours, at a price that rises until they agree. In dual averaging
agents average the sums of their gradients, and compute the parameters from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import torch

from .algorithm import Algorithm, Gradient, State
from .catalog import Entry, register
from .mix import Mix
from .needs import CONNECTED, CONNECTED_LINKS, DOUBLY_STOCHASTIC, LINKS, STATIC, Need
from .stability.growth import Gossip, by_self_weights, dies_out


@dataclass(frozen=True)
class DecentralizedADMM(Algorithm):
    """Exact on a static undirected graph, however different the objectives are, for once the parameters in a step.

    With ``d_i`` the number of agent i's neighbours j and ``a_i`` its price, zero at first, ADMM solves
    ``grad f_i(x_i+) + a_i + 2 c d_i x_i+ = c (d_i x_i + sum of x_j)`` for ``x_i+`` and then sets
    ``a_i+ = a_i + c (d_i x_i+ - sum of x_j+)`` (Shi et al. 2014, arXiv:1307.5561). Here the solve is ``inner`` gradient
    steps of length ``1 / (rho + 2 c d_i)`` from ``x_i``. One of them is linearised ADMM (DLM; Ling et al. 2015, "DLM:
    Decentralized Linearized Alternating Direction Method of Multipliers"); the more, the closer to ADMM. The prices
    always add up to zero.

    The state is a and the sum of the neighbours' x. The weights of the graph are not used.

    Args:
        c: The penalty on an edge.
        rho: The curvature that the gradient step assumes; the Lipschitz constant of an agent's gradient is enough.
        inner: Gradient steps between two exchanges.
    """

    c: float
    rho: float
    inner: int = 1
    source: ClassVar[str] = "Shi et al. 2014, arXiv:1307.5561; Ling et al. 2015, DLM"

    @property
    def needs(self) -> tuple[Need, ...]:
        return STATIC, LINKS, CONNECTED_LINKS

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return torch.zeros_like(x), _of_neighbours(x, mix)

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        a, received = state
        degree = mix.gather(mix.spread(mix.ones(x)))
        target = self.c * (degree * x + received)
        for _ in range(self.inner):
            x = x - (grad(x) + a + 2 * self.c * degree * x - target) / (self.rho + 2 * self.c * degree)
        received = _of_neighbours(x, mix)
        return x, (a + self.c * (degree * x - received), received)


def _of_neighbours(x: torch.Tensor, mix: Mix) -> torch.Tensor:
    """The sum of the neighbours' ``x``."""
    return mix.gather(mix.edges(mix.spread(x)))


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
        "decentralized ADMM, linearised (DLM)",
        lambda: DecentralizedADMM(c=1.0, rho=4.0),
        1,
        "Data that differ between agents, on a fixed undirected graph, for half the bytes of gradient tracking.",
        exact=True,
    ),
    Entry(
        "decentralized ADMM",
        lambda: DecentralizedADMM(c=1.0, rho=4.0, inner=5),
        1,
        "As above, where gradients are cheaper than messages.",
        exact=True,
    ),
    Entry(
        "dual averaging",
        lambda: DualAveraging(0.2),
        1,
        "Convex objectives that are not smooth, where a rough answer will do.",
    ),
)
