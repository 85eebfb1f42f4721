"""The decomposition of a graph into matchings: sets of edges in which no agent occurs twice, so that all can be used at
once.

It is an edge colouring, one colour a matching. By Vizing's theorem an agent of the highest degree d needs d of them and
no graph needs more than d + 1; the construction of Misra and Gries (1992) gets by with that.
"""

from __future__ import annotations

from itertools import pairwise

import networkx as nx

Pairs = tuple[tuple[int, int], ...]
"""Edges (first, second) with ``first < second``, ascending."""


def decompose(graph: nx.Graph) -> tuple[Pairs, ...]:
    """The edges of an undirected graph as at most d + 1 matchings, d the highest degree.

    Args:
        graph: nodes 0 to n - 1; self loops are left out. The result depends on its edges alone, not on their order.
    """
    edges = tuple(sorted((min(edge), max(edge)) for edge in graph.edges if edge[0] != edge[1]))
    colouring = _Colouring(graph.number_of_nodes(), edges)
    for first, second in edges:
        colouring.add(first, second)
    found: dict[int, list[tuple[int, int]]] = {}
    for first, second in edges:
        found.setdefault(colouring.colour(first, second), []).append((first, second))
    return tuple(tuple(found[colour]) for colour in sorted(found))


class _Colouring:
    """Edges with colours, no two of the same at a node. ``at[node][colour]`` is the node at the other end."""

    def __init__(self, size: int, edges: Pairs) -> None:
        self.at: list[dict[int, int]] = [{} for _ in range(size)]
        self.colours: list[dict[int, int]] = [{} for _ in range(size)]
        self.neighbours: list[list[int]] = [[] for _ in range(size)]
        for first, second in edges:
            self.neighbours[first].append(second)
            self.neighbours[second].append(first)

    def colour(self, first: int, second: int) -> int:
        return self.colours[first][second]

    def add(self, hub: int, end: int) -> None:
        """Colour one more edge, recolouring others where no colour is free at both of its ends."""
        fan = self._fan(hub, end)
        mine, last = self._free(hub), self._free(fan[-1])
        self._swap_path(hub, last, mine)
        turned = next(
            place for place, tip in enumerate(fan) if last not in self.at[tip] and self._is_fan(hub, fan[: place + 1])
        )
        shifted = [self._clear(hub, tip) for tip in fan[1 : turned + 1]]
        for tip, colour in zip(fan, [*shifted, last], strict=False):
            self._set(hub, tip, colour)

    def _fan(self, hub: int, end: int) -> list[int]:
        """Neighbours of the hub, each but the first joined to it in a colour that is free at the one before."""
        fan = [end]
        rest = [tip for tip in self.neighbours[hub] if tip in self.colours[hub]]
        while True:
            fitting = next((tip for tip in rest if self.colours[hub][tip] not in self.at[fan[-1]]), None)
            if fitting is None:
                return fan
            fan.append(fitting)
            rest.remove(fitting)

    def _is_fan(self, hub: int, tips: list[int]) -> bool:
        return all(self.colours[hub][tip] not in self.at[before] for before, tip in pairwise(tips))

    def _swap_path(self, node: int, first: int, second: int) -> None:
        """Exchange two colours along the path that begins at `node` with the first; `second` is free there."""
        path = []
        wanted, other = first, second
        while wanted in self.at[node] and first != second:
            path.append((node, self.at[node][wanted], other))
            node = self.at[node][wanted]
            wanted, other = other, wanted
        for tail, head, _ in path:
            self._clear(tail, head)
        for tail, head, colour in path:
            self._set(tail, head, colour)

    def _free(self, node: int) -> int:
        return next(colour for colour in range(len(self.at[node]) + 1) if colour not in self.at[node])

    def _set(self, first: int, second: int, colour: int) -> None:
        self.at[first][colour], self.at[second][colour] = second, first
        self.colours[first][second] = self.colours[second][first] = colour

    def _clear(self, first: int, second: int) -> int:
        colour = self.colours[first].pop(second)
        del self.colours[second][first], self.at[first][colour], self.at[second][colour]
        return colour
