"""Training under faults drawn from a seed, where failed agents are restarted: it ends as without faults.

``python tools/chaos.py --returns`` runs more of them and prints a table.
"""

from __future__ import annotations

import pytest

from support import PROCESS_GROUP
from support.chaos import LATE
from support.chaos_rejoins import FAULTS, Draw, run
from support.fault_points import seeds


@seeds(2, 5, 200)
def test_failed_agents_rejoin_and_all_reach_the_same_point_as_without_failures(seed: int) -> None:
    run(seed)


@pytest.mark.transport(PROCESS_GROUP)
@seeds(1, 3, 60)
def test_failed_agents_rejoin_over_process_groups(seed: int) -> None:
    """A rejoining agent takes part in the next round of coordination, without the others' request cache."""
    run(seed, PROCESS_GROUP)


def test_seeds_draw_all_kinds_of_faults() -> None:
    draws = [Draw.of(seed) for seed in range(200)]
    assert {faults[0][0] for draw in draws[:10] for faults in draw.faults.values()} == set(FAULTS)
    points = {point.kind for draw in draws for faults in draw.faults.values() for _, point in faults}
    assert points > {*LATE, "Entering", "Writing"}
    assert any(len(faults) == 2 for draw in draws for faults in draw.faults.values())
    assert any(len(draw.faults) == draw.size - 1 for draw in draws)
