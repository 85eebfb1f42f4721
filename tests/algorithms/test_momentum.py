"""Momentum: where it comes to rest, by linear algebra, and its path, by sums over all steps before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shoal.algorithms import (
    Algorithm,
    AveragedMomentum,
    DecentLaM,
    DecentralizedSVRG,
    DualAveraging,
    ExactDiffusion,
    GossipPGA,
    GradientDescent,
    GradientTracking,
    LocalSteps,
    Momentum,
    QuasiGlobalMomentum,
    Run,
    check,
)
from shoal.algorithms.needs import Facts
from shoal.algorithms.runs.run import steps_of
from shoal.algorithms.stability.linear_map import growth_of
from shoal.sim import StackedFleet, StackedMix
from shoal.topology import (
    Circulant,
    InnerOuterRing,
    OnePeerExponential,
    OnePeerHypercube,
    Schedule,
    ShiftOne,
    StarGraph,
    as_schedule,
    with_metropolis_hastings_weights,
)
from shoal.topology.families.static import exponential, ring
from support.closed_forms import gradient_of_all, gradients, matrix, on_all, rest_of_gradient_descent
from support.least_squares import DIMENSION, SIZE, optimum

LR, BETA = 0.04, 0.8
GRADIENT = gradients(SIZE)
START = torch.randn(SIZE, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
W = matrix(ring(SIZE))


def rest(algorithm: Algorithm, steps: int = 1500) -> torch.Tensor:
    """Where it ends, and stays."""
    fleet = StackedFleet(ring(SIZE))
    run = fleet.run(algorithm, START, GRADIENT, steps)
    assert (fleet.run(algorithm, START, GRADIENT, 1, resume=run).x - run.x).abs().max() < 1e-12
    return run.x


def path(algorithm: Algorithm, steps: int = 8) -> list[torch.Tensor]:
    fleet = StackedFleet(ring(SIZE))
    return [fleet.run(algorithm, START, GRADIENT, number).x for number in range(steps + 1)]


def unchecked(algorithm: Algorithm, topology: Schedule, steps: int) -> float:
    x = steps_of(algorithm, START, GRADIENT, StackedMix(topology), steps).x
    return float((x - optimum()).abs().max())


@pytest.mark.parametrize("atc", [True, False])
def test_the_fixed_point_of_gradient_descent_is_that_of_linear_algebra(atc: bool) -> None:
    assert (rest(GradientDescent(LR, atc)) - rest_of_gradient_descent(W, LR, atc)).abs().max() < 1e-10


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("atc", [True, False])
def test_the_fixed_point_of_local_momentum_is_that_of_gradient_descent_with_the_longer_step(
    atc: bool, nesterov: bool
) -> None:
    result = rest(Momentum(GradientDescent(LR * (1 - BETA), atc), BETA, nesterov))
    assert (result - rest_of_gradient_descent(W, LR, atc)).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("algorithm", "step"),
    [
        (DecentLaM(LR, BETA), LR),
        (QuasiGlobalMomentum(LR, BETA), LR),
        (QuasiGlobalMomentum(LR, BETA, nesterov=True), LR * (1 + BETA)),
    ],
    ids=("DecentLaM", "quasi-global", "quasi-global, Nesterov"),
)
def test_the_fixed_points_of_decentlam_and_quasi_global_momentum_are_that_of_gradient_descent(
    algorithm: Algorithm, step: float
) -> None:
    assert (rest(algorithm) - rest_of_gradient_descent(W, step, atc=True)).abs().max() < 1e-10


def test_the_fixed_point_of_averaged_momentum_is_that_of_linear_algebra() -> None:
    H, c = gradient_of_all(SIZE)
    mixing, unit = on_all(W), torch.eye(len(H), dtype=H.dtype)
    momentum = mixing @ torch.linalg.solve(unit - BETA * mixing, mixing)  # W m, with m = W (beta m + g), for each g
    expected = torch.linalg.solve(unit - mixing + LR * momentum @ H, LR * momentum @ c).view(SIZE, DIMENSION)
    assert (rest(AveragedMomentum(LR, BETA)) - expected).abs().max() < 1e-10


def test_the_order_of_final_errors_is_as_measured() -> None:
    lr, beta = 0.01, 0.9

    def off(x: torch.Tensor) -> float:
        return float((x.mean(0) - optimum()).norm())

    plain, longer = (off(rest_of_gradient_descent(W, step, atc=True)) for step in (lr, lr / (1 - beta)))
    averaged = off(StackedFleet(ring(SIZE)).run(AveragedMomentum(lr, beta), START, GRADIENT, 1500).x)
    assert plain < averaged < longer


def test_decentlam_is_heavy_ball_momentum_over_the_full_step() -> None:
    x = path(DecentLaM(LR, BETA))
    for before, current, then in zip([START, *x], x, x[1:], strict=False):
        expected = W @ (current - LR * GRADIENT(current)) + BETA * (current - before)
        assert (then - expected).abs().max() < 1e-12


@pytest.mark.parametrize("nesterov", [False, True])
def test_quasi_global_momentum_is_the_exponential_sum_of_all_moves(nesterov: bool) -> None:
    x = path(QuasiGlobalMomentum(LR, BETA, nesterov))
    for number in range(len(x) - 1):
        moves = [(1 - BETA) * BETA ** (number - 1 - k) * (x[k] - x[k + 1]) for k in range(number)]
        momentum = sum(moves, torch.zeros_like(START))
        current = LR * GRADIENT(x[number])
        direction = (1 + BETA) * current + BETA**2 * momentum if nesterov else current + BETA * momentum
        assert (x[number + 1] - W @ (x[number] - direction)).abs().max() < 1e-12


@pytest.mark.parametrize("nesterov", [False, True])
def test_local_momentum_is_the_exponential_sum_of_all_gradients(nesterov: bool) -> None:
    x = path(Momentum(GradientDescent(LR), BETA, nesterov))
    for number in range(len(x) - 1):
        gradients = [BETA ** (number - k) * GRADIENT(x[k]) for k in range(number + 1)]
        momentum = sum(gradients, torch.zeros_like(START))
        direction = GRADIENT(x[number]) + BETA * momentum if nesterov else momentum
        assert (x[number + 1] - W @ (x[number] - LR * direction)).abs().max() < 1e-12


def test_momentum_of_zero_is_the_algorithm_itself() -> None:
    plain = path(GradientDescent(LR))[-1]
    assert torch.equal(path(Momentum(GradientDescent(LR), 0.0))[-1], plain)
    assert torch.equal(path(QuasiGlobalMomentum(LR, 0.0))[-1], plain)
    assert (path(DecentLaM(LR, 0.0))[-1] - plain).abs().max() < 1e-12


def test_momentum_has_the_algorithms_answer() -> None:
    fleet = StackedFleet(ring(SIZE))
    plain = fleet.run(DualAveraging(LR), START, GRADIENT, 8)
    assert not torch.equal(plain.estimate, plain.x)
    assert torch.equal(fleet.run(Momentum(DualAveraging(LR), 0.0), START, GRADIENT, 8).estimate, plain.estimate)


def test_momentum_has_the_algorithms_requirements() -> None:
    with pytest.raises(ValueError, match=r"Momentum needs W to be static"):
        StackedFleet(OnePeerExponential(SIZE)).run(Momentum(ExactDiffusion(LR), BETA), START, GRADIENT, 1)


def test_momentum_is_refused_where_a_step_takes_its_gradient_at_another_point() -> None:
    with pytest.raises(TypeError, match=r"GradientTracking does not\. Take one with one_gradient = True"):
        Momentum(GradientTracking(LR), BETA)
    with pytest.raises(TypeError, match=r"LocalSteps does not.*put Momentum inside"):
        Momentum(LocalSteps(GradientDescent(LR), 2), BETA)


@pytest.mark.parametrize("beta", [-0.1, 1.0])
def test_an_invalid_share_is_refused(beta: float) -> None:
    makers: list[Callable[[], Algorithm]] = [
        lambda: Momentum(GradientDescent(LR), beta),
        lambda: DecentLaM(LR, beta),
        lambda: QuasiGlobalMomentum(LR, beta),
        lambda: AveragedMomentum(LR, beta),
    ]
    for make in makers:
        with pytest.raises(ValueError, match=r"0 <= beta < 1"):
            make()


@pytest.mark.parametrize("topology", [exponential(SIZE), OnePeerHypercube(SIZE)], ids=lambda one: one.describe())
def test_decentlam_is_refused_on_directed_and_changing_mixings_where_it_diverges(topology: Schedule) -> None:
    algorithm = DecentLaM(0.01, 0.9)
    with pytest.raises(ValueError, match=r"symmetric|static"):
        StackedFleet(topology).run(algorithm, START, GRADIENT, 1)
    assert not unchecked(algorithm, topology, 1000) < 1e3


@pytest.mark.parametrize("topology", [exponential(SIZE), OnePeerHypercube(SIZE)], ids=lambda one: one.describe())
def test_quasi_global_momentum_accepts_directed_and_changing_mixings(topology: Schedule) -> None:
    results = StackedFleet(topology).run(QuasiGlobalMomentum(0.01, 0.9), START, GRADIENT, 1000).x
    plain = StackedFleet(topology).run(GradientDescent(0.01), START, GRADIENT, 1000).x
    assert (results - optimum()).norm() < 1.5 * (plain - optimum()).norm()


def test_quasi_global_momentum_is_refused_where_it_amplifies_disagreement() -> None:
    little = Circulant(SIZE, {0: 0.1, 1: 0.45, -1: 0.45})
    for topology, beta in ((ring(SIZE, connect_style=2), 0.9), (little, 0.5)):
        algorithm = QuasiGlobalMomentum(0.01, beta)
        with pytest.raises(
            ValueError, match=r"die out under its momentum, and without any gradient they grow 1\..* times"
        ):
            StackedFleet(topology).run(algorithm, START, GRADIENT, 1)
        assert not unchecked(algorithm, topology, 3000) < 1e3
    assert unchecked(QuasiGlobalMomentum(0.01, 0.9), little, 3000) < 1
    check("it", QuasiGlobalMomentum(0.01, 0.9).needs, little)


def growth_seen(algorithm: Algorithm, topology: Schedule) -> float:
    """By which differences between agents grow in a step without any gradient, when they have done so for a while."""
    cycle = algorithm.cycle(topology.period or 1)
    steps = cycle * -(-150 // cycle)
    start = torch.randn(topology.size, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def still(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    def disagreement(run: Run) -> float:
        return float(torch.stack([one - one.mean(0) for one in (run.x, *run.state)]).norm())

    first = steps_of(algorithm, start - start.mean(0), still, StackedMix(topology), steps)
    second = steps_of(algorithm, start, still, StackedMix(topology), steps, resume=first)
    return (disagreement(second) / disagreement(first)) ** (1 / steps)


SWINGS = [
    (QuasiGlobalMomentum(0.1, 0.8), ShiftOne(10), False),
    (QuasiGlobalMomentum(0.1, 0.8), ShiftOne(12), True),
    (QuasiGlobalMomentum(0.1, 0.9), ShiftOne(12), False),
    (QuasiGlobalMomentum(0.1, 0.9), ShiftOne(16), True),
    (QuasiGlobalMomentum(0.1, 0.9, nesterov=True), ShiftOne(16), True),
    (QuasiGlobalMomentum(0.1, 0.9), InnerOuterRing(20, 4), True),
    (Momentum(QuasiGlobalMomentum(0.1, 0.8), 0.5), ShiftOne(12), True),
    (DecentralizedSVRG(QuasiGlobalMomentum(0.1, 0.8), 5), ShiftOne(12), True),
    (LocalSteps(QuasiGlobalMomentum(0.1, 0.9), 4), OnePeerExponential(16), False),
    (LocalSteps(QuasiGlobalMomentum(0.1, 0.9), 8), OnePeerExponential(16), True),
    (LocalSteps(QuasiGlobalMomentum(0.1, 0.9), 16), ring(8), True),
    (LocalSteps(GossipPGA(QuasiGlobalMomentum(0.1, 0.9), 1), 16), ring(8), False),
    (GossipPGA(LocalSteps(QuasiGlobalMomentum(0.1, 0.9), 8), 80), OnePeerExponential(16), False),
    (GossipPGA(QuasiGlobalMomentum(0.1, 0.8), 5), ShiftOne(16), False),
]


@pytest.mark.parametrize(
    ("algorithm", "topology", "refused"), SWINGS, ids=[f"{one} on {topology.describe()}" for one, topology, _ in SWINGS]
)
def test_averaged_momentum_is_refused_exactly_where_it_diverges_without_a_gradient(
    algorithm: Algorithm, topology: Schedule, refused: bool
) -> None:
    seen, result = growth_seen(algorithm, topology), growth_of(algorithm.at_rest(), Facts(topology)).per_step
    assert (seen > 1) == (result > 1) == refused
    if refused:
        assert result == pytest.approx(seen, rel=0.01)
        with pytest.raises(ValueError, match=r"die out under its momentum.*unchecked='differences die out'"):
            check("it", algorithm.needs, topology)
    else:
        check("it", algorithm.needs, topology)
    check("it", algorithm.needs, topology, unchecked="differences die out")


def test_the_methods_to_compute_the_growth_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eigenvectors, the matrix of one period, and the iteration, on cases that all three support."""
    from shoal.algorithms.stability import linear_map as module

    star = as_schedule(with_metropolis_hastings_weights(StarGraph(SIZE).to_undirected()))
    for topology, algorithm in (
        (ring(SIZE, connect_style=2), QuasiGlobalMomentum(0.01, 0.9)),
        (OnePeerExponential(SIZE), LocalSteps(QuasiGlobalMomentum(0.01, 0.9), 8)),
        (star, LocalSteps(QuasiGlobalMomentum(0.01, 0.8), 32)),
    ):
        by_modes = growth_of(algorithm.at_rest(), Facts(topology)).per_step
        with monkeypatch.context() as patch:
            patch.setattr(module, "_eigenvalues", lambda facts, rounds: None)
            by_matrix = growth_of(algorithm.at_rest(), Facts(topology)).per_step
            patch.setattr(module, "DENSE_LIMIT", 0)
            by_iteration = growth_of(algorithm.at_rest(), Facts(topology)).per_step
        assert by_modes > 1.0001
        assert by_matrix == pytest.approx(by_modes, rel=1e-9)
        assert by_iteration == pytest.approx(by_modes, rel=1e-3)


def test_large_fleets_are_checked_too() -> None:
    check("it", QuasiGlobalMomentum(0.01, 0.9).needs, OnePeerExponential(20_000))
    with pytest.raises(ValueError, match="grow"):
        check("it", LocalSteps(QuasiGlobalMomentum(0.01, 0.9), 8).needs, OnePeerExponential(20_000))
    with pytest.raises(ValueError, match="grow"):
        check("it", QuasiGlobalMomentum(0.01, 0.9).needs, ShiftOne(600))
