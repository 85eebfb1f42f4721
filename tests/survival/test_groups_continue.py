"""``on_loss="continue"``: calls of a group continue without a member that is killed, and others lose nothing by it."""

from __future__ import annotations

import pytest
import torch

import shoal
from support import PROCESS_GROUP
from support.fault_points import Point, arm
from support.survivors import CONTINUE
from support.world import World

EVEN, ODD = (0, 2, 4), (1, 3, 5)
SIZE, ROUNDS = 6, 12


def in_groups(numel: int, victim: int, point: Point) -> list[tuple[float, float, tuple[float, ...]]]:
    """Sums in my group, and of all, and what my group has, round by round, until the victim ends, and after."""
    rank = shoal.rank()
    group, result = EVEN if rank in EVEN else ODD, []
    shoal.barrier()
    if rank == victim:
        arm(point)
    for _ in range(ROUNDS):
        within = shoal.allreduce(torch.full((numel,), 2.0**rank, dtype=torch.float64), False, name="x", group=group)
        assert bool((within == within[0]).all())
        total = shoal.allreduce(torch.tensor([2.0**rank]), False, name="x")
        gathered = shoal.allgather(torch.tensor([float(rank)]), group=group)
        result.append((float(within[0]), float(total), tuple(gathered.tolist())))
    return result


@pytest.mark.parametrize("over", ["shared_memory", "network", PROCESS_GROUP])
@pytest.mark.parametrize("numel", [4, 200_000])
@pytest.mark.parametrize(
    ("victim", "point"), [(2, Point("sent", 9)), (3, Point("finished", 7)), (0, Point("summed", 5))]
)
def test_the_group_of_a_killed_agent_continues_without_it_and_the_other_unchanged(
    over: str, numel: int, victim: int, point: Point
) -> None:
    with World(SIZE, environment=CONTINUE | {"SHOAL_TRANSPORT": over}) as world:
        outcomes = world.run(in_groups, numel, victim, point)
    assert outcomes[victim].message == "exit code -9"
    left = [rank for rank in range(SIZE) if rank != victim]
    assert not [outcome for outcome in outcomes if outcome.rank in left and outcome.error], outcomes
    bereaved = EVEN if victim in EVEN else ODD
    before, after = sum(2.0**rank for rank in bereaved), sum(2.0**rank for rank in bereaved if rank != victim)
    sum_of_all = 2.0**SIZE - 1
    for rank in left:
        own = EVEN if rank in EVEN else ODD
        sums, totals, gathered = zip(*outcomes[rank].value, strict=True)
        if own == bereaved:
            assert list(sums) == sorted(sums, reverse=True) and {after} <= {*sums} <= {before, after}
            assert gathered[-1] == tuple(float(one) for one in own if one != victim)
        else:
            assert {*sums} == {sum(2.0**one for one in own)}
            assert {*gathered} == {tuple(float(one) for one in own)}
        assert list(totals) == sorted(totals, reverse=True) and {*totals} <= {sum_of_all, sum_of_all - 2.0**victim}
        assert totals[-1] == sum_of_all - 2.0**victim
        first = next(one for one in left if one in own)
        assert outcomes[rank].value == outcomes[first].value
