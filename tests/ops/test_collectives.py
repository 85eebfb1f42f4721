"""Operations over all agents: allreduce, broadcast, allgather and barrier, bit for bit against plain tensors."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import shoal
from support import TRANSPORTS
from support.reference import reduced, same_bits, same_reduction
from support.samples import ALL_DTYPES, INTEGERS, WEIGHABLE, sample, samples, shapes

Fleets = Callable[..., shoal.Fleet]

REDUCTIONS = {
    "average": WEIGHABLE,
    "sum": ALL_DTYPES,
    "product": ALL_DTYPES,
    "min": tuple(dtype for dtype in ALL_DTYPES if not dtype.is_complex),
    "max": tuple(dtype for dtype in ALL_DTYPES if not dtype.is_complex),
}
SIZES = [1, 2, 3, 4, 5, 8]


@pytest.mark.parametrize("how", REDUCTIONS)
def test_allreduce_of_every_dtype_and_size_has_the_bits_of_the_reference(
    fleet: Fleets, transport: str, how: str
) -> None:
    cases = [(dtype, shape) for dtype in REDUCTIONS[how] for shape in shapes(dtype)]

    def run() -> list[torch.Tensor]:
        return [shoal.allreduce(sample(shoal.rank(), shape, dtype), op=how) for dtype, shape in cases]

    for (dtype, shape), *results in zip(cases, *fleet(3).run(run), strict=True):
        expected = reduced(how, samples(3, shape, dtype))
        for result in results:
            if how == "product" and dtype.is_complex:
                # torch rounds a complex product differently in the last few elements of what it is given at once.
                torch.testing.assert_close(result, expected)
            else:
                assert same_reduction(result, expected, transport), (dtype, shape)
                assert same_bits(result, results[0])


@pytest.mark.parametrize("size", SIZES)
def test_allreduce_gives_every_agent_of_any_fleet_the_same_bits(fleet: Fleets, transport: str, size: int) -> None:
    """Sizes around the limit up to which each agent gets whole tensors, and sizes that the agents do not divide."""
    numels = [1, size - 1, size, 2048, 2049, 2048 * size + 1, 70_001]

    def run() -> list[torch.Tensor]:
        return [shoal.allreduce(sample(shoal.rank(), (numel,))) for numel in numels]

    observed = fleet(size).run(run)
    for results in observed:
        for numel, result, first in zip(numels, results, observed[0], strict=True):
            assert same_reduction(result, reduced("average", samples(size, (numel,))), transport), numel
            assert same_bits(result, first)


def test_a_product_of_complex_numbers_has_the_same_bits_on_every_agent_and_transport() -> None:
    def run() -> torch.Tensor:
        return shoal.allreduce(sample(shoal.rank(), (40_001,), torch.complex64), op="product")

    results = [result for transport in TRANSPORTS for result in shoal.Fleet(3, transport=transport).run(run)]
    assert all(same_bits(result, results[0]) for result in results)


def test_allreduce_averages_by_default_and_sums_on_request(fleet: Fleets) -> None:
    def run() -> list[float]:
        x = torch.tensor(float(shoal.rank()))
        return [
            shoal.allreduce(x).item(),
            shoal.allreduce(x, average=True).item(),
            shoal.allreduce(x, average=False).item(),
            shoal.allreduce(x, False).item(),
            shoal.allreduce(x, False, False, "name").item(),
        ]

    assert fleet(3).run(run) == [[1.0, 1.0, 3.0, 3.0, 3.0]] * 3


@pytest.mark.parametrize("per_machine", [1, 2, 3])
def test_allreduce_within_the_machine_excludes_the_other_machines(fleet: Fleets, per_machine: int) -> None:
    """Also where the last machine has fewer agents than the others."""

    def run() -> list[torch.Tensor]:
        return [
            shoal.allreduce(sample(shoal.rank(), (numel,)), is_hierarchical_local=True, op=how)
            for numel in (4, 5000)
            for how in ("average", "max")
        ]

    result = fleet(5, agents_per_machine=per_machine).run(run)
    for rank, results in enumerate(result):
        first = rank - rank % per_machine
        group = range(first, min(first + per_machine, 5))
        expected = [
            reduced(how, [sample(other, (numel,)) for other in group])
            for numel in (4, 5000)
            for how in ("average", "max")
        ]
        assert all(map(same_bits, results, expected)), rank


@pytest.mark.parametrize("numel", [4, 5000])
def test_the_forms_in_place_change_the_tensor_and_return_it(fleet: Fleets, numel: int) -> None:
    def run() -> None:
        x = sample(shoal.rank(), (numel,))
        data = x.data_ptr()
        returned = shoal.bluefog.allreduce_(x)
        assert returned.data_ptr() == data
        assert same_bits(x, reduced("average", samples(2, (numel,))))

        y = sample(shoal.rank(), (2, numel)).t()
        shoal.bluefog.wait(shoal.bluefog.allreduce_nonblocking_(y, op="max"))
        assert same_bits(y, reduced("max", [sample.t() for sample in samples(2, (2, numel))]))

        z = sample(shoal.rank(), (numel,))
        assert shoal.bluefog.broadcast_(z, 1).data_ptr() == z.data_ptr()
        assert same_bits(z, sample(1, (numel,)))

        w = sample(shoal.rank(), (numel,))
        shoal.bluefog.wait(shoal.bluefog.broadcast_nonblocking_(w, root_rank=0))
        assert same_bits(w, sample(0, (numel,)))

    fleet(2).run(run)


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_from_every_root_reaches_all_agents(fleet: Fleets, size: int) -> None:
    def run() -> list[list[torch.Tensor]]:
        return [[shoal.broadcast(sample(shoal.rank(), (numel,)), root) for numel in (3, 6000)] for root in range(size)]

    for results in fleet(size).run(run):
        for root, copies in enumerate(results):
            assert same_bits(copies[0], sample(root, (3,)))
            assert same_bits(copies[1], sample(root, (6000,)))


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_broadcast_and_allgather_keep_every_dtype_and_size(fleet: Fleets, dtype: torch.dtype) -> None:
    def run() -> None:
        for shape in shapes(dtype):
            x = sample(shoal.rank(), shape, dtype)
            assert same_bits(shoal.broadcast(x, 2), sample(2, shape, dtype)), shape
            if shape:
                assert same_bits(shoal.allgather(x), torch.cat(samples(3, shape, dtype))), shape

    fleet(3).run(run)


@pytest.mark.parametrize("size", SIZES)
def test_allgather_concatenates_in_rank_order_and_first_dimensions_may_differ(fleet: Fleets, size: int) -> None:
    def rows(rank: int) -> int:
        return (rank * 3) % 4

    def run() -> None:
        for width in (2, 3000):
            result = shoal.allgather(sample(shoal.rank(), (rows(shoal.rank()), width)))
            assert same_bits(result, torch.cat([sample(rank, (rows(rank), width)) for rank in range(size)]))

    fleet(size).run(run)


@pytest.mark.parametrize("size", SIZES)
def test_a_barrier_ends_after_the_last_agent_has_arrived(fleet: Fleets, size: int) -> None:
    arrived: list[int] = []

    def run() -> list[int]:
        counts = []
        for step in range(3):
            if shoal.rank() == step % size:
                time.sleep(0.01)
            arrived.append(shoal.rank())
            shoal.barrier()
            counts.append(len(arrived))
            shoal.barrier()
        return counts

    assert fleet(size).run(run) == [[size, 2 * size, 3 * size]] * size


def test_collectives_match_by_name_in_any_order(fleet: Fleets) -> None:
    def run() -> None:
        rank = shoal.rank()
        x = torch.tensor([float(rank)])
        begin: dict[str, Callable[[], shoal.Handle[torch.Tensor]]] = {}
        for i in range(6):
            begin[f"sum{i}"] = lambda i=i: shoal.nonblocking.allreduce(x * i, False, name=f"sum{i}")  # type: ignore[misc]
            begin[f"from{i}"] = lambda i=i: shoal.nonblocking.broadcast(x + i, i % 3, f"from{i}")  # type: ignore[misc]
            begin[f"all{i}"] = lambda i=i: shoal.nonblocking.allgather(x * i, f"all{i}")  # type: ignore[misc]
        names = sorted(begin, key=lambda name: hash((rank, name)))
        handles = {name: begin[name]() for name in names}
        for i in range(6):
            assert handles[f"sum{i}"].wait().item() == 3.0 * i
            assert handles[f"from{i}"].wait().item() == i % 3 + i
            assert handles[f"all{i}"].wait().tolist() == [0.0, 1.0 * i, 2.0 * i]

    fleet(3).run(run)


def test_the_average_of_integers_is_refused_and_their_sum_is_not(fleet: Fleets) -> None:
    def run() -> None:
        for dtype in (*INTEGERS, torch.bool):
            x = torch.ones(3, dtype=dtype)
            with pytest.raises(TypeError, match=str(dtype).removeprefix("torch.")):
                shoal.allreduce(x)
            assert torch.equal(shoal.allreduce(x, average=False), x + x)

    fleet(2).run(run)


def test_the_minimum_of_complex_numbers_is_refused(fleet: Fleets) -> None:
    def run() -> None:
        for op in ("min", "max"):
            with pytest.raises(TypeError, match="complex64"):
                shoal.allreduce(torch.ones(2, dtype=torch.complex64), op=op)

    fleet(1).run(run)


def test_large_collectives_send_each_byte_about_twice(fleet: Fleets) -> None:
    """A reduce-scatter and an all-gather: 2 (n - 1) / n of the tensor for each agent, for any n."""

    def run() -> int:
        before = shoal.observability.bytes_sent()
        shoal.allreduce(torch.zeros(2_400_000))
        return shoal.observability.bytes_sent() - before

    assert fleet(4).run(run) == [2 * 3 * 2_400_000] * 4
