"""Decentralized gradient descent along the agent's own gradient, gradient tracking, and dual averaging.

With gradient tracking each agent keeps, beside its parameters, an estimate of all agents' mean gradient. In dual
averaging agents average the sums of their gradients, and compute the parameters from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar

import torch

from .algorithm import Algorithm, Gradient, State
from .mix import Mix
from .needs import CONNECTED, DOUBLY_STOCHASTIC, Need
from .stability.growth import Gossip, by_self_weights, dies_out

Prox = Callable[[torch.Tensor], torch.Tensor]
"""A proximal operator: x to a tensor of its shape."""
Average = Callable[[torch.Tensor], torch.Tensor]
"""One of the averages of a :class:`Mix`."""


@dataclass(frozen=True)
class GradientDescent(Algorithm):
    """Decentralized (stochastic) gradient descent, D-PSGD.

    Adapt, then combine: ``x+ = W (x - lr g(x))`` (Ying et al. 2021, arXiv:2111.04287, equation 23).
    Adapt with combine: ``x+ = W x - lr g(x)`` (equation 22; Lian et al. 2017, arXiv:1705.09056).

    With ``prox`` it is the proximal operator of either: ``x+ = prox(W x - lr g(x))`` is Prox-DGD (Zeng, Yin 2018,
    arXiv:1608.05766), and ``x+ = prox(W (x - lr g(x)))`` averages before it (Chen, Ozdaglar 2012, arXiv:1210.2289, with
    one round of averages in a step).

    Where the agents' objectives differ it ends near the optimum, at a distance of the order of ``lr``.

    Args:
        lr: The step.
        atc: Adapt, then combine; else adapt with combine.
        prox: The proximal operator of ``lr r``, where the agents minimise the mean of ``f_i + r``; the same on all
            agents: ``torch.nn.Softshrink(lr * weight)`` for the L1 norm, or the projection onto a convex set, such as
            ``lambda x: x.clamp(min=0)``. It works on the last dimension, and does not follow changes of ``lr``.
    """

    lr: float
    atc: bool = True
    prox: Prox | None = None
    source: ClassVar[str] = (
        "Lian et al. 2017, arXiv:1705.09056; Ying et al. 2021, arXiv:2111.04287, eqs. 22, 23; `prox`: Zeng, Yin 2018, "
        "arXiv:1608.05766"
    )
    one_gradient: ClassVar[bool] = True

    @property
    def separable(self) -> bool:  # type: ignore[override]
        return self.prox is None  # which may look at all of x

    @property
    def needs(self) -> tuple[Need, ...]:
        return DOUBLY_STOCHASTIC, CONNECTED, dies_out(self, by_self_weights())

    def at_rest(self) -> Algorithm:
        return replace(self, prox=None)

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        x = mix(x - self.lr * grad(x)) if self.atc else mix(x) - self.lr * grad(x)
        return x if self.prox is None else self.prox(x), ()


@dataclass(frozen=True)
class ParallelGradientDescent(Algorithm):
    """Data-parallel training, for comparison: ``x+ = x - lr mean(g(x))``, the mean over all agents.

    Agents that begin with equal parameters keep them equal, and take the same steps as a single agent with all data.

    Args:
        lr: The step.
    """

    lr: float
    needs = ()  # it averages over all agents, whatever the topology
    source: ClassVar[str] = "Goyal et al. 2017, arXiv:1706.02677"
    one_gradient: ClassVar[bool] = True
    separable: ClassVar[bool] = True

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        return x - self.lr * mix.average(grad(x)), ()


@dataclass(frozen=True)
class GradientTracking(Algorithm):
    """Exact, however different the agents' objectives are, also when W changes from round to round.

    ``x+ = W (x - lr y)``, ``y+ = W (y + g(x+) - g(x))``, ``y = g`` at first (ATC, or Aug-DGM; Xu, Zhu, Soh, Xie 2015).
    With ``semi=True`` only x adapts, then combines: ``y+ = W y + g(x+) - g(x)`` (DSGT; Pu, Nedic 2018,
    arXiv:1805.11454). With ``atc=False`` neither: ``x+ = W x - lr y``, ``y+ = W y + g(x+) - g(x)`` (DIGing; Nedic,
    Olshevsky, Shi 2017, arXiv:1607.03218). Sends twice the parameters in a step.

    Args:
        lr: The step.
        atc: Adapt, then combine; else DIGing.
        semi: Average y before the new gradients go into it.

    Raises:
        ValueError: ``semi`` without ``atc``.
    """

    lr: float
    atc: bool = True
    semi: bool = False
    source: ClassVar[str] = (
        "Xu, Zhu, Soh, Xie 2015, Aug-DGM; `semi`: Pu, Nedic 2018, arXiv:1805.11454, DSGT; DIGing: Nedic, Olshevsky, "
        "Shi 2017, arXiv:1607.03218"
    )

    def __post_init__(self) -> None:
        if self.semi and not self.atc:
            raise ValueError("semi=True is adapt, then combine, for x alone: leave atc=True, or leave semi out")

    @property
    def needs(self) -> tuple[Need, ...]:
        return DOUBLY_STOCHASTIC, CONNECTED, dies_out(self, by_self_weights())

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        g = grad(x)
        return g, g

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        y, g = state
        pull, push = self._averages(mix)
        x = pull(x - self.lr * y) if self.atc else pull(x) - self.lr * y
        new = grad(x)
        y = push(y + new - g) if self.atc and not self.semi else push(y) + new - g
        return x, (y, new)

    def _averages(self, mix: Mix) -> tuple[Average, Average]:
        """The averages of x and of y: both W."""
        return mix, mix


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


def per_step(change: torch.Tensor, lr: float | torch.Tensor) -> torch.Tensor:
    """``change / lr``; nothing where the step is zero, since then no gradient has had a part in it."""
    if isinstance(lr, torch.Tensor):
        return torch.where(lr == 0, 0, change / torch.where(lr == 0, 1, lr))
    return change / lr if lr else torch.zeros_like(change)
