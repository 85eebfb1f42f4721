"""Algorithms with compressed messages: what they are without compression, where they end with it, what they keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import networkx as nx
import pytest
import torch

import shoal
from shoal.algorithms import (
    BEER,
    Algorithm,
    ChocoSGD,
    DeepSqueeze,
    GradientDescent,
    GradientTracking,
    LowPrecision,
    Momentum,
    PowerGossip,
    Run,
    run,
)
from shoal.compression import QSGD, Compressor, Identity, MinMaxUInt8, RandomK, Shrunk, Sign, TopK
from shoal.compression.compressor import Draws
from shoal.sim import StackedFleet
from shoal.topology import (
    OnePeerExponential,
    OnePeerHypercube,
    StarGraph,
    mixing_matrix,
    with_metropolis_hastings_weights,
)
from shoal.topology.families.static import Circulant, ring, symmetric_exponential
from support.least_squares import DIMENSION, SIZE, optimum
from support.quadratic import gradients
from support.real_agents import binary_problem, binary_ring

START = torch.zeros(DIMENSION, dtype=torch.float64)
STAR = with_metropolis_hastings_weights(StarGraph(SIZE).to_undirected())


def lazy_ring(gamma: float) -> Circulant:
    """``I + gamma (W - I)`` of the ring."""
    return Circulant(SIZE, {0: 1 - 2 * gamma / 3, 1: gamma / 3, -1: gamma / 3})


def scattered(size: int = SIZE, d: int = DIMENSION) -> torch.Tensor:
    return torch.randn(size, d, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def ends(algorithm: Algorithm, steps: int, topology: nx.Graph | Circulant | None = None) -> torch.Tensor:
    return StackedFleet(topology or ring(SIZE), seed=3).run(algorithm, START, gradients(), steps).x


def still(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


def disagreement(x: torch.Tensor) -> float:
    return float((x - x.mean(0)).norm())


def bias(x: torch.Tensor) -> float:
    return float((x.mean(0) - optimum()).norm())


@dataclasses.dataclass(frozen=True)
class Recorded(Compressor):
    """Another, and what went through it."""

    inner: Compressor
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=list)

    def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
        result = self.inner(x, mix)
        self.pairs.append((x, result))
        return result

    def nbytes(self, d: int, dtype: torch.dtype) -> int:
        return self.inner.nbytes(d, dtype)

    def omega(self, d: int) -> float:
        return self.inner.omega(d)


# Without compression


@pytest.mark.parametrize("gamma", [1.0, 0.5])
@pytest.mark.parametrize("make", [ChocoSGD, DeepSqueeze])
def test_without_compression_they_are_dpsgd_with_a_lazier_mixing(
    make: Callable[[float, float, Compressor], Algorithm], gamma: float
) -> None:
    fleet, lazy = StackedFleet(ring(SIZE)), StackedFleet(lazy_ring(gamma))
    results = fleet.run(make(0.1, gamma, Identity()), scattered(), gradients(), 60).x
    expected = lazy.run(GradientDescent(0.1), scattered(), gradients(), 60).x
    assert (results - expected).abs().max() < 1e-12


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_uncompressed_beer_is_diging_once_all_have_published(gamma: float) -> None:
    fleet, lazy = StackedFleet(ring(SIZE)), StackedFleet(lazy_ring(gamma))
    algorithm = BEER(0.05, gamma, Identity())
    first = fleet.run(algorithm, scattered(), gradients(), 1)
    v, g, *_ = first.state
    assert torch.equal(first.x, scattered() - 0.05 * gradients()(scattered()))
    results = fleet.run(algorithm, START, gradients(), 60, resume=first).x
    started = Run(first.x, first.x, (v, g), 1)
    expected = lazy.run(GradientTracking(0.05, atc=False), START, gradients(), 60, resume=started).x
    assert (results - expected).abs().max() < 1e-12


def test_uncompressed_low_precision_is_dpsgd_adapt_with_combine() -> None:
    fleet = StackedFleet(ring(SIZE))
    results = fleet.run(LowPrecision(0.1, Identity()), scattered(), gradients(), 60).x
    expected = fleet.run(GradientDescent(0.1, atc=False), scattered(), gradients(), 60).x
    assert (results - expected).abs().max() < 1e-12


# Where they end


def test_choco_converges_to_the_point_of_dpsgd_with_the_lazier_mixing() -> None:
    """The messages go to zero, and the compression error with them."""
    result = ends(ChocoSGD(0.1, 0.5, TopK(0.2)), 2500)
    assert (result - ends(GradientDescent(0.1), 2500, lazy_ring(0.5))).abs().max() < 1e-9


def test_low_precision_converges_to_the_point_of_dpsgd() -> None:
    result = ends(LowPrecision(0.1, MinMaxUInt8(eps=1e-13)), 2500)
    assert (result - ends(GradientDescent(0.1, atc=False), 2500)).abs().max() < 1e-9


@pytest.mark.parametrize("compressor", [TopK(0.2), RandomK(0.4), QSGD(7), MinMaxUInt8(eps=1e-13)], ids=str)
def test_beer_finds_the_optimum_with_any_contraction(compressor: Compressor) -> None:
    result = ends(BEER(1 / 16, 0.25, compressor), 700, symmetric_exponential(SIZE))
    assert (result - optimum()).abs().max() < 1e-8


def test_beer_finds_the_optimum_on_a_ring() -> None:
    assert (ends(BEER(1 / 16, 0.5, TopK(0.2)), 4000) - optimum()).abs().max() < 1e-8


def test_dpsgd_is_nearer_than_choco_and_choco_nearer_than_deep_squeeze() -> None:
    """At the gammas that make the figures of the reference: 0.13, 0.25, 0.41."""
    plain = bias(ends(GradientDescent(0.1), 1500))
    choco = bias(ends(ChocoSGD(0.1, 0.25, TopK(0.2)), 1500))
    squeezed = bias(ends(DeepSqueeze(0.1, 0.06, TopK(0.2)), 3000))
    assert plain == pytest.approx(0.13, abs=0.01)
    assert choco == pytest.approx(0.25, abs=0.02)
    assert squeezed == pytest.approx(0.41, abs=0.02)


def test_at_the_same_gamma_deep_squeeze_leaves_the_agents_farther_apart() -> None:
    plain, choco, squeezed = (
        disagreement(ends(GradientDescent(0.1), 1500, lazy_ring(0.5))),
        disagreement(ends(ChocoSGD(0.1, 0.5, TopK(0.2)), 1500)),
        disagreement(ends(DeepSqueeze(0.1, 0.5, TopK(0.2)), 1500)),
    )
    assert choco == pytest.approx(plain, rel=1e-6)
    assert squeezed > 1.2 * choco


@pytest.mark.parametrize("compressor", [Sign(), RandomK(0.2)], ids=str)
def test_choco_gossip_reaches_the_mean_with_coarse_messages(compressor: Compressor) -> None:
    fleet = StackedFleet(symmetric_exponential(SIZE))
    results = fleet.run(ChocoSGD(0.0, 0.1, compressor), scattered(), still, 1500).x
    assert (results - scattered().mean(0)).abs().max() < 1e-8


# What they take

COMPRESSING: list[Callable[[Compressor], Algorithm]] = [
    lambda compressor: ChocoSGD(1 / 32, 0.25, compressor),
    lambda compressor: DeepSqueeze(1 / 32, 0.125, compressor),
    lambda compressor: BEER(1 / 16, 0.25, compressor),
    lambda compressor: LowPrecision(1 / 32, compressor),
    lambda compressor: Momentum(ChocoSGD(1 / 32, 0.25, compressor), 0.5),
]


@pytest.mark.parametrize(
    ("compressor", "steps"), [(RandomK(0.1, scaled=True), 60), (RandomK(0.3, scaled=True), 60), (QSGD(1), 400)], ids=str
)
@pytest.mark.parametrize("make", COMPRESSING, ids=lambda make: type(make(Identity())).__name__)
def test_a_compressor_that_is_no_contraction_is_refused_where_the_run_diverges(
    make: Callable[[Compressor], Algorithm], compressor: Compressor, steps: int
) -> None:
    fleet = StackedFleet(symmetric_exponential(SIZE), seed=3)
    with pytest.raises(ValueError, match=r"needs a compressor that is a contraction.*for 10 numbers.*or Shrunk\("):
        fleet.run(make(compressor), START, gradients(), 1)
    assert not fleet.run(make(compressor), START, gradients(), steps, unchecked="contraction").x.norm() < 1e5


@pytest.mark.parametrize("compressor", [RandomK(0.1, scaled=True), RandomK(0.3, scaled=True), QSGD(1)], ids=str)
def test_scaled_down_they_are_accepted_and_converge(compressor: Compressor) -> None:
    fleet = StackedFleet(symmetric_exponential(SIZE), seed=3)
    results = fleet.run(ChocoSGD(0.0, 0.05, Shrunk(compressor)), scattered(), still, 1000).x
    assert (results - scattered().mean(0)).abs().max() < 1e-6


def test_real_agents_refuse_them_too() -> None:
    def one() -> None:
        with pytest.raises(ValueError, match="contraction"):
            run(ChocoSGD(0.1, 0.2, QSGD(1)), START, still, ring(2), 1)

    shoal.Fleet(2).run(one)


# What they keep


@pytest.mark.parametrize(
    "algorithm",
    [ChocoSGD(0.1, 0.25, Sign()), DeepSqueeze(0.1, 0.125, TopK(0.2)), PowerGossip(0.1), PowerGossip(0.1, 5, 3)],
    ids=str,
)
def test_compression_does_not_move_the_mean(algorithm: Algorithm) -> None:
    fleet, gradient = StackedFleet(STAR), gradients()
    now = fleet.run(algorithm, scattered(), gradient, 0)
    for _ in range(20):
        then = fleet.run(algorithm, START, gradient, 1, resume=now)
        assert (then.x.mean(0) - (now.x - 0.1 * gradient(now.x)).mean(0)).abs().max() < 1e-14
        now = then


def test_choco_keeps_the_mixture_of_published_values() -> None:
    W = torch.from_numpy(mixing_matrix(STAR))
    h, s = StackedFleet(STAR).run(ChocoSGD(0.1, 0.25, TopK(0.2)), scattered(), gradients(), 40).state
    assert h.norm() > 1
    assert (s - W @ h).abs().max() < 1e-13


def test_beer_keeps_the_mixtures_and_the_mean_of_the_gradients() -> None:
    W = torch.from_numpy(mixing_matrix(STAR))
    v, g, h, wh, k, wk = StackedFleet(STAR).run(BEER(0.05, 0.25, TopK(0.2)), scattered(), gradients(), 40).state
    assert (wh - W @ h).abs().max() < 1e-13
    assert (wk - W @ k).abs().max() < 1e-13
    assert (v.mean(0) - g.mean(0)).abs().max() < 1e-13


def test_deep_squeeze_eventually_sends_what_it_omitted() -> None:
    """The sum of the messages and the last error is the sum of the values to send."""
    recorded = Recorded(TopK(0.2))
    algorithm = DeepSqueeze(0.1, 0.125, recorded)
    fleet, gradient = StackedFleet(ring(SIZE)), gradients()
    now, total = fleet.run(algorithm, scattered(), gradient, 0), torch.zeros(SIZE, DIMENSION, dtype=torch.float64)
    for _ in range(30):
        total += now.x - 0.1 * gradient(now.x)
        now = fleet.run(algorithm, START, gradient, 1, resume=now)
    (error,) = now.state
    assert error.norm() > 1
    assert (sum(sent for _, sent in recorded.pairs) + error - total).abs().max() < 1e-12


def test_low_precision_is_dpsgd_to_half_a_step_of_its_quantizer() -> None:
    fleet, gradient = StackedFleet(ring(SIZE)), gradients()
    W = torch.from_numpy(mixing_matrix(ring(SIZE).graph(0)))
    algorithm = LowPrecision(0.1)
    now = fleet.run(algorithm, scattered(), gradient, 0)
    for _ in range(30):
        then = fleet.run(algorithm, START, gradient, 1, resume=now)
        change = W @ now.x - 0.1 * gradient(now.x) - now.x
        width = change.amax(-1, keepdim=True) - change.amin(-1, keepdim=True) + 1e-7
        error = (then.x - now.x - change).abs()
        assert (error <= width / 510 * (1 + 1e-9)).all()
        assert error.max() > 0
        now = then


@pytest.mark.parametrize("size", [1, 2, 3, SIZE])
def test_low_precision_is_what_bagua_computes_with_replicas(size: int) -> None:
    """Each agent has replicas of both neighbours; ``d = x + L / 3 + R / 3 - 5 w / 3`` is what it sends.

    Of two agents both replicas are the other's, and an agent alone has itself on both sides.
    """
    gradient = gradients(size)

    def quantised(d: torch.Tensor) -> torch.Tensor:
        least, greatest = d.amin(-1, keepdim=True), d.amax(-1, keepdim=True)
        scale = torch.full_like(least, 255) / (greatest - least + 1e-7)
        top = (greatest * scale).round()
        return (torch.minimum((d * scale).round(), top) - (top - 255) + top - 255) / scale

    w = scattered(size)
    left, right = w.roll(1, 0), w.roll(-1, 0)
    for _ in range(25):
        x = w - 0.1 * gradient(w)
        message = quantised(x + left / 3 + right / 3 - 5 / 3 * w)
        left, right, w = left + message.roll(1, 0), right + message.roll(-1, 0), w + message
    thirds = Circulant(size, {0: 1 / 3, 1: 1 / 3, -1: 1 / 3} if size > 2 else {0: 1 / 3, 1: 2 / 3})
    results = StackedFleet(thirds).run(LowPrecision(0.1), scattered(size), gradient, 25).x
    assert (results - w).abs().max() < 1e-12


# PowerGossip


@pytest.mark.parametrize(
    ("iterations", "rows", "columns"), [(1, 2, 5), (3, 4, 3), (1, DIMENSION, 1), (2, 1, DIMENSION)]
)
def test_power_gossip_equals_its_links_computed_one_by_one(iterations: int, rows: int, columns: int) -> None:
    fleet, gradient = StackedFleet(STAR), gradients()
    W = mixing_matrix(STAR)
    algorithm = PowerGossip(0.05, iterations, rows)
    now = fleet.run(algorithm, scattered(), gradient, 0)
    links = [(i, j) for i in range(SIZE) for j in range(SIZE) if i != j and W[i, j] > 0]
    _, left, right = now.state
    lefts, rights = (dict(zip(links, side, strict=True)) for side in (left, right))
    x = scattered()
    for _ in range(3):
        x = x - 0.05 * gradient(x)
        for half in range(2 * iterations):
            X = torch.nn.functional.pad(x, (0, rows * columns - DIMENSION)).view(SIZE, rows, columns)
            change = torch.zeros_like(X)
            for i, j in links:
                if i > j:
                    continue
                D = X[j] - X[i]
                if half % 2 == 0:
                    v = rights[i, j] / rights[i, j].norm()
                    seen = torch.outer(D @ v, v)
                    lefts[i, j] = D @ v
                else:
                    v = lefts[i, j] / lefts[i, j].norm()
                    seen = torch.outer(v, D.T @ v)
                    rights[i, j] = D.T @ v
                change[i] += W[i, j] * seen
                change[j] -= W[i, j] * seen
            x = x + change.flatten(1)[:, :DIMENSION]
    results = fleet.run(algorithm, START, gradient, 3, resume=now).x
    assert (results - x).abs().max() < 1e-12


@pytest.mark.parametrize("rows", [None, 2, 5, 7])
def test_power_gossip_reaches_consensus_on_the_mean(rows: int | None) -> None:
    fleet = StackedFleet(symmetric_exponential(SIZE))
    results = fleet.run(PowerGossip(0.1, 1, rows), scattered(), still, 600).x
    assert (results - scattered().mean(0)).abs().max() < 1e-12


def test_power_gossip_never_drives_agents_apart() -> None:
    results = StackedFleet(STAR).run(
        PowerGossip(0.1), scattered(), still, 200, measure=lambda x: {"apart": disagreement(x)}
    )
    distance = results.column("apart")
    assert (distance[1:] <= distance[:-1] * (1 + 1e-12)).all()
    assert distance[-1] < 1e-2 * distance[0]


def test_power_gossip_finds_the_one_direction_in_which_two_agents_differ() -> None:
    pair = StackedFleet(with_metropolis_hastings_weights(nx.path_graph(2)))
    amount = torch.outer(scattered(1, 4)[0], scattered(2, 5)[1]).flatten()
    assert pair.run(PowerGossip(0.1, rows=4), torch.stack([amount, -amount]), still, 1).x.norm() < 1e-14


def test_power_gossip_handles_agents_that_agree() -> None:
    fleet = StackedFleet(STAR)
    first = fleet.run(PowerGossip(0.1), scattered()[0], still, 3)
    assert torch.equal(first.x, scattered()[0].expand(SIZE, -1))
    assert all(float(one.norm(dim=-1).min()) > 0 for one in first.state)
    # And they can still disagree, and meet, later.
    later = fleet.run(PowerGossip(0.1), START, still, 1500, resume=dataclasses.replace(first, x=scattered()))
    assert disagreement(later.x) < 1e-3 * disagreement(scattered())


# Wherever they run


@pytest.mark.parametrize(
    "algorithm",
    [
        ChocoSGD(1 / 32, 1 / 4, QSGD(7)),
        ChocoSGD(1 / 32, 1 / 8, Sign()),
        DeepSqueeze(1 / 32, 1 / 8, RandomK(0.5)),
        BEER(1 / 16, 1 / 4, RandomK(0.25)),
        LowPrecision(1 / 32, QSGD(127)),
    ],
    ids=str,
)
def test_random_algorithms_on_agents_equal_the_stacked_fleet_exactly(algorithm: Algorithm) -> None:
    a, b = binary_problem(4)

    def on_agent() -> list[float]:
        own, goal = a[shoal.rank()], b[shoal.rank()]
        return run(algorithm, START, lambda x: own * (x - goal), binary_ring(4), 4, seed=3).x.tolist()

    results = torch.tensor(shoal.Fleet(4).run(on_agent), dtype=torch.float64)
    together = StackedFleet(binary_ring(4), seed=3).run(algorithm, START, lambda x: a * (x - b), 4).x
    assert torch.equal(results, together)


@pytest.mark.parametrize(
    "algorithm",
    [ChocoSGD(0.1, 0.1, RandomK(0.2)), DeepSqueeze(0.1, 0.1, QSGD(7)), BEER(0.05, 0.1, RandomK(0.5))],
    ids=str,
)
def test_a_resumed_run_continues_with_its_errors_and_draws(algorithm: Algorithm) -> None:
    fleet, gradient = StackedFleet(ring(SIZE), seed=1), gradients()
    full = fleet.run(algorithm, scattered(), gradient, 30)
    half = fleet.run(algorithm, scattered(), gradient, 13)
    rest = fleet.run(algorithm, START, gradient, 17, resume=half)
    assert torch.equal(full.x, rest.x)
    assert all(torch.equal(one, other) for one, other in zip(full.state, rest.state, strict=True))


def test_initial_vectors_of_power_gossip_are_equal_at_both_ends_and_have_random_directions() -> None:
    _, *vectors = (
        StackedFleet(with_metropolis_hastings_weights(nx.path_graph(2)))
        .run(PowerGossip(0.1), scattered(2, 1000), still, 0)
        .state
    )
    for vector in vectors:
        assert torch.equal(vector[0], vector[1])
        numbers = vector[0] * len(vector[0]) ** 0.5  # of a unit vector
        assert abs(float(numbers.norm()) ** 2 / len(numbers) - 1) < 1e-14
        assert abs(float(numbers.mean())) < 0.3 < 0.9 < float(numbers.std())


def test_power_gossip_sends_two_vectors_over_each_link_and_iteration() -> None:
    run_ = StackedFleet(ring(SIZE)).run(PowerGossip(0.1, 3, rows=2), scattered(), gradients(), 0)
    later = StackedFleet(ring(SIZE)).run(PowerGossip(0.1, 3, rows=2), START, gradients(), 3, resume=run_)
    assert later.sent - run_.sent == 3 * 3 * 2 * SIZE * (2 + 5) * 8


# What they refuse


@pytest.mark.parametrize(
    "algorithm", [ChocoSGD(0.1, 0.5, TopK(0.2)), BEER(0.1, 0.5, TopK(0.2)), LowPrecision(0.1)], ids=str
)
def test_copies_of_neighbours_need_a_static_graph(algorithm: Algorithm) -> None:
    with pytest.raises(ValueError, match=r"needs W to be static, and the topology changes .* DeepSqueeze"):
        StackedFleet(OnePeerHypercube(SIZE)).run(algorithm, START, gradients(), 1)


def test_deep_squeeze_accepts_a_changing_topology() -> None:
    fleet = StackedFleet(OnePeerHypercube(SIZE))
    results = fleet.run(DeepSqueeze(0.1, 1.0, Identity()), scattered(), gradients(), 40).x
    expected = fleet.run(GradientDescent(0.1), scattered(), gradients(), 40).x
    assert (results - expected).abs().max() < 1e-12
    assert bias(fleet.run(DeepSqueeze(0.1, 0.25, TopK(0.5)), START, gradients(), 1000).x) < 0.2


@pytest.mark.parametrize(
    "algorithm",
    [ChocoSGD(0.1, 0.5, TopK(0.2)), DeepSqueeze(0.1, 0.5, TopK(0.2)), BEER(0.1, 0.5, TopK(0.2)), LowPrecision(0.1)],
    ids=str,
)
def test_directed_edges_are_refused(algorithm: Algorithm) -> None:
    with pytest.raises(ValueError, match="needs W to be symmetric"):
        StackedFleet(OnePeerExponential(SIZE)).run(algorithm, START, gradients(), 1)


def test_power_gossip_needs_undirected_links() -> None:
    with pytest.raises(ValueError, match="needs W to be links both ways"):
        StackedFleet(ring(SIZE, 1)).run(PowerGossip(0.1), START, gradients(), 1)


@pytest.mark.parametrize(
    ("numbers", "remedy"), [({"iterations": 0}, r"pass 0\.5, 1"), ({"rows": 0}, "rows=0 must be 1 or more")]
)
def test_power_gossip_refuses_invalid_counts(numbers: dict[str, int], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        PowerGossip(0.1, **numbers)
