"""Cables drawn from seeds: slow, cut both ways, one way, or between two; for a time, which loses nobody, or for good.

``python tools/chaos.py --links`` runs more of them and prints a table.
"""

from __future__ import annotations

import pytest

from support.chaos_links import FAULTS, Draw, run
from support.fault_points import seeds

pytestmark = pytest.mark.transport("namespaces")


@seeds(1, 3, 100)
def test_training_reaches_the_expected_point_with_any_link_faults(seed: int) -> None:
    run(seed)


def test_seeds_draw_all_kinds_of_faults() -> None:
    draws = [Draw.of(seed) for seed in range(100)]
    assert {draw.kind for draw in draws[: len(FAULTS)]} == set(FAULTS)
    assert {draw.stops for draw in draws} == {True, False}
