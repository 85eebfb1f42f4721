"""Topologies that depend on the agents' values."""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch

from shoal.algorithms import EXTRA, GradientDescent, GradientTracking
from shoal.sim import Conditions, StackedFleet
from shoal.sim.stacked import edges_of
from shoal.topology import metropolis_hastings_weights, mixing_matrix, with_metropolis_hastings_weights

N = 12


def start() -> torch.Tensor:
    return 2 * torch.randn(N, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def near(x: torch.Tensor) -> torch.Tensor:
    return torch.cdist(x, x) < 1.5


def test_links_between_near_agents_follow_their_positions() -> None:
    seen = []

    def links(round_: int, x: torch.Tensor, state: Any) -> torch.Tensor:
        seen.append((round_, x.clone(), state))
        return near(x)

    results = StackedFleet(N).run(GradientDescent(0.1), start(), lambda x: x, 6, topology=links)
    x = start().numpy()
    graphs = []
    for round_ in range(6):
        assert seen[round_][0] == round_
        np.testing.assert_allclose(seen[round_][1].numpy(), x, rtol=0, atol=1e-13)
        close = np.linalg.norm(x[:, None] - x[None], axis=2) < 1.5
        np.fill_diagonal(close, False)
        graphs.append(close)
        degree = close.sum(1)
        W = np.where(close, 1 / (1 + np.maximum(degree[:, None], degree[None])), 0.0)
        W += np.diag(1 - W.sum(1))
        x = W @ (x - 0.1 * x)
    np.testing.assert_allclose(results.x.numpy(), x, rtol=0, atol=1e-13)
    assert any((graph != graphs[0]).any() for graph in graphs[1:])


def test_the_function_gets_the_state_of_the_algorithm() -> None:
    states = []

    def links(round_: int, x: torch.Tensor, state: Any) -> list[tuple[int, int]]:
        states.append(state)
        return [(i, i + 1) for i in range(N - 1)]

    fleet = StackedFleet(N)
    fleet.run(GradientTracking(0.1), start(), lambda x: x, 2, topology=links)
    assert torch.equal(states[0][0], start())
    static = StackedFleet(with_metropolis_hastings_weights(nx.path_graph(N)))
    expected = static.run(GradientTracking(0.1), start(), lambda x: x, 5)
    results = fleet.run(GradientTracking(0.1), start(), lambda x: x, 5, topology=links)
    assert (results.x - expected.x).abs().max() < 1e-13
    assert results.sent == expected.sent


def test_all_forms_of_links_are_the_same_round() -> None:
    graph = nx.gnp_random_graph(N, 0.3, seed=2)
    weighted = with_metropolis_hastings_weights(graph)
    W = mixing_matrix(weighted)
    pairs = list(graph.edges)
    both_ways = torch.tensor([*pairs, *((j, i) for i, j in pairs), (3, 3)])
    adjacent = torch.from_numpy(nx.to_numpy_array(graph)) != 0
    for links in (pairs, both_ways, both_ways.numpy(), adjacent, adjacent.triu(), weighted, W, torch.from_numpy(W)):
        edges = edges_of(links, N)
        dense = np.zeros((N, N))
        dense[edges.destination, edges.source] = edges.weight
        np.testing.assert_allclose(dense, W, rtol=0, atol=1e-15)
    assert edges_of([], N).weight.tolist() == [1.0] * N


def test_weights_of_one_agent_from_local_degrees() -> None:
    graph = nx.gnp_random_graph(N, 0.4, seed=5)
    W = mixing_matrix(with_metropolis_hastings_weights(graph))
    for rank in graph:
        own, shares = metropolis_hastings_weights({peer: graph.degree[peer] for peer in graph[rank]})
        assert own == pytest.approx(W[rank, rank], abs=1e-15)
        assert shares == {peer: W[rank, peer] for peer in graph[rank]}


def test_conditions_apply_to_changing_links() -> None:
    fleet, lossy = StackedFleet(N), Conditions(loss=0.4, protocol="handshake")

    def links(round_: int, x: torch.Tensor, state: Any) -> torch.Tensor:
        return near(x)

    run = fleet.run(GradientDescent(0.0), start(), torch.zeros_like, 3, topology=links, conditions=lossy)
    plain = fleet.run(GradientDescent(0.0), start(), torch.zeros_like, 3, topology=links)
    assert (run.x.mean(0) - start().mean(0)).abs().max() < 1e-13
    assert not torch.allclose(run.x, plain.x)


def test_an_algorithm_that_needs_one_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="EXTRA needs W to be static"):
        StackedFleet(N).run(EXTRA(0.1), start(), lambda x: x, 1, topology=lambda k, x, s: near(x))


def test_a_fleet_without_links_needs_a_function() -> None:
    with pytest.raises(ValueError, match="needs W to be connected"):
        StackedFleet(N).run(GradientDescent(0.1), start(), lambda x: x, 1)


@pytest.mark.parametrize(
    "links", [[(0, N)], [(0, 1, 2)], torch.ones(3, 3, dtype=torch.bool), torch.eye(5), nx.path_graph(4)], ids=str
)
def test_links_of_other_agents_are_refused(links: Any) -> None:
    with pytest.raises(ValueError, match=f"{N}"):
        StackedFleet(N).run(GradientDescent(0.1), start(), lambda x: x, 1, topology=lambda k, x, s: links)
