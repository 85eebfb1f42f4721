"""Where adapt with combine decays weights, and in which steps BAGUA would communicate: in numpy, to rounding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import shoal
from shoal.algorithms import Algorithm, GradientDescent
from support.points import LR, SIZE, START, Point, Vectors, W, slope

Fleets = Callable[..., shoal.Fleet]
DECAY, STEPS = 0.3, 5
AWC, ITS_EQUATION = GradientDescent(1.0, atc=False), GradientDescent(0.5, atc=False)


def trained(algorithm: Algorithm, kind: str, in_the_loss: bool) -> torch.Tensor:
    """Adapt with combine; in the second place as its equation, whose 0.5 is made up for."""
    model, lr = Point(), LR if algorithm == AWC else 2 * LR
    decay = 0.0 if in_the_loss else DECAY
    inner = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.0, 0.0), eps=1e-300, weight_decay=decay),
    }[kind]()
    ring = shoal.topology.RingGraph(SIZE)
    optimizer = shoal.DecentralizedOptimizer(inner, model, algorithm, topology=ring, mix_state=())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model()
        if in_the_loss:
            loss = loss + DECAY / 2 * model.x().square().sum()
        loss.backward()
        optimizer.step()
    return model.x().detach()


def moves(kind: str, x: Vectors) -> Vectors:
    """Without decay, in units of the rate. AdamW without memory goes by the sign."""
    return slope(x) if kind == "sgd" else np.sign(slope(x))


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_adapt_with_combine_decays_the_value_before_the_local_step(fleet: Fleets, kind: str) -> None:
    """The wrapper steps from the average, which the parameters then hold. The equation steps from x."""
    wrapper = equation = START
    for _ in range(STEPS):
        wrapper = (1 - LR * DECAY) * (W @ wrapper) - LR * moves(kind, wrapper)
        equation = W @ equation - LR * (DECAY * equation + moves(kind, equation))
    assert np.abs(wrapper - equation).max() > 1e-3
    for algorithm, expected in ((AWC, wrapper), (ITS_EQUATION, equation)):
        results = torch.stack(fleet(SIZE).run(trained, algorithm, kind, False)).numpy()
        assert np.abs(results - expected).max() < 1e-12


@pytest.mark.transport("threads")
def test_decay_in_the_loss_is_of_x_in_both() -> None:
    x = START
    for _ in range(STEPS):
        x = W @ x - LR * (slope(x) + DECAY * x)
    for algorithm in (AWC, ITS_EQUATION):
        results = torch.stack(shoal.Fleet(SIZE).run(trained, algorithm, "sgd", True)).numpy()
        assert np.abs(results - x).max() < 1e-12


@pytest.mark.parametrize("atc", [False, True])
def test_the_interval_of_bagua_is_the_attribute_set_after_the_first_step(fleet: Fleets, atc: bool) -> None:
    """BAGUA communicates in steps 1, k + 1, 2 k + 1, ...; num_steps_per_communication alone does in k, 2 k, ..."""
    steps, every = 10, 3

    def run(as_bagua: bool) -> torch.Tensor:
        model = Point()
        sgd = torch.optim.SGD(model.parameters(), lr=LR)
        first = 1 if as_bagua else every
        optimizer = shoal.DecentralizedOptimizer(
            sgd,
            model,
            GradientDescent(1.0, atc=atc),
            topology=shoal.topology.RingGraph(SIZE),
            num_steps_per_communication=first,
        )
        for _ in range(steps):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            optimizer.num_steps_per_communication = every
        return model.x().detach()

    for as_bagua in (True, False):
        x = START
        for number in range(steps):
            communicates = number % every == 0 if as_bagua else (number + 1) % every == 0
            if atc:
                x = x - LR * slope(x)
                x = W @ x if communicates else x
            else:
                x = (W @ x if communicates else x) - LR * slope(x)
        results = torch.stack(fleet(SIZE).run(run, as_bagua)).numpy()
        assert np.abs(results - x).max() < 1e-12
