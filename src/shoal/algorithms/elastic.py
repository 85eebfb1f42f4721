"""Elastic averaging: agents are pulled to a centre, and the centre to their mean, without being made equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .algorithm import Algorithm, Gradient, State
from .catalog import Entry, register
from .mix import Mix
from .needs import CONNECTED_LINKS, Facts, Need


def _bounded(beta: float) -> Need:
    """Without a gradient, the agents' differences from their centre shrink."""

    def problem(facts: Facts) -> str:
        largest = 2 * facts.size / (facts.size + 1)
        return "" if beta < largest else f"among {facts.size} agents that is {largest:.4g}"

    return Need(
        "bounded pull",
        problem,
        "Take a smaller beta; 0.9 is usual, and up to 1 any number of agents will do.",
        f"beta, which is {beta:g}, to be below 2 n / (n + 1)",
    )


@dataclass(frozen=True)
class EASGD(Algorithm):
    """Elastic averaging SGD, synchronous, without a server: every agent has the centre ``c``.

    ``x+ = x - lr g(x)``; in every ``every``-th step ``x+ = x - lr g(x) - a (x - c)`` and
    ``c+ = c + a sum_i (x_i - c)``, all from the old values, with ``a = beta / n`` and ``c`` the mean of all ``x`` at
    first (Zhang, Choromanska, LeCun 2015, arXiv:1412.6651, its synchronous form). ``a sum_i (x_i - c)`` is
    ``beta mean(x - c)``: an exchange takes one mean of all, and every agent holds ``c``.

    With ``every=1`` it is ``GradientDescent(lr, atc=False)`` on a star whose hub, ``c``, has no objective: W gives each
    end of an edge ``a`` of the other. If the agents' objectives differ it ends near the optimum, at a distance of the
    order of ``n lr every / beta``. The agents' differences from ``c`` vanish if ``a (n + 1) < 2``, which is checked; if
    all have the curvature L, and ``every=1``, they vanish if ``(2 - lr L) (2 - beta) > 2 a``.

    The estimate is ``c``: it is the same everywhere, and a mean of agents and of steps. The gradient is taken at an
    agent's own ``x``, which is another point, so around a wrapped optimizer it needs a closure. State: ``c``, as ``x``.

    Args:
        lr: The step.
        every: Steps for each exchange.
        beta: How far the centre goes towards the mean, in an exchange.

    Raises:
        ValueError: ``every`` is no count, or ``beta`` is not between 0 and 2.
    """

    lr: float
    every: int
    beta: float = 0.9
    source: ClassVar[str] = "Zhang, Choromanska, LeCun 2015, arXiv:1412.6651"
    own_rounds: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every={self.every}: pass a number of steps, at least 1")
        if not 0 < self.beta < 2:
            raise ValueError(f"beta={self.beta}: pass 0 < beta < 2 n / (n + 1), for n agents; 0.9 is usual")

    @property
    def needs(self) -> tuple[Need, ...]:
        return CONNECTED_LINKS, _bounded(self.beta)

    def cycle(self, rounds: int) -> int:
        return self.every

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return (mix.average(x),)

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        (c,) = state
        after = x - self.lr * grad(x)
        if (mix.round + 1) % self.every:
            return after, (c,)
        away = x - c
        return after - self.beta / mix.size * away, (c + self.beta * mix.average(away),)

    def estimate(self, x: torch.Tensor, state: State) -> torch.Tensor:
        return state[0]


register(
    Entry(
        "EASGD",
        lambda: EASGD(0.05, every=5),
        1 / 10,
        "Agents that are to search apart from each other, and an answer in their middle.",
    )
)
