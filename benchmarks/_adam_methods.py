"""Decentralized forms of Adam, each as its equation: all agents of several runs at once, as rows.

``x`` and ``g`` are ``[runs, n, d]``, ``W`` is the mixing matrix ``[n, n]`` of the round. ``sent`` is how much an agent
sends to each neighbour, in units of the model's bytes.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor


class Local:
    """Adam (Kingma, Ba 2015) on what each agent has, then an average of the parameters."""

    title: ClassVar[str] = "adapt, then combine"
    sent: ClassVar[int] = 1

    def __init__(self, x: Tensor, betas: tuple[float, float], decay: float) -> None:
        self.betas, self.decay, self.steps = betas, decay, 0
        self.m, self.v = torch.zeros_like(x), torch.zeros_like(x)

    def step(self, x: Tensor, g: Tensor, W: Tensor, lr: float) -> Tensor:
        return W @ self.adapt(x, g, lr)

    def adapt(self, x: Tensor, g: Tensor, lr: float) -> Tensor:
        """What torch.optim.AdamW does; with no decay, what Adam does."""
        self.m.lerp_(g, 1 - self.betas[0])
        self.v.lerp_(g * g, 1 - self.betas[1])
        self.steps += 1
        return x * (1 - lr * self.decay) - lr * self.direction(self.m, self.v, self.steps)

    def direction(self, m: Tensor, v: Tensor, steps: int) -> Tensor:
        first, second = (1 - beta**steps for beta in self.betas)
        return (m / first) / ((v / second).sqrt() + 1e-8)


class MixSecond(Local):
    """The second moments are averaged beside the parameters, with the same weights."""

    title, sent = "mix exp_avg_sq", 2

    def step(self, x: Tensor, g: Tensor, W: Tensor, lr: float) -> Tensor:
        x = self.adapt(x, g, lr)
        self.v = W @ self.v
        return W @ x


class MixFirst(Local):
    """The first moments are averaged."""

    title, sent = "mix exp_avg", 2

    def step(self, x: Tensor, g: Tensor, W: Tensor, lr: float) -> Tensor:
        x = self.adapt(x, g, lr)
        self.m = W @ self.m
        return W @ x


class MixBoth(Local):
    """Both moments are averaged."""

    title, sent = "mix both", 3

    def step(self, x: Tensor, g: Tensor, W: Tensor, lr: float) -> Tensor:
        x = self.adapt(x, g, lr)
        self.m, self.v = W @ self.m, W @ self.v
        return W @ x


class Accumulated(Local):
    """AccumAdam (Wang et al. 2024, arXiv:2410.11998, appendix C): the moments take in the mean of several gradients."""

    title, every = "AccumAdam, 4 steps", 4

    def __init__(self, x: Tensor, betas: tuple[float, float], decay: float) -> None:
        super().__init__(x, betas, decay)
        self.sum = torch.zeros_like(x)

    def adapt(self, x: Tensor, g: Tensor, lr: float) -> Tensor:
        m, v = self.m.lerp(g, 1 - self.betas[0]), self.v.lerp(g * g, 1 - self.betas[1])
        x = x * (1 - lr * self.decay) - lr * self.direction(m, v, self.steps // self.every + 1)
        self.steps += 1
        self.sum += g / self.every
        if self.steps % self.every == 0:
            self.m.lerp_(self.sum, 1 - self.betas[0])
            self.v.lerp_(self.sum * self.sum, 1 - self.betas[1])
            self.sum.zero_()
        return x


class AccumulatedW(Local):
    """``shoal.optim.AccumAdamW``: the moments take in the mean of n gradients, with betas to the power of n."""

    title = "AccumAdamW"
    mixed: ClassVar[tuple[str, ...]] = ()

    def __init__(self, x: Tensor, betas: tuple[float, float], decay: float) -> None:
        self.every = x.shape[1]
        super().__init__(x, (betas[0] ** self.every, betas[1] ** self.every), decay)
        self.sum = torch.zeros_like(x)

    def step(self, x: Tensor, g: Tensor, W: Tensor, lr: float) -> Tensor:
        x = self.adapt(x, g, lr)
        for name in self.mixed:
            setattr(self, name, W @ getattr(self, name))
        return W @ x

    def adapt(self, x: Tensor, g: Tensor, lr: float) -> Tensor:
        m, v = self.m.lerp(g, 1 - self.betas[0]), self.v.lerp(g * g, 1 - self.betas[1])
        x = x * (1 - lr * self.decay) - lr * self.direction(m, v, self.steps // self.every + 1)
        self.steps += 1
        self.sum = self.sum + g / self.every
        if self.steps % self.every == 0:
            self.m, self.v = (
                self.m.lerp(self.sum, 1 - self.betas[0]),
                self.v.lerp(self.sum * self.sum, 1 - self.betas[1]),
            )
            self.sum = torch.zeros_like(g)
        return x


class AccumulatedWMixSecond(AccumulatedW):
    """The same, and the second moments are averaged."""

    title, sent, mixed = "AccumAdamW, mix exp_avg_sq", 2, ("v",)


class AccumulatedWMixSum(AccumulatedW):
    """The same, and what the moments will take in is averaged."""

    title, sent, mixed = "AccumAdamW, mix sum", 2, ("sum",)


class AccumulatedWMixBoth(AccumulatedW):
    """The same, and both moments are averaged."""

    title, sent, mixed = "AccumAdamW, mix both", 3, ("m", "v")


class AccumulatedWMixSumAndSecond(AccumulatedW):
    """The same, and what the moments will take in and the second moments are averaged."""

    title, sent, mixed = "AccumAdamW, mix sum and exp_avg_sq", 3, ("sum", "v")


class QuasiGlobal(Local):
    """QG-DAdam (Lin et al. 2021, arXiv:2102.04761): both moments are those of the way that an agent has really gone,
    scaled to length 1."""

    title = "quasi-global"

    def step(self, x: Tensor, g: Tensor, W: Tensor, lr: float) -> Tensor:
        m, v = self.m.clone(), self.v.clone()
        moved = W @ self.adapt(x, g, lr)
        way = x - moved
        way /= way.norm(dim=-1, keepdim=True) + 1e-8
        self.m = m.lerp_(way, 1 - self.betas[0])
        self.v = v.lerp_(way * way, 1 - self.betas[1])
        return moved


class QuasiGlobalFirst(Local):
    """Quasi-global momentum around Adam without a first moment, and the second moments averaged: what
    ``QuasiGlobalMomentum`` around such an optimizer with ``mix_state`` would be."""

    title, sent = "quasi-global momentum, mix exp_avg_sq", 2

    def step(self, x: Tensor, g: Tensor, W: Tensor, lr: float) -> Tensor:
        beta = self.betas[0]
        self.v.lerp_(g * g, 1 - self.betas[1])
        self.steps += 1
        step = g / ((self.v / (1 - self.betas[1] ** self.steps)).sqrt() + 1e-8)
        moved = W @ (x * (1 - lr * self.decay) - lr * (beta * self.m + (1 - beta) * step))
        self.m = beta * self.m + (1 - beta) * (x - moved) / lr if lr else self.m
        self.v = W @ self.v
        return moved


class Tracked(Local):
    """GTAdam (Carnevale et al. 2022, arXiv:2009.01745), adapt then combine: Adam on gradients that are tracked."""

    title, sent = "gradient tracking", 2

    def __init__(self, x: Tensor, betas: tuple[float, float], decay: float) -> None:
        super().__init__(x, betas, decay)
        self.y, self.before = torch.zeros_like(x), torch.zeros_like(x)

    def step(self, x: Tensor, g: Tensor, W: Tensor, lr: float) -> Tensor:
        self.y = W @ (self.y + g - self.before)
        self.before = g
        return W @ self.adapt(x, self.y, lr)


class TrackedMixSecond(Tracked):
    """The same with the second moments averaged."""

    title, sent = "gradient tracking, mix exp_avg_sq", 3

    def step(self, x: Tensor, g: Tensor, W: Tensor, lr: float) -> Tensor:
        x = super().step(x, g, W, lr)
        self.v = W @ self.v
        return x


class AllReduce(Local):
    """What data-parallel training does."""

    title = "all-reduce"

    def step(self, x: Tensor, g: Tensor, W: Tensor, lr: float) -> Tensor:
        return self.adapt(x, g.mean(1, keepdim=True).expand_as(g), lr)


class Momentum(Local):
    """SGD with momentum (the first beta), adapt then combine, to compare with."""

    title = "SGD with momentum"

    def adapt(self, x: Tensor, g: Tensor, lr: float) -> Tensor:
        self.m = self.betas[0] * self.m + g
        return x - lr * (self.m + self.decay * x)


METHODS: dict[str, type[Local]] = {
    "allreduce": AllReduce,
    "atc": Local,
    "v": MixSecond,
    "m": MixFirst,
    "both": MixBoth,
    "accum": Accumulated,
    "accumw": AccumulatedW,
    "accumw-v": AccumulatedWMixSecond,
    "accumw-b": AccumulatedWMixSum,
    "accumw-both": AccumulatedWMixBoth,
    "accumw-bv": AccumulatedWMixSumAndSecond,
    "qg": QuasiGlobal,
    "qg-v": QuasiGlobalFirst,
    "gt": Tracked,
    "gt-v": TrackedMixSecond,
    "sgd": Momentum,
}
