"""neighbor_alltoall: each neighbour gets a row of its own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

import shoal
from shoal.ops.gathering import alltoall_nonblocking
from support.limits import scaled
from support.reference import same_bits
from support.samples import ALL_DTYPES, sample, shapes

Fleets = Callable[..., shoal.Fleet]
SOON = 2.0


def row(source: int, target: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What `here` sends to `there`."""
    return sample(10 * source + target, shape, dtype)


def rows(source: int, ranks: list[int], shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What `here` sends to each of some agents."""
    return torch.stack([row(source, target, shape, dtype) for target in ranks])


def answers(source: int, ranks: list[int], shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What each of some agents sends to `here`."""
    return torch.stack([row(target, source, shape, dtype) for target in ranks])


def refused(call: Callable[[], object]) -> shoal.Mismatch:
    """The Mismatch that the call raises, or a call soon after: its own may end before the refusal comes."""
    started = time.monotonic()
    with pytest.raises(shoal.Mismatch) as caught:
        call()
        while time.monotonic() - started < 2 * SOON:
            shoal.neighbor_alltoall(torch.empty(0, 1), [], name="probe")
            time.sleep(0.001)
    assert time.monotonic() - started < scaled(SOON)
    return caught.value


def agree_again() -> None:
    """One refused operation spoils no other."""
    for step in range(3):
        assert shoal.allreduce(torch.ones(3), name=f"after {step}").tolist() == [1.0] * 3


# What arrives


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_row_k_is_the_row_that_the_kth_rank_of_the_list_sent(fleet: Fleets, size: int) -> None:
    def run() -> torch.Tensor:
        others = [rank for rank in range(size) if rank != shoal.rank()]
        return shoal.neighbor_alltoall(rows(shoal.rank(), others, (3, 2)), others)

    for rank, result in enumerate(fleet(size).run(run)):
        assert same_bits(result, answers(rank, [index for index in range(size) if index != rank], (3, 2)))


def test_ranks_may_be_in_any_order(fleet: Fleets) -> None:
    def order(rank: int) -> list[int]:
        return sorted((index for index in range(5) if index != rank), key=lambda one: (one * 3 + rank) % 5)

    def run() -> torch.Tensor:
        ranks = order(shoal.rank())
        return shoal.neighbor_alltoall(rows(shoal.rank(), ranks, (4,)), tuple(ranks))

    for rank, result in enumerate(fleet(5).run(run)):
        assert same_bits(result, answers(rank, order(rank), (4,)))


def test_neighbours_may_change_from_call_to_call_without_a_topology(fleet: Fleets) -> None:
    size, calls, chance = 6, 12, random.Random(2)
    pairs = [(i, j) for i in range(size) for j in range(i)]
    links = [[pair for pair in pairs if chance.random() < 0.4] for _ in range(calls)]

    def of(rank: int, call: int) -> list[int]:
        return sorted(i + j - rank for i, j in links[call] if rank in (i, j))

    def run() -> list[torch.Tensor]:
        results = []
        for call in range(calls):
            ranks = of(shoal.rank(), call)
            own = rows(shoal.rank(), ranks, (call + 1,)) if ranks else torch.empty(0, call + 1)
            results.append(shoal.neighbor_alltoall(own, ranks))
        return results

    for rank, results in enumerate(fleet(size).run(run)):
        for call, result in enumerate(results):
            ranks = of(rank, call)
            assert same_bits(result, answers(rank, ranks, (call + 1,)) if ranks else torch.empty(0, call + 1))


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_rows_of_every_dtype_and_shape_arrive_unchanged(fleet: Fleets, dtype: torch.dtype) -> None:
    def run() -> list[torch.Tensor]:
        others = [rank for rank in range(3) if rank != shoal.rank()]
        return [shoal.neighbor_alltoall(rows(shoal.rank(), others, shape, dtype), others) for shape in shapes(dtype)]

    for rank, results in enumerate(fleet(3).run(run)):
        others = [index for index in range(3) if index != rank]
        for shape, result in zip(shapes(dtype), results, strict=True):
            assert same_bits(result, answers(rank, others, shape, dtype)), (rank, shape)


def test_an_agent_without_neighbours_gets_no_rows_and_does_not_block(fleet: Fleets) -> None:
    def run() -> tuple[torch.Size, torch.dtype]:
        if shoal.rank() == 2:
            result = shoal.neighbor_alltoall(torch.empty(0, 4, 2, dtype=torch.int16), [])
        else:
            result = shoal.neighbor_alltoall(torch.ones(1, 4, 2, dtype=torch.int16), [1 - shoal.rank()])
        return result.shape, result.dtype

    assert fleet(3).run(run) == [((1, 4, 2), torch.int16), ((1, 4, 2), torch.int16), ((0, 4, 2), torch.int16)]


def test_a_single_agent_has_no_destination(fleet: Fleets) -> None:
    assert fleet(1).run(lambda: shoal.neighbor_alltoall(torch.empty(0, 3), []).shape) == [(0, 3)]


@pytest.mark.parametrize("numel", [3, 9000], ids=["inline", "region"])
def test_non_contiguous_rows_and_a_single_row(fleet: Fleets, numel: int) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        rank = shoal.rank()
        others = [index for index in range(3) if index != rank]
        turned = rows(rank, others, (numel,)).T.contiguous().T
        assert not turned.is_contiguous()
        same = row(rank, rank, (numel,)).expand(2, numel)
        return shoal.neighbor_alltoall(turned, others), shoal.neighbor_alltoall(same, others)

    for rank, (turned, same) in enumerate(fleet(3).run(run)):
        others = [index for index in range(3) if index != rank]
        assert same_bits(turned, answers(rank, others, (numel,)))
        assert same_bits(same, torch.stack([row(one, one, (numel,)) for one in others]))


@pytest.mark.parametrize("numel", [3, 9000], ids=["inline", "region"])
def test_the_tensor_may_be_overwritten_once_the_call_has_returned(fleet: Fleets, numel: int) -> None:
    def run() -> bool:
        rank = shoal.rank()
        for call in range(10):
            own = torch.full((1, numel), float(call))
            result = shoal.neighbor_alltoall(own, [1 - rank])
            own.fill_(-1.0)
            if not (result == call).all():
                return False
            result.fill_(-2.0)
        return True

    assert fleet(2).run(run) == [True, True]


@pytest.mark.filterwarnings("ignore:.*no gradient flows back")
def test_the_input_is_not_changed(fleet: Fleets) -> None:
    def run() -> bool:
        own = torch.full((1, 5), float(shoal.rank()), requires_grad=True)
        result = shoal.neighbor_alltoall(own, [1 - shoal.rank()])
        return bool((own == shoal.rank()).all()) and not result.requires_grad

    assert fleet(2).run(run) == [True, True]


def test_named_calls_match_by_name_and_unnamed_ones_by_their_order(fleet: Fleets) -> None:
    def run() -> list[float]:
        rank = shoal.rank()
        results = []
        for call in range(4):
            name = "x" if call % 2 else None
            results.append(shoal.neighbor_alltoall(torch.tensor([[10.0 * call + rank]]), [1 - rank], name).item())
        return results

    assert fleet(2).run(run) == [[1.0, 11.0, 21.0, 31.0], [0.0, 10.0, 20.0, 30.0]]


# What is refused


@pytest.mark.parametrize("numel", [3, 9000], ids=["inline", "region"])
@pytest.mark.parametrize("name", [None, "x"])
def test_rows_of_different_shapes_are_a_mismatch_on_both_sides(fleet: Fleets, numel: int, name: str | None) -> None:
    shapes_of_rows: list[list[tuple[int, ...]]] = [
        [(numel,), (numel + 1,)],
        [(numel, 2), (2, numel)],
        [(numel,), (numel, 1)],
    ]

    def run() -> None:
        for two in shapes_of_rows:
            own = torch.ones(1, *two[shoal.rank()])
            error = refused(partial(shoal.neighbor_alltoall, own, [1 - shoal.rank()], name))
            assert error.ranks == (0, 1)
            assert "shape" in str(error)
            agree_again()

    fleet(2).run(run)


@pytest.mark.parametrize("two", [(torch.float32, torch.float64), (torch.float16, torch.bfloat16)], ids=str)
def test_dtypes_that_differ_are_a_mismatch_on_both_sides(fleet: Fleets, two: tuple[torch.dtype, torch.dtype]) -> None:
    def run() -> None:
        own = torch.ones(1, 4, dtype=two[shoal.rank()])
        error = refused(lambda: shoal.neighbor_alltoall(own, [1 - shoal.rank()]))
        assert error.ranks == (0, 1)
        assert "float" in str(error)
        agree_again()

    fleet(2).run(run)


@pytest.mark.parametrize("numel", [3, 9000], ids=["inline", "region"])
def test_an_edge_that_only_one_side_names_is_a_mismatch(fleet: Fleets, numel: int) -> None:
    def run() -> None:
        rank = shoal.rank()
        if rank < 2:
            ranks = [1] if rank == 0 else []
            error = refused(lambda: shoal.neighbor_alltoall(torch.ones(len(ranks), numel), ranks, "n"))
            assert error.ranks == (0, 1)
        agree_again()

    fleet(3).run(run)


def test_another_operation_under_the_same_name_is_a_mismatch(fleet: Fleets) -> None:
    def run() -> None:
        rank = shoal.rank()
        if rank == 0:
            error = refused(lambda: shoal.neighbor_alltoall(torch.ones(1, 4), [1], "n"))
        else:
            error = refused(lambda: shoal.neighbor_allgather(torch.ones(4), "n", src_ranks=[0], dst_ranks=[0]))
        assert error.ranks == (0, 1)
        agree_again()

    fleet(2).run(run)


def test_an_absent_neighbour_is_named_at_the_deadline(fleet: Fleets) -> None:
    def run() -> None:
        if shoal.rank() == 0:
            with pytest.raises(shoal.DeadlineExceeded, match="neighbor_alltoall") as caught:
                shoal.neighbor_alltoall(torch.ones(1, 2), [1], "n", timeout=0.2)
            assert 1 in caught.value.ranks
        shoal.barrier()

    fleet(2).run(run)


@pytest.mark.parametrize(
    ("ranks", "error", "message"),
    [
        ([0], ValueError, "this agent itself"),
        ([2], ValueError, "not one of the 2 ranks"),
        ([-1], ValueError, "not one of the 2 ranks"),
        ([1, 1], ValueError, "names a rank twice"),
        ([1.0], TypeError, "is no rank"),
        ([True], TypeError, "is no rank"),
        (1, TypeError, "must be a list of ranks"),
        ("1", TypeError, "must be a list of ranks"),
    ],
    ids=repr,
)
def test_ranks_outside_the_group_or_equal_to_the_own_are_refused(
    fleet: Fleets, ranks: object, error: type[Exception], message: str
) -> None:
    def run() -> None:
        if shoal.rank() == 0:
            with pytest.raises(error, match=message):
                shoal.neighbor_alltoall(torch.ones(1, 2), ranks)  # type: ignore[arg-type]

    fleet(2).run(run)


@pytest.mark.parametrize("many", [0, 2])
def test_one_row_too_few_or_too_many_is_refused(fleet: Fleets, many: int) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=f"{many} rows for 1 ranks; give a row for each"):
            shoal.neighbor_alltoall(torch.ones(many, 2), [1 - shoal.rank()])

    fleet(2).run(run)


def test_inputs_without_rows_are_refused(fleet: Fleets) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="0-dimensional"):
            shoal.neighbor_alltoall(torch.tensor(1.0), [1 - shoal.rank()])
        with pytest.raises(TypeError, match=r"takes a torch\.Tensor"):
            shoal.neighbor_alltoall([[1.0]], [1 - shoal.rank()])  # type: ignore[arg-type]

    fleet(2).run(run)


# Of all agents, with as many rows as each is to have


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_each_agent_gets_the_rows_given_by_the_splits(fleet: Fleets, dtype: torch.dtype) -> None:
    size = 3
    splits = [[0, 2, 1], [3, 0, 0], [0, 0, 4]]  # by sender

    def run() -> tuple[torch.Tensor, list[int], torch.Tensor]:
        rank = shoal.rank()
        x = sample(rank, (sum(splits[rank]), 2), dtype)
        handle = alltoall_nonblocking(x, torch.tensor(splits[rank]), "x")
        equal, _ = alltoall_nonblocking(sample(rank, (6, 2), dtype)).wait()
        x.zero_()
        return *handle.wait(), equal

    for rank, (result, arrived, equal) in enumerate(fleet(size).run(run)):
        parts = [sample(index, (sum(splits[index]), 2), dtype).split(splits[index])[rank] for index in range(size)]
        assert same_bits(result, torch.cat(parts))
        assert arrived == [splits[index][rank] for index in range(size)]
        assert same_bits(
            equal, torch.cat([sample(index, (6, 2), dtype)[2 * rank : 2 * rank + 2] for index in range(size)])
        )


@pytest.mark.parametrize("rows", [1, 50_000])
def test_two_groups_exchange_concurrently(fleet: Fleets, rows: int) -> None:
    def run() -> list[float]:
        group = [0, 2] if shoal.rank() in (0, 2) else [1, 3]
        x = torch.cat([torch.full((rows,), 10.0 * shoal.rank() + place) for place in range(2)])
        return alltoall_nonblocking(x, group=group).wait()[0][::rows].tolist()

    assert fleet(4).run(run) == [[0.0, 20.0], [10.0, 30.0], [1.0, 21.0], [11.0, 31.0]]


def test_incompatible_tensors_are_a_mismatch(fleet: Fleets) -> None:
    def run() -> None:
        with pytest.raises(shoal.Mismatch, match="only the first dimension may differ"):
            alltoall_nonblocking(torch.ones(2, 1 + shoal.rank())).wait()

    fleet(2).run(run)


def test_invalid_splits_are_refused() -> None:
    def run() -> None:
        for splits in ([1], [2, 2], [-1, 4]):
            with pytest.raises(ValueError, match="it takes 2 numbers, one for each agent, none negative, whose sum"):
                alltoall_nonblocking(torch.ones(3), splits)
        with pytest.raises(TypeError, match="splits must be a list of whole numbers"):
            alltoall_nonblocking(torch.ones(3), 3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="splits must be an int"):
            alltoall_nonblocking(torch.ones(3), [1.0, 2.0])  # type: ignore[list-item]

    shoal.Fleet(2).run(run)
