"""Algorithms that send each neighbour a message of its own: decentralized ADMM and RelaySum.

In ADMM each agent pays for disagreeing with its neighbours, at a price that rises until they agree. In RelaySum each
agent adds its own value to the sums that it relays along a tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal

import networkx as nx
import torch

from ..topology._validate import check_count
from ..topology.healing import Without
from ..topology.schedule import AnyTopology, Schedule
from .algorithm import Algorithm, Gradient, State, is_number
from .catalog import Entry, register
from .mix import Mix
from .needs import CONNECTED_LINKS, LINKS, STATIC, TREE, Need


@dataclass(frozen=True)
class DecentralizedADMM(Algorithm):
    """Exact on a static undirected graph, however different the objectives are, for once the parameters in a step.

    With ``d_i`` the number of agent i's neighbours j and ``a_i`` its price, zero at first, ADMM solves
    ``grad f_i(x_i+) + a_i + 2 c d_i x_i+ = c (d_i x_i + sum of x_j)`` for ``x_i+`` and then sets
    ``a_i+ = a_i + c (d_i x_i+ - sum of x_j+)`` (Shi et al. 2014, arXiv:1307.5561). Here the solve is ``inner`` gradient
    steps of length ``1 / (rho + 2 c d_i)`` from ``x_i``. One of them is linearised ADMM (DLM; Ling et al. 2015, "DLM:
    Decentralized Linearized Alternating Direction Method of Multipliers"); the more, the closer to ADMM. The prices
    always add up to zero.

    The state is a and the sum of the neighbours' x. The weights of the graph are not used.

    Args:
        c: The penalty on an edge.
        rho: The curvature that the gradient step assumes; the Lipschitz constant of an agent's gradient is enough.
        inner: Gradient steps between two exchanges.

    Raises:
        TypeError: ``inner`` is no whole number.
        ValueError: ``c`` is negative, ``rho`` is not above 0, one is not finite, or ``inner`` is below 1.
    """

    c: float
    rho: float
    inner: int = 1
    source: ClassVar[str] = "Shi et al. 2014, arXiv:1307.5561; Ling et al. 2015, DLM"
    state_has_mean: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_count(self, "inner")
        if not (is_number(self.c) and is_number(self.rho) and 0 <= self.c < inf and 0 < self.rho < inf):
            raise ValueError(f"c={self.c}, rho={self.rho}: pass a finite penalty from 0 up and curvature above 0")

    @property
    def needs(self) -> tuple[Need, ...]:
        return STATIC, LINKS, CONNECTED_LINKS

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return torch.zeros_like(x), _of_neighbours(x, mix)

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        a, received = state
        degree = mix.gather(mix.spread(mix.ones(x)))
        target = self.c * (degree * x + received)
        for _ in range(self.inner):
            x = x - (grad(x) + a + 2 * self.c * degree * x - target) / (self.rho + 2 * self.c * degree)
        received = _of_neighbours(x, mix)
        return x, (a + self.c * (degree * x - received), received)


def _of_neighbours(x: torch.Tensor, mix: Mix) -> torch.Tensor:
    """The sum of the neighbours' ``x``."""
    return mix.gather(mix.edges(mix.spread(x)))


@dataclass(frozen=True)
class RelaySum(Algorithm):
    """RelaySGD: exact on a spanning tree for any objectives, with one message of the parameters in a step.

    Agent i takes its step, ``x_i <- x_i - lr g(x_i)``, and sends neighbour j its own values and the last messages of
    the others, ``m_ij = x_i + sum of m_ki over its neighbours k other than j``, with the count
    ``c_ij = 1 + sum of c_ki`` of the agents in it (Vogels et al. 2021, arXiv:2110.04175, algorithm 1). It takes the
    mean, with k over all neighbours, and replaces the values of agents that have not reached it yet. With
    ``fill="own"`` its own values replace them: ``x_i+ = ((n - sum of c_ki) x_i + sum of m_ki) / n``. With
    ``fill="start"`` its initial values do, as in the authors' code:
    ``x_i+ = (x_i + sum of m_ki + (n - 1 - sum of c_ki) x_i^0) / n``. Every agent is in every mean once, with a delay
    equal to its distance, so steps must be short on long trees.

    The state is the last messages of the neighbours: m, ``[links, d]`` or ``[deg, d]``, and c, ``[links, 1]`` or
    ``[deg, 1]``; and, with ``fill="start"``, the initial values, as ``x``. The weights of the tree are not used.

    Args:
        lr: The step.
        fill: The replacement for values of agents that have not reached it yet, in the first steps, as many as the tree
            is wide: ``"own"`` or ``"start"``.

    Raises:
        ValueError: ``fill`` is neither.
    """

    lr: float
    fill: Literal["own", "start"] = "own"
    source: ClassVar[str] = "Vogels et al. 2021, arXiv:2110.04175, algorithm 1, whose code fills from the `start`"
    one_gradient: ClassVar[bool] = True
    separable: ClassVar[bool] = True
    state_has_mean: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.fill not in ("own", "start"):
            raise ValueError(f'fill={self.fill!r}: pass "own" or "start"')

    @property
    def needs(self) -> tuple[Need, ...]:
        return TREE, CONNECTED_LINKS

    def healed(self, topology: Schedule, gone: tuple[int, ...]) -> AnyTopology:
        """A tree again: the remaining links, and new ones between agents that were joined through a lost agent."""
        old, remaining = topology.graph(0), Without(topology, gone).graph(0)
        links = nx.Graph()
        for first, second in sorted(link for link in remaining.edges if link[0] < link[1]):
            links.add_edge(first, second, weight=not old.has_edge(first, second))
        tree = nx.DiGraph()
        tree.add_nodes_from(range(topology.size))
        for first, second in nx.minimum_spanning_edges(links, data=False):
            tree.add_edges_from([(first, second), (second, first)])
        return tree

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        start = (x,) if self.fill == "start" else ()
        return torch.zeros_like(mix.spread(x)), torch.zeros_like(mix.spread(mix.ones(x))), *start

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        m, c, *start = state
        x = x - self.lr * grad(x)
        m = mix.edges(mix.spread(x + mix.gather(m)) - m)
        c = mix.edges(mix.spread(1 + mix.gather(c)) - c)
        stand_in = start[0] if start else x
        missing = mix.size - 1 - mix.gather(c)
        return (x + mix.gather(m) + missing * stand_in) / mix.size, (m, c, *start)


register(
    Entry(
        "decentralized ADMM, linearised (DLM)",
        lambda: DecentralizedADMM(c=1.0, rho=4.0),
        1,
        "Data that differ between agents, on a fixed undirected graph, for half the bytes of gradient tracking.",
        exact=True,
    ),
    Entry(
        "decentralized ADMM",
        lambda: DecentralizedADMM(c=1.0, rho=4.0, inner=5),
        1,
        "As above, where gradients are cheaper than messages.",
        exact=True,
    ),
    Entry("RelaySGD", lambda: RelaySum(0.1), 1, "Data that differ between agents, over few links: a tree.", exact=True),
    Entry(
        "RelaySGD, filled from the start",
        lambda: RelaySum(0.1, fill="start"),
        1,
        "As above, as its authors' code begins.",
        exact=True,
    ),
)
