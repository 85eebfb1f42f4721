"""Push-pull and AB: exact on directed graphs, with the rows of one matrix and the columns of another."""

from __future__ import annotations

import networkx as nx
import pytest
import torch

from shoal.algorithms import GradientTracking, PushPull
from shoal.sim import StackedFleet, StackedMix
from shoal.topology import Alternating, Static, with_uniform_weights
from shoal.topology.families.static import ring
from support.algorithm_cases import irregular_digraph
from support.least_squares import DIMENSION, SIZE, optimum
from support.quadratic import gradients

both_forms = pytest.mark.parametrize("atc", [True, False])


def starts() -> torch.Tensor:
    return torch.randn(SIZE, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(6))


@both_forms
def test_it_is_gradient_tracking_where_w_is_doubly_stochastic(atc: bool) -> None:
    fleet, gradient = StackedFleet(ring(SIZE)), gradients()
    results = fleet.run(PushPull(0.05, atc), starts(), gradient, 50)
    assert torch.equal(results.x, fleet.run(GradientTracking(0.05, atc), starts(), gradient, 50).x)


@both_forms
def test_it_is_exact_if_w_is_only_row_stochastic(atc: bool) -> None:
    """W is used for the pulls, and the pushes get shares of their own."""
    graph = with_uniform_weights(irregular_digraph(SIZE))
    results = StackedFleet(graph).run(PushPull(0.08, atc), starts(), gradients(), 1500)
    assert (results.x - optimum()).abs().max() < 1e-12


@both_forms
def test_it_is_exact_on_changing_links(atc: bool) -> None:
    graph = irregular_digraph(SIZE)
    topology = Alternating([Static(graph), Static(graph.reverse())])
    results = StackedFleet(topology).run(PushPull(0.05, atc), starts(), gradients(), 2000)
    assert (results.x - optimum()).abs().max() < 1e-12


@both_forms
def test_the_tracked_values_always_sum_to_the_gradients(atc: bool) -> None:
    fleet, gradient = StackedFleet(irregular_digraph(SIZE)), gradients()
    results = fleet.run(PushPull(0.05, atc), starts(), gradient, 0)
    for _ in range(20):
        results = fleet.run(PushPull(0.05, atc), starts(), gradient, 1, resume=results)
        y, g = results.state
        assert (y.sum(0) - gradient(results.x).sum(0)).abs().max() < 1e-12
        assert torch.equal(g, gradient(results.x))


@both_forms
def test_agents_in_consensus_at_the_optimum_of_one_objective_stay(atc: bool) -> None:
    """R preserves consensus, which C would not: at zero gradients, nothing moves."""
    start = torch.ones(SIZE, DIMENSION, dtype=torch.float64)
    results = StackedFleet(irregular_digraph(SIZE)).run(PushPull(0.05, atc), start, lambda x: x - 1, 30)
    assert (results.x - 1).abs().max() < 1e-14


def test_tracking_with_row_weights_only_has_another_fixed_point() -> None:
    """The reason for C: with row weights, the sum of the y is not that of the gradients."""
    mix, gradient = StackedMix(irregular_digraph(SIZE)), gradients()
    x = starts()
    y = g = gradient(x)
    for _ in range(2000):
        x = mix.pull(x - 0.05 * y)
        new = gradient(x)
        y, g = mix.pull(y + new - g), new
    assert (x - optimum()).abs().max() > 0.01


def test_periodic_mixings_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"PushPull needs the differences .* row-stochastic form has the eigenvalue 1i"
    ):
        StackedFleet(nx.cycle_graph(4, create_using=nx.DiGraph)).run(PushPull(0.1), torch.ones(4, 1), lambda x: x, 1)
