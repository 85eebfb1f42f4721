"""Properties of every algorithm in the catalog: one object gives one result, wherever it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle

import networkx as nx
import pytest
import torch
from torch import Tensor

import shoal
from shoal.algorithms import CATALOG, Algorithm, Entry, Gradient, check
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
def test_agents_that_are_never_connected_are_refused(entry: Entry) -> None:
    apart = nx.DiGraph([(0, 0), (1, 1), (2, 2), (3, 3)])
    example: Algorithm = entry.example()
    with pytest.raises(ValueError, match=r"needs W to be .*, and "):
        check(entry.name, example.needs, apart)
