"""Neural networks in a stacked fleet: their gradients are those of separate modules, and a fleet of threads agrees."""

from __future__ import annotations

import copy
import functools
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.algorithms import GradientDescent, own, run
from shoal.sim import StackedFleet, StackedModel, loss_of, per_agent
from shoal.topology.families.static import ring

SIZE, BATCH = 5, 6


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 6, 2, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(),
        nn.Linear(54, 4),
    )  # fmt: skip


class Tied(nn.Module):
    """The same weight twice, a scalar parameter, a frozen parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(8, 4)
        self.last.bias.requires_grad_(False)
        self.register_buffer("shift", torch.linspace(0, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.scale * torch.tanh(self.second(self.first(x) + self.shift)))


every_module = pytest.mark.parametrize("make", [mlp, convolutional, Tied])


def made(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return make().to(dtype)


def sample(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SIZE, BATCH, 8, dtype=dtype, generator=generator)
    return inputs, torch.randint(0, 4, (SIZE, BATCH), generator=generator)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@every_module
def test_gradients_are_those_of_separate_modules(
    make: Callable[[], nn.Module], dtype: torch.dtype, tolerance: float
) -> None:
    module, (inputs, targets) = made(make, dtype), sample(dtype)
    model = StackedModel(module, SIZE, seed=None)
    x = model.start + torch.randn(model.start.shape, dtype=dtype, generator=torch.Generator().manual_seed(2)) / 10
    gradient = per_agent(loss_of(module, F.cross_entropy), inputs, targets)(x)
    for rank in range(SIZE):
        alone = model.module(x[rank])
        F.cross_entropy(alone(inputs[rank]), targets[rank]).backward()
        expected = torch.cat(
            [parameter.grad.flatten() for parameter in alone.parameters() if parameter.grad is not None]
        )
        assert (gradient[rank] - expected).abs().max() < tolerance


@every_module
def test_outputs_are_those_of_separate_modules(make: Callable[[], nn.Module]) -> None:
    module, (inputs, _) = made(make), sample()
    model = StackedModel(module, SIZE)
    x = model.start + torch.arange(SIZE).unsqueeze(1) / 100
    result = model.outputs(x, inputs)
    for rank in range(SIZE):
        assert (result[rank] - model.module(x[rank])(inputs[rank])).abs().max() < 1e-12


@every_module
def test_without_a_seed_all_start_with_the_modules_parameters(make: Callable[[], nn.Module]) -> None:
    module = made(make)
    model = StackedModel(module, SIZE)
    assert model.start.shape == (SIZE, model.dimension)
    assert (model.start == model.start[0]).all()
    same = dict(model.module(model.start[0]).named_parameters())
    assert all(torch.equal(one, same[name]) for name, one in module.named_parameters())


def test_only_trained_parameters_are_in_a_row() -> None:
    # The tied weight once, the bias of the second layer, the scale, and the last layer's weight without its bias.
    assert StackedModel(Tied(), 2).dimension == 64 + 8 + 1 + 32


def test_with_a_seed_each_agent_starts_with_its_own_parameters() -> None:
    before = torch.get_rng_state()
    module = made(mlp)
    first, again, other = (StackedModel(module, SIZE, seed=seed).start for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert len({tuple(row.tolist()) for row in torch.cat([first, other])}) == 2 * SIZE
    # As a linear layer of 8 inputs draws: uniform within 1 / sqrt(8).
    assert 0.3 < first[:, :128].abs().max() <= 8**-0.5
    torch.manual_seed(0)
    mlp()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    StackedModel(mlp(), SIZE, seed=1)
    assert torch.equal(torch.get_rng_state(), after)
    torch.set_rng_state(before)


def test_a_layer_without_a_reset_method_is_named() -> None:
    class LayerWithoutReset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3))

    with pytest.raises(ValueError, match=r"layer '0' \(LayerWithoutReset\) has parameters and no reset_parameters"):
        StackedModel(nn.Sequential(LayerWithoutReset()), 2, seed=0)
    assert StackedModel(nn.Sequential(LayerWithoutReset()), 2).dimension == 3


def test_the_users_module_is_not_changed() -> None:
    module, (inputs, targets) = made(mlp), sample()
    before = copy.deepcopy(module.state_dict())
    model = StackedModel(module, SIZE, seed=1)
    gradient = per_agent(loss_of(module, F.cross_entropy), inputs, targets)
    StackedFleet(ring(SIZE)).run(GradientDescent(0.1), model.start, gradient, 3)
    model.module(model.start[1])
    assert all(torch.equal(one, before[name]) for name, one in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(8), nn.InstanceNorm1d(8, track_running_stats=True)])
def test_running_statistics_are_refused_with_the_remedy(layer: nn.Module) -> None:
    module = nn.Sequential(layer, nn.Linear(8, 4))
    with pytest.raises(ValueError, match=r"layer '0' \(\w+\) keeps running statistics .*use torch.nn.GroupNorm"):
        loss_of(module, F.cross_entropy)


def test_statistics_that_do_not_change_are_constants() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    module(torch.randn(30, 8, dtype=torch.float64))
    module[1].eval()
    inputs, targets = sample()
    gradient = per_agent(loss_of(module, F.cross_entropy), inputs, targets)(StackedModel(module, SIZE).start)
    F.cross_entropy(module(inputs[2]), targets[2]).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])
    assert (gradient[2] - expected).abs().max() < 1e-12


def test_active_dropout_is_refused() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 4))
    with pytest.raises(ValueError, match=r"layer '0' \(Dropout\) draws random numbers"):
        loss_of(module, F.cross_entropy)
    loss_of(module.eval(), F.cross_entropy)


class Counts(nn.Module):
    """A layer that nobody knows, which counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.linear(x)


def test_a_buffer_that_changes_is_detected() -> None:
    inputs, targets = sample(torch.float32)
    module = Counts()
    gradient = per_agent(loss_of(module, F.cross_entropy), inputs, targets)
    with pytest.raises(ValueError, match=r"changes its buffers \['calls'\]"):
        gradient(StackedModel(module, SIZE).start)


def test_a_layer_without_a_shape_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some versions of torch call them new
        module = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ValueError, match="does not know its shape yet"):
        StackedModel(module, 2)


def test_parameters_of_several_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.float32 on cpu and torch\.float64 on cpu"):
        StackedModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), 2)
    with pytest.raises(ValueError, match="none that need a gradient"):
        StackedModel(nn.ReLU(), 2)


def test_invalid_network_shapes_are_refused() -> None:
    model = StackedModel(mlp(), 2)
    with pytest.raises(ValueError, match=rf"one network has \[{model.dimension}\]"):
        model.module(model.start)
    with pytest.raises(ValueError, match="size=0"):
        StackedModel(mlp(), 0)


def test_threads_may_share_a_loss() -> None:
    module, (inputs, targets) = made(mlp), sample()
    loss, start = loss_of(module, F.cross_entropy), StackedModel(module, SIZE, seed=5).start
    expected = [loss(start[rank], inputs[rank], targets[rank]) for rank in range(SIZE)]
    wrong: list[int] = []

    def check(rank: int) -> None:
        for _ in range(200):
            if not torch.equal(loss(start[rank], inputs[rank], targets[rank]), expected[rank]):
                wrong.append(rank)

    threads = [threading.Thread(target=check, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


AGENTS, LR, STEPS = 8, 0.5, 100


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Scikit-learn's digits in shards by class: float64 [8, samples, 64] and int64 [8, samples]."""
    from sklearn.datasets import load_digits

    images, classes = load_digits(return_X_y=True)
    inputs, targets = torch.from_numpy(images / 16), torch.from_numpy(classes)
    order = targets.argsort(stable=True)[: len(targets) // AGENTS * AGENTS]
    return inputs[order].view(AGENTS, -1, 64), targets[order].view(AGENTS, -1)


def train_agent(module: nn.Module) -> list[float]:
    """One agent of a real fleet."""
    inputs, targets = digits()
    gradient = own(loss_of(module, F.cross_entropy), inputs[shoal.rank()], targets[shoal.rank()], batch=32)
    start = StackedModel(module, 1).start[0]
    return run(GradientDescent(LR), start, gradient, ring(AGENTS), STEPS, seed=2).x.tolist()


def test_digits_in_shards_by_class_train_stacked_as_in_threads() -> None:
    inputs, targets = digits()
    # No agent has seen more than three of the ten digits.
    assert max(len(set(row.tolist())) for row in targets) <= 3
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()
    model = StackedModel(module, AGENTS)

    def count_correct(x: torch.Tensor) -> dict[str, float]:
        guessed = model.module(x.mean(0))(inputs.view(-1, 64)).argmax(1)
        return {"right": (guessed == targets.view(-1)).double().mean().item()}

    gradient = per_agent(loss_of(module, F.cross_entropy), inputs, targets, batch=32)
    fleet = StackedFleet(ring(AGENTS), seed=2)
    results = fleet.run(GradientDescent(LR), model.start, gradient, STEPS, measure=count_correct, every=STEPS)
    before, after = results.column("right").tolist()
    assert before < 0.2
    assert after > 0.8
    alone = torch.tensor(shoal.Fleet(AGENTS, timeout=30.0).run(train_agent, module), dtype=torch.float64)
    assert (alone - results.x).abs().max() < 1e-12
