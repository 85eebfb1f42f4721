"""DeMuon: the authors' recursion in numpy, the matrix sign by singular values, and where it ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import shoal
from shoal.algorithms import DeMuon, Gradient, LocalSteps, run
from shoal.algorithms.matrices import join, matrix_sizes, msgn, split
from shoal.sim import StackedFleet
from shoal.topology import Circulant, OnePeerExponential

Vectors = NDArray[np.float64]
N, ROWS, COLUMNS, SAMPLES = 8, 4, 3, 6
SHAPES = ((ROWS, COLUMNS), (2,))
D = ROWS * COLUMNS + 2
LR, BETA, STEPS = 0.05, 0.7, 12
_DRAW = torch.Generator().manual_seed(0)
A = torch.randn(N, SAMPLES, ROWS, dtype=torch.float64, generator=_DRAW)
B = torch.randn(N, SAMPLES, COLUMNS, dtype=torch.float64, generator=_DRAW)
CENTRES = torch.randn(N, 2, dtype=torch.float64, generator=_DRAW)
START = torch.randn(N, D, dtype=torch.float64, generator=_DRAW)
RING, CHANGING = Circulant(N, {0: 0.5, 1: 0.25, -1: 0.25}), OnePeerExponential(N)


def of_all(x: torch.Tensor) -> torch.Tensor:
    """Of |A_i X - B_i|^2 / 2 + |v - c_i|^2 / 2, with X a matrix and v a vector."""
    X, v = split(x, matrix_sizes(SHAPES, D))
    return join([A.mT @ (A @ X - B), v - CENTRES.unsqueeze(-1)])


def by_singular_values(y: Vectors, iterations: int) -> Vectors:
    """Newton and Schulz change the singular values only: each by the polynomial, again and again."""
    U, s, V = np.linalg.svd(y / np.linalg.norm(y), full_matrices=False)
    for _ in range(iterations):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (U * s) @ V


def de_muon(iterations: int) -> Vectors:
    x, m, y = START.numpy(), np.zeros((N, D)), np.zeros((N, D))
    for k in range(STEPS):
        edges = CHANGING.edges(k)
        W = np.zeros((N, N))
        W[np.array(edges.destination), np.array(edges.source)] = np.array(edges.weight)
        new = BETA * m + (1 - BETA) * of_all(torch.from_numpy(x)).numpy()
        y, m = W @ (y + new - m), new
        step = np.empty_like(y)
        for i in range(N):
            matrix = y[i, : ROWS * COLUMNS].reshape(ROWS, COLUMNS)
            step[i, : ROWS * COLUMNS] = by_singular_values(matrix, iterations).ravel()
            step[i, ROWS * COLUMNS :] = y[i, ROWS * COLUMNS :] / np.linalg.norm(y[i, ROWS * COLUMNS :])
        x = W @ (x - LR * step)
    return x


@pytest.mark.parametrize("iterations", [1, 5])
def test_it_is_the_authors_recursion(iterations: int) -> None:
    algorithm = DeMuon(LR, BETA, iterations, SHAPES)
    results = StackedFleet(CHANGING).run(algorithm, START, of_all, STEPS).x.numpy()
    assert np.abs(results - de_muon(iterations)).max() < 1e-12


@pytest.mark.transport("threads")
def test_agents_equal_the_authors_recursion() -> None:
    def agent() -> torch.Tensor:
        rank = shoal.rank()
        gradient = Gradient(lambda x: of_all(x.expand(N, D))[rank])
        return run(DeMuon(LR, BETA, 5, SHAPES), START[rank], gradient, CHANGING, STEPS).x

    assert np.abs(torch.stack(shoal.Fleet(N).run(agent)).numpy() - de_muon(5)).max() < 1e-12


def test_the_matrix_sign_brings_singular_values_near_one_and_leaves_zeros() -> None:
    M = torch.randn(3, 5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(msgn(M, 5))
    assert values.min() > 0.68 and values.max() < 1.14
    assert (msgn(M.mT, 5) - msgn(M, 5).mT).abs().max() < 1e-14
    assert torch.equal(msgn(torch.zeros(2, 3, 3), 5), torch.zeros(2, 3, 3))
    assert (msgn(M[:, :1], 5).norm(dim=(-2, -1)) - 1).abs().max() < 1e-14


def optimum() -> torch.Tensor:
    X = torch.linalg.solve((A.mT @ A).sum(0), (A.mT @ B).sum(0))
    return torch.cat([X.flatten(), CENTRES.mean(0)])


@pytest.mark.parametrize("shapes", [SHAPES, None], ids=["matrices", "one vector"])
def test_with_decreasing_steps_it_finds_the_optimum_of_different_agents(
    shapes: tuple[tuple[int, ...], ...] | None,
) -> None:
    fleet, results, lr = StackedFleet(RING), None, 0.1
    for _ in range(30):
        results = fleet.run(DeMuon(lr, shapes=shapes), START, of_all, 30, resume=results)
        lr *= 0.7
    assert results is not None
    assert (results.x - optimum()).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(5, 1), (4, 3)])
def test_the_matrix_sign_does_not_depend_on_the_scale_however_small_or_large(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    matrix = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = msgn(matrix, 5)
    for exponent in (-120, 120) if dtype == torch.float32 else (-1000, 1000):
        assert torch.equal(msgn(matrix * 2.0**exponent, 5), expected)


def test_wrappers_forward_the_shapes_and_explicit_ones_stay() -> None:
    wrapped = LocalSteps(DeMuon(LR), 2)
    assert wrapped.shaped(SHAPES) == LocalSteps(DeMuon(LR, shapes=SHAPES), 2)
    given = DeMuon(LR, shapes=SHAPES)
    assert given.shaped(((D,),)) is given


def test_shapes_of_another_size_and_invalid_counts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"have 15 numbers, and x has 14: give the shapes"):
        StackedFleet(RING).run(DeMuon(LR, shapes=((3, 5),)), START, of_all, 1)
    with pytest.raises(ValueError, match="iterations=0"):
        DeMuon(LR, iterations=0)
    with pytest.raises(ValueError, match="0 <= beta < 1"):
        DeMuon(LR, beta=1.0)
