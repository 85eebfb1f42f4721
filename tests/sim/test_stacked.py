"""A stacked fleet: its products against dense matrices, its books, its shapes, and that a seed repeats everything."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

import shoal
from shoal.algorithms import GradientDescent, GradientTracking, run
from shoal.algorithms.schedule_weights import ScheduleWeights
from shoal.sim import StackedFleet, StackedMix, mixing_products, per_agent
from shoal.topology.families import equitopo, graphs
from shoal.topology.families.one_peer import OnePeerExponential, OnePeerHypercube, RandomMatchings, ShiftOne
from shoal.topology.families.static import Circulant, exponential, ring, symmetric_exponential
from shoal.topology.mixing import with_metropolis_hastings_weights
from shoal.topology.schedule import Schedule, Static, as_schedule
from support.least_squares import DIMENSION, SIZE, loss, problem

SHIFTS = [
    Circulant(1, {0: 1.0}),
    ring(2),
    ring(7),
    ring(12, connect_style=1),
    exponential(13),
    symmetric_exponential(16),
    Circulant(9, {2: 0.7, 8: 0.3}),
    Circulant(9, {0: 0.5, 2: 0.25, 8: 0.25}),
    Circulant(9, {0: 0.2, 4: 0.4, 8: 0.4}),
    Circulant(9, {0: 0.2, 4: 0.3, 8: 0.5}),
    Circulant(9, {1: 0.2, 4: 0.2, 8: 0.2}),
    Circulant(10, {0: 0.2, 1: 0.5, 4: 0.0, 9: 0.3}),
    OnePeerExponential(1),
    OnePeerExponential(2),
    OnePeerExponential(11),
    OnePeerExponential(16),
]
PAIRS = [OnePeerHypercube(8), ShiftOne(10), RandomMatchings(9, seed=2), equitopo.OUEquiDyn(10, eta=0.3)]
UNEQUAL_PAIRS = nx.DiGraph()
UNEQUAL_PAIRS.add_weighted_edges_from([(0, 0, 0.5), (1, 0, 0.5), (1, 1, 0.5), (0, 1, 0.25), (2, 2, 1.0)])
IRREGULAR = [
    UNEQUAL_PAIRS,
    with_metropolis_hastings_weights(nx.star_graph(6)),
    with_metropolis_hastings_weights(nx.gnp_random_graph(15, 0.4, seed=3)),
    graphs.MeshGrid2DGraph(12),
    nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2), (3, 0), (1, 3)]),
    equitopo.OUEquiDyn(9, eta=0.3),
]


def name_of(topology: nx.Graph | Schedule) -> str:
    return as_schedule(topology).describe()


def dense(topology: nx.Graph | Schedule, round_: int, form: str) -> torch.Tensor:
    """W of a round, or its row- or column-stochastic form by the definition, float64 [n, n]."""
    schedule = as_schedule(topology)
    edges = schedule.edges(round_)
    W, linked = np.zeros((schedule.size,) * 2), np.zeros((schedule.size,) * 2)
    W[edges.destination, edges.source], linked[edges.destination, edges.source] = edges.weight, 1.0
    axis = {"pull": 1, "push": 0}.get(form)
    if axis is not None and not np.allclose(W.sum(axis), 1):
        W = linked / linked.sum(axis, keepdims=True)
    return torch.from_numpy(W)


def multiplied(mix: StackedMix, form: str, x: torch.Tensor) -> torch.Tensor:
    return mix(x) if form == "mix" else getattr(mix, form)(x)


@pytest.mark.parametrize("form", ["mix", "pull", "push"])
@pytest.mark.parametrize("topology", [*SHIFTS, *PAIRS, *IRREGULAR], ids=name_of)
def test_a_round_multiplies_by_its_matrix(topology: nx.Graph | Schedule, form: str) -> None:
    mix = StackedMix(topology)
    x = torch.randn(mix.size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for round_ in range(6):
        mix.begin(round_)
        result = multiplied(mix, form, x)
        assert (result - dense(topology, round_, form) @ x).abs().max() < 1e-14


@pytest.mark.parametrize("topology", [*SHIFTS[2:], *PAIRS, *IRREGULAR], ids=name_of)
def test_blocks_do_not_change_the_result(topology: nx.Graph | Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(as_schedule(topology).size, 3)
    full = StackedMix(topology)(x)
    for rows in (1, 2, 3, 5):
        monkeypatch.setattr(mixing_products, "_BLOCK_BYTES", rows * x[0].nbytes)
        assert torch.equal(StackedMix(topology)(x), full)


@pytest.mark.parametrize("topology", [*SHIFTS, *PAIRS], ids=name_of)
def test_shifts_and_pairs_use_no_sparse_product(topology: nx.Graph | Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mixing_products, "_sparse")
    mix = StackedMix(topology)
    mix(torch.ones(mix.size, 2))


@pytest.mark.parametrize("weights", [(0.25, 0.5, 0.25), (0.5, 0.25, 0.25), (0.25, 0.625, 0.125), (0.125, 0.75, 0.125)])
def test_numbers_that_are_exact_in_binary_stay_exact(weights: tuple[float, float, float]) -> None:
    schedule = Circulant(8, dict(zip((0, 1, 5), weights, strict=True)))
    x = torch.randint(-1000, 1000, (8, 50), generator=torch.Generator().manual_seed(0)).double() / 64
    assert torch.equal(StackedMix(schedule)(x), dense(schedule, 0, "mix") @ x)


def test_a_graph_is_recognised_as_shifts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mixing_products, "_sparse")
    x = torch.randn(16, 3, dtype=torch.float64)
    result, expected = StackedMix(graphs.ExponentialTwoGraph(16))(x), StackedMix(exponential(16))(x)
    assert (result - expected).abs().max() < 1e-14


@pytest.mark.parametrize("schedule", SHIFTS, ids=name_of)
def test_shares_agree_with_the_edges(schedule: Schedule) -> None:
    for round_ in range(2 * (schedule.period or 1)):
        shares = schedule.hop_shares(round_)
        assert shares is not None
        edges = schedule.edges(round_)
        hops = (edges.destination - edges.source) % schedule.size
        assert sorted(set(hops.tolist())) == sorted(shares)
        assert np.allclose(edges.weight, [shares[hop] for hop in hops.tolist()], rtol=0, atol=1e-15)


@pytest.mark.parametrize("make", [ring, OnePeerExponential])
def test_equal_agents_need_no_edges(make: type[Schedule], monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = make(64)  # type: ignore[call-arg]
    monkeypatch.setattr(schedule, "edges", None)
    fleet = StackedFleet(schedule)
    results = fleet.run(GradientTracking(0.1), torch.zeros(5), lambda x: x - 1, 10)
    messages = 2 if make is ring else 1
    assert results.sent == 10 * 2 * 64 * messages * 5 * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex128])
@pytest.mark.parametrize("topology", [ring(6), OnePeerHypercube(8), IRREGULAR[2]], ids=name_of)
def test_other_dtypes_are_mixed_too(topology: nx.Graph | Schedule, dtype: torch.dtype) -> None:
    mix = StackedMix(topology)
    x = torch.randn(mix.size, 4, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    result = mix(x)
    assert result.dtype == dtype
    error = (result.to(wide) - dense(topology, 0, "mix").to(wide) @ x.to(wide)).abs().max()
    assert error < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("topology", [ring(6), OnePeerHypercube(8)], ids=name_of)
def test_only_the_device_of_x_is_used(topology: Schedule) -> None:
    mix = StackedMix(topology)
    x = torch.empty(mix.size, 4, device="meta")
    result = mix(x), mix.pull(x), mix.push(x), mix.average(x), mix.gather(mix.edges(mix.spread(x))), mix.sign(x)
    assert {one.device.type for one in (*result, mix.uniform(x), mix.ones(x))} == {"meta"}


def test_rows_of_matrices_mix_like_rows_of_vectors() -> None:
    x = torch.randn(15, 2, 3, dtype=torch.float64)
    for topology in (ring(15), RandomMatchings(15), IRREGULAR[2]):
        assert torch.equal(StackedMix(topology)(x).flatten(1), StackedMix(topology)(x.flatten(1)))


def test_the_input_need_not_be_contiguous() -> None:
    x = torch.randn(3, 15, dtype=torch.float64).mT
    for topology in (ring(15), RandomMatchings(15), IRREGULAR[2]):
        assert torch.equal(StackedMix(topology)(x), StackedMix(topology)(x.contiguous()))


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        ([0.0, 1.0], TypeError, r"x is a list: pass a tensor"),
        (torch.tensor(1.0), ValueError, r"no dimension.*\[d\]"),
    ],
)
def test_initial_values_that_are_no_vector_are_refused(x: Any, error: type[Exception], text: str) -> None:
    """In a simulation, and on a real agent."""
    with pytest.raises(error, match=text):
        StackedFleet(graphs.RingGraph(2)).run(GradientDescent(0.1), x, torch.zeros_like, 1)
    with pytest.raises(error, match=text):
        shoal.Fleet(2).run(run, GradientDescent(0.1), x, torch.zeros_like, graphs.RingGraph(2), 1)


@pytest.mark.parametrize("shape", [[16], [15, 3], [3, 16], []])
def test_a_shape_without_a_row_for_each_agent_is_refused(shape: list[int]) -> None:
    mix = StackedMix(ring(16))
    for verb in (mix, mix.pull, mix.push, mix.average):
        with pytest.raises(ValueError, match=r"a fleet of 16 agents has \[16, d\]"):
            verb(torch.zeros(shape))


def test_a_start_without_a_row_for_each_agent_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[3, 4\]: a fleet of 16 agents has \[16, d\]"):
        StackedFleet(ring(16)).run(GradientDescent(0.1), torch.zeros(3, 4), lambda x: x, 0)


def test_a_start_of_one_row_is_used_for_all_agents() -> None:
    fleet, start = StackedFleet(ring(SIZE)), torch.arange(DIMENSION, dtype=torch.float64)
    gradient = per_agent(loss, *problem())
    one = fleet.run(GradientDescent(0.1), start, gradient, 7).x
    many = fleet.run(GradientDescent(0.1), start.repeat(SIZE, 1), gradient, 7).x
    assert torch.equal(one, many)


def test_a_run_of_zero_steps_returns_a_copy_of_the_start() -> None:
    start = torch.zeros(4, 2)
    results = StackedFleet(ring(4)).run(GradientDescent(0.1), start, lambda x: x, 0)
    results.x.add_(1)
    assert not start.any()


@pytest.mark.parametrize("machines", [0, 3, 5])
def test_machines_that_are_not_full_are_refused(machines: int) -> None:
    with pytest.raises(ValueError, match=f"16 agents do not fill machines of {machines}"):
        StackedFleet(ring(16), agents_per_machine=machines)


def test_averages_of_all_and_of_machines() -> None:
    mix = StackedMix(ring(6), agents_per_machine=3)
    x = torch.randn(6, 4, dtype=torch.float64)
    assert torch.allclose(mix.average(x), x.mean(0).expand(6, 4), rtol=0, atol=1e-15)
    expected = torch.cat([x[:3].mean(0).expand(3, 4), x[3:].mean(0).expand(3, 4)])
    assert torch.allclose(mix.average(x, "machine"), expected, rtol=0, atol=1e-15)
    with pytest.raises(ValueError, match="pass 'all', 'machine' or 'counterparts'"):
        mix.average(x, "machines")


def test_a_message_on_a_link_arrives_at_its_other_end() -> None:
    graph = with_metropolis_hastings_weights(nx.gnp_random_graph(9, 0.5, seed=1))
    mix, edges = StackedMix(graph), Static(graph).edges(0)
    pairs = [(i, j) for i, j in zip(edges.destination.tolist(), edges.source.tolist(), strict=True) if i != j]
    output = torch.tensor([[100.0 * i + j] for i, j in pairs])
    assert mix.edges(output).flatten().tolist() == [100.0 * j + i for i, j in pairs]
    assert mix.spread(torch.arange(9.0).unsqueeze(1)).flatten().tolist() == [i for i, _ in pairs]
    assert mix.sign(output).flatten().tolist() == [1.0 if i < j else -1.0 for i, j in pairs]
    sums = [sum(100.0 * i + j for i, j in pairs if i == rank) for rank in range(9)]
    assert mix.gather(output).flatten().tolist() == sums


def test_directed_edges_have_no_message_of_their_own() -> None:
    with pytest.raises(ValueError, match="links both ways"):
        StackedMix(ring(5, connect_style=1)).spread(torch.zeros(5, 1))


@pytest.mark.parametrize("topology", [ring(6), OnePeerExponential(6), IRREGULAR[1], RandomMatchings(9)], ids=name_of)
def test_every_message_is_counted(topology: nx.Graph | Schedule) -> None:
    schedule, mix = as_schedule(topology), StackedMix(topology)
    edges = schedule.edges(0)
    links = [(i, j) for i, j in zip(edges.destination.tolist(), edges.source.tolist(), strict=True) if i != j]
    x = torch.zeros(schedule.size, 10)
    mix(x)
    assert mix.sent == 40 * len(links)
    mix(x, nbytes=3)
    assert mix.sent == 43 * len(links)
    mix(x, nbytes=5, speaks=torch.arange(schedule.size).unsqueeze(1) < 4)
    assert mix.sent == 43 * len(links) + sum(5 for _, source in links if source < 4)
    assert mix.exchanges == 3


def test_memory_is_reused() -> None:
    mix = StackedMix(ring(1000))
    x = torch.zeros(1000, 1000)
    places = []
    for _ in range(6):
        x = mix(x)
        places.append(x.data_ptr())
    assert len(set(places)) == 2


def test_a_result_does_not_change_while_it_is_referenced() -> None:
    mix, x = StackedMix(ring(1000)), torch.randn(1000, 1000)
    first = mix(x)
    kept = first.clone()
    for _ in range(4):
        mix(mix(x))
    assert torch.equal(first, kept)


def test_cached_rounds_are_freed_with_their_users() -> None:
    gc.disable()
    try:
        rounds = ScheduleWeights(RandomMatchings(8))
        held = weakref.ref(rounds[3])
        assert rounds[3].messages == 8
        del rounds
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("batch", [None, 3])
def test_a_seed_reproduces_everything(batch: int | None) -> None:
    start = torch.zeros(DIMENSION, dtype=torch.float64)

    def run(seed: int) -> torch.Tensor:
        gradient = per_agent(loss, *problem(), batch=batch)
        return StackedFleet(ring(SIZE), seed=seed).run(GradientDescent(0.05), start, gradient, 20).x

    assert torch.equal(run(4), run(4))
    assert torch.equal(run(4), run(5)) == (batch is None)


def test_a_resumed_run_has_the_draws_of_an_uninterrupted_one() -> None:
    fleet = StackedFleet(RandomMatchings(SIZE, seed=1), seed=9)
    gradient, start = per_agent(loss, *problem(), batch=2), torch.zeros(DIMENSION, dtype=torch.float64)

    def distance(x: torch.Tensor) -> dict[str, float]:
        return {"distance": float(x.norm())}

    full = fleet.run(GradientDescent(0.05), start, gradient, 12, measure=distance)
    half = fleet.run(GradientDescent(0.05), start, gradient, 5, measure=distance)
    rest = fleet.run(GradientDescent(0.05), start, gradient, 7, measure=distance, resume=half)
    assert torch.equal(full.x, rest.x)
    assert full.records == rest.records
    assert (full.rounds, full.exchanges, full.sent) == (rest.rounds, rest.exchanges, rest.sent)
    assert len(half.records) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_small_sparse_product_has_one_thread_and_the_bits_of_two(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    weights = ScheduleWeights(graphs.MeshGrid2DGraph(12))[0]
    x = torch.randn(12, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    with_threads, result, seen = torch.get_num_threads(), [], list[int]()
    try:
        torch.set_num_threads(2)
        for limit in (mixing_products._ONE_THREAD, 0):
            monkeypatch.setattr(mixing_products, "_ONE_THREAD", limit)
            multiply, out = mixing_products.product(weights, "mix", dtype, x.device), torch.empty_like(x)
            with _Counting(seen):
                multiply(out, x)
            result.append(out)
            assert torch.get_num_threads() == 2
        assert seen == [1, 2]
        assert torch.equal(*result)
    finally:
        torch.set_num_threads(with_threads)


class _Counting(TorchFunctionMode):
    """Notes how many threads a sparse product has."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("mm", "matmul", "__matmul__", "__rmatmul__"):
            self._seen.append(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


def test_a_run_refuses_a_class_of_algorithms_and_a_part_of_a_step() -> None:
    fleet, x = StackedFleet(ring(4)), torch.ones(4, 2)
    kind: Any = GradientDescent
    with pytest.raises(TypeError, match=r"an algorithm of shoal\.algorithms is wanted, .* not <class"):
        fleet.run(kind, x, torch.zeros_like, 2)
    part: Any = 1.5
    with pytest.raises(TypeError, match=r"steps must be an int, got 1\.5"):
        fleet.run(GradientDescent(lr=0.1), x, torch.zeros_like, part)
