"""Frozen parameters are neither stepped nor exchanged, and all agents must freeze the same ones."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from tests.support.optimizers import ATC, AWC, LR, MEAN, MODEL, MOMENTUM, PARALLEL, RING, SIZE, batch, flat, gradient
from torch import Tensor, nn

import shoal
from shoal.algorithms import ExactDiffusion, GossipPGA, GradientDescent, RelaySum
from shoal.optim.asynchronous import (
    DistributedADPSGDOptimizer,
    DistributedPullGetOptimizer,
    DistributedPushSumOptimizer,
    DistributedWinPutOptimizer,
)

Fleets = Callable[..., shoal.Fleet]
WAYS: dict[str, dict[str, Any]] = {
    "atc": {"algorithm": ATC},
    "awc": {"algorithm": AWC},
    "gradients": {"algorithm": PARALLEL},
    "atc, backward": {"algorithm": ATC, "overlap": "backward"},
    "gradients, backward": {"algorithm": PARALLEL, "overlap": "backward"},
}
ways = pytest.mark.parametrize("way", [*WAYS])
FIRST = 5 * 7 + 7
"""Numbers in the first layer of the model."""


def sgd(model: nn.Module, momentum: float = MOMENTUM) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)


def step_of(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(batch(shoal.rank(), step)).square().mean().backward()
    optimizer.step()


def expected(way: str, frozen: Sequence[Sequence[int]], steps: int) -> Tensor:
    """SGD with momentum of all agents, as rows; in each step the layers ``frozen[step]`` are left as they are."""
    algorithm = WAYS[way]["algorithm"]
    model = deepcopy(MODEL)
    x = flat(model).repeat(SIZE, 1)
    momentum = torch.zeros_like(x)
    for step in range(steps):
        on = torch.tensor([0 not in frozen[step]] * FIRST + [2 not in frozen[step]] * (x.shape[1] - FIRST))
        g = torch.stack([gradient(model, x[rank], rank, step) for rank in range(SIZE)])
        if algorithm == PARALLEL:
            g = MEAN @ g
        moved = MOMENTUM * momentum + g
        momentum = torch.where(on, moved, momentum)
        if algorithm == ATC:
            new = RING @ (x - LR * momentum)
        elif algorithm == AWC:
            new = RING @ x - LR * momentum
        else:
            new = x - LR * momentum
        x = torch.where(on, new, x)
    return x


PATTERNS: dict[str, list[list[int]]] = {
    "from the beginning": [[0]] * 6,
    "from the third step on": [[], [], [0], [0], [0], [0]],
    "until the third step": [[0], [0], [], [], [], []],
    "in turns": [[0], [2], [0], [2], [], [2]],
    "all of them for a while": [[], [0, 2], [0, 2], [], [2], []],
}


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20], ids=["many buckets", "one bucket"])
@pytest.mark.parametrize("pattern", [*PATTERNS])
@ways
def test_frozen_parameters_stay_and_the_others_train(fleet: Fleets, way: str, pattern: str, bucket_bytes: int) -> None:
    frozen = PATTERNS[pattern]

    def run() -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        model = deepcopy(MODEL)
        optimizer = shoal.DecentralizedOptimizer(sgd(model), model, bucket_bytes=bucket_bytes, **WAYS[way])
        for step, layers in enumerate(frozen):
            for layer in (0, 2):
                model[layer].requires_grad_(layer not in layers)
            optimizer.zero_grad()
            loss = model(batch(shoal.rank(), step)).square().mean()
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
        assert optimizer.rounds == len(frozen)
        optimizer.close()
        return flat(model)

    results = torch.stack(fleet(SIZE).run(run))
    assert (results - expected(way, frozen, len(frozen))).abs().max() < 1e-12


class Adapter(nn.Module):
    """A large layer, which is frozen, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(100, 100).requires_grad_(False)
        self.small = nn.Linear(100, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.small(self.base(x))
        return y


MAKERS: dict[str, Callable[..., Any]] = {
    **{
        name: lambda inner, model, way=way: shoal.DecentralizedOptimizer(inner, model, **way)
        for name, way in WAYS.items()
    },
    "equation": lambda inner, model: shoal.DecentralizedOptimizer(inner, model, ExactDiffusion(1.0, lazy=True)),
    "compressed gradients": lambda inner, model: shoal.DecentralizedOptimizer(
        inner, model, PARALLEL, compression=shoal.compression.MinMaxUInt8()
    ),
    "compressed": lambda inner, model: shoal.DecentralizedOptimizer(
        inner, model, compression=shoal.compression.MinMaxUInt8(), topology=shoal.topology.RingGraph(2)
    ),
    "all": lambda inner, model: shoal.DecentralizedOptimizer(
        inner, model, communication_type=shoal.optim.CommunicationType.allreduce
    ),
}
WINDOWS = [
    DistributedWinPutOptimizer,
    DistributedPullGetOptimizer,
    DistributedPushSumOptimizer,
    DistributedADPSGDOptimizer,
]


@pytest.mark.parametrize("late", [False, True], ids=["from the beginning", "after two steps"])
@pytest.mark.parametrize("maker", [*MAKERS])
def test_frozen_parameters_are_not_sent(fleet: Fleets, maker: str, late: bool) -> None:
    if late and maker in ("equation", "compressed"):
        pytest.skip("an algorithm that remembers a vector goes on to exchange it")

    def run() -> int:
        shoal.set_topology(shoal.topology.RingGraph(2))
        model = Adapter()
        model.base.requires_grad_(late)
        shoal.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = MAKERS[maker](torch.optim.SGD(model.parameters(), lr=0.01), model)
        sent = 0
        for step in range(6):
            if step == 2:
                model.base.requires_grad_(False)
            if step == 3:
                shoal.barrier()
                sent = shoal.observability.bytes_sent()
            optimizer.zero_grad()
            model(torch.randn(4, 100)).square().mean().backward()
            optimizer.step()
            shoal.barrier()
        sent = shoal.observability.bytes_sent() - sent
        optimizer.close()
        return sent

    sent = fleet(2).run(run)
    assert 0 < max(sent) < 3 * 40_000 / 4, sent


@pytest.mark.parametrize("make", WINDOWS)
def test_windows_with_only_frozen_parameters_are_skipped(fleet: Fleets, make: Any) -> None:
    """No window is created if they are frozen from the start. Later, none is written to or read from."""

    def run() -> None:
        shoal.set_topology(shoal.topology.RingGraph(2))
        model = Adapter()
        model.base.bias.requires_grad_(True)
        shoal.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = make(torch.optim.SGD(model.parameters(), lr=0.01), model, bucket_bytes=1)
        bucket_exchange = optimizer._bucket_exchange
        moved: list[list[int]] = []
        full = bucket_exchange._move

        def move(bucket: Any, name: str) -> Any:
            moved[-1].append(bucket.numel)
            return full(bucket, name)

        bucket_exchange._move = move
        for step in range(8):
            if step in (2, 5):
                model.base.bias.requires_grad_(step == 5)
            if step == 6:
                model.base.weight.requires_grad_(True)
            before = model.base.bias.detach().clone()
            moved.append([])
            optimizer.zero_grad()
            model(torch.randn(4, 100)).square().mean().backward()
            optimizer.step()
            shoal.barrier()
            assert torch.equal(before, model.base.bias) == (2 <= step < 5)
        most, least = [2, 200, 100], [2, 200]
        assert moved == [most] * 2 + [least] * 3 + [most] + [[*most, 10_000]] * 2, moved
        optimizer.close()

    fleet(2).run(run)


# Agents that differ


@pytest.mark.parametrize("what", ["freezes", "unfreezes", "freezes all"])
@ways
def test_freezing_on_one_agent_only_is_a_mismatch_that_names_the_parameter(fleet: Fleets, way: str, what: str) -> None:
    all_have_failed = threading.Barrier(3)

    def run() -> str:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        model = deepcopy(MODEL)
        model[0].requires_grad_(what != "unfreezes")
        optimizer = shoal.DecentralizedOptimizer(sgd(model), model, **WAYS[way])
        step_of(model, optimizer, 0)
        if shoal.rank() == 0:
            (model if what == "freezes all" else model[0]).requires_grad_(what == "unfreezes")
        before = flat(model)
        with pytest.raises(shoal.Mismatch) as caught:
            for step in range(1, 3):
                optimizer.zero_grad()
                loss = model(batch(shoal.rank(), step)).square().mean()
                if loss.requires_grad:
                    loss.backward()
                optimizer.step()
        assert WAYS[way]["algorithm"] == ATC or torch.equal(flat(model), before)
        all_have_failed.wait(60)
        return str(caught.value)

    texts = fleet(3).run(run)
    for text in texts:
        # An agent whose peers take longer than a second to come says what is frozen here.
        assert "change requires_grad of a parameter on all agents" in text
        assert "The parameter '0.weight' is " in text or "'0.weight', '0.bias'" in text or "no parameters are" in text
    assert any("The parameter '0.weight' is " in text for text in texts), texts


EQUATIONS: dict[str, dict[str, Any]] = {
    "exact diffusion": {"algorithm": ExactDiffusion(1.0, lazy=True), "topology": shoal.topology.FullyConnectedGraph(2)},
    "compressed": {"compression": shoal.compression.MinMaxUInt8(), "topology": shoal.topology.RingGraph(2)},
    "mean of all": {"algorithm": GossipPGA(GradientDescent(1.0), 2), "topology": shoal.topology.RingGraph(2)},
    "edges": {"algorithm": RelaySum(1.0), "topology": shoal.topology.RingGraph(2)},
}


@pytest.mark.parametrize("what", ["freezes", "unfreezes"])
@pytest.mark.parametrize("equation", [*EQUATIONS])
def test_freezing_on_one_agent_only_is_a_mismatch_under_any_algorithm(fleet: Fleets, equation: str, what: str) -> None:
    """No agent waits for a deadline: it is longer than the test's timeout."""

    def run() -> str:
        model = deepcopy(MODEL)
        model[0].requires_grad_(what != "unfreezes")
        optimizer = shoal.DecentralizedOptimizer(sgd(model, 0.0), model, **EQUATIONS[equation])
        step_of(model, optimizer, 0)
        if shoal.rank() == 0:
            model[0].requires_grad_(what == "unfreezes")
        with pytest.raises(shoal.Mismatch) as caught:
            step_of(model, optimizer, 1)
        return str(caught.value)

    assert all("The parameter '0.weight' is " in text for text in fleet(2, timeout=3600.0).run(run))


def test_freezing_another_layer_of_the_same_shape_is_a_mismatch(fleet: Fleets) -> None:
    def run() -> None:
        shoal.set_topology(shoal.topology.RingGraph(2))
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double()
        optimizer = shoal.DecentralizedOptimizer(sgd(model), model)
        step_of(model, optimizer, 0)
        model[shoal.rank()].requires_grad_(False)
        with pytest.raises(shoal.Mismatch, match=r"The parameter '0.weight' is (frozen|trainable) on rank"):
            step_of(model, optimizer, 1)

    fleet(2).run(run)


def test_frozen_sets_that_differ_at_the_first_step(fleet: Fleets) -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        if shoal.rank() == 1:
            model[2].requires_grad_(False)
        optimizer = shoal.DecentralizedOptimizer(sgd(model), model)
        with pytest.raises(shoal.Mismatch, match=r"the models differ: rank . has the parameter 2.weight .*, frozen"):
            step_of(model, optimizer, 0)

    fleet(2).run(run)


def test_frozen_values_that_differ_are_averaged_once(fleet: Fleets) -> None:
    def run() -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        model = deepcopy(MODEL)
        model[0].requires_grad_(False)
        with torch.no_grad():
            model[0].weight.add_(shoal.rank())
        optimizer = shoal.DecentralizedOptimizer(sgd(model), model)
        results = []
        for step in range(2):
            step_of(model, optimizer, step)
            results.append(model[0].weight.detach().clone())
        return torch.stack(results)

    for result in fleet(SIZE).run(run):
        assert (result - (MODEL[0].weight.detach() + (SIZE - 1) / 2)).abs().max() < 1e-12
        assert torch.equal(result[0], result[1])


def test_frozen_integers_that_differ_are_refused_by_name(fleet: Fleets) -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        model.codes = nn.Parameter(torch.tensor([shoal.rank()]), requires_grad=False)
        optimizer = shoal.DecentralizedOptimizer(sgd(model), model)
        with pytest.raises(shoal.Mismatch, match=r"the frozen parameter 'codes' differs between agents"):
            step_of(model, optimizer, 0)
        model.codes.data.fill_(3)
        step_of(model, optimizer, 0)
        optimizer.close()

    fleet(2).run(run)


# Gradients that are left


@ways
def test_gradients_of_frozen_parameters_are_dropped(fleet: Fleets, way: str) -> None:
    def run() -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        model = deepcopy(MODEL)
        optimizer = shoal.DecentralizedOptimizer(sgd(model), model, **WAYS[way])
        step_of(model, optimizer, 0)
        before = flat(model)[:FIRST]
        model[0].requires_grad_(False)  # the gradients of the step before are still there
        model(batch(shoal.rank(), 1)).square().mean().backward()
        optimizer.step()
        assert torch.equal(before, flat(model)[:FIRST])
        return flat(model)

    with pytest.warns(UserWarning, match=r"the frozen parameters '0.weight', '0.bias' have gradients"):
        fleet(SIZE).run(run)


# Laid out once, saved, handed over


def test_alternately_frozen_layers_are_not_moved_again(fleet: Fleets) -> None:
    def run() -> None:
        shoal.set_topology(shoal.topology.RingGraph(2))
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        places: list[set[int]] = []
        for step in range(8):
            for layer in (0, 1):
                model[layer].requires_grad_(step % 2 == layer)
            optimizer.zero_grad()
            model(torch.randn(2, 40)).square().mean().backward()
            optimizer.step()
            places.append({parameter.untyped_storage().data_ptr() for parameter in model.parameters()})
            if step == 2:
                buckets = list(optimizer._bucket_exchange.buckets)
        assert all(one is other for one, other in zip(buckets, optimizer._bucket_exchange.buckets, strict=True))
        assert len(buckets) == 2
        optimizer.close()

    fleet(2).run(run)


RESUMED: dict[str, dict[str, Any]] = {
    "atc": {"algorithm": ATC},
    "robust": {"algorithm": ATC, "robust": shoal.robust.ClippedGossip(0.5)},
    "gradients": {"algorithm": PARALLEL, "compression": shoal.compression.QSGD(7, chunk=16)},
    "gradients, with rests": {"algorithm": PARALLEL, "compression": shoal.compression.Sign()},
}


@pytest.mark.parametrize("handed_over", [False, True], ids=["loaded", "handed over"])
@pytest.mark.parametrize("what", [*RESUMED])
def test_a_resumed_run_equals_an_uninterrupted_one(fleet: Fleets, what: str, handed_over: bool) -> None:
    turns = [[], [0], [2], [0], [], [2], [0], []]

    def train_steps(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            for layer in (0, 2):
                model[layer].requires_grad_(layer not in turns[step])  # type: ignore[index, union-attr]
            step_of(model, optimizer, step)

    def made(model: nn.Module) -> Any:
        return shoal.DecentralizedOptimizer(sgd(model), model, name="resumed", **RESUMED[what])

    def run(stop: bool) -> Tensor:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        model = deepcopy(MODEL)
        optimizer = made(model)
        train_steps(model, optimizer, range(4))
        if stop:
            weights = deepcopy(model.state_dict())
            file = io.BytesIO()
            torch.save(optimizer.hand_over() if handed_over else optimizer.state_dict(), file)
            file.seek(0)
            optimizer.close()
            shoal.barrier()
            model = deepcopy(MODEL)
            model.load_state_dict(weights)
            optimizer = made(model)
            state = torch.load(file, weights_only=True)
            if handed_over:
                optimizer.take_over(state)
            else:
                optimizer.load_state_dict(state)
        train_steps(model, optimizer, range(4, 8))
        optimizer.close()
        return flat(model)

    full, resumed = (torch.stack(shoal.Fleet(2).run(run, stop)) for stop in (False, True))
    assert torch.equal(full, resumed)


def test_an_alternating_generator_and_discriminator(fleet: Fleets) -> None:
    """The discriminator runs frozen within the generator's step, which starts no exchange of it."""

    def run(overlap: str | None) -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(2))
        generator = torch.Generator().manual_seed(shoal.rank())
        first = torch.Generator().manual_seed(7)
        G, D = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()
        for param in (*G.parameters(), *D.parameters()):
            nn.init.uniform_(param, -0.5, 0.5, generator=first)

        def wrapped(model: nn.Module) -> Any:
            inner = torch.optim.SGD(model.parameters(), lr=0.05)
            return shoal.DecentralizedOptimizer(inner, model, overlap=overlap)

        def drawn(count: int) -> Tensor:
            return torch.randn(8, count, generator=generator, dtype=torch.float64)

        of_G, of_D = wrapped(G), wrapped(D)
        for _ in range(4):
            D.requires_grad_(True)
            of_D.zero_grad()
            (D(G(drawn(3)).detach()).mean() - D(drawn(4)).mean()).backward()
            of_D.step()
            D.requires_grad_(False)
            of_G.zero_grad()
            (-D(G(drawn(3))).mean()).backward()
            of_G.step()
        of_G.close()
        of_D.close()
        return torch.cat([flat(G), flat(D)])

    agents = fleet(2)
    assert torch.equal(torch.stack(agents.run(run, "backward")), torch.stack(agents.run(run, None)))


class Tail(nn.Module):
    """A second layer, which takes part from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = deepcopy(MODEL), nn.Linear(1, 1).double()
        nn.init.constant_(self.second.weight, 0.5)
        nn.init.constant_(self.second.bias, 0.1)
        self.both = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x).mean(1, keepdim=True)
        return self.second(y) if self.both else y


@pytest.mark.filterwarnings("ignore:no optimizer that averages has these parameters")  # until the group is added
@pytest.mark.parametrize("what", ["a group is added", "frozen after the forward pass", "unfrozen after it"])
def test_freezing_midway_with_overlap_equals_no_overlap(fleet: Fleets, what: str) -> None:
    def run(overlap: str | None) -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(2))
        model = Tail()
        model.both = what != "a group is added"
        model.second.requires_grad_(what != "unfrozen after it")
        learnt = model if model.both else model.first
        inner = torch.optim.SGD(learnt.parameters(), lr=LR)
        optimizer = shoal.DecentralizedOptimizer(inner, model, ATC, overlap=overlap, bucket_bytes=1)
        for step in range(5):
            if step == 2 and not model.both:
                optimizer.add_param_group({"params": list(model.second.parameters())})
                model.both = True
            optimizer.zero_grad()
            loss = model(batch(shoal.rank(), step)).square().mean()
            if step == 2:
                model.second.requires_grad_(what != "frozen after the forward pass")
            loss.backward()
            optimizer.step()
        optimizer.close()
        return flat(model)

    agents = fleet(2)
    assert torch.equal(torch.stack(agents.run(run, "backward")), torch.stack(agents.run(run, None)))
