"""Agents with different numbers of batches: the operations of agents without batches, and the divisor of the mean."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor

import shoal
from shoal.algorithms import Algorithm, GradientTracking
from shoal.topology import OnePeerExponential
from support.optimizers import ATC, AWC, LR, MODEL, PARALLEL, RING, SIZE, batch, flat, gradient

Fleets = Callable[..., shoal.Fleet]
BATCHES = [5, 2, 0, 4]


def train(algorithm: Algorithm, overlap: str | None = None) -> Tensor:
    shoal.set_topology(shoal.topology.RingGraph(SIZE), is_weighted=True)
    model = deepcopy(MODEL)
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer = shoal.DecentralizedOptimizer(sgd, model, algorithm, overlap=overlap)  # type: ignore[arg-type]
    with optimizer.join():
        for step in range(BATCHES[shoal.rank()]):
            optimizer.zero_grad()
            model(batch(shoal.rank(), step)).square().mean().backward()
            optimizer.step()
    assert optimizer.rounds == max(BATCHES)
    return flat(model)


def by_hand(algorithm: Algorithm) -> Tensor:
    model = deepcopy(MODEL)
    x = flat(model).repeat(SIZE, 1)
    for step in range(max(BATCHES)):
        present = [step < count for count in BATCHES]
        rows = [gradient(model, x[k], k, step) if present[k] else torch.zeros_like(x[k]) for k in range(SIZE)]
        g = LR * torch.stack(rows)
        if algorithm == PARALLEL:
            x = x - g.sum(0) / sum(present)
        else:
            x = RING @ (x - g) if algorithm == ATC else RING @ x - g
    return x


@pytest.mark.parametrize("algorithm", [ATC, AWC, PARALLEL], ids=["atc", "awc", "gradients"])
def test_joined_training_equals_its_equation(fleet: Fleets, algorithm: Algorithm) -> None:
    results = torch.stack(fleet(SIZE).run(train, algorithm))
    assert (results - by_hand(algorithm)).abs().max() < 1e-12


@pytest.mark.parametrize("algorithm", [ATC, PARALLEL], ids=["atc", "gradients"])
def test_joined_training_equals_its_equation_during_the_backward_pass(fleet: Fleets, algorithm: Algorithm) -> None:
    results = torch.stack(fleet(SIZE).run(train, algorithm, "backward"))
    assert (results - by_hand(algorithm)).abs().max() < 1e-12


def test_a_schedule_continues(fleet: Fleets) -> None:
    def run() -> tuple[int, Tensor]:
        model = deepcopy(MODEL)
        sgd = torch.optim.SGD(model.parameters(), lr=LR)
        optimizer = shoal.DecentralizedOptimizer(sgd, model, ATC, topology=OnePeerExponential(SIZE))
        with optimizer.join():
            for step in range(BATCHES[shoal.rank()]):
                model(batch(shoal.rank(), step)).square().mean().backward()
                optimizer.step()
        return optimizer.rounds, flat(model)

    assert {rounds for rounds, _ in fleet(SIZE).run(run)} == {max(BATCHES)}


def test_an_asynchronous_agent_forwards_received_mass_until_all_have_ended(fleet: Fleets) -> None:
    """No mass is lost, and the agents agree, though their loops end at different times."""

    def run() -> tuple[Tensor, float]:
        shoal.set_topology(shoal.topology.RingGraph(SIZE, connect_style=1))
        model = torch.nn.Linear(3, 1, bias=False).double()
        with torch.no_grad():
            model.weight.fill_(float(shoal.rank()))
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = shoal.optim.DistributedPushSumOptimizer(sgd, model)
        with optimizer.join():
            for _ in range(20 * shoal.rank()):
                optimizer.step()
                time.sleep(0.002)
        ((_, saved),) = optimizer.state_dict()["shoal"]["way"].items()
        optimizer.close()
        return saved["u"], saved["p"]

    results = fleet(SIZE).run(run)
    assert sum(p for _, p in results) == pytest.approx(SIZE, abs=1e-12)
    assert torch.allclose(sum(u for u, _ in results) / SIZE, torch.full((3,), 1.5, dtype=torch.float64))  # type: ignore[arg-type]


def test_methods_that_cannot_run_without_batches_are_refused(fleet: Fleets) -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        sgd = torch.optim.SGD(model.parameters(), lr=LR)
        optimizer = shoal.DecentralizedOptimizer(sgd, model, ATC)
        other = 1 - shoal.rank()
        optimizer.self_weight, optimizer.src_weights, optimizer.dst_weights = 0.5, {other: 0.5}, [other]
        with pytest.raises(ValueError, match="give the schedule as topology="), optimizer.join():
            optimizer.step()
        optimizer.close()
        optimizer = shoal.DecentralizedOptimizer(sgd, model, AWC)
        with pytest.raises(RuntimeError, match=r"leave the loop after step\(\)"), optimizer.join():
            model(batch(shoal.rank(), 0))
        optimizer.close()
        optimizer = shoal.DecentralizedOptimizer(
            sgd, model, GradientTracking(1.0), topology=shoal.topology.RingGraph(2)
        )
        with pytest.raises(ValueError, match="Deal out equally many batches"), optimizer.join():
            raise AssertionError("the first batch, though the last one could not be joined")

    fleet(2).run(run)
