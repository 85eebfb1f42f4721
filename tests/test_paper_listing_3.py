"""A program that makes every call of the BlueFog paper's listing 3 (Ying et al., arXiv:2111.04287): push-sum.

The program is our own; what it shares with the listing are the names, and the positional and keyword arguments, of the
calls. In lockstep it does what equations 19 and 20 say, number by number; without it, it reaches the mean of
equation 18.
"""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx
import pytest
import torch

import shoal
import shoal.bluefog as bf

Fleets = Callable[..., shoal.Fleet]

NUMEL = 3
GRAPH = nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (1, 0)])
"""Directed, and irregular: averaging without the correction by p leans to some agents."""


def vectors(size: int) -> torch.Tensor:
    """What each agent begins with, [size, NUMEL]."""
    return torch.randn(size, NUMEL, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def push_sum(max_iters: int, stages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x_ext of this agent, [x, p], before and after the last collection; a barrier after every ``max_iters``.

    Between two barriers every agent goes its own way. With ``max_iters=1`` all are in lockstep.
    """
    bf.init()
    bf.set_topology(GRAPH)
    x = vectors(bf.size())[bf.rank()].clone()
    p = torch.DoubleTensor([1.0]).to(x.device)
    x_ext = torch.cat([x, p], 0)
    assert bf.win_create(x_ext, name="x_ext", zero_init=True) is True

    outdegree = len(bf.out_neighbor_ranks())
    dst_weights = dict.fromkeys(bf.out_neighbor_ranks(), 1.0 / (outdegree + 1))
    self_weight = 1 / (1 + outdegree)
    for _ in range(stages):
        for _ in range(max_iters):
            bf.win_accumulate(x_ext, name="x_ext", self_weight=self_weight, dst_weights=dst_weights, require_mutex=True)
            if max_iters == 1:
                bf.barrier()  # everybody's push has come: equations 19 and 20 with all delays one
            bf.win_update_then_collect(name="x_ext")
        bf.barrier()
    before = x_ext.clone()

    bf.barrier()
    bf.win_update_then_collect(name="x_ext")
    assert bf.win_free(name="x_ext") is True
    return before, x_ext


def test_in_lockstep_every_number_is_that_of_the_equations(fleet: Fleets) -> None:
    size, iterations = 4, 6
    W = torch.zeros(size, size, dtype=torch.float64)  # W[i, j]: what i gets of j's; columns sum to 1
    for j in range(size):
        for i in (j, *GRAPH.successors(j)):
            W[i, j] = 1 / (GRAPH.out_degree(j) + 1)
    extended = torch.cat([vectors(size), torch.ones(size, 1, dtype=torch.float64)], dim=1)
    expected = torch.linalg.matrix_power(W, iterations) @ extended

    results = fleet(size).run(push_sum, 1, iterations)
    torch.testing.assert_close(torch.stack([before for before, _ in results]), expected, rtol=0, atol=1e-14)


def test_without_waiting_every_agent_reaches_the_unbiased_mean(fleet: Fleets) -> None:
    size = 4
    results = fleet(size).run(push_sum, 4, 40)
    mean = vectors(size).mean(dim=0)
    for x_ext, _ in results:
        torch.testing.assert_close(x_ext[:-1] / x_ext[-1], mean, rtol=0, atol=1e-12)
    weights = [x_ext[-1].item() for _, x_ext in results]
    assert max(weights) - min(weights) > 0.1, "the correction has something to correct"


def test_the_sum_over_agents_and_windows_is_conserved(fleet: Fleets) -> None:
    """The remark to the listing: for any interleaving of agents, and wherever they stop."""
    size = 4
    collected = torch.stack([after for _, after in fleet(size).run(push_sum, 7, 1)]).sum(dim=0)
    torch.testing.assert_close(collected[:-1], vectors(size).sum(dim=0), rtol=0, atol=1e-14)
    assert collected[-1].item() == pytest.approx(size, abs=1e-14)
