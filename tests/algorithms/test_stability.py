"""Learning rates: the matrix of a period's steps predicts a run, and the rates reported as stable are stable."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from shoal.algorithms import (
    CATALOG,
    EXTRA,
    AccumAdam,
    Algorithm,
    DecentralizedADMM,
    Entry,
    GradientDescent,
    GradientTracking,
    LocalSteps,
    OfMachines,
    PowerGossip,
    PushDIGing,
    PushPull,
    QuasiGlobalMomentum,
    RelaySum,
    safe_lr,
)
from shoal.algorithms.needs import Facts, first_problem
from shoal.algorithms.runs.run import steps_of
from shoal.algorithms.stability.growth import _digest, spectral_radius, step_matrix
from shoal.sim import StackedFleet, StackedMix
from shoal.topology import CATALOG as TOPOLOGIES
from shoal.topology import ChainGraph, OnePeerExponential, Schedule, as_schedule
from shoal.topology.families.static import ring
from support.algorithm_cases import irregular_digraph

L = 4.0
"""Of the catalog's examples."""
SWEPT = [
    pytest.param(entry, id=entry.name)
    for entry in CATALOG.values()
    if entry.exact or entry.name.startswith("D-PSGD, adapt")
]
"""Those that promise to converge to the optimum, and the two plain ones."""
SIZES = (4, 5, 8)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that share the work on matrices as small as these wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def topologies() -> list[Facts]:
    """Those of the catalog, of so many agents; each once that has several names."""
    result = dict[bytes, Facts]()
    for size in SIZES:
        for topology in TOPOLOGIES.values():
            if not topology.refuses(size):
                facts = Facts(topology.schedule(size), dimension=10)
                if facts.schedule.period is None:  # random rounds, which are drawn anew each time unless they are held
                    facts.rounds = {number: facts.rounds[number] for number in range(facts.looked_at)}  # type: ignore[assignment]
                result.setdefault(_digest(facts), facts)
    return list(result.values())


def curvatures(size: int) -> Iterator[torch.Tensor]:
    """Of the agents, float64 [n, 1]: all alike, of one agent only, and drawn."""
    drawn = torch.rand(8, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    yield torch.full((size, 1), L, dtype=torch.float64)
    yield L * (torch.arange(size) == 0).to(torch.float64).unsqueeze(1)
    yield L * drawn[:size]


def radius(algorithm: Algorithm, topology: Facts | Schedule, curvature: torch.Tensor) -> float:
    facts = Facts(topology) if isinstance(topology, Schedule) else topology
    return spectral_radius(step_matrix(algorithm, facts, curvature))


@pytest.mark.slow  # test_averaging.py has the radius of fewer topologies
@pytest.mark.parametrize("entry", SWEPT)
def test_examples_of_the_catalog_converge_on_every_topology_that_they_accept(entry: Entry) -> None:
    algorithm = entry.example()
    accepted = [facts for facts in topologies() if not first_problem(algorithm.needs, facts)]
    assert accepted
    for facts in accepted:
        for curvature in curvatures(facts.size):
            result = radius(algorithm, facts, curvature)
            assert result < 1 + 1e-7, f"{facts.schedule.describe()}: {result} with curvatures {curvature.view(-1)}"


def test_the_radius_is_found_where_the_eigenvalue_iteration_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shift = torch.diag(torch.ones(3, dtype=torch.float64), 1)
    rotation = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    expected = [float(torch.linalg.eigvals(one).abs().max()) for one in (drawn, rotation)]

    def fails(matrix: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "eigvals", fails)
    assert [spectral_radius(one) for one in (drawn, rotation)] == pytest.approx(expected, rel=1e-9)
    assert spectral_radius(shift) == 0
    assert spectral_radius(shift * math.inf) == math.inf


@pytest.mark.parametrize("algorithm", [PushPull(0.08, atc=False), GradientTracking(0.08, atc=False)], ids=repr)
def test_equal_agents_with_equal_objectives_do_not_show_an_unstable_rate(
    algorithm: Algorithm,
) -> None:
    """On a ring of 8 AB has the radius 1.166 at 0.08. Only differences grow, and such a run has none."""
    curvature = torch.full((8, 1), L, dtype=torch.float64)
    assert radius(algorithm, ring(8), curvature) > 1.1
    drawn = torch.randn(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def length(start: torch.Tensor) -> float:
        return float(steps_of(algorithm, start, lambda x: curvature * x, StackedMix(ring(8)), 300).x.norm())

    assert length(drawn[:1].expand(8, 2)) < 1e-6
    assert length(drawn) > 1e6
    assert length(drawn[:1] + 1e-9 * drawn) > 1e6


RUNS: list[tuple[Algorithm, Schedule]] = [
    (GradientTracking(0.1, atc=False), ring(4)),
    (GradientTracking(0.02, atc=False), ring(4)),
    (PushDIGing(0.03), as_schedule(irregular_digraph(5))),
    (EXTRA(0.4), ring(4)),
    (RelaySum(0.6), as_schedule(ChainGraph(5))),
    (RelaySum(0.05), as_schedule(ChainGraph(5))),
    (LocalSteps(GradientTracking(0.2), 2), OnePeerExponential(4)),
    (QuasiGlobalMomentum(0.05, 0.9), ring(5)),
]


@pytest.mark.parametrize(("algorithm", "topology"), RUNS, ids=[f"{one} on {other.describe()}" for one, other in RUNS])
def test_the_matrix_says_whether_a_run_diverges(algorithm: Algorithm, topology: Schedule) -> None:
    curvature = L * torch.linspace(0.2, 1.0, topology.size, dtype=torch.float64).unsqueeze(1)
    start = torch.randn(topology.size, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = steps_of(algorithm, start, lambda x: curvature * x, StackedMix(topology), 1200).x
    grows = radius(algorithm, topology, curvature) > 1 + 1e-7
    assert grows == (not float(x.norm()) < 1)
    assert grows or float(x.norm()) < 1e-6


SAFE: list[tuple[Algorithm, Schedule]] = [
    (GradientDescent(1.0), ring(8)),
    (GradientDescent(1.0, atc=False), ring(8)),
    (GradientTracking(1.0), as_schedule(TOPOLOGIES["base-2"].schedule(5))),
    (GradientTracking(1.0, atc=False), ring(8)),
    (GradientTracking(1.0, atc=False), as_schedule(TOPOLOGIES["torus"].schedule(8))),
]


@pytest.mark.parametrize(("algorithm", "topology"), SAFE, ids=[f"{one} on {other.describe()}" for one, other in SAFE])
def test_a_safe_learning_rate_converges_on_objectives_of_different_agents(
    algorithm: Algorithm, topology: Schedule
) -> None:
    lr = safe_lr(algorithm, topology, L)
    assert 1e-3 < lr < 2 / L
    scaled = algorithm.scaled(lr)
    assert scaled is not None
    H, target = hessians(topology.size)
    run = StackedFleet(topology).run(
        scaled, torch.zeros(3).double(), lambda x: (H @ (x - target).unsqueeze(-1)).squeeze(-1), 3000
    )
    assert run.estimate.abs().max() < 10
    again = StackedFleet(topology).run(
        scaled, torch.zeros(3).double(), lambda x: (H @ (x - target).unsqueeze(-1)).squeeze(-1), 200, resume=run
    )
    assert (again.estimate.mean(0) - run.estimate.mean(0)).abs().max() < 0.1


def hessians(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of different agents, whose eigenvectors differ, with the largest eigenvalue L: [n, 3, 3]; and optima [n, 3]."""
    generator = torch.Generator().manual_seed(5)
    roots = torch.randn(size, 3, 3, dtype=torch.float64, generator=generator)
    result = roots.mT @ roots
    result = result * (L / torch.linalg.eigvalsh(result).amax(-1)).view(-1, 1, 1)
    return result, torch.randn(size, 3, dtype=torch.float64, generator=generator)


def test_a_safe_learning_rate_is_inverse_to_the_curvature_and_not_of_the_example() -> None:
    result = safe_lr(GradientTracking(0.1, atc=False), ring(4), 4.0)
    assert safe_lr(GradientTracking(3.0, atc=False), ring(4), 4.0) == pytest.approx(result, rel=1e-9)
    assert safe_lr(GradientTracking(0.1, atc=False), ring(4), 400.0) == pytest.approx(result / 100, rel=1e-9)
    assert 0.5 < 4 * safe_lr(GradientDescent(0.1), ring(4), 4.0) < 2
    # Adapt with combine bears (1 + smallest eigenvalue) / L, 2 / 3 of it on a ring of four.
    assert 0.5 * (2 / 3) < 4 * safe_lr(GradientDescent(0.1, atc=False), ring(4), 4.0) < 2 * (2 / 3)


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        (DecentralizedADMM(1.0, 4.0), "has no learning rate"),
        (AccumAdam(0.1, 2), "are not linear"),
        (PowerGossip(0.1), "are not linear"),
        (OfMachines(GradientDescent(0.1)), "are not linear"),
    ],
    ids=repr,
)
def test_without_a_matrix_the_reason_is_returned(algorithm: Algorithm, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        safe_lr(algorithm, ring(4), 4.0)


def test_cases_without_an_answer_are_refused() -> None:
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="Lipschitz constant"):
            safe_lr(GradientDescent(0.1), ring(4), wrong)
    with pytest.raises(ValueError, match="1000 agents are too many"):
        safe_lr(GradientDescent(0.1), ring(1000), 1.0)
