"""An optimizer whose averages are not what its algorithm needs: a schedule is refused, and of all else it warns."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import networkx as nx
import pytest
import torch

import shoal
from shoal.algorithms import AveragedMomentum, ChocoSGD, ExactDiffusion, QuasiGlobalMomentum
from shoal.compression import RandomK
from shoal.topology import Circulant, OnePeerExponential, RingStar, RingStarDelegates, ShiftOne, with_uniform_weights
from support.optimizers import ATC, AWC, LR, MODEL, batch

Fleets = Callable[..., shoal.Fleet]
Wrap = Callable[..., shoal.DecentralizedOptimizer]
SIZE = 4
STAR = with_uniform_weights(shoal.topology.StarGraph(SIZE))
"""Uniform weights: the rows sum to 1, the centre's column does not."""
KINDS = shoal.optim.CommunicationType


def make(wrap: Wrap, **options: Any) -> tuple[torch.nn.Module, shoal.DecentralizedOptimizer]:
    model = deepcopy(MODEL)
    return model, wrap(torch.optim.SGD(model.parameters(), lr=LR), model, **options)


def one_step(model: torch.nn.Module, optimizer: shoal.DecentralizedOptimizer, step: int = 0) -> None:
    optimizer.zero_grad()
    model(batch(shoal.rank(), step)).square().mean().backward()
    optimizer.step()


def atc(sgd: torch.optim.Optimizer, model: torch.nn.Module, **options: Any) -> shoal.DecentralizedOptimizer:
    return shoal.DecentralizedOptimizer(sgd, model, ATC, **options)


def awc(sgd: torch.optim.Optimizer, model: torch.nn.Module, **options: Any) -> shoal.DecentralizedOptimizer:
    return shoal.DecentralizedOptimizer(sgd, model, AWC, **options)


SCHEDULED = [
    atc,
    awc,
    shoal.bluefog.DistributedAdaptThenCombineOptimizer,
    shoal.bluefog.DistributedAdaptWithCombineOptimizer,
    shoal.bluefog.DistributedNeighborAllreduceOptimizer,
]


def test_waived_conditions_may_come_from_a_generator(fleet: Fleets) -> None:
    """The constructor reads them, and the first round again."""

    def run() -> None:
        shoal.set_topology(shoal.topology.RingGraph(SIZE, 1))
        waived = (name for name in ["symmetric", "differences die out"])
        exact = ExactDiffusion(1.0, lazy=True)
        one_step(*make(partial(shoal.DecentralizedOptimizer, algorithm=exact), topology="static", unchecked=waived))

    fleet(SIZE).run(run)


@pytest.mark.parametrize("wrap", SCHEDULED, ids=lambda one: one.__name__)
def test_a_schedule_with_unbalanced_rounds_is_refused_by_every_wrapper(fleet: Fleets, wrap: Wrap) -> None:
    def run() -> int:
        for bad in (RingStarDelegates(SIZE, 2), STAR, nx.DiGraph([(0, 1), (1, 2), (2, 3)])):
            with pytest.raises(ValueError, match=r"needs W to be doubly stochastic, and (row|column) \d"):
                make(wrap, topology=bad)
        apart = nx.DiGraph([(rank, rank, {"weight": 1.0}) for rank in range(SIZE)])
        with pytest.raises(ValueError, match="connected, and its agents fall into 4 parts"):
            make(wrap, topology=apart)
        with pytest.raises(ValueError, match="unchecked='double': GradientDescent has no such condition"):
            make(wrap, unchecked="double")
        model, optimizer = make(wrap, topology=RingStarDelegates(SIZE, 2), unchecked="doubly stochastic")
        one_step(model, optimizer)
        optimizer.close()
        model, optimizer = make(wrap, topology=RingStar(SIZE, 2))
        one_step(model, optimizer)
        return optimizer.rounds

    assert fleet(SIZE).run(run) == [1] * SIZE


def test_machine_schedules_are_checked_too(fleet: Fleets) -> None:
    def run() -> None:
        hierarchical = KINDS.hierarchical_neighbor_allreduce
        with pytest.raises(ValueError, match="doubly stochastic"):
            make(atc, topology=nx.DiGraph([(0, 1)]), communication_type=hierarchical)
        make(atc, topology=OnePeerExponential(2), communication_type=hierarchical)

    fleet(4, agents_per_machine=2).run(run)


def test_other_algorithms_requirements_are_checked_when_a_topology_is_set(fleet: Fleets) -> None:
    def run() -> None:
        for algorithm, topology, warned in (
            (ExactDiffusion(1.0), Circulant(SIZE, {0: 0.2, 1: 0.4, -1: 0.4}), "above -1/3"),
            (ExactDiffusion(1.0, lazy=True), OnePeerExponential(SIZE), "static"),
            (ChocoSGD(1.0, 0.2, RandomK(0.1, scaled=True)), shoal.topology.RingGraph(SIZE), "contraction"),
        ):
            with pytest.raises(ValueError, match=warned):
                make(partial(shoal.DecentralizedOptimizer, algorithm=algorithm), topology=topology)

    fleet(SIZE).run(run)


def test_exact_diffusion_with_eigenvalue_minus_a_third_causes_a_warning() -> None:
    def run() -> None:
        make(
            partial(shoal.DecentralizedOptimizer, algorithm=ExactDiffusion(1.0)),
            topology=shoal.topology.RingGraph(SIZE),
        )

    assert all("where they are flat, the noise of gradients adds up" in one for one in warnings_of(SIZE, run))
    assert warnings_of(SIZE, run)


def test_an_oscillating_momentum_is_refused_in_training() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="differences between agents to die out"):
            make(
                lambda sgd, model: shoal.DecentralizedOptimizer(
                    sgd, model, QuasiGlobalMomentum(1.0, 0.8), topology=ShiftOne(12)
                )
            )

    shoal.Fleet(12).run(run)


def warnings_of(size: int, function: Callable[[], object], **options: Any) -> list[str]:
    """The warnings of a fleet, of all its threads."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shoal.Fleet(size, **options).run(function)
    return [str(one.message) for one in caught]


STATIC = [
    atc,
    awc,
    shoal.bluefog.DistributedAdaptThenCombineOptimizer,
    shoal.bluefog.DistributedAdaptWithCombineOptimizer,
    shoal.optim.DistributedWinPutOptimizer,
    shoal.optim.DistributedPullGetOptimizer,
]


def train(wrap: Wrap, graph: nx.DiGraph | None, weighted: bool = True, steps: int = 3, **options: Any) -> None:
    if graph is not None:
        shoal.set_topology(graph, is_weighted=weighted)
    model, optimizer = make(wrap, **options)
    for step in range(steps):
        one_step(model, optimizer, step)
    shoal.barrier()
    optimizer.close()


@pytest.mark.parametrize("wrap", STATIC, ids=lambda one: one.__name__)
def test_an_unbalanced_static_topology_causes_one_warning(wrap: Wrap) -> None:
    (warned,) = warnings_of(SIZE, lambda: train(wrap, STAR))
    assert "needs W to be doubly stochastic, and column 0 of W sums to 1.75" in warned
    assert "the static topology of 4 agents" in warned


def test_uniform_weights_that_replace_a_graphs_own_are_named() -> None:
    graph = shoal.topology.StarGraph(SIZE)
    (warned,) = warnings_of(SIZE, lambda: train(atc, nx.DiGraph(graph.edges), weighted=False))
    assert "column 0 of W sums to 1.75" in warned
    assert "with uniform weights since it was set without is_weighted=True" in warned


@pytest.mark.parametrize(
    "wrap",
    [*STATIC, shoal.optim.DistributedPushSumOptimizer, shoal.bluefog.DistributedAllreduceOptimizer],
    ids=lambda one: one.__name__,
)
def test_the_default_topology_and_rings_cause_no_warning(wrap: Wrap) -> None:
    for graph in (None, shoal.topology.RingGraph(SIZE), shoal.topology.RingGraph(SIZE, connect_style=1)):
        assert warnings_of(SIZE, lambda graph=graph: train(wrap, graph, weighted=False)) == []


def test_methods_that_ignore_the_static_topology_or_are_sound_on_it_cause_no_warning() -> None:
    assert warnings_of(SIZE, lambda: train(shoal.optim.DistributedPushSumOptimizer, STAR)) == []
    assert warnings_of(SIZE, lambda: train(shoal.bluefog.DistributedAllreduceOptimizer, STAR)) == []
    assert warnings_of(SIZE, lambda: train(shoal.bluefog.DistributedGradientAllreduceOptimizer, STAR)) == []
    assert warnings_of(SIZE, lambda: train(atc, STAR, communication_type=KINDS.empty)) == []
    assert warnings_of(SIZE, lambda: train(atc, STAR, unchecked="doubly stochastic")) == []


def test_push_sum_on_a_graph_that_is_not_strongly_connected_causes_a_warning() -> None:
    pairs = nx.DiGraph([(0, 1), (1, 0), (2, 3), (3, 2)])
    (warned,) = warnings_of(SIZE, lambda: train(shoal.optim.DistributedPushSumOptimizer, pairs, weighted=False))
    assert "needs W to be connected, and its agents fall into 2 parts" in warned


def test_a_topology_set_later_is_checked_too() -> None:
    def run() -> None:
        model, optimizer = make(atc)
        one_step(model, optimizer)
        shoal.set_topology(STAR, is_weighted=True)
        for step in range(3):
            one_step(model, optimizer, step)

    (warned,) = warnings_of(SIZE, run)
    assert "column 0 of W sums to 1.75" in warned


# By hand


def by_hand(weights: Callable[[int, int], dict[str, Any]], steps: int = 4, wrap: Wrap = atc, **options: Any) -> None:
    """Each step with the weights of ``weights(rank, step)``."""
    model, optimizer = make(wrap, **options)
    for step in range(steps):
        for name, value in weights(shoal.rank(), step).items():
            setattr(optimizer, name, value)
        one_step(model, optimizer, step)
    shoal.barrier()
    optimizer.close()


def one_peer(rank: int, step: int) -> dict[str, Any]:
    """As BlueFog's dynamic topologies are used."""
    hop = 2 ** (step % 2)
    sources, destination = [(rank - hop) % SIZE], (rank + hop) % SIZE
    return {"self_weight": 0.5, "src_weights": dict.fromkeys(sources, 0.5), "dst_weights": [destination]}


def pull_of_star(rank: int, step: int) -> dict[str, Any]:
    """Every row sums to 1, which is all an agent can see; the column of the centre sums to more."""
    others = range(1, SIZE) if rank == 0 else (0,)
    share = 1 / (len(others) + 1)
    return {"self_weight": share, "src_weights": dict.fromkeys(others, share)}


def push_of_star(rank: int, step: int) -> dict[str, Any]:
    """Every column sums to 1, and the rows do not."""
    others = range(1, SIZE) if rank == 0 else (0,)
    share = 1 / (len(others) + 1)
    return {"self_weight": share, "dst_weights": dict.fromkeys(others, share)}


def too_much_later(rank: int, step: int) -> dict[str, Any]:
    result = one_peer(rank, step)
    if step >= 2 and rank == 3:
        result["self_weight"] = 0.75
    return result


def push_too_little_later(rank: int, step: int) -> dict[str, Any]:
    return {"self_weight": 0.5, "dst_weights": {(rank + 1) % SIZE: 0.25 if step and rank == 2 else 0.5}}


def push_pull_that_scales(rank: int, step: int) -> dict[str, Any]:
    hop = 1 + step % 2
    return {
        "self_weight": 0.5,
        "src_weights": {(rank - hop) % SIZE: 2.0},
        "dst_weights": {(rank + hop) % SIZE: 0.25},
    }


@pytest.mark.parametrize("wrap", [atc, awc], ids=lambda one: one.__name__)
@pytest.mark.parametrize("weights", [one_peer, push_pull_that_scales], ids=lambda one: one.__name__)
def test_balanced_explicit_weights_cause_no_warning(weights: Callable[[int, int], dict[str, Any]], wrap: Wrap) -> None:
    assert warnings_of(SIZE, lambda: by_hand(weights, wrap=wrap)) == []


@pytest.mark.parametrize(
    ("weights", "warning"),
    [
        (pull_of_star, "column 0 of W sums to 1.75 (weights by hand, of the first round"),
        (push_of_star, "row 0 of W sums to 1.75 (weights by hand, of the first round"),
        (too_much_later, "self_weight and src_weights of rank 3 make row 3 of W, which sums to 1.25"),
        (push_too_little_later, "self_weight and dst_weights of rank 2 make column 2 of W, which sums to 0.75"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
@pytest.mark.parametrize("wrap", [atc, awc], ids=lambda one: one.__name__)
def test_unbalanced_explicit_weights_cause_one_warning_by_name(
    weights: Callable[[int, int], dict[str, Any]], warning: str, wrap: Wrap
) -> None:
    (result,) = warnings_of(SIZE, lambda: by_hand(weights, steps=6, wrap=wrap))
    assert warning in result
    assert warnings_of(SIZE, lambda: by_hand(weights, wrap=wrap, unchecked="doubly stochastic")) == []


def test_weights_that_windows_would_apply_twice_cause_a_warning() -> None:
    def half(rank: int, step: int) -> dict[str, Any]:
        return {"dst_weights": {(rank + 1) % SIZE: 0.5 if rank == 1 else 1.0}}

    (result,) = warnings_of(SIZE, lambda: by_hand(half, wrap=shoal.optim.DistributedWinPutOptimizer))
    assert "dst_weights scales what is then averaged with the weights of the static topology: 0.5 for rank 2" in result


def test_explicit_machine_weights_are_checked() -> None:
    def weights(rank: int, step: int) -> dict[str, Any]:
        other = 1 - rank // 2
        return {"self_weight": 0.75, "src_machine_weights": {other: 0.5}, "dst_machine_weights": [other]}

    result = warnings_of(
        SIZE,
        lambda: by_hand(weights, communication_type=KINDS.hierarchical_neighbor_allreduce),
        agents_per_machine=2,
    )
    assert result
    assert all("sums to 1.25" in one for one in result)


# Mixings that cannot bring agents together


def without_self_weights() -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(a, (a + hop) % SIZE, 0.5) for a in range(SIZE) for hop in (1, -1)])
    return graph


def with_eigenvalue_above_one(rank: int, step: int) -> dict[str, Any]:
    """Sums of 1, and the eigenvalue 1.5."""
    return {"self_weight": 1.25, "src_weights": {(rank - 1) % SIZE: -0.25}, "dst_weights": [(rank + 1) % SIZE]}


@pytest.mark.parametrize("wrap", SCHEDULED, ids=lambda one: one.__name__)
def test_a_topology_without_consensus_is_refused_by_every_wrapper(fleet: Fleets, wrap: Wrap) -> None:
    def run() -> int:
        for bad in (without_self_weights(), Circulant(SIZE, {1: 0.5, -1: 0.5})):
            with pytest.raises(ValueError, match=r"differences between agents to die out.*eigenvalue -1"):
                make(wrap, topology=bad)
        with pytest.raises(ValueError, match=r"eigenvalue 1.5"):
            make(wrap, topology=Circulant(SIZE, {0: 1.25, 1: -0.25}))
        model, optimizer = make(wrap, topology=without_self_weights(), unchecked="differences die out")
        one_step(model, optimizer)
        return optimizer.rounds

    assert fleet(SIZE).run(run) == [1] * SIZE


@pytest.mark.parametrize("wrap", STATIC, ids=lambda one: one.__name__)
def test_a_static_topology_without_consensus_causes_one_warning(wrap: Wrap) -> None:
    (warned,) = warnings_of(SIZE, lambda: train(wrap, without_self_weights()))
    assert "differences between agents to die out" in warned and "W has the eigenvalue -1" in warned
    assert "Agents then do not come to agree" in warned
    assert warnings_of(SIZE, lambda: train(wrap, without_self_weights(), unchecked="differences die out")) == []


def test_push_sum_uses_its_own_shares_if_the_graph_has_none() -> None:
    assert warnings_of(SIZE, lambda: train(shoal.optim.DistributedPushSumOptimizer, without_self_weights())) == []


def test_explicit_weights_with_growing_disagreement_cause_a_warning() -> None:
    (result,) = warnings_of(SIZE, lambda: by_hand(with_eigenvalue_above_one))
    assert "differences between agents not to grow in any round, and weights below 0 make them grow up to 1.5" in result
    assert warnings_of(SIZE, lambda: by_hand(with_eigenvalue_above_one, unchecked="differences die out")) == []


def swapped(rank: int, step: int) -> dict[str, Any]:
    """A ring of two that passes everything on: doubly stochastic, with the eigenvalue -1."""
    return {"self_weight": 0.0, "src_weights": {1 - rank: 1.0}}


def test_repeated_explicit_weights_without_consensus_cause_a_warning() -> None:
    (result,) = warnings_of(2, lambda: by_hand(swapped, steps=9))
    assert "differences between agents to die out" in result and "eigenvalue -1" in result
    assert "weights by hand of the first round, which rank 0 has repeated" in result
    assert warnings_of(2, lambda: by_hand(swapped, steps=9, unchecked="differences die out")) == []

    def in_turns(rank: int, step: int) -> dict[str, Any]:
        return swapped(rank, step) if step % 2 == 0 else {"self_weight": 0.5, "src_weights": {1 - rank: 0.5}}

    assert warnings_of(2, lambda: by_hand(in_turns, steps=9)) == []


def test_other_algorithms_are_refused_on_a_static_topology_without_consensus() -> None:
    def run() -> None:
        shoal.set_topology(without_self_weights(), is_weighted=True)
        model, optimizer = make(lambda sgd, model: shoal.DecentralizedOptimizer(sgd, model, AveragedMomentum(1.0, 0.5)))
        with pytest.raises(ValueError, match=r"differences between agents to die out.*eigenvalue -1"):
            one_step(model, optimizer)

    shoal.Fleet(SIZE).run(run)
