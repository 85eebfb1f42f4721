"""Horovod's operations on Shoal: what each gives, in place and without waiting, and the way back of gradients."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
import shoal.compat.horovod as hvd
from shoal.compat.horovod import compression, mpi_ops

Fleets = Callable[..., shoal.Fleet]
SIZE = 3


def x_of(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.rand(shape or (4,), generator=generator, dtype=torch.float64) * 8 - 3).to(dtype)


ALL = torch.stack([x_of(rank) for rank in range(SIZE)])
REDUCED = {
    "AVERAGE": ALL.mean(0),
    "SUM": ALL.sum(0),
    "MIN": ALL.min(0)[0],
    "MAX": ALL.max(0)[0],
    "PRODUCT": ALL.prod(0),
}


def test_reductions_in_all_forms(fleet: Fleets) -> None:
    def run() -> dict[str, list[Tensor]]:
        hvd.init()
        x, results = x_of(hvd.rank()), {}
        for name in REDUCED:
            op = hvd.ReduceOp[name]
            inplace, later, grouped = x.clone(), x.clone(), [x.clone(), x.clone()]
            hvd.allreduce_(inplace, op=op)
            handle = hvd.allreduce_async_(later, op=op, name=f"{name} in place")
            assert hvd.synchronize(handle) is later
            assert hvd.poll(handle)
            assert hvd.grouped_allreduce_(grouped, op=op)[1] is grouped[1]
            results[name] = [
                hvd.allreduce(x, op=op),
                hvd.synchronize(hvd.allreduce_async(x, op=op)),
                inplace,
                later,
                grouped[1],
                hvd.grouped_allreduce([x, x], op=op)[0],
                hvd.synchronize(hvd.grouped_allreduce_async([x], op=op))[0],
            ]
            handle = hvd.grouped_allreduce_async_(grouped, op=hvd.Max)
            assert hvd.synchronize(handle)[0] is grouped[0]
            assert torch.equal(x, x_of(hvd.rank()))
        return results

    for result in fleet(SIZE).run(run):
        for name, expected in REDUCED.items():
            for one in result[name]:
                assert torch.allclose(one, expected, rtol=0, atol=1e-14)


def test_lists_of_tensors_may_be_generators() -> None:
    calls = [getattr(hvd, name) for name in CALLS if name.startswith("grouped")]

    def run() -> None:
        hvd.init()
        for call in calls:
            results, inplace = [], call.__name__.endswith("_")
            for kind in (list, iter):
                xs = [torch.arange(3.0) + hvd.rank(), torch.arange(2.0) - hvd.rank()]
                found = call(kind(xs))
                found = hvd.synchronize(found) if "async" in call.__name__ else found
                results.append([one.tolist() for one in found + (xs if inplace else [])])
            assert results[0] == results[1], call.__name__

    shoal.Fleet(2, timeout=20.0).run(run)


def test_both_ways_to_request_a_sum_and_factors() -> None:
    def run() -> list[Tensor]:
        hvd.init()
        x, full = x_of(hvd.rank()), torch.tensor([hvd.rank() + 2, -hvd.rank() - 2])
        inplace = x.clone()
        hvd.allreduce_(inplace, prescale_factor=0.5, postscale_factor=3.0)
        return [
            hvd.allreduce(x, average=False),
            hvd.allreduce(x, average=True),
            hvd.allreduce(x, op=hvd.Max, prescale_factor=-2.0, postscale_factor=0.25),
            inplace,
            hvd.grouped_allreduce([x], op=hvd.Sum, prescale_factor=2.0)[0],
            hvd.allreduce(full).double(),  # 9 / 3, and behind the point nothing: see below
            hvd.allreduce(torch.tensor([4, -4]) if hvd.rank() else torch.tensor([3, -3])).double(),
            hvd.allreduce(torch.tensor([5, 5]), op=hvd.Sum, prescale_factor=0.5).double(),
        ]

    expected = [
        ALL.sum(0),
        ALL.mean(0),
        (-2 * ALL).max(0)[0] / 4,
        ALL.mean(0) * 1.5,
        2 * ALL.sum(0),
        torch.tensor([3.0, -3.0]),
        torch.tensor([3.0, -3.0]),  # 11 / 3
        torch.tensor([6.0, 6.0]),  # 2 + 2 + 2
    ]
    for result in shoal.Fleet(SIZE, timeout=20.0).run(run):
        for one, right in zip(result, expected, strict=True):
            assert torch.allclose(one, right.double(), rtol=0, atol=1e-14)


def test_bool_tensors_have_no_average_and_no_factors() -> None:
    """Min, Max, Sum and Product of them are: all, any, any, all."""

    def run() -> list[list[bool]]:
        hvd.init()
        x = torch.tensor([True, False, hvd.rank() == 0])
        for name in CALLS:
            if "reduce" in name:
                given = [x] if name.startswith("grouped") else x
                with pytest.raises(TypeError, match=rf"^{name}: a bool tensor has no average"):
                    getattr(hvd, name)(given)
                with pytest.raises(TypeError, match=rf"^{name}: .* no factor"):
                    getattr(hvd, name)(given, op=hvd.Max, prescale_factor=0.5)
        return [hvd.allreduce(x, op=op).tolist() for op in (hvd.Min, hvd.Max, hvd.Sum, hvd.Product)]

    every, some = [True, False, False], [True, False, True]
    assert shoal.Fleet(2, timeout=20.0).run(run) == [[every, some, some, every]] * 2


def test_sixteen_bit_tensors_are_sent() -> None:
    def run() -> tuple[Tensor, Tensor, int]:
        hvd.init()
        x = x_of(hvd.rank(), 3000, dtype=torch.float32)
        before = shoal.observability.bytes_sent()
        results = hvd.allreduce(x, compression=hvd.Compression.fp16, name="x")
        sent = shoal.observability.bytes_sent() - before
        assert hvd.allreduce(torch.tensor([hvd.rank()]), compression=hvd.Compression.fp16, op=hvd.Sum).tolist() == [3]
        return results, hvd.allreduce(x, name="x"), sent

    results = shoal.Fleet(SIZE, timeout=20.0).run(run)
    for result, exact, _ in results:
        assert result.dtype == torch.float32
        assert 0 < (result - exact).abs().max() < 5e-3
    assert sum(sent for *_, sent in results) == 2 * 2 * 2 * 3000  # to the first, and back


def test_gathers_broadcasts_and_exchanges(fleet: Fleets) -> None:
    def run() -> list[Any]:
        hvd.init()
        rank = hvd.rank()
        x = torch.full((rank + 1, 2), float(rank))
        inplace, later = x_of(rank), x_of(rank)
        assert hvd.broadcast_(inplace, 2) is inplace
        handle = hvd.broadcast_async_(later, 1, name="later")
        assert hvd.synchronize(handle) is later
        rows = torch.arange(6) + 10 * rank
        gathered, received = hvd.alltoall(rows, splits=torch.tensor([1, 2, 3]))
        with pytest.raises(ValueError, match="4 rows are not equally many for each of 3 agents; give splits"):
            hvd.alltoall(torch.arange(4))
        with pytest.raises(ValueError, match=r"splits=\[1, 2\]: it takes 3 numbers"):
            hvd.alltoall(torch.arange(3), splits=[1, 2])
        assert received.dtype == torch.int32
        return [
            hvd.allgather(x)[:, 0].tolist(),
            hvd.synchronize(hvd.allgather_async(x, name="x"))[:, 1].tolist(),
            [one.view(-1).tolist() for one in hvd.grouped_allgather([x[:1], torch.tensor([rank])])],
            hvd.synchronize(hvd.grouped_allgather_async([torch.tensor([rank])]))[0].tolist(),
            torch.equal(inplace, x_of(2)) and torch.equal(later, x_of(1)),
            torch.equal(hvd.broadcast(x_of(rank), 0), x_of(0)),
            torch.equal(hvd.synchronize(hvd.broadcast_async(x_of(rank), 0)), x_of(0)),
            gathered.tolist(),
            received.tolist(),
            hvd.alltoall(rows).tolist(),
            hvd.synchronize(hvd.alltoall_async(rows, name="y")).tolist(),
            hvd.synchronize(hvd.alltoall_async(rows, [1, 2, 3], name="z"))[1].tolist(),
            hvd.reducescatter(torch.arange(5.0) + rank).tolist(),
            hvd.synchronize(hvd.reducescatter_async(torch.arange(5.0), op=hvd.Sum)).tolist(),
            [one.tolist() for one in hvd.grouped_reducescatter([torch.arange(3.0)], op=hvd.Max)],
            hvd.synchronize(hvd.grouped_reducescatter_async([torch.arange(3.0)]))[0].tolist(),
        ]

    begins, ends = [0, 1, 3], [1, 3, 6]
    for rank, result in enumerate(fleet(SIZE).run(run)):
        share = [[0.0, 1.0], [2.0, 3.0], [4.0]][rank]
        assert result == [
            [0.0, 1.0, 1.0, 2.0, 2.0, 2.0],
            [0.0, 1.0, 1.0, 2.0, 2.0, 2.0],
            [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0], [0, 1, 2]],
            [0, 1, 2],
            True,
            True,
            True,
            [10 * other + at for other in range(SIZE) for at in range(begins[rank], ends[rank])],
            [rank + 1] * SIZE,
            [10 * other + at for other in range(SIZE) for at in (2 * rank, 2 * rank + 1)],
            [10 * other + at for other in range(SIZE) for at in (2 * rank, 2 * rank + 1)],
            [rank + 1] * SIZE,
            [one + 1.0 for one in share],
            [3 * one for one in share],
            [[float(rank)]],
            [float(rank)],
        ]


FACTORS = {
    "allreduce": 1.0,
    "grouped_allreduce": 1.0,
    "allgather": 1 / SIZE,
    "grouped_allgather": 1 / SIZE,
    "broadcast": 1 / SIZE,
    "alltoall": 1.0,
    "reducescatter": float(SIZE),
    "reducescatter of a sum": float(SIZE),
    "grouped_reducescatter": float(SIZE),
}
"""What Horovod's gradient is, as a multiple of the derivative of the sum of all agents' losses."""


def by_one_process(what: str, xs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """The gradients of the sum of all agents' losses, each a product with its weights."""
    total = torch.stack(xs).sum(0) if what not in ("allgather", "grouped_allgather") else torch.zeros(())
    loss = torch.zeros((), dtype=torch.float64)
    for rank, weight in enumerate(weights):
        if what in ("allreduce", "grouped_allreduce"):
            loss = loss + (1.5 * total / SIZE * weight).sum()
        elif what == "reducescatter of a sum":
            loss = loss + (2.0 * total.tensor_split(SIZE)[rank] * weight).sum()
        elif what in ("reducescatter", "grouped_reducescatter"):
            loss = loss + (2.0 * (total / SIZE).tensor_split(SIZE)[rank] * weight).sum()
        elif what in ("allgather", "grouped_allgather"):
            loss = loss + (torch.cat(xs) * weight).sum()
        elif what == "broadcast":
            loss = loss + (xs[1] * weight).sum()
        else:
            loss = loss + (torch.cat([x.tensor_split([1, 2])[rank] for x in xs]) * weight).sum()
    loss.backward()
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in xs]


def by_all(what: str) -> tuple[Tensor, Tensor]:
    """An agent's gradient, and the weight of its loss."""
    hvd.init()
    rank = hvd.rank()
    x = x_of(rank, rank + 2 if what.endswith("allgather") else 5).requires_grad_()
    result: Any = {
        "allreduce": lambda: hvd.allreduce(x, prescale_factor=0.5, postscale_factor=3.0),
        "grouped_allreduce": lambda: hvd.grouped_allreduce([x], prescale_factor=1.5, name="g")[0],
        "reducescatter": lambda: hvd.reducescatter(x, postscale_factor=2.0),
        "reducescatter of a sum": lambda: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0),
        "grouped_reducescatter": lambda: hvd.grouped_reducescatter([x], postscale_factor=2.0)[0],
        "allgather": lambda: hvd.allgather(x, name="some"),
        "grouped_allgather": lambda: hvd.grouped_allgather([x])[0],
        "broadcast": lambda: hvd.broadcast(x, 1),
        "alltoall": lambda: hvd.alltoall(x, splits=[1, 1, 3])[0],
    }[what]()
    weight = x_of(100 + rank, *result.shape)
    (result * weight).sum().backward()
    assert x.grad is not None
    return x.grad, weight


@pytest.mark.parametrize("what", FACTORS)
def test_gradients_are_horovods(what: str) -> None:
    results = shoal.Fleet(SIZE, timeout=20.0).run(by_all, what)
    sizes = [rank + 2 if what.endswith("allgather") else 5 for rank in range(SIZE)]
    xs = [x_of(rank, size).requires_grad_() for rank, size in enumerate(sizes)]
    derivatives = by_one_process(what, xs, [weight for _, weight in results])
    for (gradient, _), derivative in zip(results, derivatives, strict=True):
        assert torch.allclose(gradient, FACTORS[what] * derivative, rtol=0, atol=1e-13)


def test_gradients_of_process_sets_have_the_factors_of_the_set() -> None:
    """As in Horovod's tests: ones, and the number of the set's agents for a scattered sum."""

    def run() -> list[list[float]]:
        odd, even = hvd.ProcessSet([1, 3, 4]), hvd.ProcessSet([0, 2])
        hvd.init(process_sets=[odd, even])
        own = odd if odd.included() else even
        root, results = own.ranks[1], []
        for call in (
            lambda x: hvd.allreduce(x, process_set=own),
            lambda x: hvd.allgather(x, process_set=own),
            lambda x: hvd.grouped_allgather([x], process_set=own)[0],
            lambda x: hvd.broadcast(x, root, process_set=own),
            lambda x: hvd.reducescatter(x, op=hvd.Sum, process_set=own),
            lambda x: hvd.grouped_reducescatter([x], op=hvd.Sum, process_set=own)[0],
            lambda x: hvd.reducescatter(x, op=hvd.Average, process_set=own),
        ):
            x = torch.ones(6, requires_grad=True)
            call(x).sum().backward()
            assert x.grad is not None
            results.append(x.grad.unique().tolist())
        return results

    for rank, result in enumerate(shoal.Fleet(5, timeout=20.0).run(run)):
        count = 3.0 if rank in (1, 3, 4) else 2.0
        assert result == [[1.0], [1.0], [1.0], [float(rank in (2, 3))], [count], [count], [1.0]]


def test_nonlinear_operations_have_no_gradient() -> None:
    def run() -> None:
        hvd.init()
        result = hvd.allreduce(torch.ones(2, requires_grad=True), op=hvd.Max)
        with pytest.raises(ValueError, match=r"through hvd.Average and hvd.Sum, and not through max"):
            result.sum().backward()

    shoal.Fleet(2, timeout=20.0).run(run)


def test_invalid_calls_are_refused() -> None:
    hvd.init()
    try:
        with pytest.raises(ValueError, match="average=True and op=Sum are both given"):
            hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum)
        with pytest.raises(ValueError, match=r"op=9; it may be hvd.Average"):
            hvd.allreduce(torch.ones(2), op=9)
        with pytest.raises(ValueError, match="op=Adasum weighs gradients by the angles"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
        with pytest.raises(TypeError, match="process_set must be a ProcessSet, not 1"):
            hvd.allreduce(torch.ones(2), process_set=1)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a list of tensors is wanted"):
            hvd.grouped_allreduce(torch.ones(2))  # type: ignore[arg-type]
        for compression in (hvd.Compression.none, hvd.Compression.fp16):
            with pytest.raises(TypeError, match=r"^allreduce takes a torch.Tensor, not list"):
                hvd.allreduce([1.0], compression=compression)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match=r"^grouped_allreduce takes a torch.Tensor, not float"):
                hvd.grouped_allreduce([1.0], compression=compression)  # type: ignore[list-item]
        with pytest.raises(ValueError, match="a 0-dimensional tensor has none"):
            hvd.reducescatter(torch.tensor(1.0))
        for call in (hvd.reducescatter, hvd.reducescatter_async):
            with pytest.raises(RuntimeError, match=rf"{call.__name__}: op=Adasum is no reduction"):  # as in Horovod
                call(torch.ones(2), op=hvd.Adasum)
        for kind in (ValueError, hvd.HorovodInternalError):
            with pytest.raises(kind, match=r"alltoall: splits must be an int, got 1.0"):
                hvd.alltoall(torch.ones(1), torch.ones(1))
            with pytest.raises(kind, match=r"alltoall_async: .*splits=\[2\]"):
                hvd.alltoall_async(torch.ones(1), [2])
        with pytest.raises(TypeError, match=r"it takes a tensor of layout torch.sparse_coo"):
            hvd.sparse_allreduce_async(torch.ones(1), "x", hvd.Sum)
        with pytest.raises(ValueError, match="leave comm out"):
            hvd.init(comm=[0])  # type: ignore[arg-type]
        assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
        assert hvd.join() == 0
    finally:
        hvd.shutdown()
    with pytest.raises(shoal.NotInitialized, match=r"hvd\.init"):
        shoal.Fleet(1).run(hvd.join)


def test_ranks_sizes_and_build_flags() -> None:
    def run() -> list[object]:
        assert hvd.is_initialized()
        hvd.init()
        return [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]

    results = shoal.Fleet(5, agents_per_machine=2).run(run)
    assert results == [
        [0, 5, 0, 2, 0, 3],
        [1, 5, 1, 2, 0, 2],
        [2, 5, 0, 2, 1, 3],
        [3, 5, 1, 2, 1, 2],
        [4, 5, 0, 1, 2, 3],
    ]
    assert shoal.Fleet(2).run(lambda: (hvd.is_homogeneous(), hvd.gloo_enabled())) == [(True, False)] * 2
    assert hvd.gloo_built()
    built = (hvd.mpi_built, hvd.mpi_enabled, hvd.mpi_threads_supported, hvd.nccl_built, hvd.ddl_built, hvd.ccl_built)
    assert not any(one() for one in (*built, hvd.cuda_built, hvd.rocm_built))
    assert not hvd.is_initialized()


def test_process_sets() -> None:
    def run() -> list[Any]:
        odd = hvd.ProcessSet([3, 1])
        hvd.init(process_sets=[odd])
        even, rank = hvd.add_process_set([0, 2]), hvd.rank()
        own = odd if rank % 2 else even
        assert repr(odd) == "ProcessSet(1: ranks [1, 3])"
        assert even.process_set_id == 2
        assert (odd.included(), own.rank(), odd.rank() if not rank % 2 else -1) == (rank % 2 == 1, rank // 2, -1)
        x = torch.full((2,), float(rank), requires_grad=True)
        total = hvd.allreduce(x, op=hvd.Sum, process_set=own)
        (total * (rank + 1)).sum().backward()
        assert x.grad is not None
        results = [
            total.tolist(),
            x.grad.tolist(),
            hvd.allgather(torch.tensor([rank]), process_set=own).tolist(),
            hvd.broadcast(torch.tensor([rank]), 2 + rank % 2, process_set=own).tolist(),  # a rank of all agents'
            hvd.alltoall(torch.tensor([rank, 10 + rank]), process_set=own).tolist(),
            hvd.reducescatter(torch.full((2,), float(rank)), process_set=own).tolist(),
            hvd.broadcast_object({"from": rank}, rank % 2, process_set=own),
            hvd.allgather_object((rank, "x"), process_set=own),
        ]
        hvd.barrier(process_set=own)
        with pytest.raises(ValueError, match="this agent, which is none of them"):
            hvd.allreduce(torch.ones(1), process_set=even if rank % 2 else odd)
        with pytest.raises(ValueError, match=r"process set 1 has the ranks \[1, 3\] already"):
            hvd.add_process_set([1, 3])
        with pytest.raises(ValueError, match=r"are all agents; take hvd.global_process_set"):
            hvd.add_process_set(range(4))
        with pytest.raises(ValueError, match=r"there are no ranks \[4\]; there are 4 agents"):
            hvd.add_process_set([0, 4])
        assert hvd.remove_process_set(odd)
        assert not hvd.remove_process_set(odd)
        assert not hvd.remove_process_set(hvd.global_process_set)
        with pytest.raises(ValueError, match=r"ranks \[1, 3\]\) is not in use"):
            hvd.allreduce(torch.ones(1), process_set=odd)
        with pytest.raises(shoal.Mismatch, match=r"rank . names the ranks \[0, .\], and rank . \[0, .\]"):
            hvd.add_process_set([0, 1 + rank % 2])
        assert hvd.global_process_set.ranks == [0, 1, 2, 3]
        return results

    for rank, result in enumerate(shoal.Fleet(4, timeout=20.0).run(run)):
        first, second = rank % 2, rank % 2 + 2
        assert result == [
            [float(first + second)] * 2,
            [float(first + second + 2)] * 2,
            [first, second],
            [second],
            [10 * (rank // 2) + first, 10 * (rank // 2) + second],
            [(first + second) / 2],
            {"from": first},
            [(first, "x"), (second, "x")],
        ]


def test_parameters_optimizers_and_objects() -> None:
    def run() -> list[Any]:
        hvd.init()
        rank = hvd.rank()
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
        if rank == 1:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        with pytest.raises(TypeError, match="plain data and tensors, and value is a"):
            hvd.allgather_object(object())  # type: ignore[type-var]
        moment = optimizer.state[model.weight]["exp_avg"].tolist()
        return [model.weight.tolist(), optimizer.param_groups[0]["lr"], moment, hvd.allgather_object([rank] * rank)]

    results = shoal.Fleet(3, timeout=20.0).run(run)
    assert results[0] == results[1] == results[2]
    assert results[0][1] == 0.2
    assert results[0][3] == [[], [1], [2, 2]]


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (2, 3, 4, 5)], ids=["1d", "of sequences", "of pictures"])
def test_batch_norm_is_that_of_the_joined_batch(shape: tuple[int, ...]) -> None:
    """With batches of different sizes, two steps, and then an evaluation."""

    def batch(rank: int, step: int) -> Tensor:
        return x_of(10 * step + rank, shape[0] + rank, *shape[1:])

    def run() -> list[Tensor]:
        hvd.init()
        norm = hvd.SyncBatchNorm(3, momentum=0.3).double()
        torch.nn.init.constant_(norm.weight, 1.5)
        results = []
        for step in range(2):
            x = batch(hvd.rank(), step).requires_grad_()
            y = norm(x)
            (y**3).sum().backward()
            assert x.grad is not None
            results += [y.detach(), x.grad]
        assert norm.weight.grad is not None
        assert norm.bias.grad is not None
        assert norm.running_mean is not None
        assert norm.running_var is not None
        sums = hvd.grouped_allreduce([norm.weight.grad, norm.bias.grad], op=hvd.Sum)
        norm.eval()
        return [*results, *sums, norm.running_mean, norm.running_var, norm(batch(0, 5)).detach()]

    kinds = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}
    norm = kinds[len(shape)](3, momentum=0.3).double()
    torch.nn.init.constant_(norm.weight, 1.5)
    full = []
    for step in range(2):
        x = torch.cat([batch(rank, step) for rank in range(SIZE)]).requires_grad_()
        y = norm(x)
        (y**3).sum().backward()
        full += [y.detach(), x.grad]
    norm.eval()
    same = [norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var, norm(batch(0, 5)).detach()]
    results = shoal.Fleet(SIZE, timeout=20.0).run(run)
    for number, expected in enumerate(full):
        actual = torch.cat([result[number] for result in results])
        assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-10)  # type: ignore[arg-type]
    for result in results:
        for one, right in zip(result[len(full) :], same, strict=True):
            assert torch.allclose(one, right, rtol=1e-9, atol=1e-10)  # type: ignore[arg-type]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batch_norm_of_sixteen_bits_is_torchs(dtype: torch.dtype, autocast: bool) -> None:
    """Two agents have the same batch, whose joined mean and variance are its own."""
    x = x_of(0, 8, 3, dtype=torch.float32).round().to(dtype)

    def result(norm: torch.nn.Module) -> Tensor:
        torch.nn.init.constant_(norm.weight, 1.25)  # type: ignore[arg-type]
        torch.nn.init.constant_(norm.bias, 0.3)  # type: ignore[arg-type]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found: Tensor = norm(x)
        return found.detach()

    def run() -> Tensor:
        hvd.init()
        return result(hvd.SyncBatchNorm(3))

    for found in shoal.Fleet(2, timeout=20.0).run(run):
        assert found.dtype == dtype
        assert torch.allclose(found, result(torch.nn.BatchNorm1d(3)), rtol=torch.finfo(dtype).eps, atol=0)


def test_batch_norm_of_one_agent_and_with_a_mean_of_all_batches() -> None:
    x = x_of(0, 5, 2)
    own, remote = hvd.SyncBatchNorm(2, momentum=None).double(), torch.nn.BatchNorm1d(2, momentum=None).double()
    for step in range(3):
        assert torch.equal(own(x + step), remote(x + step))
    assert torch.equal(own.running_var, remote.running_var)  # type: ignore[arg-type]

    def run() -> tuple[Tensor, Any]:
        hvd.init()
        norm = hvd.SyncBatchNorm(2, momentum=None, affine=False).double()
        for step in range(3):
            norm(x[2 * hvd.rank() : 2 * hvd.rank() + 2 + hvd.rank()] + step)
        with pytest.raises(ValueError, match="an input of 2 dimensions or more is wanted, not 1"):
            norm(x[0])
        assert norm.running_var is not None
        return norm.running_var, norm.num_batches_tracked

    for variance, count in shoal.Fleet(2, timeout=20.0).run(run):
        assert count == 3
        assert torch.allclose(variance, remote.running_var, rtol=0, atol=1e-14)  # type: ignore[arg-type]


def test_batch_norm_of_a_joined_batch_of_one_is_an_error_on_all() -> None:
    def run() -> None:
        hvd.init()
        norm = hvd.SyncBatchNorm(2)
        with pytest.raises(ValueError, match="more than one value for each channel is wanted, over all 2 agents"):
            norm(torch.ones(hvd.rank(), 2))  # no row, and one row
        norm(torch.ones(1 + hvd.rank(), 2))

    shoal.Fleet(2, timeout=20.0).run(run)


def traced(folder: str) -> None:
    hvd.init()
    hvd.allreduce(torch.ones(2), name="before")
    later = hvd.allreduce_async(torch.ones(50_000), name="in flight")
    hvd.start_timeline(f"{folder}/trace.json")
    with pytest.raises(ValueError, match="is being written already"):
        hvd.start_timeline(f"{folder}/other.json")
    hvd.synchronize(later)
    hvd.allreduce(torch.ones(2), name="inside")
    hvd.stop_timeline()
    hvd.stop_timeline()
    hvd.barrier()  # an agent whose timeline goes on for a moment would write when it receives the other's next message
    hvd.allreduce(torch.ones(2), name="after")


def test_a_timeline_between_start_and_stop(tmp_path: Path) -> None:
    shoal.Fleet(2, timeout=20.0).run(traced, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.json", "trace.rank1.json"]
    for path in tmp_path.iterdir():
        written = json.dumps(json.loads(path.read_text()))
        assert "inside" in written
        assert "before" not in written
        assert "after" not in written


ROOT = dict.fromkeys([name for name in hvd.__all__ if name.startswith("broadcast")], (0,))  # type: ignore[attr-defined]
CALLS = [
    name
    for name in hvd.__all__  # type: ignore[attr-defined]
    if any(word in name for word in ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter"))
    and not any(word in name for word in ("object", "parameters", "state", "sparse"))
]


@pytest.mark.parametrize("name", CALLS)
def test_an_error_names_the_called_operation(name: str) -> None:
    def run() -> None:
        hvd.init()
        x = torch.eye(2).to_sparse()
        with pytest.raises(TypeError, match=rf"^{name} takes "):
            getattr(hvd, name)([x] if name.startswith("grouped") else x, *ROOT.get(name, ()))

    shoal.Fleet(1).run(run)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_sparse_tensors_are_reduced_wherever_their_entries_lie(op: hvd.ReduceOp) -> None:
    def own_tensor(rank: int) -> Tensor:
        return torch.sparse_coo_tensor(torch.tensor([[rank, 3, 3]]), x_of(rank, 3, 2), (4, 2), check_invariants=True)

    def run() -> list[Tensor]:
        hvd.init()
        handle = hvd.sparse_allreduce_async(own_tensor(hvd.rank()), "table", op)
        assert handle().is_coalesced()
        return [hvd.synchronize(handle).to_dense(), handle().to_dense()]

    total = torch.stack([own_tensor(rank).to_dense() for rank in range(SIZE)]).sum(0)
    for result in shoal.Fleet(SIZE, timeout=20.0).run(run):
        for one in result:
            assert torch.allclose(one, total / (SIZE if op == hvd.Average else 1), rtol=0, atol=1e-14)


def test_sparse_tensors_of_different_shapes_are_a_mismatch() -> None:
    def run() -> None:
        hvd.init()
        rank = hvd.rank()
        x = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (4 + rank,), check_invariants=True)
        handle = hvd.sparse_allreduce_async(x, "x", hvd.Sum)
        with pytest.raises(shoal.Mismatch, match=rf"rank {rank} has a tensor of shape \[{4 + rank}\], and rank"):
            handle.wait()
        hvd.barrier()

    shoal.Fleet(2, timeout=20.0).run(run)


def test_an_error_of_an_operation_is_horovods() -> None:
    def run() -> None:
        hvd.init()
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allreduce(torch.ones(2 + hvd.rank()), name="differs")

    shoal.Fleet(2, timeout=20.0).run(run)


def test_the_modules_that_scripts_import_have_its_names() -> None:
    assert compression.Compression is hvd.Compression
    for name in mpi_ops.__all__:  # type: ignore[attr-defined]
        assert getattr(mpi_ops, name) is getattr(hvd, name)
