"""Checks that all of Shoal shares: of ranks, sizes, weights, and graphs whose nodes are 0 to n - 1.

Each returns the plain value for the caller, or raises an error with the problem, the expectation and the remedy. A
wrong type is a ``TypeError``, a wrong value a ``ValueError``.
"""

from __future__ import annotations

from math import isfinite
from operator import index

import networkx as nx

EDGE_LIMIT = 5_000_000
"""Edges of one round, self weights included, at most: 24 bytes each, and some more while they are worked on."""


def as_int(value: object, name: str) -> int:
    """The plain int in `value`: what has `__index__`, as numpy's integers and tensors of one; no bool and no float."""
    if type(value) is int:
        return value
    try:
        found = _plain(value)
        if not isinstance(found, bool):
            return index(found)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}. Pass a whole number.")


def as_weight(value: object, name: str) -> float:
    """The plain finite float in `value`: what has `__float__`, as numbers of numpy, fractions and 0-d tensors."""
    if type(value) is float and isfinite(value):
        return value
    try:
        found = _plain(value)
        if isinstance(found, (bool, complex, str, bytes, bytearray)):
            raise TypeError
        checked = float(found)  # type: ignore[arg-type]
    except OverflowError:
        checked = float("inf")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"the weight of {name} must be a real number, got {value!r} of type {type(value).__name__}. Pass a float."
        ) from None
    if not isfinite(checked):
        raise ValueError(f"the weight of {name} is {checked}. Weights must be finite: check how it was computed.")
    return checked


def _plain(value: object) -> object:
    """The number of Python's own that is in one of numpy's or in a tensor of no dimension."""
    if len(getattr(value, "shape", ())):
        raise TypeError
    item = getattr(value, "item", None)
    return item() if callable(item) else value


def check_size(size: object, name: str = "size") -> int:
    """A number of agents or machines, at least one."""
    checked = as_int(size, name)
    if checked < 1:
        raise ValueError(f"{name} must be at least 1, got {checked}. Pass the number of agents it counts.")
    return checked


def check_count(owner: object, name: str) -> None:
    """The field `name` of a frozen dataclass becomes a plain int; it must be 1 or more."""
    kind = type(owner).__name__
    count = as_int(getattr(owner, name), f"{kind}: {name}")
    if count < 1:
        raise ValueError(f"{kind}: {name}={count} must be 1 or more")
    object.__setattr__(owner, name, count)


def check_rank(rank: object, size: int, name: str = "rank") -> int:
    """A rank of a world of `size` agents."""
    checked = as_int(rank, name)
    if not 0 <= checked < size:
        raise ValueError(f"{name} {checked} is out of range. With {size} agents, pass one of 0 to {size - 1}.")
    return checked


def check_round(round: object) -> int:
    """The number of a round, from 0 on."""
    checked = as_int(round, "round")
    if checked < 0:
        raise ValueError(f"round {checked} is negative. Rounds count from 0.")
    return checked


def as_digraph(graph: object) -> nx.DiGraph:
    """`graph` as a directed graph over the ranks 0 to n - 1, in whatever order its nodes were added.

    An undirected graph stands for both directions of each edge. A directed one is returned as it is, not copied.
    """
    if not isinstance(graph, nx.Graph):
        raise TypeError(
            f"a topology must be a networkx.DiGraph, got {type(graph).__name__}. "
            "Build one with a function such as RingGraph(size), or with networkx.DiGraph."
        )
    if graph.is_multigraph():
        raise TypeError(
            f"a topology has one edge from a source to a destination, got a {type(graph).__name__}, which may have "
            "several. Merge parallel edges and pass a networkx.DiGraph."
        )
    size = graph.number_of_nodes()
    if size == 0:
        raise ValueError("the graph has no nodes. Add one node for each agent, named 0 to n - 1.")
    missing = next((rank for rank in range(size) if rank not in graph), None)
    if missing is not None:
        raise ValueError(
            f"the graph has {size} nodes but none named {missing}: nodes must be the ranks 0 to {size - 1}. "
            "Rename them with networkx.convert_node_labels_to_integers(graph, ordering='sorted')."
        )
    return graph if graph.is_directed() else graph.to_directed()
