"""Properties of every algorithm in the catalog: one object gives one result, wherever it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor

import shoal
from shoal.algorithms import (
    CATALOG,
    EASGD,
    KGT,
    LED,
    AccumAdam,
    Algorithm,
    ChocoSGD,
    DecentralizedADMM,
    DecentralizedSVRG,
    DeMuon,
    DiLoCo,
    Entry,
    GASLoC,
    GossipPGA,
    Gradient,
    GradientDescent,
    LocalSteps,
    Momentum,
    NoLoCo,
    OfMachines,
    PowerGossip,
    PushSum,
    RobustMixing,
    SlowMo,
    check,
)
from shoal.compression import QSGD, LowRank, MinMaxUInt8, Shrunk, TopK, Zstd
from shoal.robust import FiniteOnly
from shoal.sim import StackedFleet, per_agent
from support.algorithm_cases import CASES, case_of
from support.least_squares import DIMENSION, SIZE, loss, optimum, problem
from support.quadratic import gradients
from support.real_agents import binary_problem, binary_ring, run_binary, run_one
from support.world import World

Fleets = Callable[..., shoal.Fleet]
STEPS = 30  # longer than any period in the catalog: of a schedule, of local steps, of variance reduction
BINARY_STEPS = 5
LONG = 1500
"""Steps that an exact one takes at most; those that converge in more are slow tests."""
REAL_SIZE = 4
IN_PROCESSES = ("D-PSGD", "RelaySGD", "SGP", "push-pull", "CHOCO-SGD", "PowerGossip")
"""Of each kind of mixing and of messages; that the others do not know a thread from a process, slow tests say."""

every_entry = pytest.mark.parametrize("entry", [pytest.param(one, id=name) for name, one in CATALOG.items()])
compressed_entry = pytest.mark.parametrize(
    "entry", [pytest.param(one, id=name) for name, one in CATALOG.items() if case_of(one).compressed]
)
smooth_in_processes, compressed_in_processes = (
    pytest.mark.parametrize(
        "entry",
        [
            pytest.param(one, id=name, marks=[] if name in IN_PROCESSES else [pytest.mark.slow])
            for name, one in CATALOG.items()
            if case_of(one).compressed == is_
        ],
    )
    for is_ in (False, True)
)


def test_cases_are_in_the_catalog_and_exact_ones_give_their_number_of_steps() -> None:
    assert CASES.keys() <= CATALOG.keys()
    assert {name for name, case in CASES.items() if case.steps} == {
        value.name for value in CATALOG.values() if value.exact
    }


def stacked(entry: Entry, size: int, steps: int) -> Tensor:
    """The estimates of a stacked fleet, float64 [size, d]."""
    return stacked_on(entry, per_agent(loss, *problem(size)), size, steps)


def stacked_on(entry: Entry, gradient: Gradient | Callable[[Tensor], Tensor], size: int, steps: int) -> Tensor:
    start = torch.zeros(DIMENSION, dtype=torch.float64)
    return StackedFleet(case_of(entry).topology(size), seed=3).run(entry.example(), start, gradient, steps).estimate


def stacked_binary(entry: Entry, size: int) -> Tensor:
    """The same where all numbers are exact in binary, and few steps enough that all fit into 53 bits."""
    a, b = binary_problem(size)
    start = torch.zeros(DIMENSION, dtype=torch.float64)
    fleet = StackedFleet(binary_ring(size), seed=3)
    return fleet.run(entry.example(), start, lambda x: a * (x - b), BINARY_STEPS).estimate


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(REAL_SIZE) as one:
        yield one


def over_transports(entries: Iterable[Entry]) -> pytest.MarkDecorator:
    """Each algorithm over one of the transports that a fleet's threads take turns with; processes share memory below.

    That transports agree is for ``tests/ops``; an algorithm does not know over which one it runs.
    """
    pairs = zip(entries, cycle(("threads", "network")), strict=False)
    cases = [pytest.param(one, name, id=f"{name}-{one.name}", marks=pytest.mark.transport(name)) for one, name in pairs]
    return pytest.mark.parametrize(("entry", "transport"), cases, indirect=["transport"])


@over_transports(value for value in CATALOG.values() if not case_of(value).compressed)
def test_a_fleet_agrees_with_the_stacked_fleet(entry: Entry, fleet: Fleets) -> None:
    results = torch.tensor(fleet(REAL_SIZE).run(run_one, entry.name, STEPS), dtype=torch.float64)
    assert (results - stacked(entry, REAL_SIZE, STEPS)).abs().max() < 1e-12


@smooth_in_processes
@pytest.mark.transport("shared_memory")
def test_processes_agree_with_the_stacked_fleet(entry: Entry, world: World) -> None:
    result = torch.tensor(world.results(run_one, entry.name, STEPS), dtype=torch.float64)
    assert (result - stacked(entry, REAL_SIZE, STEPS)).abs().max() < 1e-12


# One bit more or less in a sum may make a compressor choose otherwise, or PowerGossip take another way: these agree
# exactly, or not at all.
@compressed_entry
def test_threads_agree_exactly_on_numbers_exact_in_binary(entry: Entry, fleet: Fleets) -> None:
    results = torch.tensor(fleet(REAL_SIZE).run(run_binary, entry.name, BINARY_STEPS), dtype=torch.float64)
    assert torch.equal(results, stacked_binary(entry, REAL_SIZE))


@compressed_in_processes
@pytest.mark.transport("shared_memory")
def test_processes_agree_exactly_on_numbers_exact_in_binary(entry: Entry, world: World) -> None:
    result = torch.tensor(world.results(run_binary, entry.name, BINARY_STEPS), dtype=torch.float64)
    assert torch.equal(result, stacked_binary(entry, REAL_SIZE))


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(one, id=name, marks=[pytest.mark.slow] if case_of(one).steps > LONG else [])
        for name, one in CATALOG.items()
        if one.exact
    ],
)
def test_exact_algorithms_find_the_optimum(entry: Entry) -> None:
    assert (stacked_on(entry, gradients(), SIZE, case_of(entry).steps) - optimum()).abs().max() < 1e-8


@every_entry
def test_a_resumed_run_equals_an_uninterrupted_one(entry: Entry) -> None:
    fleet = StackedFleet(case_of(entry).topology(SIZE), seed=1)
    gradient = per_agent(loss, *problem(), batch=5)
    start = torch.zeros(DIMENSION, dtype=torch.float64)
    full = fleet.run(entry.example(), start, gradient, 30)
    half = fleet.run(entry.example(), start, gradient, 13)
    rest = fleet.run(entry.example(), start, gradient, 17, resume=half)
    assert torch.equal(full.x, rest.x)
    assert torch.equal(full.estimate, rest.estimate)
    assert (full.steps, full.sent) == (rest.steps, rest.sent)


@every_entry
def test_sent_bytes_are_those_of_the_catalog(entry: Entry) -> None:
    topology = shoal.topology.as_schedule(case_of(entry).topology(SIZE))
    fleet = StackedFleet(topology)
    start = torch.zeros(SIZE, 1000, dtype=torch.float64)

    def sent(steps: int) -> int:
        return fleet.run(entry.example(), start, lambda x: x - 1, steps).sent

    edges = [topology.edges(round_) for round_ in range(10, 20)]
    links = sum(int((edge.destination != edge.source).sum()) for edge in edges)
    messages = (sent(20) - sent(10)) / (8000 * links)
    # Beside tensors there may be single numbers, such as the weight of push-sum.
    assert messages == pytest.approx(entry.messages, rel=0.01)


@every_entry
def test_neither_the_start_nor_the_state_is_changed(entry: Entry) -> None:
    fleet = StackedFleet(case_of(entry).topology(SIZE))
    gradient = per_agent(loss, *problem())
    start = torch.randn(SIZE, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = start.clone()
    first = fleet.run(entry.example(), start, gradient, 5)
    kept = [first.x.clone(), *(one.clone() for one in first.state)]
    fleet.run(entry.example(), start, gradient, 5, resume=first)
    assert torch.equal(start, before)
    assert all(torch.equal(one, then) for one, then in zip([first.x, *first.state], kept, strict=True))


@every_entry
def test_parameters_without_numbers_are_stepped(entry: Entry) -> None:
    fleet = StackedFleet(case_of(entry).topology(SIZE))
    assert fleet.run(entry.example(), torch.zeros(SIZE, 0), lambda x: x - 1, 6).estimate.shape == (SIZE, 0)


COUNTS: list[tuple[str, Callable[[Any], object]]] = [
    ("every", lambda count: LocalSteps(GradientDescent(0.1), count)),
    ("every", lambda count: GossipPGA(GradientDescent(0.1), count)),
    ("every", lambda count: KGT(0.1, count)),
    ("every", lambda count: LED(0.1, count)),
    ("every", lambda count: SlowMo(GradientDescent(0.1), count, 0.5)),
    ("every", lambda count: DiLoCo(GradientDescent(0.1), count)),
    ("every", lambda count: NoLoCo(GradientDescent(0.1), count)),
    ("every", lambda count: GASLoC(GradientDescent(0.1), count)),
    ("every", lambda count: EASGD(0.1, count)),
    ("period", lambda count: DecentralizedSVRG(GradientDescent(0.1), count)),
    ("accumulate", lambda count: AccumAdam(0.1, count)),
    ("iterations", lambda count: DeMuon(0.1, iterations=count)),
    ("inner", lambda count: DecentralizedADMM(1.0, 4.0, count)),
    ("rank", lambda count: PowerGossip(0.1, rank=count)),
    ("rows", lambda count: PowerGossip(0.1, rows=count)),
    ("rank", lambda count: LowRank(count)),
    ("levels", lambda count: QSGD(count)),
    ("chunk", lambda count: QSGD(chunk=count)),
    ("chunk", lambda count: MinMaxUInt8(chunk=count)),
]


@pytest.mark.parametrize(("name", "make"), COUNTS)
def test_counts_that_are_no_whole_numbers_are_refused(name: str, make: Callable[[Any], object]) -> None:
    # A NaN is not below 1, and no step is divisible by it: agents would never exchange.
    for count in (math.nan, 2.5, "3"):
        with pytest.raises(TypeError, match=f"{name} must be an int, got {count!r}"):
            make(count)
    with pytest.raises(ValueError, match=f"{name}=0 must be 1 or more"):
        make(0)
    assert make(np.int64(2)) == make(2)


@pytest.mark.parametrize(
    ("algorithm", "error", "message"),
    [
        (GradientDescent("a"), TypeError, r"GradientDescent\(lr='a'\): a number is wanted"),  # type: ignore[arg-type]
        (GradientDescent(None), TypeError, r"lr=None"),  # type: ignore[arg-type]
        (GradientDescent(1j), TypeError, r"lr=1j"),  # type: ignore[arg-type]
        (GradientDescent(np.float32(math.nan)), ValueError, "lr=.*nan.*: a finite number of at least 0"),
        (LocalSteps(GradientDescent("a"), 2), TypeError, r"GradientDescent\(lr='a'\)"),  # type: ignore[arg-type]
        (
            GASLoC(GradientDescent(0.1), 2, alpha=math.nan),
            ValueError,
            r"GASLoC\(alpha=nan\): a finite number is wanted",
        ),
        (GASLoC(GradientDescent(0.1), 2, alpha=math.inf), ValueError, r"GASLoC\(alpha=inf\): a finite number"),
        (LED(0.1, 2, beta=math.nan), ValueError, r"LED\(beta=nan\)"),
        (LED(0.1, 2, beta=-math.inf), ValueError, r"LED\(beta=-inf\)"),
        (ChocoSGD(0.1, "a", TopK(0.5)), TypeError, r"ChocoSGD\(gamma='a'\)"),  # type: ignore[arg-type]
    ],
)
def test_numbers_that_are_none_are_refused_before_the_first_step(
    algorithm: Algorithm, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        StackedFleet(binary_ring(4)).run(algorithm, torch.zeros(3), lambda x: x - 1, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda wrong: Momentum(wrong, 0.5),
        lambda wrong: LocalSteps(wrong, 2),
        lambda wrong: NoLoCo(wrong, 2),
        lambda wrong: OfMachines(wrong),
        lambda wrong: RobustMixing(wrong, FiniteOnly()),
    ],
)
def test_wrappers_of_what_is_no_algorithm_are_refused(make: Callable[[Any], object]) -> None:
    for wrong in (GradientDescent, "x", TopK(0.1)):
        with pytest.raises(TypeError, match=r"an algorithm of shoal\.algorithms is wanted, as GradientDescent"):
            make(wrong)


def test_compressors_and_rules_that_are_none_and_numbers_out_of_range_are_refused() -> None:
    for around in (Shrunk, Zstd):
        with pytest.raises(TypeError, match=r"\(compressor=3\): a compressor is wanted"):
            around(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"RobustMixing\(rule=3\)"):
        RobustMixing(GradientDescent(0.1), 3)  # type: ignore[arg-type]
    for eps in (math.nan, math.inf, "a"):
        with pytest.raises(ValueError, match=f"eps={eps}"):
            MinMaxUInt8(eps=eps)  # type: ignore[arg-type]
    for c, rho in ((1.0, 0.0), (math.nan, 1.0), (1.0, math.inf), (-1.0, 3.0)):
        with pytest.raises(ValueError, match=f"c={c}, rho={rho}: pass a finite penalty from 0 up"):
            DecentralizedADMM(c, rho)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(4, 3, dtype=torch.int64), TypeError, r"x has torch\.int64: pass numbers with fractions"),
        (torch.zeros(3, dtype=torch.bool), TypeError, r"x has torch\.bool"),
        (np.zeros((4, 3)), TypeError, "x is a ndarray: pass a tensor"),
        (torch.tensor(1.0), ValueError, "x has no dimension"),
    ],
)
def test_initial_values_that_cannot_be_averaged_are_refused(x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        StackedFleet(binary_ring(4)).run(PushSum(), x, lambda x: x, 1)
    with pytest.raises(error, match=message):
        shoal.Fleet(1).run(lambda: shoal.algorithms.run(PushSum(), x, lambda x: x, binary_ring(1), 1))


@every_entry
def test_agents_that_are_never_connected_are_refused(entry: Entry) -> None:
    apart = nx.DiGraph([(0, 0), (1, 1), (2, 2), (3, 3)])
    example: Algorithm = entry.example()
    with pytest.raises(ValueError, match=r"needs W to be .*, and "):
        check(entry.name, example.needs, apart)
