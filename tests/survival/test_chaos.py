"""Faults drawn from seeds: the survivors continue training, and end at the computed result.

A failing one is repeated alone by its seed: ``python tools/chaos.py 1 --first 17``, which also runs any number of
seeds, and prints the table of docs/fault-injection.md.
"""

from __future__ import annotations

import pytest

from support.chaos import FAULTS, LATE, LOCKED, Draw, run
from support.fault_points import seeds

LOCKING = [seed for seed in range(100) if Draw.of(seed).kind.startswith(LOCKED)]


@seeds(2, 5, 200)
def test_survivors_reach_the_expected_point(seed: int) -> None:
    run(seed)


@pytest.mark.soak
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", LOCKING)
def test_survivors_reach_the_expected_point_if_the_lock_is_held_for_20_seconds(seed: int) -> None:
    run(seed, locked=20.0)


def test_seeds_draw_all_kinds_of_faults() -> None:
    draws = [Draw.of(seed) for seed in range(200)]
    assert {fault for draw in draws[:10] for fault, _ in draw.faults.values()} == set(FAULTS)
    assert any(draw.unequal for draw in draws[:10])
    assert {point.kind for draw in draws for _, point in draw.faults.values()} > set(LATE)
    assert any(0 in draw.faults for draw in draws) and any(len(draw.survivors) == 1 < draw.size - 1 for draw in draws)
    assert Draw.of(7) == Draw.of(7)
