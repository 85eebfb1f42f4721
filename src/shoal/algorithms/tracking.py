"""Gradient tracking: beside its parameters each agent keeps an estimate of everybody's mean gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .algorithm import Algorithm, Gradient, State
from .mix import Mix
from .needs import CONNECTED, DOUBLY_STOCHASTIC, Need


@dataclass(frozen=True)
class GradientTracking(Algorithm):
    """Exact, however different the agents' objectives are, also when W changes from round to round.

    ``x+ = W (x - lr y)``, ``y+ = W (y + g(x+) - g(x))``, ``y = g`` at first (ATC; Xu et al. 2015; Pu, Nedic 2018).
    With ``atc=False``: ``x+ = W x - lr y``, ``y+ = W y + g(x+) - g(x)`` (DIGing; Nedic, Olshevsky, Shi 2017,
    arXiv:1607.03218). Sends twice the parameters in a step.

    Args:
        lr: The step.
        atc: Adapt, then combine; else DIGing.
    """

    lr: float
    atc: bool = True
    source: ClassVar[str] = "Nedic, Olshevsky, Shi 2017, arXiv:1607.03218; Pu, Nedic 2018, arXiv:1805.11454"

    @property
    def needs(self) -> tuple[Need, ...]:
        return DOUBLY_STOCHASTIC, CONNECTED

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        g = grad(x)
        return g, g

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        y, g = state
        x = mix(x - self.lr * y) if self.atc else mix(x) - self.lr * y
        new = grad(x)
        y = mix(y + new - g) if self.atc else mix(y) + new - g
        return x, (y, new)
