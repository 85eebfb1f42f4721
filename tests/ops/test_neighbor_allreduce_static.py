"""neighbor_allreduce over the static topology: the weighted average of the graph, bit for bit, over every transport."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx
import pytest
import torch

import shoal
from support.reference import averaged_over, same_bits
from support.samples import WEIGHABLE, bluefog_graphs, sample, samples, shapes

Fleets = Callable[..., shoal.Fleet]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_every_bluefog_graph_gives_its_average_uniform_and_weighted(fleet: Fleets, size: int) -> None:
    graphs = bluefog_graphs(size)

    def run() -> list[torch.Tensor]:
        results = []
        for graph in graphs.values():
            for is_weighted in (False, True):
                assert shoal.set_topology(graph, is_weighted)
                results.append(shoal.neighbor_allreduce(sample(shoal.rank(), (7,))))
        return results

    result = fleet(size).run(run)
    inputs = samples(size, (7,))
    for case, (name, graph) in enumerate(graphs.items()):
        for is_weighted in (False, True):
            expected = averaged_over(graph, inputs, is_weighted=is_weighted)
            for rank in range(size):
                assert same_bits(result[rank][2 * case + is_weighted], expected[rank]), (name, is_weighted, rank)


@pytest.mark.parametrize("dtype", WEIGHABLE, ids=str)
def test_every_size_has_the_bits_of_the_reference(fleet: Fleets, dtype: torch.dtype) -> None:
    graph = shoal.topology.MeshGrid2DGraph(4)

    def run() -> list[torch.Tensor]:
        shoal.set_topology(graph, is_weighted=True)
        return [shoal.neighbor_allreduce(sample(shoal.rank(), shape, dtype)) for shape in shapes(dtype)]

    results = fleet(4).run(run)
    for case, shape in enumerate(shapes(dtype)):
        expected = averaged_over(graph, samples(4, shape, dtype), is_weighted=True)
        for rank in range(4):
            assert same_bits(results[rank][case], expected[rank]), (shape, rank)


def test_without_arguments_the_topology_is_the_uniform_exponential_graph(fleet: Fleets) -> None:
    results = fleet(6).run(lambda: shoal.neighbor_allreduce(sample(shoal.rank(), (3,))))
    expected = averaged_over(shoal.topology.ExponentialTwoGraph(6), samples(6, (3,)), is_weighted=False)
    assert all(map(same_bits, results, expected))


def test_a_graph_with_negative_weights_and_weights_above_one_is_used_as_it_is(fleet: Fleets) -> None:
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(0, 0, 2.5), (1, 0, -1.5), (1, 1, -0.25), (2, 1, 1.25), (2, 2, 1.0), (0, 2, 0.0)])

    def run() -> torch.Tensor:
        shoal.set_topology(graph, is_weighted=True)
        return shoal.neighbor_allreduce(sample(shoal.rank(), (9,)))

    assert all(map(same_bits, fleet(3).run(run), averaged_over(graph, samples(3, (9,)), is_weighted=True)))


def test_an_agent_without_a_self_loop_gives_its_own_tensor_no_weight(fleet: Fleets) -> None:
    graph = nx.DiGraph([(0, 1), (1, 0)])  # no weight attribute: an edge counts one

    def run() -> float:
        shoal.set_topology(graph, is_weighted=True)
        return shoal.neighbor_allreduce(torch.tensor(float(shoal.rank() + 1))).item()

    assert fleet(2).run(run) == [2.0, 1.0]


def test_an_agent_without_any_edge_keeps_its_own_tensor(fleet: Fleets) -> None:
    graph = nx.DiGraph([(0, 1), (1, 0)])
    graph.add_node(2)

    def run() -> float:
        shoal.set_topology(graph)
        return shoal.neighbor_allreduce(torch.tensor(float(shoal.rank() + 1))).item()

    assert fleet(3).run(run) == [1.5, 1.5, 3.0]


def test_the_order_of_a_graphs_nodes_and_edges_does_not_matter(fleet: Fleets) -> None:
    graph = shoal.topology.ExponentialTwoGraph(5)
    shuffled = nx.DiGraph()
    shuffled.add_nodes_from([3, 0, 4, 1, 2])
    shuffled.add_weighted_edges_from(reversed(list(graph.edges(data="weight"))))

    def run() -> torch.Tensor:
        shoal.set_topology(shuffled if shoal.rank() % 2 else graph, is_weighted=True)
        return shoal.neighbor_allreduce(sample(shoal.rank(), (4,)))

    assert all(map(same_bits, fleet(5).run(run), averaged_over(graph, samples(5, (4,)), is_weighted=True)))


def test_a_doubly_stochastic_graph_keeps_the_sum_of_the_fleet(fleet: Fleets) -> None:
    def run() -> torch.Tensor:
        shoal.set_topology(shoal.topology.StarGraph(5), is_weighted=True)
        x = sample(shoal.rank(), (50,), torch.float64)
        for _ in range(3):
            x = shoal.neighbor_allreduce(x)
        return x

    total = torch.stack(fleet(5).run(run)).sum(0)
    torch.testing.assert_close(total, torch.stack(samples(5, (50,), torch.float64)).sum(0))


def test_repeated_rounds_reach_the_average_of_the_fleet(fleet: Fleets) -> None:
    def run() -> float:
        x = torch.tensor(float(shoal.rank()), dtype=torch.float64)
        for _ in range(60):
            x = shoal.neighbor_allreduce(x)
        return x.item()

    assert fleet(8).run(run) == pytest.approx([3.5] * 8, abs=1e-12)


def test_a_new_topology_takes_effect_with_the_next_call(fleet: Fleets) -> None:
    graphs = [shoal.topology.RingGraph(5), shoal.topology.StarGraph(5), shoal.topology.FullyConnectedGraph(5)]

    def run() -> list[torch.Tensor]:
        results = []
        for graph in graphs:
            shoal.set_topology(graph)
            results.append(shoal.neighbor_allreduce(sample(shoal.rank(), (3,)), name="x"))
        return results

    result = fleet(5).run(run)
    for case, graph in enumerate(graphs):
        expected = averaged_over(graph, samples(5, (3,)), is_weighted=False)
        assert all(same_bits(result[rank][case], expected[rank]) for rank in range(5))


def test_a_nonblocking_call_uses_the_topology_of_its_submission(fleet: Fleets) -> None:
    def run() -> float:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        handle = shoal.nonblocking.neighbor_allreduce(torch.tensor(float(shoal.rank())))
        shoal.set_topology(shoal.topology.RingGraph(3, connect_style=1))
        return handle.wait().item()

    assert fleet(3).run(run) == pytest.approx([1.0, 1.0, 1.0])


def test_a_string_as_second_argument_is_the_name(fleet: Fleets) -> None:
    """Agents submit in opposite orders, so only the names can match them."""

    def run() -> list[float]:
        order = ["a", "b"] if shoal.rank() else ["b", "a"]
        value = {"a": 1.0, "b": 10.0}
        handles = {
            name: shoal.nonblocking.neighbor_allreduce(torch.tensor(value[name] * (shoal.rank() + 1)), name)
            for name in order
        }
        return [shoal.bluefog.wait(handles[name]).item() for name in "ab"]

    assert fleet(2).run(run) == [[1.5, 15.0]] * 2


def test_bytes_sent_counts_the_tensor_once_for_each_destination(fleet: Fleets) -> None:
    def run() -> list[int]:
        shoal.set_topology(shoal.topology.StarGraph(4))
        counts = []
        for numel in (10, 10_000):
            before = shoal.observability.bytes_sent()
            shoal.neighbor_allreduce(torch.zeros(numel))
            counts.append(shoal.observability.bytes_sent() - before)
        return counts

    assert fleet(4).run(run) == [[3 * 40, 3 * 40_000]] + [[40, 40_000]] * 3
