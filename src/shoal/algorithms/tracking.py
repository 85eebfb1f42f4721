"""Gradient tracking: beside its parameters each agent keeps an estimate of all agents' mean gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .algorithm import Algorithm, Gradient, State
from .mix import Mix
from .needs import CONNECTED, DOUBLY_STOCHASTIC, Need
from .stability.growth import by_self_weights, dies_out


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
        check_semi(self.atc, self.semi)

    @property
    def needs(self) -> tuple[Need, ...]:
        return DOUBLY_STOCHASTIC, CONNECTED, dies_out(self, by_self_weights())

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        g = grad(x)
        return g, g

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        y, g = state
        x = mix(x - self.lr * y) if self.atc else mix(x) - self.lr * y
        new = grad(x)
        y = mix(y + new - g) if self.atc and not self.semi else mix(y) + new - g
        return x, (y, new)


def check_semi(atc: bool, semi: bool) -> None:
    if semi and not atc:
        raise ValueError("semi=True is adapt, then combine, for x alone: leave atc=True, or leave semi out")
