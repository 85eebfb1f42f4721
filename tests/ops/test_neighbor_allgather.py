"""neighbor_allgather: the neighbours' tensors one after the other, this agent's own not among them."""

from __future__ import annotations

import time
from collections.abc import Callable

import networkx as nx
import pytest
import torch

import shoal
from support.limits import scaled
from support.reference import incoming, same_bits
from support.samples import ALL_DTYPES, bluefog_graphs, random_digraph, sample, shapes

Fleets = Callable[..., shoal.Fleet]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_the_static_topology_gives_the_sources_in_ascending_rank(fleet: Fleets, size: int) -> None:
    graphs = bluefog_graphs(size)

    def run() -> list[torch.Tensor]:
        results = []
        for graph in graphs.values():
            shoal.set_topology(graph)
            results.append(shoal.neighbor_allgather(sample(shoal.rank(), (2, 3))))
        return results

    result = fleet(size).run(run)
    for case, (name, graph) in enumerate(graphs.items()):
        for rank in range(size):
            sources = sorted(set(graph.predecessors(rank)) - {rank})
            expected = torch.cat([sample(source, (2, 3)) for source in sources] or [torch.empty(0, 3)])
            assert same_bits(result[rank][case], expected), (name, rank)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_and_size_arrives_unchanged(fleet: Fleets, dtype: torch.dtype) -> None:
    sizes = [shape for shape in shapes(dtype) if shape]

    def run() -> list[torch.Tensor]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        return [shoal.neighbor_allgather(sample(shoal.rank(), shape, dtype)) for shape in sizes]

    for rank, results in enumerate(fleet(3).run(run)):
        for shape, result in zip(sizes, results, strict=True):
            others = [sample(other, shape, dtype) for other in range(3) if other != rank]
            assert same_bits(result, torch.cat(others)), (rank, shape)


@pytest.mark.parametrize("width", [1, 900])
def test_first_dimensions_may_differ_and_may_be_zero(fleet: Fleets, width: int) -> None:
    rows = [3, 0, 5, 1]

    def run() -> torch.Tensor:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(4))
        return shoal.neighbor_allgather(sample(shoal.rank(), (rows[shoal.rank()], width, 2)))

    for rank, result in enumerate(fleet(4).run(run)):
        others = [sample(other, (rows[other], width, 2)) for other in range(4) if other != rank]
        assert same_bits(result, torch.cat(others))


@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize("check", [True, False])
def test_random_digraphs_give_the_sources_in_the_requested_order(fleet: Fleets, size: int, check: bool) -> None:
    sends = [random_digraph(size, seed) for seed in range(8)]
    orders = [[sorted(sources, key=lambda j: (j * 5) % 8) for sources in incoming(send)] for send in sends]

    def run() -> list[torch.Tensor]:
        rank = shoal.rank()
        return [
            shoal.neighbor_allgather(
                sample(rank, (rank + 1, 2)), src_ranks=order[rank], dst_ranks=list(send[rank]), enable_topo_check=check
            )
            for send, order in zip(sends, orders, strict=True)
        ]

    results = fleet(size).run(run)
    for case, order in enumerate(orders):
        for rank in range(size):
            parts = [sample(source, (source + 1, 2)) for source in order[rank]]
            assert same_bits(results[rank][case], torch.cat(parts or [torch.empty(0, 2)])), (case, rank)


def test_without_any_source_the_result_has_no_rows(fleet: Fleets) -> None:
    chain = nx.DiGraph([(0, 1), (1, 2)])

    def run() -> list[torch.Size]:
        shoal.set_topology(chain)
        static = shoal.neighbor_allgather(torch.zeros(4, 3, 2))
        dynamic = shoal.neighbor_allgather(torch.zeros(4, 3, 2), src_ranks=[], dst_ranks=[])
        return [static.shape, dynamic.shape]

    assert fleet(3).run(run) == [[(0, 3, 2), (0, 3, 2)], [(4, 3, 2), (0, 3, 2)], [(4, 3, 2), (0, 3, 2)]]


def test_nonblocking_gathers_match_by_name_in_any_order(fleet: Fleets) -> None:
    def run() -> list[int]:
        names = [f"g{i}" for i in range(12)]
        order = sorted(names, key=lambda name: hash((name, shoal.rank())))
        handles = {
            name: shoal.nonblocking.neighbor_allgather(torch.tensor([int(name[1:]) * 10 + shoal.rank()]), name)
            for name in order
        }
        return [int(shoal.bluefog.wait(handles[name]).item()) for name in names]

    assert fleet(2).run(run) == [[10 * i + 1 - rank for i in range(12)] for rank in range(2)]


def test_other_dimensions_that_differ_are_a_mismatch_naming_both(fleet: Fleets) -> None:
    def run() -> tuple[int, ...]:
        with pytest.raises(shoal.Mismatch, match="only the first dimension may differ") as caught:
            shoal.neighbor_allgather(torch.zeros(2, 3 + shoal.rank()))
        return caught.value.ranks

    assert fleet(2).run(run) == [(0, 1), (0, 1)]


def test_the_sender_of_a_one_way_edge_learns_that_other_dimensions_differ(fleet: Fleets) -> None:
    def run() -> tuple[int, ...]:
        rank, until = shoal.rank(), time.monotonic() + scaled(5.0)
        with pytest.raises(shoal.Mismatch, match="only the first dimension may differ") as caught:
            shoal.neighbor_allgather(torch.zeros(2, 3 - rank), src_ranks=[0] * rank, dst_ranks=[1] * (1 - rank))
            while time.monotonic() < until:  # the sender's call ends before the refusal; the next one raises
                shoal.neighbor_allreduce(torch.ones(1), 1.0, {}, {}, name="probe")
                time.sleep(0.001)
        assert shoal.allreduce(torch.ones(1)).item() == 1.0
        return caught.value.ranks

    assert fleet(2).run(run) == [(0, 1), (0, 1)]
