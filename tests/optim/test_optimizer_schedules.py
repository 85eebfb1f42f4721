"""``topology=``: every exchange is a round of a schedule, and nobody has to set anything."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor

import shoal
from shoal.algorithms import Algorithm
from shoal.topology import OnePeerExponential
from support.optimizers import ATC, AWC, LR, MODEL, SIZE, batch, flat, gradient

Fleets = Callable[..., shoal.Fleet]
STEPS = 5


def take_steps(model: torch.nn.Module, optimizer: shoal.DecentralizedOptimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(shoal.rank(), step)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("algorithm", [ATC, AWC], ids=["atc", "awc"])
def test_parameters_equal_the_equation_in_each_round(fleet: Fleets, algorithm: Algorithm) -> None:
    def run() -> Tensor:
        model = deepcopy(MODEL)
        sgd = torch.optim.SGD(model.parameters(), lr=LR)
        optimizer = shoal.DecentralizedOptimizer(sgd, model, algorithm, topology=OnePeerExponential(SIZE))
        take_steps(model, optimizer, range(STEPS))
        return flat(model)

    schedule, model = OnePeerExponential(SIZE), deepcopy(MODEL)
    x = flat(model).repeat(SIZE, 1)
    for step in range(STEPS):
        W = torch.zeros(SIZE, SIZE, dtype=torch.float64)
        for rank in range(SIZE):
            mixing = schedule.mixing(step, rank)
            W[rank, rank] = mixing.self_weight
            for source, weight in mixing.sources.items():
                W[rank, source] = weight
        g = LR * torch.stack([gradient(model, x[rank], rank, step) for rank in range(SIZE)])
        x = W @ (x - g) if algorithm == ATC else W @ x - g
    assert (torch.stack(fleet(SIZE).run(run)) - x).abs().max() < 1e-12


def test_a_resumed_run_continues_in_its_round(fleet: Fleets) -> None:
    def run() -> bool:
        def make() -> tuple[torch.nn.Module, shoal.DecentralizedOptimizer]:
            model = deepcopy(MODEL)
            sgd = torch.optim.SGD(model.parameters(), lr=LR)
            schedule = OnePeerExponential(SIZE)
            return model, shoal.DecentralizedOptimizer(sgd, model, topology=schedule)

        full, first, second = make(), make(), make()
        take_steps(*full, range(5))
        take_steps(*first, range(3))
        saved = deepcopy((first[0].state_dict(), first[1].state_dict()))
        second[0].load_state_dict(saved[0])
        second[1].load_state_dict(saved[1])
        take_steps(*second, range(3, 5))
        return torch.equal(flat(second[0]), flat(full[0]))

    assert all(fleet(SIZE).run(run))


def test_rounds_of_machines(fleet: Fleets) -> None:
    """Of two machines with two agents each, which swap halves."""

    def run() -> Tensor:
        model = torch.nn.Linear(1, 1, bias=False).double()
        with torch.no_grad():
            model.weight.fill_(float(2 ** shoal.rank()))
        optimizer = shoal.DecentralizedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0),
            model,
            communication_type=shoal.optim.CommunicationType.hierarchical_neighbor_allreduce,
            topology=OnePeerExponential(2),
        )
        optimizer.step()
        return flat(model)

    results = torch.stack(fleet(4, agents_per_machine=2).run(run))
    assert torch.equal(results, torch.full((4, 1), (1.5 + 6) / 2, dtype=torch.float64))


def test_explicit_weights_beside_a_schedule_are_refused(fleet: Fleets) -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        sgd = torch.optim.SGD(model.parameters(), lr=LR)
        optimizer = shoal.DecentralizedOptimizer(sgd, model, topology=OnePeerExponential(2))
        with pytest.raises(ValueError, match="come from its topology="):
            optimizer.self_weight = 0.5
        optimizer.communication_type = shoal.optim.CommunicationType.allreduce
        optimizer.close()
        with pytest.raises(ValueError, match=r"call shoal\.set_topology"):
            shoal.optim.DistributedWinPutOptimizer(sgd, model, topology=OnePeerExponential(2))
        with pytest.raises(ValueError, match="averaged over all agents, whatever the topology"):
            shoal.bluefog.DistributedGradientAllreduceOptimizer(sgd, model, topology=OnePeerExponential(2))

    fleet(2).run(run)


def test_a_round_that_could_not_start_is_not_counted(fleet: Fleets) -> None:
    def run() -> tuple[int, int]:
        model = deepcopy(MODEL)
        sgd = torch.optim.SGD(model.parameters(), lr=LR)
        optimizer = shoal.DecentralizedOptimizer(sgd, model, AWC)
        other = 1 - shoal.rank()
        optimizer.self_weight, optimizer.src_weights, optimizer.dst_weights = 0.5, {2: 0.5}, [other]
        with pytest.raises(ValueError, match="2"):
            model(batch(shoal.rank(), 0))
        failed = optimizer.rounds
        optimizer.src_weights = {other: 0.5}
        take_steps(model, optimizer, range(1))
        return failed, optimizer.rounds

    assert fleet(2).run(run) == [(0, 1), (0, 1)]
