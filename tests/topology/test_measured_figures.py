"""Gaps, eigenvalues, rounds and lengths against figures that are known from theory or were measured elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.topology import RingGraph, exact_length, find, rounds_to, smallest_eigenvalue, spectral_gap

GAPS = {
    "ring": {4: 0.667, 8: 0.195, 16: 0.0507, 25: 0.0209, 32: 0.0128, 64: 0.0032},
    "star": {4: 0.250, 8: 0.125, 16: 0.0625, 25: 0.0400, 32: 0.0312, 64: 0.0156},
    "torus": {4: 0.667, 8: 0.500, 16: 0.400, 25: 0.276, 32: 0.117, 64: 0.117},
    "exponential": {4: 0.667, 8: 0.500, 16: 0.400, 25: 0.489, 32: 0.333, 64: 0.286},
    "hypercube": {4: 0.667, 8: 0.500, 16: 0.400, 32: 0.333, 64: 0.286},
}
LENGTHS = {
    "base-2": {3: 3, 4: 2, 5: 5, 6: 4, 7: 5, 8: 3, 9: 7, 12: 5, 16: 4, 24: 6, 25: 9, 32: 5, 64: 6, 100: 11},
    "base-3": {4: 2, 8: 3, 16: 4, 25: 6, 32: 5, 64: 6},
    "base-4": {4: 1, 8: 2, 16: 2, 25: 5, 32: 3, 64: 3},
    "base-5": {4: 1, 8: 2, 16: 2, 25: 2, 32: 3, 64: 3},
    "one-peer-exponential": {4: 2, 8: 3, 16: 4, 32: 5, 64: 6},
}


@pytest.mark.parametrize(
    ("name", "size", "gap"), [(name, n, gap) for name, row in GAPS.items() for n, gap in row.items()]
)
def test_spectral_gaps_are_those_of_the_table(name: str, size: int, gap: float) -> None:
    digits = len(str(gap).split(".")[1])
    assert spectral_gap(find(name).schedule(size)).value == pytest.approx(gap, abs=0.6 * 10**-digits)


def test_the_ring_of_thirds_is_at_the_boundary_of_exact_diffusion() -> None:
    assert smallest_eigenvalue(RingGraph(16)).value == pytest.approx(-1 / 3, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "size", "length"), [(name, n, k) for name, row in LENGTHS.items() for n, k in row.items()]
)
def test_exact_lengths_are_those_of_the_table(name: str, size: int, length: int) -> None:
    assert exact_length(find(name).schedule(size)) == length


def test_the_one_peer_exponential_graph_of_25_is_never_exact() -> None:
    assert exact_length(find("one-peer-exponential").schedule(25)) is None


@pytest.mark.parametrize(
    ("name", "size", "rounds"),
    [
        ("ring", 16, 257),
        ("ring", 25, 624),
        ("ring", 64, 3939),
        ("exponential", 16, 24),
        ("exponential", 25, 20),
        ("exponential", 64, 36),
        ("one-peer-exponential", 16, 4),
        ("one-peer-exponential", 25, 40),
        ("one-peer-exponential", 64, 6),
        ("base-2", 25, 9),
    ],
)
def test_rounds_to_a_millionth_are_near_the_measured_ones(name: str, size: int, rounds: int) -> None:
    """The measurement started from another vector, which changes the count slightly."""
    assert rounds_to(find(name).schedule(size), 1e-6).value == pytest.approx(rounds, rel=0.1, abs=1)


@pytest.mark.parametrize(("size", "rounds"), [(16, 34), (25, 42), (64, 37)])
def test_rounds_of_random_matchings_are_distributed_around_the_measured_draw(size: int, rounds: int) -> None:
    counts = [rounds_to(find("random-matchings").schedule(size, seed=seed)).value for seed in range(40)]
    assert abs(np.mean(counts) - rounds) < 2 * np.std(counts) < 8
