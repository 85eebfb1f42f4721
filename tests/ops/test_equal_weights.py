"""Terms of equal weight are summed, and the sum is scaled once: means of whole numbers are what they are on paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch

import shoal
from shoal.arithmetic import BLOCK_BYTES, weigh_in_blocks
from shoal.kernels.sums import common_factor
from shoal.sim import StackedMix
from shoal.topology import with_uniform_weights
from shoal.topology.families.static import Circulant, ring
from support.reference import same_bits, weighted

Fleets = Callable[..., shoal.Fleet]
SIZES = (1, 1_000, BLOCK_BYTES // 4 + 3)


def integers(rank: int, numel: int, most: int = 1 << 20) -> torch.Tensor:
    """Whole numbers as float32, a few of them without a mean that is whole."""
    chance = torch.Generator().manual_seed(17 * rank + numel)
    return torch.randint(-most, most, (numel,), generator=chance).float()


def mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The quotient of the exact sum, rounded once to float32."""
    return (torch.stack(tensors).double().sum(0) / len(tensors)).float()


@pytest.mark.parametrize("parts", [3, 5, 6, 7, 49])
def test_the_mean_of_integer_valued_floats_is_the_exact_sum_divided_once(parts: int) -> None:
    tensors = [integers(rank, 10_000, 1 << 18) for rank in range(parts)]
    out = torch.empty(10_000)
    weigh_in_blocks(out, tensors[0], 1 / parts, tensors[1:], [1 / parts] * (parts - 1))
    assert torch.equal(out, mean(tensors))


@pytest.mark.parametrize("nonblocking", [False, True])
def test_a_round_with_equal_weights_on_integer_valued_floats_is_the_exact_sum_divided_once(
    fleet: Fleets, nonblocking: bool
) -> None:
    def run() -> list[torch.Tensor]:
        shoal.set_topology(shoal.topology.RingGraph(5), is_weighted=True)
        inputs = [integers(shoal.rank(), numel) for numel in SIZES]
        if nonblocking:
            return [shoal.bluefog.wait(handle) for handle in [shoal.nonblocking.neighbor_allreduce(x) for x in inputs]]
        return [shoal.neighbor_allreduce(x) for x in inputs]

    results = fleet(5).run(run)
    for rank in range(5):
        for case, numel in enumerate(SIZES):
            expected = mean([integers(other % 5, numel) for other in (rank - 1, rank, rank + 1)])
            assert torch.equal(results[rank][case], expected)


def test_fifty_fused_tensors_have_exact_means(fleet: Fleets) -> None:
    """As BlueFog tests its fusion: each tensor equals its result without fusion, to the last bit."""
    size, count = 4, 50

    def tensor(rank: int, number: int) -> torch.Tensor:
        return torch.full((3, 1 + number % 7), float((1 + number) * (rank + 1)))

    def run() -> tuple[list[torch.Tensor], int]:
        shoal.set_topology(shoal.topology.ExponentialTwoGraph(size))
        sources = shoal.in_neighbor_ranks()
        handles = [
            shoal.nonblocking.neighbor_allreduce(tensor(shoal.rank(), number), name=f"fused {number}")
            for number in range(count)
        ]
        assert len(sources) == 2
        results = [shoal.bluefog.wait(handle) for handle in handles]
        shoal.barrier()
        return results, sum(rank + 1 for rank in (*sources, shoal.rank()))

    for results, total in fleet(size).run(run):
        for number, result in enumerate(results):
            expected = torch.tensor(float((1 + number) * total)) / 3
            assert torch.equal(result, expected.expand_as(result)), number


def test_the_other_operations_sum_in_the_same_way(fleet: Fleets) -> None:
    size = 6

    def run() -> dict[str, torch.Tensor]:
        rank, x = shoal.rank(), integers(shoal.rank(), 1_000)
        before, after = (rank - 1) % size, (rank + 1) % size
        third = {before: 1 / 3, after: 1 / 3}
        shoal.set_topology(shoal.topology.RingGraph(size))
        shoal.bluefog.win_create(x.clone(), "window")
        shoal.bluefog.win_put(x, "window")
        shoal.barrier()
        result = {
            "pull": shoal.neighbor_allreduce(x, 1 / 3, third),
            "push": shoal.neighbor_allreduce(x, 1 / 3, dst_weights=third),
            "push-pull": shoal.neighbor_allreduce(x, 1 / 3, third, [before, after]),
            "update": shoal.bluefog.win_update("window", 1 / 3, third, clone=True),
            "allreduce": shoal.allreduce(x),
        }
        shoal.bluefog.win_free()
        return result

    for rank, results in enumerate(fleet(size).run(run)):
        near = mean([integers(other % size, 1_000) for other in (rank - 1, rank, rank + 1)])
        mean_of_all = mean([integers(other, 1_000) for other in range(size)])
        for name, result in results.items():
            assert torch.equal(result, mean_of_all if name == "allreduce" else near), name


def test_machines_with_equal_weights_have_exact_means(fleet: Fleets) -> None:
    def run() -> torch.Tensor:
        machine = shoal.bluefog.machine_rank()
        others = {other: 1 / 3 for other in range(3) if other != machine}
        return shoal.bluefog.hierarchical_neighbor_allreduce(integers(shoal.rank(), 1_000), 1 / 3, others, list(others))

    results = fleet(3, agents_per_machine=1).run(run)
    assert all(torch.equal(one, mean([integers(rank, 1_000) for rank in range(3)])) for one in results)


def test_an_empty_slot_counts_as_zeros() -> None:
    own, full, zeros = integers(0, 1_000), integers(1, 1_000), torch.zeros(1_000)
    for weights in ([1 / 3, 1 / 3, 1 / 3], [1 / 3, 1 / 3, 1 / 6], [1 / 7, 1 / 7, 1 / 2]):
        one, other = torch.empty(1_000), torch.empty(1_000)
        weigh_in_blocks(one, own, weights[0], [full, None], weights[1:])
        weigh_in_blocks(other, own, weights[0], [full, zeros], weights[1:])
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str
)
@pytest.mark.parametrize("weight", [1 / 3, -1 / 3, 0.7, 0.5, -2.0, 3.0, 0.0, 1e-30])
@pytest.mark.parametrize("terms", [0, 1, 4])
def test_every_dtype_has_the_bits_of_the_reference(dtype: torch.dtype, weight: float, terms: int) -> None:
    made = torch.complex64 if dtype.is_complex else torch.float32
    tensors = [torch.randn(1_000, dtype=made, generator=torch.Generator().manual_seed(k)).to(dtype) for k in range(5)]
    out = torch.empty(1_000, dtype=dtype)
    weigh_in_blocks(out, tensors[0], weight, tensors[1 : terms + 1], [weight] * terms)
    expected = weighted(tensors[0], weight, {k: (weight, tensors[k]) for k in range(1, terms + 1)})
    assert same_bits(out, expected)


def test_equal_values_average_to_themselves_up_to_the_rounding_of_their_sum() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    for parts in range(1, 20):
        out = torch.empty_like(x)
        weigh_in_blocks(out, x, 1 / parts, [x] * (parts - 1), [1 / parts] * (parts - 1))
        units = (out.view(torch.int32) - x.view(torch.int32)).abs().max()
        assert units <= (0 if parts <= 2 else parts // 2), parts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_mean_of_two_large_numbers_is_finite(dtype: torch.dtype) -> None:
    x = torch.full((5,), torch.finfo(dtype).max, dtype=dtype)
    out = torch.empty_like(x)
    weigh_in_blocks(out, x, 0.5, [x], [0.5])
    assert torch.equal(out, x)


def test_sums_of_sixteen_bit_numbers_do_not_overflow() -> None:
    x = torch.full((5,), torch.finfo(torch.float16).max, dtype=torch.float16)
    out = torch.empty_like(x)
    weigh_in_blocks(out, x, 1 / 3, [x, x], [1 / 3, 1 / 3])
    assert torch.equal(out, x)


@pytest.mark.parametrize("weights", [[0.5, 0.5], [1 / 3, 1 / 4], [0.0, 0.0], [1.0], [-0.25] * 5])
def test_terms_are_weighted_separately_if_weights_differ_or_nothing_is_rounded(weights: list[float]) -> None:
    assert common_factor(weights) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize(
    "topology",
    [
        ring(7),
        Circulant(9, dict.fromkeys((0, 1, 2, 4, 8), 0.2)),
        Circulant(9, {1: 0.2, 4: 0.2, 8: 0.2}),
        with_uniform_weights(nx.star_graph(6)),
        with_uniform_weights(nx.gnp_random_graph(15, 0.4, seed=3)),
    ],
    ids=["ring", "five", "without self", "star", "random"],
)
def test_a_stacked_fleet_has_exact_means_of_integer_valued_floats(topology: Any, dtype: torch.dtype) -> None:
    mix = StackedMix(topology)
    x = torch.stack([integers(rank, 100) for rank in range(mix.size)]).to(dtype)
    W = torch.from_numpy(shoal.topology.as_schedule(topology).matrix(0))
    parts = (1 / W.max(1, keepdim=True).values).round()
    real = torch.finfo(dtype).dtype
    total = (W != 0).double() @ torch.stack([integers(rank, 100) for rank in range(mix.size)]).double()
    expected = (total / parts).to(getattr(torch, real)).to(dtype)
    assert torch.equal(mix(x), expected)
