"""Robust rules and adversaries in a stacked fleet, against their equations in numpy and against real agents."""

from __future__ import annotations

from statistics import NormalDist

import networkx as nx
import numpy as np
import pytest
import torch

import shoal
from shoal.algorithms import (
    Algorithm,
    GradientDescent,
    GradientTracking,
    LocalSteps,
    Momentum,
    ParallelGradientDescent,
    PushSum,
    RobustMixing,
    run,
)
from shoal.algorithms.runs.conditions import Conditions
from shoal.ops.robust_rules import Robust
from shoal.sim import (
    Adversary,
    ALittleIsEnough,
    InnerProductManipulation,
    LabelFlip,
    SignFlip,
    StackedFleet,
    StackedMix,
)
from shoal.topology import FullyConnectedGraph, RingGraph
from support.robust_rules import of_paper

SIZE, DIMENSION, BAD = 8, 5, (2, 5)
RULES = [
    shoal.robust.FiniteOnly(),
    shoal.robust.ClippedGossip(radius=1.0),
    shoal.robust.ClippedGossip(),
    shoal.robust.ClippedSum(),
    shoal.robust.NearestNeighbours(),
    shoal.robust.TrimmedMean(),
    shoal.robust.CoordinateMedian(),
]
ATTACKS: list[Adversary] = [
    SignFlip(BAD, 2.0),
    InnerProductManipulation(BAD, 0.3),
    ALittleIsEnough(BAD),
    ALittleIsEnough(BAD, 1.5),
    LabelFlip(BAD),
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=str)
every_attack = pytest.mark.parametrize("attack", ATTACKS, ids=lambda one: type(one).__name__)


def weights() -> np.ndarray:
    """A doubly stochastic W with unequal weights, of a graph that is not complete and where all have 4 or more."""
    graph = nx.circulant_graph(SIZE, [1, 2])
    graph.add_edges_from([(0, 4), (1, 5)])
    degree = dict(graph.degree)
    w = np.zeros((SIZE, SIZE))
    for a, b in graph.edges:
        w[a, b] = w[b, a] = 1 / (1 + max(degree[a], degree[b]))
    return w + np.diag(1 - w.sum(1))


def graph_of(w: np.ndarray) -> nx.DiGraph:
    return nx.from_numpy_array(w.T, create_using=nx.DiGraph)


def values() -> torch.Tensor:
    draw = torch.Generator().manual_seed(4)
    return torch.randn(SIZE, DIMENSION, dtype=torch.float64, generator=draw) * torch.arange(1, SIZE + 1).unsqueeze(1)


def message(attack: Adversary, own: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The message of an attack, from its paper."""
    if isinstance(attack, SignFlip):
        return -2.0 * own
    if isinstance(attack, InnerProductManipulation):
        return -0.3 * np.asarray(seen.sum(0)) / len(seen)
    if isinstance(attack, ALittleIsEnough):
        s = SIZE // 2 + 1 - len(BAD)
        z = attack.z or NormalDist().inv_cdf((SIZE - len(BAD) - s) / (SIZE - len(BAD)))
        deviation = np.sqrt(((seen - seen.mean(0)) ** 2).sum(0) / (len(seen) - 1))
        return np.asarray(seen.mean(0) - z * deviation)
    return own


def received(attack: Adversary, x: np.ndarray, w: np.ndarray, rank: int) -> tuple[list[np.ndarray], list[float]]:
    """The tensors that an honest agent gets, and their weights."""
    sources = [index for index in range(SIZE) if w[rank, index] and index != rank]
    seen = x[[rank, *(source for source in sources if source not in BAD)]]
    results = [message(attack, x[source], seen) if source in BAD else x[source] for source in sources]
    return results, [w[rank, source] for source in sources]


@every_rule
def test_the_primitive_is_the_rules_equation(rule: Robust) -> None:
    w, x = weights(), values()
    result = StackedMix(graph_of(w)).robust(x, rule).numpy()
    for rank in range(SIZE):
        others = [index for index in range(SIZE) if w[rank, index] and index != rank]
        expected = of_paper(rule, x[rank].numpy(), [x[one].numpy() for one in others], [w[rank, one] for one in others])
        np.testing.assert_allclose(result[rank], expected, rtol=0, atol=1e-12)


@every_rule
@every_attack
def test_a_rule_gets_the_messages_of_an_attack(rule: Robust, attack: Adversary) -> None:
    w, x = weights(), values()
    result = StackedMix(graph_of(w), adversary=attack).robust(x, rule).numpy()
    for rank in attack.honest(SIZE):
        expected = of_paper(rule, x[rank].numpy(), *received(attack, x.numpy(), w, rank))
        np.testing.assert_allclose(result[rank], expected, rtol=0, atol=1e-12)


@every_attack
def test_a_plain_average_gets_the_messages_of_an_attack(attack: Adversary) -> None:
    w, x = weights(), values()
    result = StackedMix(graph_of(w), adversary=attack)(x).numpy()
    for rank in attack.honest(SIZE):
        tensors, shares = received(attack, x.numpy(), w, rank)
        expected = w[rank, rank] * x[rank].numpy() + np.tensordot(shares, np.stack(tensors), 1)
        np.testing.assert_allclose(result[rank], expected, rtol=0, atol=1e-12)
    for rank in BAD:
        np.testing.assert_allclose(result[rank], (w @ x.numpy())[rank], rtol=0, atol=1e-12)


def algorithm_with(rule: Robust) -> Algorithm:
    return RobustMixing(Momentum(GradientDescent(0.2), 0.5), rule)


def real(rule: Robust) -> torch.Tensor:
    x, target = torch.zeros(DIMENSION, dtype=torch.float64), values()[shoal.rank()]
    return run(algorithm_with(rule), x, lambda x: x - target, graph_of(weights()), 6).x


@pytest.mark.parametrize("rule", [shoal.robust.ClippedSum(), shoal.robust.TrimmedMean()], ids=str)
def test_real_agents_have_the_same_bits(rule: Robust) -> None:
    start = torch.zeros(DIMENSION, dtype=torch.float64)
    expected = StackedFleet(graph_of(weights())).run(algorithm_with(rule), start, lambda x: x - values(), 6).x
    assert torch.equal(torch.stack(shoal.Fleet(SIZE).run(real, rule)), expected)


def test_a_rule_keeps_honest_agents_near_their_optimum_where_an_average_does_not() -> None:
    fleet, bad = StackedFleet(FullyConnectedGraph(SIZE)), SignFlip(BAD, 100.0)
    target, start = torch.ones(SIZE, DIMENSION), torch.zeros(DIMENSION)

    def distance(x: torch.Tensor) -> dict[str, float]:
        assert len(x) == SIZE - len(BAD)
        return {"distance": (x - 1).norm(dim=1).max().item()}

    for rule in (
        shoal.robust.TrimmedMean(2),
        shoal.robust.NearestNeighbours(2),
        shoal.robust.ClippedSum(2),
        shoal.robust.CoordinateMedian(),
    ):
        robust = fleet.run(
            RobustMixing(GradientDescent(0.3), rule), start, lambda x: x - target, 60, adversary=bad, measure=distance
        )
        assert robust.records[-1]["distance"] < 1e-3, rule
    plain = fleet.run(GradientDescent(0.3), start, lambda x: x - target, 60, adversary=bad, measure=distance)
    assert not plain.records[-1]["distance"] < 10


def test_records_are_of_the_honest_agents() -> None:
    fleet, target = StackedFleet(graph_of(weights())), values()
    one = fleet.run(GradientDescent(0.1), target, lambda x: x - target, 1, adversary=SignFlip(BAD))
    honest = one.x[SignFlip(BAD).honest(SIZE)]
    expected = (honest - honest.mean(0)).square().sum(1).mean().sqrt().item()
    assert one.records[-1]["consensus"] == pytest.approx(expected, rel=1e-12)


def test_local_steps_exchange_by_the_rule() -> None:
    fleet, x = StackedFleet(graph_of(weights())), values()
    rule = shoal.robust.TrimmedMean()
    for algorithm in (
        LocalSteps(RobustMixing(GradientDescent(0.0), rule), 2),
        RobustMixing(LocalSteps(GradientDescent(0.0), 2), rule),
    ):
        first, second = (fleet.run(algorithm, x, torch.zeros_like, steps).x for steps in (1, 2))
        assert torch.equal(first, x)
        assert torch.equal(second, StackedMix(graph_of(weights())).robust(x, rule))


def test_labels_are_flipped_on_the_adversarys_agents_only() -> None:
    targets = torch.arange(12).view(4, 3) % 10
    result = LabelFlip((1, 3)).flipped(targets)
    assert torch.equal(result[[0, 2]], targets[[0, 2]])
    assert torch.equal(result[[1, 3]], 9 - targets[[1, 3]])
    parts = [torch.tensor([0, 5]), torch.tensor([1, 7, 2])]
    result = LabelFlip((1,), 3).flipped(torch.tensor([0, 1, 2, 0, 1, 2, 0, 0]), parts)
    assert result.tolist() == [0, 1, 0, 0, 1, 2, 0, 2]


def test_unsupported_rules_and_adversaries_are_refused() -> None:
    fleet, x = StackedFleet(FullyConnectedGraph(SIZE)), values()
    rule = shoal.robust.TrimmedMean()
    with pytest.raises(ValueError, match="needs at least 3 neighbours in a round for TrimmedMean"):
        StackedFleet(RingGraph(SIZE)).run(RobustMixing(GradientDescent(0.1), rule), x, lambda x: x, 1)
    with pytest.raises(ValueError, match="in round 0 rank 0 has 2"):
        StackedMix(RingGraph(SIZE)).robust(x, rule)
    for algorithm, what in (
        (ParallelGradientDescent(0.1), "averages over all agents"),
        (PushSum(), "column-stochastic"),
    ):
        with pytest.raises(ValueError, match=what):
            fleet.run(RobustMixing(algorithm, rule), x, lambda x: x, 1)
    with pytest.raises(ValueError, match="this algorithm uses averages over all agents"):
        fleet.run(ParallelGradientDescent(0.1), x, lambda x: x, 1, adversary=SignFlip(BAD))
    for ranks in ((SIZE,), tuple(range(SIZE))):
        with pytest.raises(ValueError, match="of an adversary"):
            fleet.run(GradientTracking(0.1), x, lambda x: x, 1, adversary=SignFlip(ranks))
    with pytest.raises(ValueError, match="no z hides 7 of 8"):
        ALittleIsEnough(tuple(range(7))).deviations(8)


def test_an_adversary_is_refused_beside_conditions() -> None:
    with pytest.raises(ValueError, match="give it without conditions"):
        StackedFleet(FullyConnectedGraph(3)).run(
            GradientDescent(0.1),
            torch.zeros(2),
            lambda x: x,
            1,
            adversary=SignFlip((0,), 2.0),
            conditions=Conditions(),
        )
