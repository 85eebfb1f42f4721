"""compression= of an optimizer: which algorithm it is, how far it mixes, and that it learns."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch

import shoal
from shoal.algorithms import Algorithm, ChocoSGD, DeepSqueeze, ExactDiffusion
from shoal.compression import QSGD, Cast, Compressor, Identity, MinMaxUInt8, RandomK, Shrunk, Sign, TopK
from shoal.optim.factory import share_kept
from shoal.topology import OnePeerHypercube, RandomMatchings, Static
from support.optimizers import MODEL, SIZE, batch, flat

Fleets = Callable[..., shoal.Fleet]
NUMBERS = sum(param.numel() for param in MODEL.parameters())


def optimizer_of(model: torch.nn.Module, topology: Any = None, **options: Any) -> shoal.DecentralizedOptimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    return shoal.DecentralizedOptimizer(
        sgd, model, topology=shoal.topology.RingGraph(shoal.size()) if topology is None else topology, **options
    )


def chosen_algorithm(topology: Any, compressor: Compressor) -> Algorithm:
    optimizer = optimizer_of(deepcopy(MODEL), topology, compression=compressor)
    optimizer.close()
    return optimizer.algorithm


def test_the_algorithm_is_sound_for_the_compressor_and_the_topology() -> None:
    def common_algorithm(topology: Any, compressor: Compressor) -> Algorithm:
        one, *others = shoal.Fleet(SIZE).run(chosen_algorithm, topology, compressor)
        assert all(other == one for other in others)
        assert isinstance(one, Algorithm)
        return one

    ring = shoal.topology.RingGraph(SIZE)
    assert common_algorithm(ring, TopK(0.1)) == ChocoSGD(1.0, share_kept(TopK(0.1), NUMBERS) / 2, TopK(0.1))
    assert common_algorithm(ring, RandomK(0.1)) == ChocoSGD(1.0, share_kept(RandomK(0.1), NUMBERS), RandomK(0.1))
    assert common_algorithm(Static(ring), Sign()) == ChocoSGD(1.0, share_kept(Sign(), NUMBERS), Sign())
    changing = common_algorithm(OnePeerHypercube(SIZE), TopK(0.1))
    assert isinstance(changing, DeepSqueeze)
    assert changing.compressor == TopK(0.1)
    assert 0 < changing.gamma < share_kept(TopK(0.1), NUMBERS)
    fine = common_algorithm(RandomMatchings(SIZE), MinMaxUInt8())
    assert isinstance(fine, DeepSqueeze)
    assert fine.gamma == share_kept(MinMaxUInt8(), NUMBERS) >= 0.99
    shrunk = common_algorithm(ring, QSGD(1))  # of which no bound below 1 is known
    assert isinstance(shrunk, ChocoSGD)
    assert shrunk.compressor == Shrunk(QSGD(1))


def test_the_chosen_algorithm_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shoal"):
        shoal.Fleet(SIZE).run(chosen_algorithm, None, TopK(0.1))
    logged = [record.getMessage() for record in caplog.records if "compression" in record.getMessage()]
    assert len(logged) == 1
    assert "ChocoSGD" in logged[0]
    assert "gamma" in logged[0]


def _phi(z: float) -> float:
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize(
    ("compressor", "expected"),
    [
        (Identity(), 1.0),
        (Cast(torch.bfloat16), 0.99),
        (MinMaxUInt8(), 0.99),
        (TopK(0.1), 2 * (1.64485 * _phi(1.64485) + 0.05)),  # the second moment beyond the quantile
        (TopK(0.01), 2 * (2.57583 * _phi(2.57583) + 0.005)),
        (RandomK(0.1), 0.1),
        (Shrunk(RandomK(0.25, scaled=True)), 0.25),  # by 4, after a multiplication by 4
    ],
)
def test_the_fraction_of_a_message_that_is_kept(compressor: Compressor, expected: float) -> None:
    result = share_kept(compressor, 200_000)
    assert 0.95 * expected <= result <= 1.01 * expected  # two digits, downwards
    assert result == share_kept(compressor, 200_000)
    assert math.isclose(result, float(f"{result:.2g}"))


def test_the_fraction_kept_of_more_numbers_than_are_tried() -> None:
    few, many = (share_kept(Shrunk(QSGD(7)), numbers) for numbers in (1 << 20, 1 << 24))
    assert few / 4 * 0.9 <= many <= few / 4 * 1.1  # omega grows with their root


def train(compressor: Compressor | None, algorithm: Algorithm | None, topology: Any, steps: int) -> torch.Tensor:
    model = deepcopy(MODEL)
    if algorithm is None:
        optimizer = optimizer_of(model, topology, compression=compressor)
    else:
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        optimizer = shoal.DecentralizedOptimizer(sgd, model, algorithm, topology=topology)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(shoal.rank(), step % 8)).square().mean().backward()
        optimizer.step()
    optimizer.close()
    return flat(model)


def test_a_step_is_the_algorithms(fleet: Fleets) -> None:
    ring = shoal.topology.RingGraph(SIZE)
    algorithm = ChocoSGD(1.0, share_kept(TopK(0.2), NUMBERS), TopK(0.2))
    short, full = (fleet(SIZE).run(train, *how, ring, 5) for how in ((TopK(0.2), None), (None, algorithm)))
    assert all(torch.equal(one, other) for one, other in zip(short, full, strict=True))


def targets() -> torch.Tensor:
    """Where each agent's own data would lead it, [SIZE, 64]."""
    return torch.randn(SIZE, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def pulled(compressor: Compressor | None, topology: Any) -> torch.Tensor:
    """The parameters of this agent, which minimises its distance from its own target."""
    model, target = torch.nn.Module(), targets()[shoal.rank()]
    model.x = torch.nn.Parameter(torch.zeros(64, dtype=torch.float64))
    sgd = torch.optim.SGD(model.parameters(), lr=0.02)
    optimizer = shoal.DecentralizedOptimizer(sgd, model, topology=topology, compression=compressor)
    for _ in range(250):
        optimizer.zero_grad()
        (model.x - target).square().sum().div(2).backward()
        optimizer.step()
    optimizer.close()
    return model.x.detach().clone()


@cache
def pulled_on_a_ring(compressor: Compressor | None) -> torch.Tensor:
    return torch.stack(shoal.Fleet(SIZE).run(pulled, compressor, shoal.topology.RingGraph(SIZE)))


@pytest.mark.parametrize("compressor", [MinMaxUInt8(), Sign(), TopK(0.1), RandomK(0.1), QSGD(7)], ids=repr)
def test_agents_converge_to_the_joint_optimum(compressor: Compressor) -> None:
    """They end at the optimum of all data, not of each agent's own, nearly as close as without compression."""
    optimum = targets().mean(0)
    alone = (targets() - optimum).norm(dim=1).max()
    plain, compressed = ((pulled_on_a_ring(one) - optimum).norm(dim=1).max() / alone for one in (None, compressor))
    print(plain, compressed)
    assert compressed < plain + 0.2


SLOW = pytest.mark.slow  # each of them learns on a ring, and so do two others where the topology changes


@pytest.mark.slow
@pytest.mark.parametrize(
    "compressor",
    [MinMaxUInt8(), pytest.param(Sign(), marks=SLOW), TopK(0.1), pytest.param(QSGD(7), marks=SLOW)],
    ids=repr,
)
def test_agents_converge_to_the_joint_optimum_on_a_changing_topology(compressor: Compressor) -> None:
    optimum = targets().mean(0)
    alone = (targets() - optimum).norm(dim=1).max()
    results = torch.stack(shoal.Fleet(SIZE).run(pulled, compressor, OnePeerHypercube(SIZE)))
    print((results - optimum).norm(dim=1).max() / alone)
    assert (results - optimum).norm(dim=1).max() < 0.6 * alone


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"compression": "8 bits"}, TypeError, r"compression='8 bits' is no compressor; .* TopK\(0.1\)"),
        (
            {"compression": TopK(0.1), "algorithm": ExactDiffusion(1.0)},
            ValueError,
            "is for adapt, then combine .* averaged gradients",
        ),
        (
            {"compression": TopK(0.1), "algorithm": ChocoSGD(1.0, 0.1, Sign())},
            ValueError,
            "takes its own compressor",
        ),
        ({"compression": RandomK(0.001)}, ValueError, r"of 59?\d* numbers a message keeps .* Take a finer one"),
        ({"compression": TopK(0.1), "mix_state": ("momentum_buffer",)}, ValueError, "mix_state"),
    ],
)
def test_invalid_combinations_are_refused_with_the_reason(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    def build() -> None:
        model = torch.nn.Linear(100, 50)
        algorithm = options.get("algorithm")
        rest = {key: value for key, value in options.items() if key != "algorithm"}
        with pytest.raises(error, match=message):
            if algorithm is None:
                optimizer_of(model, **rest)
            else:
                shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, algorithm, **rest)

    shoal.Fleet(2).run(build)
