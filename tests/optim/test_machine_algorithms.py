"""Algorithms of machines: as if each machine were one agent, whose numbers leave it once."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.algorithms import (
    EXTRA,
    Algorithm,
    ChocoSGD,
    DeepSqueeze,
    DiLoCo,
    ExactDiffusion,
    GossipPGA,
    GradientDescent,
    LocalSteps,
    LowPrecision,
    OfMachines,
    PowerGossip,
    QuasiGlobalMomentum,
    RelaySum,
    SlowMo,
    own,
    run,
)
from shoal.compression import Cast, MinMaxUInt8, TopK
from shoal.sim import StackedFleet
from shoal.topology import ChainGraph, Circulant, RandomMatchings, as_schedule, between_machines
from support.least_squares import loss, problem
from support.namespaces import bytes_sent_by_the_interface, network_namespaces
from support.optimizers import LR, MODEL, batch, flat, gradient
from support.world import World

Fleets = Callable[..., shoal.Fleet]
STEPS, MACHINES, EACH = 6, 3, 2
SIZE = MACHINES * EACH
BETWEEN = shoal.optim.CommunicationType.hierarchical_neighbor_allreduce
RING = Circulant(MACHINES, {0: 1 / 2, 1: 1 / 4, -1: 1 / 4})
ALGORITHMS: list[Algorithm] = [
    ExactDiffusion(1.0, lazy=True),
    EXTRA(1.0),
    QuasiGlobalMomentum(1.0, 0.8),
    GossipPGA(GradientDescent(1.0), 3),
    LocalSteps(QuasiGlobalMomentum(1.0, 0.8), 2),
    SlowMo(GradientDescent(1.0), 2, 0.7),
    DiLoCo(GradientDescent(1.0), 2),
    RelaySum(1.0),
    ChocoSGD(1.0, 0.5, Cast(torch.bfloat16)),
    LowPrecision(1.0, Cast(torch.bfloat16)),
]


def machines_of(algorithm: Algorithm) -> Any:
    return ChainGraph(MACHINES) if isinstance(algorithm, RelaySum) else RING


def train(algorithm: Algorithm, overlap: Any = None, steps: int = STEPS, **options: Any) -> Tensor:
    model = deepcopy(MODEL)
    options = {"topology": machines_of(algorithm), "communication_type": BETWEEN, **options}
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer = shoal.DecentralizedOptimizer(sgd, model, algorithm, overlap=overlap, bucket_bytes=99, **options)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(shoal.rank(), step)).square().mean().backward()
        optimizer.step()
    optimizer.close()
    return flat(model)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_machines_equal_single_agents_with_the_mean_gradient(fleet: Fleets, algorithm: Algorithm) -> None:
    model, steps = deepcopy(MODEL), iter(range(STEPS + 1))
    now = [0]

    @torch.enable_grad()
    def of_machines(x: Tensor) -> Tensor:
        rows = [gradient(model, x[rank // EACH], rank, now[0]) for rank in range(SIZE)]
        return LR * torch.stack(rows).view(MACHINES, EACH, -1).mean(1)

    def draw(_mix: Any) -> None:
        now[0] = max(0, next(steps) - 1)

    grad = shoal.algorithms.Gradient(of_machines, draw=draw)
    start = flat(MODEL).repeat(MACHINES, 1)
    expected = StackedFleet(machines_of(algorithm)).run(algorithm, start, grad, STEPS).x.repeat_interleave(EACH, 0)
    results = torch.stack(fleet(SIZE, agents_per_machine=EACH).run(train, algorithm))
    assert (results - expected).abs().max() < (1e-2 if "Cast" in str(algorithm) else 1e-12)
    assert all(torch.equal(results[rank], results[rank // EACH * EACH]) for rank in range(SIZE))
    assert (results - start[0]).abs().max() > 0.01


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_overlapped_buckets_have_the_same_bits(fleet: Fleets, algorithm: Algorithm) -> None:
    agents = fleet(SIZE, agents_per_machine=EACH)
    results = torch.stack(agents.run(train, algorithm, "backward"))
    if algorithm.separable and "Cast" not in str(algorithm):
        assert (results - torch.stack(agents.run(train, algorithm))).abs().max() < 1e-13
    assert (results - flat(MODEL)).abs().max() > 0.01


@pytest.mark.parametrize("compressor", [MinMaxUInt8(), TopK(0.5)], ids=["8 bits", "top 50%"])
def test_simulated_and_real_agents_send_the_same_messages(fleet: Fleets, compressor: Any) -> None:
    A, b = problem(SIZE)
    algorithm = OfMachines(ChocoSGD(0.05, 0.3, compressor))
    topology = between_machines(RING, EACH)
    start = torch.randn(SIZE, A.shape[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def agent() -> tuple[list[float], int]:
        result = run(algorithm, start[shoal.rank()], own(loss, A[shoal.rank()], b[shoal.rank()]), topology, 30)
        return result.x.tolist(), result.sent

    def gradients(x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(loss))(x, A, b)

    stacked = StackedFleet(topology, agents_per_machine=EACH).run(algorithm, start, gradients, 30)
    results = fleet(SIZE, agents_per_machine=EACH).run(agent)
    assert (torch.tensor([x for x, _ in results], dtype=torch.float64) - stacked.x).abs().max() < 1e-12
    assert sum(sent for _, sent in results) == stacked.sent


def test_compression_between_machines_is_an_algorithm_of_machines() -> None:
    def agent(topology: Any) -> Algorithm:
        sgd = torch.optim.SGD((model := deepcopy(MODEL)).parameters(), lr=LR)
        optimizer = shoal.DecentralizedOptimizer(
            sgd, model, communication_type=BETWEEN, topology=topology, compression=MinMaxUInt8()
        )
        assert optimizer.communication_type is BETWEEN
        with pytest.raises(ValueError, match="communication_type cannot be set any more: OfMachines"):
            optimizer.communication_type = shoal.optim.CommunicationType.neighbor_allreduce
        optimizer.close()
        return optimizer.algorithm

    for topology, expected in ((RING, ChocoSGD), (RandomMatchings(MACHINES), DeepSqueeze)):
        results = shoal.Fleet(SIZE, agents_per_machine=EACH).run(agent, topology)[0]
        assert isinstance(results, OfMachines)
        assert isinstance(results.algorithm, expected)


def test_the_default_is_the_machine_topology() -> None:
    def agent() -> list[float]:
        shoal.bluefog.set_machine_topology(shoal.topology.RingGraph(MACHINES), is_weighted=True)
        return train(EXTRA(1.0), topology=None).tolist()

    fleet = shoal.Fleet(SIZE, agents_per_machine=EACH)
    results = torch.tensor(fleet.run(agent), dtype=torch.float64)
    expected = torch.stack(fleet.run(train, EXTRA(1.0), topology=as_schedule(shoal.topology.RingGraph(MACHINES))))
    assert torch.equal(results, expected)
    with pytest.raises(ValueError, match="no machine topology is set"):
        fleet.run(train, EXTRA(1.0), topology=None)
    alone = torch.stack(shoal.Fleet(3, agents_per_machine=3).run(train, EXTRA(1.0), topology=None))
    assert torch.equal(alone[0], alone[2])  # one machine: its agents' mean


def test_invalid_combinations_are_refused() -> None:
    fleet = shoal.Fleet(SIZE, agents_per_machine=EACH)
    with pytest.raises(ValueError, match=r"PowerGossip.* between machines: .*not separable"):
        fleet.run(train, PowerGossip(1.0))
    with pytest.raises(ValueError, match="the topology is for 6, and there are 3 machines"):
        fleet.run(train, EXTRA(1.0), topology=Circulant(6, {0: 0.5, 1: 0.25, -1: 0.25}))
    with pytest.raises(ValueError, match="OfMachines needs W to be connected, and its agents fall into 3 parts"):
        fleet.run(train, EXTRA(1.0), topology=Circulant(3, {0: 1.0}))
    with pytest.raises(ValueError, match="OfMachines needs W to be between machines"):
        StackedFleet(RING).run(OfMachines(EXTRA(0.1)), torch.zeros(3, 2), lambda x: x, 1)
    with pytest.raises(ValueError, match="cannot be dealt out to 2 agents"):
        lifted = StackedFleet(between_machines(RING, 2), agents_per_machine=2)
        lifted.run(OfMachines(EXTRA(0.1)), torch.zeros(6, 3), lambda x: x, 1)
    with pytest.raises(ValueError, match="LocalSteps"):
        LocalSteps(OfMachines(EXTRA(0.1)), 2)


def sent_in_steps(steps: int) -> int:
    model = torch.nn.Linear(1000, 200)
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer = shoal.DecentralizedOptimizer(
        sgd, model, communication_type=BETWEEN, topology=Circulant(2, {0: 0.5, 1: 0.5}), compression=MinMaxUInt8()
    )
    counted = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 1000)).square().mean().backward()
        optimizer.step()
        counted.append(bytes_sent_by_the_interface())
    return counted[-1] - counted[0]


@pytest.mark.transport("namespaces")
def test_each_entry_leaves_a_machine_once_as_one_byte() -> None:
    numbers = 200 * 1001
    with network_namespaces(2) as hosts, World(4, namespaces=[hosts[0], hosts[0], hosts[1], hosts[1]]) as world:
        result = world.results(sent_in_steps, 11)
    for wire in result:  # the interface's, which both agents of a machine see
        assert 10 * numbers < wire < 1.06 * 10 * numbers, (wire, 10 * numbers)
