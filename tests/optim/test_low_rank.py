"""``compression=LowRank(rank)``: PowerGossip of every matrix of a model, against numpy, and its bytes."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import networkx as nx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import shoal
from shoal.algorithms import PowerGossip
from shoal.algorithms.matrices import LEFT, _Matrix, _orthonormal
from shoal.compression import LowRank
from shoal.sim import StackedFleet
from support.optimizers import LR, MODEL, SIZE, batch, flat, gradient

Fleets = Callable[..., shoal.Fleet]
Vectors = NDArray[np.float64]
GRAPH = shoal.topology.RingGraph(SIZE)
LINKS = [(i, j) for i in range(SIZE) for j in sorted(set(nx.Graph(GRAPH).neighbors(i)) - {i})]
SHAPES = tuple(tuple(param.shape) for param in MODEL.parameters())  # (7, 5), (7,), (3, 7), (3,)
STEPS = 4


def gradients_of_all(model: torch.nn.Module, x: Vectors, step: int) -> Vectors:
    rows = torch.from_numpy(x)
    return torch.stack([gradient(model, rows[rank], rank, step) for rank in range(SIZE)]).numpy()


def power_gossip(rank: int, halves: int) -> Vectors:
    """Algorithm 2 of the paper on each matrix, with QR: what is seen of a difference depends on the span alone."""
    algorithm, model = PowerGossip(1.0, rank=rank, shapes=SHAPES), deepcopy(MODEL)
    start = flat(MODEL).repeat(SIZE, 1)
    started = StackedFleet(GRAPH).run(algorithm, start, torch.zeros_like, 0).state[1:]
    places, at, used = [], 0, [0, 0]
    bases: dict[tuple[int, int, int, int], Vectors] = {}  # of a link, a matrix and a side
    for number, shape in enumerate(SHAPES):
        size = int(np.prod(shape))
        places.append(slice(at, at + size))
        at += size
        for side, length in enumerate(shape if len(shape) == 2 else ()):
            part = started[side][:, used[side] : used[side] + length * rank].numpy()
            used[side] += length * rank
            for link, row in zip(LINKS, part, strict=True):
                bases[(*link, number, side)] = row.reshape(rank, length).T
    x, half = start.numpy(), 0
    for step in range(STEPS):
        x = x - LR * gradients_of_all(model, x, step)
        for within in range(halves):
            change = np.zeros_like(x)
            for i, j in ((i, j) for i, j in LINKS if i < j):
                for number, (shape, place) in enumerate(zip(SHAPES, places, strict=True)):
                    D = (x[j, place] - x[i, place]).reshape(shape)
                    if len(shape) == 1:
                        seen = D if within == 0 else np.zeros_like(D)
                    else:
                        side = half % 2  # of the result
                        given, D = bases[i, j, number, 1 - side], D.T if side else D
                        V, _ = np.linalg.qr(given)
                        bases[i, j, number, side] = D @ V
                        seen = D @ V @ V.T
                        seen = seen.T if side else seen
                    change[i, place] += seen.ravel() / 3  # two neighbours each
                    change[j, place] -= seen.ravel() / 3
            x, half = x + change, half + 1
    return x


def train(compression: LowRank) -> tuple[torch.Tensor, list[int]]:
    """The model after the steps, and the bytes sent in each but the first."""
    model = deepcopy(MODEL)
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer = shoal.DecentralizedOptimizer(sgd, model, compression=compression, topology=GRAPH)
    assert optimizer.algorithm == PowerGossip(1.0, compression.iterations, rank=compression.rank)
    books = []
    for step in range(STEPS):
        books.append(shoal.observability.bytes_sent())
        optimizer.zero_grad()
        model(batch(shoal.rank(), step)).square().mean().backward()
        optimizer.step()
    sent = [
        after - before for before, after in zip(books[1:], [*books[2:], shoal.observability.bytes_sent()], strict=True)
    ]
    optimizer.close()
    return flat(model), sent


@pytest.mark.parametrize(("rank", "iterations"), [(1, 1), (2, 1), (1, 0.5), (2, 1.5)])
def test_a_step_is_power_gossip_of_every_matrix(fleet: Fleets, rank: int, iterations: float) -> None:
    results = [x for x, _ in fleet(SIZE).run(train, LowRank(rank, iterations))]
    assert np.abs(torch.stack(results).numpy() - power_gossip(rank, round(2 * iterations))).max() < 1e-10


@pytest.mark.parametrize("rank", [1, 2])
def test_a_matrix_sends_rank_times_rows_plus_columns_and_a_vector_all_its_entries(fleet: Fleets, rank: int) -> None:
    numbers = rank * (7 + 5) + 7 + rank * (3 + 7) + 3
    for _, sent in fleet(SIZE).run(train, LowRank(rank)):
        assert sent == [2 * 8 * numbers] * (STEPS - 1)
    halves = [2 * 8 * (rank * (7 + 3) + 7 + 3), 2 * 8 * (rank * (5 + 7) + 7 + 3)]  # of the right side, of the left
    for _, sent in fleet(SIZE).run(train, LowRank(rank, iterations=0.5)):
        assert sent == [halves[1], halves[0], halves[1]]


def test_groups_with_their_own_learning_rate_schedules_step_by_them(fleet: Fleets) -> None:
    """One number for each parameter: the first group's rate falls to a half. Other rates give other models."""

    def train_with(rate: float) -> torch.Tensor:
        model = deepcopy(MODEL)
        first, *others = model.parameters()
        sgd = torch.optim.SGD([{"params": [first]}, {"params": others}], lr=LR)
        optimizer = shoal.DecentralizedOptimizer(sgd, model, compression=LowRank(), topology=GRAPH)
        for step in range(2):
            sgd.param_groups[0]["lr"] = rate if step else LR
            optimizer.zero_grad()
            model(batch(shoal.rank(), step)).square().mean().backward()
            optimizer.step()
        optimizer.close()
        return flat(model)

    agents = fleet(SIZE)
    full, half, none = (torch.stack(agents.run(train_with, rate)).mean(0) for rate in (LR, LR / 2, 1e-12 * LR))
    weights = SHAPES[0][0] * SHAPES[0][1]
    assert (full - none)[:weights].norm() > 1e-3
    assert ((full + none) / 2 - half).abs().max() < 1e-12  # the mean of agents is linear in the rate of the last step


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e5])
def test_orthonormal_vectors_span_the_given_ones_in_turn(condition: float) -> None:
    draw = torch.Generator().manual_seed(5)
    common, vectors = torch.randn(1, 1, 40, dtype=torch.float64, generator=draw), torch.zeros(3, 4, 40).double()
    vectors += common + torch.randn(3, 4, 40, dtype=torch.float64, generator=draw) / condition
    matrices = [_Matrix(slice(0, 2000), 40, 50, 4)]
    last = torch.randn(3, 160, dtype=torch.float64, generator=draw)
    found = _orthonormal(matrices, LEFT, vectors.flatten(1), last).view(3, 4, 40)
    assert (found @ found.mT - torch.eye(4)).abs().max() < 1e-14
    Q = torch.linalg.qr(vectors.mT).Q
    for k in range(1, 5):
        projections = Q[..., :k] @ Q[..., :k].mT, found[:, :k].mT @ found[:, :k]
        assert (projections[0] - projections[1]).abs().max() < 1e-15 * condition * 10


def test_a_zero_or_dependent_vector_is_replaced_by_the_last_one() -> None:
    matrices, (a, b, c) = [_Matrix(slice(0, 100), 10, 10, 2)], torch.eye(10, dtype=torch.float64)[:3]
    for first, second, expected in ((a, 3 * a, (a, c)), (0 * a, a, (b, a)), (a, a + 1e-3 * b, (a, b))):
        found = _orthonormal(matrices, LEFT, torch.cat([first, second])[None], torch.cat([b, c])[None])
        assert (found.view(2, 10) - torch.stack(expected)).abs().max() < 1e-13


def test_a_matrix_whose_factors_are_larger_is_sent_uncompressed() -> None:
    """Then one step is an average, as of a vector."""
    fleet, x = StackedFleet(GRAPH), torch.randn(SIZE, 12, dtype=torch.float64)
    full = fleet.run(PowerGossip(1.0, rank=3, shapes=((4, 3),)), x, torch.zeros_like, 5)
    vector = fleet.run(PowerGossip(1.0, shapes=((12,),)), x, torch.zeros_like, 5)
    assert torch.equal(full.x, vector.x)
    assert full.sent == vector.sent


def test_differences_of_lower_rank_than_the_messages_converge() -> None:
    """Zero vectors are replaced, and agents agree once all directions have been used."""
    draw = torch.Generator().manual_seed(3)
    common, left, right = (torch.randn(*size, dtype=torch.float64, generator=draw) for size in ((8, 6), (8, 1), (1, 6)))
    amounts = torch.randn(SIZE, 1, 1, dtype=torch.float64, generator=draw)
    x = (common + amounts * (left @ right)).flatten(1)
    results = StackedFleet(GRAPH).run(PowerGossip(1.0, rank=2, shapes=((8, 6),)), x, torch.zeros_like, 60).x
    assert (results - x.mean(0)).abs().max() < 1e-10 < 0.1 < (x - x.mean(0)).abs().max()


def test_agents_with_different_numbers_of_neighbours_agree_with_a_stacked_fleet(fleet: Fleets) -> None:
    algorithm, star = PowerGossip(0.1, rank=2, shapes=((8, 6), (3,))), shoal.topology.StarGraph(SIZE)
    start, target = torch.randn(2, SIZE, 51, dtype=torch.float64, generator=torch.Generator().manual_seed(4))

    def agent() -> torch.Tensor:
        rank = shoal.rank()
        return shoal.algorithms.run(algorithm, start[rank], lambda x: x - target[rank], star, 6).x

    stacked = StackedFleet(star).run(algorithm, start, lambda x: x - target, 6).x
    assert (torch.stack(fleet(SIZE).run(agent)) - stacked).abs().max() < 1e-12
    assert (stacked - stacked.mean(0)).abs().max() > 0.1


def test_unsupported_settings_are_refused() -> None:
    def agent() -> None:
        model = deepcopy(MODEL)
        sgd = torch.optim.SGD(model.parameters(), lr=LR)
        with pytest.raises(ValueError, match=r"LowRank\(rank=1, iterations=1\) is for adapt, then combine"):
            shoal.bluefog.DistributedGradientAllreduceOptimizer(sgd, model, compression=LowRank())
        with pytest.raises(ValueError, match="PowerGossip needs W to be static"):
            shoal.DecentralizedOptimizer(
                sgd, model, compression=LowRank(), topology=shoal.topology.OnePeerHypercube(SIZE)
            )

    shoal.Fleet(SIZE).run(agent)
    with pytest.raises(ValueError, match="rank=0"):
        LowRank(0)
    with pytest.raises(ValueError, match="rank=0"):
        PowerGossip(1.0, rank=0)
    with pytest.raises(ValueError, match="rows means"):
        PowerGossip(1.0, rows=2, shapes=((2, 2),))
