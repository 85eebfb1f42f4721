"""Operations on a tensor that is lent: it is read where it lies, and they end when all have read it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import shoal
from shoal.world.agent import current

Fleets = Callable[..., shoal.Fleet]
LARGE = 100_000


@pytest.mark.parametrize("lent", [True, False])
def test_the_sender_waits_for_its_reader_where_nothing_was_copied(fleet: Fleets, lent: bool) -> None:
    """Rank 0 only sends, so it need not wait for anybody if it has sent a copy."""

    def run() -> tuple[bool, float]:
        engine = current().engine
        tensor = engine.arena.empty((LARGE,), torch.float32).fill_(float(1 + shoal.rank()))
        if shoal.rank() == 1:
            shoal.barrier()
            found = shoal.neighbor_allreduce(tensor, 0.5, {0: 0.5}, [], enable_topo_check=False)
            return True, found.mean().item()
        if lent:
            with engine.publisher.lending(tensor):
                handle = shoal.neighbor_allreduce_nonblocking(tensor, 1.0, {}, [1], enable_topo_check=False)
        else:
            handle = shoal.neighbor_allreduce_nonblocking(tensor, 1.0, {}, [1], enable_topo_check=False)
        time.sleep(0.1)
        early = handle.poll()
        if not lent:
            tensor.fill_(9.0)
        shoal.barrier()
        handle.wait()
        tensor.fill_(9.0)
        return early, 0.0

    (early, _), (_, found) = fleet(2).run(run)
    assert early != lent
    assert found == 1.5


def test_it_is_given_back_to_nobody_while_it_is_read(fleet: Fleets) -> None:
    """Also where its owner lets go of it, and asks for as much memory again."""

    def run() -> float:
        engine = current().engine
        if shoal.rank() == 1:
            shoal.barrier()
            mine = torch.full((LARGE,), 2.0)
            return shoal.neighbor_allreduce(mine, 0.5, {0: 0.5}, [], enable_topo_check=False).mean().item()
        tensor = engine.arena.empty((LARGE,), torch.float32).fill_(1.0)
        with engine.publisher.lending(tensor):
            shoal.neighbor_allreduce_nonblocking(tensor, 1.0, {}, [1], enable_topo_check=False)
        del tensor
        others = [engine.arena.empty((LARGE,), torch.float32).fill_(9.0) for _ in range(3)]
        shoal.barrier()
        return others[0].mean().item()

    assert fleet(2).run(run) == [9.0, 1.5]


def test_other_tensors_are_copied_meanwhile(fleet: Fleets) -> None:
    def run() -> float:
        engine = current().engine
        tensor = engine.arena.empty((LARGE,), torch.float32).fill_(1.0)
        other = torch.full((LARGE,), float(shoal.rank()))
        with engine.publisher.lending(tensor):
            handle = shoal.allreduce_nonblocking(other)
        other.fill_(9.0)
        return handle.wait().mean().item()

    assert fleet(3).run(run) == [1.0] * 3


@pytest.mark.parametrize("operation", ["allreduce", "hierarchical", "neighbors"])
def test_every_operation_gives_the_same_bits_on_it(fleet: Fleets, operation: str) -> None:
    def run() -> bool:
        engine = current().engine
        shoal.set_machine_topology(shoal.RingGraph(2))
        call = {
            "allreduce": shoal.allreduce_nonblocking,
            "hierarchical": shoal.hierarchical_neighbor_allreduce_nonblocking,
            "neighbors": shoal.neighbor_allreduce_nonblocking,
        }[operation]
        tensor = engine.arena.empty((LARGE,), torch.float32)
        tensor.copy_(torch.randn(LARGE, generator=torch.Generator().manual_seed(shoal.rank())))
        plain = call(tensor).wait()
        with engine.publisher.lending(tensor):
            handle = call(tensor)
        return torch.equal(handle.wait(), plain)

    assert all(fleet(4, agents_per_machine=2).run(run))
