"""Less frequent exchanges, and occasional exchanges of all agents.

Two wrappers change what an algorithm's W is from step to step, so they take any algorithm that allows W to change. They
compose: ``LocalSteps(GossipPGA(GradientDescent(lr), every=1), every=16)`` is Local SGD, which takes 16 steps alone and
then the mean of all (Stich 2018, arXiv:1805.09767).

Under :class:`LocalSteps` an algorithm's memory waits for the next exchange. :class:`KGT` and :class:`LED` use it in
every local step, as a correction, so that agents whose data differ do not drift apart between two exchanges. A step of
theirs is one gradient, and every ``every``-th step ends with an exchange.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..compression import Compressor
from ..topology._validate import check_count
from .algorithm import Algorithm, Gradient, State, require_algorithm
from .catalog import Entry, register
from .gradient_descent import GradientDescent, GradientTracking, per_step
from .mix import Mix, Quiet, Through
from .needs import CONNECTED, DOUBLY_STOCHASTIC, FIXED_AND_SYMMETRIC, LINKS, STATIC, TREE, Need
from .schedule_weights import Form
from .stability.growth import by_self_weights, dies_out
from .wrappers import Wrapper


def check_wrapped(wrapper: Algorithm, algorithm: Algorithm) -> None:
    """Refuse what cannot do without an exchange in every step, or without always the same.

    Raises:
        TypeError: ``every`` is no whole number, or ``algorithm`` is none.
        ValueError: ``every`` is below 1, or the algorithm needs one W for all steps or a message for each edge, or has
            an ``every`` of its own.
    """
    check_count(wrapper, "every")
    require_algorithm(algorithm)
    who, wrapped = type(wrapper).__name__, type(algorithm).__name__
    for layer in layers(algorithm):
        if layer.own_rounds:
            itself = type(layer).__name__
            raise ValueError(
                f"{itself} sets how often agents exchange, and {who} would change that. Take {itself} "
                "alone, with the `every` that is wanted."
            )
    needed = {need.name for need in algorithm.needs}  # by name, because the remedies differ
    if STATIC.name in needed:
        raise ValueError(
            f"{wrapped} needs the same W in every step, and {who} changes it. Take an algorithm that allows W to "
            "change: GradientDescent, or GradientTracking, which is exact."
        )
    if LINKS.name in needed or TREE.name in needed:
        raise ValueError(
            f"{wrapped} sends each neighbour a message of its own, and {who} can only change an average. Take an "
            "algorithm that mixes: GradientDescent, or GradientTracking, which is exact."
        )


def layers(algorithm: Algorithm) -> Iterator[Algorithm]:
    """Yield the algorithm, then the algorithm that it wraps, and so on."""
    inner: Algorithm | None = algorithm
    while inner is not None:
        yield inner
        inner = getattr(inner, "algorithm", None)


@dataclass(frozen=True)
class _Sometimes(Wrapper):
    """The common part of the wrappers that change ``mix`` in some steps."""

    every: int

    def __post_init__(self) -> None:
        check_wrapped(self, self.algorithm)


@dataclass(frozen=True)
class LocalSteps(_Sometimes):
    """Exchange in every ``every``-th step only, W = I in the others (Koloskova et al. 2020, arXiv:2003.10422).

    Steps ``every - 1``, ``2 every - 1``, ... exchange; the k-th exchange uses round k of the topology. Algorithms that
    are exact on changing W stay exact; GradientDescent ends farther from the optimum, the rarer it exchanges.

    Args:
        algorithm: Any that allows W to change, and communicates by averages.
        every: Steps for each exchange; 1 is the algorithm itself.

    Raises:
        TypeError: ``every`` is no whole number, or ``algorithm`` is none.
        ValueError: ``every`` is below 1, or the algorithm needs one W for all steps or a message for each edge, or
            has an ``every`` of its own.
    """

    source: ClassVar[str] = "Koloskova et al. 2020, arXiv:2003.10422; Stich 2018, arXiv:1805.09767"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.algorithm, LocalSteps):
            raise ValueError("LocalSteps of LocalSteps: pass the algorithm itself, and the product of the two counts")

    def cycle(self, rounds: int) -> int:
        return self.every * self.algorithm.cycle(rounds)

    def step(self, x: torch.Tensor, state: Any, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, Any]:
        step = mix.round
        if (step + 1) % self.every:
            return self.algorithm.step(x, state, grad, Quiet(mix))
        exchange = Through(mix)
        with mix.at_round(step // self.every):
            return self.algorithm.step(x, state, grad, exchange)


@dataclass(frozen=True)
class GossipPGA(_Sometimes):
    """Gossip with periodic global averaging: in every ``every``-th step the mean of all takes the place of ``W x``.

    Steps ``every - 1``, ``2 every - 1``, ... average, the first after ``every - 1`` steps of gossip (Chen et al. 2021,
    arXiv:2105.09080).

    Args:
        algorithm: Any that allows W to change, and communicates by averages.
        every: Steps for each global average; 1 averages in all of them.

    Raises:
        TypeError: ``every`` is no whole number, or ``algorithm`` is none.
        ValueError: ``every`` is below 1, or the algorithm needs one W for all steps or a message for each edge, or
            has an ``every`` of its own.
    """

    source: ClassVar[str] = "Chen, Yuan, Zhang, Pan, Xu, Yin 2021, arXiv:2105.09080"

    def cycle(self, rounds: int) -> int:
        return math.lcm(self.every, self.algorithm.cycle(rounds))

    def step(self, x: torch.Tensor, state: Any, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, Any]:
        everybody = (mix.round + 1) % self.every == 0
        return self.algorithm.step(x, state, grad, _Everybody(mix) if everybody else mix)


class _Everybody(Through):
    """W = 1 1^T / n, which is its own row- and column-stochastic form."""

    def _weigh(
        self, form: Form, x: torch.Tensor, nbytes: int | None = None, speaks: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._mix.average(x)

    def compressed(self, x: torch.Tensor, compressor: Compressor) -> tuple[torch.Tensor, torch.Tensor]:
        return Mix.compressed(self, x, compressor)


@dataclass(frozen=True)
class _Corrected(Algorithm):
    """The common part: rounds of ``every`` steps; the k-th exchange uses round k of the topology."""

    lr: float
    every: int
    one_gradient: ClassVar[bool] = True
    separable: ClassVar[bool] = True
    own_rounds: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count(self, "every")

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
        """The correction that a local step subtracts, in addition to ``lr g(x)``."""

    @abstractmethod
    def _exchange(self, x: torch.Tensor, state: State, mix: Mix) -> tuple[torch.Tensor, State]:
        """The end of a round, from ``x`` after its last local step."""


@dataclass(frozen=True)
class KGT(_Corrected):
    """K-GT: gradient tracking with local steps. The mixing is doubly stochastic, and may change.

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
        TypeError: ``every`` is no whole number.
        ValueError: ``every`` is below 1.
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
        TypeError: ``every`` is no whole number.
        ValueError: ``every`` is below 1.
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
        "D-PSGD with local steps",
        lambda: LocalSteps(GradientDescent(0.05), every=5),
        1 / 5,
        "Slow networks: a fifth of the messages, where the agents' data are alike.",
    ),
    Entry(
        "gradient tracking with local steps",
        lambda: LocalSteps(GradientTracking(0.01), every=2),
        2 / 2,
        "Slow networks, and data that differ between agents.",
        exact=True,
    ),
    Entry(
        "Gossip-PGA",
        lambda: GossipPGA(GradientDescent(0.05), every=5),
        4 / 5 + 1 / 10,  # on a ring a mean counts as half a message to each of the two neighbours
        "Sparse graphs of many agents, where an all-reduce now and then is affordable.",
    ),
    Entry(
        "Local SGD",
        lambda: LocalSteps(GossipPGA(GradientDescent(0.05), every=1), every=5),
        1 / 10,
        "Slow networks with a good all-reduce. The topology only gives the agents that take part.",
    ),
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
