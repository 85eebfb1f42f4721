"""``on_loss="continue"``: one agent's own call fails, and its process lives on; the others continue without it."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

import shoal
from shoal.execution.operation import Operation
from shoal.execution.stage import Steps
from shoal.runtime.agent import current
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


def shut_out_error() -> str:
    with pytest.raises(shoal.ShoalError) as caught:
        shoal.allreduce(torch.ones(1))
    return str(caught.value)


@over_both
@pytest.mark.parametrize("kind", OPERATIONS)
def test_the_others_continue_and_are_notified(environment: dict[str, Any], kind: str) -> None:
    left = [rank for rank in range(SIZE) if rank != CULPRIT]
    with World(SIZE, environment=environment | CONTINUE | {"SHOAL_CHECK_FINITE": "1"}) as world:
        outcomes = world.run(average, kind)
        assert outcomes[CULPRIT].error == "NotFinite"
        for rank in left:
            assert not outcomes[rank].error, outcomes[rank].trace
            assert outcomes[rank].value[1] == tuple(left)
        if kind == "all":
            assert [outcomes[rank].value[0] for rank in left] == [[pytest.approx(sum(left) / len(left))]] * len(left)
        [output] = world.results(shut_out_error, on=[CULPRIT])
        assert "counts it as lost (its own call failed: NotFinite" in output


def average_until_memory_runs_out(op: str, kind: str) -> tuple[list[float], tuple[int, ...]]:
    """Of the ranks, until one has no memory when a call begins, after which its script ends."""

    def no_memory(operation: Operation) -> Steps[torch.Tensor]:
        raise MemoryError

    x = torch.tensor([float(shoal.rank())])
    for number in range(40):
        if number == 20 and shoal.rank() == CULPRIT:
            with pytest.raises(MemoryError):
                current().engine.submit(op, "x", no_memory)
            time.sleep(0.5)  # in which the others request its unsent tensors
            shoal.shutdown()
            raise MemoryError
        OPERATIONS[kind](x)
    return OPERATIONS[kind](x).tolist(), shoal.alive()


@over_both
@pytest.mark.parametrize(("op", "kind"), [("neighbor_allreduce", "neighbours"), ("allreduce", "all")])
def test_a_call_that_cannot_start_costs_only_its_caller(environment: dict[str, Any], op: str, kind: str) -> None:
    left = [rank for rank in range(SIZE) if rank != CULPRIT]
    with World(SIZE, environment=environment | CONTINUE) as world:
        outcomes = world.run(average_until_memory_runs_out, op, kind)
        assert outcomes[CULPRIT].error == "MemoryError"
        for rank in left:
            assert not outcomes[rank].error, outcomes[rank].trace
            assert outcomes[rank].value[1] == tuple(left)


def leave_in_the_midst(kind: str) -> tuple[int, ...]:
    """One agent begins a round, does not wait for it, and leaves; another comes late, so that it is under way."""
    x = torch.ones(3)
    for _ in range(5):
        OPERATIONS[kind](x)
    if shoal.rank() == 0:
        time.sleep(1.0)
    if shoal.rank() == CULPRIT:
        started = shoal.nonblocking.allreduce if kind == "all" else shoal.nonblocking.neighbor_allreduce
        started(x, name="x")
        time.sleep(0.5)
        shoal.shutdown()
        return ()
    for _ in range(5):
        OPERATIONS[kind](x)
    return shoal.alive()


@over_both
@pytest.mark.parametrize("kind", OPERATIONS)
def test_an_agent_that_leaves_during_a_round_is_excluded(environment: dict[str, Any], kind: str) -> None:
    left = [rank for rank in range(SIZE) if rank != CULPRIT]
    with World(SIZE, environment=environment | CONTINUE) as world:
        outcomes = world.run(leave_in_the_midst, kind)
        for rank in left:
            assert not outcomes[rank].error, outcomes[rank].trace
            assert outcomes[rank].value == tuple(left)
