"""Push-pull: gradient tracking that pulls parameters and pushes gradients, on any strongly connected directed graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .algorithm import Algorithm, Gradient, State
from .catalog import Entry, register
from .mix import Mix
from .needs import Need, connected
from .stability.growth import by_self_weights, dies_out
from .tracking import check_semi


@dataclass(frozen=True)
class PushPull(Algorithm):
    """Exact on directed graphs, however different the objectives are, and without a division by small weights.

    ``x+ = R (x - lr y)``, ``y+ = C (y + g(x+) - g(x))``, ``y = g`` at first: both lines adapt, then combine, as in
    :class:`~shoal.algorithms.GradientTracking`. With ``semi=True`` only x does, ``y+ = C y + g(x+) - g(x)``, which is
    push-pull as published (Pu, Shi, Xu, Nedic 2020, arXiv:1810.06653). With ``atc=False`` neither: ``x+ = R x - lr y``,
    ``y+ = C y + g(x+) - g(x)`` (AB; Xin, Khan 2018, arXiv:1803.02503). R is row-stochastic, so agreement is kept; C
    column-stochastic, so the y always add up to the gradients; see :meth:`Mix.pull` and :meth:`Mix.push`. Sends twice
    the parameters in a step.

    Args:
        lr: The step.
        atc: Adapt, then combine; else AB.
        semi: Push y before the new gradients go into it.

    Raises:
        ValueError: ``semi`` without ``atc``.
    """

    lr: float
    atc: bool = True
    semi: bool = False
    source: ClassVar[str] = (
        "after Pu, Shi, Xu, Nedic 2020, arXiv:1810.06653, whose own is `semi`; AB: Xin, Khan 2018, arXiv:1803.02503"
    )

    def __post_init__(self) -> None:
        check_semi(self.atc, self.semi)

    @property
    def needs(self) -> tuple[Need, ...]:
        return (
            connected("pull"),
            connected("push"),
            dies_out(self, by_self_weights("pull")),
            dies_out(self, by_self_weights("push")),
        )

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        g = grad(x)
        return g, g

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        y, g = state
        x = mix.pull(x - self.lr * y) if self.atc else mix.pull(x) - self.lr * y
        new = grad(x)
        y = mix.push(y + new - g) if self.atc and not self.semi else mix.push(y) + new - g
        return x, (y, new)


register(
    Entry(
        "push-pull",
        lambda: PushPull(0.01),
        2,
        "Data that differ between agents, over one-way links, without push-sum's division by small weights.",
        exact=True,
    )
)
register(
    Entry(
        "push-pull, semi-ATC",
        lambda: PushPull(0.04, semi=True),
        2,
        "As above, as it was first written.",
        exact=True,
    )
)
register(
    Entry(
        "AB",
        lambda: PushPull(0.02, atc=False),
        2,
        "As above, with the exchange hidden behind the gradient.",
        exact=True,
    )
)
