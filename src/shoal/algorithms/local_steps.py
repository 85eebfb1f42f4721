"""Less frequent exchanges, and occasional exchanges of all agents: the same algorithm over another ``mix``.

Both wrappers change what the algorithm's W is from step to step, so they take any algorithm that allows W to change.
They compose: ``LocalSteps(GossipPGA(GradientDescent(lr), every=1), every=16)`` is Local SGD, which takes 16 steps alone
and then the mean of all (Stich 2018, arXiv:1805.09767).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ..compression import Compressor
from ..compression.draws import HashStream
from ..ops.robust import Robust
from .algorithm import Algorithm, Gradient
from .catalog import Entry, register
from .gradient_descent import GradientDescent, GradientTracking
from .mix import EVERYBODY, Mix
from .needs import LINKS, STATIC, TREE, Need
from .stability.growth import with_wrapper


def check_wrapped(wrapper: Algorithm, algorithm: Algorithm, every: int) -> None:
    """Refuse what cannot do without an exchange in every step, or without always the same.

    Raises:
        ValueError: ``every`` is no count, or the algorithm needs one W for all steps or a message for each edge, or has
            an ``every`` of its own.
    """
    if every < 1:
        raise ValueError(f"every={every}: pass a number of steps, at least 1")
    who, wrapped = type(wrapper).__name__, type(algorithm).__name__
    for layer in layers(algorithm):
        if layer.own_rounds:
            itself = type(layer).__name__
            raise ValueError(
                f"{itself} says itself how often agents exchange, and {who} would say otherwise. Take {itself} "
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
    """The algorithm, the one that it wraps, and so on."""
    inner: Algorithm | None = algorithm
    while inner is not None:
        yield inner
        inner = getattr(inner, "algorithm", None)


@dataclass(frozen=True)
class _Sometimes(Algorithm):
    """The common part of the wrappers: everything except ``mix`` is the algorithm's."""

    algorithm: Algorithm
    every: int

    def __post_init__(self) -> None:
        check_wrapped(self, self.algorithm, self.every)

    @property
    def one_gradient(self) -> bool:  # type: ignore[override]
        return self.algorithm.one_gradient

    @property
    def separable(self) -> bool:  # type: ignore[override]
        return self.algorithm.separable

    @property
    def needs(self) -> tuple[Need, ...]:
        return with_wrapper(self, self.algorithm.needs)

    def at_rest(self) -> Algorithm:
        return replace(self, algorithm=self.algorithm.at_rest())

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> Any:
        return self.algorithm.init(x, grad, mix)

    def estimate(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        return self.algorithm.estimate(x, state)


@dataclass(frozen=True)
class LocalSteps(_Sometimes):
    """Exchange in every ``every``-th step only, W = I in the others (Koloskova et al. 2020, arXiv:2003.10422).

    Steps ``every - 1``, ``2 every - 1``, ... exchange; the k-th exchange uses round k of the topology. Algorithms that
    are exact on changing W stay exact; GradientDescent ends farther from the optimum, the rarer it exchanges.

    Args:
        algorithm: Any that allows W to change, and communicates by averages.
        every: Steps for each exchange; 1 is the algorithm itself.

    Raises:
        ValueError: ``every`` is no count, or the algorithm needs one W for all steps or a message for each edge, or
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
        ValueError: ``every`` is no count, or the algorithm needs one W for all steps or a message for each edge, or
            has an ``every`` of its own.
    """

    source: ClassVar[str] = "Chen, Yuan, Zhang, Pan, Xu, Yin 2021, arXiv:2105.09080"

    def cycle(self, rounds: int) -> int:
        return math.lcm(self.every, self.algorithm.cycle(rounds))

    def step(self, x: torch.Tensor, state: Any, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, Any]:
        everybody = (mix.round + 1) % self.every == 0
        return self.algorithm.step(x, state, grad, _Everybody(mix) if everybody else mix)


class Through(Mix):
    """Another's verbs, under the number of the step at which it was made."""

    def __init__(self, mix: Mix) -> None:
        super().__init__(mix.seed)
        self._mix, self.size, self.round, self.step = mix, mix.size, mix.round, mix.step

    def __call__(
        self, x: torch.Tensor, *, nbytes: int | None = None, speaks: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._mix(x, nbytes=nbytes, speaks=speaks)

    def robust(self, x: torch.Tensor, rule: Robust) -> torch.Tensor:
        return self._mix.robust(x, rule)

    def pull(self, x: torch.Tensor) -> torch.Tensor:
        return self._mix.pull(x)

    def push(self, x: torch.Tensor) -> torch.Tensor:
        return self._mix.push(x)

    def average(self, x: torch.Tensor, group: str = EVERYBODY) -> torch.Tensor:
        return self._mix.average(x, group)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        return self._mix.share(x)

    def whole(self, share: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._mix.whole(share, x)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        return self._mix.spread(x)

    def gather(self, messages: torch.Tensor) -> torch.Tensor:
        return self._mix.gather(messages)

    def by_agent(self, rows: torch.Tensor) -> torch.Tensor:
        return self._mix.by_agent(rows)

    def by_link(self, rows: torch.Tensor, r: int) -> torch.Tensor:
        return self._mix.by_link(rows, r)

    def edges(self, messages: torch.Tensor, *, nbytes: int | None = None) -> torch.Tensor:
        return self._mix.edges(messages, nbytes=nbytes)

    def sign(self, like: torch.Tensor) -> torch.Tensor:
        return self._mix.sign(like)

    def compressed(self, x: torch.Tensor, compressor: Compressor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._mix.compressed(x, compressor)

    def uniform(self, like: torch.Tensor) -> torch.Tensor:
        return self._mix.uniform(like)

    def stream(self, like: torch.Tensor) -> HashStream:
        return self._mix.stream(like)

    def _agents(self, like: torch.Tensor) -> torch.Tensor:
        return self._mix._agents(like)


class InItsRound(Through):
    """Another's verbs, in the round of that one: an algorithm with rounds of its own sets the topology's round."""

    def __init__(self, mix: Mix) -> None:
        self._mix, round_ = mix, mix.round
        super().__init__(mix)  # which begins with round 0
        self.round = round_

    @property
    def round(self) -> int:
        return self._mix.round

    @round.setter
    def round(self, round_: int) -> None:
        self._mix.round = round_


class Quiet(Through):
    """W = I, and nothing is sent. A new tensor each time, as of any exchange."""

    def __call__(
        self, x: torch.Tensor, *, nbytes: int | None = None, speaks: torch.Tensor | None = None
    ) -> torch.Tensor:
        return x.clone()

    def compressed(self, x: torch.Tensor, compressor: Compressor) -> tuple[torch.Tensor, torch.Tensor]:
        return Mix.compressed(self, x, compressor)

    def robust(self, x: torch.Tensor, rule: Robust) -> torch.Tensor:
        return x.clone()

    def pull(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def push(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def average(self, x: torch.Tensor, group: str = EVERYBODY) -> torch.Tensor:
        return x.clone()

    def edges(self, messages: torch.Tensor, *, nbytes: int | None = None) -> torch.Tensor:
        raise ValueError(
            "between exchanges no neighbour sends a message, and this algorithm needs one from each. "
            "LocalSteps takes algorithms that communicate by averages."
        )


class _Everybody(Through):
    """W = 1 1^T / n, which is its own row- and column-stochastic form."""

    def __call__(
        self, x: torch.Tensor, *, nbytes: int | None = None, speaks: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._mix.average(x)

    def compressed(self, x: torch.Tensor, compressor: Compressor) -> tuple[torch.Tensor, torch.Tensor]:
        return Mix.compressed(self, x, compressor)

    def pull(self, x: torch.Tensor) -> torch.Tensor:
        return self._mix.average(x)

    def push(self, x: torch.Tensor) -> torch.Tensor:
        return self._mix.average(x)


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
)
