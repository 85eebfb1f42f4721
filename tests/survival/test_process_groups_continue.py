"""``on_loss="continue"`` where process groups carry tensors: the survivors compute the expected results, wherever one
is killed, even the coordinator. Operations in flight finish over links, and the next round has its own group."""

from __future__ import annotations

import pytest

from support import PROCESS_GROUP
from support.fault_points import Point, one_of_each_kind
from support.survivors import CONTINUE, average_through, burst_through, check_all_equal, check_averages, survivors
from support.world import World

pytestmark = pytest.mark.transport(PROCESS_GROUP)
SIZE = 5
SMALL, LARGE = 16, 100_000
ROUNDS = 12
BY_GROUPS = {"SHOAL_TRANSPORT": PROCESS_GROUP, **CONTINUE}

POINTS = [
    *(Point("Telling", k) for k in (3, 8, 20, 47)),
    Point("Deciding order", 2),
    *(Point("asked", k) for k in (2, 9)),
    *(Point("ordered", k) for k in (1, 4, 11)),
    *(Point("Moving", k) for k in (2, 9)),
    *(Point("moved", k) for k in (1, 3, 10)),
    Point("sent", 9),
    Point("Meeting", 1),
]


def in_turn() -> list[object]:
    """The soak has all; points that are not the one of their kind, and some kinds, are slow tests."""
    cases, usual = [], {point for point in one_of_each_kind(POINTS) if point.kind in ("Telling", "Moving", "moved")}
    for number, point in enumerate(POINTS):
        for place, victim in enumerate((0, 2)):
            for size, numel in enumerate((SMALL, LARGE)):
                if point.kind == "Deciding order" and victim:
                    continue
                marks = [pytest.mark.soak] if (number + place + size) % 2 else []
                marks += [] if point in usual else [pytest.mark.slow]
                cases.append(pytest.param(point, victim, numel, id=f"{point}-{victim}-{numel}", marks=marks))
    return cases


@pytest.mark.parametrize(("point", "victim", "numel"), in_turn())
def test_survivors_continue_wherever_one_agent_is_killed(point: Point, victim: int, numel: int) -> None:
    with World(SIZE, environment=BY_GROUPS) as world:
        outcomes = world.run(average_through, numel, ROUNDS, {victim: point})
        logs = survivors(outcomes, {victim})
        check_all_equal(logs, SIZE)
        check_averages({rank: log.values for rank, log in logs.items()}, SIZE, victim)


@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("point", [Point("moved", 5), Point("ordered", 20), Point("Moving", 4)], ids=str)
def test_with_many_calls_in_flight_each_continues(point: Point, numel: int) -> None:
    with World(SIZE, environment=BY_GROUPS) as world:
        outcomes = world.run(burst_through, numel, ROUNDS, {2: point})
        seen = survivors(outcomes, {2})
        for k in range(8):
            check_averages({rank: [value[k] for value in values] for rank, values in seen.items()}, SIZE, 2)


@pytest.mark.parametrize("victims", [(1, 4), (0, 1), (0, 2, 3)])
@pytest.mark.parametrize("apart", [0, 15])
def test_several_are_killed_at_once_or_one_after_another(victims: tuple[int, ...], apart: int) -> None:
    with World(6, environment=BY_GROUPS) as world:
        ends = {rank: Point("moved", 12 + apart * number) for number, rank in enumerate(victims)}
        logs = survivors(world.run(average_through, SMALL, 20, ends), set(victims))
        check_all_equal(logs, 6)
