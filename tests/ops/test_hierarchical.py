"""hierarchical_neighbor_allreduce is W_machine kron (1/L) 11^T: machines average as agents do, agents as a machine."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx
import numpy as np
import pytest
import torch

import shoal
from support.reference import reduced, same_bits, weighted
from support.samples import WEIGHABLE, bluefog_graphs, random_digraph, sample, samples, shapes

Fleets = Callable[..., shoal.Fleet]


def expected_of(
    inputs: list[torch.Tensor], per_machine: int, own: list[float], receive: list[dict[int, float]]
) -> list[torch.Tensor]:
    """The result for each agent: the machines' means, averaged with ``receive[machine] = {source: weight}``."""
    machines = len(inputs) // per_machine
    means = [reduced("average", inputs[m * per_machine : (m + 1) * per_machine]) for m in range(machines)]
    mixed = [weighted(means[m], own[m], {j: (w, means[j]) for j, w in receive[m].items()}) for m in range(machines)]
    return [mixed[rank // per_machine] for rank in range(len(inputs))]


@pytest.mark.parametrize(("machines", "per_machine"), [(1, 1), (1, 4), (2, 1), (2, 2), (3, 1), (4, 2), (2, 3), (3, 3)])
def test_the_matrix_is_the_machine_matrix_kron_the_mean_of_a_machine(
    fleet: Fleets, machines: int, per_machine: int
) -> None:
    size, graphs = machines * per_machine, bluefog_graphs(machines)

    def run() -> list[torch.Tensor]:
        results = []
        for graph in graphs.values():
            shoal.bluefog.set_machine_topology(graph, is_weighted=True)
            x = sample(shoal.rank(), (11,), torch.float64)
            results.append(shoal.bluefog.hierarchical_neighbor_allreduce(x))
        return results

    observed = fleet(size, agents_per_machine=per_machine).run(run)
    x = torch.stack(samples(size, (11,), torch.float64)).numpy()
    for case, graph in enumerate(graphs.values()):
        matrix = np.kron(shoal.topology.mixing_matrix(graph), np.full((per_machine, per_machine), 1.0 / per_machine))
        result = np.stack([observed[rank][case].numpy() for rank in range(size)])
        np.testing.assert_allclose(result, matrix @ x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", WEIGHABLE, ids=str)
def test_every_dtype_and_size_has_the_bits_of_the_reference(fleet: Fleets, dtype: torch.dtype) -> None:
    graph = shoal.topology.RingGraph(2)

    def run() -> list[torch.Tensor]:
        shoal.bluefog.set_machine_topology(graph)
        return [
            shoal.bluefog.hierarchical_neighbor_allreduce(sample(shoal.rank(), shape, dtype)) for shape in shapes(dtype)
        ]

    results = fleet(4, agents_per_machine=2).run(run)
    for case, shape in enumerate(shapes(dtype)):
        expected = expected_of(samples(4, shape, dtype), 2, [0.5, 0.5], [{1: 0.5}, {0: 0.5}])
        assert all(same_bits(results[rank][case], expected[rank]) for rank in range(4)), shape


@pytest.mark.parametrize("check", [True, False])
def test_explicit_weights_name_machines_also_outside_the_machine_topology(fleet: Fleets, check: bool) -> None:
    machines, per_machine = 4, 2
    sends = [random_digraph(machines, seed) for seed in range(8)]
    receives = [[{j: 0.5 + j for j in range(machines) if i in send[j]} for i in range(machines)] for send in sends]

    def run() -> list[torch.Tensor]:
        own_machine = shoal.bluefog.machine_rank()
        return [
            shoal.bluefog.hierarchical_neighbor_allreduce(
                sample(shoal.rank(), (33,)), -0.5, receive[own_machine], send[own_machine], enable_topo_check=check
            )
            for send, receive in zip(sends, receives, strict=True)
        ]

    results = fleet(machines * per_machine, agents_per_machine=per_machine).run(run)
    for case, (send, receive) in enumerate(zip(sends, receives, strict=True)):
        scaled = [{j: r * send[j][i] for j, r in receive[i].items()} for i in range(machines)]
        expected = expected_of(samples(8, (33,)), per_machine, [-0.5] * machines, scaled)
        assert all(same_bits(results[rank][case], expected[rank]) for rank in range(8)), send


def test_destinations_may_be_a_list_and_weights_integers(fleet: Fleets) -> None:
    def run() -> float:
        other = 1 - shoal.bluefog.machine_rank()
        x = torch.tensor(float(shoal.rank()))
        return shoal.bluefog.hierarchical_neighbor_allreduce(
            x, self_weight=1, src_machine_weights={other: 2}, dst_machine_weights=[other]
        ).item()

    assert fleet(4, agents_per_machine=2).run(run) == [5.5, 5.5, 3.5, 3.5]


def test_one_machine_is_the_average_without_any_topology(fleet: Fleets) -> None:
    def run() -> torch.Tensor:
        return shoal.bluefog.hierarchical_neighbor_allreduce(sample(shoal.rank(), (5000,)))

    assert all(same_bits(result, reduced("average", samples(3, (5000,)))) for result in fleet(3).run(run))


def test_one_agent_per_machine_is_neighbor_allreduce(fleet: Fleets) -> None:
    def run() -> None:
        shoal.set_topology(shoal.topology.ExponentialTwoGraph(5))
        shoal.bluefog.set_machine_topology(shoal.topology.ExponentialTwoGraph(5))
        x = sample(shoal.rank(), (5000,))
        assert same_bits(shoal.bluefog.hierarchical_neighbor_allreduce(x), shoal.neighbor_allreduce(x))

    fleet(5, agents_per_machine=1).run(run)


def test_machines_of_different_sizes_are_refused_with_their_sizes(fleet: Fleets) -> None:
    def run() -> str:
        shoal.bluefog.set_machine_topology(shoal.topology.RingGraph(shoal.bluefog.machine_size()))
        with pytest.raises(ValueError, match="equally many agents") as caught:
            shoal.bluefog.hierarchical_neighbor_allreduce(torch.ones(2))
        return str(caught.value)

    for message in fleet(5, agents_per_machine=2).run(run):
        assert "[2, 2, 1]" in message


def test_several_machines_without_a_topology_or_weights_are_an_error_with_the_remedy(fleet: Fleets) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="set_machine_topology"):
            shoal.bluefog.hierarchical_neighbor_allreduce(torch.ones(2))

    fleet(2, agents_per_machine=1).run(run)


@pytest.mark.parametrize(
    "given", [(0.5, None, None), (None, {}, None), (0.5, {}, None), (None, {}, {}), (0.5, None, {})]
)
def test_all_three_weights_are_required_together(fleet: Fleets, given: tuple[object, ...]) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="src_machine_weights"):
            shoal.bluefog.hierarchical_neighbor_allreduce(torch.ones(2), *given)  # type: ignore[arg-type]

    fleet(2, agents_per_machine=1).run(run)


def test_all_agents_of_a_machine_send_equally_much(fleet: Fleets) -> None:
    """Each sends its share of the machine's mean to its counterparts: n/L of the tensor.

    A leader would send all of it.
    """

    def run() -> int:
        shoal.bluefog.set_machine_topology(shoal.topology.RingGraph(2))
        before = shoal.observability.bytes_sent()
        shoal.bluefog.hierarchical_neighbor_allreduce(torch.zeros(64_000))
        return shoal.observability.bytes_sent() - before

    # The reduce-scatter, the exchange between the machines and the all-gather send half a tensor each.
    assert fleet(4, agents_per_machine=2).run(run) == [3 * 4 * 32_000] * 4


@pytest.mark.parametrize("numel", [3, 64_000], ids=["small", "large"])
def test_machine_topologies_that_differ_are_a_mismatch(fleet: Fleets, numel: int) -> None:
    def run() -> None:
        graph = nx.DiGraph(shoal.topology.RingGraph(2))
        if shoal.bluefog.machine_rank():
            graph.edges[0, 1]["weight"] = 0.75
        shoal.bluefog.set_machine_topology(graph, is_weighted=True)
        with pytest.raises(shoal.Mismatch, match="machine topology"):
            shoal.bluefog.hierarchical_neighbor_allreduce(torch.zeros(numel))

    fleet(2, agents_per_machine=1).run(run)


def test_calls_match_by_name_and_have_a_nonblocking_form(fleet: Fleets) -> None:
    def run() -> list[float]:
        shoal.bluefog.set_machine_topology(shoal.topology.FullyConnectedGraph(2))
        names = ["a", "b", "c"] if shoal.rank() % 2 else ["c", "b", "a"]
        x = torch.tensor(float(shoal.rank()))
        handles = {n: shoal.bluefog.hierarchical_neighbor_allreduce_nonblocking(x + ord(n), n) for n in names}
        return [handles[n].wait().item() - ord(n) for n in "abc"]

    assert fleet(4, agents_per_machine=2).run(run) == [[1.5] * 3] * 4
