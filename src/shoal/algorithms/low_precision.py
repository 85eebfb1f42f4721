"""BAGUA's low-precision decentralized SGD: the change of the parameters is sent in eight bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..compression import Compressor, MinMaxUInt8
from .algorithm import Algorithm, Gradient, State
from .catalog import Entry, register
from .choco import STATIC_COPIES, contraction
from .mix import Mix
from .needs import CONNECTED, DOUBLY_STOCHASTIC, SYMMETRIC, Need
from .stability.growth import Gossip, by_self_weights, dies_out


@dataclass(frozen=True)
class LowPrecision(Algorithm):
    """D-PSGD in which every agent's parameters are the sum of its sent messages.

    ``q = C(W x - lr g(x) - x)``, ``x+ = x + q``: since all messages together are the parameters, the neighbours'
    replicas of them are never wrong (Tang et al. 2018, arXiv:1803.06652, algorithm 1, "difference compression").
    ``s = W x`` is kept instead of the replicas and grows by the mixed messages, so W must stay the same. On a ring with
    weights of a third and :class:`~shoal.compression.MinMaxUInt8` it is BAGUA's low-precision decentralized SGD, which
    computes ``x + L / 3 + R / 3 - 5 w / 3`` with replicas L and R, its own w, and ``x = w - lr g``.

    With two agents BAGUA's ring has each agent twice as the other's neighbour, so its weights are a third and two
    thirds, while every ring of two in Shoal has halves; ``shoal.topology.Circulant(2, {0: 1 / 3, 1: 2 / 3})`` is
    BAGUA's. Its ``communication_interval`` communicates in steps 1, k + 1, 2 k + 1, ...; of a wrapped optimizer
    ``num_steps_per_communication`` is the same if it is set to k after the first step.

    Nothing corrects the error of a message, so the compressor must be a fine one: for a coarse one take ChocoSGD. In
    the first round, before any message, the parameters are mixed once as they are.

    Args:
        lr: The step.
        compressor: Eight bits, a minimum and a maximum by default.
    """

    lr: float
    compressor: Compressor = field(default_factory=MinMaxUInt8)
    source: ClassVar[str] = "Gan et al. 2021, arXiv:2107.01499; Tang et al. 2018, arXiv:1803.06652, algorithm 1"
    one_gradient: ClassVar[bool] = True
    separable: ClassVar[bool] = True

    @property
    def needs(self) -> tuple[Need, ...]:
        averages = dies_out(self, by_self_weights())
        return DOUBLY_STOCHASTIC, SYMMETRIC, STATIC_COPIES, CONNECTED, averages, contraction(self.compressor)

    def at_rest(self) -> Algorithm:
        return Gossip()

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return (mix(x),)

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        (s,) = state
        mixed, q = mix.compressed(s - self.lr * grad(x) - x, self.compressor)
        return x + q, (s + mixed,)


register(
    Entry(
        "low-precision D-PSGD",
        lambda: LowPrecision(1 / 32, MinMaxUInt8(dyadic=True)),
        1016 / 8000,
        "D-PSGD with a byte for each parameter and nothing to tune.",
    )
)
