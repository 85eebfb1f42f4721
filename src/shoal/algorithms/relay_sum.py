"""RelaySum: sums that travel along a tree, each agent adding its own to what it relays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..topology.trees import ChainGraph
from .algorithm import Algorithm, Gradient, State
from .catalog import Entry, register
from .mix import Mix
from .needs import CONNECTED, TREE, Need


@dataclass(frozen=True)
class RelaySum(Algorithm):
    """RelaySGD: exact on a spanning tree, however different the objectives are, for once the parameters in a step.

    Agent i takes its step, ``x_i <- x_i - lr g(x_i)``, and sends neighbour j its own and what the others told it last
    time, ``m_ij = x_i + sum of m_ki over its neighbours k other than j``, with the count ``c_ij = 1 + sum of c_ki`` of
    those that are in it. It takes the mean, itself in place of those that it has not heard of yet:
    ``x_i+ = ((n - sum of c_ki) x_i + sum of m_ki) / n``, k over all neighbours (Vogels et al. 2021, arXiv:2110.04175,
    algorithm 1). Every agent is in every mean once, as old as it is far, so that steps must be short on long trees.

    The state is what the neighbours told last: m, ``[links, d]`` or ``[deg, d]``, and c, ``[links, 1]`` or
    ``[deg, 1]``. The weights of the tree are not used.

    Args:
        lr: The step.
    """

    lr: float
    source: ClassVar[str] = "Vogels et al. 2021, arXiv:2110.04175, algorithm 1"
    one_gradient: ClassVar[bool] = True

    @property
    def needs(self) -> tuple[Need, ...]:
        return TREE, CONNECTED

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return torch.zeros_like(mix.spread(x)), torch.zeros_like(mix.spread(mix.ones(x)))

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        m, c = state
        x = x - self.lr * grad(x)
        m = mix.edges(mix.spread(x + mix.gather(m)) - m)
        c = mix.edges(mix.spread(1 + mix.gather(c)) - c)
        return ((mix.size - mix.gather(c)) * x + mix.gather(m)) / mix.size, (m, c)


register(
    Entry(
        "RelaySGD",
        lambda: RelaySum(0.1),
        ChainGraph,
        1,
        "Data that differ between agents, over few links: a tree.",
        exact=True,
        steps=2000,
    )
)
