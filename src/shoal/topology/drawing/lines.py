"""The lines of a picture: which edges of a round are drawn as one, with how many heads, how thick and how bent. Two
agents that exchange get one line for both directions. Two machines get a single line if every agent of one sends to
every agent of the other. Values only; `pictures` draws them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import networkx as nx

from .layout import AgentLayout, Edge

Weights = Mapping[Edge, float]
"""{(source, destination): weight}, without self loops."""

MOST = 4000
"""Agents and lines in a picture."""


@dataclass(frozen=True)
class Line:
    """The line for an edge, for the two edges of an exchange, or for all edges between two machines.

    Attributes:
        source, destination: agents; machines for a bundle.
        bundle: every agent of a machine sends to every agent of another.
        mutual: it represents both directions.
        between: the ends are on different machines.
        bend: curvature, see :meth:`Layout.bend`.
        share: its weight as a part of the largest, 0 to 1.
        negative: its weight is negative.
    """

    source: int
    destination: int
    bundle: bool
    mutual: bool
    between: bool
    bend: float
    share: float
    negative: bool


def weights_of(digraph: nx.DiGraph) -> Weights:
    """The edges of a graph with their weights, one where there is none."""
    return {
        (source, destination): float(weight)
        for source, destination, weight in digraph.edges(data="weight", default=1.0)
        if source != destination
    }


def is_directed(edges: Collection[Edge]) -> bool:
    """Whether an edge has no edge back."""
    return any(edge[::-1] not in edges for edge in edges)


def lines_of(layout: AgentLayout, weights: Weights) -> list[Line]:
    """All lines of a round.

    Raises:
        ValueError: too many agents and lines to be distinguishable.
    """
    heaviest = max(map(abs, weights.values()), default=0.0) or 1.0
    bundles = layout.bundles(weights)
    single = {edge: weight for edge, weight in weights.items() if _machines(layout, edge) not in bundles}
    thick, thin = _one_of_each_pair(bundles), _one_of_each_pair(single)
    if len(thick) + len(thin) + len(layout.places) > MOST:
        raise ValueError(
            f"a picture of {len(layout.places)} agents and {len(thick) + len(thin)} lines shows nothing. Draw fewer "
            "agents: the shape remains."
        )
    found = []
    for source, destination in thick:
        mutual = (destination, source) in bundles
        bend = layout.bend_between_machines(source, destination, one_way=not mutual)
        found.append(Line(source, destination, True, mutual, True, bend, 1.0, False))
    for source, destination in thin:
        weight = single[source, destination]
        mutual = (destination, source) in single
        heavier = max(abs(weight), abs(single.get((destination, source), 0.0)))
        bend = layout.bend(source, destination, one_way=not mutual)
        out, into = _machines(layout, (source, destination))
        found.append(Line(source, destination, False, mutual, out != into, bend, heavier / heaviest, weight < 0))
    return found


def _machines(layout: AgentLayout, edge: Edge) -> Edge:
    return layout.machine_of[edge[0]], layout.machine_of[edge[1]]


def _one_of_each_pair(edges: Collection[Edge]) -> list[Edge]:
    return [edge for edge in edges if edge[0] < edge[1] or edge[::-1] not in edges]
