"""Algorithms that find the optimum of the sum with one message a step: they remember one step, and correct themselves.

All three need one symmetric W for all steps. Where it changes, or is not symmetric, gradient tracking is exact too, for
twice the messages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from .algorithm import Algorithm, Gradient, State
from .catalog import Entry, register
from .gradient_descent import Prox
from .mix import Mix
from .needs import FIXED_AND_SYMMETRIC, Facts, Need
from .stability.growth import by_signs, dies_out

MARGIN = 1e-3
"""Above -1/3. A difference along an eigenvector there fades in ``1 / (9/4 margin)`` steps, 444 of them."""
_ROUNDED = 1e-6
"""Below -1/3: the weights of a ring of thirds may have been rounded to float32."""


def _far_from_minus_a_third(facts: Facts) -> str:
    found = facts.smallest_eigenvalue
    if found > -1 / 3 + MARGIN:
        return ""
    if found < -1 / 3 - _ROUNDED:
        return f"the smallest is {found:.4f}, along which differences grow"
    return (
        f"the smallest is {found:.4f}, along which differences fade by the curvature of the objectives alone: where "
        "they are flat, the noise of gradients adds up"
    )


def _not_below_minus_a_third(facts: Facts) -> bool:
    return facts.smallest_eigenvalue >= -1 / 3 - _ROUNDED


def _by_smallest(facts: Facts) -> str | None:
    return "" if by_signs(facts) == "" and _not_below_minus_a_third(facts) else None


LARGE_EIGENVALUES = Need(
    "eigenvalues above -1/3",
    _far_from_minus_a_third,
    "Take ExactDiffusion(lr, lazy=True), which mixes with (I + W) / 2, or give agents more self weight.",
    "the eigenvalues of W to be above -1/3",
    _not_below_minus_a_third,
)


@dataclass(frozen=True)
class ExactDiffusion(Algorithm):
    """Exact diffusion, or D2: adapt, correct by the change of the last exchange, combine.

    ``psi+ = x - lr g(x)``, ``x+ = W (psi+ + x - psi)``, with ``psi = x`` at first; or, in one line,
    ``x+ = W (2 x - x_prev - lr (g - g_prev))`` after ``x1 = W (x0 - lr g0)`` (Yuan, Ying, Zhao, Sayed 2017,
    arXiv:1702.05122; Tang, Lian, Yan, Zhang, Liu 2018, arXiv:1803.07068).

    Exact, however different the agents' objectives are. Along an eigenvector of W with eigenvalue w, and objectives of
    curvature h, differences follow ``x+ = w ((2 - lr h) x - (1 - lr h) x_prev)``. At w = -1/3 they shrink about
    ``1 - lr h / 2`` times in a step. So a strongly convex sum of objectives is solved exactly there, with a warning.
    Where the objectives are flat (h = 0), differences alternate for ever, and the noise of gradients adds up like a
    random walk. Below -1/3 differences grow, which is refused. An even ring with weights of a third has the eigenvalue
    -1/3 (listing 6 of the BlueFog paper, Ying et al. 2021, arXiv:2111.04287). State: ``psi``, as ``x``.

    With ``prox`` it is Prox-ED: ``psi+ = x - lr g(x)``, ``z+ = W (psi+ + z - psi)``, ``x+ = prox(z+)``; at first ``z``
    and ``psi`` are ``x`` (Alghunaim, Ryu, Yuan, Sayed 2020, arXiv:1909.06479, ``lazy=True``). State: ``psi`` and ``z``.

    Args:
        lr: The step.
        lazy: ``(I + W) / 2`` instead of W: slower, and sound for any eigenvalues of W.
        prox: As of :class:`~shoal.algorithms.GradientDescent`.
    """

    lr: float
    lazy: bool = False
    prox: Prox | None = None
    source: ClassVar[str] = (
        "Yuan, Ying, Zhao, Sayed 2017, arXiv:1702.05122; Tang et al. 2018, arXiv:1803.07068; `prox`: Alghunaim, Ryu, "
        "Yuan, Sayed 2020, arXiv:1909.06479"
    )
    one_gradient: ClassVar[bool] = True

    @property
    def separable(self) -> bool:  # type: ignore[override]
        return self.prox is None

    @property
    def needs(self) -> tuple[Need, ...]:
        if self.lazy:
            return *FIXED_AND_SYMMETRIC, dies_out(self, by_signs)
        return *FIXED_AND_SYMMETRIC, LARGE_EIGENVALUES, dies_out(self, _by_smallest)

    def at_rest(self) -> Algorithm:
        return replace(self, prox=None)

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return (x,) if self.prox is None else (x, x)

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        before, z = (*state, x) if self.prox is None else state
        psi = x - self.lr * grad(x)
        phi = psi + z - before
        z = _lazily(phi, mix) if self.lazy else mix(phi)
        return (z, (psi,)) if self.prox is None else (self.prox(z), (psi, z))


@dataclass(frozen=True)
class EXTRA(Algorithm):
    """EXTRA: decentralized gradient descent, plus the sum of all past changes by mixing.

    ``x+ = W x + s - lr g(x)``, ``s+ = s + (W x - x) / 2``, with ``s = 0`` at first; that is
    ``x+ = (I + W) x - (I + W)/2 x_prev - lr (g - g_prev)`` after ``x1 = W x0 - lr g0`` (Shi, Ling, Wu, Yin 2015,
    arXiv:1404.6264, with ``(I + W) / 2`` for the second matrix), summed over the steps: one message instead of two.

    Exact, however different the agents' objectives are. The stable step shrinks with the smallest eigenvalue of W:
    ``lr < (1 + lambda_min) / L``. State: ``s``, as ``x``.

    With ``prox`` it is PG-EXTRA: ``x+ = prox(W x + s - lr g(x))`` (Shi, Ling, Wu, Yin 2015, arXiv:1506.02621).

    Args:
        lr: The step.
        prox: As of :class:`~shoal.algorithms.GradientDescent`.
    """

    lr: float
    prox: Prox | None = None
    source: ClassVar[str] = "Shi, Ling, Wu, Yin 2015, arXiv:1404.6264; `prox`, PG-EXTRA: the same, arXiv:1506.02621"
    one_gradient: ClassVar[bool] = True

    @property
    def separable(self) -> bool:  # type: ignore[override]
        return self.prox is None

    def at_rest(self) -> Algorithm:
        return replace(self, prox=None)

    @property
    def needs(self) -> tuple[Need, ...]:
        return *FIXED_AND_SYMMETRIC, dies_out(self, by_signs)

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return (torch.zeros_like(x),)

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        (s,) = state
        mixed = mix(x)
        z = mixed + s - self.lr * grad(x)
        return z if self.prox is None else self.prox(z), (s + (mixed - x) / 2,)


@dataclass(frozen=True)
class NIDS(Algorithm):
    """NIDS: exact with the step of plain gradient descent, ``lr < 2 / L``, whatever the network.

    ``psi+ = x - lr g(x)``, ``z+ = z - x + (I + W)/2 (x + psi+ - psi)``, ``x+ = prox(z+)``; in the first step
    ``z+ = psi+`` (Li, Shi, Yan 2019, arXiv:1704.07807, with one step for all). Without ``prox`` it is
    ``x+ = (I + W)/2 (2 x - x_prev - lr (g - g_prev))``.

    State: ``z`` and ``psi``, as ``x``.

    Args:
        lr: The step.
        prox: As of :class:`~shoal.algorithms.GradientDescent`.
    """

    lr: float
    prox: Prox | None = None
    source: ClassVar[str] = "Li, Shi, Yan 2019, arXiv:1704.07807"
    one_gradient: ClassVar[bool] = True

    @property
    def separable(self) -> bool:  # type: ignore[override]
        return self.prox is None

    @property
    def needs(self) -> tuple[Need, ...]:
        return *FIXED_AND_SYMMETRIC, dies_out(self, by_signs)

    def at_rest(self) -> Algorithm:
        return replace(self, prox=None)

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return x, x

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        z, before = state
        psi = x - self.lr * grad(x)
        z = psi if mix.round == 0 else z - x + _lazily(psi + x - before, mix)
        return z if self.prox is None else self.prox(z), (z, psi)


def _lazily(x: torch.Tensor, mix: Mix) -> torch.Tensor:
    """``(I + W)/2 x``."""
    return (x + mix(x)) / 2


register(
    Entry(
        "exact diffusion (D2), lazy",
        lambda: ExactDiffusion(0.1, lazy=True),
        1,
        "Data that differ between agents, on one undirected graph: exact at the price of D-PSGD.",
        exact=True,
    ),
    Entry(
        "exact diffusion (D2)",
        lambda: ExactDiffusion(0.1),
        1,
        "As above, faster, where agents keep enough weight of their own: on even rings with weights of a third for "
        "strongly convex objectives only.",
        exact=True,
    ),
    Entry(
        "EXTRA",
        lambda: EXTRA(0.1),
        1,
        "As exact diffusion, with the exchange hidden behind the gradient, for smaller steps.",
        exact=True,
    ),
    Entry(
        "NIDS",
        lambda: NIDS(0.1),
        1,
        "As exact diffusion, with a step that does not depend on the network, and a term that is not smooth.",
        exact=True,
    ),
)
