"""Training on a device: parameters stay there, and are what they are on the CPU, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import shoal
from shoal.algorithms import ExactDiffusion
from shoal.compression import TopK
from support.slow_device import Slow, SlowDevice, in_use, to_device

Fleets = Callable[..., shoal.Fleet]


@pytest.fixture
def device(transport: str) -> Iterator[SlowDevice]:
    with in_use() as one:
        yield one


def trained(make: Callable[..., Any], where: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """The parameters after some steps, on the CPU."""
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    chance = torch.Generator().manual_seed(shoal.rank())
    shapes = ((64, 96), (96,), (200, 64))
    model = torch.nn.ParameterList(
        [torch.nn.Parameter(where(torch.randn(shape, generator=chance))) for shape in shapes]
    )
    params = list(model)
    inner = torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False)
    optimizer = make(inner, model)
    for step in range(4):
        for number, param in enumerate(params):
            chance = torch.Generator().manual_seed(100 * shoal.rank() + 10 * step + number)
            param.grad = where(torch.randn(param.shape, generator=chance))
        optimizer.step()
    assert all(isinstance(param.data, Slow) == (where is to_device) for param in params)
    optimizer.close()
    return [param.detach().cpu() for param in params]


WAYS = {
    "adapt then combine": shoal.DecentralizedOptimizer,
    "adapt with combine": partial(
        shoal.DecentralizedOptimizer, algorithm=shoal.algorithms.GradientDescent(1.0, atc=False)
    ),
    "exact diffusion": partial(shoal.DecentralizedOptimizer, algorithm=ExactDiffusion(1.0)),
    "all-reduce": shoal.bluefog.DistributedAllreduceOptimizer,
    "choco": partial(shoal.DecentralizedOptimizer, compression=TopK(0.1)),
}


@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
def test_parameters_are_those_of_training_on_the_cpu(
    fleet: Fleets, device: SlowDevice, make: Callable[..., Any]
) -> None:
    def run() -> list[bool]:
        on_cpu, on_device = trained(make, torch.clone), trained(make, to_device)
        return [torch.equal(one, other) for one, other in zip(on_cpu, on_device, strict=True)]

    assert all(all(one) for one in fleet(3).run(run))
