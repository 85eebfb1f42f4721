"""Adam on agents whose batches are small: its moments are those of the mean of several gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .algorithm import Algorithm, Gradient, State
from .catalog import Entry, register
from .mix import Mix
from .momentum import check_beta
from .needs import CONNECTED, DOUBLY_STOCHASTIC, Need
from .stability.growth import Gossip, by_self_weights, dies_out


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
        if self.accumulate < 1:
            raise ValueError(f"accumulate={self.accumulate}: pass a number of gradients, at least 1")
        check_beta(self.beta1, "beta1")
        check_beta(self.beta2, "beta2")
        if not self.eps > 0:
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


register(
    Entry(
        "AccumAdam",
        lambda: AccumAdam(0.01, accumulate=4),
        1,
        "Transformers and other models that want Adam, on many agents with small batches.",
    )
)
