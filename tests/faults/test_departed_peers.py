"""An agent that leaves with ``shutdown()`` while others need it is a loss, in the same words and extent on all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from shoal.execution.membership import NEEDED
from shoal.execution.operation import SAME_CALLS

SIZE, LEAVES = 4, 3
Fleets = Callable[..., shoal.Fleet]


def failure(call: Callable[[], Any]) -> tuple[str, tuple[int, ...], str]:
    """The error of a call: its type, its ranks, and its text about the agent that left."""
    with pytest.raises(shoal.ShoalError) as caught:
        call()
    text = str(caught.value)
    return type(caught.value).__name__, caught.value.ranks, text[text.find(f"rank {LEAVES} ") :]


EXPECTED = (
    "PeerLost",
    (LEAVES,),
    f"rank {LEAVES} {NEEDED.removeprefix('it ')}. {SAME_CALLS}; the agents that are left can shut down and start again",
)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_all_agents_raise_whichever_agent_detects_it_first(fleet: Fleets, first: int) -> None:
    """One agent needs the departed one. The others wait in calls among themselves, which end on all of them."""
    left, waits = threading.Event(), threading.Barrier(SIZE - 1)

    def run() -> list[Any]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(SIZE))
        shoal.barrier()
        rank = shoal.rank()
        if rank == LEAVES:
            shoal.shutdown()
            left.set()
            return []
        assert left.wait(30)
        others = [index for index in range(SIZE) if index not in (rank, LEAVES)]
        among = shoal.nonblocking.allgather(torch.ones(1), name="others", group=[0, 1, 2]) if rank != first else None
        waits.wait(30)
        results = [failure(lambda: shoal.neighbor_allreduce(torch.ones(3)))] if rank == first else []
        if among is not None:
            results.append(failure(among.wait))
        results.append(
            failure(lambda: shoal.neighbor_allreduce(torch.ones(2), 0.5, {others[0]: 0.5}, {others[0]: 0.5}))
        )
        return results

    assert fleet(SIZE).run(run) == [[EXPECTED] * 2] * (SIZE - 1) + [[]]
