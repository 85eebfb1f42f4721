"""Outer optimizers and elastic averaging: agents take many steps alone, and then one step with a common point.

The total change of the steps is the gradient of an outer step in SlowMo, DiLoCo, NoLoCo and GASLoC. A fixed point of
the wrapped algorithm is a fixed point of each: the outer gradient and its momentum are zero there. They change the
speed of convergence, and the averaging of noise. In elastic averaging the agents are pulled to a centre, and the centre
to their mean, without being made equal.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from ..topology._validate import check_count
from .algorithm import Algorithm, Gradient, State, is_number
from .catalog import Entry, register
from .gradient_descent import GradientDescent, per_step
from .local_steps import GossipPGA, LocalSteps, check_wrapped, layers
from .mix import Mix, Quiet
from .momentum import check_beta
from .needs import CONNECTED, CONNECTED_LINKS, DOUBLY_STOCHASTIC, Facts, Need
from .stability.growth import dies_out
from .wrappers import Wrapper


@dataclass(frozen=True)
class _Outer(Wrapper):
    """The common part of SlowMo and DiLoCo: rounds of ``every`` steps that end with the mean of all, and a state of
    them.
    """

    every: int
    own_rounds: ClassVar[bool] = True
    own_state: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _check_wrapped(self, self.algorithm)

    @cached_property
    def _base(self) -> Algorithm:
        """Local SGD, if the algorithm is gradient descent."""
        return LocalSteps(GossipPGA(self.algorithm, every=1), self.every)

    def cycle(self, rounds: int) -> int:
        return math.lcm(self.every, self._base.cycle(rounds))

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return mix.average(x), torch.zeros_like(x), *self.algorithm.init(x, grad, mix)

    def step(self, x: torch.Tensor, state: Any, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        before, u, *inner = state
        x, after = self._base.step(x, tuple(inner), grad, mix)
        if (mix.round + 1) % self.every == 0:
            x, u = self._outer_step(before, u, before - x)
            before = x
        return x, (before, u, *after)

    @abstractmethod
    def _outer_step(self, x: torch.Tensor, u: torch.Tensor, moved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The new ``x`` and ``u``, from ``x`` at the begin of the round and the change of its steps (``moved``) as the
        gradient.
        """


@dataclass(frozen=True)
class SlowMo(_Outer):
    """Slow momentum: heavy-ball momentum of rounds of ``every`` steps.

    After a round of the algorithm that began at ``x0`` and ends with the mean ``xm`` of all:
    ``u+ = beta u + (x0 - xm) / lr``, ``x+ = x0 - alpha lr u+``, with ``u = 0`` at first (Wang, Tantia, Ballas, Rabbat
    2020, arXiv:1910.00643). Here ``lr`` is the algorithm's, as a multiple of its initial one; in a round in which it
    changes, the last step's.

    It ends where the algorithm alone would, averaged as often. With ``beta=0, alpha=1`` it is that: Local SGD over
    GradientDescent, or GossipPGA with ``gossip=True``. The algorithm's state is kept from round to round. State: ``x0``
    and ``u``, as ``x``, and then the algorithm's; all agents have the same two.

    Args:
        algorithm: Any that allows W to change, communicates by averages, and begins its next step at its ``x``.
        every: Steps of a round.
        beta: The part of the last round's momentum that remains, 0 <= beta < 1.
        alpha: The outer step, 0 < alpha < 2 (1 + beta).
        gossip: Within a round agents average with the neighbours, and not only at its end with all.
        rate: For :meth:`scaled`.

    Raises:
        TypeError: ``every`` is no whole number, or ``algorithm`` is none.
        ValueError: A number is out of its range, or the algorithm cannot be wrapped.
    """

    beta: float
    alpha: float = 1.0
    gossip: bool = False
    rate: float | torch.Tensor = field(default=1.0, repr=False)
    source: ClassVar[str] = "Wang, Tantia, Ballas, Rabbat 2020, arXiv:1910.00643, algorithm 1"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.beta)
        _check_step("alpha", self.alpha, self.beta, 2 * (1 + self.beta))

    @cached_property
    def _base(self) -> Algorithm:
        return GossipPGA(self.algorithm, self.every) if self.gossip else super()._base

    def scaled(self, by: float | torch.Tensor) -> Algorithm | None:
        inner = self.algorithm.scaled(by)
        return None if inner is None else replace(self, algorithm=inner, rate=self.rate * by)

    def _outer_step(self, x: torch.Tensor, u: torch.Tensor, moved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        u = self.beta * u + per_step(moved, self.rate)
        return x - self.alpha * self.rate * u, u


@dataclass(frozen=True)
class DiLoCo(_Outer):
    """DiLoCo: Nesterov's momentum of rounds of ``every`` steps alone, with a step that no learning rate changes.

    After a round that began at ``x0`` and ends with the mean ``xm`` of all: ``u+ = beta u + (x0 - xm)``,
    ``x+ = x0 - outer_lr (x0 - xm + beta u+)``, with ``u = 0`` at first (Douillard et al. 2023, arXiv:2311.08105, with
    AdamW inside). Around a wrapped AdamW, over ``GradientDescent(1.0)``, it is just that.

    It ends where Local SGD with as many steps does. The state of an agent's optimizer is its own, and is kept from
    round to round. State: ``x0`` and ``u``, as ``x``, and then the algorithm's; all agents have the same two.

    Args:
        algorithm: Any that allows W to change, communicates by averages, and begins its next step at its ``x``.
        every: Steps of a round; 50 to 500 are usual.
        outer_lr: The outer step, 0 < outer_lr < 2 (1 + beta) / (1 + 2 beta).
        beta: The part of the last round's momentum that remains, 0 <= beta < 1.

    Raises:
        TypeError: ``every`` is no whole number, or ``algorithm`` is none.
        ValueError: A number is out of its range, or the algorithm cannot be wrapped.
    """

    outer_lr: float = 0.7
    beta: float = 0.9
    source: ClassVar[str] = "Douillard et al. 2023, arXiv:2311.08105, algorithm 1"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.beta)
        _check_step("outer_lr", self.outer_lr, self.beta, 2 * (1 + self.beta) / (1 + 2 * self.beta))

    def _outer_step(self, x: torch.Tensor, u: torch.Tensor, moved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        u = self.beta * u + moved
        return x - self.outer_lr * (moved + self.beta * u), u


@dataclass(frozen=True)
class _AmongNeighbours(Algorithm):
    """The common part of NoLoCo and GASLoC: rounds of ``every`` steps alone, each with one exchange at its end.

    The k-th exchange uses round k of the topology. State: ``phi`` of the begin of the round, and one memory of x's
    shape, and then the algorithm's.
    """

    algorithm: Algorithm
    every: int
    one_gradient: ClassVar[bool] = True
    own_rounds: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_wrapped(self, self.algorithm)
        if not self.algorithm.one_gradient:
            raise TypeError(
                f"{type(self).__name__} lets agents step alone, and what {type(self.algorithm).__name__} remembers "
                "would never be exchanged. Take an algorithm with one_gradient = True, such as GradientDescent, or "
                "DiLoCo, which averages that too."
            )

    @property
    def separable(self) -> bool:  # type: ignore[override]
        return self.algorithm.separable

    @property
    def needs(self) -> tuple[Need, ...]:
        return DOUBLY_STOCHASTIC, CONNECTED, dies_out(self, under="its momentum")

    def at_rest(self) -> Algorithm:
        # Steps alone change nothing without a gradient, and need not be linear in their state.
        return replace(self, algorithm=GradientDescent(1.0), every=1)

    def cycle(self, rounds: int) -> int:
        return math.lcm(self.every * rounds, self.algorithm.cycle(1))

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return x, self._first(x), *self.algorithm.init(x, grad, mix)

    def step(self, x: torch.Tensor, state: Any, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        phi, memory, *inner = state
        x, after = self.algorithm.step(x, tuple(inner), grad, Quiet(mix))
        if (mix.round + 1) % self.every:
            return x, (phi, memory, *after)
        with mix.at_round(mix.round // self.every):
            phi, memory = self._outer_step(phi, memory, x - phi, mix)
        return phi, (phi, memory, *after)

    @abstractmethod
    def _first(self, x: torch.Tensor) -> torch.Tensor:
        """The memory before the first round, which begins at ``x``."""

    @abstractmethod
    def _outer_step(
        self, phi: torch.Tensor, memory: torch.Tensor, moved: torch.Tensor, mix: Mix
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new ``phi`` and memory, from those of the begin of the round and the change of its steps (``moved``)."""


@dataclass(frozen=True)
class NoLoCo(_AmongNeighbours):
    """NoLoCo: an outer momentum without a mean of all. Agents average with the neighbours of a round, as with one.

    After ``every`` steps alone, from ``phi`` to ``x``: ``delta+ = alpha delta + beta W (x - phi) - gamma (phi - W
    phi)``, ``phi+ = phi + delta+``, and the next round begins there; ``delta = 0`` at first (Kolehmainen et al. 2025,
    arXiv:2506.10911). ``W (beta (x - phi) + gamma phi)`` contains both in one message of x's size. The paper's W pairs
    agents at random, :class:`~shoal.topology.RandomMatchings`; the k-th exchange uses round k of the topology.

    The mean of all ``phi`` takes the step of a heavy ball. Where the agents' objectives differ their answers stay
    apart, the farther the longer the rounds: average them at the end. On a W that is the mean of all, and from one
    start, it is SlowMo with the outer step ``beta`` and the momentum ``alpha``. Whether ``alpha`` and ``gamma`` bring
    agents together on a topology is checked (``growth.py``). State: ``phi`` and ``delta``, as ``x``, and then the
    algorithm's.

    Args:
        algorithm: An algorithm that takes one gradient a step, and allows W to change. Its steps are taken alone, with
            W = I.
        every: Steps of a round.
        alpha: How much of the last round's momentum stays, 0 <= alpha < 1.
        beta: The outer step, 0 < beta < 2 (1 + alpha).
        gamma: How far to go towards the neighbours' ``phi``.

    Raises:
        TypeError: The algorithm takes its gradient more than once a step, or not at its own ``x``; or ``every`` is no
            whole number.
        ValueError: A number is out of its range, or the algorithm cannot be wrapped.
    """

    alpha: float = 0.5
    beta: float = 0.7
    gamma: float = 1.0
    source: ClassVar[str] = "Kolehmainen et al. 2025, arXiv:2506.10911"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.alpha, "alpha")
        _check_step("beta", self.beta, self.alpha, 2 * (1 + self.alpha))

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    def _outer_step(
        self, phi: torch.Tensor, memory: torch.Tensor, moved: torch.Tensor, mix: Mix
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = mix(self.beta * moved + self.gamma * phi)
        delta = self.alpha * memory + mixed - self.gamma * phi
        return phi + delta, delta


@dataclass(frozen=True)
class GASLoC(_AmongNeighbours):
    """GASLoC: one momentum accelerates both the outer optimizer and the averaging with the neighbours.

    After ``every`` steps alone, from ``phi`` to ``x``: ``s = phi + outer_lr (x - phi)``, ``phi+ = s - alpha (s - W s) +
    gamma (s - s_prev)``, and the next round begins there; ``s_prev = phi`` at first. ``alpha (I - W)`` is the paper's
    Laplacian times its step (Cagnasso, Belilovsky, Oyallon 2026, arXiv:2606.11081, "Unifying Local Communications and
    Local Updates for LLM Pretraining"). The equation is that of a secondary description, ``canon/math/gasloc.md`` of
    github.com/junaidaliop/zij: the text of the paper was not available. The start and the defaults are Shoal's.

    The mean of all ``phi`` takes the step of Nesterov's momentum, as in :class:`DiLoCo` with ``beta=gamma``. Without a
    gradient the differences between agents follow a heavy ball, so agents agree in fewer rounds on a graph with a small
    spectral gap. On one W ``gamma`` does not move the fixed point. With ``outer_lr=1``, ``alpha=1`` and ``gamma=0`` it
    is ``LocalSteps`` over ``GradientDescent``. Where the agents' objectives differ their answers stay
    apart, the farther the longer the rounds: average them at the end. Whether ``alpha`` and ``gamma`` bring agents
    together on a topology is checked (``growth.py``). State: ``phi`` and ``s_prev``, as ``x``, and then the
    algorithm's. An exchange sends ``s``, one message of x's size.

    Args:
        algorithm: As of :class:`NoLoCo`.
        every: Steps of a round, H in the paper.
        outer_lr: The outer step, eta in the paper, 0 < outer_lr < 2 (1 + gamma) / (1 + 2 gamma).
        alpha: How far to go to the neighbours' average of ``s``.
        gamma: The part of the last change of ``s`` that is added, 0 <= gamma < 1.

    Raises:
        TypeError: The algorithm takes its gradient more than once a step, or not at its own ``x``; or ``every`` is no
            whole number.
        ValueError: A number is out of its range, or the algorithm cannot be wrapped.
    """

    outer_lr: float = 0.7
    alpha: float = 1.0
    gamma: float = 0.5
    source: ClassVar[str] = (
        "Cagnasso, Belilovsky, Oyallon 2026, arXiv:2606.11081, as described in github.com/junaidaliop/zij"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.gamma, "gamma")
        _check_step("outer_lr", self.outer_lr, self.gamma, 2 * (1 + self.gamma) / (1 + 2 * self.gamma))

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def _outer_step(
        self, phi: torch.Tensor, memory: torch.Tensor, moved: torch.Tensor, mix: Mix
    ) -> tuple[torch.Tensor, torch.Tensor]:
        s = phi + self.outer_lr * moved
        return s - self.alpha * (s - mix(s)) + self.gamma * (s - memory), s


def _check_wrapped(outer: Algorithm, algorithm: Algorithm) -> None:
    check_wrapped(outer, algorithm)
    if isinstance(algorithm, LocalSteps | GossipPGA):
        raise ValueError(
            f"{type(outer).__name__} of {type(algorithm).__name__}: both set when agents exchange. Pass the algorithm "
            "that this one wraps, and `every`."
        )
    for layer in layers(algorithm):
        if not layer.from_x:
            raise ValueError(
                f"{type(outer).__name__} moves x between two steps, and {type(layer).__name__} recomputes it from "
                "its state, so that move would have no effect. Take an algorithm that goes on from x: GradientDescent"
            )


def _check_step(name: str, step: float, kept: float, limit: float) -> None:
    """Check the step of a heavy ball whose every round converges, as long rounds do."""
    if not (is_number(step) and 0 < step < limit):
        raise ValueError(
            f"{name}={step}: with a momentum of {kept} an outer step swings up from {limit:.4g} on; pass 0 < {name} < "
            f"{limit:.4g}"
        )


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
        TypeError: ``every`` is no whole number.
        ValueError: ``every`` is below 1, or ``beta`` is not between 0 and 2.
    """

    lr: float
    every: int
    beta: float = 0.9
    source: ClassVar[str] = "Zhang, Choromanska, LeCun 2015, arXiv:1412.6651"
    own_rounds: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count(self, "every")
        if not (is_number(self.beta) and 0 < self.beta < 2):
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
        "SlowMo",
        lambda: SlowMo(GradientDescent(0.05), every=5, beta=0.7),
        1 / 10,
        "Local SGD with momentum that all agents share, where noise or long rounds make it slow.",
    ),
    Entry(
        "SlowMo over D-PSGD",
        lambda: SlowMo(GradientDescent(0.05), every=5, beta=0.7, gossip=True),
        4 / 5 + 1 / 10,
        "Gossip-PGA with momentum that all agents share.",
    ),
    Entry(
        "DiLoCo",
        lambda: DiLoCo(GradientDescent(0.05), every=5),
        1 / 10,
        "Very slow networks: hundreds of steps of AdamW, then one mean of all.",
    ),
    Entry(
        "NoLoCo",
        lambda: NoLoCo(GradientDescent(0.05), every=5),
        1 / 5,
        "As DiLoCo, where a mean of all costs too much: on random pairs, with one mean at the end.",
    ),
    Entry(
        "GASLoC",
        lambda: GASLoC(GradientDescent(0.05), every=5),
        1 / 5,
        "As NoLoCo, on sparse graphs: its momentum also accelerates the averaging with the neighbours.",
    ),
    Entry(
        "EASGD",
        lambda: EASGD(0.05, every=5),
        1 / 10,
        "Agents that are to search apart from each other, and an answer in their middle.",
    ),
)
