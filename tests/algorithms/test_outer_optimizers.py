"""Outer optimizers: their path is the papers' loops, and they come to rest where what they wrap does."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.algorithms import (
    CATALOG,
    SGP,
    AccumAdam,
    Algorithm,
    DiLoCo,
    DualAveraging,
    Entry,
    ExactDiffusion,
    GASLoC,
    GossipPGA,
    GradientDescent,
    GradientTracking,
    LocalSteps,
    Momentum,
    NoLoCo,
    QuasiGlobalMomentum,
    SlowMo,
    check,
)
from shoal.algorithms.needs import Facts
from shoal.algorithms.runs.run import steps_of
from shoal.algorithms.stability.linear_map import growth_of
from shoal.sim import StackedFleet, StackedMix
from shoal.topology import AllReduce, ExponentialGraph, OnePeerHypercube, RandomMatchings, Schedule, ShiftOne
from shoal.topology.families.static import ring
from support.algorithm_cases import case_of
from support.closed_forms import gradient_of_all, gradients, matrix, on_all, rest_of_cycle
from support.least_squares import DIMENSION, SIZE, optimum, problem

LR, EVERY, BETA = 0.1, 4, 0.7
GRADIENT = gradients(SIZE)
START = torch.randn(SIZE, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
W = matrix(ring(SIZE))
UNIT, MEAN = torch.eye(SIZE, dtype=torch.float64), torch.full((SIZE, SIZE), 1 / SIZE, dtype=torch.float64)
INNER = GradientDescent(LR)


def local_sgd(every: int = EVERY) -> Algorithm:
    return LocalSteps(GossipPGA(INNER, every=1), every)


def run(algorithm: Algorithm, steps: int, topology: Schedule | None = None) -> Tensor:
    return StackedFleet(topology or ring(SIZE)).run(algorithm, START, GRADIENT, steps).x


def off(x: Tensor) -> float:
    return float((x.mean(0) - optimum()).norm())


@pytest.mark.parametrize("steps", [3, 4, 21])
@pytest.mark.parametrize(("gossip", "plain"), [(False, local_sgd()), (True, GossipPGA(INNER, EVERY))], ids=str)
def test_slow_momentum_of_zero_is_the_algorithm_itself(gossip: bool, plain: Algorithm, steps: int) -> None:
    result = run(SlowMo(INNER, EVERY, beta=0.0, gossip=gossip), steps)
    assert (result - run(plain, steps)).abs().max() < 1e-13
    assert (run(SlowMo(INNER, EVERY, beta=BETA, gossip=gossip), 21) - run(plain, 21)).abs().max() > 0.01


REST = [
    (DiLoCo(INNER, EVERY), [UNIT] * 3 + [MEAN]),
    (SlowMo(INNER, EVERY, BETA), [UNIT] * 3 + [MEAN]),
    (SlowMo(INNER, EVERY, BETA, alpha=0.5), [UNIT] * 3 + [MEAN]),
    (SlowMo(INNER, EVERY, BETA, gossip=True), [W] * 3 + [MEAN]),
]


@pytest.mark.parametrize(("algorithm", "cycle"), REST, ids=[str(one) for one, _ in REST])
def test_an_outer_optimizer_does_not_move_the_fixed_point(algorithm: Algorithm, cycle: list[Tensor]) -> None:
    assert (run(algorithm, 1200) - rest_of_cycle(cycle, LR)).abs().max() < 1e-10


def test_diloco_converges_as_measured_for_local_sgd_with_equal_rounds() -> None:
    for every in (4, 16):
        result, plain = off(run(DiLoCo(INNER, every), 1600)), off(run(local_sgd(every), 1600))
        assert result == pytest.approx(plain, abs=1e-10)
    assert plain == pytest.approx(0.2859, abs=1e-4)


def test_over_gradient_tracking_it_finds_the_optimum() -> None:
    result = run(DiLoCo(GradientTracking(0.05), 3), 3000)
    assert (result - optimum()).abs().max() < 1e-9


def rounds_by_hand(
    outer: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]], rates: list[float]
) -> Tensor:
    """Every agent takes its steps alone from one x0, and the mean of where they end is what the outer rule is given."""
    x0, u = START.mean(0), torch.zeros(DIMENSION, dtype=torch.float64)
    x = START.clone()
    for rate in rates:
        for _ in range(EVERY):
            x = x - LR * rate * GRADIENT(x)
        x0, u = outer(x0, u, x.mean(0), rate)
        x = x0.repeat(SIZE, 1)
    return x


RATES = [1.0, 1.0, 0.5, 0.5, 2.0]


def at_rates(algorithm: Algorithm) -> Tensor:
    fleet, previous = StackedFleet(ring(SIZE)), None
    for rate in RATES:
        scaled = algorithm.scaled(rate)
        assert scaled is not None
        previous = fleet.run(scaled, START, GRADIENT, EVERY, resume=previous)
    assert previous is not None
    return previous.x


def test_slow_momentum_has_the_unit_of_gradients_when_the_learning_rate_changes() -> None:
    def outer(x0: Tensor, u: Tensor, mean: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        u = BETA * u + (x0 - mean) / (rate * LR)
        return x0 - 0.8 * rate * LR * u, u

    result = at_rates(SlowMo(INNER, EVERY, BETA, alpha=0.8))
    assert (result - rounds_by_hand(outer, RATES)).abs().max() < 1e-12


def test_a_learning_rate_for_each_parameter_may_be_zero() -> None:
    rate = torch.tensor([0.0] + [1.0] * (DIMENSION - 1), dtype=torch.float64)
    scaled = SlowMo(INNER, EVERY, BETA).scaled(rate)
    assert scaled is not None
    result = run(scaled, 3 * EVERY)
    assert bool(result.isfinite().all())
    assert (result[:, 0] - START[:, 0].mean()).abs().max() < 1e-12


def test_diloco_is_torchs_nesterov_and_its_step_is_independent_of_the_learning_rate() -> None:
    weights = torch.nn.Parameter(START.mean(0).clone())
    sgd = torch.optim.SGD([weights], lr=0.7, momentum=0.9, nesterov=True)

    def outer(x0: Tensor, u: Tensor, mean: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        assert torch.equal(weights.detach(), x0)
        weights.grad = x0 - mean
        sgd.step()
        return weights.detach().clone(), u

    assert (at_rates(DiLoCo(INNER, EVERY)) - rounds_by_hand(outer, RATES)).abs().max() < 1e-12


def noloco_by_hand(alpha: float, beta: float, gamma: float, topology: Schedule, rounds: int) -> Tensor:
    """Of each agent and its pair, as the paper has it: its delta, from those of the two."""
    phi, delta = START.clone(), torch.zeros_like(START)
    for round_ in range(rounds):
        theta = phi
        for _ in range(EVERY):
            theta = theta - LR * GRADIENT(theta)
        moved = theta - phi
        pairs = [[other for other in range(SIZE) if weight[other] > 0] for weight in matrix(topology, round_)]
        assert all(len(pair) == 2 for pair in pairs)
        delta = torch.stack(
            [
                alpha * delta[i] + beta / 2 * (moved[j] + moved[k]) - gamma * (phi[i] - (phi[j] + phi[k]) / 2)
                for i, (j, k) in enumerate(pairs)
            ]
        )
        phi = phi + delta
    return phi


@pytest.mark.parametrize(("alpha", "beta", "gamma"), [(0.5, 0.7, 1.0), (0.3, 1.1, 0.6)])
def test_noloco_is_the_papers_step_of_pairs(alpha: float, beta: float, gamma: float) -> None:
    topology = RandomMatchings(SIZE, seed=3)
    result = run(NoLoCo(INNER, EVERY, alpha, beta, gamma), 6 * EVERY, topology)
    assert (result - noloco_by_hand(alpha, beta, gamma, topology, 6)).abs().max() < 1e-12


def steps_alone(count: int) -> tuple[Tensor, Tensor]:
    """Steps of gradient descent alone, all agents in one vector: the matrix, and what they add to it."""
    H, c = gradient_of_all(SIZE)
    alone, offset = torch.eye(len(H), dtype=H.dtype), torch.zeros_like(c)
    for _ in range(count):
        alone, offset = alone - LR * H @ alone, offset - LR * (H @ offset - c)
    return alone, offset


def rest_of_noloco(algorithm: NoLoCo, topology: Schedule) -> Tensor:
    """``[n, d]``: the phi with which a period of the topology begins and ends, by linear algebra."""
    alone, offset = steps_alone(algorithm.every)
    unit = torch.eye(len(alone), dtype=alone.dtype)
    factor, constant = torch.eye(2 * len(unit), dtype=unit.dtype), torch.zeros(2 * len(unit), dtype=unit.dtype)
    for round_ in range(topology.period or 1):
        mixing = on_all(matrix(topology, round_))
        pulled = algorithm.beta * mixing @ (alone - unit) - algorithm.gamma * (unit - mixing)
        of_delta = torch.cat([pulled, algorithm.alpha * unit], 1)
        step = torch.cat([torch.cat([unit, 0 * unit], 1) + of_delta, of_delta])
        added = algorithm.beta * (mixing @ offset).repeat(2)
        factor, constant = step @ factor, step @ constant + added
    result = torch.linalg.solve(torch.eye(len(factor), dtype=unit.dtype) - factor, constant)
    return result[: len(unit)].view(SIZE, DIMENSION)


@pytest.mark.parametrize("topology", [ring(SIZE), OnePeerHypercube(SIZE)], ids=lambda one: one.describe())
def test_the_periodic_point_of_noloco_is_that_of_linear_algebra(topology: Schedule) -> None:
    algorithm = NoLoCo(INNER, EVERY)
    result = run(algorithm, EVERY * 400, topology)  # whole periods of four rounds
    assert (result - rest_of_noloco(algorithm, topology)).abs().max() < 1e-10


def test_noloco_with_the_mean_of_all_is_slow_momentum() -> None:
    start = START[:1].repeat(SIZE, 1)
    fleet = StackedFleet(AllReduce(SIZE))
    results = fleet.run(NoLoCo(INNER, EVERY, alpha=0.6, beta=0.8, gamma=0.9), start, GRADIENT, 30).x
    slow = fleet.run(SlowMo(INNER, EVERY, beta=0.6, alpha=0.8), start, GRADIENT, 30).x
    assert (results - slow).abs().max() < 1e-12


@pytest.mark.parametrize("algorithm", [NoLoCo(INNER, 16), GASLoC(INNER, 16)], ids=["NoLoCo", "GASLoC"])
def test_random_pairs_leave_agents_apart_and_their_mean_less_accurate_than_local_sgd(algorithm: Algorithm) -> None:
    result = run(algorithm, 3200, RandomMatchings(SIZE))
    assert float((result - result.mean(0)).norm(dim=1).mean()) > 1.0
    assert off(run(local_sgd(16), 1600)) < off(result) < 0.6


@pytest.mark.parametrize(
    ("kind", "fields", "refused"),
    [
        (NoLoCo, {"alpha": 0.5, "gamma": 1.0}, False),
        (NoLoCo, {"alpha": 0.9, "gamma": 1.0}, True),
        (NoLoCo, {"alpha": 0.5, "gamma": 1.8}, True),
        (GASLoC, {"alpha": 1.0, "gamma": 0.5}, False),
        (GASLoC, {"alpha": 1.0, "gamma": 0.9}, True),
        (GASLoC, {"alpha": 1.8, "gamma": 0.9}, True),
    ],
)
def test_outer_momentum_is_refused_exactly_where_pairs_would_diverge(
    kind: type[NoLoCo] | type[GASLoC], fields: dict[str, float], refused: bool
) -> None:
    topology = RandomMatchings(SIZE)
    algorithm = kind(INNER, EVERY, **fields)
    ended = steps_of(algorithm, START, torch.zeros_like, StackedMix(topology), 800 * EVERY).x
    assert (ended - ended.mean(0)).norm() > 1e6 if refused else (ended - START.mean(0)).abs().max() < 1e-9
    assert (growth_of(algorithm.at_rest(), Facts(topology)).logarithm > 0) == refused
    for every, inner in ((EVERY, INNER), (10_000, AccumAdam(LR, 4))):
        made = kind(inner, every, **fields)
        if refused:
            with pytest.raises(ValueError, match="differences between agents to die out"):
                run(made, 1, topology)
        else:
            run(made, 1, topology)


def gasloc_by_hand(outer_lr: float, alpha: float, gamma: float, topology: Schedule, rounds: int) -> Tensor:
    """As the paper is described, in numpy: with the Laplacian of the round's edges in the place of W."""
    A, b = (one.numpy() for one in problem(SIZE))
    theta = before = START.numpy()
    for round_ in range(rounds):
        laplacian = np.zeros((SIZE, SIZE))
        for i, j in nx.Graph(np.argwhere(matrix(topology, round_).numpy()).tolist()).edges:
            if i != j:
                e = np.eye(SIZE)[i] - np.eye(SIZE)[j]
                laplacian += float(matrix(topology, round_)[i, j]) * np.outer(e, e)
        local = theta.copy()
        for _ in range(EVERY):
            for i in range(SIZE):
                local[i] -= LR * A[i].T @ (A[i] @ local[i] - b[i])
        proposed = theta + outer_lr * (local - theta)
        theta = proposed - alpha * laplacian @ proposed + gamma * (proposed - before)
        before = proposed
    return torch.from_numpy(theta)


@pytest.mark.parametrize("topology", [ring(SIZE), RandomMatchings(SIZE, seed=3)], ids=lambda one: one.describe())
@pytest.mark.parametrize(("outer_lr", "alpha", "gamma"), [(0.7, 1.0, 0.5), (1.1, 0.6, 0.2)])
def test_gasloc_is_the_described_step_by_the_laplacian(
    outer_lr: float, alpha: float, gamma: float, topology: Schedule
) -> None:
    result = run(GASLoC(INNER, EVERY, outer_lr, alpha, gamma), 6 * EVERY, topology)
    assert (result - gasloc_by_hand(outer_lr, alpha, gamma, topology, 6)).abs().max() < 1e-12


@pytest.mark.parametrize("steps", [3, 4, 21])
def test_gasloc_without_momentum_is_gradient_descent_with_local_steps(steps: int) -> None:
    result = run(GASLoC(INNER, EVERY, outer_lr=1.0, gamma=0.0), steps)
    assert (result - run(LocalSteps(INNER, EVERY), steps)).abs().max() < 1e-13
    assert steps < 2 * EVERY or (run(GASLoC(INNER, EVERY, outer_lr=1.0), steps) - result).abs().max() > 0.01


def rest_of_gasloc(algorithm: GASLoC, W: Tensor) -> Tensor:
    """``[n, d]``: where ``phi = (I - alpha (I - W)) (phi + outer_lr (x - phi))``, which gamma is not in."""
    alone, offset = steps_alone(algorithm.every)
    unit = torch.eye(len(alone), dtype=alone.dtype)
    mixing = (1 - algorithm.alpha) * unit + algorithm.alpha * on_all(W)
    factor = mixing @ (unit + algorithm.outer_lr * (alone - unit))
    result: Tensor = torch.linalg.solve(unit - factor, algorithm.outer_lr * mixing @ offset)
    return result.view(SIZE, DIMENSION)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.8])
@pytest.mark.parametrize(("outer_lr", "alpha"), [(0.7, 1.0), (1.0, 0.5)])
def test_gasloc_converges_to_a_point_that_its_momentum_does_not_move(
    gamma: float, outer_lr: float, alpha: float
) -> None:
    algorithm = GASLoC(INNER, EVERY, outer_lr, alpha, gamma)
    assert (run(algorithm, EVERY * 400) - rest_of_gasloc(algorithm, W)).abs().max() < 1e-10


@pytest.mark.parametrize("topology", [ring(SIZE), RandomMatchings(SIZE, seed=3)], ids=lambda one: one.describe())
def test_the_mean_of_gasloc_is_diloco_where_objectives_have_one_curvature(topology: Schedule) -> None:
    curvature, centres = torch.linspace(0.5, 4, DIMENSION, dtype=torch.float64), START.flip(0) ** 2
    fleet = StackedFleet(topology)
    result = fleet.run(GASLoC(INNER, EVERY, gamma=0.6), START, lambda x: curvature * (x - centres), 7 * EVERY).x
    outer = DiLoCo(INNER, EVERY, beta=0.6)
    expected = fleet.run(outer, START, lambda x: curvature * (x - centres), 7 * EVERY).x
    assert (result.mean(0) - expected[0]).abs().max() < 1e-12
    assert (result - result.mean(0)).abs().max() > 0.1


def test_gasloc_averages_like_a_heavy_ball() -> None:
    """With the best gamma for the second eigenvalue 1 - p of W, differences shrink by 1 - sqrt(p), not by 1 - p."""
    facts, second = Facts(ring(SIZE)), float(torch.linalg.eigvalsh(W)[-2])
    accelerated = 1 - (1 - second) ** 0.5
    assert growth_of(GASLoC(INNER, EVERY, gamma=0.0).at_rest(), facts).per_step == pytest.approx(second, abs=1e-9)
    assert growth_of(GASLoC(INNER, EVERY, gamma=0.6).at_rest(), facts).per_step == pytest.approx(0.78, abs=5e-3)
    best = GASLoC(INNER, EVERY, gamma=accelerated**2)
    # A double root, so half of the digits.
    assert growth_of(best.at_rest(), facts).per_step == pytest.approx(accelerated, abs=1e-6)


@pytest.mark.parametrize("algorithm", [DiLoCo(INNER, EVERY), SlowMo(INNER, EVERY, BETA)], ids=["DiLoCo", "SlowMo"])
def test_after_the_first_round_all_agents_have_one_memory_from_any_start(algorithm: Algorithm) -> None:
    ended = StackedFleet(ring(SIZE)).run(algorithm, START, GRADIENT, EVERY)
    for one in (ended.x, *ended.state):
        assert torch.equal(one, one[:1].expand_as(one))


def test_the_answer_is_that_of_the_algorithm() -> None:
    directed = ExponentialGraph(SIZE)
    directed.remove_edge(0, 4)
    fleet = StackedFleet(directed)
    results = fleet.run(SlowMo(SGP(0.02), EVERY, beta=0.0, gossip=True), START, GRADIENT, 7)
    plain = fleet.run(GossipPGA(SGP(0.02), EVERY), START, GRADIENT, 7)
    assert (plain.estimate - plain.x).abs().max() > 0.01
    assert (results.estimate - plain.estimate).abs().max() < 1e-12


def test_inner_momentum_is_checked_with_the_outer_averages() -> None:
    inner = QuasiGlobalMomentum(0.1, 0.8)
    with pytest.raises(ValueError, match="die out"):
        check("it", inner.needs, ShiftOne(12))
    for algorithm in (DiLoCo(inner, EVERY), SlowMo(inner, EVERY, BETA, gossip=True)):
        check("it", algorithm.needs, ShiftOne(12))
        with pytest.raises(ValueError, match="doubly stochastic"):
            check("it", algorithm.needs, nx.DiGraph([(0, 1), (1, 2)]))


def test_nothing_is_sent_within_a_round() -> None:
    for algorithm in (DiLoCo(INNER, EVERY), SlowMo(INNER, EVERY, BETA), NoLoCo(INNER, EVERY), GASLoC(INNER, EVERY)):
        fleet = StackedFleet(ring(SIZE))
        runs = [fleet.run(algorithm, START, GRADIENT, steps).sent for steps in (0, 3, 4, 7, 8)]
        assert runs[0] == runs[1] < runs[2] == runs[3] < runs[4]


LIMITS: list[tuple[Algorithm, str, float]] = [
    (SlowMo(GradientDescent(1.0), 1, BETA), "alpha", 2 * (1 + BETA)),
    (DiLoCo(GradientDescent(1.0), 1, beta=BETA), "outer_lr", 2 * (1 + BETA) / (1 + 2 * BETA)),
    (NoLoCo(GradientDescent(1.0), 1, alpha=BETA), "beta", 2 * (1 + BETA)),
    (GASLoC(GradientDescent(1.0), 1, gamma=BETA), "outer_lr", 2 * (1 + BETA) / (1 + 2 * BETA)),
]


@pytest.mark.parametrize(("algorithm", "name", "limit"), LIMITS, ids=["SlowMo", "DiLoCo", "NoLoCo", "GASLoC"])
def test_outer_steps_above_the_limit_diverge_and_below_it_do_not(algorithm: Algorithm, name: str, limit: float) -> None:
    """On rounds that reach their fixed point: with x - 1 for a gradient, and a step of one."""
    start = torch.zeros(4, 1, dtype=torch.float64)

    def final_distance(share: float) -> float:
        object.__setattr__(algorithm, name, share * limit)  # which it refuses at its making
        ended = steps_of(algorithm, start, lambda x: x - 1, StackedMix(AllReduce(4)), 2000).x
        return float((ended - 1).abs().max())

    assert final_distance(0.98) < 1e-6
    assert final_distance(1.02) > 1e6


def test_invalid_arguments_are_refused() -> None:
    for make in (lambda **n: DiLoCo(INNER, EVERY, **n), lambda **n: SlowMo(INNER, EVERY, **n)):
        with pytest.raises(ValueError, match=r"0 <= beta < 1"):
            make(beta=1.0)
    with pytest.raises(ValueError, match=r"outer_lr=1\.4: .* pass 0 < outer_lr < 1\.357"):
        DiLoCo(INNER, EVERY, outer_lr=1.4)
    with pytest.raises(ValueError, match=r"pass 0 < alpha < 3"):
        SlowMo(INNER, EVERY, beta=0.5, alpha=0.0)
    with pytest.raises(ValueError, match=r"0 <= alpha < 1"):
        NoLoCo(INNER, EVERY, alpha=1.0)
    with pytest.raises(ValueError, match=r"pass 0 < beta < 3"):
        NoLoCo(INNER, EVERY, beta=3.0)
    with pytest.raises(ValueError, match=r"0 <= gamma < 1"):
        GASLoC(INNER, EVERY, gamma=1.0)
    with pytest.raises(ValueError, match=r"pass 0 < outer_lr < 1\.5"):
        GASLoC(INNER, EVERY, outer_lr=1.5)


@pytest.mark.parametrize(
    "make", [DiLoCo, lambda one, n: SlowMo(one, n, BETA), NoLoCo, GASLoC], ids=["DiLoCo", "SlowMo", "NoLoCo", "GASLoC"]
)
def test_unsupported_algorithms_are_refused(make: Callable[[Algorithm, int], Algorithm]) -> None:
    with pytest.raises(ValueError, match="both set when agents exchange"):
        make(local_sgd(), EVERY)
    with pytest.raises(
        ValueError, match=r"ExactDiffusion needs the same W in every step, and (DiLoCo|SlowMo|NoLoCo|GASLoC) changes it"
    ):
        make(ExactDiffusion(LR), EVERY)
    with pytest.raises(ValueError, match="every=0"):
        make(INNER, 0)
    with pytest.raises(ValueError, match=r"(\w+) sets how often agents exchange, and \1 would"):
        make(make(INNER, EVERY), EVERY)
    for wrapper in (LocalSteps, GossipPGA):
        with pytest.raises(ValueError, match=r"sets how often .* with the `every` that is wanted"):
            wrapper(make(INNER, EVERY), EVERY)


def test_additional_exchanged_state_is_refused_without_a_mean_of_all_and_accepted_with_it() -> None:
    for kind in (NoLoCo, GASLoC):
        with pytest.raises(TypeError, match=f"{kind.__name__} .* what GradientTracking remembers would never be exch"):
            kind(GradientTracking(LR), EVERY)
    assert not DiLoCo(GradientTracking(LR), EVERY).one_gradient
    assert DiLoCo(INNER, EVERY).one_gradient


def wrapped(entry: Entry, make: Callable[[Algorithm], Algorithm]) -> Algorithm | None:
    """An example of the catalog in an outer optimizer, or None where that refuses it."""
    try:
        return make(entry.example())
    except (TypeError, ValueError):
        return None


OUTER: dict[str, Callable[[float], Callable[[Algorithm], Algorithm]]] = {
    "SlowMo": lambda step: lambda inner: SlowMo(inner, 2, beta=0.0, alpha=step),
    "DiLoCo": lambda step: lambda inner: DiLoCo(inner, 2, outer_lr=step),
    "NoLoCo": lambda step: lambda inner: NoLoCo(inner, 2, beta=step),
    "GASLoC": lambda step: lambda inner: GASLoC(inner, 2, outer_lr=step),
}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize(
    "entry",  # push-sum knows no gradient, and so no round of it comes to anything
    [entry for entry in CATALOG.values() if entry.name != "push-sum"],
    ids=lambda entry: entry.name,
)
def test_an_outer_step_moves_the_algorithm_that_it_wraps(entry: Entry, outer: str) -> None:
    case = case_of(entry)
    results = []
    for step in (0.4, 0.8):
        algorithm = wrapped(entry, OUTER[outer](step))
        if algorithm is None:
            return
        fleet, names = StackedFleet(case.topology(SIZE)), [need.name for need in algorithm.needs]
        results.append(fleet.run(algorithm, START, GRADIENT, 6, unchecked=names).estimate)
    assert (results[0] - results[1]).abs().max() > 1e-6


def test_algorithms_that_recompute_x_are_refused() -> None:
    for inner in (DualAveraging(0.1), Momentum(DualAveraging(0.1), 0.5)):
        for make in OUTER.values():
            with pytest.raises(ValueError, match="DualAveraging recomputes it"):
                make(0.5)(inner)


@pytest.mark.parametrize("wrapper", [lambda inner: LocalSteps(inner, 2), lambda inner: GossipPGA(inner, 2)])
def test_an_algorithm_with_its_own_exchange_steps_is_found_inside_a_wrapper(
    wrapper: Callable[[Algorithm], Algorithm],
) -> None:
    for inner in (DiLoCo(INNER, 2), Momentum(DiLoCo(INNER, 2), 0.5)):
        with pytest.raises(ValueError, match="DiLoCo sets how often agents exchange"):
            wrapper(inner)
