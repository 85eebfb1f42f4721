"""Buckets that leave during the backward pass: the same bits, earlier; and what that rules out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.runtime.agent import current
from support.leftovers import wait_until
from support.optimizers import MODEL, SIZE, batch, flat

Fleets = Callable[..., shoal.Fleet]

ATC, GRADIENTS = shoal.DecentralizedOptimizer, shoal.bluefog.DistributedGradientAllreduceOptimizer
LOCAL: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}
both_ways = pytest.mark.parametrize("make", [ATC, GRADIENTS], ids=["atc", "gradients"])


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(batch(shoal.rank(), step)).square().mean()
    return loss


def train(make: Any, local: str, overlap: str | None, bucket_bytes: int, passes: int = 1) -> Tensor:
    shoal.set_topology(shoal.topology.RingGraph(SIZE))
    model = deepcopy(MODEL)
    optimizer = make(
        LOCAL[local](model.parameters()),
        model,
        overlap=overlap,
        bucket_bytes=bucket_bytes,
        num_steps_per_communication=passes,
        mix_state=(),
    )
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(passes):
            loss_of(model, 10 * step + micro).backward()
        optimizer.step()
    assert optimizer.rounds == 4
    optimizer.close()
    return flat(model)


@pytest.mark.parametrize(
    "make, local, bucket_bytes, passes",  # any two of these values meet
    [
        pytest.param(ATC, "sgd", 1, 1, id="atc-sgd-1-1"),
        pytest.param(ATC, "adam", 100, 3, id="atc-adam-100-3"),
        pytest.param(ATC, "sgd", 1 << 20, 3, id="atc-sgd-all-3"),
        pytest.param(GRADIENTS, "adam", 1, 3, id="gradients-adam-1-3"),
        pytest.param(GRADIENTS, "sgd", 100, 1, id="gradients-sgd-100-1"),
        pytest.param(GRADIENTS, "adam", 1 << 20, 1, id="gradients-adam-all-1"),
    ],
)
def test_overlap_gives_the_same_bits(fleet: Fleets, make: Any, local: str, bucket_bytes: int, passes: int) -> None:
    agents = fleet(SIZE)
    overlapped = torch.stack(agents.run(train, make, local, "backward", bucket_bytes, passes))
    assert torch.equal(overlapped, torch.stack(agents.run(train, make, local, None, bucket_bytes, passes)))


def test_a_bucket_has_stepped_before_earlier_layers_gradients_exist(fleet: Fleets) -> None:
    def run() -> list[bool]:
        model = deepcopy(MODEL)
        optimizer = ATC(sgd(model), model, overlap="backward", bucket_bytes=1)
        start = model[2].weight.detach().clone()
        seen = []
        model[0].weight.register_hook(lambda _: seen.append(torch.equal(model[2].weight, start)))
        loss_of(model, 0).backward()
        optimizer.step()
        return seen

    assert fleet(2).run(run) == [[False], [False]]


class Unused(nn.Module):
    """The second layer has no gradient in some steps, the third never."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5).double() for _ in range(3))
        self.paused = nn.Linear(5, 5).double().requires_grad_(False)

    def forward(self, x: Tensor, deep: bool) -> Tensor:
        x = self.paused(self.layers[0](x))
        y: Tensor = self.layers[1](x) if deep else x
        return y


UNUSED = Unused()


@both_ways
def test_parameters_without_a_gradient_are_sent_at_the_step(fleet: Fleets, make: Any) -> None:
    def run(overlap: str | None) -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        model = deepcopy(UNUSED)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(shoal.rank() if make is ATC else 0)
        optimizer = make(sgd(model), model, overlap=overlap, bucket_bytes=1)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(shoal.rank(), step), (step + shoal.rank()) % 2 == 0).square().mean().backward()
            optimizer.step()
            if step == 1:
                model.paused.requires_grad_(True)
        return flat(model)

    agents = fleet(SIZE)
    assert torch.equal(torch.stack(agents.run(run, "backward")), torch.stack(agents.run(run, None)))


def test_evaluation_and_local_steps_start_no_exchange(fleet: Fleets) -> None:
    def run() -> list[int]:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        model = deepcopy(MODEL)
        optimizer = ATC(sgd(model), model, overlap="backward", num_steps_per_communication=2)
        rounds = []
        for step in range(4):
            optimizer.zero_grad()
            with torch.no_grad():
                loss_of(model, step)
            loss_of(model, step).backward()
            optimizer.step()
            rounds.append(optimizer.rounds)
        return rounds

    assert fleet(SIZE).run(run) == [[0, 1, 1, 2]] * SIZE


def test_a_second_backward_pass_is_refused_with_the_remedy(fleet: Fleets) -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        optimizer = ATC(sgd(model), model, overlap="backward")
        loss_of(model, 0).backward()
        loss_of(model, 1).backward()
        with pytest.raises(RuntimeError, match="set num_steps_per_communication=k"):
            optimizer.step() if shoal.rank() else loss_of(model, 2)
        optimizer.step()

    fleet(2).run(run)


def test_methods_that_need_all_gradients_first_are_refused(fleet: Fleets) -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        optimizer = ATC(sgd(model), model, overlap="backward")
        with pytest.raises(ValueError, match="without a closure"):
            optimizer.step(lambda: 0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(loss_of(model, 0)).backward()
        with pytest.raises(ValueError, match="too early for a GradScaler"):
            scaler.step(optimizer)
        optimizer.close()
        for make in (
            partial(shoal.DecentralizedOptimizer, algorithm=shoal.algorithms.GradientDescent(1.0, atc=False)),
            shoal.optim.DistributedPushSumOptimizer,
        ):
            with pytest.raises(ValueError, match='overlap="backward" is for adapt, then combine'):
                make(sgd(model), model, overlap="backward")
        with pytest.raises(ValueError, match="overlap='forward'"):
            ATC(sgd(model), model, overlap="forward")

    fleet(2).run(run)


@pytest.mark.parametrize("overlap", [None, "backward"])
def test_parameters_are_read_in_place(fleet: Fleets, overlap: str | None) -> None:
    """An agent's memory for exchanges is the parameters and one buffer for their average, for any degree."""

    def run() -> tuple[int, int]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(SIZE))
        model = nn.Linear(1000, 1000, bias=False)
        optimizer = ATC(sgd(model), model, overlap=overlap)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 1000)).sum().backward()
            optimizer.step()
        return current().engine.arena.nbytes, 4_000_000

    for held, nbytes in fleet(SIZE).run(run):
        assert 2 * nbytes <= held <= 2 * 1.25 * nbytes + (4 << 20)  # and one slab for small messages


def test_a_parameter_changed_during_the_exchange_is_an_error_and_not_a_failure(fleet: Fleets) -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        optimizer = shoal.DecentralizedOptimizer(sgd(model), model, shoal.algorithms.GradientDescent(1.0, atc=False))
        loss_of(model, 0).backward()
        if shoal.rank() == 0:
            with torch.no_grad():
                model[2].bias.clamp_(-0.1, 0.1)
            with pytest.raises(RuntimeError, match=r"'2\.bias' were changed while their average was under way"):
                optimizer.step()
        else:
            optimizer.step()

    fleet(2).run(run)


def test_after_a_failure_readers_do_not_see_changing_memory(fleet: Fleets) -> None:
    """A late neighbour may still read memory that was not copied, so the parameters have moved to other memory."""

    def run() -> bool:
        model = nn.Linear(100, 100, bias=False)
        optimizer = ATC(sgd(model), model)
        optimizer.step()  # the models agree
        where, values = model.weight.data_ptr(), model.weight.detach().clone()
        moved = True
        if shoal.rank() == 0:
            engine = current().engine
            patient, engine.timeout = engine.timeout, 0.3
            with pytest.raises(shoal.DeadlineExceeded):
                optimizer.step()
            engine.timeout = patient
            moved = model.weight.data_ptr() != where and torch.equal(model.weight, values)
        shoal.barrier()
        return moved

    assert all(fleet(2).run(run))


def test_overlapped_buckets_are_smaller(fleet: Fleets) -> None:
    def run(overlap: str | None) -> int:
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(3)))  # 4 MiB each
        optimizer = ATC(sgd(model), model, overlap=overlap)
        optimizer._bucket_exchange.prepare()
        return len(optimizer._bucket_exchange.buckets)

    agents = fleet(2)
    assert agents.run(run, None) == [1, 1]
    assert agents.run(run, "backward") == [3, 3]


def test_an_error_during_the_backward_pass_is_raised_by_step_and_keeps_no_parameter_alive(fleet: Fleets) -> None:
    """torch raises a hook's exception from ``backward()``, and then never frees the model's first layers."""

    def run() -> bool:
        model = deepcopy(MODEL)
        optimizer = ATC(sgd(model), model, overlap="backward", bucket_bytes=1)
        loss_of(model, 0).backward()
        optimizer.step()

        def lost(number: int) -> None:
            raise shoal.PeerLost("rank 7 is gone", (7,))

        optimizer._bucket_exchange.start_bucket = lost  # type: ignore[attr-defined, method-assign]
        loss_of(model, 1).backward()
        with pytest.raises(shoal.PeerLost, match="rank 7"):
            optimizer.step()
        first = weakref.ref(model[0].weight)
        del model, optimizer
        return wait_until(lambda: gc.collect() >= 0 and first() is None)

    assert fleet(2).run(run) == [True, True]
