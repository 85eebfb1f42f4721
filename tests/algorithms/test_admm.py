"""Decentralized ADMM: its conditions hold after every step, its prices end at the gradients."""

from __future__ import annotations

import networkx as nx
import pytest
import torch

from shoal.algorithms import DecentralizedADMM
from shoal.sim import StackedFleet
from shoal.topology import ChainGraph, MeshGrid2DGraph, OnePeerHypercube, RingGraph, StarGraph
from support.least_squares import DIMENSION, SIZE, optimum, problem
from support.quadratic import gradients

GRAPHS = [
    pytest.param(RingGraph(SIZE), id="ring"),
    pytest.param(MeshGrid2DGraph(SIZE), id="grid"),
    pytest.param(StarGraph(SIZE), id="star"),
]


def starts() -> torch.Tensor:
    return torch.randn(SIZE, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(8))


def neighbours(graph: nx.DiGraph) -> torch.Tensor:
    """float64 [n, n], one where two agents exchange."""
    adjacency = torch.from_numpy(nx.to_numpy_array(graph, nodelist=range(len(graph)), weight=None))
    return adjacency.fill_diagonal_(0)


@pytest.mark.parametrize("graph", GRAPHS)
def test_many_inner_steps_are_the_exact_solve(graph: nx.DiGraph) -> None:
    """Against ADMM with a linear solver: (H_i + 2 c d_i) x_i+ = A_i^T b_i - a_i + c (d_i x_i + sum of x_j)."""
    c = 0.7
    A, b = problem()
    H, h = A.mT @ A, (A.mT @ b.unsqueeze(-1)).squeeze(-1)
    N = neighbours(graph)
    d = N.sum(1, keepdim=True)
    x, a = starts(), torch.zeros(SIZE, DIMENSION, dtype=torch.float64)
    for _ in range(6):
        left = H + 2 * c * d.unsqueeze(-1) * torch.eye(DIMENSION, dtype=torch.float64)
        x = torch.linalg.solve(left, h - a + c * (d * x + N @ x))
        a = a + c * (d * x - N @ x)
    results = StackedFleet(graph).run(DecentralizedADMM(c, 4.0, inner=400), starts(), gradients(), 6)
    assert (results.x - x).abs().max() < 1e-11
    assert (results.state[0] - a).abs().max() < 1e-11


@pytest.mark.parametrize("graph", GRAPHS)
def test_one_inner_step_solves_the_condition_with_the_linearized_objective(graph: nx.DiGraph) -> None:
    """g(x) + rho (x+ - x) + a + 2 c d x+ = c (d x + sum of x_j), and the dual grows by c (d x+ - sum of x_j+)."""
    c, rho = 0.7, 4.0
    gradient = gradients()
    fleet, N = StackedFleet(graph), neighbours(graph)
    d = N.sum(1, keepdim=True)
    before = fleet.run(DecentralizedADMM(c, rho), starts(), gradient, 3)
    after = fleet.run(DecentralizedADMM(c, rho), starts(), gradient, 1, resume=before)
    x, a, then = before.x, before.state[0], after.x
    left = gradient(x) + rho * (then - x) + a + 2 * c * d * then
    assert (left - c * (d * x + N @ x)).abs().max() < 1e-12
    assert (after.state[0] - a - c * (d * then - N @ then)).abs().max() < 1e-13
    assert (after.state[1] - N @ then).abs().max() < 1e-13


@pytest.mark.parametrize("inner", [1, 3])
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_optimum_is_exact_and_the_duals_converge_to_the_gradients(graph: nx.DiGraph, inner: int) -> None:
    gradient = gradients()
    results = StackedFleet(graph).run(DecentralizedADMM(1.0, 4.0, inner), starts(), gradient, 2000)
    assert (results.x - optimum()).abs().max() < 1e-12
    assert (results.state[0] + gradient(optimum().expand(SIZE, -1))).abs().max() < 1e-11


def test_the_duals_always_sum_to_zero() -> None:
    fleet, gradient = StackedFleet(MeshGrid2DGraph(SIZE)), gradients()
    for steps in (1, 2, 10):
        a, _ = fleet.run(DecentralizedADMM(1.0, 4.0), starts(), gradient, steps).state
        assert a.sum(0).abs().max() < 1e-12
        assert a.abs().max() > 0.1


def test_without_a_penalty_each_agent_descends_alone() -> None:
    gradient = gradients()
    x = starts()
    for _ in range(8):
        x = x - gradient(x) / 4
    results = StackedFleet(RingGraph(SIZE)).run(DecentralizedADMM(0.0, 4.0, inner=2), starts(), gradient, 4)
    assert (results.x - x).abs().max() < 1e-13


def test_the_weights_of_the_graph_are_not_used() -> None:
    gradient = gradients()
    plain = nx.DiGraph(ChainGraph(SIZE).edges)
    result, expected = (
        StackedFleet(graph).run(DecentralizedADMM(1.0, 4.0), starts(), gradient, 30)
        for graph in (plain, ChainGraph(SIZE))
    )
    assert torch.equal(result.x, expected.x)


def test_changing_and_directed_graphs_are_refused() -> None:
    refused = {
        "static, and the topology changes": OnePeerHypercube(4),
        "links both ways, and there are one-way edges": nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0)]),
        "connected": nx.Graph([(0, 1), (2, 3)]),
    }
    for problem_, topology in refused.items():
        with pytest.raises(ValueError, match=f"DecentralizedADMM needs W to be {problem_}"):
            StackedFleet(topology).run(DecentralizedADMM(1.0, 4.0), torch.ones(4, 1), lambda x: x, 1)
