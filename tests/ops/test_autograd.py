"""Gradients through :mod:`shoal.autograd` are derivatives of the sum of all agents' losses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
import shoal.autograd
from shoal.ops import arguments

Fleets = Callable[..., shoal.Fleet]
Operation = Callable[[Tensor], Tensor]
SIZE = 4
STEP = 1e-5


def neighbors(ranks: Any, weight: float) -> dict[int, float]:
    return {(shoal.rank() + rank) % SIZE: weight + 0.1 * shoal.rank() for rank in ranks}


def directed() -> None:
    """Rank i averages rank i - 1 and rank i - 2, with weights that tell every edge."""
    edges = [(j, (j + hop) % SIZE, 0.2 + 0.05 * j + 0.1 * hop) for j in range(SIZE) for hop in (1, 2)]
    graph = shoal.topology.FullyConnectedGraph(SIZE)
    graph.clear_edges()
    graph.add_weighted_edges_from([*edges, *((i, i, 0.3 + 0.1 * i) for i in range(SIZE))])
    shoal.set_topology(graph, is_weighted=True)


def static(x: Tensor, **how: Any) -> Tensor:
    directed()
    return shoal.autograd.neighbor_allreduce(x, **how)


MINE = {"self_weight": 0.6}
OPERATIONS: dict[str, Operation] = {
    "allreduce": lambda x: shoal.autograd.allreduce(x),
    "allreduce, sum": lambda x: shoal.autograd.allreduce(x, op="sum", name="total"),
    "allreduce, group": lambda x: shoal.autograd.allreduce(x, group=[shoal.rank() % 2, shoal.rank() % 2 + 2]),
    "allgather": lambda x: shoal.autograd.allgather(x),
    "allgather, uneven": lambda x: shoal.autograd.allgather(x[: shoal.rank()], "rows"),
    "allgather, group": lambda x: shoal.autograd.allgather(x, group=[shoal.rank() % 2, shoal.rank() % 2 + 2]),
    "broadcast": lambda x: shoal.autograd.broadcast(x, 2),
    "broadcast, group": lambda x: (
        shoal.autograd.broadcast(x, shoal.rank() // 2 * 2, group=[0, 1])
        if shoal.rank() < 2
        else shoal.autograd.broadcast(x, 3, "other", group=[2, 3])
    ),
    "static": lambda x: shoal.autograd.neighbor_allreduce(x),
    "static, weighted and directed": static,
    "static, group": lambda x: static(x, group=[0, 1, 3]) if shoal.rank() != 2 else x,
    "pull": lambda x: shoal.autograd.neighbor_allreduce(x, **MINE, src_weights=neighbors([1], 0.4)),
    "push": lambda x: shoal.autograd.neighbor_allreduce(x, **MINE, dst_weights=neighbors([1, 2], 0.2), name="p"),
    "push-pull": lambda x: shoal.autograd.neighbor_allreduce(
        x, **MINE, src_weights=neighbors([3, 2], 0.3), dst_weights=neighbors([1, 2], 0.5)
    ),
    "pull within": lambda x: static(
        x, **MINE, src_weights=neighbors([3] if shoal.rank() else [2], 0.4), enable_topo_check=False
    ),
    "push within": lambda x: static(x, **MINE, dst_weights=neighbors([1], 0.4), enable_topo_check=False),
    "push-pull within": lambda x: static(
        x, **MINE, src_weights=neighbors([3], 0.4), dst_weights=neighbors([1], 0.7), enable_topo_check=False
    ),
}


def x_of(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def loss_of(y: Tensor) -> Tensor:
    """Neither linear nor the same on two agents."""
    weights = torch.arange(1.0, y.numel() + 1, dtype=torch.float64) + shoal.rank()
    z = torch.view_as_real(y).sum(-1) if y.is_complex() else y
    return (weights * (z + 0.1 * shoal.rank()).sin()).sum()


def derivative(total: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Of the sum of all agents' ``total(x)`` with respect to this agent's x, by central differences."""
    result = torch.zeros_like(x)
    for rank in range(SIZE):
        for at in range(x.numel()):
            for unit in (1, 1j) if x.is_complex() else (1,):
                sums = []
                for sign in (1, -1):
                    moved = x.detach().clone()
                    if rank == shoal.rank():
                        moved[at] += sign * STEP * unit
                    moved.requires_grad_()
                    sums.append(shoal.allreduce(total(moved).detach(), op="sum"))
                if rank == shoal.rank():
                    result[at] += unit * (sums[0] - sums[1]) / (2 * STEP)
    return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("what", OPERATIONS)
def test_a_gradient_is_the_derivative_of_the_sum_of_all_losses(what: str, dtype: torch.dtype) -> None:
    def run() -> None:
        operation = OPERATIONS[what]
        x = x_of(shoal.rank(), dtype).requires_grad_()
        loss_of(operation(x)).backward()
        gradient = torch.zeros_like(x) if x.grad is None else x.grad
        expected = derivative(lambda moved: loss_of(operation(moved)), x)
        assert torch.allclose(gradient, expected, rtol=0, atol=1e-7), (gradient, expected)

    shoal.Fleet(SIZE, timeout=20.0).run(run)


@pytest.mark.parametrize("what", OPERATIONS)
def test_a_second_derivative_is_that_of_the_sum_of_all_losses(what: str) -> None:
    def run() -> None:
        operation = OPERATIONS[what]

        def slope(x: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(loss_of(operation(x)), x, create_graph=True)
            return (gradient * x_of(10 + shoal.rank())).square().sum()

        x = x_of(shoal.rank()).requires_grad_()
        (second,) = torch.autograd.grad(slope(x), x)
        assert torch.allclose(second, derivative(slope, x), rtol=0, atol=1e-5)

    shoal.Fleet(SIZE, timeout=20.0).run(run)


def test_results_equal_the_plain_operations_over_every_transport(fleet: Fleets) -> None:
    def run() -> list[Tensor]:
        x = x_of(shoal.rank()).requires_grad_()
        directed()
        pairs = [
            (shoal.allreduce(x.detach()), shoal.autograd.allreduce(x)),
            (shoal.allgather(x.detach()), shoal.autograd.allgather(x)),
            (shoal.broadcast(x.detach(), 1), shoal.autograd.broadcast(x, 1)),
            (shoal.neighbor_allreduce(x.detach()), shoal.autograd.neighbor_allreduce(x)),
        ]
        assert all(torch.equal(plain, result) for plain, result in pairs)
        sum(loss_of(result) for _, result in pairs).backward()  # type: ignore[union-attr]
        assert x.grad is not None
        return [x.grad]

    gradients = fleet(SIZE).run(run)
    assert [result[0].tolist() for result in gradients] == [result[0].tolist() for result in shoal.Fleet(SIZE).run(run)]


def test_a_tensor_without_a_gradient_takes_part_in_the_backward_pass() -> None:
    """As the tensors of agents other than the root do, of which only shape and dtype count."""

    def run() -> list[float] | None:
        x = torch.ones(2, requires_grad=shoal.rank() == 1)
        shoal.autograd.broadcast(x, 1).sum().backward()
        assert not shoal.autograd.allreduce(torch.ones(2, dtype=torch.int64), op="sum").requires_grad
        with torch.no_grad():
            assert not shoal.autograd.allreduce(x).requires_grad
        return None if x.grad is None else x.grad.tolist()

    assert shoal.Fleet(3, timeout=20.0).run(run) == [None, [3.0, 3.0], None]


def test_a_gradient_of_sixteen_bits_is_rounded_once() -> None:
    def run() -> float:
        x = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
        result = shoal.autograd.allgather(x)
        (result * (256.0 if shoal.rank() == 0 else 1.0)).sum().backward()
        assert x.grad is not None
        return float(x.grad)

    assert shoal.Fleet(3, timeout=20.0).run(run) == [258.0] * 3  # one by one: 256 + 1 = 256 in bfloat16


def test_nonlinear_operations_are_refused_at_once() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="op='max' is not linear, so no gradient flows through it"):
            shoal.autograd.allreduce(torch.ones(2), op="max")

    shoal.Fleet(1).run(run)


PLAIN: dict[str, Callable[[Tensor], object]] = {
    "allreduce": shoal.allreduce,
    "allgather": shoal.allgather,
    "broadcast": lambda x: shoal.broadcast(x, 0),
    "neighbor_allreduce": shoal.neighbor_allreduce,
    "neighbor_allgather": shoal.neighbor_allgather,
    "hierarchical_neighbor_allreduce": shoal.bluefog.hierarchical_neighbor_allreduce,
    "grouped_allreduce": lambda x: shoal.grouped_allreduce([x]),
    "grouped_neighbor_allreduce": lambda x: shoal.grouped_neighbor_allreduce([x]),
    "grouped_broadcast": lambda x: shoal.grouped_broadcast([x], 0),
    "grouped_allgather": lambda x: shoal.grouped_allgather([x]),
}


@pytest.mark.parametrize("what", PLAIN)
def test_a_plain_operation_warns_once_that_its_result_is_detached(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_WARNED", set())

    def run() -> list[warnings.WarningMessage]:
        x = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            PLAIN[what](x)
        PLAIN[what](x.detach())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            PLAIN[what](x * 2)
            PLAIN[what](x * 2)
        return caught

    (caught,) = shoal.Fleet(1).run(run)
    assert [one.filename for one in caught] == [__file__]  # the line of the script
    message = str(caught[0].message)
    assert message.startswith(f"{what}: the tensor requires grad, and no gradient flows back from the result; ")
    assert message.endswith("give tensor.detach()")
    named = what in ("allreduce", "allgather", "broadcast", "neighbor_allreduce")
    assert (f"take shoal.autograd.{what} for a gradient" in message) == named


def test_parameters_change_in_place_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_WARNED", set())

    def run() -> None:
        parameter = torch.nn.Parameter(torch.full((2,), float(shoal.rank())))
        shoal.bluefog.allreduce_(parameter)
        shoal.bluefog.broadcast_(parameter, 0)
        shoal.broadcast_parameters([("p", parameter)], 0)
        assert parameter.tolist() == [0.5, 0.5]

    shoal.Fleet(2, timeout=20.0).run(run)

    def run_on_a_result() -> None:
        with pytest.warns(UserWarning, match="allreduce: the tensor requires grad"):
            shoal.bluefog.allreduce_(torch.ones(2, requires_grad=True) * 2)

    shoal.Fleet(1).run(run_on_a_result)
