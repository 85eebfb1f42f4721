"""MATCHA: a graph's matchings, each used in a round with a probability of its own, high where the graph is thin.

A budget sets the average part of the edges that are active in a round. Edges that hold the graph together get more of
it than edges with many paths around them, so communication falls more than the speed of consensus.

Wang, Sahu, Yang, Joshi, Kar 2019, "MATCHA: Speeding Up Decentralized SGD via Matching Decomposition Sampling",
arXiv:1905.09435.

The graph is decomposed into matchings: sets of edges in which no agent occurs twice, so that all can be used at once.
The decomposition is an edge colouring, one colour a matching. By Vizing's theorem an agent of the highest degree d
needs d of them and no graph needs more than d + 1; the construction of Misra and Gries (1992) gets by with that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from math import sqrt
from zlib import crc32

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _random
from .._validate import as_digraph
from ..schedule import Edges, EdgeSchedule, symmetric

Array = NDArray[np.float64]

_MOST_AGENTS = 256
_STEPS = 100


class Matcha(EdgeSchedule):
    """MATCHA over a graph: ``W = I - alpha sum over the active matchings of L_j``, drawn in each round.

    Args:
        graph: undirected (or with every edge both ways) and connected, nodes 0 to n - 1, n at most 256; weights are not
            used.
        budget: the part of all matchings that is active on average, above 0 and up to 1.
        seed: 0 to 2**64 - 1, the same on every agent.
        probabilities: of each matching, if they are known. They result from floating-point eigenvectors, so agents on
            machines of different kinds should not each compute them: let one compute `probabilities` and pass them to
            all.

    Attributes:
        matchings: edges (first, second) in tuples.
        probabilities: of each matching, float64 [matchings]: those with the largest algebraic connectivity of the
            expected Laplacian (the paper's problem 4), found by projected subgradient steps.
        alpha: the weight of an exchange: it minimises `contraction` (the paper's problem 8).
        contraction: the norm of ``E[W^T W] - J``: the expected squared distance from consensus shrinks by it a round.

    Raises:
        TypeError, ValueError: `graph` is no graph, directed, not connected or too large, or an argument is out of
            range.
    """

    period = None

    def __init__(
        self, graph: nx.Graph, budget: float = 0.5, seed: int = 0, probabilities: ArrayLike | None = None
    ) -> None:
        undirected = _check_graph(graph)
        self.size = undirected.number_of_nodes()
        self.budget = float(budget)
        if not 0 < self.budget <= 1:
            raise ValueError(f"budget is {budget}. Pass the part of the edges to use, above 0 and up to 1.")
        self.seed = _random.check_seed(seed)
        self.matchings = decompose(undirected)
        if probabilities is None:
            self.probabilities = best_probabilities(self.matchings, self.size, self.budget)
        else:
            self.probabilities = _check_probabilities(probabilities, self.matchings)
        self.alpha, self.contraction = best_alpha(self.matchings, self.probabilities, self.size)

    def _edges(self, round: int) -> Edges:
        drawn = _random.uniform(self.seed, round, len(self.matchings)) < self.probabilities
        active = [pair for matching, on in zip(self.matchings, drawn, strict=True) if on for pair in matching]
        pairs = np.array(active, dtype=np.int64).reshape(-1, 2)
        return symmetric(self.size, pairs[:, 0], pairs[:, 1], self.alpha)

    def describe(self) -> str:
        plan = crc32(repr((self.matchings, self.probabilities.round(6).tolist())).encode())
        return f"MATCHA plan {plan:08x} of {self.size} agents, budget {self.budget}, seed {self.seed}"


@lru_cache(maxsize=16)  # agents that are threads of one process plan the same, each for itself
def best_probabilities(matchings: tuple[Pairs, ...], size: int, budget: float) -> Array:
    """The p in [0, 1] with ``sum p <= budget * matchings`` that make ``lambda_2(sum p_j L_j)`` largest, nearly.

    The function is concave, and ``v^T L_j v`` for an eigenvector v of lambda_2 is a supergradient. A hundred steps of
    falling length; the best point met is returned, which is at least as good as the same probability for all.
    """
    best = np.full(len(matchings), budget)
    if budget < 1 and len(matchings) > 1:
        best = _climb(best, _laplacians(matchings, size), budget * len(matchings))
    best.flags.writeable = False
    return best


def best_alpha(matchings: tuple[Pairs, ...], probabilities: Array, size: int) -> tuple[float, float]:
    """The weight of an exchange that contracts most, and the contraction ``||E[W^T W] - J||`` that it has.

    With ``L`` the expected Laplacian, ``E[W^T W] = (I - alpha L)^2 + 2 alpha^2 sum p_j (1 - p_j) L_j``, whose norm
    off the consensus is convex in alpha, with its minimum between 0 and ``1 / lambda_2(L)``.
    """
    if size == 1:
        return 0.0, 0.0
    laplacians = _laplacians(matchings, size)
    mean = np.tensordot(probabilities, laplacians, axes=1)
    variance = 2 * np.tensordot(probabilities * (1 - probabilities), laplacians, axes=1)
    # Moved out of the way, the consensus cannot be mistaken for the largest eigenvalue.
    off_consensus = np.eye(size) - np.full((size, size), 1.0 / size)

    def contraction(alpha: float) -> float:
        expected = off_consensus - 2 * alpha * mean + alpha**2 * (mean @ mean + variance)
        return float(np.linalg.eigvalsh(expected)[-1])

    connectivity = float(np.linalg.eigvalsh(mean)[1]) if size > 1 else 1.0
    if connectivity < 1e-12:
        raise ValueError("with these probabilities the graph falls apart; give its matchings positive ones")
    alpha = _minimise(contraction, 1.0 / connectivity)
    return alpha, contraction(alpha)


def _check_graph(graph: nx.Graph) -> nx.Graph:
    digraph = as_digraph(graph)
    for source, destination in digraph.edges:
        if not digraph.has_edge(destination, source):
            raise ValueError(
                f"MATCHA exchanges in pairs, but edge ({source}, {destination}) has no edge back. "
                "Pass graph.to_undirected()."
            )
    undirected = digraph.to_undirected()
    if undirected.number_of_nodes() > _MOST_AGENTS:
        raise ValueError(too_many(undirected.number_of_nodes()))
    if not nx.is_connected(undirected):
        raise ValueError("the graph is not connected, so its parts never agree. Add edges between its components.")
    return undirected


def too_many(size: int) -> str:
    """Why MATCHA is not planned for these agents; empty if it is."""
    if size <= _MOST_AGENTS:
        return ""
    return (
        f"its probabilities take eigenvalues of dense matrices, at most of {_MOST_AGENTS} agents, and {size} are more."
    )


def _check_probabilities(given: ArrayLike, matchings: tuple[Pairs, ...]) -> Array:
    probabilities = np.array(given, dtype=np.float64)
    if probabilities.shape != (len(matchings),) or not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise ValueError(
            f"probabilities must be {len(matchings)} numbers from 0 to 1, one for each matching, got {given!r}."
        )
    return probabilities


def _laplacians(matchings: tuple[Pairs, ...], size: int) -> Array:
    """The Laplacian of each matching, [matchings, n, n]."""
    laplacians = np.zeros((len(matchings), size, size))
    for laplacian, matching in zip(laplacians, matchings, strict=True):
        first, second = np.array(matching, dtype=np.int64).T
        laplacian[first, first] = laplacian[second, second] = 1.0
        laplacian[first, second] = laplacian[second, first] = -1.0
    return laplacians


def _climb(p: Array, laplacians: Array, total: float) -> Array:
    best, best_value = p, -1.0
    for step in range(1, _STEPS + 1):
        values, vectors = np.linalg.eigh(np.tensordot(p, laplacians, axes=1))
        if values[1] > best_value:
            best, best_value = p, float(values[1])
        slope = laplacians @ vectors[:, 1] @ vectors[:, 1]
        p = _project(p + 0.5 / sqrt(step) * slope / np.linalg.norm(slope), total)
    return best


def _project(point: Array, total: float) -> Array:
    """The nearest point with entries in [0, 1] whose sum is at most `total`."""
    clipped = np.clip(point, 0.0, 1.0)
    if clipped.sum() <= total:
        return clipped
    low, high = 0.0, float(point.max())
    for _ in range(60):
        middle = (low + high) / 2
        if np.clip(point - middle, 0.0, 1.0).sum() > total:
            low = middle
        else:
            high = middle
    return np.clip(point - high, 0.0, 1.0)


def _minimise(function: Callable[[float], float], high: float) -> float:
    """Where a convex function is least between 0 and `high`, by golden sections: to 1e-8 of the interval."""
    low = 0.0
    keep = (sqrt(5) - 1) / 2
    left, right = high - keep * (high - low), low + keep * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(38):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - keep * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + keep * (high - low)
            at_right = function(right)
    return (low + high) / 2


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
