"""Gossip with compressed messages and one step of gradient descent: it ends near the optimum, as D-PSGD does."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..compression import Compressor, TopK
from .algorithm import Algorithm, Gradient, State
from .catalog import Entry, register
from .mix import Mix
from .needs import CONNECTED, DOUBLY_STOCHASTIC, STATIC, SYMMETRIC, Facts, Need
from .stability.growth import Gossip, by_part_of_the_way, dies_out

STATIC_COPIES = replace(STATIC, remedy="Take a static graph, or DeepSqueeze, which keeps no copies of its neighbours.")


def contraction(compressor: Compressor) -> Need:
    """The condition that messages reduce the remaining difference on average: otherwise their errors amplify each
    other.

    ``Cast`` and ``MinMaxUInt8`` fulfil it for messages above their smallest number. A smaller message may arrive as
    zero, so agents stop at about that distance from each other (6e-8 for float16, ``eps`` for ``MinMaxUInt8``). The
    distance does not grow, because the next larger message is sent.
    """

    def problem(facts: Facts) -> str:
        d = facts.dimension
        if d is None or compressor.delta(d) > 0:
            return ""
        omega = compressor.omega(d)
        known = "for which no bound is known" if omega == math.inf else f"whose error may be {omega:.3g} |x|^2"
        return f"this is {compressor!r}, {known} for {d} numbers"

    remedy = "Take TopK, RandomK without scaled=True, or QSGD with more levels"
    if compressor.unbiased:
        remedy += f"; or Shrunk({compressor!r}), which divides it by 1 + omega"
    wanted = "a compressor that is a contraction, E |C(x) - x|^2 < |x|^2"
    return Need("contraction", problem, f"{remedy}. One of your own says by omega(d) what its error is.", wanted)


@dataclass(frozen=True)
class ChocoSGD(Algorithm):
    """Every agent keeps a public copy ``h`` of each neighbour, and sends the compressed difference from its own copy.

    ``y = x - lr g(x)``, ``q = C(y - h)``, ``h+ = h + q``, ``x+ = y + gamma (W - I) h+`` (Koloskova, Stich, Jaggi 2019,
    arXiv:1902.00340, algorithm 2). ``s = W h`` is kept instead of the neighbours' copies (algorithm 5 there); it
    follows from the messages, ``s+ = s + W q``, as long as W stays the same. The mean over the agents is not disturbed
    by the compression.

    Args:
        lr: The step.
        gamma: How far to go towards the neighbours' copies, in (0, 1]; the coarser the compression, the less.
        compressor: A contraction.
    """

    lr: float
    gamma: float
    compressor: Compressor
    source: ClassVar[str] = "Koloskova, Stich, Jaggi 2019, arXiv:1902.00340, algorithms 2 and 5"
    one_gradient: ClassVar[bool] = True
    separable: ClassVar[bool] = True

    @property
    def needs(self) -> tuple[Need, ...]:
        averages = dies_out(self, by_part_of_the_way(self.gamma))
        return DOUBLY_STOCHASTIC, SYMMETRIC, STATIC_COPIES, CONNECTED, averages, contraction(self.compressor)

    def at_rest(self) -> Algorithm:
        return Gossip(self.gamma)

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return torch.zeros_like(x), torch.zeros_like(x)

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        h, s = state
        y = x - self.lr * grad(x)
        mixed, q = mix.compressed(y - h, self.compressor)
        h, s = h + q, s + mixed
        return y + self.gamma * (s - h), (h, s)


@dataclass(frozen=True)
class DeepSqueeze(Algorithm):
    """Compresses the parameters themselves, and adds the error of each message to the next.

    ``y = x - lr g(x)``, ``v = y + e``, ``c = C(v)``, ``e+ = v - c``, ``x+ = y + gamma (W - I) c`` (Tang et al. 2019,
    arXiv:1907.07346, algorithm 1). Keeps no copies of neighbours, so W may change; wants a smaller ``gamma`` than
    CHOCO-SGD and ends farther from the optimum, since its messages do not shrink as it converges.

    Args:
        lr: The step.
        gamma: How much of the mixing to do, in (0, 1]; the coarser the compression, the less.
        compressor: A contraction.
    """

    lr: float
    gamma: float
    compressor: Compressor
    source: ClassVar[str] = "Tang et al. 2019, arXiv:1907.07346, algorithm 1"
    one_gradient: ClassVar[bool] = True
    separable: ClassVar[bool] = True

    @property
    def needs(self) -> tuple[Need, ...]:
        averages = dies_out(self, by_part_of_the_way(self.gamma))
        return DOUBLY_STOCHASTIC, SYMMETRIC, CONNECTED, averages, contraction(self.compressor)

    def at_rest(self) -> Algorithm:
        return Gossip(self.gamma)

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return (torch.zeros_like(x),)

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        (e,) = state
        y = x - self.lr * grad(x)
        v = y + e
        mixed, c = mix.compressed(v, self.compressor)
        return y + self.gamma * (mixed - c), (v - c,)


register(
    Entry(
        "CHOCO-SGD",
        lambda: ChocoSGD(1 / 32, 0.25, TopK(0.2)),
        0.2 * (1 + 4.25 / 64),  # 2 bits of each position, and 1 + 5 / 4 in a row of bits
        "Slow networks: any compressor that is a contraction, for one more tensor of memory and gamma to tune.",
    )
)
register(
    Entry(
        "DeepSqueeze",
        lambda: DeepSqueeze(1 / 32, 0.125, TopK(0.2)),
        0.2 * (1 + 4.25 / 64),  # 2 bits of each position, and 1 + 5 / 4 in a row of bits
        "As CHOCO-SGD where W changes from round to round; ends farther from the optimum.",
    )
)
