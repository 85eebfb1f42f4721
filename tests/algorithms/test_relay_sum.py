"""RelaySum: every agent is in every sum exactly once, as old as it is far."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx
import pytest
import torch

import shoal
from shoal.algorithms import Momentum, RelaySum, Run, run
from shoal.sim import StackedFleet
from shoal.topology import (
    ChainGraph,
    MeshGrid2DGraph,
    OnePeerHypercube,
    RingGraph,
    SpanningTreeGraph,
    StarGraph,
    TreeGraph,
)
from support.least_squares import DIMENSION, SIZE, optimum
from support.quadratic import gradients

Fleets = Callable[..., shoal.Fleet]
TREES = [
    pytest.param(ChainGraph(SIZE), id="chain"),
    pytest.param(TreeGraph(SIZE), id="binary tree"),
    pytest.param(SpanningTreeGraph(MeshGrid2DGraph(SIZE), root=5), id="tree of a grid"),
    pytest.param(StarGraph(SIZE), id="star"),
]


def starts() -> torch.Tensor:
    return torch.randn(SIZE, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def steps(tree: nx.DiGraph, lr: float, count: int) -> list[Run]:
    """The run after each step."""
    fleet, gradient = StackedFleet(tree), gradients()
    results = [fleet.run(RelaySum(lr), starts(), gradient, 0)]
    for _ in range(count):
        results.append(fleet.run(RelaySum(lr), starts(), gradient, 1, resume=results[-1]))
    return results


def links_of(tree: nx.DiGraph) -> list[tuple[int, int]]:
    """The rows of messages: each agent with each of its neighbours."""
    return [(i, k) for i in range(len(tree)) for k in sorted(set(tree.predecessors(i)) - {i})]


def subtree_hops(tree: nx.DiGraph, i: int, k: int) -> dict[int, int]:
    """{agent: steps from it to k} of the part of the tree whose values reach agent i through k."""
    rest = nx.Graph(tree)
    rest.remove_node(i)
    return dict(nx.single_source_shortest_path_length(rest, k))


@pytest.mark.parametrize("tree", TREES)
def test_a_message_is_the_delayed_sum_of_the_subtree_behind_it(tree: nx.DiGraph) -> None:
    lr, gradient = 0.05, gradients()
    result = steps(tree, lr, 20)
    half = [one.x - lr * gradient(one.x) for one in result]
    for time in (1, 2, 3, 7, 20):
        m, c = result[time].state
        for row, (i, k) in enumerate(links_of(tree)):
            received = [
                half[time - 1 - distance][j] for j, distance in subtree_hops(tree, i, k).items() if distance < time
            ]
            assert (m[row] - torch.stack(received).sum(0)).abs().max() < 1e-12
            assert c[row].item() == len(received)


@pytest.mark.parametrize("tree", TREES)
def test_an_agent_substitutes_its_own_value_for_those_not_yet_received(tree: nx.DiGraph) -> None:
    lr, gradient = 0.05, gradients()
    result = steps(tree, lr, 20)
    for time in (1, 2, 5, 20):
        half = result[time - 1].x - lr * gradient(result[time - 1].x)
        m, c = result[time].state
        for i in range(SIZE):
            rows = [row for row, (owner, _) in enumerate(links_of(tree)) if owner == i]
            expected = ((SIZE - c[rows].sum()) * half[i] + m[rows].sum(0)) / SIZE
            assert (result[time].x[i] - expected).abs().max() < 1e-13


def test_after_as_many_steps_as_the_diameter_every_agent_counts_all() -> None:
    tree = ChainGraph(SIZE)
    _, c = steps(tree, 0.05, SIZE - 1)[-1].state
    counted = torch.zeros(SIZE).index_add_(0, torch.tensor([i for i, _ in links_of(tree)]), c.squeeze(1).float())
    assert (counted == SIZE - 1).all()


@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("tree", TREES)
def test_it_is_exact_for_any_objectives(tree: nx.DiGraph, scale: float) -> None:
    results = StackedFleet(tree).run(RelaySum(0.1), starts(), gradients(scale=scale), 2500)
    assert (results.x / scale - optimum()).abs().max() < 1e-13


def test_local_momentum_keeps_it_exact() -> None:
    results = StackedFleet(ChainGraph(SIZE)).run(Momentum(RelaySum(0.02), 0.9), starts(), gradients(), 1500)
    assert (results.x - optimum()).abs().max() < 1e-12


def test_the_weights_of_the_tree_are_not_used() -> None:
    gradient = gradients()
    plain = nx.DiGraph(ChainGraph(SIZE).edges)
    results = StackedFleet(plain).run(RelaySum(0.1), starts(), gradient, 30)
    assert torch.equal(results.x, StackedFleet(ChainGraph(SIZE)).run(RelaySum(0.1), starts(), gradient, 30).x)


def test_a_single_agent_descends(fleet: Fleets) -> None:
    gradient = torch.full((3,), 2.0, dtype=torch.float64)
    start = torch.zeros(3, dtype=torch.float64)
    stacked = StackedFleet(ChainGraph(1)).run(RelaySum(0.25), start, lambda x: gradient.expand_as(x), 4)
    assert stacked.x.tolist() == [[-2.0] * 3]
    real = fleet(1).run(lambda: run(RelaySum(0.25), start, lambda x: gradient, ChainGraph(1), 4).x.tolist())
    assert real == stacked.x.tolist()


def test_only_trees_are_accepted() -> None:
    refused = {
        "4 links join 4 agents": RingGraph(4),
        "the topology changes": OnePeerHypercube(4),
        "one-way edges": nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (1, 3)]),
        "2 links join 4 agents": nx.DiGraph([(0, 1), (1, 0), (2, 3), (3, 2)]),
    }
    for problem_, topology in refused.items():
        with pytest.raises(ValueError, match=rf"RelaySum needs W to be spanning tree, and .*{problem_}.*ChainGraph"):
            StackedFleet(topology).run(RelaySum(0.1), torch.ones(4, 1), lambda x: x, 1)


def test_a_ring_and_an_isolated_agent_are_no_tree_although_the_number_of_links_fits() -> None:
    graph = nx.Graph([(0, 1), (1, 2), (2, 0)])
    graph.add_node(3)
    with pytest.raises(ValueError, match="RelaySum needs W to be connected"):
        StackedFleet(graph).run(RelaySum(0.1), torch.ones(4, 1), lambda x: x, 1)
