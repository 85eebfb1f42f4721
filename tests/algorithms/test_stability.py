"""Learning rates: the matrix of a period's steps says what a run does, and those that are called safe are."""

from __future__ import annotations

from collections.abc import Iterator

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
    QuasiGlobalMomentum,
    RelaySum,
    safe_lr,
)
from shoal.algorithms.loop import steps_of
from shoal.algorithms.needs import Facts, first_problem
from shoal.algorithms.stability import step_matrix
from shoal.sim import StackedFleet, StackedMix
from shoal.topology import CATALOG as TOPOLOGIES
from shoal.topology import ChainGraph, OnePeerExponential, Schedule, as_schedule
from shoal.topology.families.circulant import ring
from support.algorithm_cases import irregular_digraph

L = 4.0
"""Of the catalog's examples."""
SWEPT = ("D-PSGD, adapt then combine", "D-PSGD, adapt with combine", "DIGing", "AB", "EXTRA", "NIDS")


def accepted(algorithm: Algorithm, sizes: tuple[int, ...]) -> Iterator[Schedule]:
    """The catalog's topologies, of so many agents, on which it may run."""
    for size in sizes:
        for topology in TOPOLOGIES.values():
            if not topology.refuses(size):
                schedule = topology.schedule(size)
                if not first_problem(algorithm.needs, Facts(schedule, dimension=10)):
                    yield schedule


def radius(algorithm: Algorithm, topology: Schedule, curvature: torch.Tensor) -> float:
    return float(torch.linalg.eigvals(step_matrix(algorithm, Facts(topology), curvature)).abs().max())


@pytest.mark.parametrize("entry", [pytest.param(CATALOG[name], id=name) for name in SWEPT])
def test_examples_of_the_catalog_converge_on_every_topology_that_they_accept(entry: Entry) -> None:
    algorithm = entry.example()
    drawn = torch.rand(8, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for topology in accepted(algorithm, (4, 5, 8)):
        for curvature in (torch.full((topology.size, 1), L, dtype=torch.float64), L * drawn[: topology.size]):
            assert radius(algorithm, topology, curvature) < 1 + 1e-7, topology.describe()


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
    found = roots.mT @ roots
    found = found * (L / torch.linalg.eigvalsh(found).amax(-1)).view(-1, 1, 1)
    return found, torch.randn(size, 3, dtype=torch.float64, generator=generator)


def test_a_safe_learning_rate_is_inverse_to_the_curvature_and_not_of_the_example() -> None:
    found = safe_lr(GradientTracking(0.1, atc=False), ring(4), 4.0)
    assert safe_lr(GradientTracking(3.0, atc=False), ring(4), 4.0) == pytest.approx(found, rel=1e-9)
    assert safe_lr(GradientTracking(0.1, atc=False), ring(4), 400.0) == pytest.approx(found / 100, rel=1e-9)
    assert 0.5 < 4 * safe_lr(GradientDescent(0.1), ring(4), 4.0) < 2
    # Adapt with combine bears (1 + smallest eigenvalue) / L, 2 / 3 of it on a ring of four.
    assert 0.5 * (2 / 3) < 4 * safe_lr(GradientDescent(0.1, atc=False), ring(4), 4.0) < 2 * (2 / 3)


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        (DecentralizedADMM(1.0, 4.0), "has no learning rate"),
        (AccumAdam(0.1, 2), "are not linear"),
        (PowerGossip(0.1), "are not linear"),
        (OfMachines(GradientDescent(0.1)), "are not linear"),
    ],
    ids=repr,
)
def test_where_no_matrix_tells_it_is_said(algorithm: Algorithm, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        safe_lr(algorithm, ring(4), 4.0)


def test_what_has_no_answer_is_refused() -> None:
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="Lipschitz constant"):
            safe_lr(GradientDescent(0.1), ring(4), wrong)
    with pytest.raises(ValueError, match="1000 agents are too many"):
        safe_lr(GradientDescent(0.1), ring(1000), 1.0)
