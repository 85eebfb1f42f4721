"""RelaySum: sums that travel along a tree, each agent adding its own to what it relays."""

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
    """RelaySGD: exact on a spanning tree, however different the objectives are, for once the parameters in a step.

    Agent i takes its step, ``x_i <- x_i - lr g(x_i)``, and sends neighbour j its own and what the others told it last
    time, ``m_ij = x_i + sum of m_ki over its neighbours k other than j``, with the count ``c_ij = 1 + sum of c_ki`` of
    those that are in it (Vogels et al. 2021, arXiv:2110.04175, algorithm 1). It takes the mean, with something in place
    of those that it has not heard of yet, k over all neighbours. With ``fill="own"`` that is itself: ``x_i+ = ((n - sum
    of c_ki) x_i + sum of m_ki) / n``. With ``fill="start"`` it is where it began, as in the authors' code: ``x_i+ =
    (x_i + sum of m_ki + (n - 1 - sum of c_ki) x_i^0) / n``. Every agent is in every mean once, as old as it is far, so
    that steps must be short on long trees.

    The state is what the neighbours told last: m, ``[links, d]`` or ``[deg, d]``, and c, ``[links, 1]`` or
    ``[deg, 1]``; and, if it fills from there, the start, as ``x``. The weights of the tree are not used.

    Args:
        lr: The step.
        fill: Who stands in for those that it has not heard of, in as many first steps as the tree is wide: ``"own"`` or
            ``"start"``.

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
        """A tree again: the links that are left, and new ones between those that were joined through a lost agent."""
        old, left = topology.graph(0), Without(topology, gone).graph(0)
        links = nx.Graph()
        for one, other in sorted(link for link in left.edges if link[0] < link[1]):
            links.add_edge(one, other, weight=not old.has_edge(one, other))
        tree = nx.DiGraph()
        tree.add_nodes_from(range(topology.size))
        for one, other in nx.minimum_spanning_edges(links, data=False):
            tree.add_edges_from([(one, other), (other, one)])
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
        "RelaySGD",
        lambda: RelaySum(0.1),
        1,
        "Data that differ between agents, over few links: a tree.",
        exact=True,
    )
)
register(
    Entry(
        "RelaySGD, filled from the start",
        lambda: RelaySum(0.1, fill="start"),
        1,
        "As above, as its authors' code begins.",
        exact=True,
    )
)
