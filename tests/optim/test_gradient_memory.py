"""Where averaged gradients lie while others read them, and where their mean comes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import shoal
from shoal.runtime.agent import current
from support.reference import reduced, same_bits
from support.samples import sample

Fleets = Callable[..., shoal.Fleet]
ROWS, COLUMNS = 2048, 1024
"""Of one parameter: 8 MiB, a size that memory for others comes in, of which each of four agents owns a share."""
NBYTES = 4 * ROWS * COLUMNS


def one_layer() -> torch.nn.Linear:
    with torch.no_grad():
        layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        layer.weight.zero_()
    return layer


@pytest.mark.links("an engine copies what it carries")
def test_gradients_are_read_in_place_from_the_fused_buffer(fleet: Fleets) -> None:
    """No copy is made for other agents: they can read parameters, gradients, and the sum of a share."""

    def run() -> int:
        model = one_layer()
        wrapped = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = shoal.bluefog.DistributedGradientAllreduceOptimizer(wrapped, model)
        for _ in range(3):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        shoal.barrier()
        return current("test").engine.arena.nbytes

    assert max(fleet(4).run(run)) < 3 * NBYTES


@pytest.mark.links("an engine sums in an order of its own")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("overlap", [None, "backward"])
def test_rounds_do_not_see_each_others_gradients(fleet: Fleets, size: int, overlap: str | None) -> None:
    """Each agent runs at full speed. The values it reads, and its own, do not change until it has read them."""
    rounds = 6

    def run() -> list[torch.Tensor]:
        model = torch.nn.Linear(400, 300, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        wrapped = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = shoal.bluefog.DistributedGradientAllreduceOptimizer(wrapped, model, overlap=overlap)
        results = []
        for number in range(rounds):
            gradient = sample(shoal.rank(), (300, 400), seed=number)
            optimizer.zero_grad()
            (model.weight * gradient).sum().backward()
            optimizer.step()
            assert model.weight.grad is not None
            results.append(model.weight.grad.clone())
        return results

    for result in fleet(size).run(run):
        for number, mean in enumerate(result):
            given = [sample(rank, (300, 400), seed=number) for rank in range(size)]
            assert same_bits(mean, reduced("average", given)), number
