"""An algorithm that runs in a simulation trains a network, and is the same: against the stacked fleet, step by step."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import networkx as nx
import pytest
import torch
from torch import Tensor

import shoal
from shoal.algorithms import (
    EASGD,
    KGT,
    LED,
    NIDS,
    SGP,
    AccumAdam,
    Algorithm,
    DecentLaM,
    DeMuon,
    DiLoCo,
    DualAveraging,
    ExactDiffusion,
    GASLoC,
    Gradient,
    GradientDescent,
    GradientTracking,
    Momentum,
    MomentumTracking,
    NoLoCo,
    ParallelGradientDescent,
    PowerGossip,
    PushPull,
    QuasiGlobalMomentum,
    SlowMo,
)
from shoal.sim import StackedFleet
from support.optimizers import LR, MODEL, SIZE, batch, flat, gradient

Fleets = Callable[..., shoal.Fleet]
STEPS = 6

ONE_GRADIENT = [
    GradientDescent(0.5),
    GradientDescent(0.5, atc=False),
    ParallelGradientDescent(0.5),
    ExactDiffusion(1.0, lazy=True),
    NIDS(1.0),
    GradientDescent(1.0, prox=torch.nn.Softshrink(0.01)),
    KGT(1.0, 2),
    LED(1.0, 2, beta=0.2),
    MomentumTracking(0.5, 0.8),
    Momentum(GradientDescent(1.0), 0.9, nesterov=True),
    DecentLaM(1.0, 0.8),
    QuasiGlobalMomentum(1.0, 0.8),
    SlowMo(GradientDescent(1.0), 2, 0.7),
    SlowMo(GradientDescent(1.0), 2, 0.7, gossip=True),
    DiLoCo(GradientDescent(1.0), 2),
    NoLoCo(Momentum(GradientDescent(1.0), 0.5), 2),
    GASLoC(Momentum(GradientDescent(1.0), 0.5), 2),
    AccumAdam(0.05, 2, eps=1e-3),
]
CHOOSES_POINTS = [GradientTracking(1.0), GradientTracking(1.0, atc=False), SGP(1.0), PushPull(1.0)]
CHOOSES_POINTS += [DualAveraging(1.0), EASGD(1.0, 2), DiLoCo(GradientTracking(1.0), 2)]


def simulated(algorithm: Algorithm, steps: int = STEPS) -> Tensor:
    """The expected models of the agents, ``[n, d]``: the same object on the rows of one tensor."""
    model, now = deepcopy(MODEL), [0]

    def of_all(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return LR * torch.stack([gradient(model, x[rank], rank, now[0]) for rank in range(SIZE)])

    moved = Gradient(of_all, draw=lambda mix: now.__setitem__(0, mix.round))
    return StackedFleet(shoal.topology.RingGraph(SIZE)).run(algorithm, flat(MODEL), moved, steps).estimate


def train(algorithm: Algorithm, steps: int = STEPS, topology: object = None) -> Tensor:
    model = deepcopy(MODEL)
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer = shoal.DecentralizedOptimizer(sgd, model, algorithm, topology=topology or shoal.topology.RingGraph(SIZE))
    for step in range(steps):
        one_step(model, optimizer, step)
    return flat(model)


def one_step(model: torch.nn.Module, optimizer: shoal.DecentralizedOptimizer, step: int) -> None:
    def loss() -> float:
        optimizer.zero_grad()
        value = model(batch(shoal.rank(), step)).square().mean()
        value.backward()
        return float(value.detach())

    if optimizer.algorithm not in CHOOSES_POINTS:
        loss()
        optimizer.step()
    else:
        assert optimizer.step(loss) is not None


@pytest.mark.parametrize("algorithm", [*ONE_GRADIENT, *CHOOSES_POINTS], ids=str)
def test_training_equals_the_simulation(fleet: Fleets, algorithm: Algorithm) -> None:
    results = torch.stack(fleet(SIZE).run(train, algorithm))
    expected = simulated(algorithm)
    assert (expected - flat(MODEL)).abs().max() > 0.01
    assert (results - expected).abs().max() < 1e-12


def test_a_matrix_equation_gets_the_shapes_of_the_model(fleet: Fleets) -> None:
    shapes = tuple(tuple(param.shape) for param in MODEL.parameters())
    results = torch.stack(fleet(SIZE).run(train, DeMuon(0.1)))
    assert (results - simulated(DeMuon(0.1, shapes=shapes))).abs().max() < 1e-12
    assert (results - simulated(DeMuon(0.1))).abs().max() > 1e-3


@pytest.mark.parametrize("algorithm", [GradientDescent(1.0), GradientDescent(1.0, atc=False)], ids=["atc", "awc"])
def test_common_algorithms_equal_their_equation(fleet: Fleets, algorithm: Algorithm) -> None:
    results = torch.stack(fleet(SIZE).run(train, algorithm))
    assert (results - simulated(algorithm)).abs().max() < 1e-12


def test_the_static_topology_is_the_default(fleet: Fleets) -> None:
    def run() -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        model = deepcopy(MODEL)
        optimizer = shoal.DecentralizedOptimizer(
            torch.optim.SGD(model.parameters(), lr=LR), model, ExactDiffusion(1.0, lazy=True)
        )
        for step in range(STEPS):
            one_step(model, optimizer, step)
        return flat(model)

    results = torch.stack(fleet(SIZE).run(run))
    assert (results - simulated(ExactDiffusion(1.0, lazy=True))).abs().max() < 1e-12


RESUMED = [ExactDiffusion(1.0, lazy=True), GradientTracking(1.0), EASGD(1.0, 2), AccumAdam(0.05, 2)]
RESUMED += [SlowMo(GradientDescent(1.0), 2, 0.7), DiLoCo(GradientDescent(1.0), 2), NoLoCo(GradientDescent(1.0), 2)]
RESUMED += [GASLoC(GradientDescent(1.0), 2)]


@pytest.mark.parametrize("algorithm", RESUMED, ids=str)  # the outer ones stop in the middle of a round
def test_resuming_is_bit_for_bit(fleet: Fleets, algorithm: Algorithm) -> None:
    def run() -> bool:
        def make() -> tuple[torch.nn.Module, shoal.DecentralizedOptimizer]:
            model = deepcopy(MODEL)
            adam = torch.optim.Adam(model.parameters(), lr=0.01)
            return model, shoal.DecentralizedOptimizer(adam, model, algorithm, topology=shoal.topology.RingGraph(SIZE))

        full, first, second = make(), make(), make()
        for step in range(6):
            one_step(*full, step)
        for step in range(3):
            one_step(*first, step)
        saved = deepcopy((first[0].state_dict(), first[1].state_dict()))
        second[0].load_state_dict(saved[0])
        second[1].load_state_dict(saved[1])
        for step in range(3, 6):
            one_step(*second, step)
        assert second[1].rounds == 6
        return torch.equal(flat(second[0]), flat(full[0]))

    assert all(fleet(SIZE).run(run))


def test_local_steps_between_two_exchanges_are_summed(fleet: Fleets) -> None:
    def run() -> Tensor:
        model = deepcopy(MODEL)
        optimizer = shoal.DecentralizedOptimizer(
            torch.optim.SGD(model.parameters(), lr=LR),
            model,
            ExactDiffusion(1.0, lazy=True),
            topology=shoal.topology.RingGraph(SIZE),
            num_steps_per_communication=2,
        )
        for step in range(4):
            one_step(model, optimizer, step)
        assert optimizer.rounds == 2
        return flat(model)

    W = torch.from_numpy(shoal.topology.mixing_matrix(shoal.topology.RingGraph(SIZE)))
    W = (W + torch.eye(SIZE)) / 2
    model = deepcopy(MODEL)
    x = flat(model).repeat(SIZE, 1)
    before = x
    for step in (0, 2):
        psi = x
        for local in (step, step + 1):
            psi = psi - LR * torch.stack([gradient(model, psi[rank], rank, local) for rank in range(SIZE)])
        x, before = W @ (psi + x - before), psi
    assert (torch.stack(fleet(SIZE).run(run)) - x).abs().max() < 1e-12


def test_invalid_combinations_are_refused_with_the_remedy(fleet: Fleets) -> None:
    def run() -> None:
        def make(algorithm: object, **options: object) -> shoal.DecentralizedOptimizer:
            model = deepcopy(MODEL)
            sgd = torch.optim.SGD(model.parameters(), lr=LR)
            return shoal.DecentralizedOptimizer(sgd, model, algorithm, **options)  # type: ignore[arg-type]

        with pytest.raises(TypeError, match=r"shoal\.algorithms is wanted, as GradientDescent.*, not 'atc'"):
            make("atc")
        with pytest.raises(ValueError, match=r"give step\(\) a closure"):
            make(GradientTracking(1.0), topology=shoal.topology.RingGraph(2)).step()
        averaged = make(DualAveraging(1.0), topology=shoal.topology.RingGraph(2))
        averaged.step()  # which begins where the model is
        with pytest.raises(ValueError, match="not where the model is"):
            averaged.step()
        averaged.close()
        one_way = nx.DiGraph([(0, 1)])
        with pytest.raises(ValueError, match="doubly stochastic"):
            make(GradientTracking(1.0), topology=one_way).step(lambda: 0.0)
        for algorithm in (ExactDiffusion(1.0, lazy=True), ParallelGradientDescent(1.0)):
            with pytest.raises(ValueError, match="self_weight would not count"):
                make(algorithm, self_weight=0.5)
            one = make(algorithm)
            with pytest.raises(ValueError, match="communication_type would not count"):
                one.communication_type = shoal.optim.CommunicationType.empty
            one.close()
        with pytest.raises(ValueError, match="exchanges in step, not through windows; leave bucket_exchange out"):
            from shoal.optim.exchanges.window_exchange import PutExchange

            make(ExactDiffusion(1.0, lazy=True), bucket_exchange=PutExchange)
        with pytest.raises(ValueError, match="the topology is for 3, and there are 2 agents"):
            make(GradientDescent(1.0), topology=shoal.topology.RingGraph(3))
        mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())
        sgd = torch.optim.SGD(mixed.parameters(), lr=LR)
        with pytest.raises(ValueError, match="these have 2 dtypes"):
            shoal.DecentralizedOptimizer(sgd, mixed, PowerGossip(1.0), topology=shoal.topology.RingGraph(2)).step()

    fleet(2).run(run)
