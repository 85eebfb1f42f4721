"""An algorithm of the catalog as the tests need it: its example, a topology, and its number of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import networkx as nx

from shoal.algorithms import Entry
from shoal.topology import ChainGraph, Circulant, Schedule
from shoal.topology.families.static import ring, symmetric_exponential


@dataclass(frozen=True)
class Case:
    """How an example is run.

    Attributes:
        topology: A mixing that it works on, for any (even) number of agents.
        steps: Steps after which it is within 1e-8 of the optimum of ``support.least_squares``, if it is exact; else 0.
        compressed: It quantises or chooses, or rounding errors grow: its runs are compared exactly, over a few steps on
            numbers that are exact in binary.
    """

    topology: Callable[[int], nx.Graph | Schedule] = ring
    steps: int = 0
    compressed: bool = False


def irregular_digraph(size: int) -> nx.DiGraph:
    """A one-way ring, with one-way chords from some agents: strongly connected, no weights, degrees that differ.

    Args:
        size: Number of agents.
    """
    hops = ((1, range(size)), (3, range(0, size, 2)), (size // 2, range(0, size, 3)))
    graph = nx.DiGraph()
    graph.add_nodes_from(range(size))
    graph.add_edges_from((rank, (rank + hop) % size) for hop, ranks in hops for rank in ranks)
    return graph


def ring_of_halves(size: int) -> Circulant:
    """A ring whose agents keep half, and whose eigenvalues are therefore not negative."""
    return Circulant(size, {0: 0.5, 1: 0.25, -1: 0.25}, f"ring of {size} agents that keep half")


CASES = {
    "decentralized ADMM, linearised (DLM)": Case(steps=800),
    "decentralized ADMM": Case(steps=800),
    "BEER": Case(symmetric_exponential, steps=800, compressed=True),
    "gradient tracking (ATC)": Case(steps=3000),
    "gradient tracking (semi-ATC, DSGT)": Case(steps=1500),
    "DIGing": Case(steps=3000),
    "CHOCO-SGD": Case(compressed=True),
    "DeepSqueeze": Case(compressed=True),
    "exact diffusion (D2), lazy": Case(steps=1000),
    "exact diffusion (D2)": Case(ring_of_halves, steps=1000),
    "EXTRA": Case(steps=1000),
    "NIDS": Case(steps=1000),
    "gradient tracking with local steps": Case(steps=4000),
    "K-GT": Case(symmetric_exponential, steps=6000),
    "local exact diffusion (LED)": Case(ring_of_halves, steps=2500),
    "low-precision D-PSGD": Case(compressed=True),
    "exact diffusion with momentum (EDM)": Case(steps=1000),
    "momentum tracking": Case(steps=4000),
    "PowerGossip": Case(compressed=True),
    "PowerGossip, one message a step": Case(compressed=True),
    "push-pull": Case(irregular_digraph, steps=3000),
    "push-pull, semi-ATC": Case(irregular_digraph, steps=1200),
    "AB": Case(irregular_digraph, steps=1800),
    "push-sum": Case(irregular_digraph),
    "SGP": Case(irregular_digraph),
    "push-sum gradient tracking": Case(irregular_digraph, steps=4000),
    "Push-DIGing": Case(irregular_digraph, steps=1500),
    "RelaySGD": Case(ChainGraph, steps=2000),
    "RelaySGD, filled from the start": Case(ChainGraph, steps=2000),
    "decentralized SVRG, exact diffusion": Case(steps=1500),
}
"""Of those algorithms that are exact or compressed, or do not work on a ring."""


def case_of(entry: Entry) -> Case:
    """How its example is run: on a ring, unless specified otherwise."""
    return CASES.get(entry.name, Case())
