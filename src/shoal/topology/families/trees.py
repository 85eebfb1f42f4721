"""Spanning trees: the fewest edges that connect all agents, n - 1 of them.

Averages over a tree are slow, but a tree has exactly one path from one agent to another. RelaySGD (Vogels et al. 2021,
arXiv:2110.04175) needs that to relay sums without counting an agent twice. All have Metropolis-Hastings weights.
"""

from __future__ import annotations

import networkx as nx

from .._validate import as_digraph, check_rank, check_size
from ..weights import with_metropolis_hastings_weights


def ChainGraph(size: int) -> nx.DiGraph:
    """Agents in a line, each exchanging with the one before and the one after.

    Args:
        size: number of agents, at least 1.
    """
    return with_metropolis_hastings_weights(nx.path_graph(check_size(size)))


def TreeGraph(size: int, arity: int = 2) -> nx.DiGraph:
    """A tree filled level by level: agent 0 at the top, and the parent of agent i is ``(i - 1) // arity``.

    Args:
        size: number of agents, at least 1.
        arity: children of an agent, at least 1; with 1 it is a chain.
    """
    return with_metropolis_hastings_weights(nx.full_rary_tree(check_size(arity, "arity"), check_size(size)))


def SpanningTreeGraph(graph: nx.Graph, root: int = 0) -> nx.DiGraph:
    """A tree out of the edges of `graph`, with as few steps as possible from `root` to each agent.

    Neighbours are visited in the order of their ranks, so that all agents find the same tree.

    Args:
        graph: nodes 0 to n - 1, connected; the direction of its edges does not count.
        root: the agent at the top.

    Raises:
        ValueError: some agent cannot be reached.
    """
    undirected = as_digraph(graph).to_undirected()
    root = check_rank(root, undirected.number_of_nodes(), "root")
    tree = nx.Graph(nx.bfs_edges(undirected, root, sort_neighbors=sorted))
    tree.add_node(root)
    missing = sorted(set(undirected) - set(tree))
    if missing:
        raise ValueError(
            f"there is no tree over all {undirected.number_of_nodes()} agents: no way leads from {root} to "
            f"{missing[0]}. Connect the graph, or take the tree of one of its components."
        )
    return with_metropolis_hastings_weights(tree)
