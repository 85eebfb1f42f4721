"""Ten thousand rounds between processes, in constant memory and without a descriptor more. Run by ``make soak``."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest
import torch

import shoal
from shoal.runtime.agent import current
from support.agent_main import holdings
from support.leftovers import resident_bytes
from support.world import World

ROUNDS, WARM = 10_000, 1_000
SPARE_BYTES = 8 << 20
"""What the allocators may still add after a thousand rounds; a leak of one small tensor a round is more."""
NETWORK = {"SHOAL_TRANSPORT": "network"}
OVER = [
    pytest.param({}, id="shared_memory", marks=pytest.mark.transport("shared_memory")),
    pytest.param(NETWORK, id="network", marks=pytest.mark.transport("network")),
]


@dataclass(frozen=True)
class Usage:
    """The resources of an agent at one moment."""

    arena: int
    resident: int
    descriptors: int
    threads: int


def usage() -> Usage:
    held = holdings()
    return Usage(current().engine.arena.nbytes, resident_bytes(), len(held.descriptors), len(held.threads))


def average_in_every_form(rounds: int) -> tuple[Usage, Usage]:
    """The resources in use after the first thousand rounds, and after all."""
    rank, size = shoal.rank(), shoal.size()
    shoal.set_topology(shoal.topology.RingGraph(size))
    small, large = torch.full((16,), float(rank)), torch.full((40_000,), float(rank))
    out = torch.empty_like(large)
    before = None
    for step in range(rounds):
        if step == WARM:
            shoal.barrier()
            before = usage()
        shoal.neighbor_allreduce(large, out=out)
        handle = shoal.nonblocking.neighbor_allreduce(small, name=f"bucket {step % 7}")
        ahead, behind = (rank + 1 + step % (size - 1)) % size, (rank - 1 - step % (size - 1)) % size
        shoal.neighbor_allreduce(small, self_weight=0.5, src_weights={behind: 0.5}, dst_weights={ahead: 1.0})
        handle.wait()
        if step % 10 == 0:
            shoal.allreduce(large)
            shoal.neighbor_allreduce(small, self_weight=0.5, dst_weights={ahead: 0.5})
            shoal.neighbor_allgather(large[: 1000 + step % 50])
    shoal.barrier()
    assert before is not None
    return before, usage()


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("environment", OVER)
def test_ten_thousand_rounds_take_no_more_memory_than_a_thousand(environment: dict[str, str]) -> None:
    with World(3, environment=environment, timeout=60.0) as world:
        for before, after in world.results(average_in_every_form, ROUNDS, patience=850.0):
            assert after.arena == before.arena
            assert after.resident - before.resident < SPARE_BYTES
            assert (after.descriptors, after.threads) == (before.descriptors, before.threads)


def init_and_shut_down(times: int) -> tuple[Usage, Usage]:
    """The resources in use after ten cycles of init and shutdown, and after all.

    Memory is that of the last agent; descriptors and threads are counted without one, whose peers may still connect.
    """
    result = []
    for life in range(times):
        shoal.init()
        shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
        shoal.neighbor_allreduce(torch.ones(100_000))
        used = usage()
        shoal.shutdown()
        if life in (10, times - 1):
            time.sleep(0.5)  # a thread that has been joined still exists in the kernel for a moment
            left = holdings()
            result.append(replace(used, descriptors=len(left.descriptors), threads=len(left.threads)))
    before, after = result
    return before, after


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("environment", OVER)
def test_two_hundred_init_shutdown_cycles_leave_nothing_in_the_process(environment: dict[str, str]) -> None:
    with World(3, environment=environment, init=False, timeout=60.0) as world:
        for before, after in world.results(init_and_shut_down, 200, patience=280.0):
            assert after.arena == before.arena
            assert after.resident - before.resident < SPARE_BYTES
            assert (after.descriptors, after.threads) == (before.descriptors, before.threads)
