"""Censored gradient descent: an agent sends nothing while its change is small, and its neighbours use the old
values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .algorithm import Algorithm, Gradient, State
from .catalog import Entry, register
from .mix import Mix
from .needs import CONNECTED, DOUBLY_STOCHASTIC, STATIC, Need
from .stability.growth import Gossip, by_self_weights, dies_out


@dataclass(frozen=True)
class CensoredGradientDescent(Algorithm):
    """Event-triggered decentralized gradient descent, adapt then combine.

    Agent i takes its step, ``x_i <- x_i - lr g(x_i)``, and sends the change ``q_i = x_i - s_i`` only if
    ``|q_i| >= tau decay^k`` at step k, where s is the sum of all sent changes: zero at first. Else q is zero, the agent
    sends only a header, and its neighbours keep ``s_i``. Then ``s+ = s + q`` and ``x+ = W s+ + (x - s+)``, which
    preserves the mean of the x. The censoring rule is that of COCA (Liu, Xu, Wu, Tian, Ling 2019,
    doi:10.1109/TSP.2019.2907258), which applies it to ADMM. The graph must be static: a new neighbour would not have
    ``s_i``.

    With ``tau=0`` it is :class:`~shoal.algorithms.GradientDescent`. If the threshold falls to zero it ends at the same
    point, but for rounding. ``mix.sent`` counts the sending agents, without the headers.

    The state is s and ``W s``, the shape of ``x``.

    Args:
        lr: The step.
        tau: The threshold at the first step, a length in the space of the parameters.
        decay: Its factor from step to step, at most 1.
    """

    lr: float
    tau: float
    decay: float
    source: ClassVar[str] = "Liu, Xu, Wu, Tian, Ling 2019, doi:10.1109/TSP.2019.2907258"
    one_gradient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (self.tau >= 0 and 0 <= self.decay <= 1):
            raise ValueError(f"tau={self.tau}, decay={self.decay}: pass a threshold from 0 up, and a decay in [0, 1]")

    @property
    def needs(self) -> tuple[Need, ...]:
        return DOUBLY_STOCHASTIC, STATIC, CONNECTED, dies_out(self, by_self_weights())

    def at_rest(self) -> Algorithm:
        return Gossip()

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return torch.zeros_like(x), torch.zeros_like(x)

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        s, mixed = state
        x = x - self.lr * grad(x)
        q = x - s
        speaks = ~(q.norm(dim=-1, keepdim=True) < self.tau * self.decay**mix.round)  # also of a NaN
        q = torch.where(speaks, q, 0)
        s, mixed = s + q, mixed + mix(q, speaks=speaks)
        return mixed + (x - s), (s, mixed)


register(
    Entry(
        "censored D-PSGD",
        lambda: CensoredGradientDescent(0.05, tau=3.0, decay=0.97),
        0.3,
        "Where a message costs more than a step, and silence costs nothing.",
    )
)
