"""Groups: several tensors in one call, with the bits of single calls, in as few messages as dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.compression import MinMaxUInt8
from support import PROCESS_GROUP
from support.reference import same_bits
from support.samples import ALL_DTYPES, WEIGHABLE, sample

Fleets = Callable[..., shoal.Fleet]
SHAPES: list[tuple[int, ...]] = [(3,), (), (2, 5), (0, 4), (70_001,), (1, 1, 3)]
SIZES = [1, 2, 3, 4]


def group(rank: int, dtypes: Any = (torch.float32, torch.float64, torch.bfloat16)) -> list[Tensor]:
    return [sample(rank + 10 * i, shape, dtype) for dtype in dtypes for i, shape in enumerate(SHAPES)]


def all_same(outputs: list[Tensor], expected: list[Tensor], transport: str = "") -> bool:
    """To the bit; or but for the order of large sums, where a process group takes them."""
    if len(outputs) != len(expected):
        return False
    if transport != PROCESS_GROUP:
        return all(map(same_bits, outputs, expected))
    return all(torch.allclose(one, other, equal_nan=True) for one, other in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_reductions_have_the_bits_of_single_calls(fleet: Fleets, transport: str, size: int) -> None:
    def run() -> bool:
        tensors = group(shoal.rank())
        before = [tensor.clone() for tensor in tensors]
        result = shoal.grouped_allreduce(tensors)
        same = all_same(result, [shoal.allreduce(tensor) for tensor in tensors], transport) and all_same(
            tensors, before
        )
        for op in ("sum", "max"):
            same = same and all_same(
                shoal.grouped_allreduce(tensors, op=op),
                [shoal.allreduce(tensor, op=op) for tensor in tensors],
                transport,
            )
        return same and shoal.grouped_allreduce([]) == []

    assert all(fleet(size).run(run))


def test_averages_with_neighbours_have_the_bits_of_single_calls_in_every_form(fleet: Fleets) -> None:
    def run() -> list[bool]:
        shoal.set_topology(shoal.topology.RingGraph(4))
        rank, tensors = shoal.rank(), group(shoal.rank(), WEIGHABLE)
        ahead, behind = (rank + 1) % 4, (rank - 1) % 4
        forms: list[dict[str, Any]] = [
            {},
            {"self_weight": 0.5, "src_weights": {behind: 0.5}, "dst_weights": {ahead: 1.0}},
            {"self_weight": 0.5, "dst_weights": {ahead: 0.25}},
            {"self_weight": 0.5, "src_weights": {behind: 0.5}},
            {"self_weight": 0.5, "dst_weights": {ahead: 0.25}, "enable_topo_check": False},
        ]
        return [
            all_same(
                shoal.grouped_neighbor_allreduce(tensors, **form),
                [shoal.neighbor_allreduce(tensor, **form) for tensor in tensors],
            )
            for form in forms
        ]

    assert fleet(4).run(run) == [[True] * 5] * 4


def test_a_compressed_group_is_one_vector(fleet: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_COMPRESS_LOCALLY", "1")

    def run() -> bool:
        shoal.set_topology(shoal.topology.RingGraph(3))
        tensors = [sample(shoal.rank() + i, shape) for i, shape in enumerate([(30,), (4, 5), (1,)])]
        full = torch.cat([tensor.flatten() for tensor in tensors])
        expected = shoal.neighbor_allreduce(full, compression=MinMaxUInt8())
        before = shoal.observability.bytes_sent()
        result = shoal.grouped_neighbor_allreduce(tensors, compression=MinMaxUInt8())
        assert shoal.observability.bytes_sent() - before == 2 * (51 + 8)
        return same_bits(torch.cat([one.flatten() for one in result]), expected)

    assert all(fleet(3).run(run))


@pytest.mark.parametrize("size", SIZES)
def test_broadcasts_and_gathers_of_every_dtype(fleet: Fleets, size: int) -> None:
    def run() -> bool:
        rank = shoal.rank()
        tensors, root = group(rank, ALL_DTYPES), size - 1
        result = shoal.grouped_broadcast(tensors, root)
        same = all_same(result, group(root, ALL_DTYPES)) and all_same(tensors, group(rank, ALL_DTYPES))
        rows = [sample(rank, (rank + i, 3), dtype) for i, dtype in enumerate(ALL_DTYPES)]
        rows += [torch.ones(rank, 0), torch.ones(2, dtype=torch.bool)]
        gathered = shoal.grouped_allgather(rows)
        single = [shoal.allgather(row) for row in rows]
        return same and all_same(gathered, single) and shoal.grouped_allgather([]) == shoal.grouped_broadcast([], 0)

    assert all(fleet(size).run(run))


def test_one_number_of_a_strided_tensor_is_broadcast_and_gathered(fleet: Fleets) -> None:
    def run() -> list[Tensor]:
        numbers = torch.tensor([1 + 2j]).conj()
        given = [numbers, numbers.imag, torch.arange(6.0).view(2, 3)[:, 1][:1]]
        return [*shoal.grouped_broadcast(given, 0), *shoal.grouped_allgather(given)]

    expected = [torch.tensor([1 - 2j]), torch.tensor([-2.0]), torch.tensor([1.0])]
    for result in fleet(2).run(run):
        assert all_same(result[:3], expected) and all_same(result[3:], [one.repeat(2) for one in expected])


def test_results_are_written_to_the_callers_tensors(fleet: Fleets, transport: str) -> None:
    def run() -> bool:
        rank = shoal.rank()
        tensors = group(rank)
        expected = [shoal.allreduce(tensor) for tensor in tensors]
        out = [torch.empty_like(tensor) for tensor in tensors]
        out[2] = torch.empty(5, 2).t()  # of other strides
        result = shoal.grouped_allreduce(tensors, out=out)
        assert all(one is place for one, place in zip(result, out, strict=True))
        params = [torch.nn.Parameter(one) for one in group(rank)]
        shoal.grouped_broadcast(params, 1, out=[param.data for param in params])
        return all_same(out, expected, transport) and all_same([param.data for param in params], group(1))

    assert all(fleet(3).run(run))


def test_a_group_is_one_message_of_each_dtype_to_each_neighbour(fleet: Fleets) -> None:
    def run() -> list[tuple[str, int]]:
        shoal.set_topology(shoal.topology.RingGraph(3))
        tensors = [torch.ones(7) for _ in range(40)] + [torch.ones(3, dtype=torch.float64)]
        sent: list[tuple[str, int]] = []
        stop = shoal.observability.events().subscribe(
            lambda event: event.kind == "sent" and sent.append((event.name, event.nbytes))
        )
        shoal.grouped_neighbor_allreduce(tensors, name="group")
        shoal.grouped_allgather(tensors, name="rows")
        stop()
        return sorted(one for one in sent if one[0].startswith(("group", "rows")))

    rows = 8 * 42 + 4 * 280 + 24
    expected = [("group", 24)] * 2 + [("group", 4 * 280)] * 2 + [("rows", rows)] * 2
    assert fleet(3).run(run) == [expected] * 3


def test_nonblocking_calls_run_in_any_order_and_call_back_once(fleet: Fleets, transport: str) -> None:
    def run() -> tuple[bool, int]:
        rank, called = shoal.rank(), []
        tensors = group(rank)
        names = ["a", "b", "c"]
        handles = {}
        for name in names if rank else reversed(names):
            handles[name] = shoal.nonblocking.grouped_allreduce(tensors, name=name)
            handles[name].add_done_callback(called.append)
        for tensor in tensors:
            tensor.zero_()  # they have been copied
        single = [shoal.allreduce(one) for one in group(rank)]
        same = all(all_same(shoal.bluefog.wait(handles[name]), single, transport) for name in names)
        assert all(shoal.bluefog.poll(handle) for handle in handles.values())
        assert all_same(handles["a"].wait(), handles["a"].wait())
        assert "grouped_allreduce (average) 'a'" in repr(handles["a"]) and "done" in repr(handles["a"])
        shoal.barrier()
        return same, len(called)

    assert fleet(3).run(run) == [(True, 3)] * 3


@pytest.mark.parametrize("kind", ["allreduce", "neighbor", "broadcast", "allgather"])
@pytest.mark.parametrize("change", ["shape", "number", "dtype", "order"])
def test_groups_that_differ_are_listed_in_the_error_and_the_next_call_works(
    fleet: Fleets, kind: str, change: str
) -> None:
    call: Callable[..., list[Tensor]] = {
        "allreduce": shoal.grouped_allreduce,
        "neighbor": shoal.grouped_neighbor_allreduce,
        "broadcast": lambda tensors, **named: shoal.grouped_broadcast(tensors, 0, **named),
        "allgather": shoal.grouped_allgather,
    }[kind]

    def run() -> str:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        tensors = [torch.ones(2, 6), torch.ones(4, 3), torch.ones(5)]
        if shoal.rank() == 1:
            tensors = {
                "shape": [torch.ones(2, 3, 2), torch.ones(4, 3), torch.ones(5)],
                "number": [torch.ones(2, 6), torch.ones(4, 3), torch.ones(2), torch.ones(3)],
                "dtype": [torch.ones(2, 6), torch.ones(4, 3), torch.ones(5, dtype=torch.float64)],
                "order": [torch.ones(4, 3), torch.ones(2, 6), torch.ones(5)],
            }[change]
        output = ""
        try:
            call(tensors, name="differs")
        except shoal.Mismatch as error:
            output = str(error)
            assert 1 in error.ranks, error
        shoal.barrier()
        assert len(call([torch.ones(3), torch.ones(2, 2)])) == 2
        return output

    results = fleet(3).run(run)
    for rank in (0, 2) if kind != "broadcast" else (1,):
        assert f"grouped_{'neighbor_allreduce' if kind == 'neighbor' else kind}" in results[rank], results
        assert "list of tensors" in results[rank] or change == "dtype", results
    first = {"shape": "[0] is [", "number": "[2] is [", "dtype": "[2] is [", "order": "[0] is ["}[change]
    if kind == "allgather" and change == "number":  # first dimensions may differ
        first = "[3], [*] float32, is on rank 1 alone"
    for rank in (0, 1, 2) if kind != "broadcast" else (0, 1):  # rank 2 takes what the root has
        assert f". tensors{first}" in results[rank], results
        assert "on rank 1" in results[rank], results
        assert ("there are" in results[rank]) == (change == "number"), results


def test_a_difference_between_long_lists_is_named_and_ends_no_connection(fleet: Fleets) -> None:
    def run() -> str:
        sizes, error_message = [2] * 6000, ""
        sizes[5500] += shoal.rank()
        try:
            shoal.grouped_allreduce(list(map(torch.ones, sizes)), name="differs")
        except shoal.Mismatch as error:
            error_message = str(error)
        shoal.barrier()
        return error_message

    for error_message in fleet(2).run(run):
        assert ". tensors[5500] is [" in error_message and "on rank 1" in error_message


def test_a_mismatch_with_another_operation_lists_the_own_group(fleet: Fleets) -> None:
    def run() -> str:
        one, message = torch.ones(3), ""
        try:
            if shoal.rank():
                shoal.allgather(one, name="x")
            else:
                shoal.grouped_allgather([one] * 6, name="x")
        except shoal.Mismatch as error:
            message = str(error)
        assert len(shoal.grouped_allreduce([one])) == 1
        return message

    assert (
        ". The tensors here are 6: [*] float32, [*] float32, [*] float32, [*] float32 and 2 more"
        in fleet(2).run(run)[0]
    )


def test_invalid_arguments_are_refused_before_anything_is_sent(fleet: Fleets) -> None:
    def run() -> None:
        one = torch.ones(2)
        with pytest.raises(TypeError, match="grouped_allreduce: tensors must be a list of tensors, not Tensor"):
            shoal.grouped_allreduce(one)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"takes a torch\.Tensor, not float"):
            shoal.grouped_broadcast([one, 3.0], 0)  # type: ignore[list-item]
        with pytest.raises(TypeError, match=r"takes .* not int64"):
            shoal.grouped_allreduce([one, torch.ones(2, dtype=torch.int64)])
        with pytest.raises(ValueError, match="op='mean'; it may be one of"):
            shoal.grouped_allreduce([one], op="mean")
        with pytest.raises(ValueError, match="1 tensors as out, for 2 results"):
            shoal.grouped_allreduce([one, one], out=[one])
        with pytest.raises(ValueError, match=r"out has shape \[3\]"):
            shoal.grouped_allreduce([one], out=[torch.ones(3)])
        with pytest.raises(ValueError, match="root_rank=7 is no rank"):
            shoal.grouped_broadcast([one], 7)
        with pytest.raises(ValueError, match="0-dimensional"):
            shoal.grouped_allgather([torch.tensor(1.0)])
        with pytest.raises(ValueError, match="give self_weight together"):
            shoal.grouped_neighbor_allreduce([one], src_weights={0: 1.0})
        assert len(shoal.grouped_allreduce([one])) == 1

    fleet(2).run(run)


def test_a_grouped_call_ends_at_its_timeout(fleet: Fleets) -> None:
    def run() -> None:
        if shoal.rank() == 0:
            handle = shoal.nonblocking.grouped_allreduce([torch.ones(2), torch.ones(2, dtype=torch.float64)], name="x")
            with pytest.raises(shoal.DeadlineExceeded, match="it waits for ranks"):
                handle.wait(0.05)
            shoal.barrier()
            assert handle.wait()[1].tolist() == [1.0, 1.0]
        else:
            shoal.barrier()
            shoal.grouped_allreduce([torch.ones(2), torch.ones(2, dtype=torch.float64)], name="x")

    fleet(2).run(run)
