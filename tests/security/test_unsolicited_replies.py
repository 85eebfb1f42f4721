"""Nobody answers for another agent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import shoal
from shoal.runtime.agent import current
from shoal.transport.messages import Kind, Message

Fleets = Callable[..., shoal.Fleet]


@pytest.mark.parametrize("kind", [Kind.DONE, Kind.REFUSE], ids=lambda kind: kind.name)
def test_memory_that_others_read_is_not_released_by_a_third_agents_message(fleet: Fleets, kind: Kind) -> None:
    """Rank 2 guesses every token that rank 0 has sent to rank 1."""

    def run() -> list[tuple[int, int]]:
        engine = current().engine
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        x = torch.full((70_000,), 1.0)
        results = []
        for step in range(4):
            handle = shoal.nonblocking.neighbor_allreduce(x + step, name="large")
            if shoal.rank() == 0:
                with engine.lock:
                    others = {token for token, sent in engine.sender._unacknowledged.items() if sent.receiver == 1}
                    for token in others:
                        engine.dispatch.on_message(2, Message(kind, name="nobody's", token=token))
                    results.append((len(others), len(others & engine.sender._unacknowledged.keys())))
            assert torch.equal(handle.wait(), x + step)
            shoal.barrier(name=f"step {step}")
        return results

    result, *_ = fleet(3).run(run)
    assert sum(before for before, _ in result) > 0
    assert all(before == after for before, after in result)
