"""Stochastic gradients whose noise vanishes: each is corrected by the gradient of its sample at a reference point."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .algorithm import Gradient, State
from .catalog import Entry, register
from .exact import ExactDiffusion
from .gradient_descent import GradientDescent
from .local_steps import Wrapper
from .mix import Mix
from .momentum import require_one_gradient


@dataclass(frozen=True)
class DecentralizedSVRG(Wrapper):
    """Variance reduction for any algorithm with ``one_gradient``; each agent computes it alone, and no further messages
    are sent.

    ``v = g_s(x) - g_s(x~) + full(x~)``, and the algorithm gets ``v`` as its gradient: ``g_s`` is the gradient on the
    step's sample, ``full`` the gradient on all of the agent's data (:meth:`Gradient.full`), and ``x~`` is set to ``x``
    every ``period`` steps (Johnson, Zhang 2013; over exact diffusion: Yuan, Ying, Liu, Sayed 2019, arXiv:1708.01384,
    with SVRG for the reduction).

    Over ExactDiffusion, EXTRA or NIDS it finds the optimum from samples, where without it they stay at a distance that
    shrinks with the step only. A step takes two gradients on the sample. State: ``x~`` and ``full(x~)``, as ``x``, and
    then the algorithm's.

    Args:
        algorithm: The algorithm whose gradient it replaces; its needs apply to W.
        period: Steps for each gradient on all of the data; one or two passes over them are usual.

    Raises:
        TypeError: The algorithm takes its gradient more than once a step, or not at its own ``x``.
        ValueError: ``period`` is no count.
    """

    period: int
    source: ClassVar[str] = "Johnson, Zhang 2013; Yuan, Ying, Liu, Sayed 2019, arXiv:1708.01384"
    one_gradient: ClassVar[bool] = False
    separable: ClassVar[bool] = False
    own_state: ClassVar[int] = 2

    def __post_init__(self) -> None:
        require_one_gradient("DecentralizedSVRG", self.algorithm)
        if self.period < 1:
            raise ValueError(f"period={self.period}: pass a number of steps, at least 1")

    def cycle(self, rounds: int) -> int:
        return math.lcm(self.period, self.algorithm.cycle(rounds))

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return x, grad.full(x), *self.algorithm.init(x, grad, mix)

    def step(self, x: torch.Tensor, state: Any, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        anchor, full, *inner = state
        v = grad(x) - grad.again(anchor) + full
        x, after = self.algorithm.step(x, tuple(inner), Gradient(lambda _: v), mix)
        if (mix.round + 1) % self.period == 0:
            anchor, full = x, grad.full(x)
        return x, (anchor, full, *after)


register(
    Entry(
        "decentralized SVRG, diffusion",
        lambda: DecentralizedSVRG(GradientDescent(0.05), period=20),
        1,
        "Convex problems on samples, to the accuracy of D-PSGD with whole gradients.",
    ),
    Entry(
        "decentralized SVRG, exact diffusion",
        lambda: DecentralizedSVRG(ExactDiffusion(0.05, lazy=True), period=20),
        1,
        "Convex problems on samples, to the optimum, on one undirected graph.",
        exact=True,
    ),
)
