"""A schedule that leaving agents out alone would separate: the survivors stay connected over its period."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.topology import CATALOG, CecaPairs, RingRandom, Schedule, ShiftOne, Topology, Without, find
from shoal.topology.schedule import Edges, EdgeSchedule, assemble

ROUNDS = 16
"""Rounds of a schedule without a period that are looked at here."""
LOSSES = 3
Bools = NDArray[np.bool_]
Sets = NDArray[np.int64]


def closure(edges: Bools) -> Bools:
    """Reachability between agents, bool [sets, n, n]."""
    result = edges | np.eye(edges.shape[-1], dtype=bool)
    for _ in range(int(result.shape[-1]).bit_length()):
        result = np.matmul(result.astype(np.float32), result.astype(np.float32)) > 0
    return result


def healed_each_round(schedule: Schedule, rounds: int, sets: Sets) -> Bools:
    """For each set of lost agents whether all survivors reach each other, if each round is healed by itself."""
    size, each = schedule.size, np.arange(len(sets))
    union = np.zeros((len(sets), size, size), dtype=bool)
    for round in range(rounds):
        edges = np.repeat((schedule.matrix(round) != 0)[None], len(sets), axis=0)
        for failed in sets.T:
            edges |= edges[each, :, failed][:, :, None] & edges[each, failed][:, None, :]
            edges[each, :, failed] = edges[each, failed] = False
        union |= edges
    reach = closure(union)
    for failed in sets.T:
        reach[each, failed] = reach[each, :, failed] = True
    result: Bools = reach.all(axis=(1, 2))
    return result


def is_connected(healed: Schedule, departed_ranks: tuple[int, ...], rounds: int) -> bool:
    union = np.zeros((1, healed.size, healed.size), dtype=bool)
    left = np.setdiff1d(np.arange(healed.size), departed_ranks)
    for round in range(rounds):
        union[0] |= healed.matrix(round) != 0
        if (round & (round + 1) == 0 or round + 1 == rounds) and closure(union)[0][np.ix_(left, left)].all():
            return True
    return False


def check_what_is_promised(
    topology: Topology, full_schedule: Schedule, departed_ranks: tuple[int, ...], peers: int
) -> None:
    healed = Without(full_schedule, departed_ranks)
    rounds = healed.period or 8 * ROUNDS
    assert is_connected(healed, departed_ranks, rounds), f"{healed} falls apart"
    for round in range(min(rounds, 9)):
        matrix = healed.matrix(round)
        np.testing.assert_allclose(matrix.sum(axis=1), 1.0, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(matrix[list(departed_ranks)], np.eye(full_schedule.size)[list(departed_ranks)])
        if topology.doubly:
            np.testing.assert_allclose(matrix.sum(axis=0), 1.0, rtol=0, atol=1e-12)
        if topology.symmetric:
            np.testing.assert_array_equal(matrix, matrix.T)
        if peers == 1:
            assert _peers(matrix) <= 1 and (matrix >= 0).all()


CHANGING = sorted(
    name
    for name, topology in CATALOG.items()
    if any(topology.schedule(size).period != 1 for size in (4, 8) if not topology.refuses(size))
)


@pytest.mark.parametrize("name", CHANGING)
def test_any_failures_leave_the_survivors_connected_over_the_period(name: str) -> None:
    """All sets of up to three failed agents, of up to 16."""
    topology, draw = CATALOG[name], np.random.default_rng(0)
    for size in range(2, 17):
        if topology.refuses(size):
            continue
        full = topology.schedule(size)
        for count in range(1, min(LOSSES, size - 1) + 1):
            sets = np.array(list(itertools.combinations(range(size), count)))
            # A family that plans anew is looked at as it is: what its rounds would be without that says nothing.
            planned = full.among(list(range(size - count))) is not None
            rounds = min(full.period or ROUNDS, 64)
            peers = 0 if planned else max(_peers(full.matrix(round)) for round in range(rounds))
            apart = [] if planned else np.flatnonzero(~healed_each_round(full, rounds, sets)).tolist()
            for number in {*apart[:8], *draw.choice(len(sets), 1).tolist()}:
                check_what_is_promised(topology, full, tuple(sets[number].tolist()), peers)


def _peers(matrix: NDArray[np.float64]) -> int:
    """The most other agents that one receives from."""
    return int((np.count_nonzero(matrix, axis=1) - (matrix.diagonal() != 0)).max())


def test_the_cases_include_disconnected_survivors() -> None:
    sets = np.array([[0, 2, 4], [0, 1, 2]])
    assert healed_each_round(CecaPairs(8), 3, sets).tolist() == [False, True]
    assert not healed_each_round(find("machines-by-turns").schedule(4), 2, np.array([[0, 3]])).any()
    assert not healed_each_round(find("inner-outer-ring").schedule(6), 12, np.array([[1, 3, 5]])).any()


def test_a_round_is_changed_only_if_the_survivors_would_be_disconnected() -> None:
    full = CecaPairs(8)
    alone, paired = full.matrix(0), Without(full, (0, 2, 4)).matrix(1)
    assert Without(full, (0, 1, 2)).period == Without(full, (0, 2, 4)).period == full.period
    np.testing.assert_array_equal(Without(full, (5,)).matrix(0)[6], alone[6])
    np.testing.assert_array_equal(paired[[3, 5]], 0.5 * (np.eye(8)[[3, 5]] + np.eye(8)[[5, 3]]))


def test_without_idle_agents_a_round_is_appended() -> None:
    """0 and 1 exchange in one round, 2 and 3 in the same one. Only agent 4 connected them, in two others."""
    exchanges = [[(0, 1), (2, 3)], [(0, 1), (2, 3)]]
    healed = Without(_Pairs(5, [*exchanges, [(0, 4), (2, 3)], [(2, 4), (0, 1)]]), [4])
    assert healed.period in (4, 5)
    assert is_connected(healed, (4,), healed.period or 0)
    assert (np.count_nonzero(healed.matrix(healed.period - 1), axis=1) <= 2).all()
    np.testing.assert_array_equal(healed.matrix(0), healed.matrix(healed.period))


def test_parts_disconnected_before_the_failure_are_not_joined() -> None:
    healed = Without(_Pairs(5, [[(0, 1), (2, 3)], [(0, 1), (3, 4)]]), [3])
    assert not is_connected(healed, (3,), healed.period or 0)
    assert is_connected(healed, (0, 1, 3), healed.period or 0)


@pytest.mark.parametrize("schedule", [ShiftOne(4), RingRandom(4)], ids=repr)
def test_two_agents_of_one_half_average_after_the_failure_of_the_other_half(schedule: Schedule) -> None:
    departed = (1, 3) if isinstance(schedule, RingRandom) else (2, 3)
    left = [rank for rank in range(4) if rank not in departed]
    np.testing.assert_array_equal(Without(schedule, departed).matrix(5)[np.ix_(left, left)], 0.5)


class _Pairs(EdgeSchedule):
    """Exchanges of pairs, with weights of 1/2."""

    def __init__(self, size: int, rounds: list[list[tuple[int, int]]]) -> None:
        self.size, self.period, self._rounds = size, len(rounds), rounds

    def _edges(self, round: int) -> Edges:
        first, second = np.array(self._rounds[round]).T
        paired = np.isin(np.arange(self.size), [first, second])
        own = np.arange(self.size)
        return assemble(
            self.size,
            np.concatenate([first, second, own]),
            np.concatenate([second, first, own]),
            np.concatenate([np.full(2 * len(first), 0.5), np.where(paired, 0.5, 1.0)]),
        )

    def describe(self) -> str:
        return f"pairs {self._rounds} of {self.size} agents"
