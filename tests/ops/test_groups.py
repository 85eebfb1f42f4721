"""``group=``: operations of some agents, beside those of others and of all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence

import networkx as nx
import numpy as np
import pytest
import torch
import torch.distributed as dist

import shoal
from support.reference import averaged_over, reduced, same_bits, same_reduction
from support.samples import sample
from support.world import World

Fleets = Callable[..., shoal.Fleet]
SIZE = 5
TWO, THREE = [3, 1], (0, 2, 4)


def own_group() -> Sequence[int]:
    return TWO if shoal.rank() in TWO else THREE


def rest_of(ranks: Sequence[int]) -> list[int]:
    return [rank for rank in range(SIZE) if rank not in ranks]


@pytest.mark.parametrize("numel", [3, 5000, 400_000])
def test_two_groups_and_a_global_allreduce_under_one_name(fleet: Fleets, transport: str, numel: int) -> None:
    def run() -> list[torch.Tensor]:
        x = sample(shoal.rank(), (numel,))
        handles = [
            shoal.nonblocking.allreduce(x, False, name="x", group=own_group()),
            shoal.nonblocking.allreduce(x, False, name="x"),
            shoal.nonblocking.allreduce(x, name="x", group=own_group()),
        ]
        return [handle.wait() for handle in reversed(handles)][::-1]

    inputs = [sample(rank, (numel,)) for rank in range(SIZE)]
    for rank, (total, of_all, mean) in enumerate(fleet(SIZE).run(run)):
        terms = [inputs[one] for one in sorted(TWO if rank in TWO else THREE)]
        assert same_reduction(total, reduced("sum", terms), transport)
        assert same_reduction(of_all, reduced("sum", inputs), transport)
        assert same_reduction(mean, reduced("average", terms), transport)


def test_a_non_member_does_nothing_and_unnamed_global_calls_still_match(fleet: Fleets) -> None:
    def run() -> float:
        if shoal.rank() in TWO:
            shoal.allreduce(torch.ones(3), group=TWO)
            shoal.barrier(group=TWO)
        return shoal.allreduce(torch.full((3,), float(shoal.rank())), False)[0].item()

    assert fleet(SIZE).run(run) == [10.0] * SIZE


def test_broadcasts_gathers_and_barriers_of_groups(fleet: Fleets) -> None:
    def run() -> list[object]:
        rank, group = shoal.rank(), own_group()
        x = torch.full((rank + 1,), float(rank))
        shoal.barrier(group=group)
        return [
            shoal.broadcast(torch.full((4,), rank), max(group), group=group).tolist(),
            shoal.broadcast(torch.full((40_000,), rank), min(group), group=group)[-1].item(),
            shoal.allgather(x, group=group).tolist(),
            shoal.broadcast_object({"from": rank}, max(group), group=group),
            [one.tolist() for one in shoal.grouped_allgather([x, torch.tensor([rank])], group=group)],
            [one[0].item() for one in shoal.grouped_allreduce([torch.full((2,), float(rank))], False, group=group)],
            [one[0].item() for one in shoal.grouped_broadcast([torch.full((2,), rank)], max(group), group=group)],
        ]

    for rank, result in enumerate(fleet(SIZE).run(run)):
        group = sorted(TWO if rank in TWO else THREE)
        gathered = [float(one) for one in group for _ in range(one + 1)]
        assert result == [
            [group[-1]] * 4,
            group[0],
            gathered,
            {"from": group[-1]},
            [gathered, group],
            [float(sum(group))],
            [group[-1]],
        ]


def test_parameters_are_broadcast_and_averaged_within_a_group(fleet: Fleets) -> None:
    def run() -> tuple[float, float]:
        x, y = torch.full((3,), float(shoal.rank())), torch.full((3,), float(shoal.rank()))
        shoal.broadcast_parameters({"x": x}, min(own_group()), group=own_group())
        shoal.bluefog.allreduce_parameters({"y": y}, group=own_group())
        return x[0].item(), y[0].item()

    assert fleet(SIZE).run(run) == [(0.0, 2.0), (1.0, 2.0), (0.0, 2.0), (1.0, 2.0), (0.0, 2.0)]


@pytest.mark.parametrize(
    "graph", [shoal.topology.RingGraph(SIZE), shoal.topology.ExponentialTwoGraph(SIZE)], ids=["ring", "exp2"]
)
def test_neighbours_in_a_group_average_without_the_others(fleet: Fleets, graph: nx.DiGraph) -> None:
    def run() -> list[torch.Tensor]:
        shoal.set_topology(graph)
        x = sample(shoal.rank(), (1000,))
        handle = shoal.nonblocking.neighbor_allreduce(x, group=own_group())
        (grouped,) = shoal.grouped_neighbor_allreduce([x], group=own_group())
        gathered = shoal.neighbor_allgather(x[:1], group=own_group())
        return [handle.wait(), shoal.neighbor_allreduce(x, group=own_group()), grouped, gathered]

    inputs = [sample(rank, (1000,)) for rank in range(SIZE)]
    expected: dict[int, torch.Tensor] = {}
    sources: dict[int, list[int]] = {}
    for group in (TWO, THREE):
        w = shoal.topology.Without(graph, rest_of(group)).matrix(0)
        left = nx.DiGraph()
        left.add_nodes_from(range(SIZE))
        for i, j in zip(*np.nonzero(w), strict=True):
            left.add_edge(int(j), int(i), weight=float(w[i, j]))
        result = averaged_over(left, inputs, is_weighted=True)
        expected |= {rank: result[rank] for rank in group}
        sources |= {rank: [j for j in range(SIZE) if j != rank and w[rank, j]] for rank in group}
    for rank, (one, two, grouped, gathered) in enumerate(fleet(SIZE).run(run)):
        assert same_bits(one, expected[rank]) and same_bits(two, expected[rank]) and same_bits(grouped, expected[rank])
        assert gathered.tolist() == [inputs[source][0].item() for source in sources[rank]]


def test_explicit_weights_name_ranks_of_the_group(fleet: Fleets) -> None:
    def run() -> list[float]:
        x = torch.full((2,), float(shoal.rank()))
        if shoal.rank() not in THREE:
            return []
        ahead, behind = {0: (2, 4), 2: (4, 0), 4: (0, 2)}[shoal.rank()]
        both = shoal.neighbor_allreduce(x, 0.5, {behind: 0.5}, {ahead: 1.0}, group=THREE)
        push = shoal.neighbor_allreduce(x, 0.5, dst_weights={ahead: 0.5}, group=THREE)
        pull = shoal.neighbor_allreduce(x, 0.5, src_weights={behind: 0.5}, group=THREE)
        with pytest.raises(ValueError, match=r"src_weights names ranks \[1\], and its group is ranks \[0, 2, 4\]"):
            shoal.neighbor_allreduce(x, 0.5, {1: 0.5}, {}, group=THREE)
        return [both[0].item(), push[0].item(), pull[0].item()]

    assert fleet(SIZE).run(run) == [[2.0] * 3, [], [1.0] * 3, [], [3.0] * 3]


def test_invalid_groups_are_refused_before_anything_is_sent(fleet: Fleets) -> None:
    def run() -> None:
        x, rank = torch.ones(3), shoal.rank()
        for group, error, message in [
            ([(rank + 1) % 3], ValueError, f"allreduce on rank {rank}: group is ranks .* none of them"),
            ([rank, 7], ValueError, r"group names ranks \[7\], of 3 agents"),
            ([rank, rank], ValueError, "group names a rank twice"),
            ("01", TypeError, "group must be a list of ranks"),
            ([rank, 0.5], TypeError, "group"),
        ]:
            with pytest.raises(error, match=message):
                shoal.allreduce(x, group=group)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=rf"root_rank names ranks \[{(rank + 1) % 3}\], and its group"):
            shoal.broadcast(x, (rank + 1) % 3, group=[rank])
        with pytest.raises(ValueError, match="is_hierarchical_local"):
            shoal.allreduce(x, is_hierarchical_local=True, group=[rank])
        assert shoal.allreduce(x, False, group=[rank])[0] == 1
        assert shoal.allreduce(x, False, group=[2, 0, 1])[0] == 3

    fleet(3).run(run)


def test_a_mismatch_in_a_group_names_its_members_and_does_not_affect_others(fleet: Fleets) -> None:
    def run() -> tuple[int, ...]:
        result: tuple[int, ...] = ()
        if shoal.rank() in THREE:
            with pytest.raises(shoal.Mismatch, match="of ranks 0, 2, 4") as caught:
                shoal.allreduce(torch.ones(3 + (shoal.rank() == 2)), name="x", group=THREE)
            result = caught.value.ranks
        assert shoal.allreduce(torch.ones(2), False)[0] == SIZE
        return result

    results = fleet(SIZE).run(run)
    assert all(2 in results[rank] and set(results[rank]) <= set(THREE) for rank in THREE)


def test_an_absent_member_is_named_and_no_other_group_waits(fleet: Fleets) -> None:
    done, both = threading.Event(), threading.Barrier(2)

    def run() -> tuple[int, ...]:
        if shoal.rank() in TWO:
            return (int(shoal.allreduce(torch.ones(2), False, group=TWO)[0]),)
        if shoal.rank() == 4:
            assert done.wait(30)
            return ()
        with pytest.raises(shoal.DeadlineExceeded) as caught:
            shoal.allreduce(torch.ones(2), group=THREE, timeout=0.5)
        both.wait()
        done.set()
        return caught.value.ranks

    assert fleet(SIZE).run(run) == [(4,), (2,), (4,), (2,), ()]


def test_calls_of_large_groups_have_a_short_name(fleet: Fleets) -> None:
    def run() -> str:
        group = list(range(9))
        if shoal.rank() == 9:
            return ""
        handle = shoal.nonblocking.allreduce(torch.ones(2), group=group)
        handle.wait()
        return repr(handle)

    assert all("of 9 ranks (" in error_text for error_text in fleet(10).run(run)[:9])


def by_process_groups(port: int, other: int) -> list[float]:
    """Agents whose processes have the same ranks in torch.distributed; and then others."""
    rank = shoal.rank()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    result = shoal.allreduce(torch.full((2,), float(rank)), False, group=groups[rank == 1])[0].item()
    of_all = shoal.allreduce(torch.full((2,), float(rank)), False, group=dist.group.WORLD)[0].item()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{other}", rank=-rank % 3, world_size=3)
    if rank:
        with pytest.raises(ValueError, match=f"is rank {3 - rank} of 3 in torch.distributed is rank {rank} of 3 here"):
            shoal.allreduce(torch.ones(2), group=dist.group.WORLD)
    shoal.barrier()  # a group that is destroyed closes connections that other agents may still be opening
    dist.destroy_process_group()
    return [result, of_all]


def test_a_process_group_defines_the_members() -> None:
    with socket.socket() as free, socket.socket() as other:
        free.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = free.getsockname()[1], other.getsockname()[1]
    with World(3) as world:
        assert world.results(by_process_groups, *ports) == [[2.0, 3.0], [1.0, 3.0], [2.0, 3.0]]
