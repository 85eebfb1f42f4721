"""The topology of an optimizer that is given none: one peer at a time, unless script or algorithm have another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

import shoal
import shoal.bluefog as bf
from shoal.algorithms import CATALOG
from shoal.compression import TopK
from shoal.optim.topologies import topology_of
from shoal.topology import ChainGraph, ExponentialTwoGraph, OnePeerExponential, RingGraph, SymmetricExponentialGraph
from shoal.topology.schedule import Schedule, Static

Fleets = Callable[..., shoal.Fleet]
ATC, AWC = (
    shoal.DecentralizedOptimizer,
    partial(shoal.DecentralizedOptimizer, algorithm=shoal.algorithms.GradientDescent(1.0, atc=False)),
)


def steps_of(make: Any, count: int = 3, **options: Any) -> list[float]:
    """An agent's values after each of some steps that only average; it begins with its rank."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, float(shoal.rank()))
    optimizer = make(torch.optim.SGD(model.parameters(), lr=0.0), model, **options)
    results = []
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()
        results.append(model.weight.item())
    return results


def averages(topology: Schedule, count: int = 3) -> list[list[float]]:
    """The same by the matrices of a topology, of each agent."""
    x, result = np.arange(float(topology.size)), []
    for number in range(count):
        x = topology.matrix(number) @ x
        result.append(x)
    return [[step[rank] for step in result] for rank in range(topology.size)]


@pytest.mark.parametrize("make", [ATC, AWC], ids=["atc", "awc"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_without_a_topology_an_agent_averages_with_one_peer_at_a_time(fleet: Fleets, size: int, make: Any) -> None:
    results = fleet(size).run(lambda: steps_of(make))
    assert np.allclose(results, averages(OnePeerExponential(size)), atol=1e-12)


def test_a_step_sends_one_message_of_the_size_of_the_model(fleet: Fleets) -> None:
    def run() -> int:
        model = nn.Linear(100, 100, bias=False)
        optimizer = ATC(torch.optim.SGD(model.parameters(), lr=0.0), model)
        model(torch.ones(1, 100)).sum().backward()
        optimizer.step()
        before = shoal.observability.bytes_sent()
        optimizer.step()
        return shoal.observability.bytes_sent() - before

    assert fleet(8).run(run) == [40_000] * 8


SET: dict[str, tuple[Callable[[], Any], Callable[[int], nx.DiGraph]]] = {
    "ring": (lambda: shoal.set_topology(RingGraph(4)), RingGraph),
    "exponential": (lambda: shoal.set_topology(), ExponentialTwoGraph),
    "init": (lambda: shoal.init(RingGraph), RingGraph),
}


@pytest.mark.parametrize("how", SET)
def test_a_topology_set_by_the_script_is_used(fleet: Fleets, how: str) -> None:
    def run() -> list[float]:
        SET[how][0]()
        return steps_of(ATC)

    assert np.allclose(fleet(4).run(run), averages(Static(SET[how][1](4))), atol=1e-12)


def test_a_topology_set_between_steps_is_used_from_the_next_step(fleet: Fleets) -> None:
    def run() -> list[float]:
        def make(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
            made = ATC(optimizer, model)

            def set_the_ring(*_: Any) -> None:
                if made.rounds == 1:
                    shoal.set_topology(RingGraph(4))

            model.register_forward_pre_hook(set_the_ring)
            return made

        return steps_of(make)

    x = OnePeerExponential(4).matrix(0) @ np.arange(4.0)
    W = Static(RingGraph(4)).matrix(0)
    assert np.allclose(np.transpose(fleet(4).run(run)), [x, W @ x, W @ W @ x], atol=1e-12)


BLUEFOGS = [bf.DistributedAdaptThenCombineOptimizer, bf.DistributedAdaptWithCombineOptimizer]


@pytest.mark.parametrize("make", [*BLUEFOGS, bf.DistributedNeighborAllreduceOptimizer])
def test_bluefogs_names_average_on_the_static_topology(fleet: Fleets, make: Any) -> None:
    results = fleet(4).run(lambda: steps_of(make))
    assert np.allclose(results, averages(Static(ExponentialTwoGraph(4))), atol=1e-12)


def test_bluefogs_names_take_a_topology(fleet: Fleets) -> None:
    results = fleet(4).run(lambda: steps_of(BLUEFOGS[0], topology=RingGraph(4)))
    assert np.allclose(results, averages(Static(RingGraph(4))), atol=1e-12)


def test_explicit_weights_and_a_robust_rule_keep_the_default_topologys_neighbours() -> None:
    def by_hand() -> list[float]:
        rank = shoal.rank()
        ahead, behind = (rank + 1) % 4, (rank - 1) % 4
        return steps_of(ATC, self_weight=0.5, src_weights={behind: 0.5}, dst_weights={ahead: 1.0})

    W = (np.eye(4) + np.roll(np.eye(4), 1, axis=0)) / 2
    assert np.allclose(shoal.Fleet(4).run(by_hand), averages(Static(W)), atol=1e-12)
    rule = shoal.robust.TrimmedMean(1)
    by_default = shoal.Fleet(5).run(lambda: steps_of(ATC, robust=rule))
    assert by_default == shoal.Fleet(5).run(lambda: steps_of(ATC, robust=rule, topology=ExponentialTwoGraph(5)))


def test_skipped_rounds_are_made_up_later(fleet: Fleets) -> None:
    """Otherwise every second round of two would never run, and the agents would not mix."""

    def run() -> float:
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.constant_(model.weight, float(shoal.rank()))
        optimizer = ATC(torch.optim.SGD(model.parameters(), lr=0.0), model)
        for step in range(4):
            kinds = shoal.optim.CommunicationType
            optimizer.communication_type = kinds.empty if step % 2 else kinds.neighbor_allreduce
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
            optimizer.step()
        assert optimizer.rounds == 2
        return model.weight.item()

    assert fleet(4).run(run) == [1.5] * 4


def test_a_topology_set_on_some_agents_only_is_a_mismatch(fleet: Fleets) -> None:
    def run() -> None:
        if shoal.rank() == 2:
            shoal.set_topology(RingGraph(4))
        with pytest.raises(shoal.Mismatch, match="averaged on the topology that was set"):
            steps_of(ATC)

    fleet(4).run(run)


def test_any_other_string_than_static_is_refused() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=r"topology='ring': give a graph, a schedule or"):
            steps_of(ATC, topology="ring")

    shoal.Fleet(2).run(run)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_every_algorithm_has_a_default_that_it_accepts(size: int) -> None:
    def run() -> dict[str, Schedule]:
        result = {}
        for name, entry in CATALOG.items():
            algorithm = entry.example()
            result[name] = topology_of(algorithm, 1000, (), static=False)
            shoal.algorithms.check(name, algorithm.needs, result[name], dimension=1000)
        return result

    results = shoal.Fleet(size).run(run)[-1]
    assert results["gradient tracking (ATC)"].describe() == OnePeerExponential(size).describe()
    if size > 2:
        expected = {"CHOCO-SGD": SymmetricExponentialGraph, "censored D-PSGD": ExponentialTwoGraph}
        for name, graph in (expected | {"RelaySGD": ChainGraph}).items():
            same_as_exponential = size == 3 and name == "CHOCO-SGD"
            wanted = ExponentialTwoGraph if same_as_exponential else graph
            assert np.allclose(results[name].matrix(0), Static(wanted(size)).matrix(0)), name


def test_an_algorithm_and_a_compressor_train_without_a_topology(fleet: Fleets) -> None:
    def run() -> list[float]:
        model = nn.Linear(4, 4, bias=False).double()
        nn.init.constant_(model.weight, float(shoal.rank()))
        choco = ATC(torch.optim.SGD(model.parameters(), lr=0.0), model, compression=TopK(0.5))
        for _ in range(60):
            model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
            choco.step()
        return model.weight.flatten().tolist()

    assert np.allclose(fleet(4).run(run), 1.5, atol=0.01)
