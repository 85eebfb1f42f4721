"""The three dynamic forms of neighbor_allreduce, on random digraphs that have nothing to do with the static one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from support.reference import incoming, push_pull, same_bits
from support.samples import WEIGHABLE, random_digraph, sample, samples, shapes

Fleets = Callable[..., shoal.Fleet]
Edges = list[dict[int, float]]
SEEDS = range(12)


def receive_weights(send: Edges) -> Edges:
    """Some weights for the receivers of a digraph given by {destination: weight}."""
    return [{source: 0.3 * (i + 1) - 0.7 * source for source in sources} for i, sources in enumerate(incoming(send))]


def ones(edges: Edges) -> Edges:
    return [dict.fromkeys(own, 1.0) for own in edges]


def rounds(fleet: Fleets, size: int, calls: list[list[dict[str, Any]]], shape: tuple[int, ...]) -> list[Any]:
    """Make every agent do all ``calls[case][rank]``, one fleet for all; the results by case and rank."""

    def run() -> list[torch.Tensor]:
        rank = shoal.rank()
        return [
            shoal.neighbor_allreduce(sample(rank, shape, seed=case), **calls[case][rank]) for case in range(len(calls))
        ]

    return list(zip(*fleet(size).run(run), strict=True))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", [(6,), (9000,)], ids=["inline", "region"])
def test_push_pull_over_random_digraphs_is_equation_10(fleet: Fleets, size: int, shape: tuple[int, ...]) -> None:
    sends = [random_digraph(size, seed) for seed in SEEDS]
    calls = [
        [
            {"self_weight": 0.5 - rank, "src_weights": receive_weights(send)[rank], "dst_weights": send[rank]}
            for rank in range(size)
        ]
        for send in sends
    ]
    for case, results in enumerate(rounds(fleet, size, calls, shape)):
        send, own = sends[case], [0.5 - rank for rank in range(size)]
        expected = push_pull(samples(size, shape, seed=case), own, receive_weights(send), send)
        assert all(map(same_bits, results, expected)), send


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", [(6,), (9000,)], ids=["inline", "region"])
def test_push_over_random_digraphs_scales_at_the_sender(fleet: Fleets, size: int, shape: tuple[int, ...]) -> None:
    sends = [random_digraph(size, seed) for seed in SEEDS]
    calls = [[{"self_weight": 0.25, "dst_weights": send[rank]} for rank in range(size)] for send in sends]
    for case, results in enumerate(rounds(fleet, size, calls, shape)):
        receive = ones(receive_weights(sends[case]))
        expected = push_pull(samples(size, shape, seed=case), [0.25] * size, receive, sends[case])
        assert all(map(same_bits, results, expected)), sends[case]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", [(6,), (9000,)], ids=["inline", "region"])
def test_pull_over_random_digraphs_scales_at_the_receiver(fleet: Fleets, size: int, shape: tuple[int, ...]) -> None:
    receives = [random_digraph(size, seed) for seed in SEEDS]
    calls = [[{"self_weight": -1.5, "src_weights": receive[rank]} for rank in range(size)] for receive in receives]
    for case, results in enumerate(rounds(fleet, size, calls, shape)):
        receive = receives[case]
        send: Edges = [{i: 1.0 for i in range(size) if j in receive[i]} for j in range(size)]
        expected = push_pull(samples(size, shape, seed=case), [-1.5] * size, receive, send)
        assert all(map(same_bits, results, expected)), receive


@pytest.mark.parametrize("dtype", WEIGHABLE, ids=str)
def test_push_pull_has_the_bits_of_the_reference_for_every_size(fleet: Fleets, dtype: torch.dtype) -> None:
    send = random_digraph(3, seed=5, density=0.8)
    receive = receive_weights(send)

    def run() -> list[torch.Tensor]:
        rank = shoal.rank()
        return [
            shoal.neighbor_allreduce(sample(rank, shape, dtype), 0.1, receive[rank], send[rank])
            for shape in shapes(dtype)
        ]

    results = fleet(3).run(run)
    for case, shape in enumerate(shapes(dtype)):
        expected = push_pull(samples(3, shape, dtype), [0.1] * 3, receive, send)
        assert all(same_bits(results[rank][case], expected[rank]) for rank in range(3)), shape


@pytest.mark.parametrize("form", ["push", "pull"])
@pytest.mark.parametrize("shape", [(6,), (9000,)], ids=["inline", "region"])
def test_push_and_pull_within_the_topology_need_no_discovery(fleet: Fleets, form: str, shape: tuple[int, ...]) -> None:
    """Each agent draws a subset of its neighbours, in some rounds an empty one."""
    size, static = 5, shoal.topology.ExponentialTwoGraph(5)
    wanted = [random_digraph(size, seed, density=0.5) for seed in SEEDS]
    allowed = static.has_edge
    within = [
        [
            {peer: w for peer, w in own.items() if (allowed(rank, peer) if form == "push" else allowed(peer, rank))}
            for rank, own in enumerate(edges)
        ]
        for edges in wanted
    ]
    argument = "dst_weights" if form == "push" else "src_weights"
    calls = [
        [{"self_weight": 0.5, argument: edges[rank], "enable_topo_check": False} for rank in range(size)]
        for edges in within
    ]
    for case, results in enumerate(rounds(fleet, size, calls, shape)):
        edges = within[case]
        other: Edges = [{j: 1.0 for j in range(size) if i in edges[j]} for i in range(size)]
        receive, send = (other, edges) if form == "push" else (edges, other)
        expected = push_pull(samples(size, shape, seed=case), [0.5] * size, receive, send)
        assert all(map(same_bits, results, expected)), edges


def test_push_pull_without_the_check_computes_the_same(fleet: Fleets) -> None:
    send = random_digraph(5, seed=3)
    receive = receive_weights(send)

    def run() -> list[torch.Tensor]:
        rank = shoal.rank()
        x = sample(rank, (20,))
        arguments: dict[str, Any] = {"self_weight": 2, "src_weights": receive[rank], "dst_weights": send[rank]}
        return [shoal.neighbor_allreduce(x, **arguments, enable_topo_check=check) for check in (True, False)]

    for checked, unchecked in fleet(5).run(run):
        assert same_bits(checked, unchecked)


def test_a_subset_of_the_sources_in_pull_form_counts_only_those(fleet: Fleets) -> None:
    """The case in which BlueFog silently averages over all neighbours: fully connected, one source named."""

    def run() -> list[float]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(4))
        x = torch.tensor(float(shoal.rank()))
        sources = {2: 0.25} if shoal.rank() == 0 else {}
        checks = [shoal.neighbor_allreduce(x, 0.75, sources, enable_topo_check=check).item() for check in (True, False)]
        return [*checks, shoal.neighbor_allreduce(x, self_weight=1.0, src_weights={}).item()]

    assert fleet(4).run(run) == [[0.5, 0.5, 0.0], [0.75, 0.75, 1.0], [1.5, 1.5, 2.0], [2.25, 2.25, 3.0]]


def test_destinations_as_a_list_have_weight_one(fleet: Fleets) -> None:
    def run() -> list[float]:
        rank, other = shoal.rank(), 1 - shoal.rank()
        x = torch.tensor(float(rank + 1))
        return [
            shoal.neighbor_allreduce(x, 1, None, [other]).item(),
            shoal.neighbor_allreduce(x, 1, None, (other,)).item(),
            shoal.neighbor_allreduce(x, 1, {other: 2}, [other]).item(),
            shoal.neighbor_allreduce(x, self_weight=0, src_weights={other: 3}, dst_weights=iter([other])).item(),
        ]

    assert fleet(2).run(run) == [[3.0, 3.0, 5.0, 6.0], [3.0, 3.0, 4.0, 3.0]]


def test_integer_weights_are_as_good_as_floats(fleet: Fleets) -> None:
    def run() -> torch.Tensor:
        rank, other = shoal.rank(), 1 - shoal.rank()
        return shoal.neighbor_allreduce(sample(rank, (5,)), 2, {other: -3}, {other: 4})

    expected = push_pull(samples(2, (5,)), [2.0] * 2, [{1: -3.0}, {0: -3.0}], [{1: 4.0}, {0: 4.0}])
    assert all(map(same_bits, fleet(2).run(run), expected))


def test_an_agent_without_partners_scales_its_own_tensor_and_not_the_input(fleet: Fleets) -> None:
    def run() -> tuple[float, float, bool]:
        x = torch.tensor([8.0])
        results = [
            shoal.neighbor_allreduce(x, 0.5, {}, {}),
            shoal.neighbor_allreduce(x, 0.5, {}),
            shoal.neighbor_allreduce(x, 0.5, None, {}),
        ]
        alias = any(result.data_ptr() == x.data_ptr() for result in results)
        return sum(result.item() for result in results), x.item(), alias

    assert fleet(3).run(run) == [(12.0, 8.0, False)] * 3


def test_a_weight_of_zero_still_sends_the_message(fleet: Fleets) -> None:
    def run() -> tuple[float, int]:
        rank, other = shoal.rank(), 1 - shoal.rank()
        before = shoal.observability.bytes_sent()
        result = shoal.neighbor_allreduce(torch.tensor(float(rank)), 1, {other: 0.0}, {other: 1.0}).item()
        return result, shoal.observability.bytes_sent() - before

    assert fleet(2).run(run) == [(0.0, 4), (1.0, 4)]


def test_one_peer_rounds_of_the_exponential_graph_average_exactly(fleet: Fleets) -> None:
    """Three rounds of the one-peer exponential graph of eight agents are the exact average."""

    def run() -> float:
        schedule = shoal.topology.GetDynamicOnePeerSendRecvRanks(shoal.topology.ExponentialTwoGraph(8), shoal.rank())
        x = torch.tensor(float(shoal.rank()))
        for _ in range(3):
            send, receive = next(schedule)
            x = shoal.neighbor_allreduce(x, self_weight=0.5, src_weights=dict.fromkeys(receive, 0.5), dst_weights=send)
        return x.item()

    assert fleet(8).run(run) == [3.5] * 8


def test_the_forms_may_alternate_under_one_name(fleet: Fleets) -> None:
    def run() -> list[float]:
        rank = shoal.rank()
        ahead, behind = (rank + 1) % 3, (rank - 1) % 3
        x = torch.tensor(float(rank))
        shoal.set_topology(shoal.topology.RingGraph(3, connect_style=2))
        return [
            shoal.neighbor_allreduce(x, "v").item(),
            shoal.neighbor_allreduce(x, 1, None, {ahead: 1}, name="v").item(),
            shoal.neighbor_allreduce(x, 1, {behind: 1}, name="v").item(),
            shoal.neighbor_allreduce(x, 1, {behind: 1}, {ahead: 1}, name="v").item(),
            shoal.neighbor_allreduce(x, 1, None, {ahead: 1}, enable_topo_check=False, name="v").item(),
            shoal.neighbor_allreduce(x, 1, {behind: 1}, enable_topo_check=False, name="v").item(),
            shoal.neighbor_allreduce(x, "v").item(),
        ]

    sums = [2.0, 1.0, 3.0]
    assert fleet(3).run(run) == [[one / 2, *[one] * 5, one / 2] for one in sums]


def test_a_tensor_without_elements_keeps_its_shape_beside_empty_headers(fleet: Fleets) -> None:
    """In a push within the static topology, one neighbour gets the tensor and the others an empty header."""

    def run() -> list[int]:
        following = (shoal.rank() + 1) % shoal.size()
        x = shoal.neighbor_allreduce(torch.empty(0, 3), 1.0, dst_weights={following: 1.0}, enable_topo_check=False)
        shoal.barrier()
        return list(x.shape)

    assert fleet(4).run(run) == [[0, 3]] * 4
