"""The functions of agents, in their own processes, with tensors on a slow device."""

from __future__ import annotations

import torch

import shoal
from support.fault_points import Point, arm
from support.slow_device import Slow, in_use, to_device

NUMEL = 50_000


def _average_on_a_ring(alive: tuple[int, ...]) -> None:
    """A round over a ring of the current members, checked."""
    rank, place = shoal.rank(), alive.index(shoal.rank())
    others = sorted({alive[place - 1], alive[(place + 1) % len(alive)]} - {rank})
    weight = 1 / (len(others) + 1)
    own = to_device(torch.full((NUMEL,), float(rank)))
    result = shoal.neighbor_allreduce(own, weight, dict.fromkeys(others, weight), others, timeout=20.0)
    assert isinstance(result, Slow)
    expected = torch.tensor((rank + sum(others)) * weight)
    assert torch.allclose(result.cpu(), expected), f"{result.cpu()} instead of {expected}"


def average_until_it_fails(victim: int, point: Point) -> None:
    """Round after round; ends with the error of the round that fails."""
    if shoal.rank() == victim:
        arm(point)
    with in_use():
        shoal.barrier()  # memory that came before would have been mapped by CUDA
        while True:
            _average_on_a_ring(tuple(range(shoal.size())))


def average_through_a_loss(victim: int, point: Point, rounds: int) -> tuple[int, ...]:
    """Rounds on the static topology while one is lost, and after it; the latter as on the CPU, to the bit."""
    if shoal.rank() == victim:
        arm(point)
    own = torch.arange(NUMEL) * (shoal.rank() + 0.25)
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    with in_use():
        shoal.barrier()
        for _ in range(4 * rounds):  # the victim is killed in one of them
            assert bool(shoal.neighbor_allreduce(to_device(own)).cpu().isfinite().all())
        shoal.barrier()  # after this all agree on the members
        for _ in range(rounds):
            on_device = shoal.neighbor_allreduce(to_device(own), name="there")
            assert isinstance(on_device, Slow)
            assert torch.equal(on_device.cpu(), shoal.neighbor_allreduce(own, name="on the CPU"))
    return shoal.alive()
