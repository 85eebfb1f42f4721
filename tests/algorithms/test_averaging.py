"""A mixing that cannot bring an algorithm's agents together is refused: what is found is compared with runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.algorithms import (
    BEER,
    CATALOG,
    EXTRA,
    NIDS,
    Algorithm,
    AveragedMomentum,
    ChocoSGD,
    DecentLaM,
    DualAveraging,
    Entry,
    ExactDiffusion,
    GossipPGA,
    Gradient,
    GradientDescent,
    GradientTracking,
    LocalSteps,
    Momentum,
    OfMachines,
    PushPull,
    check,
)
from shoal.algorithms.needs import Facts
from shoal.algorithms.runs.run import steps_of
from shoal.algorithms.stability import growth as module
from shoal.algorithms.stability.growth import DIES_OUT, by_self_weights
from shoal.algorithms.stability.linear_map import growth_of
from shoal.compression import Identity
from shoal.sim import StackedFleet, StackedMix
from shoal.topology import (
    Circulant,
    OnePeerExponential,
    RandomMatchings,
    Schedule,
    Static,
    between_machines,
)
from shoal.topology.families.static import ring
from shoal.topology.schedule import Edges, EdgeSchedule, assemble
from support.algorithm_cases import case_of


class Rounds(EdgeSchedule):
    """These matrices in turn."""

    def __init__(self, *matrices: np.ndarray, name: str) -> None:
        self._matrices, self.size, self.period, self._name = matrices, len(matrices[0]), len(matrices), name

    def _edges(self, round: int) -> Edges:
        W = self._matrices[round % len(self._matrices)]
        destination, source = np.nonzero(W)
        return assemble(self.size, destination, source, W[destination, source])

    def describe(self) -> str:
        return self._name


def permuted(matrix: np.ndarray, seed: int) -> np.ndarray:
    """The same with other ranks."""
    order = np.random.default_rng(seed).permutation(len(matrix))
    return matrix[np.ix_(order, order)]


def bipartite(size: int, own: float = 0.0) -> np.ndarray:
    """Everybody averages with all of the other side, and keeps ``own``."""
    half = size // 2
    between = np.full((half, half), (1 - own) / half)
    return np.block([[own * np.eye(half), between], [between.T, own * np.eye(half)]])


_PAIRS = np.array([[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]]) / 2
_BACK = np.array([[1, 0, 1, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 1, 0, 1]]) / 2

TOPOLOGIES: dict[str, Schedule] = {
    "-1, in a ring": Circulant(4, {1: 0.5, 3: 0.5}),
    "-1, in float32": Static(bipartite(6).astype(np.float32).astype(np.float64)),
    "2": Static(np.array([[1.5, -0.5], [-0.5, 1.5]])),
    "-2": Static(np.array([[-0.5, 1.5], [1.5, -0.5]])),
    "a fifth of a turn": Circulant(5, {1: 1.0}),
    "beyond 1, complex": Static(permuted(np.eye(5) - 0.9 * (np.eye(5) - np.roll(np.eye(5), 1, 0)) * 1.4, 0)),
    "-1, over a period of two": Rounds(*(permuted(bipartite(6), seed) for seed in (3, 3)), name="twice the same"),
    "1, over a period of rounds that are fine": Rounds(_PAIRS, _BACK, name="pairs and back"),
    "-1/3": ring(4),
    "a little above -1": Static(bipartite(6, 0.1)),
    "fine": Circulant(4, {0: 0.5, 1: 0.25, -1: 0.25}),
    "fine, changing": OnePeerExponential(4),
    "fine, without a period": RandomMatchings(4, seed=1),
    "negative, and fine": Static(permuted(np.array([[0.7, 0.4, -0.1], [0.4, 0.2, 0.4], [-0.1, 0.4, 0.7]]), 0)),
}
every_entry = pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=name, marks=[pytest.mark.slow] if place % 4 else [])
        for place, (name, entry) in enumerate(CATALOG.items())
    ],
)
WRAPPED: list[Algorithm] = [
    LocalSteps(PushPull(0.01), 3),
    LocalSteps(AveragedMomentum(0.01, 0.5), 2),
    GossipPGA(GradientTracking(0.01), 7),
    Momentum(EXTRA(0.01), 0.5),
    Momentum(ChocoSGD(0.01, 0.9, Identity()), 0.5),
    ChocoSGD(0.01, 1.0, Identity()),
    BEER(0.01, 1.0, Identity()),
    NIDS(0.01, prox=torch.nn.Softshrink(0.01)),
]


def refused(algorithm: Algorithm, topology: Schedule) -> str:
    """The problem found by the condition on differences; empty where the algorithm has no such condition."""
    return next((need.problem(Facts(topology)) for need in algorithm.needs if need.name == DIES_OUT), "")


def remaining_fraction(algorithm: Algorithm, topology: Schedule, steps: int) -> float:
    """The fraction of the differences that remains after steps without a gradient.

    A few steps with a gradient have made the differences.
    """
    start = torch.randn(topology.size, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = torch.Generator().manual_seed(1)
    mix = StackedMix(topology, seed=2)
    few = algorithm.cycle(topology.period or 1) * 2 + 3
    grad = Gradient(lambda x: torch.randn(x.shape, dtype=x.dtype, generator=noise))
    before = steps_of(algorithm, start, grad, mix, few)
    after = steps_of(algorithm, start, torch.zeros_like, mix, steps, resume=before)

    def disagreement(run: object) -> float:
        # Dual averaging divides what agents agree on by the root of the step.
        x = run.state[0] if isinstance(algorithm, DualAveraging) else run.x  # type: ignore[attr-defined]
        return float((x - x.mean(0)).norm())

    return disagreement(after) / disagreement(before) if disagreement(before) else 0.0


def mentions_w(algorithm: Algorithm, topology: Schedule) -> bool:
    """What else it needs is there."""
    facts = Facts(topology)
    return not any(need.problem(facts) for need in algorithm.needs if need.name != DIES_OUT)


@every_entry
def test_exactly_the_mixings_without_consensus_are_refused(entry: Entry) -> None:
    algorithm = entry.example()
    if case_of(entry).compressed and hasattr(algorithm, "compressor"):
        # Gamma has to suit the compressor, too, which is not looked at.
        algorithm = replace(algorithm, compressor=Identity())
    for name in TOPOLOGIES:
        compare(algorithm, name)


@pytest.mark.parametrize("algorithm", WRAPPED, ids=repr)
def test_wrapped_algorithms_are_checked_like_plain_ones(algorithm: Algorithm) -> None:
    for name in TOPOLOGIES:
        compare(algorithm, name)


def compare(algorithm: Algorithm, name: str) -> None:
    topology = TOPOLOGIES[name]
    if not mentions_w(algorithm, topology):
        facts = Facts(topology)
        need = next(need for need in algorithm.needs if need.name != DIES_OUT and need.problem(facts))
        is_warning = need.tolerated(facts)
        with pytest.warns(UserWarning, match="needs") if is_warning else pytest.raises(ValueError, match="needs"):
            check("it", algorithm.needs, topology)
        return
    result = refused(algorithm, topology)
    remains = remaining_fraction(algorithm, topology, 200)
    assert remains > 0.2 if result else remains < 0.1, (name, result, remains)


def test_the_error_names_the_eigenvalue_and_the_remedy() -> None:
    for name, eigenvalue in (
        ("-1, in a ring", r"W has the eigenvalue -1 \("),
        ("-1, in float32", r"W has the eigenvalue -1 \("),
        ("2", r"grow 2 times in a step of .*; W has the eigenvalue 2 \("),
        ("a fifth of a turn", r"W has the eigenvalue 0\.309017 \+ 0\.951057i \("),
        ("-1, over a period of two", r"never shrink .*2 steps have the eigenvalue 1 \("),
        ("1, over a period of rounds that are fine", r"never shrink .*2 steps have the eigenvalue 1 \("),
    ):
        with pytest.raises(ValueError, match=rf"differences between agents to die out.*{eigenvalue}.*\(I \+ W\) / 2"):
            StackedFleet(TOPOLOGIES[name]).run(GradientDescent(0.05), torch.zeros(1), lambda x: x, 1)
    StackedFleet(TOPOLOGIES["2"]).run(GradientDescent(0.05), torch.zeros(1), lambda x: x, 1, unchecked=DIES_OUT)


def test_the_remedy_works() -> None:
    W = TOPOLOGIES["-1, in a ring"].matrix(0)
    for algorithm in (GradientDescent(0.05), GradientTracking(0.05), GradientTracking(0.05, atc=False)):
        check("it", algorithm.needs, Static((np.eye(4) + W) / 2))


@pytest.mark.parametrize(
    "algorithm",
    [EXTRA(0.1), ExactDiffusion(0.1, lazy=True), NIDS(0.1), DecentLaM(0.02, 0.9), GossipPGA(GradientDescent(0.05), 5)],
    ids=repr,
)
def test_corrections_for_an_eigenvalue_of_minus_one_converge_on_it(algorithm: Algorithm) -> None:
    target = torch.arange(4.0, dtype=torch.float64).view(4, 1)
    run = StackedFleet(TOPOLOGIES["-1, in a ring"]).run(algorithm, torch.zeros(1).double(), lambda x: x - target, 3000)
    assert (run.x - 1.5).abs().max() < 0.5


def test_the_mixing_of_machines_is_checked() -> None:
    algorithm = OfMachines(GradientDescent(0.05))
    check("it", algorithm.needs, between_machines(ring(4), 2))
    with pytest.raises(ValueError, match="W has the eigenvalue -1"):
        check("it", algorithm.needs, between_machines(Circulant(4, {1: 0.5, 3: 0.5}), 2))


def test_slow_mixings_of_any_size_are_accepted() -> None:
    for topology in (ring(20_000), OnePeerExponential(30_000), Static(permuted(ring(300).matrix(0), 1))):
        for algorithm in (GradientDescent(0.05), GossipPGA(GradientTracking(0.01), 7)):
            check("it", algorithm.needs, topology)
    rounded = {hop: float(np.float32(share)) for hop, share in ((0, 1 / 3), (1, 1 / 3), (-1, 1 / 3))}
    check("it", GradientDescent(0.05).needs, Circulant(20_000, rounded))
    assert growth_of(GradientDescent(0.05), Facts(Circulant(20_000, rounded))).per_step < 1


def test_large_periodic_mixings_are_refused() -> None:
    for topology in (
        Circulant(20_000, {1: 0.5, -1: 0.5}),
        Static(permuted(Circulant(700, {1: 0.5, -1: 0.5}).matrix(0), 1)),
    ):
        with pytest.raises(ValueError, match="eigenvalue -1"):
            check("it", GradientDescent(0.05).needs, topology)


def test_signs_agree_with_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    for topology in TOPOLOGIES.values():
        decided = by_self_weights()(Facts(topology))
        if decided is not None:
            assert (growth_of(GradientDescent(0.05), Facts(topology)).per_step > 1 - 1e-6) == bool(decided)


def test_a_topology_is_checked_once_for_all_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    result: Callable[..., object] = module.growth_of
    monkeypatch.setattr(module, "growth_of", lambda *given: calls.append(given) or result(*given))
    W = permuted(np.array([[0.7, 0.4, -0.1], [0.4, 0.2, 0.4], [-0.1, 0.4, 0.7]]), 5) + 1e-9
    W -= np.diag(W.sum(1) - 1)
    for _ in range(5):
        check("it", GradientDescent(0.05).needs, Static(W))
        check("it", GradientDescent(0.05).needs, OnePeerExponential(8))
    assert len(calls) == 1
    W[0, 0], W[0, 1], W[1, 0], W[1, 1] = W[0, 0] + 1, W[0, 1] - 1, W[1, 0] - 1, W[1, 1] + 1
    with pytest.raises(ValueError, match="grow"):
        check("it", GradientDescent(0.05).needs, Static(W))
