"""A wrapped optimizer under a learning rate schedule: the papers' iterates, implemented in numpy."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.algorithms import (
    Algorithm,
    AveragedMomentum,
    DecentLaM,
    DecentralizedADMM,
    DecentralizedSVRG,
    ExactDiffusion,
    GradientDescent,
    GradientTracking,
    LocalSteps,
    Momentum,
    PushPull,
    QuasiGlobalMomentum,
)
from support.points import LR, SIZE, START, D, Point, Vectors, W, slope

Fleets = Callable[..., shoal.Fleet]
BETA = 0.9
DROP = [LR] * 6 + [LR / 10] * 6
WARM_UP = [LR * value for value in (0.2, 0.4, 0.6, 0.8, 1.0, 0.7, 0.3, 0.1)]
LAZY = (np.eye(SIZE) + W) / 2
# The papers


def dmsgd(rates: list[float]) -> Vectors:
    x, m = START, np.zeros((SIZE, D))
    for lr in rates:
        m = BETA * m + slope(x)
        x = W @ (x - lr * m)
    return x


def quasi_global(rates: list[float]) -> Vectors:
    x, m = START, np.zeros((SIZE, D))
    for lr in rates:
        new = W @ (x - lr * (BETA * m + slope(x)))
        x, m = new, BETA * m + (1 - BETA) * (x - new) / lr
    return x


def decentlam(rates: list[float]) -> Vectors:
    x, m = START, np.zeros((SIZE, D))
    for lr in rates:
        m = BETA * m + (x - W @ (x - lr * slope(x))) / lr
        x = x - lr * m
    return x


def averaged(rates: list[float]) -> Vectors:
    x, m = START, np.zeros((SIZE, D))
    for lr in rates:
        m = W @ (BETA * m + slope(x))
        x = W @ (x - lr * m)
    return x


def diffusion_with_momentum(rates: list[float]) -> Vectors:
    x, m, before = START, np.zeros((SIZE, D)), START
    for lr in rates:
        m = BETA * m + slope(x)
        psi = x - lr * m
        x, before = LAZY @ (psi + x - before), psi
    return x


def tracking(rates: list[float]) -> Vectors:
    x, g = START, slope(START)
    y = g
    for lr in rates:
        x = W @ (x - lr * y)
        new = slope(x)
        y, g = W @ (y + new - g), new
    return x


PAPERS: list[tuple[Algorithm, Callable[[list[float]], Vectors]]] = [
    (Momentum(GradientDescent(1.0), BETA), dmsgd),
    (QuasiGlobalMomentum(1.0, BETA), quasi_global),
    (DecentLaM(1.0, BETA), decentlam),
    (AveragedMomentum(1.0, BETA), averaged),
    (Momentum(ExactDiffusion(1.0, lazy=True), BETA), diffusion_with_momentum),
    (GradientTracking(1.0), tracking),
]
every_paper = pytest.mark.parametrize(("algorithm", "paper"), [pytest.param(*one, id=str(one[0])) for one in PAPERS])


def step(model: Point, optimizer: shoal.DecentralizedOptimizer) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = model()
        loss.backward()
        return float(loss.detach())

    if optimizer.algorithm.one_gradient:
        closure()
        optimizer.step()
    else:
        optimizer.step(closure)


def wrapped(
    algorithm: Algorithm, model: Point, kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any
) -> shoal.DecentralizedOptimizer:
    inner = kind(model.parameters(), lr=LR)  # type: ignore[call-arg]
    return shoal.DecentralizedOptimizer(inner, model, algorithm, topology=shoal.topology.RingGraph(SIZE), **options)


def trained(algorithm: Algorithm, rates: list[float]) -> torch.Tensor:
    model = Point()
    optimizer = wrapped(algorithm, model)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        step(model, optimizer)
    return model.x().detach()


@pytest.mark.parametrize("rates", [DROP, WARM_UP, [LR] * 8], ids=["drop", "warm-up", "constant"])
@every_paper
def test_sgd_with_an_algorithm_is_the_papers_equation_under_any_schedule(
    fleet: Fleets, algorithm: Algorithm, paper: Callable[[list[float]], Vectors], rates: list[float]
) -> None:
    results = torch.stack(fleet(SIZE).run(trained, algorithm, rates)).numpy()
    assert np.abs(results - paper(rates)).max() < 1e-12


@pytest.mark.parametrize("algorithm", [GradientDescent(0.5), ExactDiffusion(1.0, lazy=True)], ids=str)
@pytest.mark.transport("threads")
def test_algorithms_without_gradient_memory_are_unchanged(algorithm: Algorithm) -> None:
    """Equal to the run whose ``lr`` the test sets itself, and to a constant rate."""
    factor = getattr(algorithm, "lr", 1.0)
    x, before = START, START
    for lr in DROP:
        psi = x - factor * lr * slope(x)
        x, before = (W @ psi if isinstance(algorithm, GradientDescent) else LAZY @ (psi + x - before)), psi
    results = torch.stack(shoal.Fleet(SIZE).run(trained, algorithm, DROP)).numpy()
    assert np.abs(results - x).max() < 1e-12


@pytest.mark.transport("threads")
def test_a_constant_rate_changes_no_bits() -> None:
    """No division and no multiplication, also in 16 bits, where a displacement divided by its rate may overflow."""

    def run() -> torch.Tensor:
        model = Point().to(torch.float16)
        optimizer = wrapped(QuasiGlobalMomentum(1.0, BETA), model)
        optimizer.param_groups[0]["lr"] = 2.0**-14
        with torch.no_grad():
            model.pieces[0].copy_(torch.full((D,), 100.0 * shoal.rank()))
        for _ in range(3):
            step(model, optimizer)
        return model.x().detach()

    assert torch.stack(shoal.Fleet(SIZE).run(run)).isfinite().all()


# Groups


def in_groups(rates: list[list[float]], algorithm: Algorithm) -> torch.Tensor:
    model = Point(pieces=2)
    groups = [{"params": [piece], "lr": 1.0} for piece in model.pieces]
    inner = torch.optim.SGD(groups, lr=1.0)
    optimizer = shoal.DecentralizedOptimizer(inner, model, algorithm, topology=shoal.topology.RingGraph(SIZE))
    for now in rates:
        for group, rate in zip(optimizer.param_groups, now, strict=True):
            group["lr"] = rate
        step(model, optimizer)
    return model.x().detach()


@pytest.mark.transport("threads")
@every_paper
def test_each_group_follows_its_own_schedule(algorithm: Algorithm, paper: Callable[[list[float]], Vectors]) -> None:
    """The paper's equation does not couple the groups' entries, so each group is the paper's equation alone."""
    for second in ([one / 5 for one in DROP], [*WARM_UP, 0.1, 0.2, 0.3, 0.4]):
        rates = [list(one) for one in zip(DROP, second, strict=True)]
        results = torch.stack(shoal.Fleet(SIZE).run(in_groups, rates, algorithm)).numpy()
        assert np.abs(results[:, : D // 2] - paper(DROP)[:, : D // 2]).max() < 1e-12
        assert np.abs(results[:, D // 2 :] - paper(second)[:, D // 2 :]).max() < 1e-12


@pytest.mark.transport("threads")
@pytest.mark.parametrize("algorithm", [Momentum(GradientDescent(1.0), BETA), DecentLaM(1.0, BETA)], ids=str)
def test_a_group_with_rate_zero_is_averaged_and_takes_no_step(algorithm: Algorithm) -> None:
    rates = [[LR, 0.0]] * 5 + [[LR / 10, 0.0]] * 3
    results = torch.stack(shoal.Fleet(SIZE).run(in_groups, rates, algorithm)).numpy()
    still = np.linalg.matrix_power(W, 8) @ START
    assert np.abs(results[:, D // 2 :] - still[:, D // 2 :]).max() < 1e-12


# A rate of zero


@pytest.mark.transport("threads")
@every_paper
def test_a_rate_of_zero_is_a_step_of_the_equation_without_gradient(
    algorithm: Algorithm, paper: Callable[[list[float]], Vectors]
) -> None:
    """At the start, in the middle, and at the end of the schedule: no division by it."""
    for rates in ([0.0, LR, LR, LR], [LR, LR, 0.0, 0.0, LR / 2], [LR, LR, 0.0]):
        results = torch.stack(shoal.Fleet(SIZE).run(trained, algorithm, rates)).numpy()
        assert np.isfinite(results).all() and np.abs(results).max() < 10
    if isinstance(algorithm, GradientTracking | ExactDiffusion) or (
        isinstance(algorithm, Momentum) and isinstance(algorithm.algorithm, ExactDiffusion)
    ):
        return  # what these remember corrects x also where the step is zero
    still = torch.stack(shoal.Fleet(SIZE).run(trained, algorithm, [LR, LR, 0.0])).numpy()
    before = paper([LR, LR])
    assert np.abs(still - W @ before).max() < 1e-12


@pytest.mark.transport("threads")
def test_a_rate_of_zero_at_the_exchange_keeps_earlier_local_steps() -> None:
    def run() -> torch.Tensor:
        model = Point()
        optimizer = wrapped(GradientDescent(0.5), model, num_steps_per_communication=2)
        for rate in (LR, 0.0):
            optimizer.param_groups[0]["lr"] = rate
            step(model, optimizer)
        return model.x().detach()

    results = torch.stack(shoal.Fleet(SIZE).run(run)).numpy()
    assert np.abs(results - W @ (START - 0.5 * LR * slope(START))).max() < 1e-12


class ConstantStepSGD(torch.optim.SGD):
    """Moves whatever its ``lr`` says."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                with torch.no_grad():
                    param -= 0.01 * param.grad


@pytest.mark.transport("threads")
def test_an_optimizer_that_moves_without_a_rate_is_reported() -> None:
    def run() -> None:
        model = Point()
        optimizer = wrapped(Momentum(GradientDescent(1.0), BETA), model, kind=ConstantStepSGD)
        step(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.0
        with pytest.raises(ValueError, match=r"moves parameters whose lr is 0.*a small lr"):
            step(model, optimizer)

    shoal.Fleet(SIZE).run(run)


@pytest.mark.transport("threads")
@pytest.mark.parametrize("rate", [None, "none", torch.tensor(LR)], ids=str)
def test_an_optimizer_without_a_rate_is_tracked_in_displacements(rate: Any) -> None:
    """So is an optimizer whose rate is a tensor, as compiled optimizers use."""

    def run() -> torch.Tensor:
        model = Point()
        optimizer = wrapped(Momentum(GradientDescent(1.0), BETA), model, kind=ConstantStepSGD)
        for _ in range(6):
            if rate is None:
                optimizer.param_groups[0].pop("lr", None)
            else:
                optimizer.param_groups[0]["lr"] = rate
            step(model, optimizer)
        return model.x().detach()

    results = torch.stack(shoal.Fleet(SIZE).run(run)).numpy()
    assert np.abs(results - dmsgd([0.01] * 6)).max() < 1e-12


# Around it


@pytest.mark.transport("threads")
def test_a_torch_scheduler_in_a_resumed_run() -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        def make() -> tuple[Point, shoal.DecentralizedOptimizer, torch.optim.lr_scheduler.StepLR]:
            model = Point()
            optimizer = wrapped(QuasiGlobalMomentum(1.0, BETA), model)
            return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)

        def train_steps(
            made: tuple[Point, shoal.DecentralizedOptimizer, torch.optim.lr_scheduler.StepLR], n: int
        ) -> None:
            for _ in range(n):
                step(made[0], made[1])
                made[2].step()

        full, first, second = make(), make(), make()
        train_steps(full, 8)
        train_steps(first, 5)
        for one, other in zip(first, second, strict=True):
            other.load_state_dict(deepcopy(one.state_dict()))  # type: ignore[attr-defined]
        train_steps(second, 3)
        return full[0].x().detach(), second[0].x().detach()

    results = shoal.Fleet(SIZE).run(run)
    assert all(torch.equal(*pair) for pair in results)
    expected = quasi_global([LR] * 3 + [LR / 10] * 3 + [LR / 100] * 2)
    assert np.abs(torch.stack([one for one, _ in results]).numpy() - expected).max() < 1e-12


@pytest.mark.transport("threads")
def test_local_steps_between_exchanges_use_the_last_ones_rate() -> None:
    rates = [LR, LR, LR / 2, LR / 2]

    def run() -> torch.Tensor:
        model = Point()
        optimizer = wrapped(Momentum(GradientDescent(1.0), BETA), model, num_steps_per_communication=2)
        for rate in rates:
            optimizer.param_groups[0]["lr"] = rate
            step(model, optimizer)
        return model.x().detach()

    x, m = START, np.zeros((SIZE, D))
    for lr in rates[::2]:
        moved = x
        for _ in range(2):
            moved = moved - lr * slope(moved)
        m = BETA * m + (x - moved) / lr
        x = W @ (x - lr * m)
    assert np.abs(torch.stack(shoal.Fleet(SIZE).run(run)).numpy() - x).max() < 1e-12


def test_steps_are_scaled_in_every_place_that_stores_the_step_size() -> None:
    assert QuasiGlobalMomentum(0.5, 0.8).scaled(0.1) == QuasiGlobalMomentum(0.05, 0.8)
    nested = LocalSteps(Momentum(GradientDescent(2.0), 0.8), 3)
    assert nested.scaled(0.5) == LocalSteps(Momentum(GradientDescent(1.0), 0.8), 3)
    assert DecentralizedSVRG(ExactDiffusion(1.0), 5).scaled(2.0) == DecentralizedSVRG(ExactDiffusion(2.0), 5)
    assert PushPull(1.0, atc=False).scaled(3.0) == PushPull(3.0, atc=False)
    assert DecentralizedADMM(1.0, 4.0).scaled(0.5) is None
