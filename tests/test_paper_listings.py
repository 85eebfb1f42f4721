"""Programs that make every call of the BlueFog paper's listings 1, 2, 5, 6 and 7 (Ying et al., arXiv:2111.04287).

The programs are our own; what they share with the listings are the names, and the positional and keyword arguments, of
the calls. Each runs in a fleet over real, small, non-identical data and must reach the solution that the paper's
equations have, computed here directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

import shoal
import shoal.bluefog as bf
from shoal import topology_util

Fleets = Callable[..., shoal.Fleet]

ROWS, COLUMNS = 20, 4


def local_problem(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [ROWS, COLUMNS] and b [ROWS, 1] of one agent, all different: minimise the sum of ||A_i x - b_i||^2 / 2."""
    generator = torch.Generator().manual_seed(100 + rank)
    A = torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=generator) / math.sqrt(ROWS)
    truth = torch.ones(COLUMNS, 1, dtype=torch.float64)
    noise = torch.randn(ROWS, 1, dtype=torch.float64, generator=generator)
    return A, A.mm(truth) + 0.3 * noise


def least_squares(A: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x: torch.Tensor = torch.linalg.solve(A.t() @ A, A.t() @ b)
    return x


def global_solution(size: int) -> torch.Tensor:
    """Where the sum of all agents' losses is least."""
    problems = [local_problem(rank) for rank in range(size)]
    A, b = (torch.cat(parts) for parts in zip(*problems, strict=True))
    return least_squares(A, b)


def local_solution(rank: int) -> torch.Tensor:
    return least_squares(*local_problem(rank))


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    return torch.dist(x, y).item()


@pytest.mark.parametrize("size", [4, 6])
def test_listing_1_gradient_descent_over_the_exponential_graph(fleet: Fleets, size: int) -> None:
    """DGD, equations 16 and 17: near the solution with a constant step, nearer with a smaller one."""

    def dgd(gamma: float, steps: int) -> torch.Tensor:
        bf.init()
        G = bf.ExponentialTwoGraph(bf.size())
        bf.set_topology(G)
        A, b = local_problem(bf.rank())
        x = torch.zeros(COLUMNS, 1, dtype=torch.float64)
        for _ in range(steps):
            gradient = A.t().mm(A.mm(x) - b)
            y = x - gamma * gradient
            x = bf.neighbor_allreduce(y)
        return x

    solution = global_solution(size)
    coarse = [distance(x, solution) for x in fleet(size).run(dgd, 0.3, 75)]
    fine = [distance(x, solution) for x in fleet(size).run(dgd, 0.03, 300)]
    assert max(coarse) < 0.1
    assert max(fine) < max(coarse) / 6  # the bias of DGD is proportional to its step
    assert min(distance(local_solution(rank), solution) for rank in range(size)) > 0.1


THRESHOLD = 4.0


def school(size: int, seed: int = 2) -> torch.Tensor:
    """Positions [size, 2] of fishes; each sees some of the others, and all are connected."""
    return 2.0 * torch.randn(size, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def get_neighbor_ranks(x: torch.Tensor, positions: torch.Tensor) -> tuple[list[int], list[int]]:
    """The fishes within the threshold of x, and how many fishes each of those sees."""
    near = torch.cdist(positions, positions) < THRESHOLD
    own = torch.linalg.norm(positions - x, dim=1) < THRESHOLD
    ranks = [rank for rank in own.nonzero().view(-1).tolist() if rank != bf.rank()]
    return ranks, [int(near[rank].sum()) - 1 for rank in ranks]


def get_mh_weights(ranks: list[int], degrees: list[int]) -> tuple[float, dict[int, float]]:
    """Metropolis-Hastings: 1 / (1 + max of the two degrees), the rest is the agent's own."""
    src_weights = {rank: 1.0 / (1 + max(len(ranks), degree)) for rank, degree in zip(ranks, degrees, strict=True)}
    return 1.0 - sum(src_weights.values()), src_weights


def test_listing_2_a_school_of_fish_finds_the_predator_over_a_moving_topology(fleet: Fleets) -> None:
    """Pull with weights by keyword, the neighbours changing in every step; it averages the estimate of the predator.

    One fish measures its distance along one direction only, so alone it cannot tell where the predator is. (The
    listing as printed passes the position x to the average; the text and the equation average the estimate w.)
    """
    size, predator = 8, torch.tensor([3.0, -2.0], dtype=torch.float64)

    def swim() -> tuple[torch.Tensor, float, list[list[int]]]:
        bf.init()
        rank = bf.rank()
        x = school(size)[rank].clone()
        angle = math.pi * rank / size
        w = torch.zeros(2, dtype=torch.float64)
        first_errors, seen = 0.0, []
        for k in range(50):
            positions = bf.allgather(x.view(1, 2))
            nb_ranks, nb_degrees = get_neighbor_ranks(x, positions)
            self_weight, src_weights = get_mh_weights(nb_ranks, nb_degrees)
            u = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
            d = u.dot(x - predator)
            gradient = -u * (d - u.dot(x - w))
            w = w + 0.5 * gradient
            before = w.clone()
            w = bf.neighbor_allreduce(w, self_weight=self_weight, src_weights=src_weights)
            if k == 0:
                first_errors = distance(before, predator)
            x = x + 0.05 * torch.tensor([math.sin(k / 9 + rank), math.cos(k / 7 + rank)], dtype=torch.float64)
            seen.append(nb_ranks)
        return w, first_errors, seen

    results = fleet(size).run(swim)
    assert len({str([seen[k] for _, _, seen in results]) for k in range(50)}) > 10, "the topology moves"
    for w, first_error, _ in results:
        assert distance(w, predator) < 1e-3 * first_error


def test_listing_2_by_the_equation_preserves_the_average_of_the_estimates(fleet: Fleets) -> None:
    """Metropolis-Hastings weights are doubly stochastic, so pulling with them changes no fleet's mean."""
    size = 8
    estimates = torch.randn(size, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def mix() -> torch.Tensor:
        positions = school(size)
        nb_ranks, nb_degrees = get_neighbor_ranks(positions[bf.rank()], positions)
        self_weight, src_weights = get_mh_weights(nb_ranks, nb_degrees)
        return bf.neighbor_allreduce(estimates[bf.rank()], self_weight=self_weight, src_weights=src_weights)

    results = torch.stack(fleet(size).run(mix))
    torch.testing.assert_close(results.mean(0), estimates.mean(0))
    assert results.var(0).sum() < estimates.var(0).sum()


def test_listing_5_the_exchange_runs_while_the_gradient_is_computed(fleet: Fleets) -> None:
    """Nonblocking with the weights by position: x is averaged as it was at the start of the call."""

    def train() -> torch.Tensor:
        bf.init()
        bf.set_topology(bf.ExponentialTwoGraph(bf.size()))
        A, b = local_problem(bf.rank())
        schedule = bf.GetDynamicOnePeerSendRecvRanks(bf.load_topology(), bf.rank())
        x = torch.zeros(COLUMNS, 1, dtype=torch.float64)
        lr = 0.02
        for _ in range(400):
            dst_ranks, src_ranks = next(schedule)
            self_weight = 1 / (len(src_ranks) + 1)
            src_weights = dict.fromkeys(src_ranks, self_weight)
            dst_weights = dict.fromkeys(dst_ranks, 1.0)
            handle = bf.neighbor_allreduce_nonblocking(x, self_weight, src_weights, dst_weights)
            grad = A.t().mm(A.mm(x) - b)
            x = bf.wait(handle) - lr * grad
        return x

    solution = global_solution(4)
    assert max(distance(x, solution) for x in fleet(4).run(train)) < 0.03


def test_listing_6_exact_diffusion_reaches_the_solution_exactly(fleet: Fleets) -> None:
    """Equations 24 to 26 on a ring: no bias with a constant step, unlike DGD with the same step."""

    def exact_diffusion(corrected: bool) -> torch.Tensor:
        bf.init()
        G = topology_util.RingGraph(bf.size())
        bf.set_topology(G)
        A, b = local_problem(bf.rank())
        gamma = 0.5
        x = torch.zeros(COLUMNS, 1, dtype=torch.float64)
        pre_psi = x.clone()
        for _ in range(80):
            grad_local = A.t().mm(A.mm(x) - b)
            psi = x - gamma * grad_local
            phi = psi + x - pre_psi if corrected else psi
            x = bf.neighbor_allreduce(phi)
            pre_psi = psi.clone()
        return x

    solution = global_solution(5)
    exact = [distance(x, solution) for x in fleet(5).run(exact_diffusion, True)]
    biased = [distance(x, solution) for x in fleet(5).run(exact_diffusion, False)]
    assert max(exact) < 1e-9
    assert max(biased) > 1e-3


State = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def gradient_tracking_step(
    state: State, neighbours: Iterator[tuple[list[int], list[int]]], A: torch.Tensor, b: torch.Tensor, alpha: float
) -> State:
    """One round of push-sum gradient tracking: three pushes with the same weights, all given by position."""
    _, y, u, v, prev_grad_local = state
    dst_neighbors, src_neighbors = next(neighbours)
    src_weights = dict.fromkeys(src_neighbors, 1)
    self_weight = 1 / (len(dst_neighbors) + 1)
    dst_weights = dict.fromkeys(dst_neighbors, self_weight)

    w = u - alpha * y
    u_new = bf.neighbor_allreduce(w, self_weight, src_weights, dst_weights)
    v_new = bf.neighbor_allreduce(v, self_weight, src_weights, dst_weights)
    x_new = u_new / v_new
    grad_local = A.t().mm(A.mm(x_new) - b)
    q = y + grad_local - prev_grad_local
    y_new = bf.neighbor_allreduce(q, self_weight, src_weights, dst_weights)
    return x_new, y_new, u_new, v_new, grad_local


@pytest.mark.parametrize("size", [4, 6])
def test_listing_7_push_sum_gradient_tracking_over_the_one_peer_grid(fleet: Fleets, size: int) -> None:
    def track() -> tuple[torch.Tensor, float]:
        bf.init()
        A, b = local_problem(bf.rank())
        bf.set_topology(topology_util.MeshGrid2DGraph(bf.size()))
        dynamic_neighbor_gen = topology_util.GetDynamicOnePeerSendRecvRanks(bf.load_topology(), bf.rank())
        x = torch.zeros(COLUMNS, 1, dtype=torch.float64)
        gradient = A.t().mm(A.mm(x) - b)
        state: State = (x, gradient.clone(), x.clone(), torch.ones_like(x), gradient.clone())
        for _ in range(100):
            state = gradient_tracking_step(state, dynamic_neighbor_gen, A, b, alpha=0.3)
        return state[0], state[3].sum().item()

    results = fleet(size).run(track)
    solution = global_solution(size)
    assert max(distance(x, solution) for x, _ in results) < 1e-6
    # Every push is column stochastic, so the correction weights of the fleet sum to what they began with.
    assert sum(mass for _, mass in results) == pytest.approx(size * COLUMNS)


def test_the_calls_of_section_v_on_machines(fleet: Fleets) -> None:
    """set_machine_topology and hierarchical_neighbor_allreduce with the names of section V-B."""

    def run() -> float:
        bf.init()
        assert bf.set_machine_topology(topology_util.RingGraph(bf.machine_size()))
        assert bf.machine_rank() * bf.local_size() + bf.local_rank() == bf.rank()
        x = torch.tensor(float(bf.rank()))
        static = bf.hierarchical_neighbor_allreduce(x, name="static")
        other = 1 - bf.machine_rank()
        dynamic = bf.hierarchical_neighbor_allreduce(
            x, self_weight=0.5, src_machine_weights={other: 0.5}, dst_machine_weights={other: 1.0}, name="dynamic"
        )
        assert static.item() == dynamic.item()
        return dynamic.item()

    assert fleet(4, agents_per_machine=2).run(run) == [1.5] * 4


def test_the_calls_of_sections_iv_a_and_b(fleet: Fleets) -> None:
    """set_topology(graph), neighbor_allreduce(tensor, name), and with the three weights by keyword."""

    def run() -> list[float]:
        bf.init()
        assert bf.set_topology(bf.RingGraph(bf.size()))
        x = torch.tensor(float(bf.rank()))
        other = 1 - bf.rank()
        return [
            bf.neighbor_allreduce(x, "name").item(),
            bf.neighbor_allreduce(x, name="name").item(),
            bf.neighbor_allreduce(
                x, name="name", self_weight=0.5, dst_weights={other: 0.5}, src_weights={other: 1.0}
            ).item(),
        ]

    assert fleet(2).run(run) == [[0.5] * 3] * 2
