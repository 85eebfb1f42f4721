"""RelaySum: sums along a tree, where each agent adds its own value to the relayed ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import networkx as nx
import torch

from ..topology.healing import Without
from ..topology.schedule import AnyTopology, Schedule
from .algorithm import Algorithm, Gradient, State
from .catalog import Entry, register
from .mix import Mix
from .needs import CONNECTED_LINKS, TREE, Need


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
    Entry("RelaySGD", lambda: RelaySum(0.1), 1, "Data that differ between agents, over few links: a tree.", exact=True),
    Entry(
        "RelaySGD, filled from the start",
        lambda: RelaySum(0.1, fill="start"),
        1,
        "As above, as its authors' code begins.",
        exact=True,
    ),
)
