"""Algorithms on directed graphs whose agents do not know the out-degrees of other agents: push-sum and push-pull.

In push-sum each agent splits its values among its neighbours, so no mass is lost, but some agents receive more than
others. A number ``w`` that starts at one and is split alike measures this: ``u / w`` is unbiased. Push-pull is gradient
tracking that pulls parameters and pushes gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .algorithm import Algorithm, Gradient, State
from .catalog import Entry, register
from .gradient_descent import Average, GradientTracking
from .mix import Mix
from .needs import Need, connected
from .stability.growth import by_self_weights, dies_out


def push_both(u: torch.Tensor, w: torch.Tensor, mix: Mix) -> tuple[torch.Tensor, torch.Tensor]:
    """``C u`` and ``C w`` in one message, so that both of an agent arrive or neither."""
    both = mix.push(torch.cat([u, w], dim=-1))
    return both[..., :-1], both[..., -1:]


class _Shared(Algorithm):
    """The common part: ``x`` is u, the state begins with w, and the estimate is ``u / w``."""

    @property
    def needs(self) -> tuple[Need, ...]:
        return connected("push"), dies_out(self, by_self_weights("push"))

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return (mix.ones(x),)

    def estimate(self, x: torch.Tensor, state: State) -> torch.Tensor:
        return x / state[0]


@dataclass(frozen=True)
class PushSum(_Shared):
    """The mean of the agents' initial values; the gradient is not used.

    ``u+ = C u``, ``w+ = C w``, and ``u / w`` is the estimate (Kempe, Dobra, Gehrke 2003; in BlueFog's paper, Ying et
    al. 2021, arXiv:2111.04287, equations 19 to 21). C is column-stochastic on any strongly connected directed graph,
    which may change: see :meth:`Mix.push`. The totals of u and of w never change.

    ``x`` is u; the state is w, ``[n, 1]`` or ``[1]``; the estimate is ``u / w``.
    """

    source: ClassVar[str] = "Kempe, Dobra, Gehrke 2003; Ying et al. 2021, arXiv:2111.04287, eqs. 19 to 21"

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        (w,) = state
        x, w = push_both(x, w, mix)
        return x, (w,)

    def restart(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        """Continue unchanged: mass lost from u is lost from w, too, so the estimate is a mean of the remaining values.

        Not so for algorithms with gradients: a loss that removes much of w would make their steps long for ever.
        """
        return x, state


@dataclass(frozen=True)
class SGP(_Shared):
    """Stochastic gradient push: gradient descent on directed graphs.

    ``u+ = C (u - lr g(u / w))``, ``w+ = C w`` (Assran et al. 2019, arXiv:1811.10792, algorithm 1).

    Agent i takes steps of ``lr / w_i``: an agent that gathers little has a small w and long steps. Where ``lr / w_i``
    times the Lipschitz constant of its gradient exceeds about 2, the run diverges, to NaN in the end. On a graph where
    all agents gather alike w is one, and this is :class:`~shoal.algorithms.GradientDescent`. Where the agents'
    objectives differ it ends near the optimum, at a distance of the order of ``lr``.

    ``x`` is u; the state is w, ``[n, 1]`` or ``[1]``; the estimate is ``u / w``.

    Args:
        lr: The step, before it is divided by w.
    """

    lr: float
    source: ClassVar[str] = "Assran et al. 2019, arXiv:1811.10792, algorithm 1"

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        (w,) = state
        x, w = push_both(x - self.lr * grad(x / w), w, mix)
        return x, (w,)


@dataclass(frozen=True)
class PushDIGing(_Shared):
    """Push-sum gradient tracking: exact on directed graphs, also changing ones, however the objectives differ.

    ``u+ = C (u - lr y)``, ``w+ = C w``, ``z+ = u+ / w+``, ``y+ = C (y + g(z+) - g(z))``, ``y = g`` at first (Ying et
    al. 2021, arXiv:2111.04287, equations 27 to 31). With ``atc=False``: ``y+ = C y + g(z+) - g(z)`` (Nedic, Olshevsky,
    Shi 2017, arXiv:1607.03218). Sends twice the parameters in a step.

    ``x`` is u; the state is w (``[n, 1]`` or ``[1]``), y and the last gradient; the estimate is ``z = u / w``.

    Args:
        lr: The step. As in :class:`SGP`, an agent with a small w moves further.
        atc: Add the gradients' difference before it is shared out; else after.
    """

    lr: float
    atc: bool = True
    source: ClassVar[str] = (
        "Nedic, Olshevsky, Shi 2017, arXiv:1607.03218; Ying et al. 2021, arXiv:2111.04287, eqs. 27 to 31"
    )

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        g = grad(x)
        return mix.ones(x), g, g

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        w, y, g = state
        x, w = push_both(x - self.lr * y, w, mix)
        new = grad(x / w)
        y = mix.push(y + new - g) if self.atc else mix.push(y) + new - g
        return x, (w, y, new)


@dataclass(frozen=True)
class PushPull(GradientTracking):
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

    source: ClassVar[str] = (
        "after Pu, Shi, Xu, Nedic 2020, arXiv:1810.06653, whose own is `semi`; AB: Xin, Khan 2018, arXiv:1803.02503"
    )

    @property
    def needs(self) -> tuple[Need, ...]:
        return (
            connected("pull"),
            connected("push"),
            dies_out(self, by_self_weights("pull")),
            dies_out(self, by_self_weights("push")),
        )

    def _averages(self, mix: Mix) -> tuple[Average, Average]:
        return mix.pull, mix.push


register(
    Entry("push-sum", PushSum, 1, "The mean of the agents' values, over one-way links."),
    Entry("SGP", lambda: SGP(0.02), 1, "Training over one-way links, where the agents' data are alike."),
    Entry(
        "push-sum gradient tracking",
        lambda: PushDIGing(0.01),
        2,
        "Data that differ between agents, over one-way links, also where the links change.",
        exact=True,
    ),
    Entry("Push-DIGing", lambda: PushDIGing(0.03, atc=False), 2, "As above, as it was first written.", exact=True),
    Entry(
        "push-pull",
        lambda: PushPull(0.01),
        2,
        "Data that differ between agents, over one-way links, without push-sum's division by small weights.",
        exact=True,
    ),
    Entry(
        "push-pull, semi-ATC", lambda: PushPull(0.04, semi=True), 2, "As above, as it was first written.", exact=True
    ),
    Entry(
        "AB",
        lambda: PushPull(0.02, atc=False),
        2,
        "As above, with the exchange hidden behind the gradient.",
        exact=True,
    ),
)
