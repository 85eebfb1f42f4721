"""Push-sum and the algorithms built on it: unbiased over one-way links, where plain averaging is not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
import torch

import shoal
from shoal.algorithms import SGP, Algorithm, GradientDescent, GradientTracking, PushDIGing, PushSum, run
from shoal.sim import StackedFleet, StackedMix
from shoal.topology import Alternating, Schedule, Static
from shoal.topology.families.static import ring
from support.algorithm_cases import irregular_digraph
from support.least_squares import DIMENSION, SIZE, optimum, problem
from support.quadratic import gradients

Fleets = Callable[..., shoal.Fleet]


def starts(size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def shares(graph: nx.DiGraph) -> torch.Tensor:
    """C of uniform shares: agent j splits its value equally between itself and its receivers."""
    C = torch.eye(len(graph), dtype=torch.float64)
    for source, destination in graph.edges:
        C[destination, source] = 1.0
    return C / C.sum(0)


def funnel(size: int) -> nx.DiGraph:
    """A one-way ring where everybody also sends to agent 0, so that what the later agents gather halves each time."""
    graph = nx.DiGraph((rank, (rank + 1) % size) for rank in range(size))
    graph.add_edges_from((rank, 0) for rank in range(1, size))
    return graph


def changing(size: int) -> Schedule:
    """Irregular links, the other way round in every second round, and from time to time only the funnel."""
    forth = Static(irregular_digraph(size))
    return Alternating([forth, Static(irregular_digraph(size).reverse()), forth, Static(funnel(size))])


def nothing(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


def trajectory(
    algorithm: Algorithm, topology: nx.DiGraph | Schedule, steps: int
) -> list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
    """x and the state after each step."""
    fleet = StackedFleet(topology)
    gradient = gradients()
    results = [fleet.run(algorithm, starts(), gradient, 0)]
    for _ in range(steps):
        results.append(fleet.run(algorithm, starts(), gradient, 1, resume=results[-1]))
    return [(one.x, one.state) for one in results]


# The mean


def test_the_example_is_connected_irregular_and_directed() -> None:
    assert all(nx.is_strongly_connected(irregular_digraph(size)) for size in range(1, 20))
    graph = irregular_digraph(SIZE)
    assert len({degree for _, degree in graph.out_degree}) > 2
    assert len({degree for _, degree in graph.in_degree}) > 2
    assert any(not graph.has_edge(target, receiver) for receiver, target in graph.edges)


@pytest.mark.parametrize(
    "topology", [irregular_digraph(SIZE), funnel(SIZE), changing(SIZE)], ids=["irregular", "funnel", "changing"]
)
def test_push_sum_finds_the_exact_mean(topology: nx.DiGraph | Schedule) -> None:
    results = StackedFleet(topology).run(PushSum(), starts(), nothing, 600).estimate
    assert (results - starts().mean(0)).abs().max() < 1e-12


def test_pulling_converges_to_another_point() -> None:
    graph = irregular_digraph(SIZE)
    mix, x = StackedMix(graph), starts()
    for _ in range(600):
        x = mix.pull(x)
    R = torch.eye(SIZE, dtype=torch.float64)
    for source, destination in graph.edges:
        R[destination, source] = 1.0
    values, vectors = np.linalg.eig((R / R.sum(1, keepdim=True)).T.numpy())
    stationary = torch.from_numpy(np.real(vectors[:, np.argmax(np.real(values))]))
    assert (x - stationary / stationary.sum() @ starts()).abs().max() < 1e-12
    assert (x - starts().mean(0)).abs().max() > 0.1


def test_u_and_w_are_powers_of_the_uniform_shares() -> None:
    graph = irregular_digraph(SIZE)
    results = StackedFleet(graph).run(PushSum(), starts(), nothing, 7)
    power = torch.linalg.matrix_power(shares(graph), 7)
    assert (results.x - power @ starts()).abs().max() < 1e-14
    assert (results.state[0] - power.sum(1, keepdim=True)).abs().max() < 1e-14


def test_column_stochastic_weights_are_used_unchanged() -> None:
    weights = torch.rand(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weights /= weights.sum(0)
    results = StackedFleet(Static(weights.numpy())).run(PushSum(), starts(5), nothing, 3)
    assert (results.x - torch.linalg.matrix_power(weights, 3) @ starts(5)).abs().max() < 1e-14


def test_the_totals_of_u_and_of_w_never_change() -> None:
    for x, (w,) in trajectory(PushSum(), changing(SIZE), 40):
        assert (x.sum(0) - starts().sum(0)).abs().max() < 1e-13
        assert abs(w.sum().item() - SIZE) < 1e-13
        assert w.min() > 0


def test_real_agents_reach_the_mean(fleet: Fleets) -> None:
    graph = irregular_digraph(4)
    start = starts(4)

    def agent() -> list[float]:
        return run(PushSum(), start[shoal.rank()], nothing, graph, 100).estimate.tolist()

    results = torch.tensor(fleet(4).run(agent), dtype=torch.float64)
    assert (results - start.mean(0)).abs().max() < 1e-13


# SGP


def test_sgp_ends_at_its_closed_form_fixed_point() -> None:
    """Least squares make one linear system of it: u = C (u - lr (H u / w - A^T b)), with w = n times C's own vector."""
    graph, lr = irregular_digraph(SIZE), 0.02
    C = shares(graph)
    w = SIZE * torch.linalg.matrix_power(C, 2000)[:, 0]
    A, b = problem()
    step = torch.block_diag(*(one / weight for one, weight in zip(A.mT @ A, w, strict=True)))
    spread = torch.kron(C, torch.eye(DIMENSION, dtype=torch.float64))
    identity = torch.eye(len(step), dtype=torch.float64)
    system = identity - spread @ (identity - lr * step)
    u = torch.linalg.solve(system, spread @ (lr * (A.mT @ b.unsqueeze(-1)).flatten())).view(SIZE, DIMENSION)
    results = StackedFleet(graph).run(SGP(lr), starts(), gradients(), 2000)
    assert (results.estimate - u / w.unsqueeze(1)).abs().max() < 1e-10


def test_the_bias_of_sgp_is_of_the_order_of_its_step() -> None:
    fleet, gradient = StackedFleet(irregular_digraph(SIZE)), gradients()
    long, short = (
        (fleet.run(SGP(lr), starts(), gradient, 3000).estimate.mean(0) - optimum()).norm() for lr in (0.02, 0.01)
    )
    assert 0 < short < 0.05
    assert 1.8 < long / short < 2.2


def test_plain_gradient_descent_by_pulling_is_less_accurate() -> None:
    """On the graph with uniform row weights; the rows weigh some agents' objectives more, whatever the step."""
    graph, gradient = irregular_digraph(SIZE), gradients()
    mix, x = StackedMix(graph), starts()
    for _ in range(3000):
        x = mix.pull(x - 0.01 * gradient(x))
    pushed = StackedFleet(graph).run(SGP(0.01), starts(), gradient, 3000).estimate
    assert (x.mean(0) - optimum()).norm() > 5 * (pushed.mean(0) - optimum()).norm()


def test_sgp_is_gradient_descent_with_steps_of_lr_over_w() -> None:
    """z+ = R' (z - lr / w g(z)), R' = diag(1 / w+) C diag(w), whose rows sum to one."""
    graph, lr = funnel(6), 0.01
    C = shares(graph)
    gradient = gradients(6)
    fleet = StackedFleet(graph)
    before = fleet.run(SGP(lr), starts(6), gradient, 9)
    after = fleet.run(SGP(lr), starts(6), gradient, 1, resume=before)
    w, then = before.state[0], after.state[0]
    rows = (C * w.T) / then
    assert (rows.sum(1) - 1).abs().max() < 1e-14
    z = before.estimate
    assert (after.estimate - rows @ (z - lr / w * gradient(z))).abs().max() < 1e-13


def test_the_total_of_u_moves_by_the_total_of_the_gradients() -> None:
    gradient = gradients()
    steps = trajectory(SGP(0.02), irregular_digraph(SIZE), 10)
    for (x, (w,)), (then, (after,)) in pairwise(steps):
        assert (then.sum(0) - x.sum(0) + 0.02 * gradient(x / w).sum(0)).abs().max() < 1e-13
        assert abs(after.sum().item() - SIZE) < 1e-13


def test_with_a_small_w_a_usual_step_size_diverges_to_nan() -> None:
    """The smallest w of the funnel is about 0.05: there the step is 20 times lr."""
    results = StackedFleet(funnel(8)).run(SGP(0.1), starts(8), gradients(8), 1500)
    assert results.state[0].min() < 0.06
    assert not results.estimate.isfinite().all()
    for lr, graph in ((0.1, ring(8)), (0.01, funnel(8))):
        assert StackedFleet(graph).run(SGP(lr), starts(8), gradients(8), 1500).estimate.abs().max() < 10


def test_sgp_is_gradient_descent_if_all_gather_equally() -> None:
    fleet, gradient = StackedFleet(ring(SIZE)), gradients()
    results = fleet.run(SGP(0.05), starts(), gradient, 100)
    assert (results.state[0] - 1).abs().max() < 1e-13
    expected = fleet.run(GradientDescent(0.05), starts(), gradient, 100)
    assert (results.estimate - expected.estimate).abs().max() < 1e-12


# Push-sum gradient tracking


@pytest.mark.parametrize("atc", [True, False])
def test_push_diging_is_exact_on_changing_links(atc: bool) -> None:
    results = StackedFleet(changing(SIZE)).run(PushDIGing(0.02, atc), starts(), gradients(), 3000)
    assert (results.estimate - optimum()).abs().max() < 1e-11


@pytest.mark.parametrize("atc", [True, False])
def test_the_tracked_values_always_sum_to_the_gradients(atc: bool) -> None:
    gradient = gradients()
    for x, (w, y, g) in trajectory(PushDIGing(0.02, atc), changing(SIZE), 20):
        assert (y.sum(0) - gradient(x / w).sum(0)).abs().max() < 1e-12
        assert torch.equal(g, gradient(x / w))
        assert abs(w.sum().item() - SIZE) < 1e-13


@pytest.mark.parametrize("atc", [True, False])
def test_the_total_of_u_moves_by_the_total_of_the_tracked_values(atc: bool) -> None:
    steps = trajectory(PushDIGing(0.02, atc), irregular_digraph(SIZE), 10)
    for (x, (_, y, _)), (then, _) in pairwise(steps):
        assert (then.sum(0) - x.sum(0) + 0.02 * y.sum(0)).abs().max() < 1e-13


def test_the_two_forms_differ_in_when_the_gradient_change_is_shared() -> None:
    """After one step from the same y, u and w are equal and y+ differs by C d against d, d the gradient change."""
    graph = irregular_digraph(SIZE)
    gradient = gradients()
    (_, (_, _, g)), (x, (w, before, new)) = trajectory(PushDIGing(0.02), graph, 1)
    (_, _), (same, (_, after, _)) = trajectory(PushDIGing(0.02, atc=False), graph, 1)
    assert torch.equal(x, same)
    change = gradient(x / w) - g
    assert (before - after - (shares(graph) @ change - change)).abs().max() < 1e-13
    assert torch.equal(new, gradient(x / w))


def test_push_diging_is_gradient_tracking_if_all_gather_equally() -> None:
    fleet, gradient = StackedFleet(ring(SIZE)), gradients()
    results = fleet.run(PushDIGing(0.05), starts(), gradient, 100).estimate
    assert (results - fleet.run(GradientTracking(0.05), starts(), gradient, 100).x).abs().max() < 1e-12


# What they refuse


@pytest.mark.parametrize("algorithm", [PushSum(), SGP(0.1), PushDIGing(0.1)], ids=repr)
def test_periodic_mixings_are_refused(algorithm: Algorithm) -> None:
    for graph in (nx.cycle_graph(4, create_using=nx.DiGraph), nx.DiGraph([(0, 1), (1, 0)])):
        with pytest.raises(
            ValueError, match=r"values go round it in step .*form has the eigenvalue (-1|1i).* self weight"
        ):
            StackedFleet(graph).run(algorithm, starts(len(graph)), nothing, 1)


def test_cycles_of_two_lengths_need_no_self_weights() -> None:
    weights = np.zeros((3, 3))
    weights[1, 0], weights[2, 1], weights[0, 2], weights[1, 2] = 1.0, 1.0, 0.5, 0.5
    results = StackedFleet(Static(weights)).run(PushSum(), starts(3), nothing, 400).estimate
    assert (results - starts(3).mean(0)).abs().max() < 1e-12


def test_graphs_that_are_not_strongly_connected_are_refused() -> None:
    with pytest.raises(ValueError, match="SGP needs W to be connected"):
        StackedFleet(nx.DiGraph([(0, 1), (1, 2)])).run(SGP(0.1), starts(3), nothing, 1)
