"""Asynchronous gossip by Poisson clocks."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import torch

from shoal.algorithms import GradientDescent
from shoal.sim import PoissonGossip, StackedFleet
from shoal.topology import RingGraph

N, EVENTS = 10, 400
START = torch.randn(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def run(gossip: PoissonGossip, lr: float = 0.0, steps: int = EVENTS) -> torch.Tensor:
    fleet = StackedFleet(N)
    return fleet.run(GradientDescent(lr), START, lambda x: x - 1, steps, topology=gossip, conditions=gossip).x


def test_only_the_two_agents_of_an_event_step_and_average() -> None:
    gossip = PoissonGossip(RingGraph(N), EVENTS, seed=3)
    x = START.numpy().copy()
    for pair in gossip.pairs:
        x[pair] = (x[pair] - 0.05 * (x[pair] - 1)).mean(0)
    np.testing.assert_allclose(run(gossip, 0.05).numpy(), x, rtol=0, atol=1e-13)


def test_agents_reach_the_mean_and_keep_it_in_spite_of_losses() -> None:
    gossip = PoissonGossip(RingGraph(N), 3000, loss=0.3, seed=1)
    found = run(gossip, steps=3000)
    torch.testing.assert_close(found, START.mean(0).expand_as(found), rtol=0, atol=1e-9)
    assert not torch.equal(run(gossip), run(PoissonGossip(RingGraph(N), EVENTS, seed=1)))


def test_a_clock_ticks_at_its_rate_and_chooses_all_neighbours_alike() -> None:
    rates = np.linspace(0.5, 2.0, N)
    gossip = PoissonGossip(nx.star_graph(N - 1), 40_000, rates=rates)
    counts, expected = np.bincount(gossip.pairs[:, 0], minlength=N), rates * gossip.times[-1]
    # A Poisson count has the variance of its mean; 4 standard deviations are rare even in 10 draws.
    assert (abs(counts - expected) < 4 * np.sqrt(expected)).all()
    gaps = np.diff(gossip.times)
    assert gaps.min() > 0
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)  # as of an exponential distribution
    of_hub = np.bincount(gossip.pairs[gossip.pairs[:, 0] == 0, 1], minlength=N)[1:]
    assert of_hub.min() > 0.7 * of_hub.mean()
    assert (gossip.pairs[gossip.pairs[:, 0] != 0, 1] == 0).all()


def test_a_seed_repeats_the_events() -> None:
    one, same, other = (PoissonGossip(RingGraph(N), 50, seed=seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(one.times, same.times)
    np.testing.assert_array_equal(one.pairs, same.pairs)
    assert (one.pairs != other.pairs).any()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="one direction"):
        PoissonGossip(nx.DiGraph([(0, 1), (1, 0), (1, 2)]), 5)
    with pytest.raises(ValueError, match="no neighbour"):
        PoissonGossip(nx.empty_graph(3), 5)
    with pytest.raises(ValueError, match="above 0"):
        PoissonGossip(RingGraph(N), 5, rates=0.0)
    with pytest.raises(ValueError, match="as many events"):
        run(PoissonGossip(RingGraph(N), 5), steps=6)
    with pytest.raises(ValueError, match="4 agents"):
        run(PoissonGossip(RingGraph(4), 5), steps=1)
