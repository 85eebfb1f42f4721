"""Low-rank adapters around frozen weights: only the adapters step and travel."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import shoal
from shoal.algorithms import Algorithm, DeMuon, GradientDescent
from support.optimizers import LR, RING, SIZE, batch

Fleets = Callable[..., shoal.Fleet]
RANK, STEPS = 2, 5


class Adapted(nn.Module):
    """A frozen linear layer plus ``B A``."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(4)
        self.base = nn.Linear(5, 7).requires_grad_(False)
        with torch.no_grad():
            self.base.weight.copy_(torch.randn(7, 5, generator=draw))
        self.A = nn.Parameter(torch.randn(RANK, 5, generator=draw))
        self.B = nn.Parameter(torch.zeros(7, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.base(x) + x @ self.A.T @ self.B.T)


MODEL = Adapted().double()
ADAPTERS = 5 * RANK + 7 * RANK


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """Differs between agents."""
    return torch.as_tensor((model(batch(rank, step)) - rank).square().mean())


def train(algorithm: Algorithm) -> tuple[Tensor, Tensor, list[int]]:
    """The adapters, the weights that are frozen, and the bytes of each step but the first."""
    model, books = deepcopy(MODEL), []
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer = shoal.DecentralizedOptimizer(sgd, model, algorithm, topology=shoal.topology.RingGraph(SIZE))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, shoal.rank(), step).backward()
        optimizer.step()
        books.append(shoal.observability.bytes_sent())
    optimizer.close()
    sent = [after - before for before, after in pairwise(books)]
    return parameters_to_vector([model.A, model.B]).detach(), model.base.weight.clone(), sent


def by_hand() -> Tensor:
    """``x+ = W (x - lr g(x))`` of the adapters, which are the only parameters."""
    model = deepcopy(MODEL)
    x = parameters_to_vector([model.A, model.B]).detach().repeat(SIZE, 1)
    for step in range(STEPS):
        rows = []
        for rank in range(SIZE):
            vector_to_parameters(x[rank].clone(), [model.A, model.B])
            rows.append(parameters_to_vector(torch.autograd.grad(loss(model, rank, step), [model.A, model.B])))
        x = RING @ (x - LR * torch.stack(rows))
    return x


def test_adapters_are_averaged_and_frozen_weights_stay(fleet: Fleets) -> None:
    results = fleet(SIZE).run(train, GradientDescent(1.0))
    assert (torch.stack([x for x, *_ in results]) - by_hand()).abs().max() < 1e-12
    assert all(torch.equal(base, MODEL.base.weight) for _, base, _ in results)


@pytest.mark.parametrize(("algorithm", "messages"), [(GradientDescent(1.0), 1), (DeMuon(0.05), 2)], ids=str)
def test_a_step_sends_the_adapters_only(fleet: Fleets, algorithm: Algorithm, messages: int) -> None:
    for _, base, sent in fleet(SIZE).run(train, algorithm):
        assert sent == [messages * 2 * 8 * ADAPTERS] * (STEPS - 1)  # to two neighbours, in float64
        assert torch.equal(base, MODEL.base.weight)
