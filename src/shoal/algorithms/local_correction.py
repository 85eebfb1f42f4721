"""Local steps with a correction, so that agents whose data differ do not drift apart between two exchanges.

Under LocalSteps an algorithm's memory waits for the next exchange. The algorithms here use it in every local step. A
step is one gradient, and every ``every``-th step ends with an exchange.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from .algorithm import Algorithm, Gradient, State
from .catalog import Entry, register
from .exact import FIXED_AND_SYMMETRIC
from .mix import Mix
from .momentum import per_step
from .needs import CONNECTED, DOUBLY_STOCHASTIC, Need
from .stability.growth import by_self_weights, dies_out


@dataclass(frozen=True)
class _Corrected(Algorithm):
    """The common part: rounds of ``every`` steps; the k-th exchange uses round k of the topology."""

    lr: float
    every: int
    one_gradient: ClassVar[bool] = True
    separable: ClassVar[bool] = True
    own_rounds: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every={self.every}: pass the steps of a round, at least 1")

    def cycle(self, rounds: int) -> int:
        return self.every * rounds

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        x = x - self.lr * grad(x) - self._correction(state)
        if (mix.round + 1) % self.every:
            return x, state
        with mix.at_round(mix.round // self.every):
            return self._exchange(x, state, mix)

    @abstractmethod
    def _correction(self, state: State) -> torch.Tensor:
        """What a local step subtracts beside ``lr g(x)``."""

    @abstractmethod
    def _exchange(self, x: torch.Tensor, state: State, mix: Mix) -> tuple[torch.Tensor, State]:
        """The end of a round, from ``x`` after its last local step."""


@dataclass(frozen=True)
class KGT(_Corrected):
    """K-GT: gradient tracking with local steps, on any doubly stochastic mixing, also one that changes.

    A round of K = ``every`` steps from ``x0``: ``x+ = x - lr (g(x) + c)``. At its end ``z = (x0 - x) / (K lr)``,
    ``c+ = c - z + W z`` and ``x+ = W (x0 - outer_lr K lr z)``. At first ``c = mean(g) - g``, the mean over all agents
    (Liu, Lin, Koloskova, Stich 2023, arXiv:2301.01313, algorithm 1). If ``lr`` changes in a round, z has its last.

    Exact, however different the agents' objectives are. Sends twice the parameters in a round. State: ``c`` and ``x0``,
    as ``x``.

    Args:
        lr: The local step, eta_c in the paper.
        every: Steps of a round, K in the paper.
        outer_lr: The part of a round's change that is taken over, eta_s in the paper.

    Raises:
        ValueError: ``every`` is no count.
    """

    outer_lr: float = 1.0
    source: ClassVar[str] = "Liu, Lin, Koloskova, Stich 2023, arXiv:2301.01313, algorithm 1"

    @property
    def needs(self) -> tuple[Need, ...]:
        return DOUBLY_STOCHASTIC, CONNECTED, dies_out(self, by_self_weights())

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        g = grad(x)
        return mix.average(g) - g, x

    def _correction(self, state: State) -> torch.Tensor:
        return self.lr * state[0]

    def _exchange(self, x: torch.Tensor, state: State, mix: Mix) -> tuple[torch.Tensor, State]:
        c, begun = state
        moved = begun - x
        z = per_step(moved, self.every * self.lr)
        c = c - z + mix(z)
        x = mix(begun - self.outer_lr * moved)
        return x, (c, x)


@dataclass(frozen=True)
class LED(_Corrected):
    """Local exact diffusion: one message in a round, on one symmetric W.

    A round of K = ``every`` steps: ``x+ = x - lr g(x) - beta y``. At its end ``x+ = W x`` and ``y+ = y + x - W x``;
    ``y = 0`` at first (Alghunaim 2023, arXiv:2302.00620, equations 2a to 2c). With K = 1 and ``beta = 1`` it is
    :class:`~shoal.algorithms.ExactDiffusion`.

    Exact, however different the agents' objectives are. State: ``y``, as ``x``.

    Args:
        lr: The local step, alpha in the paper.
        every: Steps of a round, tau in the paper.
        beta: The part of ``y`` in a local step; ``1 / every`` if not given, so that a round subtracts ``y`` once. A
            smaller one tolerates eigenvalues of W nearer to -1.

    Raises:
        ValueError: ``every`` is no count.
    """

    beta: float | None = None
    source: ClassVar[str] = "Alghunaim 2023, arXiv:2302.00620, eqs. 2a to 2c"

    @property
    def needs(self) -> tuple[Need, ...]:
        return *FIXED_AND_SYMMETRIC, dies_out(self)

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return (torch.zeros_like(x),)

    def _correction(self, state: State) -> torch.Tensor:
        return (1 / self.every if self.beta is None else self.beta) * state[0]

    def _exchange(self, x: torch.Tensor, state: State, mix: Mix) -> tuple[torch.Tensor, State]:
        (y,) = state
        mixed = mix(x)
        return mixed, (y + x - mixed,)


register(
    Entry(
        "K-GT",
        lambda: KGT(0.005, every=2),
        2 / 2,
        "Slow networks, and data that differ between agents: local steps that do not drift apart.",
        exact=True,
    ),
    Entry(
        "local exact diffusion (LED)",
        lambda: LED(0.02, every=5),
        1 / 5,
        "As above for half the messages, on one undirected graph.",
        exact=True,
    ),
)
