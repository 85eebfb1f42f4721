"""Algorithms that step a model in parts: the same bits as in one, earlier; and what else parts allow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.algorithms import (
    CATALOG,
    EXTRA,
    NIDS,
    AccumAdam,
    Algorithm,
    AveragedMomentum,
    CensoredGradientDescent,
    ChocoSGD,
    DecentLaM,
    DeepSqueeze,
    DiLoCo,
    Entry,
    ExactDiffusion,
    GASLoC,
    GossipPGA,
    GradientDescent,
    LocalSteps,
    LowPrecision,
    Mix,
    Momentum,
    NoLoCo,
    PowerGossip,
    QuasiGlobalMomentum,
    RelaySum,
    SlowMo,
)
from shoal.compression import Cast, MinMaxUInt8, RandomK, TopK
from shoal.sim import StackedFleet
from support.algorithm_cases import case_of
from support.optimizers import LR, MODEL, RING, SIZE, batch, flat, gradient

Fleets = Callable[..., shoal.Fleet]
STEPS = 6

SEPARABLE = [
    ExactDiffusion(1.0, lazy=True),
    EXTRA(1.0),
    NIDS(1.0),
    Momentum(GradientDescent(1.0), 0.9, nesterov=True),
    DecentLaM(1.0, 0.8),
    QuasiGlobalMomentum(1.0, 0.8),
    AveragedMomentum(1.0, 0.8),
    SlowMo(GradientDescent(1.0), 2, 0.7, gossip=True),
    DiLoCo(GradientDescent(1.0), 2),
    NoLoCo(Momentum(GradientDescent(1.0), 0.5), 2),
    GASLoC(Momentum(GradientDescent(1.0), 0.5), 2),
    GossipPGA(GradientDescent(1.0), 3),
    LocalSteps(QuasiGlobalMomentum(1.0, 0.8), 2),
    AccumAdam(0.05, 2, eps=1e-3),
    RelaySum(1.0),
    ChocoSGD(1.0, 0.5, Cast(torch.bfloat16)),
    DeepSqueeze(1.0, 0.5, Cast(torch.bfloat16)),
    LowPrecision(1.0, Cast(torch.bfloat16)),
]


def topology_of(algorithm: Algorithm) -> Any:
    return (
        shoal.topology.ChainGraph(SIZE) if isinstance(algorithm, RelaySum) else shoal.topology.RingGraph(shoal.size())
    )


def make(
    model: nn.Module, algorithm: Algorithm, overlap: str | None, bucket_bytes: int = 1
) -> shoal.DecentralizedOptimizer:
    return shoal.DecentralizedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5),
        model,
        algorithm,
        topology=topology_of(algorithm),
        overlap=overlap,  # type: ignore[arg-type]
        bucket_bytes=bucket_bytes,
    )


def train_steps(model: nn.Module, optimizer: shoal.DecentralizedOptimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(shoal.rank(), step)).square().mean().backward()
        optimizer.step()


def train(algorithm: Algorithm, overlap: str | None, model: nn.Module = MODEL) -> Tensor:
    model = deepcopy(model)
    optimizer = make(model, algorithm, overlap)
    train_steps(model, optimizer, range(STEPS))
    optimizer.close()
    assert optimizer.rounds == STEPS
    return flat(model)


@pytest.mark.parametrize("algorithm", SEPARABLE, ids=str)
def test_buckets_give_the_same_bits_as_one_vector(fleet: Fleets, algorithm: Algorithm) -> None:
    agents = fleet(SIZE)
    parts = torch.stack(agents.run(train, algorithm, "backward"))
    assert torch.equal(parts, torch.stack(agents.run(train, algorithm, None)))
    assert (parts - flat(MODEL)).abs().max() > 0.01


def in_pieces(entry: Entry, pieces: list[slice]) -> Tensor:
    """The end points of agents whose losses separate by element, computed for each piece alone."""
    algorithm = entry.example()
    if isinstance(algorithm, CensoredGradientDescent):
        algorithm = CensoredGradientDescent(0.1, 0.5, 0.9)  # so that some agents are silent, and with pieces others
    if any(field.name == "compressor" for field in fields(algorithm)):  # type: ignore[arg-type]
        algorithm = replace(algorithm, compressor=Cast(torch.bfloat16))  # type: ignore[type-var]
    curves = torch.linspace(0.5, 2.0, 12, dtype=torch.float64)
    goals = torch.randn(SIZE, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    results = []
    for piece in pieces:
        fleet = StackedFleet(case_of(entry).topology(SIZE), seed=3)
        start = torch.zeros(len(goals[0, piece]), dtype=torch.float64)

        def gradient_of(x: Tensor, piece: slice = piece) -> Tensor:
            return curves[piece] * (x - goals[:, piece])

        run = fleet.run(algorithm, start, gradient_of, 20, unchecked=[need.name for need in algorithm.needs])
        assert run.estimate is run.x or not algorithm.separable
        results.append(run.estimate)
    return torch.cat(results, dim=1)


@pytest.mark.parametrize("entry", [pytest.param(one, id=name) for name, one in CATALOG.items()])
def test_only_algorithms_that_declare_it_are_separable(entry: Entry) -> None:
    """A separable algorithm without the declaration gets its gradients in one vector, apart from the model."""
    full, pieces = in_pieces(entry, [slice(0, 12)]), in_pieces(entry, [slice(0, 5), slice(5, 12)])
    algorithm = entry.example()
    if algorithm.separable:
        assert algorithm.one_gradient
        assert torch.equal(full, pieces)
    elif algorithm.one_gradient and type(algorithm).estimate is Algorithm.estimate:
        assert not torch.equal(full, pieces)


def test_each_bucket_is_a_message_of_its_own(fleet: Fleets) -> None:
    """CHOCO-SGD with a top-k for each parameter equals the optimizer with one top-k for each bucket."""
    gamma, share = 0.4, 0.3
    sizes = [param.numel() for param in MODEL.parameters()]
    model = deepcopy(MODEL)
    x = flat(MODEL).repeat(SIZE, 1)
    h = torch.zeros_like(x)
    momentum = torch.zeros_like(x)
    for step in range(STEPS):
        momentum = 0.5 * momentum + torch.stack([gradient(model, x[k], k, step) for k in range(SIZE)])
        y = x - LR * momentum
        parts = [part.clone() for part in (y - h).split(sizes, dim=1)]
        for part in parts:
            kept = max(1, round(share * part.shape[1]))
            part *= part.abs() >= part.abs().sort(dim=1, descending=True).values[:, kept - 1 : kept]
        h = h + torch.cat(parts, dim=1)
        x = y + gamma * (RING @ h - h)
    results = torch.stack(fleet(SIZE).run(train, ChocoSGD(1.0, gamma, TopK(share)), "backward"))
    assert (results - x).abs().max() < 1e-12


def test_buckets_draw_independently(fleet: Fleets) -> None:
    """Two equal layers send different entries. With one draw, every step would omit the same entries of both."""
    chosen: dict[int, list[Tensor]] = {}

    class Watched(RandomK):
        def __call__(self, x: Tensor, draws: Any) -> Tensor:
            result = super().__call__(x, draws)
            chosen.setdefault(shoal.rank(), []).append(result != 0)
            return result

        @property
        def encodes(self) -> bool:
            return False

    def run() -> None:
        model = nn.Sequential(nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False))
        optimizer = make(model, ChocoSGD(1.0, 0.1, Watched(0.1)), "backward")
        model(torch.ones(1, 40)).square().sum().backward()
        optimizer.step()
        optimizer.close()

    fleet(SIZE).run(run)
    for one, other in chosen.values():
        assert not torch.equal(one, other)


def test_buckets_may_have_several_dtypes(fleet: Fleets) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(5, 4), nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.other(self.one(x.float()).double())
            return y

    mixed = Mixed()
    agents = fleet(SIZE)
    results = [torch.stack(agents.run(train, ExactDiffusion(1.0, lazy=True), how, mixed)) for how in (None, "backward")]
    assert torch.equal(*results)
    spread = (results[0] - results[0].mean(0)).norm()
    assert 0 < spread < 0.5 * (results[0] - flat(mixed)).norm()


def test_agents_without_batches_contribute_a_zero_gradient(fleet: Fleets) -> None:
    batches = [5, 2, 0, 4]

    def run(algorithm: Algorithm, overlap: str | None) -> Tensor:
        model = deepcopy(MODEL)
        sgd = torch.optim.SGD(model.parameters(), lr=LR)
        optimizer = shoal.DecentralizedOptimizer(
            sgd,
            model,
            algorithm,
            topology=shoal.topology.RingGraph(SIZE),
            overlap=overlap,  # type: ignore[arg-type]
        )
        with optimizer.join():
            train_steps(model, optimizer, range(batches[shoal.rank()]))
        assert optimizer.rounds == max(batches)
        return flat(model)

    def of_all(x: Tensor, step: int) -> Tensor:
        model = deepcopy(MODEL)
        rows = [gradient(model, x[k], k, step) if step < batches[k] else torch.zeros_like(x[k]) for k in range(SIZE)]
        return LR * torch.stack(rows)

    x = flat(MODEL).repeat(SIZE, 1)
    before = x
    for step in range(max(batches)):
        psi = x - of_all(x, step)
        phi = psi + x - before
        x, before = (phi + RING @ phi) / 2, psi
    agents = fleet(SIZE)
    for overlap in (None, "backward"):
        results = torch.stack(agents.run(run, ExactDiffusion(1.0, lazy=True), overlap))
        assert (results - x).abs().max() < 1e-12


@pytest.mark.parametrize("overlap", [None, "backward"])
def test_local_steps_before_the_last_batch_are_kept(fleet: Fleets, overlap: Literal["backward"] | None) -> None:
    """With an exchange after every other step, and an odd number of batches."""
    batches = [6, 3, 4, 5]

    def run() -> Tensor:
        model = deepcopy(MODEL)
        optimizer = shoal.DecentralizedOptimizer(
            torch.optim.SGD(model.parameters(), lr=LR),
            model,
            ExactDiffusion(1.0, lazy=True),
            topology=shoal.topology.RingGraph(SIZE),
            overlap=overlap,
            num_steps_per_communication=2,
        )
        with optimizer.join():
            train_steps(model, optimizer, range(batches[shoal.rank()]))
        assert optimizer.rounds == 3
        return flat(model)

    model, x = deepcopy(MODEL), flat(MODEL).repeat(SIZE, 1)
    before = x
    for round_ in range(3):
        psi = x.clone()
        for step in (2 * round_, 2 * round_ + 1):
            for rank in range(SIZE):
                if step < batches[rank]:
                    psi[rank] -= LR * gradient(model, psi[rank], rank, step)
        phi = psi + x - before
        x, before = (phi + RING @ phi) / 2, psi
    results = torch.stack(fleet(SIZE).run(run))
    assert (results - x).abs().max() < 1e-12


def test_local_steps_between_two_exchanges_are_summed_in_each_bucket(fleet: Fleets) -> None:
    def run(overlap: str | None) -> Tensor:
        model = deepcopy(MODEL)
        optimizer = make(model, ExactDiffusion(1.0, lazy=True), overlap)
        optimizer.num_steps_per_communication = 3
        train_steps(model, optimizer, range(STEPS))
        assert optimizer.rounds == STEPS // 3
        return flat(model)

    agents = fleet(SIZE)
    parts = torch.stack(agents.run(run, "backward"))
    assert torch.equal(parts, torch.stack(agents.run(run, None)))
    assert (parts - flat(MODEL)).abs().max() > 0.01


@pytest.mark.parametrize("algorithm", [ExactDiffusion(1.0, lazy=True), ChocoSGD(1.0, 1.0, MinMaxUInt8())], ids=str)
def test_resuming_is_bit_for_bit(fleet: Fleets, algorithm: Algorithm) -> None:
    def run() -> bool:
        full, first, second, other = (deepcopy(MODEL) for _ in range(4))
        train_steps(full, make(full, algorithm, "backward"), range(STEPS))
        started = make(first, algorithm, "backward")
        train_steps(first, started, range(3))
        saved = deepcopy((first.state_dict(), started.state_dict()))
        for_another = deepcopy(saved[1])
        started.close()
        resumed = make(second, algorithm, "backward")
        second.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        assert resumed.state_dict()["shoal"]["way"].keys() == {"algorithm", "parts"}
        train_steps(second, resumed, range(3, STEPS))
        elsewhere = make(other, algorithm, None)  # in the parts of its resumed state
        other.load_state_dict(saved[0])
        elsewhere.load_state_dict(for_another)
        assert elsewhere.state_dict()["shoal"]["way"].keys() == {"algorithm", "parts"}
        train_steps(other, elsewhere, range(3, STEPS))
        assert torch.equal(flat(other), flat(full))
        return torch.equal(flat(second), flat(full))

    assert fleet(SIZE).run(run) == [True] * SIZE


GROWING = [ExactDiffusion(1.0, lazy=True), DecentLaM(1.0, 0.8), DiLoCo(GradientDescent(1.0), 2)]


@pytest.mark.parametrize("overlap", [None, "backward"])
@pytest.mark.parametrize("algorithm", [*GROWING, ChocoSGD(1.0, 0.5, MinMaxUInt8())], ids=str)
def test_added_parameters_start_when_they_are_added(fleet: Fleets, algorithm: Algorithm, overlap: str) -> None:
    """Each group ends where it does alone, also if a run resumed from a checkpoint has both groups from the start."""
    goals = torch.arange(SIZE * 5.0, dtype=torch.float64).view(SIZE, 5).sin()

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (3, 2))

    def descend(model: Two, optimizer: shoal.DecentralizedOptimizer, steps: int) -> None:
        goal = goals[shoal.rank()]
        for _ in range(steps):
            optimizer.zero_grad()
            apart = torch.cat([model.first, model.second]) - goal
            (apart * torch.linspace(0.3, 1.0, 5)).square().sum().backward()
            optimizer.step()

    def optimizer_of(model: Two, *groups: nn.Parameter) -> shoal.DecentralizedOptimizer:
        sgd = torch.optim.SGD([{"params": [group]} for group in groups], lr=LR, momentum=0.5)
        return shoal.DecentralizedOptimizer(
            sgd, model, algorithm, topology=shoal.topology.RingGraph(SIZE), overlap=overlap
        )

    def train_part(name: str, steps: int) -> Tensor:
        model = Two()
        param = getattr(model, name)
        for other in model.parameters():
            other.requires_grad_(other is param)
        optimizer = optimizer_of(model, param)
        descend(model, optimizer, steps)
        optimizer.close()
        return param.detach()

    def growing() -> tuple[Tensor, Tensor]:
        model = Two()
        model.second.requires_grad_(False)
        optimizer = optimizer_of(model, model.first)
        descend(model, optimizer, 4)
        model.second.requires_grad_(True)
        optimizer.add_param_group({"params": [model.second]})
        assert optimizer.state_dict()["shoal"]["way"]
        descend(model, optimizer, 4)
        saved = deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.close()
        again = Two()
        resumed = optimizer_of(again, again.first, again.second)
        again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        descend(again, resumed, 4)
        resumed.close()
        return again.first.detach(), again.second.detach()

    agents = fleet(SIZE)
    firsts, seconds = zip(*agents.run(growing), strict=True)
    for result, name, steps in ((firsts, "first", 12), (seconds, "second", 8)):
        assert torch.equal(torch.stack(result), torch.stack(agents.run(train_part, name, steps)))
    assert (torch.stack(seconds) - 1).abs().max() > 0.01


def test_parameters_cannot_be_added_to_a_single_vector_after_the_first_step(fleet: Fleets) -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        for param in model[2].parameters():
            param.requires_grad_(False)
        optimizer = shoal.DecentralizedOptimizer(
            torch.optim.SGD(model[0].parameters(), lr=LR),
            model,
            PowerGossip(1.0),
            topology=shoal.topology.RingGraph(SIZE),
        )
        train_steps(model, optimizer, range(2))
        with pytest.raises(ValueError, match="PowerGossip has begun, and takes all parameters as one vector"):
            optimizer.add_param_group({"params": model[2].parameters()})
        train_steps(model, optimizer, range(2, 4))
        optimizer.close()

    fleet(SIZE).run(run)


def test_a_bucket_is_sent_while_earlier_layers_gradients_are_computed(fleet: Fleets) -> None:
    """The other agents delay the first layer until they have the message of the last layer."""
    arrived = [threading.Event() for _ in range(2)]

    class RecordingDescent(GradientDescent):
        def step(self, x: Tensor, state: Any, grad: Any, mix: Mix) -> tuple[Tensor, Any]:
            result = super().step(x, state, grad, mix)
            if len(x) == MODEL[2].bias.numel():
                arrived[shoal.rank()].set()
            return result

    def run() -> None:
        model = deepcopy(MODEL)
        optimizer = shoal.DecentralizedOptimizer(
            torch.optim.SGD(model.parameters(), lr=LR),
            model,
            RecordingDescent(1.0, atc=False),
            topology=shoal.topology.RingGraph(2),
            overlap="backward",
            bucket_bytes=1,
        )
        seen: list[bool] = []
        model[0].weight.register_hook(lambda _: seen.append(arrived[shoal.rank()].wait(30)))
        model(batch(0, 0)).square().mean().backward()
        optimizer.step()
        assert seen == [True]

    fleet(2).run(run)


def test_buckets_late_on_some_agents_and_early_on_others_do_not_deadlock(fleet: Fleets) -> None:
    """A layer without a gradient is sent at the step, also while buckets sent before wait for a neighbour's message."""

    class AlternatingLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(5, 5).double() for _ in range(2))

        def forward(self, x: Tensor, which: int) -> Tensor:
            y: Tensor = self.layers[which](x)
            return y

    either = AlternatingLayers()

    def run(overlap: str | None) -> Tensor:
        model = deepcopy(either)
        optimizer = make(model, ExactDiffusion(1.0, lazy=True), overlap)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(shoal.rank(), step), (step + shoal.rank()) % 2).square().mean().backward()
            optimizer.step()
        return flat(model)

    agents = fleet(SIZE)
    assert torch.equal(torch.stack(agents.run(run, "backward")), torch.stack(agents.run(run, None)))


def test_an_error_in_a_bucket_is_raised_by_step_and_no_thread_is_left(fleet: Fleets) -> None:
    class Wrong(GradientDescent):
        def step(self, x: Tensor, state: Any, grad: Any, mix: Mix) -> tuple[Tensor, Any]:
            if mix.round == 1 and len(x) == MODEL[0].bias.numel():
                raise ArithmeticError("it does not work out")
            return super().step(x, state, grad, mix)

    def run() -> None:
        model, sound = deepcopy(MODEL), deepcopy(MODEL)
        optimizer = make(model, Wrong(0.5), "backward")
        train_steps(model, optimizer, range(1))
        with pytest.raises(ArithmeticError, match="it does not work out"):
            train_steps(model, optimizer, range(1, 2))
        train_steps(sound, make(sound, GradientDescent(0.5), "backward"), range(2))
        for (name, one), other in zip(model.named_parameters(), sound.parameters(), strict=True):
            assert torch.equal(one, other) == (name != "0.bias"), name  # the other parts have taken their step
        assert not [one for one in threading.enumerate() if one.name.startswith(f"shoal-part-{shoal.rank()}-")]

    fleet(2).run(run)


def test_inseparable_algorithms_are_refused(fleet: Fleets) -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        censored = CensoredGradientDescent(1.0, 0.1, 0.9)
        for algorithm in (PowerGossip(1.0), censored, Momentum(PowerGossip(1.0), 0.5)):
            with pytest.raises(ValueError, match="separable"):
                make(model, algorithm, "backward")
        with pytest.raises(ValueError, match="separable"):
            make(model, NIDS(1.0, prox=lambda x: x / x.norm()), "backward")

    fleet(2).run(run)
