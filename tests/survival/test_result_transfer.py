"""``on_loss="continue"``: an operation of all has ended on some, and others lack what died with an agent."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import shoal
from shoal.runtime.agent import current
from support.fault_points import over_both
from support.survivors import CONTINUE
from support.world import World

SIZE = 5
CALLS: dict[str, Any] = {
    "small": lambda x, out: shoal.allreduce(x[:3], op="sum", name="last"),
    "into a tensor": lambda x, out: shoal.allreduce(x, op="sum", name="last", out=out),
    "in place": lambda x, out: shoal.bluefog.allreduce_(x[:3], average=False, name="last"),
    "large": lambda x, out: shoal.allreduce(x, op="sum", name="last"),
    "half": lambda x, out: shoal.allreduce(x.bfloat16(), op="sum", name="last").float(),
    "gathered": lambda x, out: shoal.allgather(x[:3].view(1, 3)[: shoal.rank() % 2 + 1], name="last").sum(0),
    "barrier": lambda x, out: shoal.barrier(name="last") or torch.zeros(1),
}


def die_in_post(number: int, only: int) -> None:
    """Send what the ``number``-th stage of the operation sends to one agent alone, and be killed."""
    engine = current().engine
    post, posts = engine.sender.post, 0

    def last(channel: Any, operation: Any, stage: Any) -> None:
        nonlocal posts
        posts += operation.name == "last"
        if posts == number:
            stage.exchange.sends = [send for send in stage.exchange.sends if send.destination == only]
        post(channel, operation, stage)
        if posts == number:
            engine.sender.flush()
            time.sleep(0.2)  # in which that one hears from the others, too
            os.kill(os.getpid(), signal.SIGKILL)

    engine.sender.post = last  # type: ignore[method-assign]


def result_after_a_death(
    kind: str, victim: int, number: int, only: int, strided: bool
) -> tuple[list[float], int, tuple[int, ...]]:
    """The result of an operation in which the victim dies, how often this agent forwarded it, and the members then."""
    engine, handed_on = current().engine, []
    send = engine.result_transfer.send
    engine.result_transfer.send = lambda *what: (handed_on.append(what), send(*what))[1]  # type: ignore[method-assign]
    if shoal.rank() == victim:
        die_in_post(number, only)
    numel = 25_000 if kind in ("large", "into a tensor", "half") else 5
    x = torch.full((numel,), 2.0 ** shoal.rank())
    out = torch.zeros(numel, 2)[:, 1] if strided else torch.zeros(numel)
    result = CALLS[kind](x, out)
    if kind == "into a tensor":
        assert result is out
    assert (result == result[0]).all()
    if kind == "in place":
        assert (x[:3] == result).all()
    shoal.barrier()
    engine.result_transfer.send = send  # type: ignore[method-assign]
    return result[:1].tolist(), sum(name == "last" for _, name, _ in handed_on), shoal.alive()


@over_both
@pytest.mark.parametrize("kinds", [["small", "large", "gathered"], ["into a tensor", "half", "barrier"], ["in place"]])
def test_a_result_missing_because_of_a_failure_is_transferred(environment: dict[str, Any], kinds: list[str]) -> None:
    with World(SIZE, environment=environment | CONTINUE) as world:
        left = list(range(SIZE))
        for kind in kinds:
            # The first agent owns numbers of a sum, and dies when it has sent them to one; else it is the last.
            owned = kind not in ("gathered", "barrier")
            victim, only = (left[0], left[1]) if owned else (left[-1], left[0])
            number = 1 if kind == "gathered" else 2
            before, left = left, [rank for rank in left if rank != victim]
            pending = [
                world.run_on(rank, result_after_a_death, kind, victim, number, only, SIZE % 2 == 1) for rank in before
            ]
            outcomes = [one.outcome() for one in pending]
            assert outcomes.pop(before.index(victim)).error == "Died"
            assert not [f"{outcome.error}: {outcome.message}\n{outcome.trace}" for outcome in outcomes if outcome.error]
            total = 0.0 if kind == "barrier" else float(sum(2**rank for rank in before))
            assert [outcome.value[0] for outcome in outcomes] == [[total]] * len(left)
            by_rank = [outcome.value[1] for outcome in outcomes]
            assert sum(by_rank) >= 1 and (kind == "barrier" or by_rank == [len(left) - 1, *[0] * (len(left) - 1)])
            assert [outcome.value[2] for outcome in outcomes] == [tuple(left)] * len(left)
