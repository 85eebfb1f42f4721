"""The verbs that algorithms are written with: products with W, R and C where stacked, and the same between agents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch

import shoal
from shoal.algorithms import Exchange, Mix
from shoal.sim import StackedMix
from shoal.topology import (
    Alternating,
    MeshGrid2DGraph,
    OnePeerExponential,
    OnePeerHypercube,
    RandomMatchings,
    Schedule,
    StarGraph,
    Static,
    as_schedule,
    with_metropolis_hastings_weights,
    with_uniform_weights,
)
from shoal.topology.families.static import ring

Fleets = Callable[..., shoal.Fleet]
SIZE, DIMENSION, ROUNDS = 8, 5, 3


def digraph() -> nx.DiGraph:
    """One-way, irregular, without weights or self loops."""
    graph = nx.DiGraph((rank, (rank + 1) % SIZE) for rank in range(SIZE))
    graph.add_edges_from([(0, 4), (0, 2), (3, 1), (5, 2), (6, 2)])
    return graph


def any_weights() -> np.ndarray[Any, np.dtype[np.float64]]:
    """Negative ones and zeros among them; no sum is one."""
    chance = np.random.default_rng(3)
    return chance.normal(size=(SIZE, SIZE)) * (chance.random((SIZE, SIZE)) < 0.4)


UNDIRECTED: dict[str, Callable[[], nx.Graph | Schedule]] = {
    "ring": lambda: ring(SIZE),
    "grid": lambda: MeshGrid2DGraph(SIZE),
    "star": lambda: with_metropolis_hastings_weights(StarGraph(SIZE, center_rank=3).to_undirected()),
    "one-peer hypercube": lambda: OnePeerHypercube(SIZE),
    "random matchings": lambda: RandomMatchings(SIZE, seed=4),
    "nobody hears anybody": lambda: nx.empty_graph(SIZE, create_using=nx.DiGraph),
}
DIRECTED: dict[str, Callable[[], nx.Graph | Schedule]] = {
    "one way, no weights": digraph,
    "one way, rows sum to one": lambda: with_uniform_weights(digraph()),
    "one way, columns sum to one": lambda: Static(
        as_schedule(with_uniform_weights(digraph().reverse())).matrix(0).T.copy()
    ),
    "one way, any weights": lambda: Static(any_weights()),
    "one-peer exponential": lambda: OnePeerExponential(SIZE),
    "one way, by turns": lambda: Alternating([Static(digraph()), Static(digraph().reverse())]),
}
TOPOLOGIES = UNDIRECTED | DIRECTED

every_topology = pytest.mark.parametrize(
    "topology", [pytest.param(make(), id=name) for name, make in TOPOLOGIES.items()]
)
undirected = pytest.mark.parametrize("topology", [pytest.param(make(), id=name) for name, make in UNDIRECTED.items()])
DTYPES = [(torch.float64, 1e-14), (torch.float32, 2e-6)]
every_dtype = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=["float64", "float32"])


def values(size: int = SIZE, dtype: torch.dtype = torch.float64, seed: int = 1) -> torch.Tensor:
    return torch.randn(size, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense(topology: nx.Graph | Schedule, round_: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """W, R and C of a round, by their definitions, float64 [n, n]."""
    schedule = as_schedule(topology)
    W = torch.from_numpy(schedule.matrix(round_))
    edges = schedule.edges(round_)
    linked = torch.eye(schedule.size, dtype=torch.float64)
    linked[torch.tensor(edges.destination), torch.tensor(edges.source)] = 1.0
    one = torch.ones(schedule.size, dtype=torch.float64)
    R = W if torch.allclose(W.sum(1), one, atol=1e-9) else linked / linked.sum(1, keepdim=True)
    C = W if torch.allclose(W.sum(0), one, atol=1e-9) else linked / linked.sum(0)
    return W, R, C


def links_of(topology: nx.Graph | Schedule, round_: int) -> list[tuple[int, int]]:
    """Each agent with each of its neighbours, ascending."""
    edges = as_schedule(topology).edges(round_)
    return sorted((i, j) for i, j in zip(edges.destination.tolist(), edges.source.tolist(), strict=True) if i != j)


# Stacked, against dense matrices


@every_dtype
@every_topology
def test_mix_pull_and_push_are_w_r_and_c(topology: nx.Graph | Schedule, dtype: torch.dtype, tolerance: float) -> None:
    mix, x = StackedMix(topology), values(dtype=dtype)
    for round_ in range(2 * ROUNDS):
        mix.begin(round_)
        for result, matrix in zip((mix(x), mix.pull(x), mix.push(x)), dense(topology, round_), strict=True):
            assert result.dtype == dtype
            assert (result.double() - matrix @ x.double()).abs().max() < tolerance


@every_topology
def test_pull_keeps_agreement_and_push_keeps_the_total(topology: nx.Graph | Schedule) -> None:
    mix, x = StackedMix(topology), values()
    for round_ in range(ROUNDS):
        mix.begin(round_)
        assert (mix.pull(torch.ones_like(x)) - 1).abs().max() < 1e-14
        assert (mix.push(x).sum(0) - x.sum(0)).abs().max() < 1e-13


@every_topology
def test_inputs_are_not_changed_and_results_are_new(topology: nx.Graph | Schedule) -> None:
    mix, x = StackedMix(topology), values()
    for verb in (mix, mix.pull, mix.push, mix.average):
        first = verb(x)
        kept = first.clone()
        second = verb(x + 1)
        assert torch.equal(x, values())
        assert torch.equal(first, kept)
        second.zero_()
        assert torch.equal(first, kept)


def test_non_contiguous_rows_mix_alike() -> None:
    mix = StackedMix(digraph())
    x = values().T.contiguous().T
    assert not x.is_contiguous()
    assert torch.equal(mix(x), mix(x.contiguous()))


@pytest.mark.parametrize("shape", [(SIZE + 1, 2), (SIZE,), ()])
def test_a_tensor_without_a_row_for_each_agent_is_refused(shape: tuple[int, ...]) -> None:
    mix = StackedMix(ring(SIZE))
    for verb in (mix, mix.pull, mix.push, mix.average):
        with pytest.raises(ValueError, match=rf"a fleet of {SIZE} agents has \[{SIZE}, d\]"):
            verb(torch.zeros(shape))


@every_dtype
def test_average_is_the_mean_of_all_or_of_a_machine(dtype: torch.dtype, tolerance: float) -> None:
    mix, x = StackedMix(ring(SIZE), agents_per_machine=2), values(dtype=dtype)
    over_all, machine = mix.average(x), mix.average(x, "machine")
    assert over_all.dtype == machine.dtype == dtype
    for rank in range(SIZE):
        first = rank - rank % 2
        assert (over_all[rank].double() - x.double().mean(0)).abs().max() < tolerance
        assert (machine[rank].double() - (x[first].double() + x[first + 1].double()) / 2).abs().max() < tolerance


@undirected
def test_spread_gives_each_neighbour_the_own_row_and_gather_sums_them(topology: nx.Graph | Schedule) -> None:
    mix, x = StackedMix(topology), values()
    for round_ in range(ROUNDS):
        mix.begin(round_)
        links = links_of(topology, round_)
        rows = mix.spread(x)
        assert rows.shape == (len(links), DIMENSION)
        assert all(torch.equal(row, x[owner]) for row, (owner, _) in zip(rows, links, strict=True))
        messages = torch.randn(len(links), DIMENSION, dtype=torch.float64)
        expected = torch.zeros_like(x)
        for row, (owner, _) in zip(messages, links, strict=True):
            expected[owner] += row
        assert (mix.gather(messages) - expected).abs().max() < 1e-14
        degree = torch.tensor([[float(sum(owner == rank for owner, _ in links))] for rank in range(SIZE)])
        assert torch.equal(mix.gather(mix.spread(mix.ones(x))).float(), degree)


@undirected
def test_edges_swaps_the_two_rows_of_a_link(topology: nx.Graph | Schedule) -> None:
    mix = StackedMix(topology)
    for round_ in range(ROUNDS):
        mix.begin(round_)
        links = links_of(topology, round_)
        sent = torch.tensor([[10.0 * owner + other, float(owner)] for owner, other in links]).view(-1, 2)
        expected = torch.tensor([[10.0 * other + owner, float(other)] for owner, other in links]).view(-1, 2)
        result = mix.edges(sent)
        assert torch.equal(result, expected)
        assert torch.equal(mix.edges(result), sent)


@undirected
def test_the_two_ends_of_a_link_have_opposite_signs(topology: nx.Graph | Schedule) -> None:
    mix = StackedMix(topology)
    for round_ in range(ROUNDS):
        mix.begin(round_)
        links = links_of(topology, round_)
        signs = mix.sign(values())
        assert signs.flatten().tolist() == [1.0 if owner < other else -1.0 for owner, other in links]
        assert torch.equal(mix.edges(signs), -signs)


def test_ones_are_one_for_each_agent() -> None:
    assert torch.equal(Mix.ones(torch.zeros(3, 7)), torch.ones(3, 1))
    assert torch.equal(Mix.ones(torch.zeros(7, dtype=torch.float64)), torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("name", ["one way, no weights", "one-peer exponential"])
def test_edges_over_directed_links_are_refused(name: str) -> None:
    mix = StackedMix(TOPOLOGIES[name]())
    for verb in (mix.spread, mix.edges, mix.sign):
        with pytest.raises(ValueError, match=r"needs links both ways, .* Take an undirected graph"):
            verb(values())


# The books


def test_sent_counts_messages_to_others() -> None:
    mix, x = StackedMix(StarGraph(SIZE)), values()
    row, links = DIMENSION * 8, 2 * (SIZE - 1)
    counted = []
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: mix(x),
        lambda: mix.pull(x),
        lambda: mix.push(x),
        lambda: mix(x, nbytes=3),
        lambda: mix.edges(mix.spread(x)),
        lambda: mix.edges(mix.spread(x), nbytes=3),
    ]
    for call in calls:
        before = mix.sent
        call()
        counted.append(mix.sent - before)
    assert counted == [links * row] * 3 + [links * 3, links * row, links * 3]


@pytest.mark.parametrize("topology", [StarGraph(SIZE), ring(SIZE)], ids=["star", "ring"])
def test_sent_counts_the_messages_of_active_agents(topology: nx.Graph | Schedule) -> None:
    mix = StackedMix(topology)
    speaks = torch.arange(SIZE).unsqueeze(1) % 2 == 1
    mix(values() * speaks, nbytes=7, speaks=speaks)
    assert mix.sent == 7 * sum(owner % 2 for owner, _ in links_of(topology, 0))


# Real agents, against the stacked fleet


def everything(mix: Mix, x: torch.Tensor, *, links: bool) -> dict[str, torch.Tensor]:
    """What each verb gives in some rounds; rows of links are summed in ways that tell them apart."""
    result: dict[str, torch.Tensor] = {}
    for round_ in range(ROUNDS):
        mix.begin(round_)
        result |= {
            f"mix {round_}": mix(x),
            f"pull {round_}": mix.pull(x),
            f"push {round_}": mix.push(x),
            f"average {round_}": mix.average(x),
            f"machine {round_}": mix.average(x, "machine"),
            f"uniform {round_}": mix.uniform(x),
            f"uniform again {round_}": mix.uniform(x),
        }
        if links:
            signs = mix.sign(x)
            rows = mix.spread(x)
            result |= {
                f"degree {round_}": mix.gather(mix.spread(mix.ones(x))),
                f"signs {round_}": mix.gather(signs),
                f"from neighbours {round_}": mix.gather(mix.edges(rows)),
                f"told each its own {round_}": mix.gather(signs * mix.edges(rows * signs + rows.square())),
            }
    return result


def same(real: list[dict[str, torch.Tensor]], stacked: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, expected in stacked.items():
        result = torch.stack([one[name] for one in real])
        assert result.dtype == expected.dtype, name
        assert result.shape == expected.shape, name
        limit = 0.0 if name.startswith("uniform") else tolerance
        assert (result - expected).abs().max() <= limit, name


@pytest.mark.parametrize(
    ("topology", "dtype", "tolerance"),  # the dtypes take turns
    [pytest.param(make(), *DTYPES[k % 2], id=name) for k, (name, make) in enumerate(TOPOLOGIES.items())],
)
def test_real_agents_equal_the_stacked_fleet(
    fleet: Fleets, topology: nx.Graph | Schedule, dtype: torch.dtype, tolerance: float
) -> None:
    links = any(make().describe() == as_schedule(topology).describe() for make in map(_schedule_of, UNDIRECTED))
    x = values(dtype=dtype)

    def agent() -> tuple[dict[str, torch.Tensor], int]:
        mix = Exchange(topology, seed=11)
        result = everything(mix, x[shoal.rank()], links=links)
        return {name: one.clone() for name, one in result.items()}, mix.sent

    mix = StackedMix(topology, seed=11, agents_per_machine=2)
    stacked = everything(mix, x, links=links)
    results = fleet(SIZE, agents_per_machine=2).run(agent)
    same([result for result, _ in results], stacked, tolerance)
    assert sum(sent for _, sent in results) == mix.sent


def _schedule_of(name: str) -> Callable[[], Schedule]:
    return lambda: as_schedule(TOPOLOGIES[name]())


def test_a_real_agent_has_a_row_for_each_neighbour_ascending(fleet: Fleets) -> None:
    graph = MeshGrid2DGraph(SIZE)

    def agent() -> tuple[list[list[float]], list[float]]:
        mix = Exchange(graph)
        own = torch.tensor([float(shoal.rank())])
        return mix.edges(mix.spread(own)).tolist(), mix.sign(own).flatten().tolist()

    for rank, (received, signs) in enumerate(fleet(SIZE).run(agent)):
        other = [other for owner, other in links_of(graph, 0) if owner == rank]
        assert received == [[float(one)] for one in other]
        assert signs == [1.0 if rank < one else -1.0 for one in other]


def test_a_real_agent_refuses_edges_over_directed_links(fleet: Fleets) -> None:
    def agent() -> None:
        mix = Exchange(digraph())
        with pytest.raises(ValueError, match=r"needs links both ways"):
            mix.edges(torch.zeros(1, 2))

    fleet(SIZE).run(agent)


def test_a_real_agent_counts_the_bytes_that_it_declares(fleet: Fleets) -> None:
    def agent() -> list[int]:
        mix, counted = Exchange(StarGraph(4)), []
        for nbytes in (5, 7, None):
            before = mix.sent
            mix(torch.zeros(3), nbytes=nbytes)
            counted.append(mix.sent - before)
        before = mix.sent
        mix.edges(mix.spread(torch.zeros(3)), nbytes=2)
        return [*counted, mix.sent - before]

    assert fleet(4).run(agent) == [[15, 21, 36, 6], [5, 7, 12, 2], [5, 7, 12, 2], [5, 7, 12, 2]]


def test_a_censored_agent_sends_a_header_and_counts_as_zeros(fleet: Fleets) -> None:
    def agent() -> list[tuple[list[float], int, int]]:
        mix, results = Exchange(StarGraph(4)), []
        for round_ in range(4):
            mix.begin(round_)
            speaks = torch.tensor([shoal.rank() != round_])
            before, counted = mix.sent, shoal.observability.bytes_sent()
            mixed = mix(torch.full((3,), 1.0 + shoal.rank()) * speaks, speaks=speaks)
            results.append((mixed.tolist(), mix.sent - before, shoal.observability.bytes_sent() - counted))
        return results

    stacked, result = StackedMix(StarGraph(4)), fleet(4).run(agent)
    for round_ in range(4):
        speaks = torch.arange(4).unsqueeze(1) != round_
        mixed = stacked((1.0 + torch.arange(4).unsqueeze(1)).expand(4, 3) * speaks, speaks=speaks)
        for rank, (own, books, engine) in enumerate(one[round_] for one in result):
            assert own == pytest.approx(mixed[rank].tolist(), abs=1e-6)
            assert books == engine == (rank != round_) * 12 * (1 if rank else 3)


def test_agents_with_different_censoring_settings_raise_a_mismatch(fleet: Fleets) -> None:
    def agent() -> None:
        mix = Exchange(StarGraph(2))
        mix(torch.zeros(3), speaks=torch.tensor([False]) if shoal.rank() else None)

    with pytest.raises(shoal.Mismatch, match="different topology, form, compression"):
        fleet(2).run(agent)


def test_an_invalid_group_is_refused_stacked_and_real(fleet: Fleets) -> None:
    with pytest.raises(ValueError, match="pass 'all', 'machine' or 'counterparts'"):
        StackedMix(ring(SIZE)).average(values(), "friends")

    def agent() -> None:
        with pytest.raises(ValueError, match="pass 'all', 'machine' or 'counterparts'"):
            Exchange(ring(2)).average(torch.zeros(1), "friends")

    fleet(2).run(agent)


def test_a_topology_of_another_size_is_refused(fleet: Fleets) -> None:
    def agent() -> None:
        with pytest.raises(ValueError, match="the topology has 8 agents, and there are 2"):
            Exchange(ring(8))

    fleet(2).run(agent)
