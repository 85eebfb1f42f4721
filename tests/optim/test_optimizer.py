"""The optimizers follow their equations, to rounding: against the same steps in plain torch, all agents at once."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.algorithms import Algorithm
from support.optimizers import ATC, AWC, LR, MEAN, MODEL, MOMENTUM, PARALLEL, RING, SIZE, STEPS, batch, by_hand, flat

Fleets = Callable[..., shoal.Fleet]


def train(way: Algorithm, bucket_bytes: int, communication: shoal.optim.CommunicationType) -> Tensor:
    shoal.set_topology(shoal.topology.RingGraph(SIZE), is_weighted=True)
    model = deepcopy(MODEL)
    plain = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    settings = {} if way == PARALLEL else {"communication_type": communication}
    optimizer = shoal.DecentralizedOptimizer(plain, model, way, bucket_bytes=bucket_bytes, **settings)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(shoal.rank(), step)).square().mean().backward()
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("way", [ATC, AWC, PARALLEL], ids=["atc", "awc", "gradients"])
def test_every_strategy_is_its_equation(fleet: Fleets, way: Algorithm, bucket_bytes: int) -> None:
    kind = shoal.optim.CommunicationType.neighbor_allreduce
    results = torch.stack(fleet(SIZE).run(train, way, bucket_bytes, kind))
    W = MEAN if way == PARALLEL else RING
    assert (results - by_hand(way, W)).abs().max() < 1e-12


@pytest.mark.parametrize("way", [ATC, AWC], ids=["atc", "awc"])
def test_communication_with_all_agents_and_with_none(fleet: Fleets, way: Algorithm) -> None:
    for kind, W in (
        (shoal.optim.CommunicationType.allreduce, MEAN),
        (shoal.optim.CommunicationType.empty, torch.eye(SIZE).double()),
    ):
        results = torch.stack(fleet(SIZE).run(train, way, 1 << 20, kind))
        assert (results - by_hand(way, W)).abs().max() < 1e-12


@pytest.mark.parametrize("model", [None, [], [None]])
def test_no_model_is_refused(model: Any) -> None:
    def run() -> None:
        inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, or a list of them"):
            shoal.DecentralizedOptimizer(inner, model)

    shoal.Fleet(2).run(run)
