"""BEER: gradient tracking with compressed messages, which still finds the optimum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..compression import Compressor, TopK
from .algorithm import Algorithm, Gradient, State
from .catalog import Entry, register
from .choco import STATIC_COPIES, contraction
from .mix import Mix
from .needs import CONNECTED, DOUBLY_STOCHASTIC, SYMMETRIC, Need
from .stability.growth import Gossip, by_part_of_the_way, dies_out


@dataclass(frozen=True)
class BEER(Algorithm):
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

    lr: float
    gamma: float
    compressor: Compressor
    source: ClassVar[str] = "Zhao et al. 2022, arXiv:2201.13320, algorithm 1"

    @property
    def needs(self) -> tuple[Need, ...]:
        averages = dies_out(self, by_part_of_the_way(self.gamma))
        return DOUBLY_STOCHASTIC, SYMMETRIC, STATIC_COPIES, CONNECTED, averages, contraction(self.compressor)

    def at_rest(self) -> Algorithm:
        return Gossip(self.gamma)

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


register(
    Entry(
        "BEER",
        lambda: BEER(1 / 16, 0.5, TopK(0.2)),
        2 * 0.2 * (1 + 4.25 / 64),  # as of CHOCO-SGD
        "Slow networks and data that differ between agents: exact with any contraction.",
        exact=True,
    )
)
