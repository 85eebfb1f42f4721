"""Horovod's optimizer on Shoal: equal to one process that steps with the mean of all gradients, in the user's loop."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
import shoal.compat.horovod as hvd
from support.optimizers import LR, MODEL, MOMENTUM, batch, flat, gradient

Fleets = Callable[..., shoal.Fleet]
SIZE, STEPS = 3, 4
TABLE = torch.nn.Embedding(6, 2, sparse=True)


def made(model: torch.nn.Module, **options: Any) -> Any:
    sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    return hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters(), **options)


def loss_of(model: torch.nn.Module, step: int, rank: int | None = None) -> Tensor:
    loss: Tensor = model(batch(hvd.rank() if rank is None else rank, step)).square().mean()
    return loss


def train(options: Callable[[torch.nn.Module], dict[str, Any]] = lambda _: {}, passes: int = 1) -> Tensor:
    hvd.init()
    model = deepcopy(MODEL)
    optimizer = made(model, **options(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(passes):
            loss_of(model, step * passes + index).backward()
        optimizer.step()
    return flat(model)


def by_one(passes: int = 1, factor: float = 1.0, change: Callable[[Tensor], Tensor] = lambda g: g) -> Tensor:
    model, x = deepcopy(MODEL), flat(MODEL)
    momentum = torch.zeros_like(x)
    for step in range(STEPS):
        each = [gradient(model, x, rank, step * passes + index) for rank in range(SIZE) for index in range(passes)]
        momentum = MOMENTUM * momentum + change(factor * torch.stack(each).sum(0) / SIZE)
        x = x - LR * momentum
    return x


def in_fleet(*args: Any) -> Tensor:
    results = torch.stack(shoal.Fleet(SIZE, timeout=20.0).run(train, *args))
    assert torch.equal(results, results[0].expand_as(results))
    return results[0]


def test_a_step_uses_the_mean_of_all_gradients(fleet: Fleets) -> None:
    for result in fleet(SIZE).run(train):
        assert torch.allclose(result, by_one(), rtol=0, atol=1e-12)


OPTIONS: dict[str, Callable[[torch.nn.Module], dict[str, Any]]] = {
    "predivided": lambda _: {"gradient_predivide_factor": 3.0},
    "predivided, in groups": lambda _: {"gradient_predivide_factor": 3.0, "num_groups": 2},
    "as many groups as parameters": lambda _: {"groups": 100},
    "lists": lambda model: {"groups": [list(model.parameters())[1:3]]},
    "no groups": lambda _: {"num_groups": 0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fusion_does_not_change_the_result(options: Any) -> None:
    assert torch.allclose(in_fleet(options), by_one(), rtol=0, atol=1e-12)


def test_sums_more_passes_and_sixteen_bits() -> None:
    assert torch.allclose(in_fleet(lambda _: {"op": hvd.Sum}), by_one(factor=SIZE), rtol=0, atol=1e-12)
    two = in_fleet(lambda _: {"backward_passes_per_step": 2, "num_groups": 2}, 2)
    assert torch.allclose(two, by_one(passes=2), rtol=0, atol=1e-12)
    rough, exact = in_fleet(lambda _: {"compression": hvd.Compression.fp16}), by_one()
    assert 1e-9 < (rough - exact).abs().max() < 1e-2


def test_groups_are_sent_during_the_backward_pass() -> None:
    """The last layer's gradient has been sent before the first layer's is computed."""

    def run() -> list[str]:
        hvd.init()
        model = deepcopy(MODEL)
        made(model, num_groups=2)
        started: list[str] = []
        shoal.observability.events().subscribe(
            lambda event: started.append(event.name) if event.kind == "submitted" else None
        )
        seen: list[str] = []
        model[0].weight.register_hook(lambda _: seen.extend(started))
        loss_of(model, 0).backward()
        return seen

    for seen in shoal.Fleet(2, timeout=20.0).run(run):
        assert [name for name in seen if name.startswith("horovod")] == ["horovod.optimizer.0"]


def clipped(mean: Tensor) -> Tensor:
    return mean * min(1.0, 0.05 / (mean.norm().item() + 1e-6))


@pytest.mark.parametrize("skips", [True, False], ids=["with skip_synchronize", "without"])
def test_gradients_are_clipped_between_synchronize_and_step(skips: bool) -> None:
    def run() -> Tensor:
        hvd.init()
        model = deepcopy(MODEL)
        optimizer = made(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if skips:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        return flat(model)

    assert not torch.allclose(by_one(), by_one(change=clipped), rtol=0, atol=1e-3)
    for result in shoal.Fleet(SIZE, timeout=20.0).run(run):
        assert torch.allclose(result, by_one(change=clipped), rtol=0, atol=1e-7)


@pytest.mark.parametrize("by_hand", [True, False], ids=["synchronize, unscale_, skip_synchronize", "step alone"])
def test_a_grad_scaler_skips_a_step_on_all_agents_if_one_overflows(by_hand: bool) -> None:
    def run() -> tuple[Tensor, float]:
        hvd.init()
        model = deepcopy(MODEL)
        optimizer, scaler = made(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS + 1):
            optimizer.zero_grad()
            loss = loss_of(model, max(0, step - 1))
            scaler.scale(loss * float("inf") if (step, hvd.rank()) == (0, 1) else loss).backward()
            if by_hand:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
        return flat(model), scaler.get_scale()

    for result, scale in shoal.Fleet(SIZE, timeout=20.0).run(run):
        assert scale == 512.0
        assert torch.allclose(result, by_one(), rtol=0, atol=1e-12)


def test_a_closure_and_a_scheduler() -> None:
    """One scheduler was created before the wrapper, and one after it."""

    def run() -> tuple[Tensor, list[float]]:
        hvd.init()
        model = deepcopy(MODEL)
        inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        before = torch.optim.lr_scheduler.StepLR(inner, step_size=100)
        optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
        after = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        losses = []
        for step in range(STEPS):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
            before.step()
            after.step()
        return flat(model), losses

    for rank, (result, losses) in enumerate(shoal.Fleet(SIZE, timeout=20.0).run(run)):
        assert losses[0] == pytest.approx(loss_of(deepcopy(MODEL), 0, rank).item(), abs=1e-12)
        assert torch.allclose(result, by_one(), rtol=0, atol=1e-12)


def test_the_wrapper_behaves_as_the_users_optimizer() -> None:
    def run() -> None:
        hvd.init()
        model = deepcopy(MODEL)
        inner = torch.optim.AdamW(model.parameters(), lr=LR)
        loss_of(model, 0, 0).backward()
        inner.step()
        inner.zero_grad()
        optimizer = hvd.DistributedOptimizer(inner)
        assert optimizer is inner
        assert isinstance(optimizer, torch.optim.AdamW)
        assert type(optimizer).__name__ == "AdamW"
        loss_of(model, 1).backward()
        optimizer.step()
        state = optimizer.state_dict()
        assert all(value["step"] == 2 for value in state["state"].values())  # what was there before, too
        plain = torch.optim.AdamW(deepcopy(MODEL).parameters())
        plain.load_state_dict(state)
        optimizer.load_state_dict(plain.state_dict())
        optimizer.set_backward_passes_per_step(2)  # type: ignore[attr-defined]
        optimizer.zero_grad()
        for step in (2, 3):
            loss_of(model, step).backward()
        optimizer.step()
        every = hvd.allgather(flat(model)[None])
        assert torch.equal(every, every[0].expand_as(every))

    shoal.Fleet(2, timeout=20.0).run(run)


def test_missing_gradients_count_as_zero() -> None:
    """One agent has none for a part of the model, and one has none at all.

    One parameter is unused, and one is frozen.
    """

    class Parts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
            self.never, self.paused = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1), False)

    def run() -> list[list[float]]:
        hvd.init()
        model, rank = Parts(), hvd.rank()
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), num_groups=2)
        if rank:
            (rank * model.first + (rank - 1) * model.second).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.paused.requires_grad_(True)  # it is trained after this
        (model.paused * rank).sum().backward()
        optimizer.step()
        assert model.never.grad is not None
        return [model.first.tolist(), model.second.tolist(), model.never.tolist(), model.paused.tolist()]

    for result in shoal.Fleet(SIZE, timeout=20.0).run(run):
        assert result == [[0.0, 0.0], pytest.approx([2 / 3] * 2), [1.0], [0.0]]


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_layer_that_is_frozen_later(everywhere: bool) -> None:
    """Frozen on one agent only, it takes the others' steps. Frozen on all it stays, also under momentum and decay."""

    def run() -> tuple[Tensor, bool]:
        hvd.init()
        model = deepcopy(MODEL)
        inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=0.1)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        before = torch.zeros(0)
        for step in range(3):
            if step == 1:
                before = model[0].weight.detach().clone()
                model[0].requires_grad_(hvd.rank() != 0 and not everywhere)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        return flat(model), torch.equal(before, model[0].weight)

    result, stayed = zip(*shoal.Fleet(SIZE, timeout=20.0).run(run), strict=True)
    assert all(torch.equal(one, result[0]) for one in result)
    assert stayed == (everywhere,) * SIZE


@pytest.mark.parametrize("options", [{}, {"num_groups": 1}, {"gradient_predivide_factor": 2.0}], ids=str)
@pytest.mark.parametrize("dense", [True, False])
def test_sparse_gradients_are_sparse_again_in_the_step(dense: bool, options: dict[str, Any]) -> None:
    def run() -> tuple[Tensor, bool]:
        hvd.init()
        table, rank = deepcopy(TABLE), hvd.rank()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(table.parameters(), lr=0.5),
            table.named_parameters(),
            sparse_as_dense=dense,
            **options,
        )
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([rank, rank, 3])).square().sum().backward()
            optimizer.synchronize()
            sparse = table.weight.grad is not None and table.weight.grad.is_sparse
            with optimizer.skip_synchronize():
                optimizer.step()
        return table.weight.detach(), sparse

    table = deepcopy(TABLE)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        loss = sum(table(torch.tensor([rank, rank, 3])).square().sum() for rank in range(SIZE)) / SIZE
        loss.backward()  # type: ignore[union-attr]
        assert table.weight.grad is not None
        table.weight.grad = table.weight.grad.coalesce()
        optimizer.step()
    for weight, sparse in shoal.Fleet(SIZE, timeout=20.0).run(run):
        assert sparse
        assert torch.allclose(weight, table.weight, rtol=0, atol=1e-6)


def test_a_mean_of_sparse_gradients_is_sparse_on_agents_without_one() -> None:
    """Otherwise SparseAdam refuses its step on them only, and the models differ."""

    def run() -> list[Tensor]:
        hvd.init()
        table, rank = deepcopy(TABLE), hvd.rank()
        optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(table.parameters(), lr=0.5))
        weights = []
        for step in range(4):  # the one with a gradient is rank 0, then rank 1, then all, then none
            optimizer.zero_grad()
            if step in (rank, 2):
                table(torch.tensor([rank, 3])).sum().backward()
            optimizer.step()
            weights.append(table.weight.detach().clone())
        return weights

    first, *others = shoal.Fleet(SIZE, timeout=20.0).run(run)
    assert all(torch.equal(one, remote) for other in others for one, remote in zip(first, other, strict=True))
    assert all((after[3] < before[3]).all() for before, after in pairwise(first[:3]))


def test_an_agent_outside_its_process_set_steps_alone() -> None:
    def run() -> Tensor:
        pair = hvd.ProcessSet([0, 2])
        hvd.init(process_sets=[pair])
        model = deepcopy(MODEL)
        optimizer = made(model, process_set=pair)
        loss_of(model, 0).backward()
        optimizer.step()
        return (flat(MODEL) - flat(model)) / LR

    own = [gradient(deepcopy(MODEL), flat(MODEL), rank, 0) for rank in range(SIZE)]
    expected = [(own[0] + own[2]) / 2, own[1], (own[0] + own[2]) / 2]
    for result, right in zip(shoal.Fleet(SIZE, timeout=20.0).run(run), expected, strict=True):
        assert torch.allclose(result, right, rtol=0, atol=1e-12)


def test_calls_that_would_lose_gradients_raise() -> None:
    def run() -> None:
        hvd.init()
        model = deepcopy(MODEL)
        optimizer = made(model)
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match=r"zero_grad\(\) between backward\(\) and step\(\)"):
            optimizer.zero_grad()
        with (
            pytest.raises(RuntimeError, match=r"step\(\) inside skip_synchronize\(\): the gradients are on their way"),
            optimizer.skip_synchronize(),
        ):
            optimizer.step()
        with pytest.raises(RuntimeError, match="call it between step"):
            optimizer.set_backward_passes_per_step(3)
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        loss_of(model, 1).backward()
        with pytest.raises(RuntimeError, match="got a gradient from 2 backward passes before step"):
            optimizer.step()
        optimizer.step()

    shoal.Fleet(2, timeout=20.0).run(run)


def test_models_that_differ_are_detected_by_the_constructor() -> None:
    def run() -> None:
        hvd.init()
        made(torch.nn.Linear(2, 1 + hvd.rank()))

    with pytest.raises(shoal.Mismatch, match=r"the models differ: rank . has the parameter weight"):
        shoal.Fleet(2, timeout=20.0).run(run)


def test_invalid_calls_are_refused() -> None:
    hvd.init()
    try:
        model = torch.nn.Linear(2, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for message, options in {
            "op=Adasum weighs gradients": {"op": hvd.Adasum},
            "op=MAX; gradients are averaged or added up": {"op": hvd.Max},
            "gradient_predivide_factor=2.0; it is a positive number": {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
            "lacks 1 that the optimizer has, first parameter 1": {"named_parameters": [("w", model.weight)]},
            "has 'w' twice": {"named_parameters": [("w", model.weight), ("w", model.bias)]},
            "are pairs of a name and a parameter": {"named_parameters": [model.weight, model.bias]},
            "leave num_groups out": {"num_groups": 1, "groups": 2},
            "groups=-1; it is a number of groups": {"groups": -1},
        }.items():
            with pytest.raises(ValueError, match=message):
                hvd.DistributedOptimizer(sgd, **options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="LBFGS searches along a line"):
            hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))
        with pytest.raises(TypeError, match="an optimizer of torch is wanted"):
            hvd.DistributedOptimizer(model)  # type: ignore[arg-type]
        assert type(sgd) is torch.optim.SGD
        hvd.DistributedOptimizer(sgd)
        with pytest.raises(ValueError, match="is distributed already"):
            hvd.DistributedOptimizer(sgd)
        for copied in (deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="a distributed optimizer cannot be pickled or copied"):
                copied(sgd)
        model(torch.ones(1, 2)).sum().backward()
        sgd.step()  # of one agent: as ever
    finally:
        hvd.shutdown()


def test_a_second_backward_pass_fails_one_step_only() -> None:
    def run() -> list[str]:
        hvd.init()
        model = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(model.weight, 1.0)
        torch.nn.init.constant_(model.bias, 0.0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
        outcomes = []
        for number in range(5):
            optimizer.zero_grad()
            try:
                for _ in range(1 + (number == 1)):
                    model(torch.ones(2)).sum().backward()
                optimizer.step()
                outcomes.append("ok")
            except RuntimeError as error:
                outcomes.append(str(error))
        return outcomes

    for outcomes in shoal.Fleet(2).run(run):
        assert [one for one in outcomes if one != "ok"] == [outcomes[1]], outcomes
        assert "backward passes" in outcomes[1]


def test_half_precision_beside_integers_in_a_group_has_a_finite_mean() -> None:
    def run() -> tuple[list[float], list[int], torch.dtype]:
        hvd.init()
        half, whole = torch.full((2,), 60000.0, dtype=torch.float16), torch.tensor([1 + 2 * hvd.rank()])
        first, second = hvd.grouped_allreduce([half, whole], op=hvd.Average)
        return first.tolist(), second.tolist(), first.dtype

    assert shoal.Fleet(2).run(run) == [([60000.0, 60000.0], [2], torch.float16)] * 2
