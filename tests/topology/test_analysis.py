"""Gaps, eigenvalues, rounds and lengths against figures that are known from theory or were measured elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.topology import ExponentialTwoGraph, RingGraph, StarGraph, find, mixing_matrix
from shoal.topology.age import average_age
from shoal.topology.consensus import exact_length, rounds_to
from shoal.topology.cost import traffic
from shoal.topology.spectrum import smallest_eigenvalue, spectral_gap

GAPS = {
    "ring": {4: 0.667, 8: 0.195, 16: 0.0507, 25: 0.0209, 32: 0.0128, 64: 0.0032},
    "star": {4: 0.250, 8: 0.125, 16: 0.0625, 25: 0.0400, 32: 0.0312, 64: 0.0156},
    "torus": {16: 0.400, 25: 0.276, 32: 0.117, 64: 0.117},
    "exponential": {4: 0.667, 8: 0.500, 16: 0.400, 25: 0.489, 32: 0.333, 64: 0.286},
    "hypercube": {4: 0.667, 8: 0.500, 16: 0.400, 32: 0.333, 64: 0.286},
}
LENGTHS = {
    "base-2": {3: 3, 4: 2, 5: 5, 6: 4, 7: 5, 8: 3, 9: 7, 12: 5, 16: 4, 24: 6, 25: 9, 100: 11},
    "base-3": {4: 2, 8: 3, 16: 4, 25: 6},
    "base-5": {4: 1, 8: 2, 16: 2, 25: 2, 64: 3},
    "one-peer-exponential": {4: 2, 8: 3, 16: 4, 32: 5, 64: 6},
}


@pytest.mark.parametrize(
    ("name", "size", "gap"), [(name, n, gap) for name, row in GAPS.items() for n, gap in row.items()]
)
def test_spectral_gaps_are_those_of_the_table(name: str, size: int, gap: float) -> None:
    digits = len(str(gap).split(".")[1])
    assert spectral_gap(find(name).schedule(size)).value == pytest.approx(gap, abs=0.6 * 10**-digits)


@pytest.mark.parametrize("graph", [RingGraph(9), StarGraph(7), ExponentialTwoGraph(12)], ids=["ring", "star", "exp"])
def test_gap_and_smallest_eigenvalue_equal_those_of_the_dense_matrix(graph) -> None:
    matrix = mixing_matrix(graph)
    size = len(matrix)
    assert spectral_gap(graph).value == pytest.approx(1 - np.linalg.norm(matrix - 1 / size, 2), abs=1e-9)
    if np.allclose(matrix, matrix.T):
        assert smallest_eigenvalue(graph).value == pytest.approx(np.linalg.eigvalsh(matrix)[0], abs=1e-9)


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
    [("ring", 16, 257), ("exponential", 16, 24), ("one-peer-exponential", 16, 4), ("exponential", 64, 36)],
)
def test_rounds_to_a_millionth_are_near_those_measured(name: str, size: int, rounds: int) -> None:
    """Those began from another vector, which moves the count a little."""
    assert rounds_to(find(name).schedule(size), 1e-6).value == pytest.approx(rounds, rel=0.1, abs=1)


def test_average_age_of_a_static_graph_counts_hops() -> None:
    assert average_age(find("fully-connected").schedule(6)).mean == pytest.approx(1.0)
    assert average_age(RingGraph(5)).mean == pytest.approx(1.5)


def test_traffic_counts_what_each_agent_sends() -> None:
    ring = traffic(RingGraph(8), nbytes=100.0)
    star = traffic(StarGraph(8), nbytes=100.0)
    assert (ring.messages, ring.busiest_messages, ring.bytes, ring.handshakes) == (16, 2, 1600.0, 8)
    assert (star.messages, star.busiest_messages, star.busiest_bytes, star.handshakes) == (14, 7, 700.0, 7)
