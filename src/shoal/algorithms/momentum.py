"""Momentum, Adam and variance reduction, and what averaging with neighbours does to them.

Local momentum composes with any algorithm that takes one gradient a step, and so does variance reduction, which
corrects each gradient by that of its sample at a reference point. On data that differ between agents local momentum
makes the error of D-PSGD as large as a step of ``lr / (1 - beta)`` would; the algorithms of their own below do without
that. The moments of :class:`AccumAdam` are those of the mean of several gradients, for agents whose batches are small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..topology._validate import check_count
from .algorithm import Algorithm, Gradient, State, is_number, require_algorithm
from .catalog import Entry, register
from .exact import ExactDiffusion
from .gradient_descent import GradientDescent, per_step
from .local_steps import GossipPGA, LocalSteps
from .mix import Mix
from .needs import CONNECTED, DOUBLY_STOCHASTIC, STATIC, SYMMETRIC, Need
from .stability.growth import Gossip, by_self_weights, by_signs, dies_out
from .wrappers import Wrapper


def require_one_gradient(name: str, algorithm: Algorithm) -> None:
    """Refuse an algorithm whose gradient nothing can stand in for.

    Raises:
        TypeError: The algorithm takes its gradient more than once a step, or not at its own ``x``; or it chooses when
            agents exchange, so it must be the outermost wrapper.
    """
    require_algorithm(algorithm)
    if not algorithm.one_gradient or isinstance(algorithm, LocalSteps | GossipPGA):
        raise TypeError(
            f"{name} stands in for the gradient of an algorithm that takes it once a step, at its own x, and "
            f"{type(algorithm).__name__} does not. Take one with one_gradient = True, such as GradientDescent or "
            f"ExactDiffusion; where it wraps another, put {name} inside."
        )


@dataclass(frozen=True)
class Momentum(Wrapper):
    """Local momentum for any algorithm with ``one_gradient``: each agent's own, and nothing more is sent.

    ``m+ = beta m + g(x)``, and the algorithm sees ``m+`` for its gradient; with Nesterov's, ``g(x) + beta m+``. Over
    GradientDescent it is DmSGD as Yuan et al. 2021, arXiv:2104.11981, compare with; Yu, Jin, Yang 2019 average the
    momentum too, which is :class:`AveragedMomentum`. With ``dampened=True`` it is ``m+ = beta m + (1 - beta) g(x)``,
    which over ExactDiffusion is EDM (Hu et al. 2025, arXiv:2501.19082).

    An exact algorithm stays exact. GradientDescent ends where it would with the step ``lr / (1 - beta)`` (with ``lr``
    if it is dampened), which is farther from the optimum: see :class:`DecentLaM`. State: ``m``, as ``x``, and then the
    algorithm's.

    Args:
        algorithm: The algorithm whose gradient it replaces; its needs apply to W.
        beta: How much of the last step's stays, 0 <= beta < 1.
        nesterov: Look ahead.
        dampened: Weigh a new gradient by ``1 - beta``, so that ``m`` is a mean of gradients and not a sum.

    Raises:
        TypeError: The algorithm takes its gradient more than once a step, or not at its own ``x``.
        ValueError: ``beta`` is out of its range, or it is to look ahead dampened.
    """

    beta: float
    nesterov: bool = False
    dampened: bool = False
    source: ClassVar[str] = (
        "over GradientDescent: Yuan et al. 2021, arXiv:2104.11981, DmSGD; `dampened`, over ExactDiffusion: Hu et al. "
        "2025, arXiv:2501.19082, EDM"
    )
    own_state: ClassVar[int] = 1

    def __post_init__(self) -> None:
        require_one_gradient("Momentum", self.algorithm)
        check_beta(self.beta)
        if self.nesterov and self.dampened:
            raise ValueError("nesterov=True, dampened=True: Nesterov's momentum is not dampened; choose one")

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return torch.zeros_like(x), *self.algorithm.init(x, grad, mix)

    def step(self, x: torch.Tensor, state: Any, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        m, *inner = state
        g = grad(x)
        m = self.beta * m + ((1 - self.beta) * g if self.dampened else g)
        direction = g + self.beta * m if self.nesterov else m
        x, after = self.algorithm.step(x, tuple(inner), Gradient(lambda _: direction), mix)
        return x, (m, *after)


@dataclass(frozen=True)
class _OneMomentum(Algorithm):
    """The common part of algorithms with their own momentum: ``lr``, ``beta``, and the initial ``m = 0``, as ``x``."""

    lr: float
    beta: float
    one_gradient: ClassVar[bool] = True
    separable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_beta(self.beta)

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return (torch.zeros_like(x),)


@dataclass(frozen=True)
class DecentLaM(_OneMomentum):
    """Momentum of the whole change by a step of D-PSGD, including the averaging.

    ``gt = (x - W (x - lr g(x))) / lr``, ``m+ = beta m + gt``, ``x+ = x - lr m+`` (Yuan et al. 2021, arXiv:2104.11981).

    It ends where GradientDescent with the same ``lr`` does, without momentum's share of the error. The averaging has
    momentum here too, and on one-way edges, whose W has complex eigenvalues, it may diverge. State: ``m``, as ``x``.

    Args:
        lr: The step.
        beta: The part of the last step's momentum that remains, 0 <= beta < 1.

    Raises:
        ValueError: ``beta`` is out of its range.
    """

    source: ClassVar[str] = "Yuan et al. 2021, arXiv:2104.11981"

    @property
    def needs(self) -> tuple[Need, ...]:
        return STATIC, DOUBLY_STOCHASTIC, SYMMETRIC, CONNECTED, dies_out(self, by_signs)

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        (m,) = state
        change = x - mix(x - self.lr * grad(x))
        kept = self.beta * m
        return x - change - self.lr * kept, (kept + per_step(change, self.lr),)


@dataclass(frozen=True)
class QuasiGlobalMomentum(_OneMomentum):
    """QG-DmSGD: momentum of the agents' actual moves, which is nearly the same on all of them.

    ``x+ = W (x - lr (beta m + g(x)))``, ``m+ = mu m + (1 - mu) (x - x+) / lr`` (Lin, Karimireddy, Stich, Jaggi 2021,
    arXiv:2102.04761). With Nesterov's, ``g + beta (beta m + g)`` in the brackets.

    Where it comes to rest ``m`` is zero, so it ends where GradientDescent with the same ``lr`` does; with Nesterov's,
    where it does with ``(1 + beta) lr``. Averaging with neighbours has momentum too, and may diverge: on long one-way
    rings, with small self weights, with changing topologies that mix slowly, and with rare exchanges, as in LocalSteps.
    That is checked (``growth.py``). State: ``m``, as ``x``.

    Args:
        lr: The step.
        beta: The part of the momentum that is used in a step, 0 <= beta < 1.
        nesterov: Look ahead.
        mu: The part of the momentum that remains, 0 <= mu < 1; ``beta`` if not given.

    Raises:
        ValueError: ``beta`` or ``mu`` is out of its range.
    """

    nesterov: bool = False
    mu: float | None = None
    source: ClassVar[str] = "Lin, Karimireddy, Stich, Jaggi 2021, arXiv:2102.04761"

    @property
    def needs(self) -> tuple[Need, ...]:
        return DOUBLY_STOCHASTIC, CONNECTED, dies_out(self, under="its momentum")

    @property
    def _stays(self) -> float:
        return self.beta if self.mu is None else self.mu

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self._stays, "beta" if self.mu is None else "mu")

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        (m,) = state
        g = grad(x)
        direction = self.beta * m + g
        if self.nesterov:
            direction = g + self.beta * direction
        new = mix(x - self.lr * direction)
        return new, (self._stays * m + (1 - self._stays) * per_step(x - new, self.lr),)


@dataclass(frozen=True)
class AveragedMomentum(_OneMomentum):
    """DmSGD whose momentum is averaged with the neighbours too: twice the parameters in a step.

    ``m+ = W (beta m + g(x))``, ``x+ = W (x - lr m+)`` (after Ying et al. 2021, arXiv:2110.13363). With
    ``together=True`` x takes the step before the average, ``h = beta m + g(x)``, ``m+ = W h``, ``x+ = W (x - lr h)``:
    both are sent together (Yu, Jin, Yang 2019, arXiv:1905.03817, its decentralized algorithm). Ends between
    GradientDescent with ``lr`` and with ``lr / (1 - beta)``. State: ``m``, as ``x``.

    Args:
        lr: The step.
        beta: How much of the last step's stays, 0 <= beta < 1.
        together: Average x and m as they are after the local step, not x after m.

    Raises:
        ValueError: ``beta`` is out of its range.
    """

    together: bool = False
    source: ClassVar[str] = "after Ying et al. 2021, arXiv:2110.13363; `together`: Yu, Jin, Yang 2019, arXiv:1905.03817"

    @property
    def needs(self) -> tuple[Need, ...]:
        return DOUBLY_STOCHASTIC, CONNECTED, dies_out(self, by_self_weights())

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        (m,) = state
        local = self.beta * m + grad(x)
        m = mix(local)
        return mix(x - self.lr * (local if self.together else m)), (m,)


@dataclass(frozen=True)
class MomentumTracking(_OneMomentum):
    """Each agent follows its momentum plus an estimate of how all agents' mean differs: gradient tracking of momentum.

    ``m+ = beta m + g(x)``, ``x+ = W x - lr (m+ - c)``, ``c+ = W (c - m+) + m+``. At first ``m`` and ``c`` are
    ``(g - mean(g)) / (1 - beta)``, the mean over all agents (Takezawa, Bao, Niwa, Sato, Yamada 2022, arXiv:2209.15505,
    with the start of the authors' code). With ``beta = 0`` it is DIGing that starts from all agents' mean gradient.

    Exact, however different the agents' objectives are. Sends twice the parameters in a step. State: ``m`` and ``c``,
    as ``x``.

    Args:
        lr: The step.
        beta: The part of the last step's momentum that remains, 0 <= beta < 1.

    Raises:
        ValueError: ``beta`` is out of its range.
    """

    source: ClassVar[str] = "Takezawa, Bao, Niwa, Sato, Yamada 2022, arXiv:2209.15505"

    @property
    def needs(self) -> tuple[Need, ...]:
        return DOUBLY_STOCHASTIC, CONNECTED, dies_out(self, by_self_weights())

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        g = grad(x)
        apart = (g - mix.average(g)) / (1 - self.beta)
        return apart, apart

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        m, c = state
        m = self.beta * m + grad(x)
        return mix(x) - self.lr * (m - c), (m, mix(c - m) + m)


def check_beta(share: float, name: str = "beta") -> None:
    """Raise ValueError if it is no share that a momentum may keep."""
    if not (is_number(share) and 0 <= share < 1):
        raise ValueError(f"{name}={share}: momentum keeps a share of the last step's, 0 <= {name} < 1; 0.9 is usual")


@dataclass(frozen=True)
class AccumAdam(Algorithm):
    """AccumAdam: D-PSGD with Adam, whose moments take in the mean of ``accumulate`` gradients at a time.

    In step t = 1, 2, ..., with ``k = ceil(t / s)``: ``p = beta1 m + (1 - beta1) g(x)``, ``q = beta2 v + (1 - beta2)
    g(x)^2``, ``d = p / (1 - beta1^k) / (sqrt(q / (1 - beta2^k)) + eps)``, ``x+ = W (x - lr d)``, ``b+ = b + g(x) / s``.
    After every s-th: ``m+ = beta1 m + (1 - beta1) b+``, ``v+ = beta2 v + (1 - beta2) (b+)^2``, ``b+ = 0``; all are
    zero at first (Wang et al. 2024, arXiv:2410.11998). With ``atc=False``: ``x+ = W x - lr d``.

    The square of a gradient contains its noise, which is smaller in a mean over the batches of n agents than in one
    agent's gradient; the mean over s steps reduces it again. With ``accumulate=1`` it is Adam. Only ``x`` is averaged:
    ``m``, ``v`` and ``b`` are an agent's own, and never sent.

    If gradients have no noise it ends where D-PSGD on ``g / (|g| + eps)`` does, for any betas and s. ``eps`` is in the
    unit of gradients; with a wrapped optimizer that is the unit of its updates, so take SGD with ``lr=1``. State:
    ``m``, ``v`` and ``b``, as ``x``, and t, int64 ``[n, 1]`` or ``[1]``.

    Args:
        lr: The step.
        accumulate: s, how many gradients are taken in at once; about as many as there are agents.
        beta1: The part of the first moment that remains, 0 <= beta1 < 1.
        beta2: The part of the second moment that remains, 0 <= beta2 < 1.
        eps: Added to the root of the second moment.
        atc: Adapt, then combine; else adapt with combine.

    Raises:
        TypeError: ``accumulate`` is no whole number.
        ValueError: A number is out of its range.
    """

    lr: float
    accumulate: int
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    atc: bool = True
    source: ClassVar[str] = "Wang et al. 2024, arXiv:2410.11998, AccumAdam"
    one_gradient: ClassVar[bool] = True
    separable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count(self, "accumulate")
        check_beta(self.beta1, "beta1")
        check_beta(self.beta2, "beta2")
        if not (is_number(self.eps) and self.eps > 0):
            raise ValueError(f"eps={self.eps}: pass a small number above 0, such as 1e-8")

    @property
    def needs(self) -> tuple[Need, ...]:
        return DOUBLY_STOCHASTIC, CONNECTED, dies_out(self, by_self_weights())

    def at_rest(self) -> Algorithm:
        return Gossip()

    def cycle(self, rounds: int) -> int:
        return self.accumulate * rounds

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        zero = torch.zeros_like(x)
        # Not the number of the step: agents that restart after a loss count from 0.
        return zero, zero, zero, torch.zeros_like(mix.ones(x), dtype=torch.int64)

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        m, v, b, t = state
        g = grad(x)
        t = t + 1
        k = (-(-t // self.accumulate)).to(torch.promote_types(x.dtype, torch.float32))
        p, q = self._moments(m, v, g)
        p = p / (1 - self.beta1**k).to(x.dtype)
        q = q / (1 - self.beta2**k).to(x.dtype)
        moved = self.lr * p / (q.sqrt() + self.eps)
        b = b + g / self.accumulate
        full = t % self.accumulate == 0
        m, v = (torch.where(full, new, old) for new, old in zip(self._moments(m, v, b), (m, v), strict=True))
        return mix(x - moved) if self.atc else mix(x) - moved, (m, v, torch.where(full, 0, b), t)

    def _moments(self, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.beta1 * m + (1 - self.beta1) * g, self.beta2 * v + (1 - self.beta2) * g.square()


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
        TypeError: The algorithm takes its gradient more than once a step, or not at its own ``x``; or ``period`` is no
            whole number.
        ValueError: ``period`` is below 1.
    """

    period: int
    source: ClassVar[str] = "Johnson, Zhang 2013; Yuan, Ying, Liu, Sayed 2019, arXiv:1708.01384"
    one_gradient: ClassVar[bool] = False
    separable: ClassVar[bool] = False
    own_state: ClassVar[int] = 2

    def __post_init__(self) -> None:
        require_one_gradient("DecentralizedSVRG", self.algorithm)
        check_count(self, "period")

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
        "DmSGD",
        lambda: Momentum(GradientDescent(0.005), 0.9),
        1,
        "D-PSGD with the usual momentum, where the agents' data are alike.",
    ),
    Entry(
        "exact diffusion with momentum (EDM)",
        lambda: Momentum(ExactDiffusion(0.25, lazy=True), 0.8, dampened=True),
        1,
        "Momentum on data that differ, on one undirected graph.",
        exact=True,
    ),
    Entry(
        "DecentLaM",
        lambda: DecentLaM(0.02, 0.9),
        1,
        "Momentum and large batches on data that differ, on one undirected graph.",
    ),
    Entry(
        "QG-DmSGD",
        lambda: QuasiGlobalMomentum(0.02, 0.9),
        1,
        "Momentum on data that differ, on any doubly stochastic mixing; the usual choice for deep learning.",
    ),
    Entry(
        "DmSGD, averaged momentum",
        lambda: AveragedMomentum(0.01, 0.9),
        2,
        "Momentum on well connected graphs, such as the exponential ones, at twice the messages.",
    ),
    Entry(
        "DmSGD, momentum and parameters averaged at once",
        lambda: AveragedMomentum(0.01, 0.9, together=True),
        2,
        "As above, as it was first written.",
    ),
    Entry(
        "momentum tracking",
        lambda: MomentumTracking(0.003, 0.8),
        2,
        "Momentum on data that differ, to the optimum, on any doubly stochastic mixing.",
        exact=True,
    ),
    Entry(
        "AccumAdam",
        lambda: AccumAdam(0.01, accumulate=4),
        1,
        "Transformers and other models that want Adam, on many agents with small batches.",
    ),
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
