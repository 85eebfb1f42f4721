"""Processes give the same bits as threads, whatever carries them: shared memory, TCP, or both between machines."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

import shoal
from support.exchanges import EXCHANGES, Bits, Exchange, bits_of, times_of_a_barrier
from support.namespaces import network_namespaces
from support.world import World


@dataclass(frozen=True)
class Kind:
    """A placement of agents: how many, on machines of how many, and with which forced transport."""

    size: int
    per_machine: int
    transport: str = ""
    namespaces: int = 0

    def __str__(self) -> str:
        where = f"{self.namespaces} namespaces" if self.namespaces else self.transport or "shared_memory"
        return f"{self.size} agents, {where}"


def kind(one: Kind) -> object:
    names = {one.transport or "shared_memory"}
    if one.namespaces:
        names = {"network", "namespaces"} | (names if one.size > one.namespaces else set())
    return pytest.param(one, id=str(one), marks=[pytest.mark.transport(name) for name in sorted(names)])


KINDS = [
    kind(Kind(2, 1)),
    kind(Kind(3, 3)),
    kind(Kind(4, 2)),
    kind(Kind(2, 1, "network")),
    kind(Kind(4, 2, "network")),
    kind(Kind(3, 1, namespaces=3)),
    kind(Kind(4, 2, namespaces=2)),
]


@pytest.fixture(scope="module", params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[tuple[Kind, World]]:
    one: Kind = request.param
    environment = {"SHOAL_TRANSPORT": one.transport} if one.transport else {}
    if not one.namespaces:
        environment["SHOAL_AGENTS_PER_MACHINE"] = str(one.per_machine)
    with contextlib.ExitStack() as stack:
        machines = stack.enter_context(network_namespaces(one.namespaces)) if one.namespaces else ()
        yield one, stack.enter_context(World(one.size, environment=environment, namespaces=machines))


@functools.cache
def in_threads(exchange: Exchange, size: int, per_machine: int) -> list[Bits]:
    return shoal.Fleet(size, agents_per_machine=per_machine, transport="threads").run(bits_of, exchange)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda one: one.__name__)
def test_processes_give_the_bits_of_threads(world: tuple[Kind, World], exchange: Exchange) -> None:
    one, agents = world
    expected = in_threads(exchange, one.size, one.per_machine)
    for rank, result in enumerate(agents.results(bits_of, exchange)):
        assert [each[:2] for each in result] == [each[:2] for each in expected[rank]]
        different = [each[:2] for each, other in zip(result, expected[rank], strict=True) if each != other]
        assert not different, f"rank {rank} has other bits for {different}"


def test_a_barrier_ends_after_all_have_arrived(world: tuple[Kind, World]) -> None:
    one, agents = world
    for late in range(one.size):
        times = agents.results(times_of_a_barrier, late)
        assert max(arrived for arrived, _ in times) <= min(went for _, went in times)
