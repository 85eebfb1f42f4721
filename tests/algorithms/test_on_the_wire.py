"""The bytes that an algorithm's counters report equal the bytes that the machine's network interface has sent."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

import shoal
from shoal.algorithms import (
    BEER,
    Algorithm,
    CensoredGradientDescent,
    ChocoSGD,
    DeepSqueeze,
    GradientDescent,
    LocalSteps,
    LowPrecision,
    PowerGossip,
    run,
)
from shoal.compression import QSGD, Cast, MinMaxUInt8, RandomK, Shrunk, Sign, TopK, Zstd
from shoal.topology.families.static import ring
from support.namespaces import bytes_sent_by_the_interface, network_namespaces
from support.world import World

NUMEL, STEPS = 1_000_000, 10
MESSAGES, OVERHEAD = 2 * STEPS + 4, 400
"""At most, and of each the bytes that are no numbers: Ethernet's, TCP's and Shoal's headers, and acknowledgements."""
ALGORITHMS: dict[str, Algorithm] = {
    "plain": GradientDescent(0.1),
    "CHOCO, top 1%": ChocoSGD(0.1, 0.1, TopK(0.01)),
    "CHOCO, 1 bit": ChocoSGD(0.1, 0.1, Sign()),
    "CHOCO, 4 bits": ChocoSGD(0.1, 0.1, Shrunk(QSGD(7))),
    "DeepSqueeze, random 10%": DeepSqueeze(0.1, 0.05, RandomK(0.1)),
    "DeepSqueeze, with local steps": LocalSteps(DeepSqueeze(0.1, 0.05, RandomK(0.1)), every=2),
    "BEER, top 5%": BEER(0.05, 0.2, TopK(0.05)),
    "low precision": LowPrecision(0.1, MinMaxUInt8()),
    "low precision, bfloat16": LowPrecision(0.1, Cast(torch.bfloat16)),
    "low precision, zstd": LowPrecision(0.1, Zstd(MinMaxUInt8())),
    "PowerGossip": PowerGossip(0.1),
    "censored": CensoredGradientDescent(0.1, 500.0, 0.9),
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with network_namespaces(2) as machines, World(2, namespaces=machines) as world:
        yield world


def sent(name: str) -> tuple[int, int, int]:
    """By the books of the algorithm, by those of the engine, and by the interface."""
    draw = torch.Generator().manual_seed(shoal.rank())
    start, target = (torch.randn(NUMEL, generator=draw) for _ in range(2))
    shoal.barrier()
    time.sleep(0.1)  # what acknowledges it may come late
    before = shoal.observability.bytes_sent(), bytes_sent_by_the_interface()
    result = run(ALGORITHMS[name], start, lambda x: x - target, ring(2), STEPS, every=0)
    time.sleep(0.1)
    shoal.barrier()
    return result.sent, shoal.observability.bytes_sent() - before[0], bytes_sent_by_the_interface() - before[1]


@pytest.mark.transport("network")
@pytest.mark.transport("namespaces")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_counted_bytes_are_those_of_the_network_interface(world: World, name: str) -> None:
    for books, engine, wire in world.results(sent, name):
        assert engine == books
        assert books < wire < 1.03 * books + OVERHEAD * MESSAGES, (books, wire)
        if name == "plain":
            assert books == STEPS * 4 * NUMEL
        elif name != "low precision, bfloat16":
            assert books < 0.45 * STEPS * 4 * NUMEL
