"""Batches: passes without replacement, a new batch for each gradient, the same on simulated and real agents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import shoal
from shoal.algorithms import Algorithm, DecentralizedSVRG, Gradient, GradientDescent, Mix, own, run
from shoal.algorithms.runs.gradients import flipped_and_shifted
from shoal.sim import StackedFleet, per_agent
from shoal.topology.families.static import ring

SIZE, SAMPLES, BATCH = 4, 11, 3
PER_EPOCH = SAMPLES // BATCH
LABELS = torch.arange(SIZE * SAMPLES, dtype=torch.float64).view(SIZE, SAMPLES)
"""Each sample is its own number."""
ORIGIN = torch.zeros(2, dtype=torch.float64)


@dataclass(frozen=True)
class LocalGradients(Algorithm):
    """Each agent takes ``calls`` gradients in a step, and ``first`` of them before the first."""

    calls: int = 1
    first: int = 0
    needs: ClassVar[tuple[()]] = ()
    source: ClassVar[str] = "a test"

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, ...]:
        for _ in range(self.first):
            grad(x)
        return ()

    def step(self, x: torch.Tensor, state: Any, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, Any]:
        for _ in range(self.calls):
            grad(x)
        return x, state


def watched(seen: list[torch.Tensor], **options: Any) -> Gradient:
    """A gradient of zero that notes the samples ``[n, BATCH]`` of each call."""
    recorded: list[torch.Tensor] = []

    def record_samples(samples: torch.Tensor, uniform: Callable[[int], torch.Tensor]) -> torch.Tensor:
        recorded[:] = [samples.view(-1, BATCH)]
        return samples

    made = per_agent(lambda x, samples: 0 * x.sum(), LABELS, batch=BATCH, augment=record_samples, **options)

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(recorded[0])
        return torch.zeros_like(x)

    return Gradient(function, draw=made.draw)


def samples_of(algorithm: Algorithm, steps: int, **options: Any) -> torch.Tensor:
    """The samples of all gradients, ``[gradients, n, BATCH]``."""
    seen: list[torch.Tensor] = []
    StackedFleet(ring(SIZE), seed=3).run(algorithm, ORIGIN, watched(seen, **options), steps)
    return torch.stack(seen)


@pytest.mark.parametrize("calls", [1, 2, 5])
def test_an_epoch_takes_each_sample_at_most_once_and_each_agent_its_own(calls: int) -> None:
    result = samples_of(LocalGradients(calls), 6, epochs=True)
    assert len(result) == 6 * calls
    for agent in range(SIZE):
        own = result[:, agent]
        assert set(own.flatten().tolist()) <= set(LABELS[agent].tolist())
        for begin in range(0, len(result) - PER_EPOCH + 1, PER_EPOCH):
            of_pass = own[begin : begin + PER_EPOCH].flatten().tolist()
            assert len(set(of_pass)) == PER_EPOCH * BATCH


def test_orders_differ_between_epochs_agents_and_seeds() -> None:
    result = samples_of(LocalGradients(), 3 * PER_EPOCH, epochs=True) - LABELS[:, :1]
    orders = [result[begin : begin + PER_EPOCH, agent] for begin in range(0, 9, 3) for agent in range(SIZE)]
    assert len({tuple(one.flatten().tolist()) for one in orders}) == len(orders)
    seen: list[torch.Tensor] = []
    StackedFleet(ring(SIZE), seed=4).run(LocalGradients(), ORIGIN, watched(seen, epochs=True), PER_EPOCH)
    assert not torch.equal(torch.stack(seen) - LABELS[:, :1], result[:PER_EPOCH])


def test_all_samples_are_used_over_many_epochs() -> None:
    result = samples_of(LocalGradients(), 40, epochs=True)
    for agent in range(SIZE):
        assert set(result[:, agent].flatten().tolist()) == set(LABELS[agent].tolist())


@pytest.mark.parametrize("epochs", [False, True])
def test_every_gradient_in_a_step_has_a_batch_of_its_own(epochs: bool) -> None:
    one, several = samples_of(LocalGradients(1), 12, epochs=epochs), samples_of(LocalGradients(3), 4, epochs=epochs)
    assert torch.equal(one, several)
    assert len({tuple(batch.flatten().tolist()) for batch in one}) == 12


def test_the_first_step_does_not_repeat_the_batch_of_the_initial_gradient() -> None:
    expected = samples_of(LocalGradients(), 5)
    assert torch.equal(samples_of(LocalGradients(1, first=2), 3), expected)


def test_again_keeps_the_batch() -> None:
    gradient = per_agent(lambda x, samples: (x.sum() * samples).sum(), LABELS, batch=BATCH)

    @dataclass(frozen=True)
    class Twice(LocalGradients):
        def step(self, x: torch.Tensor, state: Any, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, Any]:
            first, same, other = grad(x), grad.again(x), grad(x)
            assert torch.equal(first, same)
            assert not torch.equal(first, other)
            return x, state

    assert StackedFleet(ring(SIZE)).run(Twice(), ORIGIN, gradient, 3).gradients == 6


def test_variance_reduction_compares_both_points_on_one_batch() -> None:
    """At the anchor x the two gradients cancel, and the full gradient remains."""
    gradient = per_agent(lambda x, samples: ((x[0] - samples) ** 2).sum() / len(samples), LABELS, batch=BATCH)
    fleet = StackedFleet(ring(SIZE), seed=1)
    results = fleet.run(DecentralizedSVRG(GradientDescent(0.1), period=5), ORIGIN, gradient, 1).x
    expected = fleet.run(GradientDescent(0.1), ORIGIN, gradient.full, 1).x
    assert (results - expected).abs().max() < 1e-12


@pytest.mark.parametrize("epochs", [False, True])
def test_a_resumed_run_takes_the_batches_of_an_uninterrupted_one(epochs: bool) -> None:
    def gradient() -> Gradient:
        return per_agent(lambda x, samples: ((x - samples.mean()) ** 2).sum(), LABELS, batch=BATCH, epochs=epochs)

    fleet = StackedFleet(ring(SIZE), seed=5)
    full = fleet.run(GradientDescent(0.1), ORIGIN, gradient(), 10)
    half = fleet.run(GradientDescent(0.1), ORIGIN, gradient(), 5)
    assert torch.equal(fleet.run(GradientDescent(0.1), ORIGIN, gradient(), 5, resume=half).x, full.x)


def noisy(samples: torch.Tensor, uniform: Callable[[int], torch.Tensor]) -> torch.Tensor:
    return samples + uniform(1).squeeze(1) * uniform(2)[:, 1]


def difference(x: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    return ((x - samples.mean()) ** 2).sum()


def real() -> torch.Tensor:
    gradient = own(difference, LABELS[shoal.rank()], batch=BATCH, epochs=True, augment=noisy)
    return run(GradientDescent(0.1), ORIGIN, gradient, ring(SIZE), 7, seed=6, lr_lambda=lambda step: 0.9**step).x


def test_real_agents_take_the_same_batches_augmentation_and_schedule() -> None:
    gradient = per_agent(difference, LABELS, batch=BATCH, epochs=True, augment=noisy)
    fleet = StackedFleet(ring(SIZE), seed=6)
    expected = fleet.run(GradientDescent(0.1), ORIGIN, gradient, 7, lr_lambda=lambda step: 0.9**step).x
    assert (torch.stack(shoal.Fleet(SIZE).run(real)) - expected).abs().max() < 1e-12


def test_a_schedule_multiplies_the_learning_rate() -> None:
    rates = [0.1, 0.1, 0.05, 0.3]
    fleet, c = StackedFleet(ring(SIZE)), LABELS[:, :2]
    results = fleet.run(GradientDescent(0.5), ORIGIN, lambda x: x - c, 4, lr_lambda=lambda step: rates[step])
    run_of_parts = None
    for rate in rates:
        run_of_parts = fleet.run(GradientDescent(0.5 * rate), ORIGIN, lambda x: x - c, 1, resume=run_of_parts)
    assert run_of_parts is not None
    assert torch.equal(results.x, run_of_parts.x)


def test_a_schedule_is_refused_for_algorithms_without_a_rate() -> None:
    with pytest.raises(ValueError, match="has no learning rate"):
        StackedFleet(ring(SIZE)).run(LocalGradients(), ORIGIN, lambda x: x, 2, lr_lambda=lambda step: 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": SAMPLES + 1, "epochs": True}, "the smallest part has 11, and a pass"),
        ({"batch": 0}, "batch=0"),
        ({"epochs": True}, "pass batch"),
    ],
)
def test_invalid_batches_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        per_agent(difference, LABELS, **options)


def test_images_are_shifted_by_whole_pixels_and_half_of_them_mirrored() -> None:
    draw = torch.Generator().manual_seed(1)
    images = torch.rand(200, 3, 6, 5, generator=draw)
    chance = torch.rand(200, 3, generator=draw)
    result = flipped_and_shifted(2)(images, lambda k: chance)
    mirrored = 0
    for image, got, (row, column, flip) in zip(images, result, chance.tolist(), strict=True):
        padded = torch.zeros(3, 10, 9)
        padded[:, 2:8, 2:7] = image
        top, left = int(row * 5), int(column * 5)
        crop = padded[:, top : top + 6, left : left + 5]
        assert torch.equal(got, crop.flip(2) if flip < 0.5 else crop)
        mirrored += flip < 0.5
    assert 70 < mirrored < 130
