"""Algorithms with compressed or omitted messages: CHOCO-SGD, DeepSqueeze, BEER, low-precision D-PSGD, censored D-PSGD.

All but DeepSqueeze keep sums of messages, ``W h`` of CHOCO-SGD's public copies for example, so their graph is static.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from ..compression import Compressor, MinMaxUInt8, TopK
from .algorithm import Algorithm, Gradient, State, is_number
from .catalog import Entry, register
from .mix import Mix
from .needs import CONNECTED, DOUBLY_STOCHASTIC, STATIC, SYMMETRIC, Facts, Need
from .stability.growth import Gossip, by_part_of_the_way, by_self_weights, dies_out

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
class _PartOfTheWay(Algorithm):
    """The common part of algorithms that go ``gamma`` of the way to an average of compressed messages.

    Attributes:
        keeps_copies: Sums of the neighbours' messages are kept, so W must stay the same.
    """

    lr: float
    gamma: float
    compressor: Compressor
    keeps_copies: ClassVar[bool] = True

    @property
    def needs(self) -> tuple[Need, ...]:
        static = (STATIC_COPIES,) if self.keeps_copies else ()
        averages = dies_out(self, by_part_of_the_way(self.gamma))
        return DOUBLY_STOCHASTIC, SYMMETRIC, *static, CONNECTED, averages, contraction(self.compressor)

    def at_rest(self) -> Algorithm:
        return Gossip(self.gamma)


@dataclass(frozen=True)
class ChocoSGD(_PartOfTheWay):
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

    source: ClassVar[str] = "Koloskova, Stich, Jaggi 2019, arXiv:1902.00340, algorithms 2 and 5"
    one_gradient: ClassVar[bool] = True
    separable: ClassVar[bool] = True

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return torch.zeros_like(x), torch.zeros_like(x)

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        h, s = state
        y = x - self.lr * grad(x)
        mixed, q = mix.compressed(y - h, self.compressor)
        h, s = h + q, s + mixed
        return y + self.gamma * (s - h), (h, s)


@dataclass(frozen=True)
class DeepSqueeze(_PartOfTheWay):
    """Compresses the parameters themselves, and adds the error of each message to the next.

    ``y = x - lr g(x)``, ``v = y + e``, ``c = C(v)``, ``e+ = v - c``, ``x+ = y + gamma (W - I) c`` (Tang et al. 2019,
    arXiv:1907.07346, algorithm 1). Keeps no copies of neighbours, so W may change; wants a smaller ``gamma`` than
    CHOCO-SGD and ends farther from the optimum, since its messages do not shrink as it converges.

    Args:
        lr: The step.
        gamma: How much of the mixing to do, in (0, 1]; the coarser the compression, the less.
        compressor: A contraction.
    """

    source: ClassVar[str] = "Tang et al. 2019, arXiv:1907.07346, algorithm 1"
    one_gradient: ClassVar[bool] = True
    separable: ClassVar[bool] = True
    keeps_copies: ClassVar[bool] = False

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return (torch.zeros_like(x),)

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        (e,) = state
        y = x - self.lr * grad(x)
        v = y + e
        mixed, c = mix.compressed(v, self.compressor)
        return y + self.gamma * (mixed - c), (v - c,)


@dataclass(frozen=True)
class BEER(_PartOfTheWay):
    """Exact, however different the agents' objectives are, with messages of a fraction of the parameters.

    Parameters ``x`` and trackers ``v`` each have public copies, ``h`` and ``k``, which change by the sent messages::

        x+ = x + gamma (W - I) h - lr v                  h+ = h + C(x+ - h)
        v+ = v + gamma (W - I) k + g(x+) - g(x)          k+ = k + C(v+ - k)

    (Zhao et al. 2022, arXiv:2201.13320, algorithm 1.) Both compressed differences go to zero, and the error of the
    compression with them. ``W h`` and ``W k`` are kept and grow by the mixed messages, so W must stay the same.

    Args:
        lr: The step.
        gamma: How far to go towards the neighbours' copies, in (0, 1]; the coarser the compression, the less.
        compressor: A contraction.
    """

    source: ClassVar[str] = "Zhao et al. 2022, arXiv:2201.13320, algorithm 1"

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        g, zero = grad(x), torch.zeros_like(x)
        return g, g, zero, zero, zero, zero

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        v, g, h, wh, k, wk = state
        x = x + self.gamma * (wh - h) - self.lr * v
        h, wh = self._publish(x, h, wh, mix)
        new = grad(x)
        v = v + self.gamma * (wk - k) + new - g
        k, wk = self._publish(v, k, wk, mix)
        return x, (v, new, h, wh, k, wk)

    def _publish(
        self, x: torch.Tensor, copy: torch.Tensor, mixed: torch.Tensor, mix: Mix
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The public copy after a message, and W times all copies."""
        news, q = mix.compressed(x - copy, self.compressor)
        return copy + q, mixed + news


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


@dataclass(frozen=True)
class CensoredGradientDescent(Algorithm):
    """Event-triggered decentralized gradient descent, adapt then combine.

    Agent i takes its step, ``x_i <- x_i - lr g(x_i)``, and sends the change ``q_i = x_i - s_i`` only if
    ``|q_i| >= tau decay^k`` at step k, where s is the sum of all sent changes: zero at first. Else q is zero, the agent
    sends only a header, and its neighbours keep ``s_i``. Then ``s+ = s + q`` and ``x+ = W s+ + (x - s+)``, which
    preserves the mean of the x. The censoring rule is that of COCA (Liu, Xu, Wu, Tian, Ling 2019,
    doi:10.1109/TSP.2019.2907258), which applies it to ADMM. The graph must be static: a new neighbour would not have
    ``s_i``.

    With ``tau=0`` it is :class:`~shoal.algorithms.GradientDescent`. If the threshold falls to zero it ends at the same
    point, but for rounding. ``mix.sent`` counts the sending agents, without the headers.

    The state is s and ``W s``, the shape of ``x``.

    Args:
        lr: The step.
        tau: The threshold at the first step, a length in the space of the parameters.
        decay: Its factor from step to step, at most 1.
    """

    lr: float
    tau: float
    decay: float
    source: ClassVar[str] = "Liu, Xu, Wu, Tian, Ling 2019, doi:10.1109/TSP.2019.2907258"
    one_gradient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (is_number(self.tau) and is_number(self.decay) and self.tau >= 0 and 0 <= self.decay <= 1):
            raise ValueError(f"tau={self.tau}, decay={self.decay}: pass a threshold from 0 up, and a decay in [0, 1]")

    @property
    def needs(self) -> tuple[Need, ...]:
        return DOUBLY_STOCHASTIC, STATIC, CONNECTED, dies_out(self, by_self_weights())

    def at_rest(self) -> Algorithm:
        return Gossip()

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return torch.zeros_like(x), torch.zeros_like(x)

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        s, mixed = state
        x = x - self.lr * grad(x)
        q = x - s
        speaks = ~(q.norm(dim=-1, keepdim=True) < self.tau * self.decay**mix.round)  # also of a NaN
        q = torch.where(speaks, q, 0)
        s, mixed = s + q, mixed + mix(q, speaks=speaks)
        return mixed + (x - s), (s, mixed)


register(
    Entry(
        "CHOCO-SGD",
        lambda: ChocoSGD(1 / 32, 0.25, TopK(0.2)),
        0.2 * (1 + 4.25 / 64),  # 2 bits of each position, and 1 + 5 / 4 in a row of bits
        "Slow networks: any compressor that is a contraction, for one more tensor of memory and gamma to tune.",
    ),
    Entry(
        "DeepSqueeze",
        lambda: DeepSqueeze(1 / 32, 0.125, TopK(0.2)),
        0.2 * (1 + 4.25 / 64),  # 2 bits of each position, and 1 + 5 / 4 in a row of bits
        "As CHOCO-SGD where W changes from round to round; ends farther from the optimum.",
    ),
    Entry(
        "BEER",
        lambda: BEER(1 / 16, 0.5, TopK(0.2)),
        2 * 0.2 * (1 + 4.25 / 64),  # as of CHOCO-SGD
        "Slow networks and data that differ between agents: exact with any contraction.",
        exact=True,
    ),
    Entry(
        "low-precision D-PSGD",
        lambda: LowPrecision(1 / 32, MinMaxUInt8(dyadic=True)),
        1016 / 8000,
        "D-PSGD with a byte for each parameter and nothing to tune.",
    ),
    Entry(
        "censored D-PSGD",
        lambda: CensoredGradientDescent(0.05, tau=3.0, decay=0.97),
        0.3,
        "Where a message costs more than a step, and silence costs nothing.",
    ),
)
