"""Operations with ``zero_copy``: the tensor is read where it lies, and they end when all have read it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import shoal
from shoal.ops import hierarchical, neighbor
from shoal.ops.collective import submit_allreduce
from shoal.runtime.agent import current
from shoal.topology import Mixing

Fleets = Callable[..., shoal.Fleet]
LARGE = 100_000


@pytest.mark.links("who sends may go on before who reads has come")
@pytest.mark.parametrize("zero_copy", [True, False])
def test_the_sender_waits_for_its_reader_if_nothing_was_copied(fleet: Fleets, zero_copy: bool) -> None:
    """Rank 0 only sends, so it returns without waiting if it has sent a copy."""

    def run() -> tuple[bool, float]:
        engine = current().engine
        tensor = engine.arena.empty((LARGE,), torch.float32).fill_(float(1 + shoal.rank()))
        if shoal.rank() == 1:
            shoal.barrier()
            results = shoal.neighbor_allreduce(tensor, 0.5, {0: 0.5}, [], enable_topo_check=False)
            return True, results.mean().item()
        handle = neighbor.submit(current(), tensor, Mixing(0, 1.0, {}, [1]), zero_copy=zero_copy)
        time.sleep(0.1)
        early = handle.poll()
        if not zero_copy:
            tensor.fill_(9.0)
        shoal.barrier()
        handle.wait()
        tensor.fill_(9.0)
        return early, 0.0

    (early, _), (_, result) = fleet(2).run(run)
    assert early != zero_copy
    assert result == 1.5


@pytest.mark.links("who sends may go on before who reads has come")
def test_memory_is_not_reused_while_it_is_read(fleet: Fleets) -> None:
    """Also if its owner drops it, and allocates as much memory again."""

    def run() -> float:
        engine = current().engine
        if shoal.rank() == 1:
            shoal.barrier()
            own = torch.full((LARGE,), 2.0)
            return shoal.neighbor_allreduce(own, 0.5, {0: 0.5}, [], enable_topo_check=False).mean().item()
        tensor = engine.arena.empty((LARGE,), torch.float32).fill_(1.0)
        neighbor.submit(current(), tensor, Mixing(0, 1.0, {}, [1]), zero_copy=True)
        del tensor
        others = [engine.arena.empty((LARGE,), torch.float32).fill_(9.0) for _ in range(3)]
        shoal.barrier()
        return others[0].mean().item()

    assert fleet(2).run(run) == [9.0, 1.5]


@pytest.mark.parametrize("what", ["elsewhere", "not contiguous", "small"])
def test_memory_that_others_cannot_read_is_copied(fleet: Fleets, what: str) -> None:
    def run() -> float:
        tensor = {
            "elsewhere": lambda: torch.empty(LARGE),
            "not contiguous": lambda: current().engine.arena.empty((LARGE,), torch.float32).view(-1, 100).t(),
            "small": lambda: current().engine.arena.empty((8,), torch.float32),
        }[what]()
        tensor.fill_(float(shoal.rank()))
        handle = submit_allreduce(current(), tensor, "average", zero_copy=True)
        tensor.fill_(9.0)
        return handle.wait().mean().item()

    assert fleet(3).run(run) == [1.0] * 3


@pytest.mark.parametrize("operation", ["allreduce", "hierarchical", "neighbors"])
def test_every_operation_gives_the_same_bits_on_shared_memory(fleet: Fleets, operation: str) -> None:
    def run() -> bool:
        engine = current().engine
        shoal.bluefog.set_machine_topology(shoal.topology.RingGraph(2))

        def call(tensor: torch.Tensor, zero_copy: bool) -> torch.Tensor:
            agent = current()
            if operation == "allreduce":
                return submit_allreduce(agent, tensor, "average", zero_copy=zero_copy).wait()
            if operation == "hierarchical":
                return hierarchical.submit(agent, tensor, None, zero_copy=zero_copy).wait()
            return neighbor.submit(agent, tensor, None, zero_copy=zero_copy).wait()

        tensor = engine.arena.empty((LARGE,), torch.float32)
        tensor.copy_(torch.randn(LARGE, generator=torch.Generator().manual_seed(shoal.rank())))
        return torch.equal(call(tensor, True), call(tensor, False))

    assert all(fleet(4, agents_per_machine=2).run(run))
