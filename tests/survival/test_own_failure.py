"""``on_loss="continue"``: one agent's own call fails, and its process lives on; the others go on without it."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

import shoal
from support.fault_points import over_both
from support.survivors import CONTINUE
from support.world import World

SIZE, CULPRIT = 4, 1
OPERATIONS = {
    "neighbours": lambda x: shoal.neighbor_allreduce(x, name="x"),
    "all": lambda x: shoal.allreduce(x, name="x"),
}


def average(kind: str) -> tuple[list[float], tuple[int, ...]]:
    """Of the ranks, until one cannot send its own, and some rounds more."""
    x = torch.tensor([float(shoal.rank())])
    for number in range(40):
        if number == 20 and shoal.rank() == CULPRIT:
            x[0] = math.nan
        try:
            OPERATIONS[kind](x)
        except shoal.NotFinite:
            time.sleep(0.5)  # it writes its log, say, in which time the others ask for what it has not sent
            raise
    return OPERATIONS[kind](x).tolist(), shoal.alive()


def is_shut_out() -> str:
    with pytest.raises(shoal.ShoalError) as caught:
        shoal.allreduce(torch.ones(1))
    return str(caught.value)


@over_both
@pytest.mark.parametrize("kind", OPERATIONS)
def test_the_others_go_on_and_it_is_told(environment: dict[str, Any], kind: str) -> None:
    left = [rank for rank in range(SIZE) if rank != CULPRIT]
    with World(SIZE, environment=environment | CONTINUE | {"SHOAL_CHECK_FINITE": "1"}) as world:
        outcomes = world.run(average, kind)
        assert outcomes[CULPRIT].error == "NotFinite"
        for rank in left:
            assert not outcomes[rank].error, outcomes[rank].trace
            assert outcomes[rank].value[1] == tuple(left)
        if kind == "all":
            assert [outcomes[rank].value[0] for rank in left] == [[pytest.approx(sum(left) / len(left))]] * len(left)
        [said] = world.results(is_shut_out, on=[CULPRIT])
        assert "counts it as lost (its own call failed: NotFinite" in said
