"""Which operation carries out a round: an all-reduce, machines as one, or a message on every edge."""

import numpy as np
import pytest

from shoal.netmodel.messages import ALLREDUCE, HIERARCHICAL, NEIGHBOR, NOTHING, operations_of
from shoal.topology import (
    AllReduce,
    Alternating,
    Idle,
    Kronecker,
    OnePeerExponential,
    RingGraph,
    RingStar,
    Schedule,
    Static,
    between_machines,
    inside_machines,
)


def names(schedule: Schedule, rounds: int = 1, local: int = 1) -> list[str]:
    return [one.name for one in operations_of(schedule, range(rounds), 100.0, local)]


def sent(schedule: Schedule, local: int = 1) -> np.ndarray:
    """Bytes that leave each agent in round 0."""
    (one,) = operations_of(schedule, [0], 100.0, local)
    return sum(np.bincount(part.source, part.nbytes, schedule.size) for part in one.step)


@pytest.mark.parametrize(
    ("schedule", "local", "expected"),
    [
        (Static(RingGraph(8)), 1, NEIGHBOR),
        (AllReduce(8), 1, ALLREDUCE),
        (AllReduce(8), 4, ALLREDUCE),
        (Idle(8), 1, NOTHING),
        (RingStar(16, 4), 4, HIERARCHICAL),
        (RingStar(16, 4), 1, NEIGHBOR),
        (RingStar(16, 4), 2, HIERARCHICAL),
        (inside_machines(AllReduce(4), 2), 4, HIERARCHICAL),
        (between_machines(OnePeerExponential(4), 2), 2, NEIGHBOR),
        (Static(np.array([[0.7, 0.3], [0.3, 0.7]])), 1, NEIGHBOR),
    ],
    ids=lambda value: value.describe() if isinstance(value, Schedule) else str(value),
)
def test_a_round_uses_the_operation_that_sends_least(schedule: Schedule, local: int, expected: str) -> None:
    assert names(schedule, local=local) == [expected]


def test_all_to_all_with_unequal_weights_is_no_all_reduce() -> None:
    matrix = np.full((3, 3), 0.2) + 0.4 * np.eye(3)
    assert names(Static(matrix)) == [NEIGHBOR]


def test_machines_whose_agents_take_different_shares_are_not_hierarchical() -> None:
    inside = np.array([[0.75, 0.25], [0.25, 0.75]])
    assert names(Kronecker(Static(RingGraph(4)), Static(inside)), local=2) == [NEIGHBOR]


def test_rounds_of_a_schedule_may_be_different_operations() -> None:
    turns = Alternating([inside_machines(AllReduce(4), 2), between_machines(OnePeerExponential(2), 4), AllReduce(8)])
    assert names(turns, 4, local=4) == [HIERARCHICAL, NEIGHBOR, ALLREDUCE, HIERARCHICAL]


def test_rounds_of_one_period_are_the_same_objects() -> None:
    first, second, third = operations_of(OnePeerExponential(4), range(3), 1.0)
    assert first is third and first is not second


def test_each_operation_sends_its_bytes() -> None:
    np.testing.assert_allclose(sent(Static(RingGraph(8))), 200.0)
    np.testing.assert_allclose(sent(AllReduce(8)), 2 * 7 / 8 * 100)
    # Shares of a quarter: three inside, one to each of two machines, three inside.
    np.testing.assert_allclose(sent(RingStar(16, 4), 4), 25.0 * (3 + 2 + 3))
    np.testing.assert_allclose(sent(inside_machines(AllReduce(4), 2), 4), 25.0 * 6)
