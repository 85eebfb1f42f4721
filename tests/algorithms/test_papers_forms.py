"""The papers' own forms, each written in numpy from its equations: stacked, and on agents that are threads."""

from __future__ import annotations

import dataclasses

import networkx as nx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import shoal
from shoal.algorithms import (
    Algorithm,
    AveragedMomentum,
    ExactDiffusion,
    GradientDescent,
    GradientTracking,
    Momentum,
    MomentumTracking,
    PowerGossip,
    PushPull,
    QuasiGlobalMomentum,
    RelaySum,
    run,
)
from shoal.algorithms.runs.run import steps_of
from shoal.sim import StackedFleet, StackedMix
from shoal.topology import Circulant, OnePeerExponential, Schedule, SpanningTreeGraph, TreeGraph, as_schedule
from support.algorithm_cases import irregular_digraph

Vectors = NDArray[np.float64]
N, D, STEPS, LR, BETA, MU = 7, 6, 12, 0.05, 0.8, 0.6
_DRAW = np.random.default_rng(12)
CURVED, CENTRES, START = _DRAW.uniform(0.3, 2, (N, D)), _DRAW.normal(size=(N, D)), _DRAW.normal(size=(N, D))

TREE = TreeGraph(N)
RING = Circulant(N, {0: 0.4, 1: 0.3, -1: 0.3})
ONE_WAY = irregular_digraph(N)
CHANGING = OnePeerExponential(N)


def slope(x: Vectors) -> Vectors:
    return CURVED * (x - CENTRES)


def mixing(topology: nx.Graph | Schedule, round_: int = 0) -> Vectors:
    edges = as_schedule(topology).edges(round_)
    W = np.zeros((N, N))
    W[np.array(edges.destination), np.array(edges.source)] = np.array(edges.weight)
    return W


def linked(graph: nx.Graph) -> Vectors:
    """Who hears whom: row i has a one for i and for each that sends to it."""
    result = np.eye(N)
    for source, destination in graph.edges:
        result[destination, source] = 1
    return result


def semi_gradient_tracking(adapt_then_combine: bool = False) -> Vectors:
    x = START
    y = slope(x)
    for k in range(STEPS):
        W = mixing(CHANGING, k)
        new = W @ (x - LR * y)
        change = slope(new) - slope(x)
        y = W @ (y + change) if adapt_then_combine else W @ y + change
        x = new
    return x


def aug_dgm() -> Vectors:
    return semi_gradient_tracking(adapt_then_combine=True)


def push_pull(adapt_then_combine: bool = False) -> Vectors:
    hears = linked(ONE_WAY)
    R, C = hears / hears.sum(1, keepdims=True), hears / hears.sum(0, keepdims=True)
    x = START
    y = slope(x)
    for _ in range(STEPS):
        new = R @ (x - LR * y)
        change = slope(new) - slope(x)
        y = C @ (y + change) if adapt_then_combine else C @ y + change
        x = new
    return x


def push_pull_atc() -> Vectors:
    return push_pull(adapt_then_combine=True)


def yu_jin_yang() -> Vectors:
    """Each node takes its step of momentum SGD; then both x and the momentum are averaged."""
    x, u = START, np.zeros((N, D))
    for k in range(STEPS):
        u_before = BETA * u + slope(x)
        x_before = x - LR * u_before
        W = mixing(CHANGING, k)
        x, u = W @ x_before, W @ u_before
    return x


def averaged_first() -> Vectors:
    x, m = START, np.zeros((N, D))
    for k in range(STEPS):
        W = mixing(CHANGING, k)
        m = W @ (BETA * m + slope(x))
        x = W @ (x - LR * m)
    return x


def local_momentum() -> Vectors:
    x, m = START, np.zeros((N, D))
    for k in range(STEPS):
        m = BETA * m + slope(x)
        x = mixing(CHANGING, k) @ (x - LR * m)
    return x


def edm() -> Vectors:
    """A heavy ball whose gradients weigh 1 - beta, in exact diffusion."""
    W = mixing(RING)
    x, m, psi = START, np.zeros((N, D)), START
    for _ in range(STEPS):
        m = BETA * m + (1 - BETA) * slope(x)
        before, psi = psi, x - LR * m
        x = W @ (psi + x - before)
    return x


def quasi_global(nesterov: bool) -> Vectors:
    W = mixing(RING)
    x, m = START, np.zeros((N, D))
    for _ in range(STEPS):
        g = slope(x)
        local = BETA * m + g
        new = W @ (x - LR * (g + BETA * local if nesterov else local))
        x, m = new, MU * m + (1 - MU) * (x - new) / LR
    return x


def momentum_tracking() -> Vectors:
    """The authors' code: momentum u and a dual variable c, both begun from the differences of the gradients."""
    x, g = START, slope(START)
    u = c = (g - g.mean(0)) / (1 - BETA)
    for k in range(STEPS):
        W = mixing(CHANGING, k)
        u = BETA * u + slope(x)
        x = W @ x - LR * (u - c)
        c = W @ (c - u) + u
    return x


def relay(fill: str) -> Vectors:
    tree = nx.Graph(TREE)
    near = {i: sorted(set(tree.neighbors(i)) - {i}) for i in range(N)}
    x = START.copy()
    sent_values = {(i, j): np.zeros(D) for i in near for j in near[i]}
    counts = dict.fromkeys(sent_values, 0)
    for _ in range(STEPS):
        half = x - LR * slope(x)
        new_values = {(i, j): half[i] + sum(sent_values[k, i] for k in near[i] if k != j) for i, j in sent_values}
        counts = {(i, j): 1 + sum(counts[k, i] for k in near[i] if k != j) for i, j in sent_values}
        sent_values = new_values
        for i in range(N):
            missing = N - 1 - sum(counts[k, i] for k in near[i])
            stand_in = START[i] if fill == "start" else half[i]
            x[i] = (half[i] + sum(sent_values[k, i] for k in near[i]) + missing * stand_in) / N
    return x


FORMS: list[tuple[Algorithm, nx.Graph | Schedule, Vectors]] = [
    (GradientTracking(LR, semi=True), CHANGING, semi_gradient_tracking()),
    (GradientTracking(LR), CHANGING, aug_dgm()),
    (PushPull(LR, semi=True), ONE_WAY, push_pull()),
    (PushPull(LR), ONE_WAY, push_pull_atc()),
    (AveragedMomentum(LR, BETA, together=True), CHANGING, yu_jin_yang()),
    (AveragedMomentum(LR, BETA), CHANGING, averaged_first()),
    (Momentum(GradientDescent(LR), BETA), CHANGING, local_momentum()),
    (Momentum(ExactDiffusion(LR), BETA, dampened=True), RING, edm()),
    (QuasiGlobalMomentum(LR, BETA, mu=MU), RING, quasi_global(nesterov=False)),
    (QuasiGlobalMomentum(LR, BETA, nesterov=True, mu=MU), RING, quasi_global(nesterov=True)),
    (MomentumTracking(LR, BETA), CHANGING, momentum_tracking()),
    (RelaySum(LR, fill="start"), TREE, relay("start")),
    (RelaySum(LR), TREE, relay("own")),
]
every_form = pytest.mark.parametrize(
    ("algorithm", "topology", "paper"), [pytest.param(*one, id=str(one[0])) for one in FORMS]
)


def of_all(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(CURVED) * (x - torch.from_numpy(CENTRES))


def on_agent(algorithm: Algorithm, topology: nx.Graph | Schedule, steps: int = STEPS) -> torch.Tensor:
    """This agent's x."""
    curved, centre, start = (torch.from_numpy(one[shoal.rank()]) for one in (CURVED, CENTRES, START))
    return run(algorithm, start, lambda x: curved * (x - centre), topology, steps).x


@every_form
def test_it_is_the_papers_equation(algorithm: Algorithm, topology: nx.Graph | Schedule, paper: Vectors) -> None:
    results = StackedFleet(topology).run(algorithm, torch.from_numpy(START), of_all, STEPS).x.numpy()
    assert np.abs(results - paper).max() < 1e-12


@every_form
@pytest.mark.transport("threads")
def test_agents_equal_the_papers_equation(algorithm: Algorithm, topology: nx.Graph | Schedule, paper: Vectors) -> None:
    results = torch.stack(shoal.Fleet(N).run(on_agent, algorithm, topology)).numpy()
    assert np.abs(results - paper).max() < 1e-12


def test_no_two_forms_are_equal() -> None:
    """Otherwise a field would have no effect, and these tests could not detect it."""
    for number, (_, topology, paper) in enumerate(FORMS):
        for _, other_topology, other in FORMS[:number]:
            assert topology is not other_topology or np.abs(paper - other).max() > 1e-4


# PowerGossip


def power_gossip(halves: int, rows: int, left: dict, right: dict) -> Vectors:  # type: ignore[type-arg]
    """As its authors count: one product and one message an iteration, of the one side and the other in turn."""
    columns = -(-D // rows)
    tree = nx.Graph(TREE)
    degree = {i: len(set(tree.neighbors(i)) - {i}) for i in range(N)}
    x, iteration = START.copy(), 0
    for _ in range(STEPS):
        x = x - LR * slope(x)
        for _ in range(halves):
            X = np.zeros((N, rows * columns))
            X[:, :D] = x
            X = X.reshape(N, rows, columns)
            change = np.zeros_like(X)
            for i, j in ((i, j) for i, j in tree.edges if i != j):
                i, j = sorted((i, j))
                difference, weight = X[j] - X[i], 1 / (1 + max(degree[i], degree[j]))
                if iteration % 2 == 0:
                    v = right[i, j] / np.linalg.norm(right[i, j])
                    left[i, j] = difference @ v
                    seen = np.outer(left[i, j], v)
                else:
                    v = left[i, j] / np.linalg.norm(left[i, j])
                    right[i, j] = difference.T @ v
                    seen = np.outer(v, right[i, j])
                change[i] += weight * seen
                change[j] -= weight * seen
            x = x + change.reshape(N, -1)[:, :D]
            iteration += 1
    return x


@pytest.mark.parametrize(("iterations", "rows"), [(0.5, 2), (0.5, 4), (1, 2), (1.5, 3)])
def test_power_gossip_counts_halves_where_its_authors_count_iterations(iterations: float, rows: int) -> None:
    algorithm = PowerGossip(LR, iterations, rows)
    fleet = StackedFleet(TREE)
    started = fleet.run(algorithm, torch.from_numpy(START), of_all, 0)
    links = [(i, j) for i in range(N) for j in sorted(set(nx.Graph(TREE).neighbors(i)) - {i})]
    left, right = ({link: row.numpy() for link, row in zip(links, one, strict=True)} for one in started.state[1:])
    paper = power_gossip(round(2 * iterations), rows, left, right)
    results = fleet.run(algorithm, torch.from_numpy(START), of_all, STEPS)
    assert np.abs(results.x.numpy() - paper).max() < 1e-10
    agents = torch.stack(shoal.Fleet(N).run(on_agent, algorithm, TREE)).numpy()
    assert np.abs(agents - paper).max() < 1e-10


def test_a_half_iteration_sends_half() -> None:
    def sent(iterations: float, steps: int) -> int:
        return StackedFleet(TREE).run(PowerGossip(LR, iterations, 2), torch.from_numpy(START), of_all, steps).sent

    once = sent(1, 1) - sent(1, 0)
    assert sent(0.5, 1) + sent(0.5, 2) - 2 * sent(0.5, 0) == once + 2 * (N - 1) * 2 * 8
    assert sent(0.5, 2) - sent(0.5, 0) == once


# What a form changes


def test_a_relay_filled_at_the_start_delays_agents_until_all_have_received() -> None:
    """After as many steps as the tree's diameter, both forms are one equation."""
    tree = SpanningTreeGraph(TREE)
    wide = nx.diameter(nx.Graph(tree))
    fleet, start = StackedFleet(tree), torch.from_numpy(START)
    own = fleet.run(RelaySum(LR), start, of_all, wide)
    m, c = own.state
    from_own = fleet.run(RelaySum(LR), start, of_all, 5, resume=own).x
    from_start = fleet.run(
        RelaySum(LR, fill="start"), start, of_all, 5, resume=dataclasses.replace(own, state=(m, c, start))
    ).x
    assert (from_own - from_start).abs().max() < 1e-14


def test_dampened_momentum_over_a_step_is_momentum_over_a_shorter_one() -> None:
    start = torch.from_numpy(START)
    fleet = StackedFleet(RING)
    dampened = fleet.run(Momentum(ExactDiffusion(LR), BETA, dampened=True), start, of_all, STEPS).x
    shorter = fleet.run(Momentum(ExactDiffusion(LR * (1 - BETA)), BETA), start, of_all, STEPS).x
    assert (dampened - shorter).abs().max() < 1e-13


def test_momentum_tracking_without_momentum_is_diging_from_the_mean_gradient() -> None:
    start = torch.from_numpy(START)
    g = of_all(start)
    fleet = StackedFleet(CHANGING)
    started = fleet.run(GradientTracking(LR, atc=False), start, of_all, 0)
    started = dataclasses.replace(started, state=(g.mean(0).expand_as(g), g))
    diging = fleet.run(GradientTracking(LR, atc=False), start, of_all, STEPS, resume=started).x
    assert (fleet.run(MomentumTracking(LR, 0.0), start, of_all, STEPS).x - diging).abs().max() < 1e-13


def test_mu_defaults_to_beta() -> None:
    start = torch.from_numpy(START)
    fleet = StackedFleet(RING)
    given = fleet.run(QuasiGlobalMomentum(LR, BETA, mu=BETA), start, of_all, STEPS).x
    assert torch.equal(given, fleet.run(QuasiGlobalMomentum(LR, BETA), start, of_all, STEPS).x)


def test_quasi_global_momentum_is_checked_with_its_own_mu() -> None:
    """With equal W and beta, a slow momentum decays; a momentum that follows the averaging diverges."""
    little = Circulant(16, {0: 0.1, 1: 0.45, -1: 0.45})
    start = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = StackedFleet(little).run(QuasiGlobalMomentum(0.01, 0.9, mu=0.9), start, torch.zeros_like, 600).x
    assert (results - results.mean(0)).norm() < 1e-6
    swings = QuasiGlobalMomentum(0.01, 0.9, mu=0.3)
    with pytest.raises(ValueError, match="die out"):
        StackedFleet(little).run(swings, start, torch.zeros_like, 1)
    assert steps_of(swings, start, torch.zeros_like, StackedMix(little), 100).x.norm() > 1e6


def test_unknown_forms_are_refused() -> None:
    for make in (GradientTracking, PushPull):
        with pytest.raises(ValueError, match="leave atc=True, or leave semi out"):
            make(LR, atc=False, semi=True)
    with pytest.raises(ValueError, match="choose one"):
        Momentum(GradientDescent(LR), BETA, nesterov=True, dampened=True)
    with pytest.raises(ValueError, match=r"mu=1\.0.*0 <= mu < 1"):
        QuasiGlobalMomentum(LR, BETA, mu=1.0)
    with pytest.raises(ValueError, match=r"0 <= beta < 1"):
        QuasiGlobalMomentum(LR, 1.0, mu=0.5)
    with pytest.raises(ValueError, match="""fill='zero': pass "own" or "start\""""):
        RelaySum(LR, fill="zero")  # type: ignore[arg-type]
    for iterations in (0, 0.25, -1, 0.75):
        with pytest.raises(ValueError, match=r"pass 0\.5, 1, 1\.5"):
            PowerGossip(LR, iterations)
